"""What the Hopper forward leaves: the output as it is stored, and the log-sum-exp."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from kernels.common.softmax import select
from kernels.sm90 import softmax, wgmma
from kernels.sm90.forward_data import Rows
from kernels.sm90.forward_schedule import Work
from kernels.sm90.tiles import WARPGROUP

LN_2 = 0.6931471805599453


@cute.jit
def divide(
    work: Work,
    acc: cute.Tensor,
    rows: Rows,
    row_lse: cute.Tensor,
    scale_log2: Float32,
    dtype: cutlass.Constexpr,
) -> cute.Tensor:
    """Returns O / sum in the storage type, and stores LSE to global memory.

    Rows that saw no key, and rows past the query length, get output 0 and LSE -inf.
    """
    thread, _, _ = cute.arch.thread_idx()
    thread = thread - WARPGROUP
    lane = thread % 32
    first_row = work.first_row + (thread // 32) * 16 + lane // 4
    for row in cutlass.range_constexpr(softmax.ROWS):
        total = softmax.quad_reduce(rows.row_sum[row], lambda a, b: a + b)
        query = first_row + 8 * row
        valid = (query < work.band.query_length) & (total != 0.0)
        inverse = select(valid, 1.0 / total, Float32(0.0))
        lse = (rows.reference[row] * scale_log2 + cute.math.log2(total, fastmath=True)) * LN_2
        lse = select(valid, lse, -Float32.inf)
        if (lane % 4 == 0) & (query < cute.size(row_lse)):
            row_lse[query] = lse
        for pair, column in softmax.fragment_columns(acc):
            index = softmax.fragment_index(pair, row, column)
            acc[index] = select(valid, acc[index] * inverse, Float32(0.0))
    output = cute.make_rmem_tensor(acc.shape, dtype)
    wgmma.round_fragment(acc, output)
    return output
