"""The order of work of the Hopper forward: query tiles of one head each.

The load warp finds out what a tile's work is, ahead of the MMA warpgroups, and tells them by
`publish`: divisions and loads of extents take a thousand cycles, in which they would wait.
"""

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from fa4_jax import bands
from kernels.common import row_ranges, tensors
from kernels.common.schedule import (
    ForwardShape,
    HeadOrder,
    Schedule,
    batch_band,
    from_mask_words,
    mask_words,
    nth_tile,
    ordered_tile,
    rotated,
)
from kernels.interface import RangeBuffers, Sizes, Window
from kernels.sm90.forward_description import WORK_WORDS


@dataclasses.dataclass(frozen=True)
class Work:
    """One tile's work: query rows of one head of one batch element."""

    first_row: Int32
    head: Int32
    kv_head: Int32
    batch: Int32
    band: bands.Band
    blocks: bands.BlockRange
    padded_keys: cutlass.Boolean  # whether the last block has keys past a length that TMA reads
    compares: Int32 | int = 0  # whether tags have to be compared
    low: Int32 | int = 0  # of the range that all rows have by the ranges in memory
    high: Int32 | int = bands.UNBOUNDED  # its end; EACH_ROW where each row loads its own
    plane: Int32 | int = 0  # of the bits of a mask of pairs (pair_masks)
    sink_log2: Float32 | None = None  # of the head, where the kernel takes sinks and no ranges
    seen: bands.BlockRange | None = None  # of the blocks, by a warpgroup's rows; forward_groups

    def seen_blocks(self) -> bands.BlockRange:
        """Returns the blocks that a warpgroup's rows see; all where it leaves none out."""
        return self.blocks if self.seen is None else self.seen


def make_schedule(extents: cute.Pointer, sizes: Sizes, window: Window, rows: int) -> Schedule:
    """Makes the schedule of query tiles of `rows` rows."""
    tiles = (sizes.query_length + rows - 1) // rows * sizes.heads * sizes.batch
    ctas, _, _ = cute.arch.grid_dim()
    return Schedule(extents, sizes, window, tiles, (tiles + ctas - 1) // ctas)


def assign(
    index: Int32, schedule: Schedule, shape: ForwardShape, ranges: RangeBuffers | None = None
) -> Work:
    """Returns a tile's work.

    Under a band the longest tiles come first, in sections of heads that fill the L2. Otherwise
    tiles are equal, and those of a KV head follow each other, so that the CTAs that run together
    read as few heads as possible.
    """
    sizes = schedule.sizes
    section = group = sizes.heads // sizes.kv_heads
    if shape.band:
        rows_in_l2 = shape.l2_bytes // shape.kv_row_bytes
        section = cutlass.max(rows_in_l2 // sizes.key_length, 1) * group
    tiles = (sizes.query_length + shape.m - 1) // shape.m
    tile, of_all = nth_tile(index, section, sizes.heads * sizes.batch, tiles)
    tile = tiles - 1 - tile if shape.band and ranges is None else tile
    if shape.shorter_last:
        tile = rotated(tile, of_all, tiles)
    order = HeadOrder(sizes.batch, sizes.heads, group, shape.batches_together)
    batch_index = order.batch_of(of_all)
    if ranges is not None:
        tile = _tile_at(tile, tiles, ranges, batch_index)
    head = order.head_of(of_all, batch_index)
    window = schedule.window if shape.band else None
    band = batch_band(schedule.extents, batch_index, window)
    first_row = tile * shape.m
    blocks = bands.visited_blocks(band, first_row, shape.m, shape.n, tensors.INT32)
    padded = (blocks.end * shape.n > band.key_length) & (band.key_length < sizes.key_length)
    return Work(first_row, head, head // group, batch_index, band, blocks, padded)


@cute.jit
def _tile_at(place: Int32, tiles: Int32, ranges: RangeBuffers, batch: Int32) -> Int32:
    """Returns the tile at a place of the order; without ranges the last one comes first."""
    tile = tiles - 1 - place
    if row_ranges.are_given(ranges):
        tile = ordered_tile(ranges.query_order, ranges.batch, batch, place, tiles)
    return tile


def by_table(work: Work, buffers: RangeBuffers, sizes: Sizes, shape: ForwardShape) -> Work:
    """Returns a tile's work whose rows have ranges of keys in memory, too."""
    ranges = row_ranges.of_batch(buffers, sizes, work.batch)
    # Tiles of 192 rows begin where an entry does or in its middle.
    entries = -(-shape.m // row_ranges.TABLE_ROWS)
    last_row = cutlass.min(work.first_row + shape.m, sizes.query_length) - 1
    rows = row_ranges.Rows(work.first_row, last_row, entries)
    blocks, compares = row_ranges.limit_blocks(work.blocks, ranges, rows, shape.n)
    length = work.band.key_length
    padded = (blocks.end * shape.n > length) & (length < sizes.key_length)
    low, high = row_ranges.shared_range(ranges, rows)
    return dataclasses.replace(
        work, blocks=blocks, padded_keys=padded, compares=compares, low=low, high=high
    )


_NO_TILE = -1


def publish(work: Work, words: cute.Tensor):
    """Writes a tile's work, as `published` reads it."""
    more = tuple(Int32(x) for x in (work.compares, work.low, work.high, work.plane))
    if work.sink_log2 is not None:
        more = (work.sink_log2.bitcast(Int32),)
    values = (
        *(work.first_row, work.head, work.kv_head, work.batch),
        *mask_words(work.band, work.blocks, work.padded_keys),
        *more,
    )
    for i, value in enumerate(values[: cute.size(words)]):
        words[i] = value


def publish_end(words: cute.Tensor):
    """Writes that no tile is left."""
    words[0] = Int32(_NO_TILE)


def is_tile(words: cute.Tensor) -> cutlass.Boolean:
    """Whether a tile's work is published, not the end."""
    return cute.arch.make_warp_uniform(words[0]) != _NO_TILE


def published(words: cute.Tensor, window: Window | None, sinks: bool = False) -> Work:
    """Reads a tile's work; sinks: whether a sink is part of it."""
    values = [cute.arch.make_warp_uniform(words[i]) for i in range(cute.size(words))]
    mask = from_mask_words(values[4:WORK_WORDS], window)
    if sinks:
        return Work(*values[:4], *mask, sink_log2=values[WORK_WORDS].bitcast(Float32))
    return Work(*values[:4], *mask, *values[WORK_WORDS:])
