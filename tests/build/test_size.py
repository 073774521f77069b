"""The size of a wheel, of which nearly all are kernels."""

from __future__ import annotations

import pathlib

import deflate
import pytest

import fa4_jax
from fa4_jax import runtime

MOST_BYTES = 15e6
"""docs/notes/packaging.md."""


def test_a_wheel_stays_small() -> None:
    if runtime.manifest() is None:
        pytest.skip("no kernels are installed")
    folder = pathlib.Path(fa4_jax.__file__).parent
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert sum(len(deflate.deflate_compress(path.read_bytes(), 12)) for path in files) < MOST_BYTES
