"""The backward's kernel before the main one; a CTA has one query tile of a head and computes

    delta = rowsum(dO * O) - dLSE,  lse_log2 = LSE * log2(e),  dq_acc = 0 (and counters = 0).

With `Division.cleared_bytes` it clears dq_acc of the first heads alone, and the main kernel that of
the others. With `stores_first` it clears none of it.

Rows that saw no key or lie past the query length get lse_log2 = +inf, so that their P is 0. Of the
latter O and dO are not read, and a tile of them alone has no dQ: the kernel after the main one does
not read it either.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from fa4_jax.key import KernelKey
from kernels.common import launches, tensors
from kernels.common.ends_description import THREADS
from kernels.common.hosts import PreHost, pre_source
from kernels.common.tail import division
from kernels.description import Description
from kernels.interface import KeyHeads, PreBuffers, RowSizes, TailBuffers, TailSizes
from kernels.kernel_source import KernelSource

VECTOR = 8  # 16-bit elements of one 16-byte load
BYTES_OF_COLUMN = 2 + 2 + 4
"""Of a query in Q, dO and dQ's accumulators, in a kernel that leaves some to the main one."""
LOG2_E = 1.4426950408889634


def query_tile(query_length: Int32, heads: Int32, rows: int) -> tuple[Int32, Int32, Int32]:
    """Returns (tile, head, batch) of this CTA.

    Heads run fastest, as they are neighbours in memory.
    """
    tiles = (query_length + rows - 1) // rows
    index, _, _ = cute.arch.block_idx()
    row_of_heads = index // heads
    batch = row_of_heads // tiles
    return row_of_heads - batch * tiles, index - row_of_heads * heads, batch


def batch_length(extents: cute.Pointer, batch: Int32) -> Int32:
    """Returns the query length of a batch element."""
    return cute.make_tensor(extents + batch * 4, cute.make_layout(4))[0]


class Preprocess(PreHost):
    """Computes the backward's row statistics; attributes are compile-time constants."""

    def __init__(self, key: KernelKey, description: Description):
        self.dtype = tensors.TYPES[key.dtype]
        self.rows, self.columns = description.division.rows, description.division.columns
        self.counters = launches.counters_of(key.deterministic, description.division)
        self.description = description
        # The main kernel may start while this one ends; on Hopper it gained nothing (measured).
        self.lets_main_start = key.arch == "sm_100f"
        self.lanes = next(n for n in (8, 16, 32) if n * VECTOR >= key.value_dim)

    @cute.kernel
    def kernel(
        self,
        buffers: PreBuffers,
        sizes: RowSizes,
        head_dim: Int32,
        keys: KeyHeads | None = None,
        tail: TailBuffers | None = None,
        tail_sizes: TailSizes | None = None,
    ):
        if cutlass.const_expr(self.lets_main_start):
            cute.arch.griddepcontrol_launch_dependents()
        query_length, heads = sizes.query_length, sizes.heads
        thread, _, _ = cute.arch.thread_idx()
        tile, head, batch = query_tile(query_length, heads, self.rows)
        tiles = (query_length + self.rows - 1) // self.rows
        head_and_batch = Int64(batch) * heads + head
        tile_index = head_and_batch * tiles + tile

        length = cutlass.min(batch_length(buffers.extents, batch), query_length)

        zeros = cute.make_rmem_tensor((4,), Float32)
        zeros.fill(0.0)
        tile_size = self.rows * self.columns
        accumulators = cute.make_tensor(
            buffers.dq_acc + cute.assume(tile_index * tile_size, divby=tile_size),
            cute.make_layout((4, THREADS, tile_size // (4 * THREADS))),
        )
        clears = tile * self.rows < length
        if cutlass.const_expr(keys is not None):
            clears = clears & (head_and_batch < self.cleared_heads(sizes, keys))
            if (thread == 0) & (tile == 0):
                count = cute.make_tensor(buffers.dq_cleared + head_and_batch, cute.make_layout(1))
                count[0] = Int32(0)
        if cutlass.const_expr(self.description.division.stores_first):
            clears = False
        if clears:
            for chunk in cutlass.range_constexpr(tile_size // (4 * THREADS)):
                cute.autovec_copy(zeros, accumulators[None, thread, chunk])
        if cutlass.const_expr(buffers.dq_order is not None):
            if thread == 0:
                cute.make_tensor(buffers.dq_order + tile_index, cute.make_layout(1))[0] = Int32(0)
        if cutlass.const_expr(buffers.dq_ticket is not None):
            if (thread == 0) & (tile_index == 0):
                cute.make_tensor(buffers.dq_ticket, cute.make_layout(1))[0] = Int32(0)
        if cutlass.const_expr(tail is not None):
            self.clear_tail(tail, tail_sizes, query_length, zeros)

        rows_at_once = THREADS // self.lanes
        lane = thread % self.lanes
        for part in cutlass.range_constexpr(self.rows // rows_at_once):
            row_in_tile = part * rows_at_once + thread // self.lanes
            row = tile * self.rows + row_in_tile
            product = Float32(0.0)
            if (row < length) & (lane * VECTOR < head_dim):
                vectors = ((Int64(batch) * query_length + row) * heads + head) * head_dim
                offset = cute.assume(vectors + lane * VECTOR, divby=VECTOR)
                product = self.dot(buffers.o + offset, buffers.do + offset)
            for distance in cutlass.range_constexpr(self.lanes.bit_length() - 1):
                product += cute.arch.shuffle_sync_bfly(product, offset=1 << distance)
            if lane == 0:
                row_lse_log2, row_delta = Float32.inf, Float32(0.0)
                if row < length:
                    statistic = head_and_batch * query_length + row
                    row_lse = cute.make_tensor(buffers.lse + statistic, cute.make_layout(1))[0]
                    row_dlse = cute.make_tensor(buffers.dlse + statistic, cute.make_layout(1))[0]
                    if row_lse != -Float32.inf:
                        row_lse_log2 = row_lse * LOG2_E
                        row_delta = product - row_dlse
                target = tile_index * self.rows + row_in_tile
                cute.make_tensor(buffers.lse_log2 + target, cute.make_layout(1))[0] = row_lse_log2
                cute.make_tensor(buffers.delta + target, cute.make_layout(1))[0] = row_delta

    def cleared_heads(self, sizes: RowSizes, keys: KeyHeads) -> Int32:
        """Returns the number of query heads whose dQ it clears: the main kernel's first section."""
        group = sizes.heads // keys.kv_heads
        rows = self.description.division.cleared_bytes // (self.columns * BYTES_OF_COLUMN)
        return cutlass.max(rows // (sizes.query_length * group), Int32(1)) * group

    @cute.jit
    def clear_tail(
        self, buffers: TailBuffers, sizes: TailSizes, query_length: Int32, zeros: cute.Tensor
    ):
        """Writes 0 to its CTA's share of the buffers in which parts of key tiles meet."""
        keys, columns = self.description.division.keys, self.description.division.columns
        main_ctas = cutlass.min(sizes.key_tiles * launches.MOST_TAIL_PARTS, sizes.sm_count)
        main_ctas = cutlass.max(main_ctas, 1)  # A band has no such tiles.
        tiles, _ = division(sizes.key_tiles, main_ctas, query_length, buffers.tail_tiles)
        thread, _, _ = cute.arch.thread_idx()
        index, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        place, vectors = index * THREADS + thread, tiles * (2 * keys * columns // 4)
        while place < vectors:
            target = buffers.tail_acc + cute.assume(place * 4, divby=4)
            cute.autovec_copy(zeros, cute.make_tensor(target, cute.make_layout(4)))
            place += ctas * THREADS
        place = index * THREADS + thread
        while place < tiles:
            cute.make_tensor(buffers.tail_parts + place, cute.make_layout(1))[0] = Int32(0)
            place += ctas * THREADS

    def dot(self, a: cute.Pointer, b: cute.Pointer) -> Float32:
        """Returns the fp32 dot product of two 16-byte vectors."""
        values = []
        for pointer in (a, b):
            fragment = cute.make_rmem_tensor((VECTOR,), self.dtype)
            cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(VECTOR)), fragment)
            values.append(fragment)
        total = Float32(0.0)
        for i in range(VECTOR):
            total = total + values[0][i].to(Float32) * values[1][i].to(Float32)
        return total


def source(key: KernelKey, description: Description) -> KernelSource:
    """Returns the preprocessing kernel of a key, with its launch."""
    return pre_source(Preprocess(key, description), key)
