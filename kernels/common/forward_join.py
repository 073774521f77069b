"""Joins the parts of a split forward: O and LSE of every row from those of parts of its keys.

    lse = log2(sum over parts of 2^lse_s) * ln(2),  o = sum over parts of 2^(lse_s - lse) o_s

A CTA has one row of one head. Groups of threads share the parts, a thread 4 columns of a part; then
the groups' sums are added, always in the same order. Parts whose LSE is -inf have no output.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from fa4_jax.key import KernelKey
from kernels.common import resources, tensors
from kernels.common.softmax import LN_2, exp2, finite_reference, fmax, select
from kernels.common.split_description import JOIN_WARPS, VECTOR, join, join_lanes
from kernels.common.split_hosts import JoinHost, join_source
from kernels.interface import JoinBuffers
from kernels.kernel_source import KernelSource

_LANES = 32


class ForwardJoin(JoinHost):
    """The kernel of one key; attributes are compile-time constants."""

    def __init__(self, key: KernelKey):
        self.dtype = tensors.TYPES[key.dtype]
        self.description = join(key.head_dim)
        self.lanes = join_lanes(key.head_dim)
        self.groups = JOIN_WARPS * _LANES // self.lanes

    @cute.kernel
    def kernel(
        self,
        buffers: JoinBuffers,
        splits: Int32,
        query_length: Int32,
        heads: Int32,
        value_dim: Int32,
    ):
        shared = resources.allocate(self.description, self.dtype)
        thread, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        rows = query_length * heads
        batch = row // rows
        in_batch = row - batch * rows
        first = Int64(batch) * splits * rows + in_batch
        lse_parts = cute.make_tensor(
            buffers.lse_parts + first, cute.make_layout(splits, stride=Int64(rows))
        )
        lse = self.join_lse(lse_parts, splits)
        self.add_parts(shared, buffers, first, lse_parts, lse, rows, value_dim)
        cute.arch.sync_threads()
        if thread == 0:
            token = in_batch // heads
            head = in_batch - token * heads
            place = (Int64(batch) * heads + head) * query_length + token
            cute.make_tensor(buffers.lse + place, cute.make_layout(1))[0] = lse * LN_2
        if thread * VECTOR < value_dim:
            total = cute.make_rmem_tensor((VECTOR,), Float32)
            total.fill(0.0)
            for group in cutlass.range_constexpr(self.groups):
                for j in cutlass.range_constexpr(VECTOR):
                    total[j] = total[j] + shared.sums[thread * VECTOR + j, group]
            output = cute.make_rmem_tensor((VECTOR,), self.dtype)
            for j in cutlass.range_constexpr(VECTOR):
                output[j] = total[j].to(self.dtype)
            offset = cute.assume(Int64(row) * value_dim + thread * VECTOR, divby=VECTOR)
            target = cute.make_tensor(buffers.o + offset, cute.make_layout(VECTOR))
            cute.autovec_copy(output, target)

    @cute.jit
    def join_lse(self, lse_parts: cute.Tensor, splits: Int32) -> Float32:
        """Returns a row's LSE, in units of log2; every warp computes it."""
        lane = cute.arch.lane_idx()
        largest = -Float32.inf
        for part in cutlass.range(lane, splits, _LANES, unroll=1):
            largest = fmax(largest, lse_parts[part])
        for step in cutlass.range_constexpr(5):
            largest = fmax(largest, cute.arch.shuffle_sync_bfly(largest, offset=1 << step))
        safe = finite_reference(largest)
        total = Float32(0.0)
        for part in cutlass.range(lane, splits, _LANES, unroll=1):
            total = total + exp2(lse_parts[part] - safe)
        for step in cutlass.range_constexpr(5):
            total = total + cute.arch.shuffle_sync_bfly(total, offset=1 << step)
        lse = safe + cute.math.log2(total, fastmath=True)
        return select(total == 0.0, -Float32.inf, lse)

    @cute.jit
    def add_parts(
        self,
        shared: resources.Shared,
        buffers: JoinBuffers,
        first: Int64,
        lse_parts: cute.Tensor,
        lse: Float32,
        rows: Int32,
        value_dim: Int32,
    ):
        """Leaves each group's share of a row's output in shared memory.

        first: the row of part 0, among all rows of o_parts; the next part's is `rows` later.
        """
        thread, _, _ = cute.arch.thread_idx()
        group = thread // self.lanes
        column = thread % self.lanes * VECTOR
        total = cute.make_rmem_tensor((VECTOR,), Float32)
        total.fill(0.0)
        safe = finite_reference(lse)
        if column < value_dim:
            for part in cutlass.range(group, cute.size(lse_parts), self.groups, unroll=4):
                lse_part = lse_parts[part]
                if lse_part != -Float32.inf:
                    weight = exp2(lse_part - safe)
                    offset = (first + Int64(part) * rows) * value_dim + column
                    offset = cute.assume(offset, divby=VECTOR)
                    source = cute.make_tensor(buffers.o_parts + offset, cute.make_layout(VECTOR))
                    values = cute.make_rmem_tensor((VECTOR,), Float32)
                    cute.autovec_copy(source, values)
                    for j in cutlass.range_constexpr(VECTOR):
                        total[j] = total[j] + values[j] * weight
        for j in cutlass.range_constexpr(VECTOR):
            shared.sums[column + j, group] = total[j]


def source(key: KernelKey) -> KernelSource:
    """Returns the kernel of a key that joins parts, with its launch."""
    return join_source(ForwardJoin(key), key)
