"""Block ranges of a band against counting."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4_jax.blocks import Side, band_range, block_size, edge_block
from fa4_jax.problem import UNBOUNDED

SIDES = st.one_of(st.integers(0, 40), st.just(UNBOUNDED))


@settings(max_examples=300, deadline=None, database=None)
@given(
    first=st.integers(-60, 60),
    rows=st.integers(1, 20),
    below=SIDES,
    above=SIDES,
    size=st.integers(1, 16),
    length=st.integers(1, 70),
)
def test_band_range(first: int, rows: int, below: int, above: int, size: int, length: int):
    side = Side(size, -(-length // size), length // size)
    last = first + rows - 1
    found = [int(x) for x in band_range(first, last, (below, above), side)]
    lo, full_lo, full_hi, hi = found
    assert 0 <= lo <= full_lo <= full_hi <= hi <= side.count
    positions = np.arange(first, last + 1)[:, None]
    for block in range(side.count):
        others = np.arange(block * size, (block + 1) * size)[None, :]
        seen = (others >= positions - below) & (others <= positions + above)
        if seen[:, others[0] < length].any():
            assert lo <= block < hi
        if full_lo <= block < full_hi:
            assert seen.all() and block < side.whole
    wholes = range(full_lo, full_hi)
    edges = [
        int(edge_block(i, band_range(first, last, (below, above), side)))
        for i in range(hi - full_hi + full_lo - lo)
    ]
    assert sorted([*edges, *wholes]) == list(range(lo, hi))


@settings(max_examples=200, deadline=None, database=None)
@given(length=st.integers(1, 5000), target=st.sampled_from([16, 64, 362, 512]))
def test_block_size(length: int, target: int):
    size = block_size(length, target)
    assert size % 8 == 0 and size <= target + 8
    blocks = -(-length // size)
    assert blocks * size - length < 8 * blocks
