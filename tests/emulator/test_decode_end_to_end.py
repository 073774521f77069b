"""fa4_jax.decode on JAX's CPU through the real FFI handler and the emulated GPU."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

import numpy as np
import pytest

from fa4_jax.conformance.paged import PAGED_CASES, PagedCase
from tests import paged_calls
from tests.emulator import emulated_decode
from tests.emulator.processes import HOW, Gpu

if importlib.util.find_spec("cutlass") is None:
    pytest.skip("the PTX comes from CuTe-DSL, which is not here", allow_module_level=True)

LONG = PagedCase(
    dtype="bf16", head_dim=64, rows=3, table_pages=20, lengths=(310, 33, 0), query_lengths=(3, 2, 1)
)


@pytest.mark.parametrize(
    "case", [case for case in (*PAGED_CASES, LONG) if case.has_kernel], ids=lambda case: case.id
)
@pytest.mark.parametrize("arch", ["gpu", "blackwell"])
def test_conforms(request: pytest.FixtureRequest, arch: str, case: PagedCase, seed: int) -> None:
    gpu: Gpu = request.getfixturevalue(arch)
    found = gpu(emulated_decode.verdicts, case, seed, HOW[seed % len(HOW)])
    assert len(found) == 2
    assert not [verdict for verdict in found if verdict.failure]


@pytest.mark.parametrize("scores", [{}, {"sinks": True, "soft_cap": 3.0, "window": (90, None)}])
def test_pages_give_the_bits_of_attention(gpu: Gpu, seed: int, scores: dict[str, Any]) -> None:
    case = dataclasses.replace(LONG, **scores)
    paged, contiguous = gpu(paged_calls.paged_and_contiguous, case, seed)
    for one, other in zip(paged, contiguous, strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize("rows", [1, 40])  # of the split forward, and of that of many rows
@pytest.mark.parametrize("arch", ["gpu", "blackwell"])
def test_numbers_of_no_page_are_clamped(
    request: pytest.FixtureRequest, arch: str, rows: int, seed: int
) -> None:
    gpu: Gpu = request.getfixturevalue(arch)
    case = PagedCase(dtype="bf16", head_dim=64, rows=rows)
    one, other = gpu(paged_calls.with_numbers_of_no_page, case, seed)
    assert np.array_equal(one, other)


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("own_pools", [False, True])
def test_vmap_in_a_loop(gpu: Gpu, own_pools: bool, rows: int, seed: int) -> None:
    case = PagedCase(dtype="bf16", head_dim=64, rows=rows)
    together, apart = gpu(paged_calls.vmapped_and_looped, case, own_pools, seed)
    for one, other in zip(together, apart, strict=True):
        np.testing.assert_allclose(
            one.astype(np.float32), other.astype(np.float32), rtol=1e-2, atol=1e-3
        )
