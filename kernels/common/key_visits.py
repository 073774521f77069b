"""The key blocks that a tile of a forward visits where a call has a mask of pairs.

Of the blocks that band and table allow, a tile visits those in which its rows see a key: first,
from the last one on, those that need a mask, and then those that need none. So roles keep their
loops over masked and unmasked blocks, and count visits instead of blocks: visit i of `count` comes
before visit i - 1. A warp that walks over the visits finds which block each one is, and publishes
it for masked ones.
"""

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from fa4_jax import bands
from kernels.common.row_ranges import LANES


@dataclasses.dataclass(frozen=True)
class Visits:
    """What a warp walks over.

    Attributes:
      tile: what the states of a mask say of its rows: `given`, and `seen(first_key)`, whether any
        pair with n keys from one on is seen, and whether all are (pair_masks).
      blocks: those that band and table allow, of n keys each.
      masked: how many of the visits need a mask.
    """

    tile: Any
    blocks: bands.BlockRange
    n: int
    masked: Int32


NO_VISITS: Any = None
"""Of a tile whose kernel reads no masks."""


@dataclasses.dataclass(frozen=True)
class Counts:
    """How many visits need a mask, how many do not, and whether the last block is visited."""

    masked: Int32
    full: Int32
    has_last: Boolean

    def of_tile(self, given: Boolean, blocks: bands.BlockRange) -> bands.BlockRange:
        """Returns the visits as blocks; without a mask the blocks themselves."""
        return bands.BlockRange(
            Int32(cutlass.select_(given, Int32(0), blocks.begin)),
            Int32(cutlass.select_(given, Int32(0), blocks.full_begin)),
            Int32(cutlass.select_(given, self.full, blocks.full_end)),
            Int32(cutlass.select_(given, self.masked + self.full, blocks.end)),
        )


def count(visits: Visits) -> Counts:
    """Counts a tile's visits; a whole warp calls it."""
    masked, full, has_last = _count(visits)
    # Padding is in the last block, which is the first one if it is visited.
    return Counts(masked, full, (~visits.tile.given) | (has_last != 0))


@cute.jit
def _count(visits: Visits) -> tuple[Int32, Int32, Int32]:
    masked, full, has_last = Int32(0), Int32(0), Int32(0)
    blocks = visits.blocks
    end = Int32(cutlass.select_(visits.tile.given, blocks.end, blocks.begin))
    for first in cutlass.range(blocks.begin, end, LANES, unroll=1):
        block = first + cute.arch.lane_idx()
        is_seen, is_full = _state(visits, block)
        masked += cute.arch.popc(cute.arch.vote_ballot_sync(is_seen & ~is_full))
        full += cute.arch.popc(cute.arch.vote_ballot_sync(is_full))
        has_last = has_last | cute.arch.vote_ballot_sync(is_seen & (block == blocks.end - 1))
    return masked, full, has_last


def _state(visits: Visits, block: Int32) -> tuple[Boolean, Boolean]:
    """Returns whether a tile visits a block, and whether it does without a mask."""
    blocks = visits.blocks
    inside = (block >= blocks.begin) & (block < blocks.end)
    known = Int32(cutlass.select_(inside, block, blocks.begin))
    some, every = visits.tile.seen(known * visits.n)
    return inside & some, inside & every & _unlimited(visits, block)


def _unlimited(visits: Visits, block: Int32) -> Boolean:
    """Whether band and ranges hide nothing in a block."""
    return (block >= visits.blocks.full_begin) & (block < visits.blocks.full_end)


def make_walk(visits: Visits | None) -> cute.Tensor | None:
    """Makes the register that holds the block which a warp visited last."""
    return None if visits is None else cute.make_rmem_tensor((1,), Int32)


def block_of_step(
    visits: Visits | None, walk: cute.Tensor | None, end: Int32, step: Int32
) -> tuple[Int32, Int32]:
    """Returns the block of a step, and whether band or ranges may hide any of it.

    A whole warp calls it for one step after the other, from 0 on; end: of the tile's visits.
    """
    if visits is None:
        return end - 1 - step, Int32(1)
    return _visit(visits, walk, end, step)


@cute.jit
def _visit(visits: Visits, walk: cute.Tensor, end: Int32, step: Int32) -> tuple[Int32, Int32]:
    place, limited = end - 1 - step, Int32(1)
    if visits.tile.given:
        wants_full = step >= visits.masked
        restarts = (step == 0) | (step == visits.masked)
        place = Int32(cutlass.select_(restarts, visits.blocks.end, walk[0])) - 1
        found = Int32(0)
        while found == 0:  # One is left, since they have been counted.
            is_seen, is_full = _state(visits, place - cute.arch.lane_idx())
            found = cute.arch.vote_ballot_sync(is_seen & (is_full == wants_full))
            nearest = cute.arch.clz(cute.arch.brev(found))  # LANES if none is.
            place -= Int32(nearest)
        walk[0] = place
        limited = Int32(cutlass.select_(_unlimited(visits, place), Int32(0), Int32(1)))
    return place, limited
