"""Data of the split forward: what a CTA works on, and what a warp holds meanwhile."""

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from fa4_jax import bands
from fa4_jax.key import SPLIT_KEYS, SPLIT_ROWS
from kernels.common import row_ranges, tensors
from kernels.common.softmax import LN_2, LOG2_E, TANH_UNIT, select
from kernels.common.split_description import PLACE_WORDS
from kernels.interface import (
    HeadDims,
    JoinBuffers,
    Sizes,
    SplitBuffers,
    SplitRanges,
    SplitScalars,
    SplitShape,
)

_TABLE_ENTRIES = 2
"""Entries of the table of row ranges that the tokens of a CTA meet at most."""


@dataclasses.dataclass(frozen=True)
class Call:
    """The parameters of a launch, but tensor maps and pages; ranges: as `NO_RANGES`, or given."""

    buffers: SplitBuffers
    sizes: Sizes
    dims: HeadDims
    parts: SplitShape
    scalars: SplitScalars
    ranges: SplitRanges


NO_RANGES: Any = None
"""Of keys in pages."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Which rows and which part of the keys a CTA has: what shapes alone say.

    Attributes:
      batch, kv_head, part: which.
      group: query heads of the KV head.
      first_row, rows: packed rows.
    """

    batch: Int32
    kv_head: Int32
    part: Int32
    group: Int32
    first_row: Int32
    rows: Int32

    def write(self, words: cute.Tensor):
        """Writes its attributes to shared memory, where `Work.read_place` reads them."""
        for i, field in enumerate(dataclasses.fields(self)):
            words[i] = getattr(self, field.name)

    def head(self, row: Int32, token: Int32) -> Int32:
        """Returns the query head of a packed row of a token."""
        return self.kv_head * self.group + row - token * self.group


@dataclasses.dataclass(frozen=True)
class Work:
    """What a CTA computes.

    Attributes:
      place: the words of its `Place` in shared memory, so that no register holds them meanwhile.
      band: of the batch element.
      first_block, count: its blocks are first_block, first_block + splits, and so on.
      compares: not 0 where rows and keys have tags that have to be compared.
    """

    place: cute.Tensor
    band: bands.Band
    first_block: Int32
    count: Int32
    compares: Int32

    def read_place(self) -> Place:
        """Returns which rows and which part of the keys the CTA has."""
        return Place(*(cute.arch.make_warp_uniform(self.place[i]) for i in range(PLACE_WORDS)))


def find_place(call: Call) -> Place:
    """Returns this CTA's place; KV heads, which are neighbours in memory, run fastest."""
    sizes = call.sizes
    index, part, row_block = cute.arch.block_idx()
    batch = index // sizes.kv_heads
    kv_head = index - batch * sizes.kv_heads
    first_row = row_block * SPLIT_ROWS
    group = sizes.heads // sizes.kv_heads
    rows = cutlass.min(sizes.query_length * group - first_row, Int32(SPLIT_ROWS))
    return Place(batch, kv_head, part, group, first_row, rows)


@cute.jit
def assign(call: Call, place: Place, band: bands.Band, words: cute.Tensor) -> Work:
    """Returns the work of a place: band and ranges say which blocks its rows see.

    words: of the place in shared memory.
    """
    sizes, splits, group = call.sizes, call.parts.splits, place.group
    batch, first_row, rows = place.batch, place.first_row, place.rows
    first_token = first_row // group
    tokens = (first_row + rows - 1) // group - first_token + 1
    blocks = bands.visited_blocks(band, first_token, tokens, SPLIT_KEYS, tensors.INT32)
    begin, end, compares = blocks.begin, blocks.end, Int32(0)
    if cutlass.const_expr(call.ranges is not None):
        if call.ranges.range_rows > 0:
            own = row_ranges.Rows(first_token, first_token + tokens - 1, _TABLE_ENTRIES)
            arrays = row_ranges.arrays(call.ranges, sizes, batch)
            seen, compares = row_ranges.limit_blocks(blocks, arrays, own, SPLIT_KEYS)
            begin, end = seen.begin, seen.end
    skipped = place.part - begin % splits
    skipped = Int32(cutlass.select_(skipped < 0, skipped + splits, skipped))
    first = begin + skipped
    count = (cutlass.max(end - first, 0) + splits - 1) // splits
    return Work(words, band, first, count, compares)


@cute.jit
def row_limits(work: Work, call: Call, batch: Int32, token: Int32) -> tuple[Int32, Int32]:
    """Returns the keys that a token sees by band and range: low <= j < high."""
    low, high = bands.row_limits(work.band, token, tensors.INT32)
    if cutlass.const_expr(call.ranges is not None):
        if call.ranges.range_rows > 0:
            arrays = row_ranges.arrays(call.ranges, call.sizes, batch)
            own_low, own_high = row_ranges.row_limits(arrays, token)
            low, high = cutlass.max(low, own_low), cutlass.min(high, own_high)
    return low, high


@cute.jit
def row_sink(
    buffers: SplitBuffers | JoinBuffers, sink_heads: Int32, batch: Int32, head: Int32, token: Int32
) -> tuple[Float32, cutlass.Boolean]:
    """Returns a row's sink in units of log2, and whether it is within the query length.

    Without sinks -inf, and the length does not matter: rows past it see no key.
    """
    sink_log2, is_row = -Float32.inf, cutlass.Boolean(True)
    if sink_heads > 0:
        sink_log2 = cute.make_tensor(buffers.sinks + head, cute.make_layout(1))[0] * LOG2_E
        length = cute.make_tensor(buffers.extents + Int64(batch) * 4, cute.make_layout(1))[0]
        is_row = token < length
    return sink_log2, is_row


@dataclasses.dataclass(frozen=True)
class Scales:
    """How products become exponents of 2.

    Attributes:
      scale_log2: of a score.
      before_cap: of a product, of which `softmax.tanh` makes the score, in units of the soft cap;
        0 where there is none.
    """

    scale_log2: Float32
    before_cap: Float32


@cute.jit
def make_scales(scalars: SplitScalars) -> Scales:
    """Returns the scales of a call; a cap so large that before_cap is 0 changes no score."""
    cap = Float32(0.0)
    if scalars.caps > 0:
        cap = cute.make_tensor(scalars.soft_cap, cute.make_layout(1))[0]
    before_cap = scalars.scale_log2 * (LN_2 * TANH_UNIT) / cap
    is_capped = (cap != 0.0) & (before_cap != 0.0)
    return Scales(
        select(is_capped, cap * LOG2_E, scalars.scale_log2),
        select(is_capped, before_cap, Float32(0.0)),
    )


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of a warp: registers of a thread, for rows lane // 4 and 8 more of the warp's 16.

    Attributes:
      query: 4 x head_dim / 16 words, A of mma.sync: registers, or the thread's in shared memory.
      low, high: keys that a row sees.
      maximum, row_sum: of its scores, and of this thread's exponentials.
      acc: 4 x head_dim / 8, output.
      key_group, key_groups: of every key_groups steps the key_group-th is the warp's.
    """

    query: cute.Tensor
    low: cute.Tensor
    high: cute.Tensor
    maximum: cute.Tensor
    row_sum: cute.Tensor
    acc: cute.Tensor
    key_group: Int32
    key_groups: Int32


@dataclasses.dataclass(frozen=True)
class Addresses:
    """Shared memory of a lane's matrix rows: 16 keys and 16 columns, the first of stage 0.

    Where the columns are the n-th 16 of a swizzle span, address ^ (32 n) takes the place of
    address.
    """

    k: Int32
    v: Int32
