"""The key blocks that a tile of the Hopper forward visits where a call has a mask of pairs.

Of the blocks that band and table allow, a tile visits those in which its rows see a key: first,
from the last one on, those that need a mask, and then those that need none. The MMA warpgroups
count visits, not blocks: visit i of `count` comes before visit i - 1, and the first visits are
masked. With each block of K the load warp publishes which block it is, and whether band and ranges
hide any of it.
"""

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from fa4_jax import bands
from kernels.common import pair_masks
from kernels.common.pair_masks import Shape, States
from kernels.common.row_ranges import LANES
from kernels.common.schedule import ForwardShape
from kernels.interface import RangeBuffers, Sizes
from kernels.sm90.forward_schedule import Work


@dataclasses.dataclass(frozen=True)
class Visits:
    """What the load warp walks over.

    Attributes:
      states: of the tile's batch element and head.
      first_row: of the tile.
      blocks: those that band and table allow.
      masked: how many of the visits need a mask.
    """

    states: States
    first_row: Int32
    blocks: bands.BlockRange
    masked: Int32


NO_VISITS: Any = None
"""Of a tile whose rows have no ranges in memory."""


def make_visits(
    work: Work, buffers: RangeBuffers, sizes: Sizes, shape: ForwardShape
) -> tuple[Visits, Work]:
    """Returns a tile's visits, and its work in visits; a whole warp calls it.

    Without a mask the work stays in blocks.
    """
    found = pair_masks.states(buffers, sizes, work.batch, work.head)
    visits = Visits(found, work.first_row, work.blocks, Int32(0))
    masked, full, has_last = _count(visits, shape)
    blocks = work.blocks
    own = bands.BlockRange(
        Int32(cutlass.select_(found.given, Int32(0), blocks.begin)),
        Int32(cutlass.select_(found.given, Int32(0), blocks.full_begin)),
        Int32(cutlass.select_(found.given, full, blocks.full_end)),
        Int32(cutlass.select_(found.given, masked + full, blocks.end)),
    )
    # Padding is in the last block, which is the first one if it is visited.
    padded = work.padded_keys & ((~found.given) | (has_last != 0))
    visits = dataclasses.replace(visits, masked=masked)
    plane = pair_masks.plane_of(buffers.mask_batch, buffers.mask_heads, work.batch, work.head)
    return visits, dataclasses.replace(work, blocks=own, padded_keys=padded, plane=plane)


@cute.jit
def _count(visits: Visits, shape: cutlass.Constexpr[ForwardShape]) -> tuple[Int32, Int32, Int32]:
    """Counts the visits with a mask and those without, and whether the last block is visited."""
    masked, full, has_last = Int32(0), Int32(0), Int32(0)
    blocks = visits.blocks
    end = Int32(cutlass.select_(visits.states.given, blocks.end, blocks.begin))
    for first in cutlass.range(blocks.begin, end, LANES, unroll=1):
        block = first + cute.arch.lane_idx()
        is_seen, is_full = _state(visits, block, shape)
        masked += cute.arch.popc(cute.arch.vote_ballot_sync(is_seen & ~is_full))
        full += cute.arch.popc(cute.arch.vote_ballot_sync(is_full))
        has_last = has_last | cute.arch.vote_ballot_sync(is_seen & (block == blocks.end - 1))
    return masked, full, has_last


def _state(visits: Visits, block: Int32, shape: ForwardShape) -> tuple[Boolean, Boolean]:
    """Returns whether a tile visits a block, and whether it does without a mask."""
    blocks = visits.blocks
    inside = (block >= blocks.begin) & (block < blocks.end)
    known = Int32(cutlass.select_(inside, block, blocks.begin))
    box = Shape(shape.m, shape.n)
    some, every = pair_masks.seen(visits.states, visits.first_row, known * shape.n, box)
    return inside & some, inside & every & _unlimited(visits, block)


def _unlimited(visits: Visits, block: Int32) -> Boolean:
    """Whether band and ranges hide nothing in a block."""
    return (block >= visits.blocks.full_begin) & (block < visits.blocks.full_end)


def make_walk(visits: Visits | None) -> cute.Tensor | None:
    """Makes the register that holds the block which the load warp visited last."""
    return None if visits is None else cute.make_rmem_tensor((1,), Int32)


def block_of_step(
    visits: Visits | None,
    walk: cute.Tensor | None,
    end: Int32,
    step: Int32,
    shape: ForwardShape,
) -> tuple[Int32, Int32]:
    """Returns the block of a step, and whether band or ranges may hide any of it.

    A whole warp calls it for one step after the other, from 0 on.
    """
    if visits is None:
        return end - 1 - step, Int32(1)
    return _visit(visits, walk, end, step, shape)


@cute.jit
def _visit(
    visits: Visits,
    walk: cute.Tensor,
    end: Int32,
    step: Int32,
    shape: cutlass.Constexpr[ForwardShape],
) -> tuple[Int32, Int32]:
    place, limited = end - 1 - step, Int32(1)
    if visits.states.given:
        wants_full = step >= visits.masked
        restarts = (step == 0) | (step == visits.masked)
        place = Int32(cutlass.select_(restarts, visits.blocks.end, walk[0])) - 1
        found = Int32(0)
        while found == 0:  # One is left, since the work has counted them.
            is_seen, is_full = _state(visits, place - cute.arch.lane_idx(), shape)
            found = cute.arch.vote_ballot_sync(is_seen & (is_full == wants_full))
            nearest = cute.arch.clz(cute.arch.brev(found))  # LANES if none is.
            place -= Int32(nearest)
        walk[0] = place
        limited = Int32(cutlass.select_(_unlimited(visits, place), Int32(0), Int32(1)))
    return place, limited
