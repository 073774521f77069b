"""Hopper backward, the kernel behind the main one; one CTA per query tile of a head.

dQ = scale * dq_acc, from accumulator layout (backward.py, Note [dq_acc]) to [B, T, N, H]
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warp

from fa4_jax.key import KernelKey
from fa4_jax.manifest import Launch, Param, Result
from kernels.common import backward_pre, launches, tensors
from kernels.common.backward_pre import THREADS, query_tile
from kernels.sm90.backward_data import make_products
from kernels.sm90.tiles import BACKWARD_TILES
from kernels.sources import KernelSource


class Postprocess:
    """dQ from its accumulators; attributes are compile-time constants."""

    def __init__(self, key: KernelKey):
        self.dtype = tensors.TYPES[key.dtype]
        self.head_dim = key.head_dim
        self.tile = BACKWARD_TILES[key.head_dim]
        self.product = make_products(self.dtype, self.head_dim, self.tile).dq

    def smem_layout(self, rows: int) -> cute.ComposedLayout:
        layout = tensors.tile_layout(self.dtype, rows, self.head_dim, 1, self.tile.span_bytes)
        return cute.slice_(layout, (None, None, 0))

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
        store = cpasync.CopyBulkTensorTileS2GOp()
        dq_map, _ = cpasync.make_tiled_tma_atom(
            store, dq_tensor, self.smem_layout(64), (64, self.head_dim)
        )
        self.kernel(dq_map, dq_acc, query_length, heads, scale).launch(
            grid=[cute.ceil_div(query_length, self.tile.m) * heads * batch, 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
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
        rows, d = self.tile.m, self.head_dim
        thread, _, _ = cute.arch.thread_idx()
        tile, head, batch = query_tile(query_length, heads, rows)
        tiles = (query_length + rows - 1) // rows
        tile_index = (Int64(batch) * heads + head) * tiles + tile
        layout = self.smem_layout(rows)

        @cute.struct
        class Storage:
            dq: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout)], 1024]

        storage = cutlass.memory.SmemAllocator().allocate(Storage)
        staging = tensors.smem_tensor(storage.dq, layout)
        mma = self.product.tiled()
        acc = cute.make_rmem_tensor(mma.partition_shape_C((rows, d)), Float32)
        chunks = cute.size(acc) // 4
        source = cute.make_tensor(
            dq_acc + cute.assume(tile_index * (rows * d), divby=rows * d),
            cute.make_layout((4, THREADS, chunks)),
        )
        registers = cute.make_tensor(acc.iterator, cute.make_layout((4, chunks)))
        for chunk in cutlass.range_constexpr(chunks):
            cute.autovec_copy(source[None, thread, chunk], registers[None, chunk])
        values = cute.make_rmem_tensor(acc.shape, self.dtype)
        values.store((acc.load() * scale).to(self.dtype))
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype)
        copy = cute.make_tiled_copy_C(atom, mma).get_slice(thread)
        cute.copy(atom, copy.retile(values), copy.partition_D(staging))
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()
        if cute.arch.make_warp_uniform(thread // 32) == 0:
            target = tensors.bthd_coordinates()[None, None, head, batch]
            for part in cutlass.range_constexpr(rows // 64):
                tensors.tma_store(
                    dq_map,
                    cute.local_tile(staging, (64, d), (part, 0)),
                    cute.local_tile(target, (64, d), (tile * (rows // 64) + part, 0)),
                )
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0)


Postprocess.kernel.set_name_prefix(
    "fa4_bwd_post", remove_cutlass_symbol=True, keep_mangled_name=False
)
Postprocess.__call__.set_name_prefix(
    "fa4_bwd_post_host", remove_cutlass_symbol=True, keep_mangled_name=False
)


def pre_source(key: KernelKey) -> KernelSource:
    """The preprocessing kernel of a key, with its launch."""
    return backward_pre.source(key, BACKWARD_TILES[key.head_dim].m, key.head_dim)


def post_source(key: KernelKey) -> KernelSource:
    """The postprocessing kernel of a key, with its launch."""
    tile = BACKWARD_TILES[key.head_dim]
    scale: tuple[Param, ...] = launches.scalars("f32", "scale")
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
                launches.bthd_map("dq", 64, tile.span_bytes),
                *launches.pointers("dq_acc"),
                *sizes[1:3],
                *scale,
            ),
            grid=backward_pre.grid("q", tile.m),
            block=(THREADS, 1, 1),
            dynamic_smem_bytes=tile.m * key.head_dim * 2,
        ),
        tile={"m": tile.m},
        symbol_prefix="fa4_bwd_post",
    )
