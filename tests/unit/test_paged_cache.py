"""`PagedCache` holds what was appended, whatever is grown, shared, copied and released."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fa4_jax import PagedCache, attention, decode
from tests import example_counts

B, K, H, PAGE, PAGES, ENTRIES, LAYERS = 3, 2, 4, 4, 14, 6, 2
several = settings(
    max_examples=example_counts.count(25),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    database=None,
)


def empty(**changes: Any) -> PagedCache:
    sizes: dict[str, Any] = {
        "num_pages": PAGES,
        "max_pages": ENTRIES,
        "page_size": PAGE,
        "layers": LAYERS,
        "heads": K,
        "head_dim": H,
        "dtype": jnp.bfloat16,
    }
    return PagedCache.empty(changes.pop("batch", B), **(sizes | changes))


class Model:
    """What a cache should hold: of each entry a list of rows [LAYERS, 2, K, H]."""

    def __init__(self) -> None:
        self.rows: list[list[np.ndarray]] = [[] for _ in range(B)]

    def append(self, rows: np.ndarray, counts: np.ndarray) -> None:
        """Adds the first counts[b] rows of [B, T, LAYERS, 2, K, H]."""
        for entry, count in enumerate(counts):
            self.rows[entry] += list(rows[entry, :count])

    def reorder(self, parents: np.ndarray) -> None:
        """Copies every entry's parent."""
        self.rows = [list(self.rows[parent]) for parent in parents]

    def release(self, done: np.ndarray) -> None:
        """Forgets entries."""
        self.rows = [[] if flag else rows for rows, flag in zip(self.rows, done, strict=True)]

    def pages_of(self, counts: np.ndarray | None = None) -> int:
        """Pages at most, if none were shared and each got `counts` more tokens."""
        more = np.zeros(B, int) if counts is None else counts
        return sum(-(-(len(x) + int(n)) // PAGE) for x, n in zip(self.rows, more, strict=True))


def held(cache: PagedCache, entry: int) -> np.ndarray:
    """What a cache holds of an entry, [length, LAYERS, 2, K, H]."""
    length = int(cache.lengths[entry])
    table = np.asarray(cache.page_table[entry])[: -(-length // PAGE)]
    layers = [
        [np.asarray(pages)[table].reshape(-1, K, H)[:length] for pages in cache.pages(layer)]
        for layer in range(LAYERS)
    ]
    return np.moveaxis(np.asarray(layers), 2, 0)


def assert_holds(cache: PagedCache, model: Model) -> None:
    for entry, rows in enumerate(model.rows):
        expected = np.asarray(rows).reshape(len(rows), LAYERS, 2, K, H)
        np.testing.assert_array_equal(held(cache, entry), expected)


@jax.jit
def add(cache: PagedCache, rows: jax.Array, counts: jax.Array) -> PagedCache:
    """Grows and appends the first counts[b] rows of [B, T, LAYERS, 2, K, H]."""
    cache = cache.grow(counts)
    for layer in range(LAYERS):
        cache = cache.append(layer, rows[:, :, layer, 0], rows[:, :, layer, 1], counts)
    return cache


def programs(jitted: Any) -> int:
    """How many programs a jitted function has been compiled to."""
    return jitted._cache_size()


reorder = jax.jit(PagedCache.reorder)
release = jax.jit(PagedCache.release)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.lists(st.integers(0, 5), min_size=B, max_size=B)),
        st.tuples(st.just("reorder"), st.lists(st.integers(0, B - 1), min_size=B, max_size=B)),
        st.tuples(st.just("release"), st.lists(st.booleans(), min_size=B, max_size=B)),
    ),
    min_size=1,
    max_size=12,
)


@several
@given(OPERATIONS, st.integers(0, 2**32 - 1))
def test_it_holds_what_was_appended(operations: Any, seed: int):
    rng = np.random.default_rng(seed)
    cache, model = empty(), Model()
    for name, values in operations:
        values = np.asarray(values)
        if name == "add":
            longest = max(len(x) + n for x, n in zip(model.rows, values, strict=True))
            if longest > ENTRIES * PAGE or model.pages_of(values) > PAGES:
                continue
            rows = rng.normal(size=(B, 5, LAYERS, 2, K, H)).astype(jnp.bfloat16)
            cache = add(cache, rows, values)
            model.append(rows, values)
        elif name == "reorder":
            copies = sum(-(-len(model.rows[parent]) // PAGE) for parent in values)
            if copies > PAGES:
                continue
            cache = reorder(cache, values)
            model.reorder(values)
        else:
            cache = release(cache, values)
            model.release(values)
        assert_holds(cache, model)
    assert not cache.is_exhausted.any()
    assert programs(add) <= 1 and programs(reorder) <= 1


def test_beams_share_full_pages():
    cache = add(empty(), jnp.ones((B, 10, LAYERS, 2, K, H), jnp.bfloat16), jnp.array([10, 0, 0]))
    cache = cache.reorder(np.zeros(B, int))
    table = np.asarray(cache.page_table)
    assert (table[:, :2] == table[0, :2]).all()
    assert len(set(table[:, 2])) == B
    assert cache.lengths.tolist() == [10, 10, 10]


def test_too_few_pages_are_told():
    cache = empty(num_pages=4)
    with pytest.raises(ValueError, match=r"entries \[1\] need more pages .* num_pages=4"):
        cache.grow(np.array([9, 8, 0]))
    with pytest.raises(ValueError, match=r"entries \[2\] need more .* max_pages=6; .*, 25\]"):
        empty().grow(np.array([1, 1, 25]))
    with pytest.raises(ValueError, match=r"entries \[1, 2\] need more pages"):
        cache.grow(np.array([13, 0, 0])).reorder(np.zeros(B, int))


def test_inside_jit_an_entry_without_pages_is_marked_and_the_others_are_right(seed: int):
    rng = np.random.default_rng(seed)
    cache, model = empty(num_pages=4), Model()
    counts = np.array([5, 9, 2])
    rows = rng.normal(size=(B, 9, LAYERS, 2, K, H)).astype(jnp.bfloat16)
    cache = add(cache, rows, counts)
    assert cache.is_exhausted.tolist() == [False, True, True]
    model.append(rows, counts)
    np.testing.assert_array_equal(held(cache, 0), np.asarray(model.rows[0]))
    for _ in range(8):  # past the table, too
        cache = add(cache, rows, np.array([0, 5, 0]))
    np.testing.assert_array_equal(held(cache, 0), np.asarray(model.rows[0]))
    cache = cache.release(jnp.array([False, True, True]))
    cache = add(cache, rows, np.array([0, 0, 2]))
    model.release(np.array([False, True, True]))
    model.append(rows, np.array([0, 0, 2]))
    assert_holds(cache, model)
    assert not cache.is_exhausted.any()


def test_float8_pages_hold_what_was_divided_by_the_scales(seed: int):
    rng = np.random.default_rng(seed)
    cache = empty(layers=1, dtype=jnp.float8_e4m3fn)
    scale = jnp.asarray([0.5, 2.0])
    query, key = (jnp.asarray(rng.normal(size=(B, 9, n, H)), jnp.bfloat16) for n in (4, K))
    narrow = (key / scale[None, None, :, None].astype(key.dtype)).astype(jnp.float8_e4m3fn)
    cache = cache.grow(9).append(0, narrow, narrow)
    tables = cache.page_table, cache.lengths
    found = decode(query, *cache.pages(0), *tables, key_scale=scale, value_scale=scale)
    whole = narrow.astype(jnp.bfloat16) * scale[None, None, :, None].astype(jnp.bfloat16)
    expected = attention(query, whole, whole, is_causal=True)
    np.testing.assert_allclose(*(np.float32(x) for x in (found, expected)), rtol=2e-2, atol=1e-2)


def test_lengths_may_be_set_back(seed: int):
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(B, 9, LAYERS, 2, K, H)).astype(jnp.bfloat16)
    cache, model = add(empty(), rows, np.array([9, 9, 9])), Model()
    cache = dataclasses.replace(cache, lengths=cache.lengths - 6)
    cache = add(cache, rows[:, 4:], np.array([5, 5, 5]))
    model.append(rows, np.array([3, 3, 3]))
    model.append(rows[:, 4:], np.array([5, 5, 5]))
    assert_holds(cache, model)


@functools.partial(jax.jit, donate_argnums=0)
def step(cache: PagedCache, row: jax.Array) -> tuple[PagedCache, jax.Array]:
    """Appends one row [B, 1, K, H] and attends with it."""
    cache = cache.grow(1)
    for layer in range(LAYERS):
        cache = cache.append(layer, row, row)
    found = decode(row, *cache.pages(1), cache.page_table, cache.lengths)
    return cache, found


def test_a_donated_cache_is_updated_in_place_by_one_program(seed: int):
    rng = np.random.default_rng(seed)
    cache = empty()
    where = [x.unsafe_buffer_pointer() for x in (*cache.key_pages, *cache.value_pages)]
    for _ in range(20):
        before = cache
        row = jnp.asarray(rng.normal(size=(B, 1, K, H)), jnp.bfloat16)
        cache, _ = step(cache, row)
        assert before.key_pages[0].is_deleted()
    assert [x.unsafe_buffer_pointer() for x in (*cache.key_pages, *cache.value_pages)] == where
    assert programs(step) == 1


def temporary_bytes(program: Any) -> int:
    memory = program.compile().memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes


def test_a_step_holds_no_copy_of_the_pages():
    cache = empty(num_pages=4096, head_dim=64, dtype=jnp.float32)
    row = jax.ShapeDtypeStruct((B, 1, K, 64), jnp.float32)
    assert temporary_bytes(step.lower(cache, row)) < cache.key_pages[0].nbytes / 8


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("pages", [1, 64], ids=["one block", "blocks"])
def test_reading_holds_no_copy_of_narrow_pages(dtype: str, pages: int):
    """XLA's CPU would convert them all, since it gathers narrow numbers in float32."""
    shape = jax.ShapeDtypeStruct((8192, 64, K, 64), dtype)
    query = jax.ShapeDtypeStruct((B, 1, K, 64), jnp.bfloat16)
    table, lengths = (jax.ShapeDtypeStruct((B, *x), jnp.int32) for x in ((pages,), ()))
    program = jax.jit(decode).lower(query, shape, shape, table, lengths)
    assert temporary_bytes(program) < 8192 * 64 * K * 64 / 8
