"""Data of Hopper's kernels of Hessian-vector products: a CTA's work, row statistics, operands."""

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from fa4_jax import bands
from fa4_jax.key import STATISTICS_ROWS
from kernels.common import tensors
from kernels.common.schedule import batch_band, nth_tile
from kernels.interface import Sizes, Window
from kernels.sm90 import softmax, wgmma
from kernels.sm90.hessian_description import STATISTICS
from kernels.sm90.tiles import L2_BUDGET_BYTES, HessianTile


@dataclasses.dataclass(frozen=True)
class Work:
    """A CTA's rows, of one head of one batch element, and the columns that they see.

    Attributes:
      head: of the rows; first_head, heads: those of the columns, one or the query heads of a group.
      band: of rows and columns: transposed where the rows are keys.
      padded_columns: whether the last block has columns past a length, which TMA reads.
    """

    first_row: Int32
    head: Int32
    first_head: Int32
    heads: Int32 | int
    batch: Int32
    band: bands.Band
    blocks: bands.BlockRange
    padded_columns: cutlass.Boolean


@dataclasses.dataclass(frozen=True)
class Shape:
    """What an assignment depends on besides the call.

    Attributes:
      by_key: rows are keys, columns queries.
      column_bytes: of a column's row of all operands together.
    """

    tile: HessianTile
    by_key: bool
    column_bytes: int


def assign(extents: cute.Pointer, sizes: Sizes, window: Window | None, shape: Shape) -> Work:
    """Returns the work of this CTA; the longest tiles of a causal band come first.

    Tiles of heads whose columns the L2 holds run together. window: None of a dense kernel.
    """
    index, _, _ = cute.arch.block_idx()
    group, rows = sizes.heads // sizes.kv_heads, shape.tile.m
    lengths, heads = (sizes.query_length, sizes.key_length), sizes.heads
    at_once = cutlass.max(L2_BUDGET_BYTES // shape.column_bytes // lengths[1], 1) * group
    if shape.by_key:
        lengths, heads = lengths[::-1], sizes.kv_heads
        at_once = cutlass.max(L2_BUDGET_BYTES // shape.column_bytes // (lengths[1] * group), 1)
    tiles = (lengths[0] + rows - 1) // rows
    tile, head_and_batch = nth_tile(index, at_once, heads * sizes.batch, tiles)
    if window is not None and not shape.by_key:
        tile = tiles - 1 - tile
    batch = head_and_batch // heads
    head = head_and_batch - batch * heads
    band = batch_band(extents, batch, window)
    band = band.transposed() if shape.by_key else band
    first_row = tile * rows
    blocks = bands.visited_blocks(band, first_row, rows, shape.tile.n, tensors.INT32)
    padded = (blocks.end * shape.tile.n > band.key_length) & (band.key_length < lengths[1])
    of_columns = (head * group, group) if shape.by_key else (head // group, 1)
    return Work(first_row, head, *of_columns, batch, band, blocks, padded)


def statistics_of(
    statistics: cute.Pointer, sizes: Sizes, batch: Int32, head: Int32
) -> cute.Pointer:
    """Returns where the statistics of a query head's rows begin, STATISTICS values each."""
    rows = (sizes.query_length + STATISTICS_ROWS - 1) // STATISTICS_ROWS * STATISTICS_ROWS
    return statistics + (Int64(batch) * sizes.heads + head) * rows * STATISTICS


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of a thread, `softmax.ROWS` of a fragment.

    Attributes:
      low, high: columns low <= j < high that a row sees.
      statistics: (STATISTICS, ROWS) of query rows; None where the rows are keys.
      first_column: of the thread in a block.
    """

    low: cute.Tensor
    high: cute.Tensor
    statistics: cute.Tensor | None
    first_column: Int32


def make_rows(
    work: Work, statistics: cute.Pointer, first_row: Int32, first_column: Int32, by_key: bool
) -> Rows:
    """Makes rows first_row, first_row + 8, ... of a tile; statistics: of the query head."""
    low, high = (cute.make_rmem_tensor((softmax.ROWS,), Int32) for _ in range(2))
    for row in range(softmax.ROWS):
        place = first_row + 8 * row
        low[row], high[row] = bands.row_limits(work.band, place, tensors.INT32)
    if by_key:
        return Rows(low, high, None, first_column)
    return Rows(low, high, load_statistics(work, statistics, first_row), first_column)


@cute.jit
def load_statistics(work: Work, statistics: cute.Pointer, first_row: Int32) -> cute.Tensor:
    """Loads those of query rows first_row, first_row + 8, ..., as `Rows` has them."""
    own = cute.make_rmem_tensor((STATISTICS, softmax.ROWS), Float32)
    for row in cutlass.range_constexpr(softmax.ROWS):
        place = first_row + 8 * row
        for i in cutlass.range_constexpr(STATISTICS):
            own[i, row] = Float32.inf if i == 0 else Float32(0.0)
        if place < work.band.query_length:
            source = cute.make_tensor(
                (statistics + place * STATISTICS).align(16), cute.make_layout(STATISTICS)
            )
            cute.autovec_copy(source, own[None, row])
    return own


@dataclasses.dataclass(frozen=True)
class Operands:
    """A warpgroup's products, with their operands and results.

    Attributes:
      scores_product, sum_product: of S, S', dP and dP'; of the results.
      rows, columns: descriptors of shared memory by name, columns by stage last.
      summed: those of columns transposed.
      scores, tangents, gradients, gradient_tangents: S, S', dP, dP' of a block, then P, P', dS,
        dS'.
      rounded: operands of the sums: dS, dS', and P' where the rows are keys.
      acc: the results.
    """

    scores_product: wgmma.Wgmma
    sum_product: wgmma.Wgmma
    rows: dict[str, cute.Tensor]
    columns: dict[str, cute.Tensor]
    summed: dict[str, cute.Tensor]
    scores: cute.Tensor
    tangents: cute.Tensor
    gradients: cute.Tensor
    gradient_tangents: cute.Tensor
    rounded: tuple[cute.Tensor, ...]
    acc: tuple[cute.Tensor, ...]
