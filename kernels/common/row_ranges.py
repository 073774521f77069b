"""The keys of a row where they are read from memory: one range a row, and tags to compare.

Row i of a batch element sees the keys low[i] <= j < high[i] that the band allows, too. Where a tile
of rows has to compare tags, row i sees key j only if tag_low[i] <= tag_key[j] <= tag_high[i]. The
library makes the arrays from masks (`fa4_jax.masks`).
"""

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from fa4_jax import bands
from kernels.common.state import Limits
from kernels.interface import RangeBuffers, Sizes

TABLE_ROWS = 128
"""Rows of an entry of the tile table; fa4_jax.masks.table.TILE_ROWS."""

_ENTRY = 4  # min low, max high, max low, min high
_NONE = bands.UNBOUNDED


@dataclasses.dataclass(frozen=True)
class Ranges:
    """The arrays of one batch element, by row, by key or by entry of the table.

    Attributes:
      query_length, key_length: T and S.
      low, high, tag_low, tag_high: [T].
      tag_key: [S].
      table: [tiles, 4]; compares: [tiles], whether a tile has to compare tags.
    """

    query_length: Int32
    key_length: Int32
    low: cute.Pointer
    high: cute.Pointer
    table: cute.Pointer
    tag_low: cute.Pointer
    tag_high: cute.Pointer
    tag_key: cute.Pointer
    compares: cute.Pointer


@dataclasses.dataclass(frozen=True)
class Tags:
    """What a thread compares: the tags of its rows, and those of the keys in global memory.

    Attributes:
      wanted: whether its tile has to compare at all.
      low, high: registers, one value a row.
      keys: [key_length].
    """

    wanted: cutlass.Boolean
    low: cute.Tensor
    high: cute.Tensor
    keys: cute.Tensor


@dataclasses.dataclass(frozen=True)
class TagsInMemory:
    """Where the tags of a row are, for a thread that has no registers for pointers to them."""

    buffers: RangeBuffers
    sizes: Sizes
    batch: Int32
    row: Int32


@dataclasses.dataclass(frozen=True)
class RangesInMemory:
    """Where a batch element's arrays are, for a thread that has no registers for pointers."""

    buffers: RangeBuffers
    sizes: Sizes
    batch: Int32

    def arrays(self) -> Ranges:
        """Returns the arrays."""
        return arrays(self.buffers, self.sizes, self.batch)


NO_TAGS: Any = None
"""Of rows without ranges in memory."""


def are_given(buffers: RangeBuffers) -> cutlass.Boolean:
    """Whether a call has ranges; kernels of MAY_LACK_RANGES ask."""
    return buffers.batch > 0


def of_batch(buffers: RangeBuffers | None, sizes: Sizes, batch: Int32) -> Ranges | None:
    """Returns a batch element's arrays, or None."""
    return None if buffers is None else arrays(buffers, sizes, batch)


def arrays(buffers: RangeBuffers, sizes: Sizes, batch: Int32) -> Ranges:
    """Returns a batch element's arrays; all elements share them where there is one set."""
    element = Int64(cutlass.select_(buffers.batch == 1, Int32(0), batch))
    tiles = (sizes.query_length + TABLE_ROWS - 1) // TABLE_ROWS
    rows, keys = element * sizes.query_length, element * sizes.key_length
    return Ranges(
        query_length=sizes.query_length,
        key_length=sizes.key_length,
        low=buffers.row_low + rows,
        high=buffers.row_high + rows,
        table=buffers.row_table + element * tiles * _ENTRY,
        tag_low=buffers.tag_low + rows,
        tag_high=buffers.tag_high + rows,
        tag_key=buffers.tag_key + keys,
        compares=buffers.tag_tiles + element * tiles,
    )


def element(pointer: cute.Pointer, index: Int32) -> Int32:
    """Returns one int32 of an array in global memory."""
    return cute.make_tensor(pointer + index, cute.make_layout(1))[0]


def table_entry(ranges: Ranges, entry: Int32) -> list[Int32]:
    """Returns min low, max high, max low, min high of an entry of the tile table."""
    return [element(ranges.table, entry * _ENTRY + k) for k in range(_ENTRY)]


@dataclasses.dataclass(frozen=True)
class Rows:
    """Consecutive rows of a tile, first to last: they meet at most so many entries of the table."""

    first: Int32
    last: Int32
    entries: int


def limit_blocks(
    blocks: bands.BlockRange, ranges: Ranges, rows: Rows, n: int
) -> tuple[bands.BlockRange, Int32]:
    """Returns the blocks of n keys that rows visit by the table, too, and whether they compare
    tags.

    blocks: those that the band allows.
    """
    least_low, most_high = Int32(_NONE), Int32(0)
    most_low, least_high, compares = Int32(0), Int32(_NONE), Int32(0)
    for i in range(rows.entries):
        entry = cutlass.min(rows.first // TABLE_ROWS + i, rows.last // TABLE_ROWS)
        values = table_entry(ranges, entry)
        sees = values[1] > 0
        least_low = cutlass.min(least_low, cutlass.select_(sees, values[0], Int32(_NONE)))
        most_high = cutlass.max(most_high, values[1])
        most_low = cutlass.max(most_low, values[2])
        least_high = cutlass.min(least_high, cutlass.select_(sees, values[3], Int32(_NONE)))
        compares = compares | element(ranges.compares, entry)
    begin = cutlass.max(blocks.begin, least_low // n)
    end = cutlass.max(cutlass.min(blocks.end, (most_high + n - 1) // n), begin)
    full_begin = cutlass.max(blocks.full_begin, (most_low + n - 1) // n)
    full_end = cutlass.min(blocks.full_end, least_high // n)
    full_end = Int32(cutlass.select_(compares != 0, begin, full_end))
    return bands.BlockRange(begin, full_begin, full_end, end), compares


EACH_ROW = -1
"""Stands for the end of a range where a tile's rows have different ones."""


def shared_range(ranges: Ranges, rows: Rows) -> tuple[Int32, Int32]:
    """Returns the range low <= j < high that all rows have, or 0 and EACH_ROW if they differ."""
    low, high, differ = Int32(0), Int32(0), Int32(0)
    for i in range(rows.entries):
        entry = cutlass.min(rows.first // TABLE_ROWS + i, rows.last // TABLE_ROWS)
        least_low, most_high, most_low, least_high = table_entry(ranges, entry)
        if i == 0:
            low, high = least_low, most_high
        differ = differ | (least_low ^ low) | (most_low ^ low)
        differ = differ | (most_high ^ high) | (least_high ^ high)
    return (
        Int32(cutlass.select_(differ == 0, low, Int32(0))),
        Int32(cutlass.select_(differ == 0, high, Int32(EACH_ROW))),
    )


def row_limits(ranges: Ranges, row: Int32) -> tuple[Int32, Int32]:
    """Returns a row's low and high; of a row past the last, those of the last."""
    row = cutlass.min(row, ranges.query_length - 1)
    return element(ranges.low, row), element(ranges.high, row)


def key_tag(ranges: Ranges, key: Int32) -> Int32:
    """Returns the tag of a key; of a key past the last, its."""
    return element(ranges.tag_key, cutlass.min(key, ranges.key_length - 1))


LANES = 32


def bits_between(low: Int32, high: Int32, first: Int32) -> Uint32:
    """Returns a bit for each of 32 keys from `first` on: whether low <= key < high."""
    return bits_below(high - first) & ~bits_below(low - first)


def bits_below(count: Int32) -> Uint32:
    """Returns a word whose first `count` bits are 1; `count` may lie outside of 0 to 32."""
    count = cutlass.max(count, 0)
    # A shift by 32 gives 0 on a GPU, but need not in the language of the compiler.
    some = ~(Uint32(0xFFFFFFFF) << Uint32(cutlass.min(count, LANES - 1)))
    return Uint32(cutlass.select_(count >= LANES, Uint32(0xFFFFFFFF), some))


@cute.jit
def bits_of_tags(ranges: Ranges, row: Int32, tag: Int32) -> Uint32:
    """Returns a bit for each of a warp's keys: whether its tag is one that the lane's row takes.

    Args:
      row: the lane's; of a row past the last, the last one's tags count.
      tag: of the lane's key. All lanes call this together.
    """
    last = cutlass.min(row, ranges.query_length - 1)
    low, high = element(ranges.tag_low, last), element(ranges.tag_high, last)
    bits = Uint32(0)
    # A thread that holds a row's scores has few registers, so the loop is not unrolled in full.
    for i in cutlass.range(LANES, unroll=8):
        other = cute.arch.shuffle_sync(tag, i)
        bits = bits | (Uint32((other >= low) & (other <= high)) << Uint32(i))
    return bits


def matches(tags: TagsInMemory, first_key: Int32, limits: Limits) -> Uint32:
    """Returns a bit for each of 32 keys from first_key on: whether a row sees it by limits and tag.

    All lanes of a warp call this together; each has a row.
    """
    ranges = arrays(tags.buffers, tags.sizes, tags.batch)
    tag = key_tag(ranges, first_key + cute.arch.lane_idx())
    same = bits_of_tags(ranges, tags.row, tag)
    return same & bits_between(limits.low, limits.high, first_key)


@cute.jit
def make_tags(
    ranges: Ranges, wanted: cutlass.Boolean, first_row: Int32, rows: cutlass.Constexpr[int]
) -> Tags:
    """Makes the tags of a thread's rows first_row, first_row + 8, ..., if they are wanted."""
    low = cute.make_rmem_tensor((rows,), Int32)
    high = cute.make_rmem_tensor((rows,), Int32)
    low.fill(0)
    high.fill(0)
    if wanted:
        for row in cutlass.range_constexpr(rows):
            index = cutlass.min(first_row + 8 * row, ranges.query_length - 1)
            low[row] = element(ranges.tag_low, index)
            high[row] = element(ranges.tag_high, index)
    keys = cute.make_tensor(ranges.tag_key, cute.make_layout(ranges.key_length))
    return Tags(wanted, low, high, keys)
