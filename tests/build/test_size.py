"""The size of a wheel, of which nearly all are kernels."""

from __future__ import annotations

import pathlib

import deflate
import pytest

import fa4_jax
from fa4_jax import catalogue, runtime

MOST_BYTES = 15e6
"""docs/notes/packaging.md."""


def test_a_wheel_stays_small() -> None:
    installed = runtime.manifest()
    if installed is None or len(installed.cubins) < len(catalogue.all_keys()):
        pytest.skip("a wheel has all kernels, and some are not built: `make cover` builds them")
    folder = pathlib.Path(fa4_jax.__file__).parent
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert sum(len(deflate.deflate_compress(path.read_bytes(), 12)) for path in files) < MOST_BYTES
