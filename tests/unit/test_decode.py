"""`decode` on random page tables, against the float64 oracle."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fa4_jax import decode, log
from fa4_jax.conformance.oracle import oracle
from fa4_jax.conformance.paged import (
    PAGED_CASES,
    Cache,
    PagedCase,
    make_cache,
    run_paged_case,
)
from fa4_jax.paged import blockwise
from tests import example_counts

Case = PagedCase


def run(cache: Cache, **options: Any) -> Any:
    """Runs `decode` on a cache."""
    return decode(*cache.arrays, return_residual=True, **cache.options, **options)


def programs(jitted: Any) -> int:
    """How many programs a jitted function has been compiled to."""
    return jitted._cache_size()


def check(case: PagedCase, seed: int) -> None:
    assert [v for v in run_paged_case(case, seed) if v.failure is not None] == []


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch):
    """Blocks of about 40 tokens of an entry, and of 3 rows."""
    jax.clear_caches()
    monkeypatch.setattr(blockwise, "BLOCK_ELEMENTS_ON_CPU", 40 * 16 * 6)
    monkeypatch.setattr(blockwise, "BLOCK_ROWS", 3)
    yield
    jax.clear_caches()


@pytest.mark.parametrize("case", PAGED_CASES, ids=lambda case: case.id)
def test_one_block(case: PagedCase, seed: int):
    check(case, seed)


@pytest.mark.parametrize("case", PAGED_CASES[3:], ids=lambda case: case.id)
def test_many_blocks(case: PagedCase, seed: int, small_blocks: None):
    check(case, seed)


several = settings(
    max_examples=example_counts.count(30),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    database=None,
)


@several
@given(st.data(), st.integers(0, 2**32 - 1))
def test_any_lengths_and_tables(data: st.DataObject, seed: int):
    rows = data.draw(st.sampled_from([1, 3]))
    case = Case(
        rows=rows,
        page=data.draw(st.sampled_from([4, 5])),
        lengths=tuple(data.draw(st.lists(st.integers(0, 30), min_size=3, max_size=3))),
        query_lengths=tuple(data.draw(st.lists(st.integers(0, rows), min_size=3, max_size=3))),
        window=data.draw(st.sampled_from([None, 6])),
        shared=data.draw(st.integers(0, 1)),
    )
    check(case, seed)


@pytest.mark.parametrize("window", [None, 21])
def test_where_pages_lie_changes_no_bit(window: Any, seed: int, small_blocks: None):
    case = Case(rows=2, window=window, dtype="bf16")
    cache = make_cache(case, seed)
    order = np.random.default_rng(seed).permutation(len(cache.key_pages))
    where = np.argsort(order)
    table = np.where(cache.page_table < len(order), where[cache.page_table % len(order)], -1)
    moved = dataclasses.replace(
        cache,
        key_pages=cache.key_pages[order],
        value_pages=cache.value_pages[order],
        page_table=table.astype(np.int32),
    )
    for x, y in zip(run(cache), run(moved), strict=True):
        np.testing.assert_array_equal(x, y)


def test_neighbours_change_no_bit(seed: int, small_blocks: None):
    case = Case(rows=2, window=40, lengths=(70, 17, 0))
    cache = make_cache(case, seed)
    others = dataclasses.replace(cache, lengths=np.array([70, 80, 3], np.int32))
    for x, y in zip(run(cache), run(others), strict=True):
        np.testing.assert_array_equal(x[0], y[0])


def test_float64(seed: int):
    case = Case(rows=2)
    cache = make_cache(case, seed)
    with jax.enable_x64(True):
        wide = [np.asarray(x, np.float64) for x in cache.arrays[:3]]
        output, lse = decode(*wide, *cache.arrays[3:], return_residual=True)
        assert output.dtype == lse.dtype == np.float64
        truth = oracle(case.contiguous, cache.inputs)
        np.testing.assert_allclose(output, truth["output"], rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(lse, truth["lse"], rtol=1e-12)


def test_traced_numbers_do_the_same(seed: int):
    cache = make_cache(Case(rows=2, dtype="bf16"), seed)
    run = jax.jit(lambda **options: decode(*cache.arrays, **options))
    static = decode(*cache.arrays, scale=0.3, logits_soft_cap=2.0)
    np.testing.assert_array_equal(run(scale=0.3, logits_soft_cap=2.0), static)


@pytest.mark.parametrize("pages", [None, 0], ids=["one pool", "pools"])
def test_vmap(pages: int | None, seed: int):
    cases = [make_cache(Case(rows=2), seed + i) for i in range(3)]
    first = cases[0].arrays
    arrays = [np.stack(x) for x in zip(*(x.arrays for x in cases), strict=True)]
    if pages is None:
        arrays[1:3] = first[1:3]
    mapped = jax.vmap(decode, in_axes=(0, pages, pages, 0, 0))
    found = jax.jit(mapped)(*arrays)
    for i, cache in enumerate(cases):
        own = [*cache.arrays]
        if pages is None:
            own[1:3] = first[1:3]
        np.testing.assert_allclose(found[i], decode(*own), rtol=1e-5, atol=1e-6)


def test_lengths_and_tables_are_values_of_the_run(seed: int):
    caches = [make_cache(Case(lengths=lengths), seed) for lengths in ((70, 17, 1), (3, 80, 33))]
    jitted: Any = jax.jit(decode)

    @jax.jit
    def looped(arrays: Any) -> jax.Array:
        def step(i: Any, total: jax.Array) -> jax.Array:
            query, keys, values, table, lengths = arrays
            return total + decode(query, keys, values, table, lengths - i)

        return jax.lax.fori_loop(0, 2, step, jnp.zeros_like(arrays[0]))

    for cache in caches:
        jitted(*cache.arrays)
        before = dataclasses.replace(cache, lengths=cache.lengths - 1)
        parts = [decode(*x.arrays) for x in (cache, before)]
        np.testing.assert_allclose(looped(cache.arrays), parts[0] + parts[1], rtol=1e-5, atol=1e-6)
    assert programs(jitted) == programs(looped) == 1


@pytest.mark.parametrize(
    "shapes", [(0, 1, 3), (2, 0, 3), (2, 3, 0)], ids=["no batch", "no rows", "no table"]
)
@pytest.mark.parametrize("sinks", [False, True])
def test_nothing_to_compute(shapes: tuple[int, int, int], sinks: bool):
    b, t, m = shapes
    query, pages = jnp.ones((b, t, 4, 8)), jnp.ones((5, 4, 2, 8))
    table, lengths = jnp.zeros((b, m), jnp.int32), jnp.full(b, 3, jnp.int32)
    sink = jnp.arange(4.0) if sinks else None
    output, lse = decode(query, pages, pages, table, lengths, sinks=sink, return_residual=True)
    np.testing.assert_array_equal(output, np.zeros((b, t, 4, 8)))
    expected = np.arange(4.0)[None, :, None] if sinks else np.float32(-np.inf)
    np.testing.assert_array_equal(lse, np.broadcast_to(expected, (b, 4, t)))


def test_the_log_says_once_that_no_kernel_reads_pages(caplog: pytest.LogCaptureFixture):
    log.warn_once.cache_clear()
    cache = make_cache(Case(), 0)

    def lower(**options: Any) -> None:
        jitted = jax.jit(lambda *arrays: decode(*arrays, **options))
        jitted.trace(*cache.arrays).lower(lowering_platforms=("cuda",))

    with caplog.at_level("WARNING", "fa4_jax"):
        lower(implementation="xla")
        decode(*cache.arrays)
        assert not caplog.records
        lower()
        lower()
    (record,) = caplog.records
    assert record.getMessage() == (
        "decode uses the default path: query dtype f32: the kernels take bf16 and fp16"
    )
