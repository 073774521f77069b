"""`decode` on random page tables, against the float64 oracle."""

from __future__ import annotations

import functools
from typing import Any

import jax
import pytest

from fa4_jax import decode
from fa4_jax.paged import blockwise
from tests.paged_cases import Cache, PagedCase, failures, make_cache

Case = PagedCase
DRAFT = functools.partial(Case, rows=4, lengths=(70, 19, 3, 0))
CASES = (
    Case(),
    Case(dtype="bf16", head_dim=64, heads=(8, 1)),
    Case(dtype="fp16", head_dim=40, heads=(3, 3), page=24, lengths=(120, 1, 24)),
    Case(lengths=(500, 81, 80)),  # beyond the table
    Case(window=20),
    Case(window=(0, 7), lengths=(70, 1)),
    Case(window=(33, None), sinks=True, soft_cap=2.0, dtype="bf16"),
    Case(sinks=True),
    Case(soft_cap=0.7, heads=(6, 2)),
    Case(value_dim=24, dtype="bf16"),
    Case(shared=2, lengths=(70, 41, 50), dtype="bf16"),
    Case(query_lengths=(1, 0, 1)),
    DRAFT(),
    DRAFT(dtype="bf16", heads=(8, 2), shared=1),
    DRAFT(window=18, sinks=True),
    DRAFT(query_lengths=(4, 1, 3, 0), sinks=True),
    DRAFT(query_lengths=(2, 4, 4, 2), window=(3, 0), soft_cap=3.0),
    Case(rows=70, lengths=(70, 75, 12), query_lengths=(70, 30, 12), dtype="bf16"),
    Case(page=1, table_pages=40, lengths=(40, 3), rows=2),
    Case(page=256, table_pages=2, lengths=(300, 5), dtype="bf16"),
    Case(scales="K", dtype="bf16"),
    Case(scales="PK", dtype="fp16", rows=3, window=30),
    Case(scales="PK", dtype="bf16", rows=1, value_dim=8),
)


def run(cache: Cache, **options: Any) -> Any:
    """Runs `decode` on a cache."""
    return decode(*cache.arrays, return_residual=True, **cache.options, **options)


def check(case: PagedCase, seed: int) -> None:
    cache = make_cache(case, seed)
    assert failures(case, cache.inputs, *run(cache)) == []


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch):
    """Blocks of about 40 tokens of an entry, and of 3 rows."""
    jax.clear_caches()
    monkeypatch.setattr(blockwise, "BLOCK_ELEMENTS_ON_CPU", 40 * 16 * 6)
    monkeypatch.setattr(blockwise, "BLOCK_ROWS", 3)
    yield
    jax.clear_caches()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_one_block(case: PagedCase, seed: int):
    check(case, seed)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_many_blocks(case: PagedCase, seed: int, small_blocks: None):
    check(case, seed)
