"""The query blocks that a key tile of the backward visits where rows have ranges in memory.

Of the blocks that the band allows, a key tile visits those whose entry of the tile table meets its
keys: min low <= last key and first key < max high. The key tiles that visit a block are
consecutive, so a key tile's turn to add dQ is its distance from the first of them. The blocks that
a key tile visits need not be: a warp that walks over them searches the table, 32 blocks at once.

Ranges hide nothing in a block if all rows of its entry that see any key see all keys of the tile,
and none compares tags. Rows that see no key have lse_log2 = +inf, so that their P is 0.

Where a call has a mask of pairs (pair_masks), a key tile does not visit blocks whose boxes are all
empty either, unless dQ is added in order: the key tiles that visit a block would not be
consecutive.
"""

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from fa4_jax import bands
from kernels.common import pair_masks, row_ranges
from kernels.common.pair_masks import BitsInMemory, Shape, States
from kernels.common.row_ranges import Ranges

NOTHING, BY_LIMITS, BY_TAGS = 0, 1, 2
"""What ranges hide in a block: nothing; keys outside of rows' limits; and by their tags, too."""

BY_BITS = 4
"""Added to it where bits of a mask of pairs hide keys, too."""

_LANES = 32


@dataclasses.dataclass(frozen=True)
class Mask:
    """A mask of pairs, which a call may lack.

    Attributes:
      states: of the KV head; bits: of any query head.
      keys: of a tile.
      skips: blocks in which no pair is seen are not visited.
    """

    states: States
    bits: BitsInMemory
    keys: int
    skips: bool


NO_MASK: Any = None
"""Of a kernel that reads no masks of pairs."""


@dataclasses.dataclass(frozen=True)
class Visits:
    """The query blocks of a key tile.

    Attributes:
      ranges: of the batch element.
      blocks: the query blocks that the band allows.
      first_key, past_key: of the tile.
      count: of the blocks that the tile visits.
      mask: a mask of pairs, where the kernel reads one.
    """

    ranges: Ranges
    blocks: bands.BlockRange
    first_key: Int32
    past_key: Int32
    count: Int32
    mask: Mask = NO_MASK


NO_VISITS: Any = None
"""Of a key tile whose queries have no ranges in memory."""


def with_count(visits: Visits, rows: int) -> Visits:
    """Counts what a key tile visits, in blocks of `rows` rows; a whole warp calls it."""
    return dataclasses.replace(visits, count=_count(visits, rows))


@cute.jit
def _count(visits: Visits, rows: cutlass.Constexpr[int]) -> Int32:
    """Counts the blocks that the key tile visits."""
    total = Int32(0)
    for first in cutlass.range(visits.blocks.begin, visits.blocks.end, _LANES, unroll=4):
        block = first + cute.arch.lane_idx()
        total += cute.arch.popc(cute.arch.vote_ballot_sync(_visits(visits, block, rows)))
    return total


def _visits(visits: Visits, block: Int32, rows: int) -> cutlass.Boolean:
    """Whether the key tile visits a block, which need not be one of the band's."""
    inside = (block >= visits.blocks.begin) & (block < visits.blocks.end)
    known = Int32(cutlass.select_(inside, block, visits.blocks.begin))
    least_low, most_high, _, _ = _entry(visits.ranges, known, rows)
    meets = inside & (least_low < visits.past_key) & (most_high > visits.first_key)
    if visits.mask is None or not visits.mask.skips:
        return meets
    return meets & (_states(visits, known, rows)[0] != 0)


@cute.jit
def _states(visits: Visits, block: Int32, rows: cutlass.Constexpr[int]) -> tuple[Int32, Int32]:
    """Returns whether a mask of pairs shows any of a block's pairs, and whether all, as 0 or 1."""
    some, every = Int32(1), Int32(1)
    if visits.mask.states.given:
        shape = Shape(rows, visits.mask.keys)
        found = pair_masks.seen(visits.mask.states, block * rows, visits.first_key, shape)
        some, every = Int32(found[0]), Int32(found[1])
    return some, every


def _entry(ranges: Ranges, block: Int32, rows: int) -> list[Int32]:
    """Returns min low, max high, max low, min high of the entry that a block of rows lies in."""
    return row_ranges.table_entry(ranges, _entry_index(block, rows))


def _entry_index(block: Int32, rows: int) -> Int32:
    """Returns the index of that entry; rows of a block divide its rows."""
    return block // (row_ranges.TABLE_ROWS // rows)


def make_walk(visits: Visits | None) -> cute.Tensor | None:
    """Makes the register that holds the block which a warp visited last, for `next_block`."""
    if visits is None:
        return None
    walk = cute.make_rmem_tensor((1,), Int32)
    walk[0] = Int32(0)
    return walk


@cute.jit
def next_block(
    visits: Visits,
    walk: cute.Tensor,
    index: Int32,
    rows: cutlass.Constexpr[int],
    descending: cutlass.Constexpr[bool],
) -> Int32:
    """Returns the index-th block that the key tile visits; a whole warp calls it.

    Args:
      walk: holds the block before, unless index is 0.
      descending: the last block is first.
    """
    first, way = visits.blocks.begin, 1
    if cutlass.const_expr(descending):
        first, way = visits.blocks.end - 1, -1
    place = Int32(cutlass.select_(index == 0, first, walk[0] + way))
    seen = Int32(0)
    while seen == 0:  # One is left, since there are `count` of them.
        seen = cute.arch.vote_ballot_sync(_visits(visits, place + way * cute.arch.lane_idx(), rows))
        nearest = cute.arch.clz(cute.arch.brev(seen))  # _LANES if none is seen.
        place += way * Int32(nearest)
    walk[0] = place
    return place


def hidden(visits: Visits, block: Int32, rows: int) -> Int32:
    """Returns what ranges hide in a block of rows from the key tile: NOTHING, BY_LIMITS, BY_TAGS;
    and BY_BITS is added.

    Args:
      rows: of a block.
    """
    ranges = visits.ranges
    _, _, most_low, least_high = _entry(ranges, block, rows)
    full = (most_low <= visits.first_key) & (least_high >= visits.past_key)
    compares = row_ranges.element(ranges.compares, _entry_index(block, rows)) != 0
    by_limits = Int32(cutlass.select_(full, Int32(NOTHING), Int32(BY_LIMITS)))
    by_ranges = Int32(cutlass.select_(compares, Int32(BY_TAGS), by_limits))
    if visits.mask is None:
        return by_ranges
    return by_ranges + (1 - _states(visits, block, rows)[1]) * BY_BITS


def first_key_tile(visits: Visits, block: Int32, shape: tuple[int, int]) -> Int32:
    """Returns the first key tile that visits a block by the table.

    shape: query rows of a block, keys of a tile.
    """
    rows, keys = shape
    least_low, _, _, _ = _entry(visits.ranges, block, rows)
    return least_low // keys
