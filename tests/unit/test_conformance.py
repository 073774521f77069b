"""Every conformance case on the pure-JAX default."""

from __future__ import annotations

import pytest

from fa4_jax.conformance.cases import CASES, Case
from fa4_jax.conformance.runner import run_case


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_default_path(case: Case, seed: int):
    failures = [f"{v.name}: {v.failure}" for v in run_case(case, seed, "xla") if v.failure]
    assert not failures, "\n".join(failures)
