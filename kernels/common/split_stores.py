"""What the MMA warps of a split forward leave: results of a part of the keys, or of all."""

import dataclasses
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


@dataclasses.dataclass(frozen=True)
class RowEnd:
    """The end of a row.

    Attributes:
      index: of the row among those of the output, or of all parts' outputs.
      inverse: what its output is multiplied with.
    """

    index: Int64
    inverse: Float32


class Stores:
    """How a split forward ends; attributes are those of `ForwardSplit`."""

    dtype: Any
    head_dim: int
    parts_barrier: NamedBarrier

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
        """Stores what the warps have computed."""
        thread, _, _ = cute.arch.thread_idx()
        self.leave(shared, rows, cute.arch.make_warp_uniform(thread // 32), scale_log2)
        self.store(shared, work, call, row_tiles)

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
            row, column = own.first_row + i // vectors, i % vectors * VECTOR
            total, largest, values = self.joined(shared, i // vectors, i % vectors, row_tiles)
            end = self.end_row(own, call, row, (total, largest), column == 0)
            place = (column, call.dims.value_dim)
            if call.parts.whole > 0:
                self.store_columns(call.buffers.o, self.dtype, end, place, values)
            elif total != 0.0:
                self.store_columns(call.buffers.o_parts, Float32, end, place, values)

    @cute.jit
    def end_row(
        self,
        own: Place,
        call: Call,
        row: Int32,
        found: tuple[Float32, Float32],
        leads: cutlass.Boolean,
    ) -> RowEnd:
        """Returns what the end of a packed row is; the leading thread stores its LSE.

        found: the row's sum and largest score. The LSE of a part of the keys is in units of log2
        and without a sink.
        """
        sizes, parts, buffers = call.sizes, call.parts, call.buffers
        total, largest = found
        token = row // own.group
        head = own.head(row, token)
        inverse, index = Float32(0.0), Int64(0)
        if parts.whole > 0:
            sink_log2, is_row = row_sink(buffers, parts.sink_heads, own.batch, head, token)
            keep, with_sink, lse = join_sink(largest, total, sink_log2)
            # A product with a reciprocal: with a quotient sm_100f spills registers at d = 128.
            inverse = select(with_sink != 0.0, keep * (1.0 / with_sink), Float32(0.0))
            index = (Int64(own.batch) * sizes.query_length + token) * sizes.heads + head
            if leads:
                at = (Int64(own.batch) * sizes.heads + head) * sizes.query_length + token
                lse = select(is_row, lse, -Float32.inf)
                cute.make_tensor(buffers.lse + at, cute.make_layout(1))[0] = lse
                if parts.max_heads > 0:
                    cute.make_tensor(buffers.row_max + at, cute.make_layout(1))[0] = largest * LN_2
        else:
            inverse = 1.0 / total
            part = Int64(own.batch) * parts.splits + own.part
            index = (part * sizes.query_length + token) * sizes.heads + head
            if leads:
                lse_log2 = largest + cute.math.log2(total, fastmath=True)
                lse_log2 = select(total == 0.0, -Float32.inf, lse_log2)
                cute.make_tensor(buffers.lse_parts + index, cute.make_layout(1))[0] = lse_log2
                if parts.max_heads > 0:
                    cute.make_tensor(buffers.max_parts + index, cute.make_layout(1))[0] = largest
        return RowEnd(index, inverse)

    @cute.jit
    def store_columns(
        self,
        target: cute.Pointer,
        dtype: cutlass.Constexpr[Any],
        end: RowEnd,
        place: tuple[Int32, Int32],
        values: cute.Tensor,
    ):
        """Stores some columns of a row; place: the first of them, and how many a row has."""
        (column, value_dim), count = place, cute.size(values)
        if column < value_dim:
            rounded = cute.make_rmem_tensor((count,), dtype)
            for j in cutlass.range_constexpr(count):
                rounded[j] = (values[j] * end.inverse).to(dtype)
            offset = cute.assume(end.index * value_dim + column, divby=count)
            row = cute.make_tensor(target + offset, cute.make_layout(count))
            cute.autovec_copy(rounded, row)

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
