"""Which blocks of a band meet: integers in, integers out.

Used with Python ints and with traced ones. A band lets position p see the positions
p - below ... p + above on the other side.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from fa4_jax.problem import UNBOUNDED

Int = Any  # int or int32[]


class Range(NamedTuple):
    """Block indices, lo <= full_lo <= full_hi <= hi: whole in [full_lo, full_hi), edges around."""

    lo: Int
    full_lo: Int
    full_hi: Int
    hi: Int


class Side(NamedTuple):
    """The blocks that are looped over: `count` of `size`, of which `whole` hold no padding."""

    size: int
    count: int
    whole: int


def block_size(length: int, target: int) -> int:
    """Size of near-equal blocks of about `target` elements: little of the last is padding."""
    blocks = max(1, -(-length // target))
    return -(-length // (blocks * 8)) * 8


def band_range(first: Int, last: Int, window: tuple[int, int], side: Side) -> Range:
    """Blocks that the positions first..last see: some of them in part, some entirely.

    Args:
      first, last: inclusive range of positions, in the coordinates of the other side.
      window: (below, above); UNBOUNDED for no limit.
      side: blocks of the other side.
    """
    below, above = window
    # Beyond every position of the other side: further would not change the sums, but overflow them.
    high_first, high_last = (jnp.minimum(x, UNBOUNDED - 1) for x in (first, last))
    lo = 0 if below >= UNBOUNDED else (first - below) // side.size
    hi = side.count if above >= UNBOUNDED else (high_last + above) // side.size + 1
    full_lo = 0 if below >= UNBOUNDED else -((below - last) // side.size)
    full_hi = side.whole if above >= UNBOUNDED else (high_first + above + 1) // side.size
    lo = jnp.clip(lo, 0, side.count)
    hi = jnp.clip(hi, lo, side.count)
    full_lo = jnp.clip(full_lo, lo, hi)
    full_hi = jnp.clip(jnp.minimum(full_hi, side.whole), full_lo, hi)
    return Range(lo, full_lo, full_hi, hi)


def edge_block(step: Int, blocks: Range) -> Int:
    """Index of the step-th edge block: those before the whole ones, then those after."""
    before = blocks.full_lo - blocks.lo
    return jnp.where(step < before, blocks.lo + step, blocks.full_hi + step - before)
