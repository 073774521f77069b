"""What the Hopper forward leaves: the output as it is stored, LSE, a head's largest score.

With sinks a row has one more score, whose value is 0. In a kernel with ranges, whose calls may have
no sinks, it takes part when the row ends: the sums are moved to the larger of the row's reference
and the sink, so that no exponent is above 0. Kernels for sinks alone begin with it
(forward_data.start_with_sink).
"""

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass.cute.nvgpu import warp

from kernels.common import ptx, resources, tensors
from kernels.common.resources import Maps
from kernels.common.softmax import (
    LN_2,
    LOG2_E,
    TANH_UNIT,
    fmax,
    has_powers,
    select,
    with_sink,
)
from kernels.common.state import Scales, make_scales, sink_of, soft_cap_of
from kernels.description import NamedBarrier
from kernels.interface import ForwardScalars, LogitBuffers, Sizes
from kernels.sm90 import softmax, wgmma
from kernels.sm90.forward_bias import CallBias
from kernels.sm90.forward_data import Rows
from kernels.sm90.forward_schedule import Work
from kernels.sm90.tiles import WARPGROUP, ForwardTile

MOST_EXPONENTS = {cutlass.Float16: 12.0, cutlass.BFloat16: 40.0}
"""How far from 0 the exponents of P may be where rows have no maximum, by storage type.

They are in units of log2. Float16 has normal numbers from 2^-14 to 2^16. With bfloat16 the sums of
P times V stay below 2^127 for V up to 1e20 and a million keys.
"""


@dataclasses.dataclass(frozen=True)
class RowResults:
    """Where a call's numbers of rows, of heads and of scores are; logits only with ranges."""

    lse: cute.Pointer
    logits: LogitBuffers | None
    bias: CallBias | None


@dataclasses.dataclass(frozen=True)
class HeadResults:
    """One head's.

    Attributes:
      lse: [T], global memory.
      sink_log2: its sink, in units of log2, where it takes part at the end; -inf if the call has
        none.
      wants_maximum: whether `max_logit` is there.
      max_logit: its largest score so far, global memory.
      bias: the call's, or None.
    """

    lse: cute.Tensor
    sink_log2: Float32 | None = None
    wants_maximum: cutlass.Boolean | None = None
    max_logit: cute.Pointer | None = None
    bias: CallBias | None = None


def scales_of(results: RowResults, scalars: ForwardScalars, dtype: type) -> Scales:
    """Returns the scales of a call, which has a soft cap where the kernel reads one.

    dtype: the storage type.
    """
    logits = results.logits
    if logits is None or logits.soft_cap is None:
        return make_scales(scalars)
    scales = make_scales(scalars, soft_cap_of(logits))
    # A call that wants its largest scores needs the maximum of every block.
    limit = select(logits.max_heads > 0, Float32(-1.0), Float32(MOST_EXPONENTS[dtype]))
    limit = limit * TANH_UNIT / scales.scale_log2
    limit = select(limit < TANH_UNIT / 2, limit, Float32(TANH_UNIT / 2))
    limit = select(has_powers(scales.before_cap), limit, Float32(-1.0))
    return dataclasses.replace(scales, near_limit=limit)


def of_head(results: RowResults, work: Work, sizes: Sizes) -> HeadResults:
    """Returns the numbers of a tile's head."""
    head = Int64(work.batch) * sizes.heads + work.head
    rows = cute.make_layout(sizes.query_length)
    lse = cute.make_tensor(results.lse + head * sizes.query_length, rows)
    logits = results.logits
    if logits is None:
        return HeadResults(lse, bias=results.bias)
    sink_log2 = sink_of(logits, work.head) * LOG2_E
    return HeadResults(lse, sink_log2, logits.max_heads > 0, logits.max_logit + head)


class Output:
    """The end of a tile; attributes are compile-time constants.

    Attributes:
      tile: of the kernel.
      value_dim: columns of the output.
      dtype: storage type.
      barrier: threads of a warpgroup meet there before and after they write shared memory.
      finds_addresses_anew: of the output in shared memory, in each tile.
    """

    def __init__(
        self,
        tile: ForwardTile,
        value_dim: int,
        dtype: type,
        barrier: NamedBarrier,
        finds_addresses_anew: bool,
    ):
        self.tile, self.value_dim, self.dtype, self.barrier = tile, value_dim, dtype, barrier
        self.finds_addresses_anew = finds_addresses_anew

    @cute.jit
    def divide(
        self,
        work: Work,
        acc: cute.Tensor,
        rows: Rows,
        head: HeadResults,
        scale_log2: Float32,
    ) -> cute.Tensor:
        """Returns O / sum in the storage type, and stores LSE to global memory.

        Rows that see no key get output 0 and LSE -inf, or their sink; rows past the query length
        0 and -inf.
        """
        thread, _, _ = cute.arch.thread_idx()
        thread = thread - WARPGROUP
        lane = thread % 32
        first_row = work.first_row + (thread // 32) * 16 + lane // 4
        largest = -Float32.inf
        for row in cutlass.range_constexpr(softmax.ROWS):
            total = softmax.quad_reduce(rows.row_sum[row], lambda a, b: a + b)
            query = first_row + 8 * row
            below = query < work.band.query_length
            valid = below & (total != 0.0)
            if cutlass.const_expr(rows.tags is not None):
                # A row without keys of its own took part in blocks that the tile's other rows see.
                valid = valid & (rows.low[row] < rows.high[row])
                largest = fmax(largest, select(valid, rows.maximum[row], -Float32.inf))
            inverse = select(valid, 1.0 / total, Float32(0.0))
            reference_log2 = rows.reference[row] * scale_log2
            lse = (reference_log2 + cute.math.log2(total, fastmath=True)) * LN_2
            lse = select(valid, lse, -Float32.inf)
            if cutlass.const_expr(head.sink_log2 is not None):
                reference_log2 = select(valid, reference_log2, -Float32.inf)
                total = select(valid, total, Float32(0.0))
                inverse, lse = with_sink(reference_log2, total, head.sink_log2)
                lse = select(below, lse, -Float32.inf)
            if (lane % 4 == 0) & (query < cute.size(head.lse)):
                head.lse[query] = lse
            for pair, column in softmax.fragment_columns(acc):
                index = softmax.fragment_index(pair, row, column)
                acc[index] = select(valid, acc[index] * inverse, Float32(0.0))
        if cutlass.const_expr(head.max_logit is not None):
            if head.wants_maximum:
                add_maximum(head.max_logit, largest * scale_log2 * LN_2, lane)
        output = cute.make_rmem_tensor(acc.shape, self.dtype)
        wgmma.round_fragment(acc, output)
        return output

    @cute.jit
    def await_stored(self, group: Int32, stores: Boolean):
        """Waits until the memory of the warpgroup's output is free; all of its threads call it.

        stores: whether this is the warp that stores outputs.
        """
        if stores:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        resources.meet(self.barrier, group)

    @cute.jit
    def store(self, maps: Maps, memory: cute.Tensor, work: Work, output: cute.Tensor):
        """Stores 64 rows of O through the warpgroup's part of `memory`, or where V was: its start.

        Args:
          memory: (rows, value_dim) shared memory.
          output: the warpgroup's fragment.
        """
        thread, _, _ = cute.arch.thread_idx()
        thread = thread - WARPGROUP
        group = cute.arch.make_warp_uniform(thread // WARPGROUP)
        part = group if self.tile.own_output else Int32(0)
        source = cute.local_tile(memory, (64, self.value_dim), (part, 0))
        first_warp = cute.arch.make_warp_uniform(thread // 32) % 4 == 0
        if cutlass.const_expr(self.tile.own_output):
            self.await_stored(group, first_warp)
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype)
        majors = (wgmma.K_MAJOR, wgmma.MN_MAJOR)
        product = wgmma.Wgmma(self.dtype, (1, 1), self.value_dim, majors, wgmma.REGISTERS)
        if cutlass.const_expr(self.finds_addresses_anew):
            thread = ptx.anew(thread)  # No register holds them from tile to tile.
        copy = cute.make_tiled_copy_C(atom, product.tiled()).get_slice(thread % WARPGROUP)
        cute.copy(atom, copy.retile(output), copy.partition_D(source))
        cute.arch.fence_proxy("async.shared", space="cta")
        resources.meet(self.barrier, group)
        if first_warp:
            o = tensors.bthd_coordinates()[None, None, work.head, work.batch]
            o = cute.domain_offset((work.first_row + group * 64, 0), o)
            target = cute.local_tile(o, (64, self.value_dim), (0, 0))
            tensors.tma_store(maps.o, source, target)
            cute.arch.cp_async_bulk_commit_group()
            if cutlass.const_expr(not self.tile.own_output):
                cute.arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def add_maximum(target: cute.Pointer, value: Float32, lane: Int32):
    """Raises a value in global memory to the warp's largest; a NaN stays."""
    for step in cutlass.range_constexpr(3):  # The four lanes of a row have the same.
        value = fmax(value, cute.arch.shuffle_sync_bfly(value, offset=4 << step))
    if lane == 0:
        ptx.reduce_max(target, value)
