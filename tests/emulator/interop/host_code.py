"""CuTe-DSL's own launch code of a kernel, run against a shim that records the launch."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np

from kernels.emulator.ptx.parser import parse

ROOT = pathlib.Path(__file__).absolute().parents[3]
_SHIM = ROOT / "tests" / "ffi" / "host_shim.cc"


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A kernel with its host code.

    Attributes:
      ptx: its text.
      object_file: the host code, for this machine.
      entry: the host code's C function.
      prefix: of its other functions.
    """

    ptx: str
    object_file: bytes
    entry: str
    prefix: str


@dataclasses.dataclass(frozen=True)
class Launch:
    """What the host code launches."""

    symbol: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    dynamic_smem_bytes: int
    params: tuple[bytes, ...]


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor argument whose sizes and outer strides the host code learns at run time."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, address: int, array: np.ndarray) -> Tensor:
        """An array that lies at this address; strides in elements."""
        strides = tuple(step // array.itemsize for step in array.strides)
        return cls(address, array.shape, strides)


def argument(value: Tensor | float | int | None) -> Any:
    """A host argument as the ctypes value that CuTe-DSL's entry points expect.

    A tensor is {pointer, int32 sizes, int64 strides but the contiguous one}, a float is a Float32,
    an int an Int32, None the stream.
    """
    if isinstance(value, Tensor):
        strides = value.strides[:-1]
        if value.strides[-1] != 1:
            raise ValueError(f"{value.strides=}: the last dimension must be contiguous")
        fields: list[tuple[str, Any]] = [
            ("pointer", ctypes.c_uint64),
            ("shape", ctypes.c_int32 * len(value.shape)),
        ]
        if strides:
            fields.append(("strides", ctypes.c_int64 * len(strides)))
        kind = type("_Tensor", (ctypes.Structure,), {"_fields_": fields})
        packed = kind(value.address, fields[1][1](*value.shape))
        if strides:
            packed.strides = fields[2][1](*strides)
        return packed
    if value is None:
        return ctypes.c_void_p()
    return ctypes.c_float(value) if isinstance(value, float) else ctypes.c_int32(value)


@functools.cache
def host_code(compiled: Compiled) -> HostCode:
    """The host code of a kernel, linked once in a process."""
    return HostCode(compiled)


class HostCode:
    """The host code of one kernel, ready to be called."""

    def __init__(self, compiled: Compiled) -> None:
        (kernel,) = parse(compiled.ptx).kernels.values()
        self._prefix = compiled.prefix
        self._folder = tempfile.TemporaryDirectory()
        self._library = _link(compiled.object_file, pathlib.Path(self._folder.name))
        self._library.shim_log.restype = ctypes.c_char_p
        self._entry = getattr(self._library, compiled.entry)
        sizes = [parameter.size for parameter in kernel.parameters]
        self._library.shim_set_params((ctypes.c_int * len(sizes))(*sizes), len(sizes))
        self._module = ctypes.c_void_p()
        module, status, device = ctypes.pointer(self._module), ctypes.c_int(), ctypes.c_int()
        self._call("cuda_init", module, status)
        self._call("cuda_load_to_device", module, device, status)

    def launch(self, arguments: Sequence[Tensor | float | int | None]) -> Launch:
        """What the host code launches for these arguments."""
        values = [*map(argument, arguments), ctypes.c_int()]
        pointers = _pointers(*values)
        self._entry(pointers, len(pointers))
        if values[-1].value != 0:
            raise RuntimeError(f"the host code returned {values[-1].value}")
        log = json.loads(self._library.shim_log().decode())
        return Launch(
            symbol=log["symbol"],
            grid=tuple(log["grid"]),
            block=tuple(log["block"]),
            cluster=tuple(log["cluster"]),
            dynamic_smem_bytes=log["smem"],
            params=tuple(map(bytes.fromhex, log["params"])),
        )

    def _call(self, name: str, *values: Any) -> None:
        getattr(self._library, f"_mlir_{self._prefix}_{name}")(_pointers(*values))
        if values[-1].value != 0:
            raise RuntimeError(f"{name} of the host code returned {values[-1].value}")


def _pointers(*values: Any) -> Any:
    """The void*[] that the entry points take; the values must outlive it."""
    return (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))


def _link(object_file: bytes, folder: pathlib.Path) -> ctypes.CDLL:
    source, library = folder / "host.o", folder / "libhost.so"
    source.write_bytes(object_file)
    command = [os.environ.get("CXX", "g++"), "-std=c++17", "-O1", "-fPIC", "-shared"]
    command += ["-o", str(library), str(source), str(_SHIM)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return ctypes.CDLL(str(library))
