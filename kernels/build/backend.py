"""pip's build backend: scikit-build-core, preceded by the kernels where the tree has none yet.

A source distribution and a tree after `make kernels` hold fa4_jax/_cubins, which is packaged as it
is. In a fresh clone this asks pip for CuTe-DSL too and compiles the kernels first.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys
import tomllib
from typing import Any

from scikit_build_core import build as base

ROOT = pathlib.Path(__file__).absolute().parents[2]

get_requires_for_build_sdist = base.get_requires_for_build_sdist
get_requires_for_build_editable = base.get_requires_for_build_editable
prepare_metadata_for_build_wheel = base.prepare_metadata_for_build_wheel
prepare_metadata_for_build_editable = base.prepare_metadata_for_build_editable
build_sdist = base.build_sdist
build_editable = base.build_editable


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    """What pip installs before build_wheel, besides build-system.requires."""
    return base.get_requires_for_build_wheel(config_settings) + _kernel_requirements()


def build_wheel(
    wheel_directory: str,
    config_settings: dict[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> str:
    """Builds the wheel; returns its file name."""
    if not _has_kernels():
        subprocess.run([sys.executable, "-m", "kernels.build"], cwd=ROOT, check=True)
    return base.build_wheel(wheel_directory, config_settings, metadata_directory)


def _has_kernels() -> bool:
    return (ROOT / "fa4_jax" / "_cubins" / "manifest.json").exists()


def _kernel_requirements() -> list[str]:
    if _has_kernels():
        return []
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    # The key list is in fa4_jax, which imports JAX: the one that goes with the pinned jaxlib.
    pins = (name for name in document["build-system"]["requires"] if name.startswith("jaxlib=="))
    jax = next(pins).replace("jaxlib", "jax")
    return [jax, *document["project"]["optional-dependencies"]["build"]]
