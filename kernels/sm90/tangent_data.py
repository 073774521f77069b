"""Data of the Hopper tangent kernel: what a warpgroup holds while it works on a tile."""

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from fa4_jax import bands
from kernels.common import tensors
from kernels.common.tangent_statistics import lse_log2 as in_log2
from kernels.sm90 import softmax, wgmma
from kernels.sm90.forward_schedule import Work


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of a thread: registers of `softmax.ROWS` values each.

    Attributes:
      low, high: keys low <= j < high that a row sees.
      lse_log2: inf where a row sees no key, so that its P is 0.
      total, weighted: sums of this thread's P and W.
      first_column: of the thread in a block of scores.
    """

    low: cute.Tensor
    high: cute.Tensor
    lse_log2: cute.Tensor
    total: cute.Tensor
    weighted: cute.Tensor
    first_column: Int32


@dataclasses.dataclass(frozen=True)
class Operands:
    """A warpgroup's products, with their operands and results.

    Attributes:
      scores_product, output_product: of S and S', and of O'.
      q, q_tangent: descriptors of shared memory; k, k_tangent, v, v_tangent: by stage last, the
        latter two transposed.
      scores, tangents, probabilities, weights, acc: registers; S, S', P and W of a block, and O'.
    """

    scores_product: wgmma.Wgmma
    output_product: wgmma.Wgmma
    q: cute.Tensor
    q_tangent: cute.Tensor
    k: cute.Tensor
    k_tangent: cute.Tensor
    v: cute.Tensor
    v_tangent: cute.Tensor
    scores: cute.Tensor
    tangents: cute.Tensor
    probabilities: cute.Tensor
    weights: cute.Tensor
    acc: cute.Tensor


@cute.jit
def make_rows(work: Work, lse: cute.Tensor, first_row: Int32, first_column: Int32) -> Rows:
    """Makes rows first_row, first_row + 8, ... of a tile."""
    low, high = (cute.make_rmem_tensor((softmax.ROWS,), Int32) for _ in range(2))
    numbers = (cute.make_rmem_tensor((softmax.ROWS,), Float32) for _ in range(3))
    lse_log2, total, weighted = numbers
    total.fill(0.0)
    weighted.fill(0.0)
    for row in cutlass.range_constexpr(softmax.ROWS):
        query = first_row + 8 * row
        low[row], high[row] = bands.row_limits(work.band, query, tensors.INT32)
        lse_log2[row] = Float32.inf
        if query < work.band.query_length:
            lse_log2[row] = in_log2(lse[query])
    return Rows(low, high, lse_log2, total, weighted, first_column)
