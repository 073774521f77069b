"""What the MMA warps of a split forward leave: results of a part of the keys, or of all."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kernels.common import resources
from kernels.common.resources import Shared
from kernels.common.softmax import LN_2, exp2, finite_reference, fmax, join_sink, select
from kernels.common.split_data import Call, Place, Rows, Work, row_sink
from kernels.common.split_description import MMA_WARPS, VECTOR, WARP_ROWS
from kernels.common.split_scores import HALVES, TILE_KEYS
from kernels.description import NamedBarrier


class Stores:
    """How a split forward ends; attributes are those of `ForwardSplit`."""

    dtype: Any
    head_dim: int
    parts_barrier: NamedBarrier

    @cute.jit
    def leave(self, shared: Shared, rows: Rows, warp: Int32, scale_log2: Float32):
        """Leaves a warp's maxima, sums and output in shared memory, where all are when it ends."""
        lane = cute.arch.lane_idx()
        resources.meet(self.parts_barrier)
        for half in cutlass.range_constexpr(HALVES):
            row = warp * WARP_ROWS + lane // 4 + 8 * half
            total = rows.row_sum[half]
            total = total + cute.arch.shuffle_sync_bfly(total, offset=1)
            total = total + cute.arch.shuffle_sync_bfly(total, offset=2)
            if lane % 4 == 0:
                shared.sums[0, row] = rows.maximum[half] * scale_log2
                shared.sums[1, row] = total
            for tile in cutlass.range_constexpr(self.head_dim // TILE_KEYS):
                pair = cute.make_rmem_tensor((2,), Float32)
                for column in cutlass.range_constexpr(2):
                    pair[column] = rows.acc[2 * half + column, tile]
                place = (TILE_KEYS // 2 * tile + lane % 4,)
                cute.autovec_copy(pair, cute.local_tile(shared.outputs[None, row], (2,), place))
        resources.meet(self.parts_barrier)

    @cute.jit
    def store(self, shared: Shared, work: Work, call: Call, row_tiles: Int32):
        """Joins what the warps of the same rows have left, and stores it."""
        own, vectors = work.read_place(), self.head_dim // VECTOR
        thread, _, _ = cute.arch.thread_idx()
        for i in cutlass.range(thread, own.rows * vectors, MMA_WARPS * 32, unroll=1):
            place = self.find_vector(own, i)
            found = self.joined(shared, i // vectors, i % vectors, row_tiles)
            if call.parts.whole > 0:
                self.store_whole(own, call, place, found)
            else:
                self.store_part(own, call, place, found)

    def find_vector(self, own: Place, i: Int32) -> tuple[Int32, Int32, Int32]:
        """Returns token, head and first column of the i-th four columns of packed rows."""
        vectors = self.head_dim // VECTOR
        packed = own.first_row + i // vectors
        token = packed // own.group
        return token, own.head(packed, token), i % vectors * VECTOR

    @cute.jit
    def store_whole(
        self,
        own: Place,
        call: Call,
        place: tuple[Int32, Int32, Int32],
        found: tuple[Float32, Float32, Any],
    ):
        """Stores four columns of a row's output, and its LSE; `place`: token, head, column."""
        sizes, dims, parts, buffers = call.sizes, call.dims, call.parts, call.buffers
        (token, head, column), (total, largest, values) = place, found
        sink_log2, is_row = row_sink(buffers, parts.sink_heads, own.batch, head, token)
        keep, total, lse = join_sink(largest, total, sink_log2)
        # A product with a reciprocal: with a quotient sm_100f spills registers at d = 128.
        inverse = select(total != 0.0, keep * (1.0 / total), Float32(0.0))
        if column == 0:
            at = (Int64(own.batch) * sizes.heads + head) * sizes.query_length + token
            lse = select(is_row, lse, -Float32.inf)
            cute.make_tensor(buffers.lse + at, cute.make_layout(1))[0] = lse
            if parts.max_heads > 0:
                cute.make_tensor(buffers.row_max + at, cute.make_layout(1))[0] = largest * LN_2
        if column < dims.value_dim:
            output = cute.make_rmem_tensor((VECTOR,), self.dtype)
            for j in cutlass.range_constexpr(VECTOR):
                output[j] = (values[j] * inverse).to(self.dtype)
            row = (Int64(own.batch) * sizes.query_length + token) * sizes.heads + head
            offset = cute.assume(row * dims.value_dim + column, divby=VECTOR)
            target = cute.make_tensor(buffers.o + offset, cute.make_layout(VECTOR))
            cute.autovec_copy(output, target)

    @cute.jit
    def store_part(
        self,
        own: Place,
        call: Call,
        place: tuple[Int32, Int32, Int32],
        found: tuple[Float32, Float32, Any],
    ):
        """Stores the same of a part of the keys, in units of log2, without a sink."""
        sizes, dims, parts, buffers = call.sizes, call.dims, call.parts, call.buffers
        (token, head, column), (total, largest, values) = place, found
        part = Int64(own.batch) * parts.splits + own.part
        result = (part * sizes.query_length + token) * sizes.heads + head
        if column == 0:
            lse = largest + cute.math.log2(total, fastmath=True)
            lse = select(total == 0.0, -Float32.inf, lse)
            cute.make_tensor(buffers.lse_parts + result, cute.make_layout(1))[0] = lse
            if parts.max_heads > 0:
                cute.make_tensor(buffers.max_parts + result, cute.make_layout(1))[0] = largest
        if (total != 0.0) & (column < dims.value_dim):
            inverse = 1.0 / total
            output = cute.make_rmem_tensor((VECTOR,), Float32)
            for j in cutlass.range_constexpr(VECTOR):
                output[j] = values[j] * inverse
            offset = cute.assume(result * dims.value_dim + column, divby=VECTOR)
            target = cute.make_tensor(buffers.o_parts + offset, cute.make_layout(VECTOR))
            cute.autovec_copy(output, target)

    @cute.jit
    def joined(
        self, shared: Shared, row: Int32, vector: Int32, row_tiles: Int32
    ) -> tuple[Float32, Float32, Any]:
        """Returns a row's sum, its maximum, and the vector-th four columns of its output.

        It joins the row's key groups. Four are loaded, whatever their number is, so that no load
        waits for another; what is not one counts nothing.
        """
        rows = [row + group * row_tiles * WARP_ROWS for group in range(MMA_WARPS)]
        is_group = [at < MMA_WARPS * WARP_ROWS for at in rows]
        rows = [Int32(cutlass.select_(is_group[i], at, row)) for i, at in enumerate(rows)]
        own = cute.make_rmem_tensor((VECTOR, MMA_WARPS), Float32)
        maxima = []
        largest = -Float32.inf
        for i in cutlass.range_constexpr(MMA_WARPS):
            maxima.append(select(is_group[i], shared.sums[0, rows[i]], -Float32.inf))
            largest = fmax(largest, maxima[i])
            vectors = cute.local_tile(shared.outputs[None, rows[i]], (VECTOR,), (vector,))
            cute.autovec_copy(vectors, own[None, i])
        safe = finite_reference(largest)
        total = Float32(0.0)
        values = cute.make_rmem_tensor((VECTOR,), Float32)
        values.fill(0.0)
        for i in cutlass.range_constexpr(MMA_WARPS):
            factor = exp2(maxima[i] - safe)
            total = total + shared.sums[1, rows[i]] * factor
            for j in cutlass.range_constexpr(VECTOR):
                share = select(is_group[i], own[j, i] * factor, Float32(0.0))
                values[j] = values[j] + share
        return total, largest, values
