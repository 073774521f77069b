"""The order of work of the Blackwell forward, whose query tiles are units of eight queries.

Where there are fewer queries than a CTA has rows, the query heads of a KV head share its tiles:
unit u of a KV head holds eight queries from 8 (u // pack) on of its head u % pack. `pack` is the
number of heads of a group, or 1 where every head has tiles of its own. Eight rows are one atom of
the swizzled layout of shared memory, so a unit is one TMA box whatever `pack` is.
"""

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from fa4_jax import bands
from kernels.common import row_ranges, tensors
from kernels.common.schedule import (
    ForwardShape,
    Schedule,
    batch_band,
    from_mask_words,
    mask_words,
    nth_tile,
    ordered_tile,
)
from kernels.interface import RangeBuffers, Sizes, Window
from kernels.sm100.forward_description import UNIT, WORK_WORDS
from kernels.sm100.tiles import ForwardTile

NO_BLOCKS: Any = None
"""Of a tile whose rows have no ranges in memory."""


@dataclasses.dataclass(frozen=True)
class Work:
    """One tile's work: units of one batch element and KV head; of a pair's tile, `of_cta`'s."""

    first_unit: Int32
    pack: Int32
    head: Int32  # of unit 0
    kv_head: Int32
    batch: Int32
    band: bands.Band
    blocks: bands.BlockRange
    padded_keys: cutlass.Boolean  # whether the last block has keys past the length that TMA reads
    compares: Int32 | int = 0  # whether tags have to be compared
    own: bands.BlockRange = NO_BLOCKS  # blocks that band and table allow; `blocks` may be visits

    @property
    def last_block(self) -> Int32:
        """The last block that band and table allow."""
        return (self.blocks if self.own is None else self.own).end - 1

    def unit(self, index: Int32) -> tuple[Int32, Int32]:
        """Returns (first query, head) of a unit of this tile."""
        queries, head = _divide(self.first_unit + index, self.pack)
        return queries * UNIT, self.head + head


def to_words(work: Work, ranges: bool) -> list[Int32]:
    """Lists a tile's work as words in shared memory, without the window, which all roles have."""
    return [
        *(work.first_unit, work.pack, work.head, work.kv_head, work.batch),
        *mask_words(work.band, work.blocks, work.padded_keys),
        *([work.compares, *vars(work.own).values()] if ranges else []),
    ]


def from_words(words: list[Int32], window: Window | None, ranges: bool) -> Work:
    """Inverts `to_words`; a role that does not apply the mask gives no window."""
    mask = from_mask_words(words[5:WORK_WORDS], window)
    if not ranges:
        return Work(*words[:5], *mask)
    own = bands.BlockRange(*words[WORK_WORDS + 1 :])
    return Work(*words[:5], *mask, words[WORK_WORDS], own)


def by_table(work: Work, buffers: RangeBuffers, sizes: Sizes, shape: ForwardShape) -> Work:
    """Returns a tile's work whose rows have ranges of keys in memory, too.

    In a pair it is the pair's tile, whose first unit is the even CTA's.
    """
    ranges = row_ranges.of_batch(buffers, sizes, work.batch)
    first, last = queries_of(work.first_unit, work.pack, shape.m)
    entries = -(-shape.m // row_ranges.TABLE_ROWS) + 1  # a tile of packed heads may begin anywhere
    rows = row_ranges.Rows(first, cutlass.min(last, sizes.query_length - 1), entries)
    blocks, compares = row_ranges.limit_blocks(work.blocks, ranges, rows, shape.n)
    band = work.band
    padded = (blocks.end * shape.n > band.key_length) & (band.key_length < sizes.key_length)
    return dataclasses.replace(work, blocks=blocks, padded_keys=padded, compares=compares)


def of_cta(work: Work, schedule: Schedule, shape: ForwardShape) -> Work:
    """Returns a CTA's part of a pair's work."""
    if schedule.cluster == 1:
        return work
    units = shape.m // UNIT // schedule.cluster
    first_unit = work.first_unit + cute.arch.block_idx_in_cluster() * units
    return dataclasses.replace(work, first_unit=first_unit)


def queries_of(first_unit: Int32, pack: Int32, rows: int) -> tuple[Int32, Int32]:
    """Returns the first and the last query of a tile of so many rows."""
    first = first_unit // pack * UNIT
    return first, (first_unit + rows // UNIT - 1) // pack * UNIT + UNIT - 1


def make_schedule(
    extents: cute.Pointer, sizes: Sizes, window: Window, tile: ForwardTile
) -> Schedule:
    """Makes the schedule of a CTA's, or a pair's, query rows."""
    pack = _pack(sizes, tile.m)
    tiles = _tiles(sizes.query_length, pack, tile.m) * (sizes.heads // pack) * sizes.batch
    ctas, _, _ = cute.arch.grid_dim()
    takers = ctas // tile.ctas
    return Schedule(extents, sizes, window, tiles, (tiles + takers - 1) // takers, tile.ctas)


def assign(
    index: Int32, schedule: Schedule, shape: ForwardShape, ranges: RangeBuffers | None = None
) -> Work:
    """Returns a tile's work, in a pair all of the pair's.

    The longest tiles come first in sections of heads that fill the L2.
    """
    sizes = schedule.sizes
    heads, group = sizes.heads, sizes.heads // sizes.kv_heads
    pack = _pack(sizes, shape.m)
    rows_in_l2 = shape.l2_bytes // shape.kv_row_bytes
    section = cutlass.max(rows_in_l2 // sizes.key_length, 1) * (group // pack)
    tiles = _tiles(sizes.query_length, pack, shape.m)
    tile, packed_head = nth_tile(index, section, heads // pack * sizes.batch, tiles)
    tile = tiles - 1 - tile if shape.band and ranges is None else tile
    batch_index, packed_head = _divide(packed_head, heads // pack)
    if ranges is not None:
        tile = _in_order(tile, tiles, pack, batch_index, ranges)
    head = packed_head * pack
    band = batch_band(schedule.extents, batch_index, schedule.window if shape.band else None)
    first_unit = tile * (shape.m // UNIT)
    first_query, last_query = queries_of(first_unit, pack, shape.m)
    rows = last_query - first_query + 1
    blocks = bands.visited_blocks(band, first_query, rows, shape.n, tensors.INT32)
    padded = (blocks.end * shape.n > band.key_length) & (band.key_length < sizes.key_length)
    return Work(first_unit, pack, head, head // group, batch_index, band, blocks, padded)


def _in_order(place: Int32, tiles: Int32, pack: Int32, batch: Int32, ranges: RangeBuffers) -> Int32:
    """Returns the tile at a place of a batch element's order; tiles of packed heads have none."""
    alone = pack == 1
    known = cutlass.select_(alone, place, Int32(0)), cutlass.select_(alone, tiles, Int32(1))
    ordered = ordered_tile(ranges.query_order, ranges.batch, batch, *known)
    return Int32(cutlass.select_(alone, ordered, tiles - 1 - place))


def _pack(sizes: Sizes, rows: int) -> Int32:
    """Counts the heads that share a tile."""
    few = sizes.query_length < rows
    return Int32(cutlass.select_(few, sizes.heads // sizes.kv_heads, Int32(1)))


def _tiles(query_length: Int32, pack: Int32, rows: int) -> Int32:
    """Counts the tiles of one batch element and its `pack` heads."""
    units = (query_length + UNIT - 1) // UNIT * pack
    return (units * UNIT + rows - 1) // rows


def _divide(value: Int32, divisor: Int32) -> tuple[Int32, Int32]:
    quotient = value // divisor
    return quotient, value - quotient * divisor
