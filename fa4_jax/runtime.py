"""What is installed and present: the FFI library, the kernels, the GPU.

Everything here works with no library, no kernels and no GPU. `register` tells the library about
every kernel of the manifest without touching a GPU; the library loads a kernel when it first runs.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Iterable
from typing import Any

import jax
import jax.ffi

from fa4_jax import manifest as manifest_lib
from fa4_jax.manifest import Cubin, Manifest

TARGET = "fa4_jax_launch"
"""Name of the FFI target."""

STAND_IN_VARIABLE = "FA4_JAX_LIBCUDA"
"""Environment variable with the path of a stand-in for libcuda; JAX's CPU then runs the kernels."""

_PACKAGE = pathlib.Path(__file__).absolute().parent
_LIBRARY = _PACKAGE / "libfa4_jax.so"
_MANIFEST = _PACKAGE / "_cubins" / "manifest.json"
_ABI_VERSION = 1

_PARAM_KINDS = ("tensor_map", "pointer", "dim", "size", "i32", "f32", "sm_count")


def has_stand_in() -> bool:
    """Whether a stand-in takes the driver's place, and JAX's CPU that of a GPU."""
    return STAND_IN_VARIABLE in os.environ


@functools.cache
def manifest() -> Manifest | None:
    """The installed kernels, or None if there are none."""
    return manifest_lib.load(_MANIFEST) if _MANIFEST.exists() else None


def device_arch() -> str | None:
    """Architecture of the kernels that run here, "sm_90a" or "sm_100f"; None if no kernel can.

    Starts JAX's GPU backend if there is one.
    """
    capability = _compute_capability()
    if capability == 90:
        return "sm_90a"
    if capability is not None and capability // 10 == 10:
        return "sm_100f"
    return None


def why_unavailable() -> str | None:
    """Why no kernel can run here, or None if kernels can."""
    library, reason = _open_library()
    if library is None:
        return reason
    if manifest() is None:
        return f"no kernels are installed: {_MANIFEST} is missing"
    if (error := library.fa4_jax_driver_error()) is not None:
        return error.decode()
    if device_arch() is None:
        capability = _compute_capability()
        found = "no GPU" if capability is None else f"compute capability {capability / 10}"
        return f"kernels need compute capability 9.0 or 10.x, JAX sees {found}"
    return None


@functools.cache
def register() -> bool:
    """Registers the FFI target with JAX and the kernels with the library.

    Returns:
      Whether there is a library. Repeated calls cost nothing.
    """
    library, _ = _open_library()
    if library is None:
        return False
    initialize = jax.ffi.pycapsule(library.fa4_jax_initialize)
    execute = jax.ffi.pycapsule(library.fa4_jax_execute)
    stages = {"initialize": initialize, "execute": execute}
    jax.ffi.register_ffi_target(TARGET, stages, platform="CUDA")
    if has_stand_in():
        on_host = jax.ffi.pycapsule(library.fa4_jax_execute_on_host)
        jax.ffi.register_ffi_target(TARGET, on_host, platform="cpu")
    if _MANIFEST.exists():
        # Not manifest(): making its objects would take as long again at every import.
        document = json.loads(_MANIFEST.read_text())
        if document["schema"] == manifest_lib.SCHEMA:
            _register(library, document["kernels"], _MANIFEST.parent)
    return True


def add_kernels(cubins: Iterable[Cubin], directory: pathlib.Path) -> None:
    """Registers kernels whose files lie in `directory`; a known name is replaced.

    Raises:
      RuntimeError: there is no library.
      ValueError: a record contradicts itself.
    """
    library, reason = _open_library()
    if library is None:
        raise RuntimeError(reason)
    _register(library, [manifest_lib.cubin_to_json(cubin) for cubin in cubins], directory)


def _register(library: ctypes.CDLL, entries: list[dict[str, Any]], directory: pathlib.Path) -> None:
    records = [_record(entry, str(directory)) for entry in entries]
    array = (_KernelRecord * len(records))(*records)
    if (error := library.fa4_jax_register(array, len(records))) is not None:
        raise ValueError(error.decode())


def sha256(data: bytes) -> str:
    """The library's own SHA-256, by which it checks a kernel's file.

    Raises:
      RuntimeError: there is no library.
    """
    library, reason = _open_library()
    if library is None:
        raise RuntimeError(reason)
    return library.fa4_jax_sha256(data, len(data)).decode()


@functools.cache
def _open_library() -> tuple[ctypes.CDLL | None, str]:
    if not _LIBRARY.exists():
        return None, f"the FFI library is not built: {_LIBRARY} is missing"
    try:
        library = ctypes.CDLL(str(_LIBRARY))
    except OSError as error:
        return None, f"the FFI library cannot be loaded: {error}"
    if library.fa4_jax_abi_version() != _ABI_VERSION:
        return None, f"{_LIBRARY} is of another version of this package: build it again"
    library.fa4_jax_register.restype = ctypes.c_char_p
    library.fa4_jax_register.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    library.fa4_jax_driver_error.restype = ctypes.c_char_p
    library.fa4_jax_sha256.restype = ctypes.c_char_p
    library.fa4_jax_sha256.argtypes = (ctypes.c_char_p, ctypes.c_size_t)
    return library, ""


def _compute_capability() -> int | None:
    """10 * major + minor of the device that would run kernels."""
    if has_stand_in():
        library, _ = _open_library()
        capability = -1 if library is None else library.fa4_jax_compute_capability(0)
        return None if capability < 0 else capability
    try:
        device = jax.devices("gpu")[0]
    except RuntimeError:
        return None
    major, _, minor = str(getattr(device, "compute_capability", "")).partition(".")
    return 10 * int(major) + int(minor) if major.isdigit() and minor.isdigit() else None


# The structures of ffi/kernel_record.h, field by field.


class _Range(ctypes.Structure):
    _fields_ = (("begin", ctypes.c_int32), ("end", ctypes.c_int32))


class _FactorRecord(ctypes.Structure):
    _fields_ = (
        ("constant", ctypes.c_int64),
        ("buffer", ctypes.c_int32),
        ("axis", ctypes.c_int32),
        ("divisor", ctypes.c_int32),
        ("multiple", ctypes.c_int32),
    )


class _ParamRecord(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("kind", ctypes.c_int32),
        ("buffer", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("swizzle_bytes", ctypes.c_int32),
        ("axes", ctypes.c_int32 * 5),
        ("box", ctypes.c_int32 * 5),
        ("size", _Range),
    )


class _BufferRecord(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("dtype", ctypes.c_char_p),
        ("alias", ctypes.c_int32),
        ("shape", _Range),
    )


class _KernelRecord(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("arch", ctypes.c_char_p),
        ("dtype", ctypes.c_char_p),
        ("file", ctypes.c_char_p),
        ("sha256", ctypes.c_char_p),
        ("symbol", ctypes.c_char_p),
        ("buffers", ctypes.POINTER(_BufferRecord)),
        ("params", ctypes.POINTER(_ParamRecord)),
        ("sizes", ctypes.POINTER(_Range)),
        ("factors", ctypes.POINTER(_FactorRecord)),
        ("num_operands", ctypes.c_int32),
        ("num_results", ctypes.c_int32),
        ("num_params", ctypes.c_int32),
        ("num_sizes", ctypes.c_int32),
        ("num_factors", ctypes.c_int32),
        ("block", ctypes.c_uint32 * 3),
        ("cluster", ctypes.c_uint32 * 3),
        ("dynamic_shared_bytes", ctypes.c_uint32),
        ("persistent", ctypes.c_uint32),
        ("grid", _Range * 3),
    )


@dataclasses.dataclass
class _Tables:
    """The tables that one record's ranges point into. Sizes are in manifest.json's form."""

    index: dict[str, int]  # of a buffer among operands, then results
    factors: list[tuple[int, int, int, int, int]] = dataclasses.field(default_factory=list)
    sizes: list[tuple[int, int]] = dataclasses.field(default_factory=list)

    def size(self, size: list[dict[str, Any]]) -> tuple[int, int]:
        """Adds a size, returns its range of factors."""
        begin = len(self.factors)
        for factor in size:
            get = factor.get
            buffer = self.index[factor["buffer"]] if "buffer" in factor else -1
            shape = (buffer, get("axis", 0), get("divisor", 1), get("multiple", 1))
            self.factors.append((get("constant", 1), *shape))
        return begin, len(self.factors)

    def shape(self, shape: list[list[dict[str, Any]]]) -> tuple[int, int]:
        """Adds a shape, returns its range of sizes."""
        ranges = [self.size(size) for size in shape]
        self.sizes += ranges
        return len(self.sizes) - len(ranges), len(self.sizes)


def _record(entry: dict[str, Any], directory: str) -> _KernelRecord:
    """The record of one entry of manifest.json."""
    key, launch = entry["key"], entry["launch"]
    operands, results = launch["operands"], launch["results"]
    names = [*operands, *(result["name"] for result in results)]
    # A result that aliases an operand has the operand's shape and memory: either index will do.
    tables = _Tables({name: i for i, name in reversed(list(enumerate(names)))})
    buffers = [(name.encode(), b"", -1, (0, 0)) for name in operands]
    for result in results:
        name = result["name"]
        alias = operands.index(name) if name in operands else -1
        shape = tables.shape(result["shape"])
        buffers.append((name.encode(), result["dtype"].encode(), alias, shape))
    params = [_param(param, tables) for param in launch["params"]]
    grid = tuple(tables.size(size) for size in launch["grid"])
    return _KernelRecord(
        entry["name"].encode(),
        key["arch"].encode(),
        key["dtype"].encode(),
        os.fsencode(os.path.join(directory, entry["file"])),
        entry["sha256"].encode(),
        entry["symbol"].encode(),
        (_BufferRecord * len(buffers))(*buffers),
        (_ParamRecord * len(params))(*params),
        (_Range * len(tables.sizes))(*tables.sizes),
        (_FactorRecord * len(tables.factors))(*tables.factors),
        len(operands),
        len(results),
        len(params),
        len(tables.sizes),
        len(tables.factors),
        tuple(launch["block"]),
        tuple(launch["cluster"]),
        launch["dynamic_smem_bytes"],
        launch["persistent"],
        grid,
    )


def _param(param: dict[str, Any], tables: _Tables) -> tuple[Any, ...]:
    """The fields of a _ParamRecord."""
    axes = param.get("axes", ())
    return (
        param["name"].encode(),
        _PARAM_KINDS.index(param["kind"]),
        tables.index[param["buffer"]] if "buffer" in param else -1,
        len(axes),
        param.get("swizzle_bytes", 0),
        tuple(axes),
        tuple(param.get("box", ())),
        tables.size(param.get("size", [])),
    )
