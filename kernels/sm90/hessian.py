"""Hopper's Hessian-vector products: how dQ, dK and dV move where Q, K and V do, but dO does not.

With LSE, LSE' and delta = rowsum(dO o O) - dLSE, delta' = rowsum(dO o O') of each query row, known
from forward and tangents, and S in units of the scores,

    S   = scale Q K^T     S'  = scale (Q' K^T + Q K'^T)     P = exp(S - LSE)   P' = P o (S' - LSE')
    dP  = dO V^T          dP' = dO V'^T
    dS  = P o (dP - delta)                dS' = P' o (dP - delta) + P o (dP' - delta')
    dQ' = scale (dS' K + dS K')           dK' = scale (dS'^T Q + dS^T Q')         dV' = P'^T dO

Two kernels compute these, since registers hold no three sums beside four blocks of scores: of
queries (dQ', seven products a block) and of keys (dK' and dV', eight, all transposed). A CTA has
rows of one kind, and visits the blocks of columns of the other kind that they see: nothing is added
in memory, so results are the same bit by bit.

    load warp      loads by TMA: operands of the rows once, then those of each block into a ring;
                   with queries as columns, their statistics, too
    MMA warpgroup w has 64 rows, and S, S', dP, dP' and the results in registers. Per block it
        issues S and S', then dP and dP', both operands from shared memory,
        computes P and P' while the tensor core works on dP and dP', then dS and dS',
        issues the sums, with dS and dS' (and P') from registers, which run on in the next block's
        step.

At the end results go to memory by way of the rows' own shared memory. A query row that sees no key
has LSE = -inf, and no part in anything. (The backward's formulas, FlashAttention-2, section 2.3,
differentiated once more.)
"""

import itertools

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warp, warpgroup

from fa4_jax.key import KernelKey, Pass
from kernels.common import ptx, resources, tensors
from kernels.common.hessian_host import HessianHost, hessian_source
from kernels.common.resources import Maps, Shared
from kernels.common.ring import Use
from kernels.common.softmax import exp2, select
from kernels.description import NamedBarrier
from kernels.interface import BackwardScalars, Sizes
from kernels.kernel_source import KernelSource
from kernels.sm90 import softmax, wgmma
from kernels.sm90.hessian_data import (
    Operands,
    Rows,
    Shape,
    Work,
    assign,
    make_rows,
    statistics_of,
)
from kernels.sm90.hessian_description import (
    STATISTICS,
    of_key,
    results,
    sides,
    summed,
    tile_of,
)
from kernels.sm90.tiles import WARPGROUP


class Hessian(HessianHost):
    """The kernel of one key; attributes are compile-time constants."""

    def __init__(self, key: KernelKey):
        self.dtype = tensors.TYPES[key.dtype]
        self.head_dim, self.band = key.head_dim, key.band
        self.by_key = key.kernel is Pass.HESSIAN_KEY
        self.tile = tile_of(key)
        self.description = of_key(key)
        self.row_names, self.column_names = sides(self.by_key)
        self.epilogue = self.description.named_barrier("epilogue")
        self.padding = self.description.named_barrier("padding") if key.band else None
        column_bytes = len(self.column_names) * key.head_dim * 2
        self.shape = Shape(self.tile, self.by_key, column_bytes)

    @cute.kernel
    def kernel(
        self,
        maps: Maps,
        extents: cute.Pointer,
        row_statistics: cute.Pointer,
        sizes: Sizes,
        scalars: BackwardScalars,
    ):
        shared = resources.allocate(self.description, self.dtype)
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_index == 0:
            resources.prefetch(maps, self.description)
            with cute.arch.elect_one():
                resources.initialise(self.description, shared.barriers)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        work = assign(extents, sizes, scalars.window if self.band else None, self.shape)
        load, mma = self.description.role("load"), self.description.role("mma")
        if warp_index < mma.first_warp:
            cute.arch.setmaxregister_decrease(load.registers)
            if warp_index == load.first_warp:
                self.load(maps, shared, work, sizes, row_statistics)
        else:
            cute.arch.setmaxregister_increase(mma.registers)
            own = statistics_of(row_statistics, sizes, work.batch, work.head)
            self.mma(maps, shared, work, own, scalars)

    @cute.jit
    def load(
        self,
        maps: Maps,
        shared: Shared,
        work: Work,
        sizes: Sizes,
        row_statistics: cute.Pointer,
    ):
        """Load warp: loads the rows, then every block of every head of columns."""
        tile, d, barriers = self.tile, self.head_dim, shared.barriers
        coordinates = tensors.bthd_coordinates()
        rows = coordinates[None, None, work.head, work.batch]
        rows = cute.local_tile(rows, (tile.m, d), (work.first_row // tile.m, 0))
        with cute.arch.elect_one():
            num_bytes = len(self.row_names) * tile.m * d * 2
            cute.arch.mbarrier_arrive_and_expect_tx(barriers.rows_full.first, num_bytes)
        for name in self.row_names:
            tensors.tma_load(
                getattr(maps, name), rows, getattr(shared, name), barriers.rows_full.first
            )
        step = Int32(0)
        for member in cutlass.range(work.heads, unroll=1):
            head = work.first_head + member
            columns = coordinates[None, None, head, work.batch]
            blocks = cute.local_tile(columns, (tile.n, d), (None, 0))
            statistics = statistics_of(row_statistics, sizes, work.batch, head)
            for block in cutlass.range(work.blocks.begin, work.blocks.end, unroll=1):
                use = barriers.block_full.use(step)
                full = barriers.block_full.at(use)
                barriers.block_empty.wait_free(use)
                with cute.arch.elect_one():
                    num_bytes = len(self.column_names) * tile.n * d * 2
                    num_bytes += tile.n * STATISTICS * 4 if self.by_key else 0
                    cute.arch.mbarrier_arrive_and_expect_tx(full, num_bytes)
                    if cutlass.const_expr(self.by_key):
                        source = statistics + block * tile.n * STATISTICS
                        target = shared.statistics[None, None, use.slot].iterator
                        ptx.bulk_load(target, source, tile.n * STATISTICS * 4, full)
                for name in self.column_names:
                    memory = getattr(shared, name)[None, None, use.slot]
                    tensors.tma_load(getattr(maps, name), blocks[None, None, block], memory, full)
                step += 1

    def make_operands(self, shared: Shared, group: Int32) -> Operands:
        """Makes a warpgroup's products, views of shared memory and registers."""
        tile, k_major = self.tile, wgmma.K_MAJOR
        groups = (tile.mma_warpgroups, 1)
        scores_product = wgmma.Wgmma(self.dtype, groups, tile.n, (k_major, k_major))
        majors = (k_major, wgmma.MN_MAJOR)
        sum_product = wgmma.Wgmma(self.dtype, groups, self.head_dim, majors, wgmma.REGISTERS)
        of_scores, of_sums = scores_product.tiled(), sum_product.tiled()
        uniform = cute.make_layout(tile.mma_warpgroups, stride=WARPGROUP)(group)
        scores_part, sums_part = of_scores.get_slice(uniform), of_sums.get_slice(uniform)
        block = of_scores.partition_shape_C((tile.m, tile.n))
        rounded = of_sums.partition_shape_A((tile.m, tile.n))
        output = of_sums.partition_shape_C((tile.m, self.head_dim))
        scores, tangents, gradients, gradient_tangents = (
            cute.make_rmem_tensor(block, Float32) for _ in range(4)
        )
        return Operands(
            scores_product,
            sum_product,
            rows={
                name: of_scores.make_fragment_A(scores_part.partition_A(getattr(shared, name)))
                for name in self.row_names
            },
            columns={
                name: of_scores.make_fragment_B(scores_part.partition_B(getattr(shared, name)))
                for name in self.column_names
            },
            summed={
                name: of_sums.make_fragment_B(sums_part.partition_B(getattr(shared, f"{name}_t")))
                for name in summed(self.by_key)
            },
            scores=scores,
            tangents=tangents,
            gradients=gradients,
            gradient_tangents=gradient_tangents,
            rounded=tuple(cute.make_rmem_tensor(rounded, self.dtype) for _ in summed(self.by_key)),
            acc=tuple(cute.make_rmem_tensor(output, Float32) for _ in results(self.by_key)),
        )

    @cute.jit
    def mma(
        self,
        maps: Maps,
        shared: Shared,
        work: Work,
        statistics: cute.Pointer,
        scalars: BackwardScalars,
    ):
        """MMA warpgroup: computes the results of 64 rows; statistics: of the head of the rows."""
        thread, _, _ = cute.arch.thread_idx()
        thread = thread - WARPGROUP
        group, lane = cute.arch.make_warp_uniform(thread // WARPGROUP), thread % 32
        mma = self.make_operands(shared, group)
        for acc in mma.acc:
            acc.fill(0.0)
        first_row = work.first_row + (thread // 32) * 16 + lane // 4
        rows = make_rows(work, statistics, first_row, (lane % 4) * 2, self.by_key)
        shared.barriers.rows_full.wait(0)
        step = Int32(0)
        for _ in cutlass.range(work.heads, unroll=1):
            for block in cutlass.range(work.blocks.begin, work.blocks.end, unroll=1):
                self.step(shared, work, mma, rows, scalars, (block, step))
                step += 1
        warpgroup.wait_group(0)
        self.finish(maps, shared, work, mma, scalars.scale, first_row)

    @cute.jit
    def step(
        self,
        shared: Shared,
        work: Work,
        mma: Operands,
        rows: Rows,
        scalars: BackwardScalars,
        place: tuple[Int32, Int32],
    ):
        """Adds a block's share to the results; place: the block, and the number of steps before."""
        (block, step), barriers = place, shared.barriers
        use = barriers.block_full.use(step)
        barriers.block_full.wait(use)
        if cutlass.const_expr(self.padding is not None):
            if work.padded_columns & (block == work.blocks.end - 1):
                past = work.band.key_length - block * self.tile.n
                self.clear_padding(shared, use.slot, past, self.padding)
        self.issue_scores(mma, use)
        warpgroup.wait_group(2)  # The sums of the step before are complete, and so are S and S'.
        if cutlass.const_expr(self.tile.late_sums):
            if step > 0:
                self.release(shared, step - 1)
        if (block >= work.blocks.full_end) | (block < work.blocks.full_begin):
            first = block * self.tile.n + rows.first_column
            softmax.mask_band(mma.scores, first, rows.low, rows.high)
        self.weigh(shared, mma, rows, scalars, use.slot)
        warpgroup.wait_group(0)
        self.differentiate(shared, mma, rows, use.slot)
        self.issue_sums(mma, use)
        if cutlass.const_expr(not self.tile.late_sums):
            warpgroup.wait_group(0)
            self.release(shared, step)

    def release(self, shared: Shared, step: Int32):
        """Arrives, once per warp: this warp no longer reads the block of a step."""
        if cutlass.const_expr(self.by_key):
            cute.arch.sync_warp()  # All lanes have read statistics.
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(shared.barriers.block_empty.at(step))

    def issue_scores(self, mma: Operands, use: Use):
        """Issues S and S', then dP and dP': five groups of products."""
        now, product = (None, None, None, use.slot), mma.scores_product

        def issue(acc: cute.Tensor, of_queries: str, of_keys: str, accumulate: bool):
            pair = (of_keys, of_queries) if self.by_key else (of_queries, of_keys)
            product.issue(acc, mma.rows[pair[0]], mma.columns[pair[1]][now], accumulate)

        issue(mma.scores, "q", "k", False)
        issue(mma.tangents, "q_tangent", "k", False)
        issue(mma.tangents, "q", "k_tangent", True)
        issue(mma.gradients, "do", "v", False)
        issue(mma.gradient_tangents, "do", "v_tangent", False)

    def issue_sums(self, mma: Operands, use: Use):
        """Issues what a block adds to the results, a group for each product."""
        now, product = (None, None, None, use.slot), mma.sum_product
        ds, ds_tangent, *others = mma.rounded
        own, tangent = ("q", "q_tangent") if self.by_key else ("k", "k_tangent")
        product.issue(mma.acc[0], ds_tangent, mma.summed[own][now], True)
        product.issue(mma.acc[0], ds, mma.summed[tangent][now], True)
        if self.by_key:
            product.issue(mma.acc[1], others[0], mma.summed["do"][now], True)

    def elements(
        self, shared: Shared, mma: Operands, rows: Rows, slot: Int32, first: int
    ) -> list[tuple[tuple, Float32, Float32]]:
        """Lists a fragment's elements, each with statistics first and first + 1 of its query."""
        found = []
        for pair in range(cute.size(mma.scores.shape[0][2])):
            of_columns = []
            for column in range(2) if self.by_key else ():
                place = rows.first_column + 8 * pair + column
                source = shared.statistics[None, place, slot]
                values = cute.make_rmem_tensor((2,), Float32)
                cute.autovec_copy(cute.local_tile(source, (2,), (first // 2,)), values)
                of_columns.append(values)
            for row, column in itertools.product(range(softmax.ROWS), range(2)):
                index = softmax.fragment_index(pair, row, column)
                own = rows.statistics
                if own is None:
                    values = of_columns[column]
                    found.append((index, values[0], values[1]))
                else:
                    found.append((index, own[first, row], own[first + 1, row]))
        return found

    @cute.jit
    def weigh(
        self, shared: Shared, mma: Operands, rows: Rows, scalars: BackwardScalars, slot: Int32
    ):
        """Replaces S by P, and S' by P'."""
        for index, lse_log2, lse_tangent in self.elements(shared, mma, rows, slot, 0):
            p = exp2(mma.scores[index] * scalars.scale_log2 - lse_log2)
            mma.tangents[index] = p * (mma.tangents[index] * scalars.scale - lse_tangent)
            mma.scores[index] = p
        if cutlass.const_expr(self.by_key):
            wgmma.round_fragment(mma.tangents, mma.rounded[2])

    @cute.jit
    def differentiate(self, shared: Shared, mma: Operands, rows: Rows, slot: Int32):
        """Replaces dP by dS, and dP' by dS', and rounds both."""
        for index, delta, delta_tangent in self.elements(shared, mma, rows, slot, 2):
            p, own = mma.scores[index], mma.gradients[index] - delta
            moved = p * (mma.gradient_tangents[index] - delta_tangent)
            mma.gradient_tangents[index] = mma.tangents[index] * own + moved
            mma.gradients[index] = p * own
        wgmma.round_fragment(mma.gradients, mma.rounded[0])
        wgmma.round_fragment(mma.gradient_tangents, mma.rounded[1])

    @cute.jit
    def clear_padding(
        self,
        shared: Shared,
        slot: Int32,
        first_row: Int32,
        padding: cutlass.Constexpr[NamedBarrier],
    ):
        """Writes 0 to columns past their length, which may hold anything."""
        thread, _, _ = cute.arch.thread_idx()
        for name in self.column_names:
            tile = getattr(shared, name)[None, None, slot]
            tensors.zero_vectors(tile, first_row, thread - WARPGROUP, padding.threads)
        cute.arch.fence_proxy("async.shared", space="cta")
        resources.meet(padding)

    @cute.jit
    def finish(
        self,
        maps: Maps,
        shared: Shared,
        work: Work,
        mma: Operands,
        scale: Float32,
        first_row: Int32,
    ):
        """Stores the results by way of the rows' memory; rows past their length get 0."""
        thread, _, _ = cute.arch.thread_idx()
        thread = thread - WARPGROUP
        group = cute.arch.make_warp_uniform(thread // WARPGROUP)
        resources.meet(self.epilogue, group)
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype)
        store = cute.make_tiled_copy_C(atom, self.single_group()).get_slice(thread % WARPGROUP)
        for i, (_, place) in enumerate(results(self.by_key)):
            acc = mma.acc[i]
            factor = Float32(1.0) if place == "v" else scale
            for row in cutlass.range_constexpr(softmax.ROWS):
                used = first_row + 8 * row < work.band.query_length
                for pair, column in softmax.fragment_columns(acc):
                    index = softmax.fragment_index(pair, row, column)
                    acc[index] = select(used, acc[index] * factor, Float32(0.0))
            values = cute.make_rmem_tensor(acc.shape, self.dtype)
            wgmma.round_fragment(acc, values)
            target = cute.local_tile(getattr(shared, place), (64, self.head_dim), (group, 0))
            cute.copy(atom, store.retile(values), store.partition_D(target))
        cute.arch.fence_proxy("async.shared", space="cta")
        resources.meet(self.epilogue, group)
        if cute.arch.make_warp_uniform(thread // 32) % 4 == 0:
            rows = tensors.bthd_coordinates()[None, None, work.head, work.batch]
            rows = cute.local_tile(rows, (64, self.head_dim), (work.first_row // 64 + group, 0))
            for name, place in results(self.by_key):
                source = cute.local_tile(getattr(shared, place), (64, self.head_dim), (group, 0))
                tensors.tma_store(getattr(maps, name), source, rows)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0)

    def single_group(self) -> cute.TiledMma:
        """Returns the product of one warpgroup whose fragment a result is."""
        majors = (wgmma.K_MAJOR, wgmma.MN_MAJOR)
        product = wgmma.Wgmma(self.dtype, (1, 1), self.head_dim, majors, wgmma.REGISTERS)
        return product.tiled()


def source(key: KernelKey) -> KernelSource:
    """Returns the kernel of a key, with its launch."""
    kernel = Hessian(key)
    tile = kernel.tile
    return hessian_source(kernel, key, {"m": tile.m, "n": tile.n, "stages": tile.stages})
