"""Hopper's main backward kernel: a CTA computes dK, dV of one key tile and adds its share to dQ.

P = exp2(S * scale_log2 - lse_log2) and delta = rowsum(dO * O) - dLSE. Everything is transposed, so
that keys are rows (FlashAttention-2, section 3.1; FlashAttention-3, appendix B.1):
    S^T  = K Q^T                dP^T = V dO^T
    dV  += P^T dO               dS^T = P^T * (dP^T - delta)
    dK  += dS^T Q               dQ  += dS K        (scale is applied at the end, to dK here)

    load warp          loads K, V once; then for every query head of the KV head's group and every
                       query block that sees the key tile: Q, lse_log2 and dO, delta into two rings
    reduce warp        adds dQ to global memory where it is staged in shared memory (backward_dq)
    order warp         opens the turns to add dQ where their order is fixed and it is not staged
    MMA warpgroup 0, 1 issue the products: each has 64 keys of S, dP, dV and dK, and the half of dQ
                       that BackwardTile.split_rows says

A CTA walks all query heads of its group, so dK and dV are summed in registers whatever the group
size, in a fixed order.

P and dS are operands in registers. P is rounded after dS has been computed: dS then takes the
registers of dP, and P, rounded, and dS, rounded, those of the scores.

Note [scores]: dS has two buffers used in turn, so one barrier a step is enough: a warpgroup passes
`scores_ready` of step i + 1 only when the other one has arrived there, which it does after its
products of step i have read buffer i % 2. So step i + 2 may write that buffer.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warp, warpgroup

from fa4_jax import bands
from fa4_jax.key import KernelKey
from kernels.common import ptx, resources, tensors
from kernels.common.backward_schedule import BackwardShape, StartIndex, Work, assign
from kernels.common.hosts import BackwardHost, backward_source
from kernels.common.resources import Maps, Shared
from kernels.common.ring import Use
from kernels.common.schedule import synchronise
from kernels.common.softmax import exp2
from kernels.common.state import Rows, make_rows
from kernels.interface import BackwardScalars, RowBuffers, Sizes
from kernels.kernel_source import KernelSource
from kernels.sm90 import softmax, wgmma
from kernels.sm90.backward_data import KeyGradients, Step, make_products
from kernels.sm90.backward_description import description
from kernels.sm90.backward_dq import QueryGradient
from kernels.sm90.tiles import (
    BACKWARD_TILES,
    DETERMINISTIC_BAND_HEADS,
    L2_BUDGET_BYTES,
    REGISTER_BUDGETS,
    WARPGROUP,
)


class Backward(BackwardHost):
    """The kernel of one key; attributes are compile-time constants."""

    def __init__(self, key: KernelKey):
        self.dtype = tensors.TYPES[key.dtype]
        self.head_dim = key.head_dim
        self.band = key.band
        self.deterministic = key.deterministic
        self.tile = BACKWARD_TILES[key.head_dim]
        self.description = description(key.head_dim, key.deterministic)
        self.shape = BackwardShape(
            m=self.tile.m,
            n=self.tile.keys,
            row_bytes=key.head_dim * (2 + 2 + 4),
            l2_bytes=L2_BUDGET_BYTES,
            least_heads=DETERMINISTIC_BAND_HEADS if key.deterministic and key.band else 1,
            band=key.band,
        )
        self.query_gradient = QueryGradient(
            self.tile,
            key.head_dim,
            key.band,
            key.deterministic,
            self.tile.stages_dq(key.deterministic),
        )
        named = self.description.named_barrier
        self.padding = named("padding")
        if self.tile.ctas == 1:
            self.scores_ready, self.finished = named("scores_ready"), named("finished")

    @cute.kernel
    def kernel(
        self,
        maps: Maps,
        buffers: RowBuffers,
        sizes: Sizes,
        scalars: BackwardScalars,
    ):
        shared = resources.allocate(self.description, self.dtype)
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_index == 0:
            resources.prefetch(maps, self.description)
            with cute.arch.elect_one():
                resources.initialise(self.description, shared.barriers)
        second_warp = 1
        if cutlass.const_expr(self.deterministic):
            if (warp_index == second_warp) & self.draws_ticket():
                with cute.arch.elect_one():
                    place = cute.make_tensor(shared.ticket, cute.make_layout(1))
                    place[0] = ptx.take_ticket(buffers.dq_ticket)
        cute.arch.mbarrier_init_fence()
        synchronise(self.tile.ctas)

        call = (self.shape, buffers.extents, sizes, scalars.window)
        work = assign(*call, lambda: self.start(shared))
        rows = make_rows(buffers, sizes.query_length, self.tile.m)
        registers, load = REGISTER_BUDGETS[self.tile.mma_warpgroups], self.description.role("load")
        if warp_index < WARPGROUP // 32:
            cute.arch.setmaxregister_decrease(registers.load)
            if warp_index == load.first_warp:
                self.load(maps, shared, work, rows)
            if cutlass.const_expr(self.query_gradient.has_warp):
                if warp_index == second_warp:
                    self.query_gradient.run_warp(shared, work, rows)
        else:
            cute.arch.setmaxregister_increase(registers.mma)
            self.mma(maps, shared, work, rows, scalars)
        if cutlass.const_expr(self.tile.ctas > 1 and self.deterministic):
            # The even CTA's memory outlasts the reads of its ticket.
            synchronise(self.tile.ctas)

    def draws_ticket(self) -> cutlass.Boolean | bool:
        """Whether the CTA draws a ticket (Note [dq order])."""
        return True

    def start(self, shared: Shared) -> StartIndex:
        """Returns the CTA's place in the order of work (Note [dq order]).

        Call it after the first barrier.
        """
        if self.deterministic:
            ticket = cute.make_tensor(shared.ticket, cute.make_layout(1))[0]
            return StartIndex(cute.arch.make_warp_uniform(ticket))
        cta, _, _ = cute.arch.block_idx()
        return StartIndex(cta)

    @cute.jit
    def load(self, maps: Maps, shared: Shared, work: Work, rows: Rows):
        """Load warp: loads K and V, then Q, lse_log2 and dO, delta of every step."""
        tile, d = self.tile, self.head_dim
        coordinates = tensors.bthd_coordinates()
        steps = work.blocks.end - work.blocks.begin
        if steps > 0:
            self.load_keys(maps, shared, work, coordinates[None, None, work.kv_head, work.batch])
        for step in cutlass.range(steps * work.group, unroll=1):
            member = step // steps
            block = self.query_gradient.query_block(work, step - member * steps)
            head = work.kv_head * work.group + member
            query = coordinates[None, None, head, work.batch]
            query_tile = cute.local_tile(query, (tile.m, d), (block, 0))
            row = rows.tile(work.batch, work.heads, head, block) * tile.m
            uses = self.uses(shared, step)
            for operand in cutlass.range_constexpr(2):
                use = uses[operand]
                full = (shared.barriers.q_full, shared.barriers.do_full)[operand].at(use)
                empty = (shared.barriers.q_empty, shared.barriers.do_empty)[operand][use.slot]
                target = (shared.q, shared.do)[operand][None, None, use.slot]
                source = (rows.lse_log2, rows.delta)[operand] + row
                statistics = (shared.lse_log2, shared.delta)[operand][None, use.slot]
                empty.wait_free(use)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full, tile.m * (d * 2 + 4))
                    ptx.bulk_load(statistics.iterator, source, tile.m * 4, full)
                tensors.tma_load((maps.q, maps.do)[operand], query_tile, target, full)

    def uses(self, shared: Shared, step: Int32) -> tuple[Use, Use]:
        """Returns a step's uses of the rings of Q and of dO."""
        use = shared.barriers.q_full.use(step)
        if self.tile.do_stages == self.tile.stages:
            return use, use
        return use, shared.barriers.do_full.use(step)

    @cute.jit
    def load_keys(self, maps: Maps, shared: Shared, work: Work, kv: cute.Tensor):
        """Loads K and V of the CTA's keys; kv: coordinates of the KV head."""
        tile, d, kv_full = self.tile, self.head_dim, shared.barriers.kv_full.first
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(kv_full, 2 * tile.n * d * 2)
        key_tile = cute.local_tile(kv, (tile.n, d), (work.tile, 0))
        tensors.tma_load(maps.k, key_tile, shared.k, kv_full)
        tensors.tma_load(maps.v, key_tile, shared.v, kv_full)

    @cute.jit
    def mma(
        self,
        maps: Maps,
        shared: Shared,
        work: Work,
        rows: Rows,
        scalars: BackwardScalars,
    ):
        """MMA warpgroup: issues its share of all five products, then stores dK and dV."""
        tile, d = self.tile, self.head_dim
        thread, _, _ = cute.arch.thread_idx()
        thread = thread - WARPGROUP
        group = cute.arch.make_warp_uniform(thread // WARPGROUP)
        products = make_products(self.dtype, self.head_dim, self.tile)
        grads = products.grads.tiled()
        dk_acc = cute.make_rmem_tensor(grads.partition_shape_C((tile.n, d)), Float32)
        dv_acc = cute.make_rmem_tensor(grads.partition_shape_C((tile.n, d)), Float32)
        dk_acc.fill(0.0)
        dv_acc.fill(0.0)
        grads_acc = KeyGradients(dk_acc, dv_acc)
        steps = work.blocks.end - work.blocks.begin
        if steps > 0:
            shared.barriers.kv_full.wait(0)
            if work.padded_keys:
                first_row = work.band.key_length - work.first_key
                self.clear_padding(shared.k, shared.v, first_row, thread)
        for member in cutlass.range(work.group, unroll=1):
            for index in cutlass.range(steps, unroll=1):
                block = self.query_gradient.query_block(work, index)
                step = member * steps + index
                place = Step(member, block, step, group)
                self.step(shared, work, rows, grads_acc, scalars.scale_log2, place)
        for element in cutlass.range_constexpr(cute.size(dk_acc)):
            dk_acc[element] = dk_acc[element] * scalars.scale
        # Both warpgroups have read all of K (dQ) and V: their memory can stage the results.
        resources.meet(self.finished)
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype)
        copy = cute.make_tiled_copy_C(atom, grads).get_slice(thread)
        for acc, staging in ((dk_acc, shared.k), (dv_acc, shared.v)):
            values = cute.make_rmem_tensor(acc.shape, self.dtype)
            wgmma.round_fragment(acc, values)
            cute.copy(atom, copy.retile(values), copy.partition_D(staging))
        cute.arch.fence_proxy("async.shared", space="cta")
        resources.meet(self.finished)
        if thread // 32 == 0:
            kv = tensors.bthd_coordinates()[None, None, work.kv_head, work.batch]
            for part in cutlass.range_constexpr(tile.n // 64):
                for store, staging in ((maps.dk, shared.k), (maps.dv, shared.v)):
                    source = cute.local_tile(staging, (64, d), (part, 0))
                    target = cute.local_tile(kv, (64, d), (work.tile * (tile.n // 64) + part, 0))
                    tensors.tma_store(store, source, target)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0)

    @cute.jit
    def step(
        self,
        shared: Shared,
        work: Work,
        rows: Rows,
        grads: KeyGradients,
        scale_log2: Float32,
        place: Step,
    ):
        """Issues the products of one query block of one head, and computes P and dS."""
        tile, d = self.tile, self.head_dim
        block, step, group = place.block, place.index, place.group
        thread, _, _ = cute.arch.thread_idx()
        thread = thread - WARPGROUP
        uniform = cute.make_layout(tile.mma_warpgroups, stride=WARPGROUP)(group)
        products = make_products(self.dtype, self.head_dim, self.tile)
        scores_mma, grads_mma = products.scores.tiled(), products.grads.tiled()
        scores_slice, grads_slice = scores_mma.get_slice(uniform), grads_mma.get_slice(uniform)
        use = shared.barriers.q_full.use(step)
        slot = use.slot
        buffer = step & 1

        k = scores_mma.make_fragment_A(scores_slice.partition_A(shared.k))
        v = scores_mma.make_fragment_A(scores_slice.partition_A(shared.v))
        q = scores_mma.make_fragment_B(scores_slice.partition_B(shared.q[None, None, slot]))
        do = scores_mma.make_fragment_B(scores_slice.partition_B(shared.do[None, None, slot]))
        qt = grads_mma.make_fragment_B(grads_slice.partition_B(shared.qt[None, None, slot]))
        dot = grads_mma.make_fragment_B(grads_slice.partition_B(shared.dot[None, None, slot]))
        scores = cute.make_rmem_tensor(scores_mma.partition_shape_C((tile.n, tile.m)), Float32)
        dp = cute.make_rmem_tensor(scores.shape, Float32)

        shared.barriers.q_full.wait(use)
        padded = (block + 1) * tile.m > work.band.query_length
        if work.padded_queries & padded:
            shared.barriers.do_full.wait(use)
            q_tile, do_tile = shared.q[None, None, slot], shared.do[None, None, slot]
            first_row = work.band.query_length - block * tile.m
            self.clear_padding(q_tile, do_tile, first_row, thread)
        products.scores.issue(scores, k, q, accumulate=False)
        lse_log2 = self.statistics(shared.lse_log2, slot)
        shared.barriers.do_full.wait(use)
        products.scores.issue(dp, v, do, accumulate=False)
        warpgroup.wait_group(1)
        self.mask(work, scores, block)
        self.exponentiate(scores, lse_log2, scale_log2)
        delta = self.statistics(shared.delta, slot)
        warpgroup.wait_group(0)
        self.score_gradient(scores, dp, delta)
        p, ds = self.operand(grads_mma, scores), self.operand(grads_mma, dp)
        self.to_shared(dp, shared.ds[None, None, buffer])
        products.grads.issue(grads.dv, p, dot, accumulate=True)
        cute.arch.fence_proxy("async.shared", space="cta")
        resources.meet(self.scores_ready)

        dq_mma = products.dq.tiled()
        dq_slice = dq_mma.get_slice(uniform)
        dst = dq_mma.make_fragment_A(dq_slice.partition_A(shared.dst[None, None, buffer]))
        kt = dq_mma.make_fragment_B(dq_slice.partition_B(shared.kt))
        dq = cute.make_rmem_tensor(dq_mma.partition_shape_C((tile.m, d)), Float32)
        products.dq.issue(dq, dst, kt, accumulate=False)
        products.grads.issue(grads.dk, ds, qt, accumulate=True)
        warpgroup.wait_group(1)
        self.release(shared.barriers.do_empty.at(use))
        self.query_gradient.add(shared, work, rows, dq, place)
        warpgroup.wait_group(0)
        self.release(shared.barriers.q_empty.at(use))

    @cute.jit
    def clear_padding(self, a: cute.Tensor, b: cute.Tensor, first_row: Int32, thread: Int32):
        """Writes 0 to the rows past the length, which may hold anything, of both tiles."""
        threads = self.tile.mma_warpgroups * WARPGROUP
        tensors.zero_rows(a, first_row, thread, threads)
        tensors.zero_rows(b, first_row, thread, threads)
        cute.arch.fence_proxy("async.shared", space="cta")
        resources.meet(self.padding)

    def operand(self, mma: cute.TiledMma, values: cute.Tensor) -> cute.Tensor:
        """Rounds scores or their gradient to operand A of the dV or dK product, in registers."""
        shape = mma.partition_shape_A((self.tile.n, self.tile.m))
        fragment = cute.make_rmem_tensor(shape, self.dtype)
        wgmma.round_fragment(values, fragment)
        return fragment

    def to_shared(self, values: cute.Tensor, staging: cute.Tensor):
        """Rounds a score fragment to the storage type and writes it to a (n, m) tile."""
        thread, _, _ = cute.arch.thread_idx()
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype)
        copy = cute.make_tiled_copy_C(
            atom, make_products(self.dtype, self.head_dim, self.tile).scores.tiled()
        )
        copy = copy.get_slice(thread - WARPGROUP)
        rounded = cute.make_rmem_tensor(values.shape, self.dtype)
        wgmma.round_fragment(values, rounded)
        cute.copy(atom, copy.retile(rounded), copy.partition_D(staging))

    def first_query(self) -> Int32:
        """Returns the first column (query of the block) of this thread's score fragment."""
        thread, _, _ = cute.arch.thread_idx()
        return thread % 4 * 2

    @cute.jit
    def mask(self, work: Work, scores: cute.Tensor, block: Int32):
        """Sets scores of pairs outside the band to -inf, in blocks that hold any."""
        tile = self.tile
        edge = (block < work.blocks.full_begin) | (block >= work.blocks.full_end)
        if edge | work.padded_keys:
            thread, _, _ = cute.arch.thread_idx()
            thread = thread - WARPGROUP
            key = work.first_key + thread // 32 * 16 + thread % 32 // 4
            low = cute.make_rmem_tensor((softmax.ROWS,), Int32)
            high = cute.make_rmem_tensor((softmax.ROWS,), Int32)
            for row in cutlass.range_constexpr(softmax.ROWS):
                index = key + 8 * row
                first, last = bands.row_limits(work.band.transposed(), index, tensors.INT32)
                low[row] = first
                high[row] = Int32(cutlass.select_(index < work.band.key_length, last, Int32(0)))
            softmax.mask_band(scores, block * tile.m + self.first_query(), low, high)

    def statistics(self, tensor: cute.Tensor, slot: Int32) -> cute.Tensor:
        """Returns the per-query values of this thread's columns of scores: (2, column_pair).

        They are in registers where the tile has them loaded early, else in shared memory.
        """
        pointer = tensor[None, slot].iterator + self.first_query()
        pairs = self.tile.m // 8
        view = cute.make_tensor(pointer, cute.make_layout((2, pairs), stride=(1, 8)))
        if not self.tile.early_statistics:
            return view
        values = cute.make_rmem_tensor((2, pairs), Float32)
        for pair in range(pairs):
            cute.autovec_copy(view[None, pair], values[None, pair])
        return values

    def exponentiate(self, scores: cute.Tensor, lse_log2: cute.Tensor, scale_log2: Float32):
        """Replaces scores by P^T = exp2(scores * scale_log2 - lse_log2)."""
        values = cute.make_rmem_tensor((2,), Float32)
        for pair in range(cute.size(scores.shape[0][2])):
            cute.autovec_copy(lse_log2[None, pair], values)
            for row in range(softmax.ROWS):
                for column in range(2):
                    index = softmax.fragment_index(pair, row, column)
                    exponent = scores[index] * scale_log2 - values[column]
                    scores[index] = exp2(exponent)

    def score_gradient(self, p: cute.Tensor, dp: cute.Tensor, delta: cute.Tensor):
        """Replaces dp by dS^T = P^T * (dP^T - delta)."""
        values = cute.make_rmem_tensor((2,), Float32)
        for pair in range(cute.size(p.shape[0][2])):
            cute.autovec_copy(delta[None, pair], values)
            for row in range(softmax.ROWS):
                for column in range(2):
                    index = softmax.fragment_index(pair, row, column)
                    dp[index] = p[index] * (dp[index] - values[column])

    def release(self, empty: cute.Pointer):
        """Arrives, once per warp: this warp's wgmma no longer reads the slot."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(empty)


def source(key: KernelKey) -> KernelSource:
    """Returns the main backward kernel of a key, with its launch."""
    kernel = Backward(key)
    tile = kernel.tile
    return backward_source(kernel, key, {"m": tile.m, "n": tile.n, "stages": tile.stages})
