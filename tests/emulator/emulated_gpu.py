"""What the tests of the stand-in for libcuda run, in a process of its own.

FA4_JAX_LIBCUDA and FA4_JAX_KERNELS have effect on a whole process, so these functions are run by
the fixture `gpu`, never by the test process itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import hashlib
import os
import pathlib
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from fa4_jax import attention, doctor, ffi_call, parallel, runtime
from fa4_jax.conformance.cases import Case
from fa4_jax.conformance.compare import Verdict
from fa4_jax.conformance.oracle import make_inputs
from fa4_jax.conformance.runner import arguments, compute, run_case
from fa4_jax.key import KernelKey, Pass
from fa4_jax.manifest import Cubin, Factor, Launch, Param, Result
from fa4_jax.plan import Kernel
from kernels.emulator.driver.driver import SETTINGS_VARIABLE
from tests.programs import launched_kernels


@contextlib.contextmanager
def settings(text: str) -> Generator[None]:
    """Adds to the settings of the emulated device while the context is open."""
    before = os.environ.get(SETTINGS_VARIABLE, "")
    os.environ[SETTINGS_VARIABLE] = f"{before} {text}"
    try:
        yield
    finally:
        os.environ[SETTINGS_VARIABLE] = before


def verdicts(case: Case, seed: int, how: str, gradients: bool = True) -> list[Verdict]:
    """Conformance of a case, by kernels alone."""
    with settings(how):
        return run_case(case, seed, "kernel", gradients)


def results(case: Case, seed: int, how: str, gradients: bool = True) -> dict[str, np.ndarray]:
    """Everything that a case computes, by kernels alone."""
    with settings(how):
        return compute(case, make_inputs(case, seed), "kernel", gradients)


def _forward(*operands: Any, implementation: Any = "kernel", **options: Any) -> Any:
    return attention(*operands, implementation=implementation, return_residual=True, **options)


def vmapped_and_looped(case: Case, seed: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Output, LSE and dq of a case over an extra leading axis: by vmap, and one by one."""
    inputs = [make_inputs(case, seed + i) for i in range(2)]
    stacked = [
        jnp.stack([jnp.asarray(getattr(x, name)) for x in inputs])
        for name in ("query", "key", "value")
    ]

    def everything(*operands: jax.Array) -> Any:
        output, lse = _forward(*operands, **arguments(case))
        dq = jax.grad(lambda q: _forward(q, *operands[1:], **arguments(case))[1].sum())
        return output, lse, dq(operands[0])

    together = jax.jit(jax.vmap(everything))(*stacked)
    apart = [jax.jit(everything)(*(x[i] for x in stacked)) for i in range(2)]
    return [np.asarray(x) for x in together], [np.stack(x) for x in zip(*apart, strict=True)]


def vmapped_over_queries(
    case: Case, count: int, seed: int
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Results of several queries of the same keys: by vmap, and one by one."""
    inputs = make_inputs(case, seed)
    queries = jnp.stack([jnp.asarray(make_inputs(case, seed + i).query) for i in range(count)])

    def call(query: jax.Array) -> Any:
        key, value = jnp.asarray(inputs.key), jnp.asarray(inputs.value)
        return _forward(query, key, value, sinks=inputs.sinks, **arguments(case))

    together = jax.jit(jax.vmap(call))(queries)
    apart = zip(*(jax.jit(call)(query) for query in queries), strict=True)
    return [np.asarray(x, np.float32) for x in together], [
        np.stack([np.asarray(x, np.float32) for x in some]) for some in apart
    ]


def vmapped_with_bias(
    case: Case, seed: int
) -> tuple[list[np.ndarray], list[np.ndarray], list[str], list[str]]:
    """Gradients of two queries with biases of their own, by vmap and one by one; and the kernels
    of a program with, and of one without, the gradient of a bias.
    """
    inputs = [make_inputs(case, seed + i) for i in range(2)]
    query, bias = (np.stack([getattr(x, name) for x in inputs]) for name in ("query", "bias"))
    key, value = jnp.asarray(inputs[0].key), jnp.asarray(inputs[0].value)

    def loss(query: jax.Array, bias: jax.Array) -> jax.Array:
        output, lse = _forward(query, key, value, bias)
        return output.astype(jnp.float32).sum() + lse.sum()

    gradient = jax.grad(loss, (0, 1))
    together = jax.jit(jax.vmap(gradient))(query, bias)
    apart = [jax.jit(gradient)(query[i], bias[i]) for i in range(2)]

    def kernels(function: Any) -> list[str]:
        text = jax.jit(function).lower(query[0], bias[0]).compile().as_text()
        assert text is not None
        return launched_kernels(text)

    return (
        [np.asarray(x, np.float32) for x in together],
        [np.stack([np.asarray(x, np.float32) for x in some]) for some in zip(*apart, strict=True)],
        kernels(gradient),
        kernels(jax.grad(loss)),
    )


def on_two_devices(scheme: Any, options: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """Results of context parallelism by kernels, each with the default path's on one device."""
    mesh, rng = jax.make_mesh((2,), scheme.axes), np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 128, n, 64)), jnp.bfloat16) for n in (4, 2, 2))
    common: dict[str, Any] = {"return_residual": True, "return_max_logit": True, **options}
    expected = attention(q, k, v, implementation="xla", **common)
    if scheme.layout == "zigzag":
        q, k, v = (parallel.to_zigzag(x, 2) for x in (q, k, v))
    output, lse, largest = parallel.attention(
        *(q, k, v),
        scheme=scheme,
        mesh=mesh,
        specs=PartitionSpec(None, scheme.axes),
        implementation="kernel",
        **common,
    )
    if scheme.layout == "zigzag":
        output, lse = parallel.from_zigzag(output, 2), parallel.from_zigzag(lse, 2, 2)
    found = output, lse, largest
    return [
        (np.asarray(x, np.float32), np.asarray(y, np.float32))
        for x, y in zip(found, expected, strict=True)
    ]


def from_threads(cases: list[Case], seed: int) -> list[list[Verdict]]:
    """Conformance of several cases at the same time, each from a thread of its own."""
    with ThreadPoolExecutor(len(cases)) as pool:
        return list(pool.map(lambda case: run_case(case, seed, "kernel", False), cases))


def error_of_broken_kernel(
    case: Case, changes: Mapping[str, str], folder: pathlib.Path, how: str
) -> tuple[str, list[Verdict]]:
    """Errors of attention when lines of the forward's PTX are replaced, and when they are not."""
    installed = runtime.manifest()
    assert installed is not None
    key = KernelKey("sm_90a", Pass.FORWARD, case.dtype, case.head_dim)
    whole = installed.cubins[key]
    text = (installed.directory / whole.file).read_text()
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    runtime.add_kernels([_stored(whole, text, folder)], folder)
    error = _error(lambda: verdicts(case, 0, how, gradients=False))
    runtime.add_kernels([whole], installed.directory)
    return error, verdicts(case, 0, how, gradients=False)


def error_with_cubins() -> str:
    """What attention raises when the folder of kernels holds cubins."""
    installed = runtime.manifest()
    assert installed is not None
    whole = installed.cubins[KernelKey("sm_90a", Pass.FORWARD, "bf16", 64)]
    binary = dataclasses.replace(whole, file="a.cubin")
    folder = pathlib.Path(os.environ[runtime.KERNELS_VARIABLE])
    (folder / "a.cubin").write_bytes(b"\x7fELF")
    digest = hashlib.sha256(b"\x7fELF").hexdigest()
    runtime.add_kernels([dataclasses.replace(binary, sha256=digest)], folder)
    case = Case(batch=1, heads=(1, 1), query_length=150)
    error = _error(lambda: verdicts(case, 0, "", gradients=False))
    runtime.add_kernels([whole], installed.directory)
    return error


COPY = """
.version 8.8
.target sm_90a
.address_size 64
.visible .entry copy(.param .u64 copy_param_0, .param .u64 copy_param_1)
.reqntid 32, 1, 1
{{
.reg .b32 %r<9>;
.reg .b64 %rd<9>;
ld.param.b64 %rd1, [copy_param_0];
ld.param.b64 %rd2, [copy_param_1];
mov.u32 %r1, %tid.x;
mul.wide.u32 %rd3, %r1, 4;
add.s64 %rd1, %rd1, %rd3;
add.s64 %rd2, %rd2, %rd3;
ld.global.b32 %r2, [%rd1];
{body}
ret;
}}
"""
"""A warp moves 32 words from x to y; `body` is how."""


def run_copy(x: np.ndarray, body: str, folder: pathlib.Path) -> np.ndarray | str:
    """Returns y of a program that COPY makes for x, f32[32], or the error."""
    key = KernelKey("sm_90a", Pass.FORWARD, "bf16", 8)
    launch = Launch(
        operands=("x",),
        results=(Result("y", "f32", ((_extent("x"),),)),),
        params=(Param("x", "pointer", "x"), Param("y", "pointer", "y")),
        grid=((_extent("x", 32),), (_extent(None),), (_extent(None),)),
        block=(32, 1, 1),
        dynamic_smem_bytes=0,
    )
    record = Cubin(key, launch, "copy", "", "", 32, 0, {})
    runtime.add_kernels([_stored(record, COPY.format(body=body), folder)], folder)
    got: list[np.ndarray] = []

    def call() -> None:
        run = jax.jit(lambda x: ffi_call.launch([Kernel(key, launch)], {"x": x}, {})["y"])
        got.append(np.asarray(run(jnp.asarray(x))))

    return _error(call) or got[0]


def _extent(buffer: str | None, divisor: int = 1) -> Any:
    return Factor(buffer=buffer, divisor=divisor)


def _stored(record: Cubin, text: str, folder: pathlib.Path) -> Cubin:
    path = folder / f"{record.key.name}.ptx"
    path.write_text(text)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return dataclasses.replace(record, file=path.name, sha256=digest)


def _error(call: Callable[[], Any]) -> str:
    try:
        call()
    except jax.errors.JaxRuntimeError as error:
        return str(error)
    return ""


def device(how: str) -> tuple[str | None, str | None]:
    """Architecture of the device, and why no kernel can run."""
    with settings(how):
        return runtime.device_arch(), runtime.why_unavailable()


def doctor_report() -> list[str]:
    """The lines of `doctor`."""
    return doctor.report()


def driver_results() -> dict[str, int]:
    """CUresults of calls that the handler never makes."""
    driver = ctypes.CDLL(os.environ[runtime.STAND_IN_VARIABLE])
    installed = runtime.manifest()
    assert installed is not None
    record = installed.cubins[KernelKey("sm_90a", Pass.FORWARD, "bf16", 64)]
    image = (installed.directory / record.file).read_bytes()
    library, kernel, other = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    none = (None,) * 2
    found = driver.cuLibraryLoadData(ctypes.byref(library), image, *none, 0, *none, 0)
    assert found == 0
    buffer = (ctypes.c_char * 64)()
    start = ctypes.addressof(buffer)
    get = driver.cuLibraryGetKernel
    answers = {
        "unknown kernel": get(ctypes.byref(other), library, b"no_such"),
        "kernel": get(ctypes.byref(kernel), library, record.symbol.encode()),
        "register": driver.cuMemHostRegister_v2(ctypes.c_void_p(start), 64, 0),
        "overlap": driver.cuMemHostRegister_v2(ctypes.c_void_p(start + 32), 8, 0),
        "unregister": driver.cuMemHostUnregister(ctypes.c_void_p(start)),
        "unregister again": driver.cuMemHostUnregister(ctypes.c_void_p(start)),
        "attribute": driver.cuDeviceGetAttribute(ctypes.byref(ctypes.c_int()), 1, 0),
        "device": driver.cuDeviceGetAttribute(ctypes.byref(ctypes.c_int()), 75, 1),
    }
    config = _LaunchConfig(*(1, 1, 1), *record.launch.block, record.launch.dynamic_smem_bytes)
    answers["shared memory"] = driver.cuLaunchKernelEx(ctypes.byref(config), kernel, None, None)
    return answers


class _LaunchConfig(ctypes.Structure):
    _fields_ = (
        *((f"size{i}", ctypes.c_uint32) for i in range(6)),
        ("dynamic_shared_bytes", ctypes.c_uint32),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint32),
    )
