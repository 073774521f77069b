"""Which blocks of a band meet: integers in, integers out.

Used with Python ints and with traced ones. A band lets position p see the positions
p - below ... p + above on the other side.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from fa4_jax.bands import UNBOUNDED

Int = Any  # int, int32[] or uint32[]


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


@dataclasses.dataclass(frozen=True)
class Range:
    """Blocks [lo, hi) of which the positions first..last see at least a part; none if hi <= lo.

    An end is computed where it is read, since what a compiler receives takes time, used or not.

    Attributes:
      first, last: inclusive range of positions, in the coordinates of the other side.
      window: (below, above); UNBOUNDED for no limit.
      side: blocks of the other side.
    """

    first: Int
    last: Int
    window: tuple[int, int]
    side: Side

    @property
    def lo(self) -> Int:
        """At most the number of blocks; the int 0 without a limit."""
        below = self.window[0]
        if below >= UNBOUNDED:
            return 0
        blocks = lax.div(_positions_before(self.first - below), unsigned(self.side.size))
        return lax.min(blocks, unsigned(self.side.count))

    @property
    def hi(self) -> Int:
        """At most the number of blocks."""
        count, above = unsigned(self.side.count), self.window[1]
        if above >= UNBOUNDED:
            return count
        # Beyond every position of the other side: further would change nothing, but overflow.
        last = lax.min(lax.convert_element_type(self.last, jnp.int32), np.int32(UNBOUNDED - 1))
        positions = _positions_before(last + (above + 1)) + unsigned(self.side.size - 1)
        return lax.min(lax.div(positions, unsigned(self.side.size)), count)


@dataclasses.dataclass(frozen=True)
class Within:
    """The blocks of a range that lie in [low, high) as well, uint32 []."""

    range: Range
    low: Int
    high: Int

    @property
    def lo(self) -> Int:
        """As `Range.lo`, or more."""
        return lax.max(jnp.uint32(self.range.lo), self.low)

    @property
    def hi(self) -> Int:
        """As `Range.hi`, or less."""
        return lax.min(self.range.hi, self.high)


def unsigned(x: Any) -> Any:
    """A size as uint32: a division of signed numbers costs ten operations in every kernel."""
    return np.uint32(x) if isinstance(x, int) else jnp.asarray(x, jnp.uint32)


def _positions_before(end: Int) -> Int:
    end = lax.convert_element_type(end, jnp.int32)
    return lax.convert_element_type(lax.max(end, np.int32(0)), jnp.uint32)
