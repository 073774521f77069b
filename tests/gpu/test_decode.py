"""`decode` on a GPU: conformance, the bits of contiguous keys, clamped pages, determinism."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from fa4_jax import decode, explain
from fa4_jax.conformance.paged import PAGED_CASES, PagedCase, make_cache, run_paged_case
from tests import paged_calls

LONG = PagedCase(
    dtype="bf16",
    head_dim=128,
    heads=(8, 2),
    page=64,
    table_pages=130,
    lengths=(8320, 4097, 0, 9000, 130),
)
LARGE = (
    LONG,
    dataclasses.replace(LONG, rows=4, query_lengths=(4, 1, 3, 4, 0), dtype="fp16"),
    dataclasses.replace(LONG, sinks=True, soft_cap=20.0, window=1000),
    dataclasses.replace(LONG, page=48, heads=(6, 6), head_dim=64),
    dataclasses.replace(LONG, head_dim=256, heads=(32, 2), value_dim=192),
    dataclasses.replace(LONG, head_dim=96, page=16, table_pages=500, shared=20),
)


@pytest.fixture(autouse=True)
def gpu() -> None:
    if jax.default_backend() != "gpu":
        pytest.skip("no GPU")


@pytest.mark.parametrize("case", [*PAGED_CASES, *LARGE], ids=lambda case: case.id)
def test_paged(case: PagedCase, seed: int):
    implementation = "kernel" if case.has_kernel else None
    found = run_paged_case(case, seed, implementation)
    assert [v for v in found if v.failure is not None] == []


@pytest.mark.parametrize("case", LARGE, ids=lambda case: case.id)
def test_pages_give_the_bits_of_attention(case: PagedCase, seed: int):
    """Both divide the keys into as many parts."""
    cache = make_cache(case, seed)
    told = explain(*cache.arrays, call=decode, **cache.options)
    assert told.splits > 1
    paged, contiguous = paged_calls.paged_and_contiguous(case, seed)
    for one, other in zip(paged, contiguous, strict=True):
        assert np.array_equal(one, other)


def test_numbers_of_no_page_are_clamped(seed: int):
    one, other = paged_calls.with_numbers_of_no_page(LONG, seed)
    assert np.array_equal(one, other)


@pytest.mark.parametrize("own_pools", [False, True])
def test_vmap_in_a_loop(own_pools: bool, seed: int):
    case = dataclasses.replace(LONG, lengths=(300, 7), table_pages=8)
    together, apart = paged_calls.vmapped_and_looped(case, own_pools, seed)
    for one, other in zip(together, apart, strict=True):
        np.testing.assert_allclose(
            one.astype(np.float32), other.astype(np.float32), rtol=1e-2, atol=1e-3
        )


def test_a_hundred_calls_give_the_same_bits(seed: int):
    """Alone, and beside other calls."""
    cache = make_cache(dataclasses.replace(LONG, sinks=True), seed)

    @jax.jit
    def run(*arrays: Any) -> Any:
        return decode(*arrays, sinks=cache.options["sinks"], return_residual=True)

    arrays = [jax.device_put(x) for x in cache.arrays]
    first = [np.asarray(x) for x in run(*arrays)]
    for found in [run(*arrays) for _ in range(100)]:
        for x, y in zip(found, first, strict=True):
            assert np.array_equal(np.asarray(x), y)
