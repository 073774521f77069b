"""Hopper's split forward: more than 32 packed rows are a product of a warpgroup.

Its four MMA warps then have 16 rows each and all keys. By mma.sync each of them would load all of K
and V from shared memory, four times 32 KiB a block, while a wgmma of the four loads them once:

    S  = Q K^T     wgmma 64 x 32, Q from registers, K from shared memory
    O += P V       wgmma 64 x head_dim, P from registers, V from shared memory

Registers hold what mma.sync has there, in the same places: Q, S, P and O of wgmma have 16 rows a
warp, and its threads the rows lane // 4 and 8 more. So scores become P as
`kernels.common.forward_split` does it; but each thread stores the output that it holds, since no
other warp has keys of its rows. Values past the key length are cleared in shared memory, since a
product would multiply them by 0, and 0 * NaN is NaN.
"""

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from fa4_jax.key import SPLIT_KEYS, KernelKey
from kernels.common.forward_split import ForwardSplit
from kernels.common.resources import Shared
from kernels.common.split_data import Call, Rows, Scales, Work
from kernels.common.split_description import WARP_ROWS
from kernels.common.split_hosts import split_source
from kernels.common.split_scores import HALVES, TILE_KEYS
from kernels.common.split_stores import RowEnd
from kernels.kernel_source import KernelSource
from kernels.sm90.forward_mask import clear_padding
from kernels.sm90.wgmma import K_MAJOR, MN_MAJOR, REGISTERS, Wgmma, round_fragment

_ROWS = 64  # of a wgmma


@dataclasses.dataclass(frozen=True)
class Operands:
    """The products of a warpgroup, views of shared memory, and fragments of registers.

    Attributes:
      qk, pv: S = Q K^T and O += P V.
      q: 64 x head_dim.
      k: step x head_dim, of each step of a block: all stages.
      vt: the same of V, head_dim x step.
      scores, probabilities: 64 x step; scores of each step of a block.
      acc: 64 x head_dim.
    """

    qk: Wgmma
    pv: Wgmma
    q: cute.Tensor
    k: list[cute.Tensor]
    vt: list[cute.Tensor]
    scores: list[cute.Tensor]
    probabilities: cute.Tensor
    acc: cute.Tensor


class HopperForwardSplit(ForwardSplit):
    """The kernel of one key; attributes are compile-time constants."""

    def __init__(self, key: KernelKey):
        super().__init__(key)
        self.cleared_barrier = self.description.named_barrier("cleared")
        # The next step's scores are computed during a step's softmax. With pages at d = 128 the
        # compiler then issues each copy of the load warp in a loop over the lanes, which took 1 to
        # 10 us longer (one H200).
        self.computes_ahead = not (key.paged and key.head_dim == 128)

    @cute.jit
    def visit_blocks(self, shared: Shared, work: Work, call: Call, rows: Rows, scales: Scales):
        """Adds this part's keys to a warp's output."""
        if rows.key_groups > 1:
            self.visit_by_warps(shared, work, call, rows, scales)
        else:
            self.visit_by_warpgroup(shared, work, call, rows, scales)

    @cute.jit
    def visit_by_warpgroup(
        self, shared: Shared, work: Work, call: Call, rows: Rows, scales: Scales
    ):
        """Adds this part's keys to the output of four warps."""
        thread, _, _ = cute.arch.thread_idx()
        mma = self.make_operands(shared, rows, thread)
        for i in cutlass.range(work.count, unroll=1):
            use = shared.barriers.kv_full.use(i)
            shared.barriers.kv_full.wait(use)
            first_key = (work.first_block + i * call.parts.splits) * SPLIT_KEYS
            left = work.band.key_length - first_key
            if left < SPLIT_KEYS:
                clear_padding(shared.v[None, None, use.slot], thread, left, self.cleared_barrier)
            stage, steps = (None, None, None, use.slot), len(mma.scores)
            first_steps = steps if self.computes_ahead else 1
            for step in cutlass.range_constexpr(first_steps):
                mma.qk.issue(mma.scores[step], mma.q, mma.k[step][stage], accumulate=False)
            for step in cutlass.range_constexpr(steps):
                if cutlass.const_expr(step >= first_steps):
                    mma.qk.issue(mma.scores[step], mma.q, mma.k[step][stage], accumulate=False)
                warpgroup.wait_group(first_steps - 1 if step == 0 else 0)
                own_key = first_key + step * self.tile.step_keys
                scores = cute.make_tensor(
                    mma.scores[step].iterator, cute.make_layout((4, self.tile.step_keys // 8))
                )
                self.exponentiate(rows, scores, own_key, work, call, scales)
                round_fragment(mma.scores[step], mma.probabilities)
                mma.pv.issue(mma.acc, mma.probabilities, mma.vt[step][stage], accumulate=True)
            warpgroup.wait_group(0)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(shared.barriers.kv_empty.at(use))

    @cute.jit
    def finish(
        self,
        shared: Shared,
        rows: Rows,
        work: Work,
        call: Call,
        row_tiles: Int32,
        scale_log2: Float32,
    ):
        """Stores what the warps have computed: of a warpgroup each thread what it holds."""
        if rows.key_groups > 1:
            super().finish(shared, rows, work, call, row_tiles, scale_log2)
        else:
            self.store_registers(rows, work, call, scale_log2)

    @cute.jit
    def store_registers(self, rows: Rows, work: Work, call: Call, scale_log2: Float32):
        """Stores the rows of a thread that has seen all keys of the part."""
        own = work.read_place()
        thread, _, _ = cute.arch.thread_idx()
        first = own.first_row + thread // 32 * WARP_ROWS + thread % 32 // 4
        for half in cutlass.range_constexpr(HALVES):
            row = first + 8 * half
            total = rows.row_sum[half]
            total = total + cute.arch.shuffle_sync_bfly(total, offset=1)
            total = total + cute.arch.shuffle_sync_bfly(total, offset=2)
            largest = rows.maximum[half] * scale_log2
            if row < own.first_row + own.rows:
                end = self.end_row(own, call, row, (total, largest), thread % 4 == 0)
                if call.parts.whole > 0:
                    self.store_row(call, call.buffers.o, self.dtype, end, rows.acc, half)
                elif total != 0.0:
                    self.store_row(call, call.buffers.o_parts, Float32, end, rows.acc, half)

    @cute.jit
    def store_row(
        self,
        call: Call,
        target: cute.Pointer,
        dtype: cutlass.Constexpr[Any],
        end: RowEnd,
        acc: cute.Tensor,
        half: cutlass.Constexpr[int],
    ):
        """Stores a thread's columns of one of its rows."""
        thread, _, _ = cute.arch.thread_idx()
        for tile in cutlass.range_constexpr(self.head_dim // TILE_KEYS):
            pair = cute.make_rmem_tensor((2,), Float32)
            for column in cutlass.range_constexpr(2):
                pair[column] = acc[2 * half + column, tile]
            place = (TILE_KEYS * tile + thread % 4 * 2, call.dims.value_dim)
            self.store_columns(target, dtype, end, place, pair)

    def make_operands(self, shared: Shared, rows: Rows, thread: Int32) -> Operands:
        """Makes the products; Q and O are the registers of `rows`."""
        step, d = self.tile.step_keys, self.head_dim
        qk = Wgmma(self.dtype, (1, 1), step, (K_MAJOR, K_MAJOR), REGISTERS)
        pv = Wgmma(self.dtype, (1, 1), d, (K_MAJOR, MN_MAJOR), REGISTERS)
        of_scores, of_output = qk.tiled(), pv.tiled()
        scores_part, output_part = of_scores.get_slice(thread), of_output.get_slice(thread)
        steps = range(SPLIT_KEYS // step)
        k = [cute.local_tile(shared.k, (step, d), (i, 0, None)) for i in steps]
        vt = [cute.local_tile(shared.vt, (d, step), (0, i, None)) for i in steps]
        query = cute.make_layout(of_scores.partition_shape_A((_ROWS, d)))
        output = cute.make_layout(of_output.partition_shape_C((_ROWS, d)))
        rounded = of_output.partition_shape_A((_ROWS, step))
        return Operands(
            qk=qk,
            pv=pv,
            q=cute.make_tensor(cute.recast_ptr(rows.query.iterator, dtype=self.dtype), query),
            k=[of_scores.make_fragment_B(scores_part.partition_B(tile)) for tile in k],
            vt=[of_output.make_fragment_B(output_part.partition_B(tile)) for tile in vt],
            scores=[
                cute.make_rmem_tensor(of_scores.partition_shape_C((_ROWS, step)), Float32)
                for _ in steps
            ],
            probabilities=cute.make_rmem_tensor(rounded, self.dtype),
            acc=cute.make_tensor(rows.acc.iterator, output),
        )


def source(key: KernelKey) -> KernelSource:
    """Returns the split forward of a key, with its launch.

    Where queries are in shared memory, registers do not suffice for them as operands of wgmma.
    """
    host = ForwardSplit(key)
    if not host.tile.query_in_shared:
        host = HopperForwardSplit(key)
    return split_source(host, key)
