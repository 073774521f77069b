"""Every conformance case of paged caches on a GPU, by the kernels where they take it."""

from __future__ import annotations

import jax
import pytest

from fa4_jax.conformance.paged import PAGED_CASES, PagedCase, run_paged_case


@pytest.mark.parametrize("case", PAGED_CASES, ids=lambda case: case.id)
def test_paged(case: PagedCase, seed: int):
    if jax.default_backend() != "gpu":
        pytest.skip("no GPU")
    implementation = "kernel" if case.has_kernel else None
    found = run_paged_case(case, seed, implementation)
    assert [v for v in found if v.failure is not None] == []
