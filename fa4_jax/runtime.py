"""What is installed and present: the FFI library, the kernels, the GPU.

Everything here works with no library, no kernels and no GPU. `register` tells the library about
every kernel of the manifest without touching a GPU; the library loads a kernel when it first runs.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import pathlib
from collections.abc import Iterable
from typing import Any

import jax
import jax.ffi

from fa4_jax import manifest as manifest_lib
from fa4_jax import registration
from fa4_jax.manifest import Cubin, Manifest

TARGET = "fa4_jax_launch"
"""Name of the FFI target."""

STAND_IN_VARIABLE = "FA4_JAX_LIBCUDA"
"""Environment variable with the path of a stand-in for libcuda; JAX's CPU then runs the kernels."""

KERNELS_VARIABLE = "FA4_JAX_KERNELS"
"""Environment variable with the folder of other kernels than the installed ones."""

OLDEST_CUDA = {"sm_90a": (12, 0), "sm_100f": (12, 9)}
"""CUDA version that the driver must support to load our cubins, by their architecture.

Within a major version a driver loads what newer tools compiled (CUDA Compatibility, "Minor Version
Compatibility") as far as it knows the architecture; families such as sm_100f came with CUDA 12.9.
"""

_PACKAGE = pathlib.Path(__file__).absolute().parent
_LIBRARY = _PACKAGE / "libfa4_jax.so"
_MANIFEST = pathlib.Path(os.environ.get(KERNELS_VARIABLE, _PACKAGE / "_cubins")) / "manifest.json"


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
    capability = compute_capability()
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
    arch = device_arch()
    if arch is None:
        capability = compute_capability()
        found = "no GPU" if capability is None else f"compute capability {capability / 10}"
        return f"kernels need compute capability 9.0 or 10.x, JAX sees {found}"
    version = library.fa4_jax_driver_cuda_version()
    major, minor = version // 1000, version % 1000 // 10
    if (major, minor) < OLDEST_CUDA[arch]:
        needed = ".".join(map(str, OLDEST_CUDA[arch]))
        return (
            f"the driver is too old: kernels for {arch} need one that supports CUDA {needed}, "
            f"it supports CUDA {major}.{minor}"
        )
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
    packer = registration.Packer()
    for entry in entries:
        packer.add(entry, directory)
    if (error := library.fa4_jax_register(packer.records())) is not None:
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
    if library.fa4_jax_abi_version() != registration.ABI_VERSION:
        return None, f"{_LIBRARY} is of another version of this package: build it again"
    library.fa4_jax_register.restype = ctypes.c_char_p
    library.fa4_jax_register.argtypes = (ctypes.POINTER(registration.Records),)
    library.fa4_jax_driver_error.restype = ctypes.c_char_p
    library.fa4_jax_sha256.restype = ctypes.c_char_p
    library.fa4_jax_sha256.argtypes = (ctypes.c_char_p, ctypes.c_size_t)
    return library, ""


def compute_capability() -> int | None:
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
