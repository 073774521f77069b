"""Hopper's backward kernel after the main one; a CTA has one query tile of a head.

It computes dQ = scale * dq_acc, from accumulator layout (backward.py, Note [dq_acc]) to
[B, T, N, H].
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass.cute.nvgpu import warp

from fa4_jax.key import KernelKey
from kernels.common import backward_pre, hosts, resources, tensors
from kernels.common.backward_pre import batch_length, query_tile
from kernels.common.ends_description import THREADS
from kernels.common.hosts import PostHost
from kernels.common.resources import Maps
from kernels.interface import PostOrder, PostScalars, RowSizes
from kernels.kernel_source import KernelSource
from kernels.sm90 import backward_description
from kernels.sm90.backward_data import query_gradient_product
from kernels.sm90.tiles import BACKWARD_TILES


class Postprocess(PostHost):
    """Converts dQ from its accumulators; attributes are compile-time constants."""

    def __init__(self, key: KernelKey):
        self.dtype = tensors.TYPES[key.dtype]
        self.head_dim = key.head_dim
        self.tile = BACKWARD_TILES[key.head_dim, key.value_dim]
        self.description = backward_description.post(key.head_dim, key.value_dim)
        self.product = query_gradient_product(self.dtype, self.head_dim, self.tile)

    @cute.kernel
    def kernel(
        self,
        maps: Maps,
        extents: cute.Pointer,
        dq_acc: cute.Pointer,
        sizes: RowSizes,
        scalars: PostScalars,
        order: PostOrder | None = None,
    ):
        rows, d = self.tile.m, self.head_dim
        query_length, heads = sizes.query_length, sizes.heads
        thread, _, _ = cute.arch.thread_idx()
        tile, head, batch = query_tile(query_length, heads, rows)
        tiles = (query_length + rows - 1) // rows
        tile_index = (Int64(batch) * heads + head) * tiles + tile
        staging = resources.allocate(self.description, self.dtype).dq
        mma = self.product.tiled()
        acc = cute.make_rmem_tensor(mma.partition_shape_C((rows, d)), Float32)
        chunks = cute.size(acc) // 4
        source = cute.make_tensor(
            dq_acc + cute.assume(tile_index * (rows * d), divby=rows * d),
            cute.make_layout((4, THREADS, chunks)),
        )
        registers = cute.make_tensor(acc.iterator, cute.make_layout((4, chunks)))
        acc.fill(0.0)
        has_values = tile * rows < batch_length(extents, batch)
        if cutlass.const_expr(order is not None):
            has_values = has_values & self.was_added(order, tile_index)
        if has_values:
            for chunk in cutlass.range_constexpr(chunks):
                cute.autovec_copy(source[None, thread, chunk], registers[None, chunk])
        values = cute.make_rmem_tensor(acc.shape, self.dtype)
        values.store((acc.load() * scalars.scale).to(self.dtype))
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype)
        copy = cute.make_tiled_copy_C(atom, mma).get_slice(thread)
        cute.copy(atom, copy.retile(values), copy.partition_D(staging))
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()
        if cute.arch.make_warp_uniform(thread // 32) == 0:
            target = tensors.bthd_coordinates()[None, None, head, batch]
            for part in cutlass.range_constexpr(rows // 64):
                tensors.tma_store(
                    maps.dq,
                    cute.local_tile(staging, (64, d), (part, 0)),
                    cute.local_tile(target, (64, d), (tile * (rows // 64) + part, 0)),
                )
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0)

    @cute.jit
    def was_added(self, order: PostOrder, tile_index: Int64) -> Boolean:
        """Whether a query tile has dQ: without an order always, with one if anybody has added."""
        added = Int32(1)
        if order.orders > 0:
            added = cute.make_tensor(order.dq_order + tile_index, cute.make_layout(1))[0]
        return added > 0


def pre_source(key: KernelKey) -> KernelSource:
    """Returns the preprocessing kernel of a key, with its launch."""
    return backward_pre.source(key, backward_description.pre(key))


def post_source(key: KernelKey) -> KernelSource:
    """Returns the postprocessing kernel of a key, with its launch."""
    return hosts.post_source(Postprocess(key), key)
