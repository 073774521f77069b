"""Blackwell tangents: those of O and LSE, from tangents of Q, K and V, by tiles of 128 rows.

With LSE from the forward, dots for tangents, and S in units of the scores,

    S = scale Q K^T,  S' = scale (Q' K^T + Q K'^T),  P = exp(S - LSE),  W = P o S',
    p, w = the sums of P's and W's rows,  LSE' = w / p,  O' = (P V' + W V) / p - LSE' O.

p is 1 but for the rounding of LSE, which large scores would let through to all of a row.

    schedule warp     finds which tile comes next, one round ahead of all other roles
    load warp         loads by TMA: Q and Q' of each tile, K with K' and V with V' of each block
                      into one ring, last block first, and O in place of Q
    MMA warp          issues S_t(i), S'_t(i)                three products, from shared memory
                      and    O'_t += P_t V'(i) + W_t V(i)   P and W from tensor memory
    softmax group t   loads S and S' from tensor memory, one row a thread, writes P and W over
                      them, sums rows; at the end subtracts LSE' O and writes O' over O
    store warp        stores tiles of O' by TMA

S_0(0) S_1(0), then for every block i: O'_0 S_0(i+1) O'_1 S_1(i+1): while one tile's softmax works,
the tensor core computes the other's products. Above d = 128 there is one tile, one softmax group
and two buffers of scores: S(i+1) is issued before O'(i) (tangent_single.py). P follows from LSE
without any maximum, so nothing is rescaled. Tiles, packed heads and masks are the forward's
(forward.py, forward_schedule.py).

Note [what needs no barrier]: the next S and S' of a buffer overwrite its P and W; the MMA warp
issues them after the products that read these. The next tile's first product overwrites O'_t after
its own p_full, at which softmax group t arrives when it has read O'_t. O takes the memory of Q and
Q' once all scores are complete (q_empty), and gives it back when O' has been stored (out_empty).

Ranges in memory, sinks and soft caps are not supported. A row that sees no key has LSE = -inf, and
tangents 0. (FlashAttention-2, section 2.3, computes P from LSE in the backward; FlashAttention-4:
two query tiles take turns.)
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from fa4_jax.key import KernelKey
from kernels.common import resources, tensors
from kernels.common.resources import Maps, Shared
from kernels.common.schedule import Schedule, synchronise
from kernels.common.tangent_host import TangentHost, tangent_source
from kernels.common.tangent_statistics import Statistics
from kernels.description import TENSOR_MEMORY_COLUMNS
from kernels.interface import BackwardScalars, Sizes
from kernels.kernel_source import KernelSource
from kernels.sm100 import row_tiles
from kernels.sm100.forward_data import pop_work, push_work
from kernels.sm100.forward_schedule import Work, assign, make_schedule
from kernels.sm100.tangent_data import Config
from kernels.sm100.tangent_description import PAIR
from kernels.sm100.tangent_products import ProductRole
from kernels.sm100.tangent_rows import RowRole
from kernels.sm100.tangent_single import SingleProductRole


class Tangent(TangentHost):
    """The kernel of one key; attributes are compile-time constants.

    Attributes:
      slots: how many slots of the ring a block and its tangent take.
    """

    def __init__(self, key: KernelKey):
        self.config = Config(key)
        self.description, self.dtype = self.config.description, self.config.dtype
        self.rows = RowRole(self.config)
        single = self.config.tile.query_tiles == 1
        self.products = SingleProductRole(self.config) if single else ProductRole(self.config)
        self.slots = PAIR // self.config.tile.slot_operands

    @cute.kernel
    def kernel(
        self,
        maps: Maps,
        extents: cute.Pointer,
        lse: cute.Pointer,
        lse_tangent: cute.Pointer,
        sizes: Sizes,
        scalars: BackwardScalars,
    ):
        description = self.description
        shared = resources.allocate(description, self.dtype)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        mma, load = description.role("mma").first_warp, description.role("load").first_warp
        if warp == mma:
            cute.arch.alloc_tmem(TENSOR_MEMORY_COLUMNS, shared.tmem_base)
            cute.arch.relinquish_tmem_alloc_permit()
        if warp == load:
            resources.prefetch(maps, description)
            with cute.arch.elect_one():
                resources.initialise(description, shared.barriers)
        cute.arch.mbarrier_init_fence()
        synchronise(self.config.tile.ctas)

        schedule = make_schedule(extents, sizes, scalars.window, self.config.tile)
        rounds = schedule.rounds_of_cta()
        if warp < mma:
            statistics = Statistics(lse, lse_tangent)
            self.rows.softmax(shared, rounds, statistics, sizes, scalars)
        elif warp == mma:
            self.products.mma(shared, rounds)
        elif warp == load:
            self.load(maps, shared, rounds)
        elif warp == description.role("store").first_warp:
            self.store(maps, shared, rounds)
        else:
            self.assign(shared, schedule, rounds)
        synchronise(self.config.tile.ctas)
        if warp == mma:
            base = cute.arch.retrieve_tmem_ptr(Float32, 16, shared.tmem_base)
            cute.arch.dealloc_tmem(base, TENSOR_MEMORY_COLUMNS)

    @cute.jit
    def assign(self, shared: Shared, schedule: Schedule, rounds: Int32):
        """Schedule warp: finds every tile's work while the other roles work on the tile before."""
        for round_index in cutlass.range(rounds, unroll=1):
            work = assign(schedule.tile(round_index), schedule, self.config.shape)
            push_work(self.config, shared, round_index, work)

    @cute.jit
    def load(self, maps: Maps, shared: Shared, rounds: Int32):
        """Load warp: loads Q of every tile, K and V of each block, last block first, and O."""
        barriers, loads_done = shared.barriers, Int32(0)
        for round_index in cutlass.range(rounds, unroll=1):
            work = pop_work(self.config, shared, round_index)
            last, count = work.blocks.end - 1, work.blocks.end - work.blocks.begin
            if count > 0:
                self.load_block(maps, "k", shared, work, last, loads_done)
            for t in cutlass.range_constexpr(self.config.tile.query_tiles):
                barriers.out_empty[t].wait_free(round_index)
                self.load_queries(maps, shared, work, t)
            for step in cutlass.range(count, unroll=1):
                block, load = last - step, loads_done + 2 * step + 1
                if cutlass.const_expr(self.config.tile.query_tiles == 1):
                    if step + 1 < count:
                        self.load_block(maps, "k", shared, work, block - 1, load)
                        load += 1
                    self.load_block(maps, "v", shared, work, block, load)
                else:
                    self.load_block(maps, "v", shared, work, block, load)
                    if step + 1 < count:
                        self.load_block(maps, "k", shared, work, block - 1, load + 1)
            loads_done += 2 * count
            for t in cutlass.range_constexpr(self.config.tile.query_tiles):
                barriers.q_empty[t].wait(round_index)
                self.load_output(maps, shared, work, t)
        # Shared memory must outlive every commit's arrival.
        for i in cutlass.range_constexpr(self.config.tile.kv_stages):
            barriers.kv_empty.wait_free(self.slots * loads_done + i)

    @cute.jit
    def load_queries(self, maps: Maps, shared: Shared, work: Work, t: cutlass.Constexpr[int]):
        """Loads Q and Q' of query tile t."""
        full = shared.barriers.q_full[t].first
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, PAIR * self.row_bytes())
        atoms = (maps.q, maps.q_rows), (maps.q_tangent, maps.q_tangent_rows)
        for i in cutlass.range_constexpr(PAIR):
            row_tiles.load(atoms[i], shared.q[None, None, PAIR * t + i], work, t, full)

    @cute.jit
    def load_output(self, maps: Maps, shared: Shared, work: Work, t: cutlass.Constexpr[int]):
        """Loads O of query tile t to where its Q was."""
        full = shared.barriers.o_full[t].first
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, self.row_bytes())
        row_tiles.load((maps.o, maps.o_rows), shared.o[None, None, PAIR * t], work, t, full)

    def row_bytes(self) -> int:
        """Returns how many bytes a query tile has."""
        return self.config.tile.rows * self.config.head_dim * 2

    @cute.jit
    def load_block(
        self,
        maps: Maps,
        operand: cutlass.Constexpr[str],
        shared: Shared,
        work: Work,
        block: Int32,
        loads: Int32,
    ):
        """Loads a block of K or V and its tangent into the ring, after `loads` others."""
        tile, d, barriers = self.config.tile, self.config.head_dim, shared.barriers
        is_key = operand == "k"
        atoms = (maps.k, maps.k_tangent) if is_key else (maps.v, maps.v_tangent)
        memory = shared.k if is_key else shared.v
        operands = tile.slot_operands
        for slot in cutlass.range_constexpr(self.slots):
            use = barriers.kv_full.use(self.slots * loads + slot)
            full = barriers.kv_full.at(use)
            barriers.kv_empty.wait_free(use)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, operands * tile.n * d * 2)
            of_head = tensors.bthd_coordinates()[None, None, work.kv_head, work.batch]
            source = cute.local_tile(of_head, (tile.n, d), (block, 0))
            for i in cutlass.range_constexpr(operands):
                target = memory[None, None, operands * use.slot + i]
                tensors.tma_load(atoms[slot + i], source, target, full)

    @cute.jit
    def store(self, maps: Maps, shared: Shared, rounds: Int32):
        """Store warp: stores tiles of O' to global memory."""
        for round_index in cutlass.range(rounds, unroll=1):
            work = pop_work(self.config, shared, round_index)
            for t in cutlass.range_constexpr(self.config.tile.query_tiles):
                shared.barriers.out_full[t].wait(round_index)
                # One thread stores, since the group that it waits for is its own.
                with cute.arch.elect_one():
                    atoms = maps.o_tangent, maps.o_tangent_rows
                    row_tiles.store(atoms, shared.o[None, None, PAIR * t], work, t)
                    cute.arch.cp_async_bulk_commit_group()
                    # Shared memory must outlive the stores' reads, after the last tile, too.
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                    cute.arch.mbarrier_arrive(shared.barriers.out_empty[t].first)


def source(key: KernelKey) -> KernelSource:
    """Returns the tangent kernel of a key, with its launch."""
    kernel = Tangent(key)
    tile = kernel.config.tile
    return tangent_source(kernel, key, {"m": tile.m, "n": tile.n, "kv_stages": tile.kv_stages})
