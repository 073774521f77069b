"""Visited blocks are exactly those that hold a seen pair, read from the rows or the columns."""

import dataclasses

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4_jax.bands import (
    LIMIT,
    PYTHON,
    UNBOUNDED,
    Arithmetic,
    Band,
    may_meet,
    row_limits,
    visible_pairs,
    visited_blocks,
)

WINDOWS = st.sampled_from((0, 1, 3, 7, 20, UNBOUNDED))
BANDS = st.builds(
    Band,
    query_length=st.integers(0, 30),
    key_length=st.integers(0, 30),
    offset=st.integers(-40, 40),
    window_left=WINDOWS,
    window_right=WINDOWS,
)
TILES = st.sampled_from((1, 2, 3, 4, 8))


def seen_pairs(band: Band) -> set[tuple[int, int]]:
    """Returns the relation itself, pair by pair."""
    return {
        (i, j)
        for i in range(band.query_length)
        for j in range(band.key_length)
        if -band.window_left <= j - i - band.offset <= band.window_right
    }


def visits(band: Band, rows: int, columns: int) -> set[tuple[int, int]]:
    """Returns every visit as (row tile, column block), as kernels ask for them, with too many
    tiles.
    """
    tiles = band.query_length // rows + 3
    ranges = [visited_blocks(band, t * rows, rows, columns, PYTHON) for t in range(tiles)]
    return {(t, n) for t, r in enumerate(ranges) for n in range(r.begin, r.end)}


@settings(max_examples=500)
@given(BANDS, TILES, TILES)
def test_visits_are_the_blocks_that_hold_a_seen_pair(band, rows, columns):
    expected = {(i // rows, j // columns) for i, j in seen_pairs(band)}
    assert visits(band, rows, columns) == expected
    assert {(m, n) for n, m in visits(band.transposed(), columns, rows)} == expected


@settings(max_examples=500)
@given(BANDS, TILES, TILES)
def test_unmasked_blocks_hold_only_seen_pairs(band, rows, columns):
    pairs = seen_pairs(band)
    for tile in range(-(-band.query_length // rows)):
        blocks = visited_blocks(band, tile * rows, rows, columns, PYTHON)
        for n in range(max(blocks.begin, blocks.full_begin), min(blocks.full_end, blocks.end)):
            for i in range(tile * rows, min((tile + 1) * rows, band.query_length)):
                assert all((i, j) in pairs for j in range(n * columns, (n + 1) * columns))


@settings(max_examples=500)
@given(BANDS)
def test_row_limits_are_the_seen_columns(band):
    pairs = seen_pairs(band)
    for i in range(band.query_length):
        low, high = row_limits(band, i, PYTHON)
        assert {j for r, j in pairs if r == i} == set(range(low, high))


@settings(max_examples=500)
@given(BANDS, TILES, TILES)
def test_deterministic_turns_are_a_numbering_without_gaps(band, rows, columns):
    """The backward's turns at a query tile are 0, 1, 2, ... over the key tiles that visit it."""
    turns: dict[int, list[int]] = {}
    for m, n in visits(band, rows, columns):
        blocks = visited_blocks(band, m * rows, rows, columns, PYTHON)
        turns.setdefault(m, []).append(n - blocks.begin)
    for order in turns.values():
        assert sorted(order) == list(range(len(order)))


@settings(max_examples=500)
@given(BANDS, st.one_of(st.none(), st.integers(0, 40)))
def test_visible_pairs_are_counted(band, rows):
    seen = seen_pairs(band)
    limit = band.query_length if rows is None else rows
    assert visible_pairs(band, rows) == sum(i < limit for i, _ in seen)


@settings(max_examples=500)
@given(BANDS, *[st.integers(0, 20)] * 2, *[st.integers(1, 8)] * 2)
def test_ranges_that_may_meet(band, first_row, first_column, rows, columns):
    endless = Band(100, 100, band.offset, band.window_left, band.window_right)
    rows = range(first_row, first_row + rows)
    columns = range(first_column, first_column + columns)
    some = any(i in rows and j in columns for i, j in seen_pairs(endless))
    assert may_meet(band, rows, columns) == some


EDGES = st.sampled_from((0, 1, LIMIT - 1))
SIDES = st.sampled_from((0, 1, LIMIT, UNBOUNDED - 1, UNBOUNDED))


@settings(max_examples=500)
@given(EDGES, EDGES, st.sampled_from((1 - LIMIT, -1, 0, 1, LIMIT - 1)), SIDES, SIDES, EDGES)
def test_no_sum_of_int32_overflows(rows, keys, offset, left, right, row):
    """The kernels compute in int32; here NumPy does, which raises where a sum overflows."""
    use = Arithmetic(np.minimum, np.maximum, np.where)
    for band in (
        Band(rows, keys, offset, left, right),
        Band(rows, keys, offset, left, right).transposed(),
    ):
        narrow = Band(*map(np.int32, dataclasses.astuple(band)))
        with np.errstate(over="raise"):
            assert row_limits(narrow, np.int32(row), use) == row_limits(band, row, PYTHON)
