"""Processes whose GPU is emulated, as JAX sees it: for the tests from end to end."""

from __future__ import annotations

import multiprocessing
import pathlib
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from fa4_jax import catalogue, runtime
from kernels.build import cache, package, sample
from tests.ffi import compiler

Gpu = Callable[..., Any]
"""Calls a function of emulated_gpu in such a process."""

HOW = (
    "schedule=random asynchronous=late",
    "schedule=starve asynchronous=random seed=5",
    "schedule=random asynchronous=early multiprocessors=3",
    "schedule=in_order asynchronous=late resident_ctas=1",
    "schedule=starve asynchronous=late ordered_reductions=1",
)
"""Settings of the emulated device: schedules, times of copies, CTAs that fit at a time."""


def environment(folder: pathlib.Path) -> dict[str, str]:
    """Environment of a process whose GPU is an emulated Hopper; folder: for what it reads."""
    if not runtime.register():
        pytest.fail(f"these tests need the FFI library: {runtime.why_unavailable()}")
    library = folder / "libemulated_cuda.so"
    compiler.shared_library(library, compiler.ROOT / "ffi" / "testing" / "emulated_cuda.cc")
    entries = [entry for key in catalogue.all_keys() if (entry := cache.find(key)) is not None]
    if missing := sample.kernels() - {entry.cubin.key for entry in entries}:
        names = ", ".join(sorted(key.name for key in missing))
        pytest.fail(f"these tests need kernels: run python -m kernels.build for {names}")
    package.package_ptx(entries, folder / "ptx")
    return {
        runtime.STAND_IN_VARIABLE: str(library),
        runtime.KERNELS_VARIABLE: str(folder / "ptx"),
        "JAX_PLATFORMS": "cpu",
    }


def process(variables: dict[str, str]) -> Iterator[Gpu]:
    """A process with these environment variables."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        # The variables must be there when the new process imports fa4_jax, and not stay here.
        with pytest.MonkeyPatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            assert pool.submit(runtime.has_stand_in).result()
        yield lambda function, *arguments: pool.submit(function, *arguments).result()
