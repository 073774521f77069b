"""The emulator as a driver: the Python half of ffi/testing/emulated_cuda.cc.

That library stands in for libcuda. It imports this module, which attaches the functions below:
they say what the emulated device is, check a kernel when it is loaded, and run launches, one at a
time, on the memory that the launching thread has registered. Results of a kernel of the folder that
FA4_JAX_KERNELS names start as NaN patterns, since its manifest names the buffers of results, unless
cuMemsetD32Async has filled them.

FA4_JAX_EMULATED_GPU chooses the device and the scheduling adversary by words "name=value": those of
`Settings` and `Policy`, e.g. "multiprocessors=4 schedule=starve asynchronous=random seed=7". It is
read at every launch. The n-th launch of a process runs with the seed plus n.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import os
import pathlib
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, get_args, get_type_hints

import numpy as np

from fa4_jax import manifest
from kernels.emulator.errors import EmulationError, PtxError
from kernels.emulator.launch import launch, prepare
from kernels.emulator.memory import uninitialised
from kernels.emulator.policy import Policy
from kernels.emulator.ptx.parser import parse

LIBRARY_VARIABLE = "FA4_JAX_LIBCUDA"
KERNELS_VARIABLE = "FA4_JAX_KERNELS"
SETTINGS_VARIABLE = "FA4_JAX_EMULATED_GPU"

_SUCCESS, _INVALID_VALUE, _NO_BINARY_FOR_GPU, _INVALID_PTX = 0, 1, 209, 218
_LAUNCH_FAILED, _NOT_SUPPORTED, _UNKNOWN = 719, 801, 999
_RESULT_OF_RULE = {"out-of-bounds": 700, "deadlock": 702, "livelock": 702, "misaligned": 716}
_TARGETS = {"9.0": ("sm_90a",), "10.0": ("sm_100a", "sm_100f")}


class _WrongTargetError(Exception):
    """The device cannot run PTX for this target."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """The emulated device, and how it runs.

    Attributes:
      capability: compute capability.
      multiprocessors: so few by default that the CTAs of a persistent kernel get several tiles.
      seed: of the first launch's choices.
      report: file to which every launch adds its report, a line of JSON.
    """

    capability: Literal["9.0", "10.0"] = "9.0"
    multiprocessors: int = 2
    seed: int = 0
    report: str = ""
    policy: Policy = dataclasses.field(default_factory=Policy)


def settings(text: str) -> Settings:
    """Settings from words "name=value".

    Raises:
      ValueError: a name or a value that is not known.
    """
    own: dict[str, Any] = {}
    of_policy: dict[str, Any] = {}
    for word in text.split():
        name, _, value = word.partition("=")
        holder, known = (own, _OWN) if name in _OWN else (of_policy, _OF_POLICY)
        if name not in known:
            names = ", ".join((*_OWN, *_OF_POLICY))
            raise ValueError(f"{SETTINGS_VARIABLE}: {word!r}: no such setting; there are {names}")
        choices = get_args(known[name])
        if choices and value not in choices:
            raise ValueError(f"{SETTINGS_VARIABLE}: {word!r}: one of {', '.join(choices)}")
        holder[name] = value if choices or known[name] is str else int(value)
    return Settings(**own, policy=Policy(**of_policy))


_OWN = {name: kind for name, kind in get_type_hints(Settings).items() if name != "policy"}
_OF_POLICY = get_type_hints(Policy)


class _Range(ctypes.Structure):
    _fields_ = (
        ("address", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("read_only", ctypes.c_int32),
        ("set", ctypes.c_int32),
    )


class _Launch(ctypes.Structure):
    _fields_ = (
        ("image", ctypes.c_char_p),
        ("symbol", ctypes.c_char_p),
        ("params", ctypes.POINTER(ctypes.c_void_p)),
        ("ranges", ctypes.POINTER(_Range)),
        ("num_ranges", ctypes.c_int32),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("cluster", ctypes.c_uint32 * 3),
        ("dynamic_shared_bytes", ctypes.c_uint32),
    )


_ATTRIBUTE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_int))
_PREPARE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p)
_LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Launch))


class _Emulator(ctypes.Structure):
    _fields_ = (("attribute", _ATTRIBUTE), ("prepare", _PREPARE), ("launch", _LAUNCH))


class Driver:
    """What the library calls. Launches wait for each other: programs share scratch memory."""

    def __init__(self, explain: Callable[[bytes], None]):
        self._explain = explain
        self._turn = threading.Lock()
        self._launches = 0

    def attribute(self, number: int, value: Any) -> int:
        """cuDeviceGetAttribute."""

        def run() -> None:
            device = settings(os.environ.get(SETTINGS_VARIABLE, ""))
            major, minor = device.capability.split(".")
            known = {16: device.multiprocessors, 75: int(major), 76: int(minor)}
            if number not in known:
                raise ValueError(f"device attribute {number} is not known")
            value[0] = known[number]

        return self._result(run)

    def prepare(self, image: bytes, symbol: bytes) -> int:
        """cuLibraryGetKernel: refuses what cannot run on the device."""

        def run() -> None:
            capability = settings(os.environ.get(SETTINGS_VARIABLE, "")).capability
            target = parse(image.decode()).target
            if target not in _TARGETS[capability]:
                raise _WrongTargetError(
                    f"PTX for {target}, the emulated device has compute capability {capability}"
                )
            prepare(image.decode(), symbol.decode())

        return self._result(run)

    def launch(self, record: Any) -> int:
        """cuLaunchKernelEx."""
        with self._turn:
            number, self._launches = self._launches, self._launches + 1
            return self._result(lambda: self._run(record.contents, number))

    def _run(self, record: _Launch, number: int) -> None:
        device = settings(os.environ.get(SETTINGS_VARIABLE, ""))
        text, symbol = record.image.decode(), record.symbol.decode()
        parameters = parse(text).kernels[symbol].parameters
        sizes = (record.grid, record.block, record.cluster)
        grid, block, cluster = ((size[0], size[1], size[2]) for size in sizes)
        params = [
            ctypes.string_at(record.params[i], parameter.size)
            for i, parameter in enumerate(parameters)
        ]
        ranges = [record.ranges[i] for i in range(record.num_ranges)]
        memory = dict(map(_memory, ranges))
        filled = {held.address for held in ranges if held.set}
        for address in _results(record.image, params):
            if address not in filled:
                memory[address][:] = uninitialised(memory[address].size)
        try:
            report = launch(
                text,
                symbol,
                grid=grid,
                block=block,
                cluster=cluster,
                dynamic_smem=record.dynamic_shared_bytes,
                params=params,
                memory=memory,
                policy=device.policy,
                seed=device.seed + number,
            )
        except EmulationError as error:
            error.add_note(f"{device.policy}, seed {device.seed + number}")
            raise
        if device.report:
            with open(device.report, "a") as file:
                file.write(report.to_json() + "\n")

    def _result(self, run: Callable[[], None]) -> int:
        """Runs something; what it raises becomes a CUresult and its explanation."""
        try:
            run()
        except EmulationError as error:
            text = "; ".join([str(error), *error.__notes__])
            return self._fail(_RESULT_OF_RULE.get(error.rule, _LAUNCH_FAILED), text)
        except _WrongTargetError as error:
            return self._fail(_NO_BINARY_FOR_GPU, str(error))
        except PtxError as error:
            return self._fail(_INVALID_PTX, str(error))
        except NotImplementedError as error:
            return self._fail(_NOT_SUPPORTED, str(error))
        except ValueError as error:
            return self._fail(_INVALID_VALUE, str(error))
        except Exception:  # a fault of the emulator's own must not end in the C++ that called
            return self._fail(_UNKNOWN, traceback.format_exc())
        return _SUCCESS

    def _fail(self, result: int, text: str) -> int:
        self._explain(text.encode())
        return result


def _results(image: bytes, params: Sequence[bytes]) -> Iterator[int]:
    """Addresses of the buffers that a kernel of the folder makes, rather than changes.

    One without elements, as a dimension says that is a parameter, may have any address.
    """
    folder = os.environ.get(KERNELS_VARIABLE)
    record = None if folder is None else _launches(pathlib.Path(folder)).get(_digest(image))
    if record is None:
        return
    zeros = {
        (param.buffer, param.axes[0])
        for param, value in zip(record.params, params, strict=True)
        if param.kind == "dim" and not any(value)
    }
    factors = {
        result.name: {(factor.buffer, factor.axis) for size in result.shape for factor in size}
        for result in record.results
    }
    made = {name for name, found in factors.items() if not found & zeros} - set(record.operands)
    for param, value in zip(record.params, params, strict=True):
        if param.buffer in made and param.kind in ("pointer", "tensor_map"):
            yield int.from_bytes(value[:8], "little")


@functools.cache
def _launches(folder: pathlib.Path) -> dict[str, manifest.Launch]:
    """How the kernels of a folder are launched, by the digest of their text."""
    cubins = manifest.load(folder / "manifest.json").cubins.values()
    return {cubin.sha256: cubin.launch for cubin in cubins}


@functools.lru_cache(maxsize=64)
def _digest(image: bytes) -> str:
    return hashlib.sha256(image).hexdigest()


def _memory(held: _Range) -> tuple[int, np.ndarray]:
    data = np.frombuffer((ctypes.c_uint8 * held.bytes).from_address(held.address), np.uint8)
    data.flags.writeable = not held.read_only
    return held.address, data


def _attach() -> _Emulator:
    library = ctypes.CDLL(os.environ[LIBRARY_VARIABLE])
    library.emulated_cuda_explain.argtypes = (ctypes.c_char_p,)
    library.emulated_cuda_explain.restype = None
    driver = Driver(library.emulated_cuda_explain)
    emulator = _Emulator(
        _ATTRIBUTE(driver.attribute), _PREPARE(driver.prepare), _LAUNCH(driver.launch)
    )
    library.emulated_cuda_attach(ctypes.byref(emulator))
    return emulator


_EMULATOR = _attach() if LIBRARY_VARIABLE in os.environ else None
"""The functions that the library holds: they live as long as this module."""
