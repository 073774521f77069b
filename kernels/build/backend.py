"""pip's build backend: scikit-build-core, preceded by the kernels where the tree has none yet.

A source distribution and a tree after `make kernels` hold fa4_jax/_cubins, which is packaged as it
is. In a fresh clone, or where a part of the kernels lies, as after `make test`, this asks pip for
CuTe-DSL too and compiles the kernels first: of all architectures, or of those that `-C archs=...`
or the variable FA4_JAX_ARCHS names.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import tomllib
import zipfile
from typing import Any
from unittest import mock

import deflate
from scikit_build_core import build as base

ROOT = pathlib.Path(__file__).absolute().parents[2]
KERNELS = ROOT / "fa4_jax" / "_cubins"
PARTIAL = "partial"
"""As in package.py, which imports more than pip has installed when it asks for requirements."""

ARCHS_VARIABLE, ARCHS_SETTING = "FA4_JAX_ARCHS", "archs"
_CHOICES = ("all", "none", "sm_90a", "sm_100f")

Settings = dict[str, Any] | None

get_requires_for_build_sdist = base.get_requires_for_build_sdist
get_requires_for_build_editable = base.get_requires_for_build_editable
prepare_metadata_for_build_editable = base.prepare_metadata_for_build_editable
build_sdist = base.build_sdist
build_editable = base.build_editable


def prepare_metadata_for_build_wheel(
    metadata_directory: str, config_settings: Settings = None
) -> str:
    """Writes the metadata; returns its folder's name."""
    return base.prepare_metadata_for_build_wheel(metadata_directory, others(config_settings))


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    """What pip installs before build_wheel, besides build-system.requires."""
    needed = _kernel_requirements() if _kernels_to_build(config_settings) else []
    return base.get_requires_for_build_wheel(others(config_settings)) + needed


def build_wheel(
    wheel_directory: str,
    config_settings: Settings = None,
    metadata_directory: str | None = None,
) -> str:
    """Builds the wheel; returns its file name.

    Without a choice of architectures, kernels that were built before are packaged as they are.

    Raises:
      ValueError: `archs` or FA4_JAX_ARCHS names no architecture.
      RuntimeError: there is no C++ compiler for the FFI library.
    """
    chosen = _kernels_to_build(config_settings)
    if not any(map(shutil.which, (os.environ.get("CXX", "c++").split()[0], "g++", "clang++"))):
        raise RuntimeError("no C++ compiler: the FFI library needs one (CXX, c++, g++, clang++)")
    if chosen is not None:
        command = [sys.executable, "-m", "kernels.build", "--arch", chosen]
        subprocess.run(command, cwd=ROOT, check=True)
    elif architectures(config_settings) == "none":
        shutil.rmtree(KERNELS, ignore_errors=True)
    name = base.build_wheel(wheel_directory, others(config_settings), metadata_directory)
    _compress(pathlib.Path(wheel_directory, name))
    return name


def architectures(config_settings: Settings) -> str | None:
    """Returns the choice of architectures: of `-C archs=`, else of FA4_JAX_ARCHS, else None.

    Raises:
      ValueError: there is no such architecture.
    """
    chosen = (config_settings or {}).get(ARCHS_SETTING) or os.environ.get(ARCHS_VARIABLE)
    if chosen is not None and chosen not in _CHOICES:
        raise ValueError(f"archs={chosen!r}: one of {', '.join(_CHOICES)} is expected")
    return chosen


def others(config_settings: Settings) -> Settings:
    """Returns the settings that scikit-build-core knows."""
    settings = dict(config_settings or {})
    settings.pop(ARCHS_SETTING, None)
    return settings


class _Deflate:
    """What zipfile asks of a compressor of one member, by libdeflate at its highest level.

    A wheel is 4 % smaller than at zlib's, in ten seconds.
    """

    def __init__(self) -> None:
        self._data = bytearray()

    def compress(self, data: bytes) -> bytes:
        """Takes a part of the member."""
        self._data += data
        return b""

    def flush(self) -> bytes:
        """Returns the whole member."""
        return bytes(deflate.deflate_compress(self._data, 12))


def _compress(wheel: pathlib.Path) -> None:
    """Compresses a wheel anew. zipfile has no public way to name another compressor."""
    with zipfile.ZipFile(wheel) as archive:
        members = [(member, archive.read(member)) for member in archive.infolist()]
    with (
        mock.patch.object(zipfile, "_get_compressor", lambda *_: _Deflate()),
        zipfile.ZipFile(wheel, "w") as archive,
    ):
        for member, data in members:
            archive.writestr(member, data, zipfile.ZIP_DEFLATED)


def _kernels_to_build(config_settings: Settings) -> str | None:
    """Returns the choice of kernels to build first, or None if there is nothing to build."""
    chosen = architectures(config_settings)
    whole = (KERNELS / "manifest.json").exists() and not (KERNELS / PARTIAL).exists()
    if chosen is None and not whole:
        return "all"
    return None if chosen == "none" else chosen


def _kernel_requirements() -> list[str]:
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    # The key list is in fa4_jax, which imports JAX: the one that goes with the pinned jaxlib.
    pins = (name for name in document["build-system"]["requires"] if name.startswith("jaxlib=="))
    jax = next(pins).replace("jaxlib", "jax")
    return [jax, *document["project"]["optional-dependencies"]["build"]]
