"""Every conformance case runs on a path of the pure-JAX default, with --every-case on both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from fa4_jax.api import canonicalise
from fa4_jax.conformance.cases import CASES, Case
from fa4_jax.conformance.oracle import make_inputs
from fa4_jax.conformance.runner import call, run_case
from tests.default_paths import PATHS, forced


@pytest.fixture(scope="module")
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """Makes every size run on one path."""
    with forced(request.param):
        yield request.param


def in_turn(path: str) -> Iterator[Any]:
    """The cases, of which those that the other path's turn has run with --every-case alone."""
    for turn, case in enumerate(CASES):
        here = PATHS[turn % len(PATHS)] == path
        yield pytest.param(path, case, marks=[] if here else pytest.mark.every_case)


@pytest.mark.parametrize(
    ("path", "case"),
    [call for path in PATHS for call in in_turn(path)],
    ids=lambda x: x.id if isinstance(x, Case) else x,
    indirect=["path"],
)
def test_default_path(path: str, case: Case, seed: int):
    failures = [f"{v.name}: {v.failure}" for v in run_case(case, seed, "xla") if v.failure]
    assert not failures, "\n".join([path, *failures])


@pytest.mark.parametrize("path", ["blockwise"], indirect=True)
@pytest.mark.parametrize("case", [case for case in CASES if case.bias_kind == "alibi_steep"])
def test_rows_of_padding_have_no_weight(path: str, case: Case):
    """Whatever the slopes add there: exp of it was infinite, and gradients were NaN."""
    failures = [f"{v.name}: {v.failure}" for v in run_case(case, 1, "xla") if v.failure]
    assert not failures, "\n".join([path, *failures])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_case_is_the_problem_that_attention_understands(case: Case):
    """The emulator and the benchmarks take problem and extents from the case, without JAX."""
    inputs = make_inputs(case, 0)
    found, problem = canonicalise(call(case, inputs))
    assert case.problem == problem
    assert found.extents.tolist() == [list(entry) for entry in case.extents]
