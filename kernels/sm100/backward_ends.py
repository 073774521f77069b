"""Blackwell backward, the kernels around the main one; one CTA per query tile of a head.

pre    kernels/common/backward_pre.py
post   dQ = scale * dq_acc, from tiles (backward.py, Note [dq_acc]) to [B, T, N, H]
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from fa4_jax.key import KernelKey
from fa4_jax.manifest import Launch, Result
from kernels.common import backward_pre, launches, tensors
from kernels.common import ptx as common_ptx
from kernels.common.backward_pre import query_tile
from kernels.sm100.tiles import BACKWARD_TILES, LANES
from kernels.sources import KernelSource

THREADS = 256
VECTOR = 8  # values of one 16-byte store


class Postprocess:
    """dQ from its accumulators; attributes are compile-time constants."""

    def __init__(self, key: KernelKey):
        self.dtype = tensors.TYPES[key.dtype]
        self.tile = BACKWARD_TILES[key.head_dim, key.value_dim]

    @cute.jit
    def __call__(
        self,
        do: cute.Pointer,
        dq_acc: cute.Pointer,
        dq: cute.Pointer,
        batch: Int32,
        query_length: Int32,
        heads: Int32,
        head_dim: Int32,
        scale: Float32,
        stream: cuda.CUstream,
    ):
        dq_tensor = tensors.bthd_tensor(dq, (batch, query_length, heads, head_dim))
        box = (self.tile.m, self.tile.head_dim)
        layout = tensors.tile_layout(self.dtype, *box, 1, self.tile.span_bytes)
        layout = cute.slice_(layout, (None, None, 0))
        store = cpasync.CopyBulkTensorTileS2GOp()
        dq_map, _ = cpasync.make_tiled_tma_atom(store, dq_tensor, layout, box)
        self.kernel(dq_map, dq_acc, query_length, heads, scale).launch(
            grid=[cute.ceil_div(query_length, self.tile.m) * heads * batch, 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        dq_map: cute.CopyAtom,
        dq_acc: cute.Pointer,
        query_length: Int32,
        heads: Int32,
        scale: Float32,
    ):
        rows, d = self.tile.m, self.tile.head_dim
        launches.await_launch_before()
        thread, _, _ = cute.arch.thread_idx()
        tile, head, batch = query_tile(query_length, heads, rows)
        tiles = (query_length + rows - 1) // rows
        tile_index = (Int64(batch) * heads + head) * tiles + tile
        layout = tensors.tile_layout(self.dtype, rows, d, 1, self.tile.span_bytes)

        @cute.struct
        class Storage:
            dq: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout)], 1024]

        storage = cutlass.memory.SmemAllocator().allocate(Storage)
        staging = tensors.smem_tensor(storage.dq, layout)[None, None, 0]
        tile_acc = dq_acc + cute.assume(tile_index * (rows * d), divby=rows * d)
        row, side = thread % rows, thread // rows
        for part in cutlass.range(side, d // VECTOR, THREADS // rows, unroll=1):
            values = self.accumulated(tile_acc, row, part * VECTOR)
            rounded = cute.make_rmem_tensor((VECTOR,), self.dtype)
            pairs = cute.recast_tensor(rounded, Int32)
            for i in cutlass.range_constexpr(VECTOR // 2):
                pairs[i] = common_ptx.round_pair(
                    self.dtype, values[2 * i] * scale, values[2 * i + 1] * scale
                )
            cute.autovec_copy(rounded, cute.local_tile(staging[row, None], (VECTOR,), (part,)))
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()
        if cute.arch.make_warp_uniform(thread // 32) == 0:
            target = tensors.bthd_coordinates()[None, None, head, batch]
            with cute.arch.elect_one():
                tensors.tma_store(dq_map, staging, cute.local_tile(target, (rows, d), (tile, 0)))
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0, read=True)

    def accumulated(self, tile_acc: cute.Pointer, row: Int32, column: Int32) -> cute.Tensor:
        """Eight values of a row from a column on."""
        values = cute.make_rmem_tensor((4, 2), Float32)
        rows, d = self.tile.m, self.tile.head_dim
        if not self.tile.dq_transposed:
            source = cute.make_tensor(tile_acc, cute.make_layout((4, rows, d // 4)))
            for half in range(2):
                cute.autovec_copy(source[None, row, column // 4 + half], values[None, half])
            return values
        first = column // LANES * LANES
        lanes = cutlass.min(Int32(LANES), d - first)
        place = first * rows + row // 4 * lanes * 4 + (column - first) * 4 + row % 4
        source = cute.make_tensor(tile_acc + place, cute.make_layout((VECTOR,), stride=(4,)))
        for i in range(VECTOR):
            values[i] = source[i]
        return values


Postprocess.kernel.set_name_prefix(
    "fa4_bwd_post", remove_cutlass_symbol=True, keep_mangled_name=False
)
Postprocess.__call__.set_name_prefix(
    "fa4_bwd_post_host", remove_cutlass_symbol=True, keep_mangled_name=False
)


def pre_source(key: KernelKey) -> KernelSource:
    """The preprocessing kernel of a key, with its launch."""
    tile = BACKWARD_TILES[key.head_dim, key.value_dim]
    return backward_pre.source(key, tile.m, tile.head_dim)


def post_source(key: KernelKey) -> KernelSource:
    """The postprocessing kernel of a key, with its launch."""
    tile = BACKWARD_TILES[key.head_dim, key.value_dim]
    scale = launches.scalars("f32", "scale")
    sizes = backward_pre.sizes("q")
    host_arguments = (*launches.pointers("q", "dq_acc", "dq"), *sizes, *scale)
    return KernelSource(
        host=Postprocess(key),
        arguments=launches.example_arguments(host_arguments, key.dtype),
        host_arguments=host_arguments,
        launch=Launch(
            operands=("q", "dq_acc"),
            results=(Result("dq", key.dtype, launches.dims("q", (0, 1, 2, 3))),),
            params=(
                launches.bthd_map("dq", tile.m, tile.span_bytes),
                *launches.pointers("dq_acc"),
                *sizes[1:3],
                *scale,
            ),
            grid=backward_pre.grid("q", tile.m),
            block=(THREADS, 1, 1),
            dynamic_smem_bytes=tile.m * tile.head_dim * 2,
            programmatic=True,
        ),
        tile={"m": tile.m},
        symbol_prefix="fa4_bwd_post",
    )
