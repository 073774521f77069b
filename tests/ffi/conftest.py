"""Fixtures of the handler's tests: the stand-in driver and a process that uses it."""

from __future__ import annotations

import multiprocessing
import pathlib
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest

from fa4_jax import runtime
from tests.ffi import compiler


@pytest.fixture(scope="session")
def mock_library(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Builds the stand-in driver."""
    if not runtime.register():
        pytest.fail(f"these tests need the FFI library: {runtime.why_unavailable()}")
    path = tmp_path_factory.mktemp("mock") / "libmock_cuda.so"
    compiler.shared_library(path, compiler.ROOT / "ffi" / "testing" / "mock_cuda.cc")
    return path


@pytest.fixture(scope="session")
def stand_in_process(mock_library: pathlib.Path) -> Iterator[ProcessPoolExecutor]:
    """Starts a process where FA4_JAX_LIBCUDA is the stand-in; it runs functions of stand_in."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        # The variable must be set when the new process imports fa4_jax, and not remain in this one.
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(runtime.STAND_IN_VARIABLE, str(mock_library))
            patch.setenv("JAX_PLATFORMS", "cpu")
            assert pool.submit(runtime.has_stand_in).result()
        yield pool
