"""Which blocks of a band meet: integers in, integers out.

Used with Python ints and with traced ones. A band lets position p see the positions
p - below ... p + above on the other side.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from fa4_jax.bands import UNBOUNDED

Int = Any  # int, int32[] or uint32[]


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
    # Unsigned, since a division of signed numbers costs ten operations in every kernel.
    size, count = (jnp.asarray(x, jnp.uint32) for x in (side.size, side.count))

    def number(position: Int) -> Int:
        """0 for what lies before all positions."""
        position = lax.convert_element_type(position, jnp.int32)
        return lax.convert_element_type(lax.max(position, np.int32(0)), jnp.uint32)

    lo, hi = 0, count
    if below < UNBOUNDED:
        lo = lax.min(lax.div(number(first - below), size), count)
    if above < UNBOUNDED:
        # Beyond every position of the other side: further would change nothing, but overflow.
        last = lax.min(lax.convert_element_type(last, jnp.int32), np.int32(UNBOUNDED - 1))
        # As many blocks as hold the positions up to the last.
        hi = lax.div(number(last + (above + 1)) + (size - 1), size)
        hi = lax.clamp(jnp.asarray(lo, jnp.uint32), hi, count)
    return Range(lo, hi)
