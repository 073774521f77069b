"""Strict JAX, warnings as errors, seeds that are printed, and what a test can ask for."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from fa4_jax import api
from tests import case_seconds, each_kernel, example_counts
from tests.fakes import fake_target


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, help="of the random inputs; a fresh one by default")
    parser.addoption(
        "--full-cover", action="store_true", help="also what takes too long for `make test`"
    )
    parser.addoption(
        "--every-case", action="store_true", help="all cases of tests that otherwise sample them"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what `sampling.sampled` has not chosen, and what `case_seconds` has no time for.

    A file that is named on the command line has time. What looks at each kernel looks at those that
    are built, and at the sample that must be; all must be with --full-cover.
    """
    if config.getoption("--every-case"):
        return
    left_out = [bool(item.get_closest_marker("every_case")) for item in items]
    if not config.getoption("--full-cover"):
        absent = each_kernel.not_built(items)
        left_out = [out or missing for out, missing in zip(left_out, absent, strict=True)]
    named = any(".py" in argument for argument in config.args)
    if not (named or config.getoption("--full-cover")):
        left_out = [
            out or bool(item.get_closest_marker("slow"))
            for item, out in zip(items, left_out, strict=True)
        ]
        sampled = [item for item, out in zip(items, left_out, strict=True) if not out]
        names = [case_seconds.test_of(item) for item in sampled]
        works = map(case_seconds.work_of, sampled)
        beyond = iter(case_seconds.beyond_the_budget(names, case_seconds.recorded(), works))
        left_out = [out or next(beyond) for out in left_out]
    config.hook.pytest_deselected(items=[x for x, out in zip(items, left_out, strict=True) if out])
    items[:] = [x for x, out in zip(items, left_out, strict=True) if not out]


def pytest_configure(config: pytest.Config) -> None:
    if not (config.getoption("--full-cover") or config.getoption("--every-case")):
        _compile_quickly()
        example_counts.share = example_counts.SHARE
    config.addinivalue_line("markers", "every_case: runs with --every-case alone")
    config.addinivalue_line("markers", f"{each_kernel.MARKER}: needs the kernel of its key")
    config.addinivalue_line("markers", "slow: runs with --full-cover and --every-case alone")
    config.addinivalue_line("filterwarnings", "error")
    # Importing Flax 0.12.0, the newest for JAX 0.8.0.
    config.addinivalue_line("filterwarnings", "ignore:jax.(array_ref|ArrayRef):DeprecationWarning")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_num_cpu_devices", 8)


def _compile_quickly() -> None:
    """Has LLVM not optimise what XLA makes for a CPU: one file took two thirds of the time so.

    XLA's own passes run as ever. `make cover` and `make proof` test optimised code, and so does a
    machine with a GPU, whose compiler the flag would reach.
    """
    flag, others = "--xla_backend_optimization_level=0", os.environ.get("XLA_FLAGS", "").split()
    if shutil.which("nvidia-smi") is None and flag not in others:  # As in a worker of pytest-xdist.
        os.environ["XLA_FLAGS"] = " ".join((flag, *others))


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A fresh seed, printed with a failure; --seed repeats one."""
    given = request.config.getoption("--seed")
    value = secrets.randbits(32) if given is None else given
    print(f"--seed {value}")
    return value


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    """Random numbers of the test."""
    return np.random.default_rng(seed)


@pytest.fixture
def kernels_present(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a machine with an H100 and every kernel of the key list, except that none can run."""
    target = fake_target()
    monkeypatch.setattr(api, "current_target", lambda: target)
    yield
    jax.clear_caches()
