"""Data of the Hopper forward: what a warpgroup holds while it works on a tile."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from fa4_jax import bands
from kernels.common import ptx, row_ranges, tensors
from kernels.common.pair_masks import BitsInMemory
from kernels.common.softmax import exp2, select
from kernels.common.state import Scales
from kernels.interface import RangeBuffers, Sizes
from kernels.sm90 import softmax, wgmma
from kernels.sm90.forward_schedule import Work

if TYPE_CHECKING:
    from kernels.sm90.forward_bias import TileBias
    from kernels.sm90.staged_bias import StagedBias


@dataclasses.dataclass(frozen=True)
class Operands:
    """A warpgroup's two products, with their operands and results.

    Attributes:
      qk_product, pv_product: S = Q K^T and O += P V.
      q, k, vt: descriptors of shared memory; k and vt by stage last.
      q_slices: the first slices of Q, which registers hold, or None.
      scores, probabilities, acc: registers; S and P of a block, O of the tile.
    """

    qk_product: wgmma.Wgmma
    pv_product: wgmma.Wgmma
    q: cute.Tensor
    q_slices: cute.Tensor | None
    k: cute.Tensor
    vt: cute.Tensor
    scores: cute.Tensor
    probabilities: cute.Tensor
    acc: cute.Tensor


ABSENT: Any = None
"""Stands for what only rows with ranges in memory, or with bits of a mask of pairs, have."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of a thread: registers of `softmax.ROWS` values each.

    Attributes:
      low, high: keys low <= j < high that a row sees.
      reference: what its scores are compared with: a maximum, or at most the lag limit below one.
      row_sum: of this thread's exponentials.
      maximum: of its scores, where rows have ranges; the reference may lag behind it.
      first_column: of the thread in a block of scores.
      tags: what is compared besides, where rows have ranges of keys in memory.
      bits: of a mask of pairs, which a call with ranges may have.
    """

    low: cute.Tensor
    high: cute.Tensor
    reference: cute.Tensor
    row_sum: cute.Tensor
    first_column: Int32
    tags: row_ranges.Tags = row_ranges.NO_TAGS
    maximum: cute.Tensor = ABSENT
    bits: BitsInMemory = ABSENT


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a warpgroup is.

    Attributes:
      group: which of the MMA warpgroups it is.
      ring_end: block b of the tile is use `ring_end - b` of the K and V rings.
    """

    group: Int32
    ring_end: Int32


@dataclasses.dataclass(frozen=True)
class Scores:
    """How a tile's products become scores.

    Attributes:
      work: of the tile.
      scales: of the call.
      bias: what they get, or None.
      staged: how the pairs of a dense bias come, in a loop of blocks that have them.
    """

    work: Work
    scales: Scales
    bias: TileBias | None
    staged: StagedBias | None = None


@dataclasses.dataclass(frozen=True)
class TileRanges:
    """What hides keys of a tile's rows in memory: ranges of the batch element, bits of the head."""

    ranges: row_ranges.Ranges
    bits: BitsInMemory


def ranges_of(buffers: RangeBuffers | None, sizes: Sizes, work: Work) -> TileRanges | None:
    """Returns a tile's ranges, or None."""
    if buffers is None:
        return None
    bits = ABSENT
    if buffers.mask_bits is not None:
        bits = BitsInMemory(buffers, sizes, work.plane, work.first_row)
    return TileRanges(row_ranges.arrays(buffers, sizes, work.batch), bits)


def row_range(work: Work, ranges: row_ranges.Ranges, row: Int32) -> tuple[Int32, Int32]:
    """Returns the range of a row: the one that all rows of its tile have, or its own from memory.

    Predicates load it, not a branch, across which the compiler would move registers to memory.
    """
    own = Int32(work.high == row_ranges.EACH_ROW)
    row = cutlass.min(row, ranges.query_length - 1)
    low = ptx.load_word_below(ranges.low + row, 0, own)
    high = ptx.load_word_below(ranges.high + row, 0, own)
    low = cutlass.max(low, work.low)
    return low, Int32(cutlass.select_(own > 0, high, work.high))


@cute.jit
def make_rows(work: Work, ranges: TileRanges | None, first_row: Int32, first_column: Int32) -> Rows:
    """Makes rows first_row, first_row + 8, ... as they are before the first block."""
    low = cute.make_rmem_tensor((softmax.ROWS,), Int32)
    high = cute.make_rmem_tensor((softmax.ROWS,), Int32)
    reference = cute.make_rmem_tensor((softmax.ROWS,), Float32)
    row_sum = cute.make_rmem_tensor((softmax.ROWS,), Float32)
    for row in cutlass.range_constexpr(softmax.ROWS):
        limits = bands.row_limits(work.band, first_row + 8 * row, tensors.INT32)
        low[row], high[row] = limits
        reference[row], row_sum[row] = -Float32.inf, Float32(0.0)
    rows = Rows(low, high, reference, row_sum, first_column)
    if cutlass.const_expr(ranges is not None):
        rows = with_ranges(rows, work, ranges, first_row)
    return rows


SINK_LEAD_LOG2 = 8.0
"""By how much a sink is above the reference that its row begins with, in units of log2.

P of a score far below the sink then keeps the bits that the output can show: float16 has normal
numbers down to 2^-14, so scores down to 22 below the sink have normal P.
"""

_LARGEST = 3e38  # a float32


def start_with_sink(rows: Rows, sink_log2: Float32, scale_log2: Float32):
    """Makes the sink what each row has seen first; one of the row's four threads has its weight."""
    below = (sink_log2 - SINK_LEAD_LOG2) * cute.arch.rcp_approx(scale_log2)
    reference = cute.arch.fmin(cute.arch.fmax(below, -_LARGEST), _LARGEST)
    # The weight is not computed where it is known: it would be that of a rounding error.
    weight = exp2(sink_log2 - reference * scale_log2)
    weight = select(reference == below, Float32(2.0**SINK_LEAD_LOG2), weight)
    weight = select(cute.arch.lane_idx() % 4 == 0, weight, Float32(0.0))
    weight = select(sink_log2 < Float32.inf, weight, Float32(math.nan))  # as exp(inf - inf)
    for row in range(softmax.ROWS):
        rows.reference[row], rows.row_sum[row] = reference, weight


@cute.jit
def with_ranges(rows: Rows, work: Work, own: TileRanges, first_row: Int32) -> Rows:
    """Returns rows whose limits are those of their ranges, too."""
    ranges = own.ranges
    for row in cutlass.range_constexpr(softmax.ROWS):
        low, high = row_range(work, ranges, first_row + 8 * row)
        rows.low[row] = cutlass.max(rows.low[row], low)
        rows.high[row] = cutlass.min(rows.high[row], high)
    maximum = cute.make_rmem_tensor((softmax.ROWS,), Float32)
    maximum.fill(-Float32.inf)
    wanted = work.compares != 0
    tags = row_ranges.make_tags(ranges, wanted, first_row, softmax.ROWS)
    return dataclasses.replace(rows, tags=tags, maximum=maximum, bits=own.bits)
