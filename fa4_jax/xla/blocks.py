"""Which blocks of a band meet: integers in, integers out.

Used with Python ints and with traced ones. A band lets position p see the positions
p - below ... p + above on the other side.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp

from fa4_jax.bands import UNBOUNDED

Int = Any  # int or int32[]


class Range(NamedTuple):
    """Block indices in [lo, hi), lo <= hi."""

    lo: Int
    hi: Int


@dataclasses.dataclass(frozen=True)
class Side:
    """The blocks that are looped over: `count` of `size`, of which `whole` hold no padding."""

    size: int
    count: int
    whole: int


def block_size(length: int, target: int) -> int:
    """Size of near-equal blocks of about `target` elements: little of the last is padding."""
    blocks = max(1, -(-length // target))
    return -(-length // (blocks * 8)) * 8


def band_range(first: Int, last: Int, window: tuple[int, int], side: Side) -> Range:
    """Blocks of which the positions first..last see at least a part; ints without a window.

    Args:
      first, last: inclusive range of positions, in the coordinates of the other side.
      window: (below, above); UNBOUNDED for no limit.
      side: blocks of the other side.
    """
    below, above = window
    lo, hi = 0, side.count
    if below < UNBOUNDED:
        lo = jnp.clip((first - below) // side.size, 0, side.count)
    if above < UNBOUNDED:
        # Beyond every position of the other side: further would change nothing, but overflow.
        last = jnp.minimum(last, UNBOUNDED - 1)
        hi = jnp.clip((last + above) // side.size + 1, lo, side.count)
    return Range(lo, hi)
