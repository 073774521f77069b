"""Calls the FFI handler on JAX's CPU with the stand-in driver, in a process of its own.

FA4_JAX_LIBCUDA has effect on a whole process, so these functions are run by the fixture
`stand_in_process`, never by the test process itself.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import mmap
import os
import pathlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from fa4_jax.manifest import Cubin, evaluate_size

CAPABILITY_ATTRIBUTES = 75, 76  # the numbers of the device attributes: major, minor
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "f32": "float32", "i32": "int32"}


@dataclasses.dataclass(frozen=True)
class Array:
    """The shape and type of an operand."""

    dtype: str
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Call:
    """One FFI call.

    Attributes:
      cubin: the kernel's manifest record; `directory` holds the file.
      param_bytes: sizes of the kernel's parameters, for the log.
      operands: the operands in order.
      attributes: the attributes by name.
      results: results instead of those that the manifest asks for.
      alias: whether results named like operands share their memory.
    """

    cubin: Cubin
    directory: pathlib.Path
    param_bytes: tuple[int, ...]
    operands: tuple[Array, ...]
    attributes: dict[str, int | float | str]
    results: tuple[Array, ...] | None = None
    alias: bool = True


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a call did: the driver's log, the buffers' addresses by name, or the error."""

    log: list[dict[str, Any]]
    addresses: dict[str, int]
    error: str = ""

    @property
    def launches(self) -> list[dict[str, Any]]:
        """Returns the launches in the log."""
        return [event for event in self.log if event["event"] == "launch"]


def mock() -> ctypes.CDLL:
    """Returns the stand-in driver, for its mock_cuda_* functions."""
    library = ctypes.CDLL(os.environ["FA4_JAX_LIBCUDA"])
    library.mock_cuda_log.restype = ctypes.c_char_p
    return library


def run(call: Call, steer: Sequence[tuple[str, tuple[Any, ...]]] = ()) -> Outcome:
    """Makes a call. `steer` lists mock_cuda_* functions to call before, without the prefix."""
    _steer(steer)
    _add(call)
    return _run(_operation(call), call)


def run_all(
    calls: Sequence[Call], steer: Sequence[tuple[str, tuple[Any, ...]]] = ()
) -> list[Outcome]:
    """Makes several calls in one program, which is compiled once; every outcome has the whole log.

    The order of the launches is XLA's.
    """
    import jax

    _steer(steer)
    for call in {call.cubin.key: call for call in calls}.values():
        _add(call)
    operations = [_operation(call) for call in calls]
    operands = [_operands(call) for call in calls]

    def everything(operands: Any) -> list[Any]:
        return [operation(*own) for operation, own in zip(operations, operands, strict=True)]

    try:
        results = jax.block_until_ready(jax.jit(everything)(operands))
    except jax.errors.JaxRuntimeError as error:
        return [Outcome(_log(), {}, error=str(error))] * len(calls)
    log = _log()
    return [Outcome(log, _addresses(*one)) for one in zip(calls, operands, results, strict=True)]


def run_together(
    calls: Sequence[Call], steer: Sequence[tuple[str, tuple[Any, ...]]] = ()
) -> Outcome:
    """Launches the kernels of several calls in one call; operands of the same name are shared."""
    import jax

    from fa4_jax import ffi_call
    from fa4_jax.plan import Kernel

    _steer(steer)
    operands: dict[str, Any] = {}
    attributes: dict[str, Any] = {}
    made: set[str] = set()
    for call in calls:
        _add(call)
        launch = call.cubin.launch
        for name, array in zip(launch.operands, call.operands, strict=True):
            if name not in made:
                operands.setdefault(name, jax.device_put(_zeros(array), may_alias=True))
        made |= {result.name for result in launch.results}
        attributes |= call.attributes
    kernels = [Kernel(call.cubin.key, call.cubin.launch) for call in calls]
    operation = jax.jit(lambda operands: ffi_call.launch(kernels, operands, attributes))
    try:
        results = jax.block_until_ready(operation(operands))
    except jax.errors.JaxRuntimeError as error:
        return Outcome(_log(), {}, error=str(error))
    return Outcome(_log(), {n: _address(x) for n, x in (operands | results).items()})


def run_sequence(call: Call, devices: Sequence[int]) -> Outcome:
    """Makes the same call with one device after another current."""
    mock().mock_cuda_reset()
    _add(call)
    operation = _operation(call)
    outcome = Outcome([], {})
    for device in devices:
        mock().mock_cuda_set_device(device)
        outcome = _run(operation, call)
    return outcome


def run_threads(calls: Sequence[Call], repeats: int) -> Outcome:
    """Makes all calls `repeats` times over, each from a thread of its own."""
    mock().mock_cuda_reset()
    for call in calls:
        _add(call)

    def work(call: Call) -> list[str]:
        operation = _operation(call)
        return [_run(operation, call).error for _ in range(repeats)]

    with ThreadPoolExecutor(len(calls)) as pool:
        errors = [error for errors in pool.map(work, calls) for error in errors if error]
    return Outcome(_log(), {}, error="; ".join(errors))


def runtime_report(steer: Sequence[tuple[str, tuple[Any, ...]]] = ()) -> dict[str, Any]:
    """Returns what fa4_jax.runtime says here of a device that `steer` describes, as in `run`."""
    from fa4_jax import runtime

    _steer(steer)
    return {"arch": runtime.device_arch(), "why": runtime.why_unavailable()}


def _steer(steer: Sequence[tuple[str, tuple[Any, ...]]]) -> None:
    mock().mock_cuda_reset()
    for function, arguments in steer:
        values = (a.encode() if isinstance(a, str) else a for a in arguments)
        getattr(mock(), f"mock_cuda_{function}")(*values)


def _add(call: Call) -> None:
    from fa4_jax import runtime

    sizes = (ctypes.c_int * len(call.param_bytes))(*call.param_bytes)
    mock().mock_cuda_set_params(call.cubin.symbol.encode(), sizes, len(sizes))
    runtime.add_kernels([call.cubin], call.directory)


def _operation(call: Call) -> Callable[..., Any]:
    import jax

    from fa4_jax import runtime

    launch = call.cubin.launch
    shapes = {n: a.shape for n, a in zip(launch.operands, call.operands, strict=False)}
    results = call.results or tuple(
        Array(r.dtype, tuple(evaluate_size(size, shapes) for size in r.shape))
        for r in launch.results
    )
    aliases = {
        launch.operands.index(r.name): i
        for i, r in enumerate(launch.results)
        if call.alias and r.name in launch.operands
    }
    types = [jax.ShapeDtypeStruct(r.shape, _numpy_type(r.dtype)) for r in results]
    ffi_call = jax.ffi.ffi_call(runtime.TARGET, types, input_output_aliases=aliases)
    numpy_types = {float: np.float32, int: np.int32, str: str}
    attributes = {name: numpy_types[type(v)](v) for name, v in call.attributes.items()}
    return jax.jit(lambda *operands: ffi_call(*operands, **attributes))


def _run(operation: Callable[..., Any], call: Call) -> Outcome:
    import jax

    operands = _operands(call)
    try:
        results = jax.block_until_ready(operation(*operands))
    except jax.errors.JaxRuntimeError as error:
        return Outcome(_log(), {}, error=str(error))
    return Outcome(_log(), _addresses(call, operands, results))


def _operands(call: Call) -> list[Any]:
    import jax

    return [jax.device_put(_zeros(array), may_alias=True) for array in call.operands]


def _addresses(call: Call, operands: Sequence[Any], results: Sequence[Any]) -> dict[str, int]:
    launch = call.cubin.launch
    addresses = dict(zip(launch.operands, map(_address, operands), strict=True))
    # A result that aliases an operand comes last: XLA copies an operand that it may not overwrite.
    return addresses | {r.name: _address(x) for r, x in zip(launch.results, results, strict=True)}


def _zeros(array: Array) -> np.ndarray:
    """Allocates page-aligned memory that takes no space until it is touched, so that JAX does not
    copy it.
    """
    dtype = np.dtype(_numpy_type(array.dtype))
    count = int(np.prod(array.shape, dtype=np.int64))
    buffer = mmap.mmap(-1, max(count * dtype.itemsize, 1), flags=mmap.MAP_PRIVATE)
    return np.frombuffer(buffer, dtype, count).reshape(array.shape)


def _numpy_type(name: str) -> Any:
    import ml_dtypes

    return ml_dtypes.bfloat16 if name == "bf16" else np.dtype(DTYPES.get(name, name))


def _address(array: Any) -> int:
    return array.unsafe_buffer_pointer()


def _log() -> list[dict[str, Any]]:
    return [json.loads(line) for line in mock().mock_cuda_log().decode().splitlines()]
