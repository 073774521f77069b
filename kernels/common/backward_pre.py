"""Backward, the kernel before the main one; one CTA per query tile of a head.

    delta = rowsum(dO * O) - dLSE,  lse_log2 = LSE * log2(e),  dq_acc = 0 (and counters = 0)

Rows that saw no key or lie past the query length get lse_log2 = +inf, so that their P is 0.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from fa4_jax.key import KernelKey
from fa4_jax.manifest import Factor, Launch, Param, Result
from kernels.common import launches, tensors
from kernels.sources import KernelSource

THREADS = 256
VECTOR = 8  # 16-bit elements of one 16-byte load
LOG2_E = 1.4426950408889634


def query_tile(query_length: Int32, heads: Int32, rows: int) -> tuple[Int32, Int32, Int32]:
    """(tile, head, batch) of this CTA; heads run fastest, as they are neighbours in memory."""
    tiles = (query_length + rows - 1) // rows
    index, _, _ = cute.arch.block_idx()
    row_of_heads = index // heads
    batch = row_of_heads // tiles
    return row_of_heads - batch * tiles, index - row_of_heads * heads, batch


class Preprocess:
    """Row statistics of the backward; attributes are compile-time constants."""

    def __init__(self, key: KernelKey, rows: int, columns: int):
        self.dtype = tensors.TYPES[key.dtype]
        self.columns = columns
        self.counters = launches.counters(key)
        self.rows = rows
        # The main kernel may start while this one ends; on Hopper it gained nothing (measured).
        self.programmatic = key.arch == "sm_100f"
        self.lanes = next(n for n in (8, 16, 32) if n * VECTOR >= key.value_dim)

    @cute.jit
    def __call__(
        self,
        o: cute.Pointer,
        do: cute.Pointer,
        lse: cute.Pointer,
        dlse: cute.Pointer,
        extents: cute.Pointer,
        lse_log2: cute.Pointer,
        delta: cute.Pointer,
        dq_acc: cute.Pointer,
        dq_order: cute.Pointer,
        dq_ticket: cute.Pointer,
        batch: Int32,
        query_length: Int32,
        heads: Int32,
        head_dim: Int32,
        stream: cuda.CUstream,
    ):
        self.kernel(
            o,
            do,
            lse,
            dlse,
            extents,
            lse_log2,
            delta,
            dq_acc,
            dq_order if "dq_order" in self.counters else None,
            dq_ticket if "dq_ticket" in self.counters else None,
            query_length,
            heads,
            head_dim,
        ).launch(
            grid=[cute.ceil_div(query_length, self.rows) * heads * batch, 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        o: cute.Pointer,
        do: cute.Pointer,
        lse: cute.Pointer,
        dlse: cute.Pointer,
        extents: cute.Pointer,
        lse_log2: cute.Pointer,
        delta: cute.Pointer,
        dq_acc: cute.Pointer,
        dq_order: cute.Pointer | None,
        dq_ticket: cute.Pointer | None,
        query_length: Int32,
        heads: Int32,
        head_dim: Int32,
    ):
        if cutlass.const_expr(self.programmatic):
            cute.arch.griddepcontrol_launch_dependents()
        thread, _, _ = cute.arch.thread_idx()
        tile, head, batch = query_tile(query_length, heads, self.rows)
        tiles = (query_length + self.rows - 1) // self.rows
        head_and_batch = Int64(batch) * heads + head
        tile_index = head_and_batch * tiles + tile

        zeros = cute.make_rmem_tensor((4,), Float32)
        zeros.fill(0.0)
        tile_size = self.rows * self.columns
        accumulators = cute.make_tensor(
            dq_acc + cute.assume(tile_index * tile_size, divby=tile_size),
            cute.make_layout((4, THREADS, tile_size // (4 * THREADS))),
        )
        for chunk in cutlass.range_constexpr(tile_size // (4 * THREADS)):
            cute.autovec_copy(zeros, accumulators[None, thread, chunk])
        if cutlass.const_expr(dq_order is not None):
            if thread == 0:
                cute.make_tensor(dq_order + tile_index, cute.make_layout(1))[0] = Int32(0)
        if cutlass.const_expr(dq_ticket is not None):
            if (thread == 0) & (tile_index == 0):
                cute.make_tensor(dq_ticket, cute.make_layout(1))[0] = Int32(0)

        length = cute.make_tensor(extents + batch * 4, cute.make_layout(4))[0]
        rows_at_once = THREADS // self.lanes
        lane = thread % self.lanes
        for part in cutlass.range_constexpr(self.rows // rows_at_once):
            row_in_tile = part * rows_at_once + thread // self.lanes
            row = tile * self.rows + row_in_tile
            product = Float32(0.0)
            if (row < query_length) & (lane * VECTOR < head_dim):
                vectors = ((Int64(batch) * query_length + row) * heads + head) * head_dim
                offset = cute.assume(vectors + lane * VECTOR, divby=VECTOR)
                product = self.dot(o + offset, do + offset)
            for distance in cutlass.range_constexpr(self.lanes.bit_length() - 1):
                product += cute.arch.shuffle_sync_bfly(product, offset=1 << distance)
            if lane == 0:
                row_lse_log2, row_delta = Float32.inf, Float32(0.0)
                if row < cutlass.min(length, query_length):
                    position = head_and_batch * query_length + row
                    row_lse = cute.make_tensor(lse + position, cute.make_layout(1))[0]
                    row_dlse = cute.make_tensor(dlse + position, cute.make_layout(1))[0]
                    if row_lse != -Float32.inf:
                        row_lse_log2 = row_lse * LOG2_E
                        row_delta = product - row_dlse
                target = tile_index * self.rows + row_in_tile
                cute.make_tensor(lse_log2 + target, cute.make_layout(1))[0] = row_lse_log2
                cute.make_tensor(delta + target, cute.make_layout(1))[0] = row_delta

    def dot(self, a: cute.Pointer, b: cute.Pointer) -> Float32:
        """fp32 dot product of two 16-byte vectors."""
        values = []
        for pointer in (a, b):
            fragment = cute.make_rmem_tensor((VECTOR,), self.dtype)
            cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(VECTOR)), fragment)
            values.append(fragment)
        total = Float32(0.0)
        for i in range(VECTOR):
            total = total + values[0][i].to(Float32) * values[1][i].to(Float32)
        return total


Preprocess.kernel.set_name_prefix(
    "fa4_bwd_pre", remove_cutlass_symbol=True, keep_mangled_name=False
)
Preprocess.__call__.set_name_prefix(
    "fa4_bwd_pre_host", remove_cutlass_symbol=True, keep_mangled_name=False
)


def sizes(buffer: str) -> tuple[Param, ...]:
    """The sizes of a [batch, query_length, heads, head_dim] buffer as parameters."""
    names = ("batch", "query_length", "heads", "head_dim")
    return tuple(launches.dim(name, buffer, axis) for axis, name in enumerate(names))


def grid(buffer: str, rows: int) -> tuple:
    """One CTA for each query tile of every head of such a buffer."""
    factors = (
        Factor(buffer=buffer, axis=1, divisor=rows),
        Factor(buffer=buffer, axis=2),
        Factor(buffer=buffer, axis=0),
    )
    return (factors, launches.ONE, launches.ONE)


def source(key: KernelKey, rows: int, columns: int) -> KernelSource:
    """The preprocessing kernel of a key, with its launch; dQ's tiles are rows x columns."""
    padded = (
        *launches.dims("do", (0, 2)),
        (Factor(buffer="do", axis=1, divisor=rows, multiple=rows),),
    )
    buffers = ("o", "do", "lse", "dlse", "extents", "lse_log2", "delta", "dq_acc")
    host_arguments = (*launches.pointers(*buffers, "dq_order", "dq_ticket"), *sizes("do"))
    return KernelSource(
        host=Preprocess(key, rows, columns),
        arguments=launches.example_arguments(host_arguments, key.dtype),
        host_arguments=host_arguments,
        launch=Launch(
            operands=("o", "do", "lse", "dlse", "extents"),
            results=(
                Result("lse_log2", "f32", padded),
                Result("delta", "f32", padded),
                *launches.accumulators(rows, columns, key),
            ),
            params=(*launches.pointers(*buffers, *launches.counters(key)), *sizes("do")[1:]),
            grid=grid("do", rows),
            block=(THREADS, 1, 1),
            dynamic_smem_bytes=0,
        ),
        tile={"m": rows},
        symbol_prefix="fa4_bwd_pre",
    )
