"""Data of the roles of the Blackwell forward that work row by row."""

import dataclasses
from typing import Any

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from kernels.common import row_ranges
from kernels.common.bias import BiasInMemory, RowBias
from kernels.common.state import Limits
from kernels.interface import RangeBuffers, Sizes
from kernels.sm100.forward_visits import Hidden


@dataclasses.dataclass(frozen=True)
class Call:
    """What the rows of a call have in memory: ranges and logits (`LogitBuffers`), a bias, or none.

    The rows of a kernel have either ranges and logits, or a bias, or neither.
    """

    sizes: Sizes
    ranges: RangeBuffers | None
    logits: Any
    bias: BiasInMemory | None


@dataclasses.dataclass(frozen=True)
class Row:
    """A thread's row of a tile: its query and head, and the head's LSE, [query_length]."""

    query: Int32
    head: Int32
    lse: cute.Tensor


@dataclasses.dataclass(frozen=True)
class Keys:
    """Which keys a row may see.

    Attributes:
      limits: by the band and by the row's range, if it has one.
      tags: where those of the row and of its keys are, if rows have ranges of keys in memory.
      maximum: the row's largest score so far, if rows have ranges. The reference may be smaller.
      hidden: what else hides keys, likewise.
      bias: what is added to the scores, if anything is.
    """

    limits: Limits
    tags: row_ranges.TagsInMemory = row_ranges.NO_TAGS
    maximum: cute.Tensor = row_ranges.NO_TAGS
    hidden: Hidden = row_ranges.NO_TAGS
    bias: RowBias = row_ranges.NO_TAGS


@dataclasses.dataclass(frozen=True)
class Block:
    """A block of scores of one row.

    Attributes:
      query_tile: of the CTA, whose row it is.
      lane_row: row of the tile, lane of tensor memory.
      index: of the block among the keys.
      ordinal: of the block among all of this query tile that the CTA has had.
      is_first: it is the first of its tile.
    """

    query_tile: Int32
    lane_row: Int32
    index: Int32
    ordinal: Int32
    is_first: Boolean


@dataclasses.dataclass(frozen=True)
class RowState:
    """A row between two blocks.

    Attributes:
      reference: what its scores are compared with: a maximum, or at most the lag limit below one.
      shift: minus the reference, in units of log2.
      row_sum: of its exponentials.
    """

    reference: Float32
    shift: Float32
    row_sum: Float32


@dataclasses.dataclass(frozen=True)
class Output:
    """A query tile's output.

    Attributes:
      has_blocks: the tile has any.
      tiles_done: tiles with blocks before it.
      written: outputs before it.
      last_ordinal: of the tile's last block.
    """

    has_blocks: Boolean
    tiles_done: Int32
    written: Int32
    last_ordinal: Int32
