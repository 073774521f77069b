"""Joins the parts of a split forward: O and LSE of every row from those of parts of its keys.

    w_s = 2^(lse_s - largest),  lse = (largest + log2(sum of w_s)) * ln(2),
    o = sum of w_s o_s / sum of w_s

A sink is one more part, whose output is 0; a row's largest score is that of its parts.

A CTA has one row of one head. Each thread has a part's weight, or several; then groups of threads
share the parts, a thread 4 columns, and at last the groups' sums are added. All of it is in one
order, whatever runs beside it. Parts whose LSE is -inf have no output: what is read there is
dropped.
"""

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from fa4_jax.key import SPLIT_MOST_PARTS, KernelKey
from kernels.common import resources, tensors
from kernels.common.softmax import (
    LN_2,
    exp2,
    finite_reference,
    fmax,
    select,
    with_sink,
)
from kernels.common.split_data import row_sink
from kernels.common.split_description import JOIN_WARPS, VECTOR, join, join_lanes
from kernels.common.split_hosts import JoinHost, join_source
from kernels.interface import JoinBuffers, JoinShape
from kernels.kernel_source import KernelSource

_LANES = 32
_THREADS = JOIN_WARPS * _LANES
_IN_FLIGHT = 8  # loads of a thread at once


@dataclasses.dataclass(frozen=True)
class Outputs:
    """The outputs of a row's parts.

    Attributes:
      parts: of all rows.
      first: the row of part 0, among all rows of all parts.
      rows: from a part's row to the next part's.
      splits: the number of parts.
      value_dim: columns.
    """

    parts: cute.Pointer
    first: Int64
    rows: Int32
    splits: Int32
    value_dim: Int32


class ForwardJoin(JoinHost):
    """The kernel of one key; attributes are compile-time constants."""

    def __init__(self, key: KernelKey):
        self.dtype = tensors.TYPES[key.dtype]
        self.description = join(key.head_dim)
        self.lanes = join_lanes(key.head_dim)
        self.groups = _THREADS // self.lanes
        self.parts_at_once = self.groups * _IN_FLIGHT

    @cute.kernel
    def kernel(self, buffers: JoinBuffers, shape: JoinShape):
        shared = resources.allocate(self.description, self.dtype)
        thread, _, _ = cute.arch.thread_idx()
        index, token, _ = cute.arch.block_idx()
        batch = index // shape.heads
        head = index - batch * shape.heads
        rows = shape.query_length * shape.heads
        in_batch = token * shape.heads + head
        first = Int64(batch) * shape.splits * rows + in_batch
        cute.arch.griddepcontrol_wait()
        sink_log2, is_row = row_sink(buffers, shape.sink_heads, batch, head, token)
        parts = cute.make_layout(shape.splits, stride=Int64(rows))
        lse_parts = cute.make_tensor(buffers.lse_parts + first, parts)
        outputs = Outputs(buffers.o_parts, first, rows, shape.splits, shape.value_dim)
        loaded = [self.make_loads(), self.make_loads()]
        for i in cutlass.range_constexpr(len(loaded)):  # While weights are computed.
            self.load_parts(loaded[i], outputs, i * self.parts_at_once)
        largest, total = self.weigh(shared, lse_parts, shape.splits)
        self.add_parts(shared, loaded, outputs)
        cute.arch.sync_threads()
        inverse, lse = with_sink(largest, total, sink_log2)
        place = (Int64(batch) * shape.heads + head) * shape.query_length + token
        if thread == 0:
            lse = select(is_row, lse, -Float32.inf)
            cute.make_tensor(buffers.lse + place, cute.make_layout(1))[0] = lse
        if thread * VECTOR < shape.value_dim:
            output = cute.make_rmem_tensor((VECTOR,), self.dtype)
            for j in cutlass.range_constexpr(VECTOR):
                value = Float32(0.0)
                for group in cutlass.range_constexpr(self.groups):
                    value = value + shared.sums[thread * VECTOR + j, group]
                output[j] = (value * inverse).to(self.dtype)
            offset = cute.assume(
                (Int64(batch) * rows + in_batch) * shape.value_dim + thread * VECTOR, divby=VECTOR
            )
            target = cute.make_tensor(buffers.o + offset, cute.make_layout(VECTOR))
            cute.autovec_copy(output, target)
        if (shape.max_heads > 0) & (thread < _LANES):
            max_parts = cute.make_tensor(buffers.max_parts + first, parts)
            self.store_largest(max_parts, shape.splits, buffers.row_max + place)

    @cute.jit
    def store_largest(self, max_parts: cute.Tensor, splits: Int32, target: cute.Pointer):
        """Stores the largest score of a row, by one warp."""
        lane = cute.arch.lane_idx()
        largest = -Float32.inf
        for part in cutlass.range(lane, splits, _LANES, unroll=1):
            largest = fmax(largest, max_parts[part])
        for step in cutlass.range_constexpr(5):
            largest = fmax(largest, cute.arch.shuffle_sync_bfly(largest, offset=1 << step))
        if lane == 0:
            cute.make_tensor(target, cute.make_layout(1))[0] = largest * LN_2

    @cute.jit
    def weigh(
        self, shared: resources.Shared, lse_parts: cute.Tensor, splits: Int32
    ) -> tuple[Float32, Float32]:
        """Leaves the weights of a row's parts in shared memory; returns `largest` and their sum."""
        thread, _, _ = cute.arch.thread_idx()
        warp = thread // _LANES
        own = [-Float32.inf] * (SPLIT_MOST_PARTS // _THREADS)
        for i in cutlass.range_constexpr(len(own)):
            part = thread + i * _THREADS
            lse = lse_parts[cutlass.min(part, splits - 1)]
            own[i] = select(part < splits, lse, -Float32.inf)
        largest = -Float32.inf
        for lse in own:
            largest = fmax(largest, lse)
        for step in cutlass.range_constexpr(5):
            largest = fmax(largest, cute.arch.shuffle_sync_bfly(largest, offset=1 << step))
        shared.of_warps[warp, 0] = largest
        cute.arch.sync_threads()
        for i in cutlass.range_constexpr(JOIN_WARPS):
            largest = fmax(largest, shared.of_warps[i, 0])
        safe = finite_reference(largest)
        total = Float32(0.0)
        for i in cutlass.range_constexpr(len(own)):
            weight = exp2(own[i] - safe)
            shared.weights[thread + i * _THREADS] = weight
            total = total + weight
        for step in cutlass.range_constexpr(5):
            total = total + cute.arch.shuffle_sync_bfly(total, offset=1 << step)
        shared.of_warps[warp, 1] = total
        cute.arch.sync_threads()
        total = Float32(0.0)
        for i in cutlass.range_constexpr(JOIN_WARPS):
            total = total + shared.of_warps[i, 1]
        return largest, total

    def make_loads(self) -> cute.Tensor:
        """Makes registers for a thread's loads of as many parts as it loads at once."""
        return cute.make_rmem_tensor((VECTOR, _IN_FLIGHT), Float32)

    @cute.jit
    def load_parts(self, loaded: cute.Tensor, outputs: Outputs, begin: Int32 | int):
        """Loads a thread's columns of its group's parts from `begin` on, if there are any."""
        thread, _, _ = cute.arch.thread_idx()
        column = thread % self.lanes * VECTOR
        if (begin < outputs.splits) & (column < outputs.value_dim):
            for i in cutlass.range_constexpr(_IN_FLIGHT):
                part = begin + thread // self.lanes + i * self.groups
                part = cutlass.min(part, outputs.splits - 1)
                offset = (outputs.first + Int64(part) * outputs.rows) * outputs.value_dim + column
                offset = cute.assume(offset, divby=VECTOR)
                source = cute.make_tensor(outputs.parts + offset, cute.make_layout(VECTOR))
                cute.autovec_copy(source, loaded[None, i])

    @cute.jit
    def add_loaded(
        self,
        total: cute.Tensor,
        shared: resources.Shared,
        loaded: cute.Tensor,
        begin: Int32 | int,
        splits: Int32,
    ):
        """Adds the share of parts from `begin` on to a thread's columns; as `load_parts`."""
        thread, _, _ = cute.arch.thread_idx()
        if begin < splits:
            for i in cutlass.range_constexpr(_IN_FLIGHT):
                part = begin + thread // self.lanes + i * self.groups
                weight = shared.weights[cutlass.min(part, splits - 1)]
                counts = (part < splits) & (weight != 0.0)
                for j in cutlass.range_constexpr(VECTOR):
                    share = select(counts, loaded[j, i] * weight, Float32(0.0))
                    total[j] = total[j] + share

    @cute.jit
    def add_parts(self, shared: resources.Shared, loaded: list[cute.Tensor], outputs: Outputs):
        """Leaves each group's share of a row's output in shared memory.

        loaded: the first parts.
        """
        thread, _, _ = cute.arch.thread_idx()
        column, splits = thread % self.lanes * VECTOR, outputs.splits
        total = cute.make_rmem_tensor((VECTOR,), Float32)
        total.fill(0.0)
        for i in cutlass.range_constexpr(len(loaded)):
            self.add_loaded(total, shared, loaded[i], i * self.parts_at_once, splits)
        first = len(loaded) * self.parts_at_once
        for begin in cutlass.range(first, splits, self.parts_at_once, unroll=1):
            self.load_parts(loaded[0], outputs, begin)
            self.add_loaded(total, shared, loaded[0], begin, splits)
        for j in cutlass.range_constexpr(VECTOR):
            shared.sums[column + j, thread // self.lanes] = total[j]


def source(key: KernelKey) -> KernelSource:
    """Returns the kernel of a key that joins parts, with its launch."""
    return join_source(ForwardJoin(key), key)
