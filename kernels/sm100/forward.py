"""Blackwell's forward: O = softmax(scale * Q K^T) V and LSE, with query tiles of 128 rows.

    schedule warp     finds which tile comes next, one round ahead of all other roles
    load warp         loads by TMA: Q of both tiles, K and V blocks into one ring, last block first
    MMA warp          issues S_t(i) = Q_t K(i)^T     both operands from shared memory
                      and    O_t   += P_t(i) V(i)    P from tensor memory, part by part
    softmax group t   loads S from tensor memory, one row a thread, finds the reference maximum,
                      writes P = exp2(S * scale_log2 - reference * scale_log2) over S, sums rows
    correction group  computes O_t *= factor in tensor memory where a row's reference moved; at the
                      end writes O_t / sum to shared memory
    store warp        stores output tiles by TMA

Two query tiles (head_dim <= 128): S_0(0) S_1(0), then for every block i: O_0 S_0(i+1) O_1 S_1(i+1);
while one tile's softmax works, the tensor core computes the other's products. After the last block
the next tiles' first scores take the place of S_t(i+1). A single query tile (where two accumulators
O do not fit tensor memory) has two buffers of scores instead: S(0) S(1), then for every block i:
O S(i+2).

A pair of CTAs (tile.ctas = 2) shares K and V: each has query tiles of its own, half of the keys of
a K block and half of the columns of a V block, and the even CTA's MMA warp issues products of 256
rows for both. The odd CTA's MMA warp relays its loads' completion to the even CTA; its softmax and
correction warps arrive there themselves; the even CTA's commits arrive in both.

`forward_description.py` lists the warps, the barriers (who signals, who waits, once per what) and
the memory; docs/kernels.md shows them.

Note [what needs no barrier]: a buffer's next S overwrites its S and P; the MMA warp issues it after
the product that reads this P. A block's factor is overwritten by the softmax warp of the next block
in its buffer. That warp has waited for its S, and so for the correction warps' arrival on p_early
of the block before in that buffer, which comes after they have read the factor; a tile's first
block has no factor. The next tile's first product overwrites O_t after the correction warps'
arrival on its p_early, which comes as soon as they have read O_t. With two query tiles O_t may be
rescaled when a factor is there: S_t(i) was complete, and so was O_t's product of block i-1, issued
before it. With a single query tile S(i) is issued before that product, so the correction warps wait
for the product.

(FlashAttention-4: ping-pong tiles, conditional rescaling, correction warps, P in parts.)
"""

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from fa4_jax.key import KernelKey
from kernels.common import resources
from kernels.common.bias import BiasInMemory
from kernels.common.hosts import ForwardHost, forward_source
from kernels.common.pages import whole_sizes
from kernels.common.resources import Maps, Shared
from kernels.common.schedule import Schedule, synchronise
from kernels.description import TENSOR_MEMORY_COLUMNS
from kernels.interface import (
    BiasBuffers,
    ForwardScalars,
    LogitBuffers,
    PageBuffers,
    RangeBuffers,
    Sizes,
)
from kernels.kernel_source import KernelSource
from kernels.sm100 import ptx, row_tiles
from kernels.sm100.forward_data import Config, pop_work, push_work
from kernels.sm100.forward_load import Loads
from kernels.sm100.forward_products import ProductRoles
from kernels.sm100.forward_row_data import Call
from kernels.sm100.forward_rows import RowRoles
from kernels.sm100.forward_schedule import (
    Work,
    assign,
    by_table,
    make_schedule,
    of_cta,
)
from kernels.sm100.forward_visits import by_mask


class Forward(ForwardHost, Loads):
    """The kernel of one key; attributes are compile-time constants."""

    def __init__(self, key: KernelKey):
        self.config = Config(key)
        self.description, self.dtype = self.config.description, self.config.dtype
        self.ranges, self.reads_cap, self.reads_mask = key.ranges, key.reads_cap, key.reads_mask
        self.paged, self.bias = key.paged, key.bias
        self.row_roles = RowRoles(self.config)
        self.products = ProductRoles(self.config)

    @cute.kernel
    def kernel(
        self,
        maps: Maps,
        extents: cute.Pointer,
        lse: cute.Pointer,
        sizes: Sizes,
        scalars: ForwardScalars,
        of_keys: RangeBuffers | PageBuffers | None = None,
        logits: LogitBuffers | None = None,
        bias: BiasBuffers | None = None,
    ):
        tile, description = self.config.tile, self.config.description
        pair = tile.ctas == 2
        shared = resources.allocate(description, self.config.dtype)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        softmax, correction = description.role("softmax"), description.role("correction")
        mma, load = description.role("mma"), description.role("load")
        if warp == mma.first_warp:
            cute.arch.alloc_tmem(TENSOR_MEMORY_COLUMNS, shared.tmem_base, pair)
            cute.arch.relinquish_tmem_alloc_permit(pair)
        if warp == load.first_warp:
            resources.prefetch(maps, description)
            with cute.arch.elect_one():
                resources.initialise(description, shared.barriers)
        cute.arch.mbarrier_init_fence()
        synchronise(self.config.tile.ctas)

        ranges, pages = (None, of_keys) if self.paged else (of_keys, None)
        page_length = sizes.key_length
        if cutlass.const_expr(self.paged):
            sizes = whole_sizes(sizes, pages)
        added = None if bias is None else BiasInMemory(bias, sizes, extents)
        window, call = scalars.window, Call(sizes, ranges, logits, added)
        # Each role counts its rounds: one number for all would stay in a register of every role.
        if warp < correction.first_warp:
            idle_registers = self.description.roles[1].registers
            if cutlass.const_expr(idle_registers < softmax.registers and tile.query_tiles == 1):
                if warp < softmax.warps:
                    ptx.set_registers(softmax.registers)
                    rounds = make_schedule(extents, sizes, window, tile).rounds_of_cta()
                    self.row_roles.softmax(shared, rounds, lse, scalars, call)
                else:
                    ptx.set_registers(idle_registers)
            else:
                ptx.set_registers(softmax.registers)
                if warp // softmax.warps < softmax.groups:
                    rounds = make_schedule(extents, sizes, window, tile).rounds_of_cta()
                    self.row_roles.softmax(shared, rounds, lse, scalars, call)
        elif warp < mma.first_warp:
            ptx.set_registers(correction.registers)
            self.row_roles.correct(
                shared, make_schedule(extents, sizes, window, tile).rounds_of_cta()
            )
        else:
            ptx.set_registers(mma.registers)
            schedule = make_schedule(extents, sizes, window, tile)
            rounds = schedule.rounds_of_cta()
            if warp == mma.first_warp:
                if cutlass.const_expr(pair):
                    if cute.arch.block_idx_in_cluster() == 0:
                        self.products.mma(shared, rounds)
                    else:
                        self.products.relay_loads(shared, rounds)
                else:
                    self.products.mma(shared, rounds)
            elif warp == load.first_warp:
                self.load(maps, shared, rounds, call, (pages, page_length))
            elif warp == description.role("store").first_warp:
                self.store(maps, shared, rounds)
            else:
                self.assign(shared, schedule, rounds, ranges)
        synchronise(self.config.tile.ctas)
        if warp == mma.first_warp:
            base = cute.arch.retrieve_tmem_ptr(Float32, 16, shared.tmem_base)
            cute.arch.dealloc_tmem(base, TENSOR_MEMORY_COLUMNS, pair)

    @cute.jit
    def assign(
        self, shared: Shared, schedule: Schedule, rounds: Int32, ranges: RangeBuffers | None
    ):
        """Schedule warp: finds every tile's work while the other roles work on the tile before."""
        for round_index in cutlass.range(rounds, unroll=1):
            work = assign(schedule.tile(round_index), schedule, self.config.shape, ranges)
            if cutlass.const_expr(self.ranges):
                work = by_table(work, ranges, schedule.sizes, self.config.shape)
                work = by_mask(work, ranges, schedule.sizes, self.config.shape)
            if cutlass.const_expr(self.paged):
                # What lies past the last key in its page, or past the table, is padding.
                padded = work.blocks.end * self.config.tile.n > work.band.key_length
                work = dataclasses.replace(work, padded_keys=padded)
            work = of_cta(work, schedule, self.config.shape)
            push_work(self.config, shared, round_index, work)

    @cute.jit
    def store(self, maps: Maps, shared: Shared, rounds: Int32):
        """Store warp: stores output tiles to global memory."""
        stored = Int32(0)
        for round_index in cutlass.range(rounds, unroll=1):
            work = pop_work(self.config, shared, round_index)
            for t in cutlass.range_constexpr(self.config.tile.query_tiles):
                self.store_tile(maps, shared, work, t, stored)
                stored += 1

    @cute.jit
    def store_tile(
        self, maps: Maps, shared: Shared, work: Work, t: cutlass.Constexpr[int], stored: Int32
    ):
        """Stores output tile t of the CTA, after `stored` others, span by span."""
        tile = self.config.tile
        for span in cutlass.range(self.config.head_dim // tile.span, unroll=1):
            shared.barriers.out_full[span].wait(stored)
            # One thread stores, since the group that it waits for is its own.
            with cute.arch.elect_one():
                o = cute.local_tile(shared.o, (tile.rows, tile.span), (0, span))
                row_tiles.store((maps.o, maps.o_rows), o, work, t, span)
                cute.arch.cp_async_bulk_commit_group()
                # It waits after the last tile, too: shared memory must outlive the stores' reads.
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                cute.arch.mbarrier_arrive(shared.barriers.out_empty[span].first)


def source(key: KernelKey) -> KernelSource:
    """Returns the forward kernel of a key, with its launch."""
    kernel = Forward(key)
    tile = kernel.config.tile
    return forward_source(kernel, key, {"m": tile.m, "n": tile.n, "kv_stages": tile.kv_stages})
