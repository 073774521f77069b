"""Compares ffi/driver_api.h with the toolkit's cuda.h, and tests the library's own SHA-256."""

from __future__ import annotations

import hashlib
import os
import pathlib
import random
import shutil

import pytest

from fa4_jax import runtime
from tests.ffi import compiler


def _toolkit_headers() -> pathlib.Path | None:
    """Returns the folder with cuda.h, if a CUDA toolkit is installed."""
    nvcc = shutil.which("nvcc")
    places = [
        os.environ.get("CUDA_HOME"),
        nvcc and pathlib.Path(nvcc).parents[1],
        "/usr/local/cuda",
    ]
    folders = (pathlib.Path(place) / "include" for place in places if place)
    return next((folder for folder in folders if (folder / "cuda.h").exists()), None)


def test_driver_api_equals_cuda_h(tmp_path: pathlib.Path) -> None:
    headers = _toolkit_headers()
    if headers is None:
        pytest.skip("no CUDA toolkit with cuda.h here")
    source = pathlib.Path(__file__).parent / "driver_api_test.cc"
    flags = ("-isystem", str(headers), f"-I{compiler.ROOT / 'ffi'}")
    compiler.executable(tmp_path / "driver_api_test", source, flags)


def test_sha256_equals_hashlib() -> None:
    seed = random.randrange(2**32)
    generator = random.Random(seed)
    for size in (*range(130), 1000, 4096, 100_003):
        data = generator.randbytes(size)
        assert runtime.sha256(data) == hashlib.sha256(data).hexdigest(), (seed, size)
