"""Every conformance case runs on both paths of the pure-JAX default."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fa4_jax.conformance.cases import CASES, Case
from fa4_jax.conformance.runner import run_case
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
