"""Hopper's main backward kernel: a CTA computes dK, dV of one key tile and adds its share to dQ.

P = exp2(S * scale_log2 - lse_log2) and delta = rowsum(dO * O) - dLSE. Everything is transposed, so
that keys are rows (FlashAttention-2, section 3.1; FlashAttention-3, appendix B.1):
    S^T  = K Q^T                dP^T = V dO^T
    dV  += P^T dO               dS^T = P^T * (dP^T - delta)
    dK  += dS^T Q               dQ  += dS K        (scale is applied at the end, to dK here)

    load warp          loads K, V once; then for every query head of the KV head's group and every
                       query block that sees the key tile: Q, lse_log2 and dO, delta into two rings;
                       where rows have ranges in memory (backward_ranges), it says which block it is
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

from fa4_jax.key import KernelKey
from kernels.common import ptx, resources, tensors
from kernels.common.backward_ranges import NOTHING, make_walk
from kernels.common.backward_schedule import BackwardShape, StartIndex, Work, assign, by_table
from kernels.common.hosts import BackwardHost, backward_source
from kernels.common.resources import Maps, Shared
from kernels.common.ring import Use
from kernels.common.schedule import synchronise
from kernels.common.softmax import exp2, slope_of_cap
from kernels.common.state import Exponents, Rows, make_exponents, make_rows
from kernels.interface import BackwardScalars, CapBuffer, RangeBuffers, RowBuffers, Sizes
from kernels.kernel_source import KernelSource
from kernels.sm90 import backward_mask, softmax, wgmma
from kernels.sm90.backward_data import (
    KeyGradients,
    KeySlices,
    Products,
    Step,
    make_products,
)
from kernels.sm90.backward_description import of_key
from kernels.sm90.backward_dq import QueryGradient
from kernels.sm90.tiles import (
    BACKWARD_TILES,
    DETERMINISTIC_BAND_HEADS,
    LONGEST_FIRST_SECTIONS,
    REGISTER_BUDGETS,
    WARPGROUP,
)


class Backward(BackwardHost):
    """The kernel of one key; attributes are compile-time constants."""

    def __init__(self, key: KernelKey):
        self.dtype = tensors.TYPES[key.dtype]
        self.head_dim, self.value_dim = key.head_dim, key.value_dim
        self.band, self.ranges = key.band, key.ranges
        self.soft_cap = self.reads_cap = key.soft_cap
        self.reads_mask = key.reads_mask
        self.deterministic = key.deterministic
        by_order = key.ranges and not key.deterministic
        self.tile = BACKWARD_TILES[key.head_dim, key.value_dim].in_order(key.deterministic)
        self.slices = self.tile.slices(key.ranges, key.soft_cap)
        self.description = of_key(key)
        self.shape = BackwardShape(
            m=self.tile.m,
            n=self.tile.keys,
            row_bytes=key.head_dim * (2 + 4) + key.value_dim * 2,
            l2_bytes=self.tile.l2_budget_bytes * (LONGEST_FIRST_SECTIONS if by_order else 1),
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
        # The divisions and the load then run while the barriers are initialised; a pair gained
        # nothing, and a ticket is known only after the first barrier.
        self.is_assigned_early = self.tile.ctas == 1 and not key.deterministic
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
        ranges: RangeBuffers | None = None,
        cap: CapBuffer | None = None,
    ):
        shared = resources.allocate(self.description, self.dtype)
        call = (self.shape, buffers.extents, sizes, scalars.window)
        if cutlass.const_expr(self.is_assigned_early):
            work = assign(*call, lambda: self.start(shared), ranges)
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

        if cutlass.const_expr(not self.is_assigned_early):
            work = assign(*call, lambda: self.start(shared), ranges)
        if cutlass.const_expr(self.ranges):
            work = by_table(work, ranges, sizes, self.shape)
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
            self.mma(maps, shared, work, rows, scalars, make_exponents(scalars, cap))
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
        tile, dims = self.tile, (self.head_dim, self.value_dim)
        coordinates = tensors.bthd_coordinates()
        steps, walk = work.block_count(), make_walk(work.visits)
        if steps > 0:
            self.load_keys(maps, shared, work, coordinates[None, None, work.kv_head, work.batch])
        for step in cutlass.range(steps * work.group, unroll=1):
            member = step // steps
            block = self.query_gradient.query_block(work, step - member * steps, walk)
            visit = self.visit_words(work, block, member)
            head = work.kv_head * work.group + member
            query = coordinates[None, None, head, work.batch]
            query_tiles = [cute.local_tile(query, (tile.m, d), (block, 0)) for d in dims]
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
                    if cutlass.const_expr(self.ranges and operand == 0):
                        self.publish(shared, use, visit)
                    cute.arch.mbarrier_arrive_and_expect_tx(full, tile.m * (dims[operand] * 2 + 4))
                    ptx.bulk_load(statistics.iterator, source, tile.m * 4, full)
                tensors.tma_load((maps.q, maps.do)[operand], query_tiles[operand], target, full)

    def visit_words(self, work: Work, block: Int32, member: Int32) -> tuple[Int32, ...]:
        """Returns what the load warp publishes of a step; it reads the table."""
        return backward_mask.visit_words(work, block, member, self.tile.m) if self.ranges else ()

    def publish(self, shared: Shared, use: Use, visit: tuple[Int32, ...]):
        """Writes what a step is, as `visit` reads it: one thread, which then arrives on q_full."""
        for i, word in enumerate(visit):
            shared.visits[i, use.slot] = word

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
        exponents: Exponents,
    ):
        """MMA warpgroup: issues its share of all five products, then stores dK and dV."""
        tile, d = self.tile, self.head_dim
        thread, _, _ = cute.arch.thread_idx()
        thread = thread - WARPGROUP
        group = cute.arch.make_warp_uniform(thread // WARPGROUP)
        products = self.products()
        grads = products.dk.tiled()
        dk_acc = cute.make_rmem_tensor(grads.partition_shape_C((tile.n, d)), Float32)
        dv_acc = cute.make_rmem_tensor(grads.partition_shape_C((tile.n, d)), Float32)
        dk_acc.fill(0.0)
        dv_acc.fill(0.0)
        grads_acc = KeyGradients(dk_acc, dv_acc)
        slices = KeySlices(*(products.scores.make_slices(tile.n, x) for x in self.slices))
        steps = work.block_count()
        if steps > 0:
            shared.barriers.kv_full.wait(0)
            if work.padded_keys:
                first_row = work.band.key_length - work.first_key
                self.clear_padding(shared.k, shared.v, first_row, thread)
            products.scores.load_slices(slices.k, shared.k, thread)
            products.scores.load_slices(slices.v, shared.v, thread)
        for member in cutlass.range(work.group, unroll=1):
            for index in cutlass.range(steps, unroll=1):
                block, hidden = self.visit(shared, work, member, index)
                step = member * steps + index
                place = Step(member, block, step, group, hidden, self.words_of(shared, step))
                self.step(shared, work, rows, (grads_acc, slices), exponents, place)
        if cutlass.const_expr(self.query_gradient.hands_over_late):
            self.query_gradient.hand_over(shared, steps * work.group)
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
        own: tuple[KeyGradients, KeySlices],
        exponents: Exponents,
        place: Step,
    ):
        """Issues the products of one query block of one head, and computes P and dS.

        own: what registers hold of the warpgroup's keys.
        """
        tile, d, (grads, slices) = self.tile, self.head_dim, own
        block, step, group = place.block, place.index, place.group
        thread, _, _ = cute.arch.thread_idx()
        thread = thread - WARPGROUP
        uniform = cute.make_layout(tile.mma_warpgroups, stride=WARPGROUP)(group)
        products = self.products()
        scores_mma, grads_mma = products.scores.tiled(), products.dk.tiled()
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
        products.scores.issue_with(slices.k, scores, k, q)
        lse_log2 = self.statistics(shared.lse_log2, slot)
        shared.barriers.do_full.wait(use)
        products.scores.issue_with(slices.v, dp, v, do)
        if cutlass.const_expr(not tile.delta_after_scores):
            delta = self.statistics(shared.delta, slot)
        if cutlass.const_expr(self.query_gradient.hands_over_late):
            self.query_gradient.hand_over(shared, step)
        warpgroup.wait_group(1)
        if cutlass.const_expr(tile.delta_after_scores):
            delta = self.statistics(shared.delta, slot)
        if cutlass.const_expr(self.soft_cap):
            softmax.cap(scores, exponents.before_cap, self.tile.cap_at_once)
        self.mask(work, scores, place)
        if cutlass.const_expr(not self.soft_cap):
            self.exponentiate(scores, lse_log2, exponents.scale_log2)
        warpgroup.wait_group(0)
        if cutlass.const_expr(self.soft_cap):
            self.capped_gradient(scores, dp, (lse_log2, delta), exponents.scale_log2)
        else:
            self.score_gradient(scores, dp, delta)
        p, ds = self.operand(grads_mma, scores), self.operand(grads_mma, dp)
        self.to_shared(dp, shared.ds[None, None, buffer])
        products.dv.issue(grads.dv, p, dot, accumulate=True)
        cute.arch.fence_proxy("async.shared", space="cta")
        resources.meet(self.scores_ready)

        dq_mma = products.dq.tiled()
        dq_slice = dq_mma.get_slice(uniform)
        dst = dq_mma.make_fragment_A(dq_slice.partition_A(shared.dst[None, None, buffer]))
        kt = dq_mma.make_fragment_B(dq_slice.partition_B(shared.kt))
        dq = cute.make_rmem_tensor(dq_mma.partition_shape_C((tile.m, d)), Float32)
        products.dq.issue(dq, dst, kt, accumulate=False)
        products.dk.issue(grads.dk, ds, qt, accumulate=True)
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

    def products(self) -> Products:
        """Returns the products, made anew: see `Wgmma.tiled`."""
        return make_products(self.dtype, self.head_dim, self.value_dim, self.tile)

    def visit(
        self, shared: Shared, work: Work, member: Int32, index: Int32
    ) -> tuple[Int32, Int32 | int]:
        """Returns the index-th query block of a head of the group, and what ranges hide in it.

        With ranges it waits for the step's Q.
        """
        if not self.ranges:
            return self.query_gradient.query_block(work, index), NOTHING
        use = shared.barriers.q_full.use(member * work.block_count() + index)
        shared.barriers.q_full.wait(use)
        words = [shared.visits[i, use.slot] for i in range(2)]
        block, hidden = map(cute.arch.make_warp_uniform, words)
        return block, hidden

    def words_of(self, shared: Shared, step: Int32) -> cute.Tensor | None:
        """Returns what the load warp has published of a step, or None."""
        return shared.visits[None, shared.barriers.q_full.use(step).slot] if self.ranges else None

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
        copy = cute.make_tiled_copy_C(atom, self.products().scores.tiled())
        copy = copy.get_slice(thread - WARPGROUP)
        rounded = cute.make_rmem_tensor(values.shape, self.dtype)
        wgmma.round_fragment(values, rounded)
        cute.copy(atom, copy.retile(rounded), copy.partition_D(staging))

    def mask(self, work: Work, scores: cute.Tensor, place: Step):
        """Sets scores of pairs that do not see each other to -inf."""
        backward_mask.mask_band(work, scores, place.block, self.tile.m)
        if self.ranges:
            backward_mask.mask_ranges(work, scores, place, self.tile.m)

    def statistics(self, tensor: cute.Tensor, slot: Int32) -> cute.Tensor:
        """Returns this lane's share of a step's row statistics, for `of_columns`: (2, m / 64).

        A warp holds each of them once, in registers, before it waits for the scores. Loads of all
        that a thread needs would wait behind the products' reads of shared memory.
        """
        pointer = tensor[None, slot].iterator + cute.assume(cute.arch.lane_idx() * 2, divby=2)
        parts = self.tile.m // 64
        view = cute.make_tensor(pointer, cute.make_layout((2, parts), stride=(1, 64)))
        values = cute.make_rmem_tensor((2, parts), Float32)
        for part in range(parts):
            cute.autovec_copy(view[None, part], values[None, part])
        return values

    def of_columns(self, statistics: cute.Tensor, pair: int) -> list[Float32]:
        """Returns the statistics of a pair of columns of this thread's fragment, by shuffles."""
        return backward_mask.of_columns(statistics, pair)

    def capped_gradient(
        self,
        scores: cute.Tensor,
        dp: cute.Tensor,
        statistics: tuple[cute.Tensor, cute.Tensor],
        scale_log2: Float32,
    ):
        """Replaces dp by dS^T, and capped scores by P^T.

        Both at once, after dP is there, so that no registers hold the slopes of the cap.
        statistics: lse_log2 and delta.
        """
        lse_log2, delta = statistics
        for pair in range(cute.size(scores.shape[0][2])):
            shifts, values = self.of_columns(lse_log2, pair), self.of_columns(delta, pair)
            for row in range(softmax.ROWS):
                for column in range(2):
                    index = softmax.fragment_index(pair, row, column)
                    t = scores[index]
                    scores[index] = exp2(t * scale_log2 - shifts[column])
                    slope = scores[index] * slope_of_cap(t)
                    dp[index] = slope * (dp[index] - values[column])

    def exponentiate(self, scores: cute.Tensor, lse_log2: cute.Tensor, scale_log2: Float32):
        """Replaces scores by P^T = exp2(scores * scale_log2 - lse_log2)."""
        for pair in range(cute.size(scores.shape[0][2])):
            values = self.of_columns(lse_log2, pair)
            for row in range(softmax.ROWS):
                for column in range(2):
                    index = softmax.fragment_index(pair, row, column)
                    exponent = scores[index] * scale_log2 - values[column]
                    scores[index] = exp2(exponent)

    def score_gradient(self, p: cute.Tensor, dp: cute.Tensor, delta: cute.Tensor):
        """Replaces dp by dS^T = P^T * (dP^T - delta)."""
        for pair in range(cute.size(p.shape[0][2])):
            values = self.of_columns(delta, pair)
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
