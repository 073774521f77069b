"""Compares block ranges of a band with counting."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fa4_jax.bands import UNBOUNDED
from fa4_jax.operands import Operands
from fa4_jax.problem import Problem
from fa4_jax.xla import blockwise
from fa4_jax.xla.blocks import Range, Side, block_size

SIDES = st.one_of(st.integers(0, 40), st.sampled_from([UNBOUNDED - 1, UNBOUNDED]))
LARGE = st.sampled_from([-UNBOUNDED, UNBOUNDED])


@settings(max_examples=300, deadline=None, database=None)
@given(
    first=st.integers(-60, 60),
    rows=st.integers(1, 20),
    below=SIDES,
    above=SIDES,
    size=st.integers(1, 16),
    length=st.integers(1, 70),
)
def test_range(first: int, rows: int, below: int, above: int, size: int, length: int):
    side = Side(size, -(-length // size), length // size)
    last = first + rows - 1
    found = Range(first, last, (below, above), side)
    lo, hi = int(found.lo), int(found.hi)
    assert 0 <= lo <= side.count and 0 <= hi <= side.count
    positions = np.arange(first, last + 1)[:, None]
    for block in range(side.count):
        others = np.arange(block * size, (block + 1) * size)[None, :]
        seen = (others >= positions - below) & (others <= positions + above)
        assert (lo <= block < hi) or not seen.any()


@settings(max_examples=60, deadline=None, database=None)
@example((1, 9), [12], (0, 0), True)  # the only row sees padding of the only block of keys
@given(
    lengths=st.tuples(st.integers(1, 200), st.integers(1, 200)),
    offsets=st.lists(st.one_of(st.integers(-250, 250), LARGE), min_size=1, max_size=3),
    window=st.tuples(SIDES, SIDES),
    common=st.booleans(),
)
def test_blocks_of_a_batch_whose_offsets_are_arrays(
    lengths: tuple[int, int], offsets: list[int], window: tuple[int, int], common: bool
):
    t, s = lengths
    offsets = offsets[:1] if common else offsets
    problem = Problem(len(offsets), t, s, 8192, 8192, 8, "f32", 1.0, window)
    operand = jnp.zeros((len(offsets), 1, 1, 1))
    extents = jnp.array([[t, s, offset, 0] for offset in offsets], jnp.int32)
    offset = jnp.int32(offsets[0]) if common else None
    operands = Operands(operand, operand, operand, extents, offset=offset)
    grid = blockwise.make_grid(problem, operands)
    rows, keys = grid.tiling.rows, grid.tiling.keys
    left, right = window
    distance = np.arange(keys.size * keys.count)[None, None] - np.array(offsets)[:, None, None]
    distance = distance - np.arange(rows.size * rows.count)[None, :, None]
    seen = (left == UNBOUNDED) | (distance >= -left)
    seen = np.logical_and(seen, (right == UNBOUNDED) | (distance <= right))
    seen = seen.reshape(len(offsets), rows.count, rows.size, keys.count, keys.size)
    real = seen & (np.arange(keys.count * keys.size) < s).reshape(keys.count, keys.size)
    # [row block, key block]; the ranges do not know which columns of the last block are padding.
    needed, padded = (np.any(x, axis=(0, 2, 4)) for x in (real, seen))
    for ranges, needed_of, padded_of, side in (
        ([grid.row_range(i) for i in range(rows.count)], needed, padded, keys),
        ([grid.key_range(i) for i in range(keys.count)], needed.T, padded.T, rows),
    ):
        for i, found in enumerate(ranges):
            lo, hi = int(found.lo), int(found.hi)
            blocks = np.arange(side.count)
            assert not (needed_of[i] & ((blocks < lo) | (blocks >= hi))).any()
            if common and side is keys:
                assert padded_of[i][lo:hi].all()  # no block is visited in vain


@settings(max_examples=200, deadline=None, database=None)
@given(length=st.integers(1, 5000), target=st.sampled_from([16, 64, 362, 512]))
def test_block_size(length: int, target: int):
    size = block_size(length, target)
    assert size % 8 == 0 and size <= target + 8
    blocks = -(-length // size)
    assert blocks * size - length < 8 * blocks


@pytest.mark.parametrize(("backend", "size"), [("cpu", 96), ("gpu", 688), ("tpu", 96)])
def test_a_gpu_has_larger_blocks(backend: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """128 heads of 4096 rows: 2^20 scores in flight, or 2^26."""
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    problem = Problem(8, 4096, 4096, 16, 16, 128, "bf16", 1.0)
    tiling = blockwise.square(problem)
    assert (tiling.rows.size, tiling.keys.size) == (size, size)
