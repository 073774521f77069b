"""What is installed and present: the FFI library, the kernels, the GPU.

Everything here works with no library, no kernels and no GPU. `register` tells the library about
every kernel of the manifest without touching a GPU; the library loads a kernel when it first runs.
"""

from __future__ import annotations

import ctypes
import functools
import os
import pathlib
import struct
from collections.abc import Iterable
from typing import Any

import jax
import jax.ffi

from fa4_jax import catalogue, registration
from fa4_jax import manifest as manifest_lib
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

_UNKNOWN = 999  # CUDA_ERROR_UNKNOWN

_PACKAGE = pathlib.Path(__file__).absolute().parent
_LIBRARY = _PACKAGE / "libfa4_jax.so"
MANIFEST = pathlib.Path(os.environ.get(KERNELS_VARIABLE, _PACKAGE / "_cubins")) / "manifest.json"
"""The list of the installed kernels, which lie beside it."""


def has_stand_in() -> bool:
    """Whether a stand-in takes the driver's place, and JAX's CPU that of a GPU."""
    return STAND_IN_VARIABLE in os.environ


def manifest() -> Manifest | None:
    """The installed kernels, or None if there are none that can be used."""
    return _installed()[0]


@functools.cache
def _installed() -> tuple[Manifest | None, str]:
    """The installed kernels, or why there are none."""
    if not MANIFEST.exists():
        return None, f"no kernels are installed: {MANIFEST} is missing"
    try:
        loaded = manifest_lib.load(MANIFEST)
    except ValueError as error:
        return None, str(error)
    refused = _register_installed()
    return (None, refused) if refused else (loaded, "")


@functools.cache
def _register_installed() -> str:
    """Tells the library about the installed kernels; what is wrong with their manifest, or nothing.

    Without _installed(): making its objects would take as long again at every import.
    """
    library, _ = _open_library()
    if library is None or not MANIFEST.exists():
        return ""
    try:
        _register(library, manifest_lib.read(MANIFEST)["kernels"], MANIFEST.parent)
    except (*manifest_lib.MALFORMED, struct.error) as error:
        return f"{MANIFEST}: a record cannot be used: {type(error).__name__}: {error}"
    return ""


def device_arch() -> str | None:
    """Architecture of the kernels that run here, "sm_90a" or "sm_100f"; None if no kernel can.

    Starts JAX's GPU backend if there is one.
    """
    capability = compute_capability()
    return None if capability is None else catalogue.architecture_of(capability)


def why_no_kernels() -> str | None:
    """Why there are no kernels to choose from, or None if there are."""
    return None if manifest() else _installed()[1]


def why_unavailable() -> str | None:
    """Why no kernel can run here, or None if kernels can."""
    library, reason = _open_library()
    if library is None:
        return reason
    if (missing := why_no_kernels()) is not None:
        return missing
    if (error := library.fa4_jax_driver_error()) is not None:
        return error.decode()
    arch = device_arch()
    if arch is None:
        return f"kernels need compute capability 9.0 or 10.x, JAX sees {_what_is_seen()}"
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
    """Registers the FFI target with JAX and the kernels with the library, as far as it can.

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
    _register_installed()
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


def _what_is_seen() -> str:
    """The device, in words; where a stand-in has none, also what the stand-in says about it."""
    capability = compute_capability()
    if capability is not None:
        return f"compute capability {capability / 10}"
    if not has_stand_in():
        return "no GPU"
    text = ctypes.c_char_p()
    ctypes.CDLL(os.environ[STAND_IN_VARIABLE]).cuGetErrorString(_UNKNOWN, ctypes.byref(text))
    return f"no GPU: {(text.value or b'').decode()}"


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
