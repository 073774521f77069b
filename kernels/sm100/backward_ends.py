"""Blackwell's backward kernels around the main one; a CTA has one query tile of a head.

kernels/common/backward_pre.py is the one before. The one after computes dQ = scale * dq_acc, from
tiles (backward.py, Note [dq_acc]) to [B, T, N, H].
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from fa4_jax.key import KernelKey
from kernels.common import backward_pre, hosts, resources, tensors
from kernels.common import ptx as common_ptx
from kernels.common.backward_pre import batch_length, query_tile
from kernels.common.ends_description import THREADS
from kernels.common.hosts import PostHost
from kernels.common.resources import Maps
from kernels.interface import PostScalars, RowSizes
from kernels.kernel_source import KernelSource
from kernels.sm100 import backward_description
from kernels.sm100.tiles import BACKWARD_TILES, LANES

VECTOR = 8  # values of one 16-byte store


class Postprocess(PostHost):
    """Converts dQ from its accumulators; attributes are compile-time constants."""

    def __init__(self, key: KernelKey):
        self.dtype = tensors.TYPES[key.dtype]
        self.tile = BACKWARD_TILES[key.head_dim, key.value_dim, key.pair]
        self.description = backward_description.post(key.head_dim, key.value_dim)

    @cute.kernel
    def kernel(
        self,
        maps: Maps,
        extents: cute.Pointer,
        dq_acc: cute.Pointer,
        sizes: RowSizes,
        scalars: PostScalars,
    ):
        rows, d = self.tile.m, self.tile.head_dim
        common_ptx.await_launch_before()
        query_length, heads = sizes.query_length, sizes.heads
        thread, _, _ = cute.arch.thread_idx()
        tile, head, batch = query_tile(query_length, heads, rows)
        tiles = (query_length + rows - 1) // rows
        tile_index = (Int64(batch) * heads + head) * tiles + tile
        staging = resources.allocate(self.description, self.dtype).dq
        tile_acc = dq_acc + cute.assume(tile_index * (rows * d), divby=rows * d)
        row, side = thread % rows, thread // rows
        is_there = tile * rows < batch_length(extents, batch)
        for part in cutlass.range(side, d // VECTOR, THREADS // rows, unroll=1):
            values = cute.make_rmem_tensor((VECTOR,), Float32)
            values.fill(0.0)
            if is_there:
                self.accumulated(tile_acc, row, part * VECTOR, values)
            rounded = cute.make_rmem_tensor((VECTOR,), self.dtype)
            pairs = cute.recast_tensor(rounded, Int32)
            for i in cutlass.range_constexpr(VECTOR // 2):
                pairs[i] = common_ptx.round_pair(
                    self.dtype, values[2 * i] * scalars.scale, values[2 * i + 1] * scalars.scale
                )
            cute.autovec_copy(rounded, cute.local_tile(staging[row, None], (VECTOR,), (part,)))
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()
        if cute.arch.make_warp_uniform(thread // 32) == 0:
            target = tensors.bthd_coordinates()[None, None, head, batch]
            with cute.arch.elect_one():
                tensors.tma_store(maps.dq, staging, cute.local_tile(target, (rows, d), (tile, 0)))
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0, read=True)

    def accumulated(self, tile_acc: cute.Pointer, row: Int32, column: Int32, values: cute.Tensor):
        """Loads eight values of a row from a column on."""
        rows, d = self.tile.m, self.tile.head_dim
        if not self.tile.dq_transposed:
            source = cute.make_tensor(tile_acc, cute.make_layout((4, rows, d // 4)))
            halves = cute.make_tensor(values.iterator, cute.make_layout((4, 2)))
            for half in range(2):
                cute.autovec_copy(source[None, row, column // 4 + half], halves[None, half])
            return
        first = column // LANES * LANES
        lanes = cutlass.min(Int32(LANES), d - first)
        place = first * rows + row // 4 * lanes * 4 + (column - first) * 4 + row % 4
        source = cute.make_tensor(tile_acc + place, cute.make_layout((VECTOR,), stride=(4,)))
        for i in range(VECTOR):
            values[i] = source[i]


def pre_source(key: KernelKey) -> KernelSource:
    """Returns the preprocessing kernel of a key, with its launch."""
    description = backward_description.pre(key.head_dim, key.value_dim)
    return backward_pre.source(key, description)


def post_source(key: KernelKey) -> KernelSource:
    """Returns the postprocessing kernel of a key, with its launch."""
    return hosts.post_source(Postprocess(key), key)
