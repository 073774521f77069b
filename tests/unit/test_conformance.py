"""Every conformance case runs on both paths of the pure-JAX default."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fa4_jax.api import canonicalise
from fa4_jax.conformance.cases import CASES, Case
from fa4_jax.conformance.oracle import make_inputs
from fa4_jax.conformance.runner import call, run_case
from tests.default_paths import PATHS, forced


@pytest.fixture(scope="module", params=PATHS)
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """Makes every size run on one path."""
    with forced(request.param):
        yield request.param


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_default_path(case: Case, seed: int, path: str):
    failures = [f"{v.name}: {v.failure}" for v in run_case(case, seed, "xla") if v.failure]
    assert not failures, "\n".join([path, *failures])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_case_is_the_problem_that_attention_understands(case: Case):
    """The emulator and the benchmarks take problem and extents from the case, without JAX."""
    inputs = make_inputs(case, 0)
    found, problem = canonicalise(call(case, inputs))
    assert case.problem == problem
    assert found.extents.tolist() == [list(entry) for entry in case.extents]
