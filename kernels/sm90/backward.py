"""Hopper's main backward kernel: a CTA computes dK, dV of key tiles and adds their shares to dQ.

P = exp2(S * scale_log2 - lse_log2) and delta = rowsum(dO * O) - dLSE. Everything is transposed, so
that keys are rows (FlashAttention-2, section 3.1; FlashAttention-3, appendix B.1):
    S^T  = K Q^T                dP^T = V dO^T
    dV  += P^T dO               dS^T = P^T * (dP^T - delta)
    dK  += dS^T Q               dQ  += dS K        (scale is applied at the end, to dK here)

    load warp          takes key tile after key tile (backward_tiles); loads K, V of each, then for
                       every query head of the KV head's group and every query block that sees the
                       tile: Q, lse_log2 and dO, delta into two rings; where rows have ranges in
                       memory (backward_ranges), it says which block it is
    reduce warps       add dQ, which is staged in shared memory, to global memory (backward_dq); two
                       where the order of additions is fixed
    MMA warpgroup 0, 1 issue the products: each has 64 keys of S, dP, dV and dK, and the half of dQ
                       that BackwardTile.split_rows says

A CTA walks all query heads of a group, so dK and dV are summed in registers whatever the group
size, in a fixed order; of a dense call's last tiles several CTAs have parts, whose sums are added
in no order (backward_tail). There is a CTA for each multiprocessor. While it stores dK and dV of a
tile, K, V and the first queries of the next one come.

P and dS are operands in registers. P is rounded after dS has been computed: dS then takes the
registers of dP, and P, rounded, and dS, rounded, those of the scores. Where a tile says so, this
goes by parts of the queries (`gradient_by_parts`).

Note [scores]: dS has two buffers used in turn, so one barrier a step is enough: a warpgroup passes
`scores_ready` of step i + 1 only when the other one has arrived there, which it does after its
products of step i have read buffer i % 2. So step i + 2 may write that buffer.

Note [staging]: dK is staged in the memory of dS, which both warpgroups have read when they meet at
`finished` after a tile's last step; dV in the buffer of dQ that the next step will use, once it is
empty. The warp that stores them waits, before the next tile's first step, until the copies have
read that memory; the other warps meet it at `finished`.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warp, warpgroup

from fa4_jax.key import KernelKey
from kernels.common import ptx, resources, tensors
from kernels.common.backward_schedule import Work
from kernels.common.hosts import backward_source
from kernels.common.resources import Maps, Shared
from kernels.common.softmax import exp2, slope_of_cap
from kernels.common.state import Exponents, Rows, make_exponents, make_rows
from kernels.interface import (
    BackwardScalars,
    BiasBuffers,
    CapBuffer,
    RangeBuffers,
    RowBuffers,
    Sizes,
    TailBuffers,
)
from kernels.kernel_source import KernelSource
from kernels.sm90 import softmax, wgmma
from kernels.sm90.backward_clear import clear_tiles
from kernels.sm90.backward_data import KeyGradients, KeySlices, Step
from kernels.sm90.backward_description import dv_places
from kernels.sm90.backward_parts import BackwardParts
from kernels.sm90.backward_tail import (
    make_tickets,
    publish_part,
    read_ticket,
    sum_parts,
    work_of,
)
from kernels.sm90.backward_tiles import (
    Call,
    assign_tile,
    is_tile,
    place_of_tile,
    publish,
    publish_end,
    publish_index,
    published,
    take_ticket,
    tile_count,
    words_of_tile,
)
from kernels.sm90.tiles import WARPGROUP


class Backward(BackwardParts):
    """The kernel of one key; attributes are compile-time constants."""

    def __init__(self, key: KernelKey):
        super().__init__(key)
        named = self.description.named_barrier
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
        tail: TailBuffers | None = None,
        bias: BiasBuffers | None = None,
    ):
        shared = resources.allocate(self.description, self.dtype)
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_index == 0:
            resources.prefetch(maps, self.description)
            with cute.arch.elect_one():
                resources.initialise(self.description, shared.barriers)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        rows = make_rows(buffers, sizes.query_length, self.tile.m)
        window, group = scalars.window if self.band else None, sizes.heads // sizes.kv_heads
        call = Call(buffers.extents, sizes, group, window, ranges, tail, bias)
        load, reduce, mma = map(self.description.role, ("load", "reduce", "mma"))
        if warp_index < mma.first_warp:
            cute.arch.setmaxregister_decrease(load.registers)
            if warp_index == load.first_warp:
                self.load_tiles(maps, shared, call, rows, buffers.dq_ticket)
            if cutlass.const_expr(rows.dq_cleared is not None):
                if warp_index == self.description.role("clear").first_warp:
                    clear_tiles(shared, call, self.shape, rows, self.head_dim)
            for rank in cutlass.range_constexpr(reduce.warps):
                if warp_index == reduce.first_warp + rank:
                    self.query_gradient.reduce_tiles(shared, call, self.shape, rows, rank)
        else:
            cute.arch.setmaxregister_increase(mma.registers)
            exponents = make_exponents(scalars, cap, bias)
            self.mma_tiles(maps, shared, call, rows, scalars, exponents)

    @cute.jit
    def load_tiles(self, maps: Maps, shared: Shared, call: Call, rows: Rows, ticket: cute.Pointer):
        """Load warp: takes tile after tile, says what each is, and loads what it needs.

        All tiles are taken by ticket: CTAs wait for those with lower tickets (Note [dq order]), or
        for what these clear (backward_clear.py).
        """
        barriers = shared.barriers
        ctas, _, _ = cute.arch.grid_dim()
        first = take_ticket(ticket)
        index, tiles = Int32(first), tile_count(call.sizes, self.shape.n)
        tickets = make_tickets(tiles, ctas, call)
        tiles_done, steps_done = Int32(0), Int32(0)
        while index < tickets.count:
            own = read_ticket(index, tickets)
            work = work_of(own, assign_tile(own.tile, call, self.shape))
            barriers.kv_empty.wait_free(tiles_done)
            with cute.arch.elect_one():
                publish(work, words_of_tile(shared, tiles_done))
                if cutlass.const_expr(call.tail is not None):
                    publish_part(own, words_of_tile(shared, tiles_done))
                if cutlass.const_expr(rows.dq_cleared is not None):
                    publish_index(own.tile, own.part, shared, tiles_done)
            self.load_keys(maps, shared, work)
            self.load(maps, shared, work, rows, steps_done)
            steps_done += work.steps()
            tiles_done += 1
            index = take_ticket(ticket)
        barriers.kv_empty.wait_free(tiles_done)
        with cute.arch.elect_one():
            publish_end(words_of_tile(shared, tiles_done))
            cute.arch.mbarrier_arrive(barriers.kv_full.first)

    @cute.jit
    def load_keys(self, maps: Maps, shared: Shared, work: Work):
        """Loads K and V of a tile's keys, if a query sees any of them."""
        n, d, kv_full = self.tile.n, self.head_dim, shared.barriers.kv_full.first
        num_bytes = cutlass.select_(work.steps() > 0, Int32(2 * n * d * 2), Int32(0))
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(kv_full, num_bytes)
        if work.steps() > 0:
            kv = tensors.bthd_coordinates()[None, None, work.kv_head, work.batch]
            key_tile = cute.local_tile(kv, (n, d), (work.tile, 0))
            tensors.tma_load(maps.k, key_tile, shared.k, kv_full)
            tensors.tma_load(maps.v, key_tile, shared.v, kv_full)

    @cute.jit
    def mma_tiles(
        self,
        maps: Maps,
        shared: Shared,
        call: Call,
        rows: Rows,
        scalars: BackwardScalars,
        exponents: Exponents,
    ):
        """MMA warpgroup: computes all tiles of the CTA."""
        tiles_done, steps_done = Int32(0), Int32(0)
        kv_full = shared.barriers.kv_full
        kv_full.wait(tiles_done)
        more = is_tile(words_of_tile(shared, tiles_done))
        while more:
            work = published(words_of_tile(shared, tiles_done), call, self.shape)
            grads = self.make_gradients()
            done = (tiles_done, steps_done)
            steps_done = self.mma(shared, work, rows, grads, exponents, done)
            done = (tiles_done, steps_done)
            if self.completes(shared, call, grads, tiles_done):
                self.store(maps, shared, grads, scalars.scale, done)
            tiles_done += 1
            kv_full.wait(tiles_done)
            more = is_tile(words_of_tile(shared, tiles_done))
        cute.arch.cp_async_bulk_wait_group(0)

    def completes(
        self, shared: Shared, call: Call, grads: KeyGradients, tiles_done: Int32
    ) -> cutlass.Boolean | bool:
        """Whether the CTA stores dK and dV of its tile: those of all parts, where it has parts."""
        if call.tail is None:
            return True
        return sum_parts(shared, call.tail, grads, words_of_tile(shared, tiles_done), self.finished)

    def make_gradients(self) -> KeyGradients:
        """Makes a warpgroup's accumulators of dK and dV, which are 0."""
        shape = self.products().dk.tiled().partition_shape_C((self.tile.n, self.head_dim))
        dk, dv = (cute.make_rmem_tensor(shape, Float32) for _ in range(2))
        dk.fill(0.0)
        dv.fill(0.0)
        return KeyGradients(dk, dv)

    @cute.jit
    def mma(
        self,
        shared: Shared,
        work: Work,
        rows: Rows,
        grads: KeyGradients,
        exponents: Exponents,
        done: tuple[Int32, Int32],
    ) -> Int32:
        """MMA warpgroup: issues its share of a tile's five products.

        done: the numbers of tiles and steps before. Returns the steps that it has done then.
        """
        # No register is left for what is the same in every tile.
        thread, _, _ = cute.arch.thread_idx()
        thread = ptx.anew(thread) - WARPGROUP
        group = cute.arch.make_warp_uniform(thread // WARPGROUP)
        scores = self.products().scores
        slices = KeySlices(*(scores.make_slices(self.tile.n, x) for x in self.slices))
        steps = work.block_count()
        if work.padded_keys & (steps > 0):
            first_row = work.band.key_length - work.first_key
            self.clear_padding(shared.k, shared.v, first_row, thread)
        scores.load_slices(slices.k, shared.k, thread)
        scores.load_slices(slices.v, shared.v, thread)
        # dS and dQ may be written where the tile before has staged dK and dV.
        if thread // 32 == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        resources.meet(self.finished)
        tiles_done, step = done
        of_tile = words_of_tile(shared, tiles_done)
        first = Step(Int32(0), Int32(0), step, group, of_tile=of_tile)
        self.copy_first_bias(shared, work, first)
        for member in cutlass.range(work.group, unroll=1):
            for index in cutlass.range(steps, unroll=1):
                block, hidden = self.visit(shared, work, index, step)
                words, is_first = self.words_of(shared, step), member + index == 0
                place = Step(member, block, step, group, hidden, words, is_first, of_tile)
                self.step(shared, work, rows, (grads, slices), exponents, place)
                step += 1
        if cutlass.const_expr(self.tile.dq_buffers > 1):
            if steps > 0:
                self.query_gradient.hand_over(shared, step - 1)
        cute.arch.sync_warp()
        self.release(shared.barriers.kv_empty.first)
        return step

    @cute.jit
    def store(
        self,
        maps: Maps,
        shared: Shared,
        grads: KeyGradients,
        scale: Float32,
        done: tuple[Int32, Int32],
    ):
        """MMA warpgroup: stores dK and dV of a tile.

        done: the numbers of tiles before, and of steps with this one's.
        """
        tile, d, (tiles_done, steps_done) = self.tile, self.head_dim, done
        thread, _, _ = cute.arch.thread_idx()
        thread = ptx.anew(thread) - WARPGROUP
        self.scale(grads.dk, scale)
        resources.meet(self.finished)
        next_dq = shared.barriers.dq_empty.use(steps_done)
        shared.barriers.dq_empty.wait_free(next_dq)
        place = next_dq.slot * dv_places(tile, d, self.value_dim)
        staged = (shared.grad_k, shared.grad_v[None, None, place])
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype)
        copy = cute.make_tiled_copy_C(atom, self.products().dk.tiled()).get_slice(thread)
        for acc, staging in ((grads.dk, staged[0]), (grads.dv, staged[1])):
            values = cute.make_rmem_tensor(acc.shape, self.dtype)
            wgmma.round_fragment(acc, values)
            cute.copy(atom, copy.retile(values), copy.partition_D(staging))
        cute.arch.fence_proxy("async.shared", space="cta")
        resources.meet(self.finished)
        if thread // 32 == 0:
            key_tile, kv_head, batch = place_of_tile(words_of_tile(shared, tiles_done))
            kv = tensors.bthd_coordinates()[None, None, kv_head, batch]
            for part in cutlass.range_constexpr(tile.n // 64):
                for store, staging in ((maps.dk, staged[0]), (maps.dv, staged[1])):
                    source = cute.local_tile(staging, (64, d), (part, 0))
                    target = cute.local_tile(kv, (64, d), (key_tile * (tile.n // 64) + part, 0))
                    tensors.tma_store(store, source, target)
            cute.arch.cp_async_bulk_commit_group()

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
        step, use = place.index, shared.barriers.q_full.use(place.index)
        slot, buffer = use.slot, step & 1
        thread, _, _ = cute.arch.thread_idx()
        thread = ptx.anew(thread) - WARPGROUP
        uniform = cute.make_layout(tile.mma_warpgroups, stride=WARPGROUP)(place.group)
        products = self.products()
        scores_mma, grads_mma = products.scores.tiled(), products.dk.tiled()
        scores_slice, grads_slice = scores_mma.get_slice(uniform), grads_mma.get_slice(uniform)

        k = scores_mma.make_fragment_A(scores_slice.partition_A(shared.k))
        v = scores_mma.make_fragment_A(scores_slice.partition_A(shared.v))
        q = scores_mma.make_fragment_B(scores_slice.partition_B(shared.q[None, None, slot]))
        do = scores_mma.make_fragment_B(scores_slice.partition_B(shared.do[None, None, slot]))
        qt = grads_mma.make_fragment_B(grads_slice.partition_B(shared.qt[None, None, slot]))
        dot = grads_mma.make_fragment_B(grads_slice.partition_B(shared.dot[None, None, slot]))
        scores = cute.make_rmem_tensor(scores_mma.partition_shape_C((tile.n, tile.m)), Float32)
        dp = cute.make_rmem_tensor(scores.shape, Float32)

        self.receive(shared, work, place, thread)
        products.scores.issue_with(slices.k, scores, k, q)
        lse_log2 = self.statistics(shared.lse_log2, slot)
        shared.barriers.do_full.wait(use)
        products.scores.issue_with(slices.v, dp, v, do)
        if cutlass.const_expr(not tile.delta_after_scores):
            delta = self.statistics(shared.delta, slot)
        if cutlass.const_expr(tile.dq_buffers > 1):
            if not place.is_first:
                self.query_gradient.hand_over(shared, step - 1)
        warpgroup.wait_group(1)
        if cutlass.const_expr(tile.delta_after_scores and not self.delta_after_bias):
            delta = self.statistics(shared.delta, slot)
        if cutlass.const_expr(self.soft_cap):
            softmax.cap(scores, exponents.before_cap, self.tile.cap_at_once)
        self.add_bias(work, scores, place, exponents, shared)
        if cutlass.const_expr(self.delta_after_bias):
            delta = self.statistics(shared.delta, slot)
        self.mask(work, scores, place)
        if cutlass.const_expr(not self.soft_cap):
            self.exponentiate(scores, lse_log2, exponents.scale_log2)
        warpgroup.wait_group(0)
        staging = shared.ds[None, None, buffer]
        if cutlass.const_expr(self.soft_cap):
            self.capped_gradient(scores, dp, (lse_log2, delta), exponents.scale_log2)
        if cutlass.const_expr(tile.first_slices > 0):
            ds = self.gradient_by_parts((scores, dp), delta, staging, (grads.dv, dot), thread)
        else:
            ds = self.gradient_at_once((scores, dp), delta, staging, (grads.dv, dot), thread)
        cute.arch.fence_proxy("async.shared", space="cta")
        resources.meet(self.scores_ready)
        self.copy_next_bias(shared, work, place)

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
        if cutlass.const_expr(tile.dq_buffers == 1):
            self.query_gradient.hand_over(shared, step)
        warpgroup.wait_group(0)
        self.release(shared.barriers.q_empty.at(use))

    @cute.jit
    def receive(self, shared: Shared, work: Work, place: Step, thread: Int32):
        """Waits for Q of a step, and writes 0 to rows past the length of Q and dO."""
        use = shared.barriers.q_full.use(place.index)
        shared.barriers.q_full.wait(use)
        padded = (place.block + 1) * self.tile.m > work.band.query_length
        if work.padded_queries & padded:
            shared.barriers.do_full.wait(use)
            q_tile, do_tile = shared.q[None, None, use.slot], shared.do[None, None, use.slot]
            first_row = work.band.query_length - place.block * self.tile.m
            self.clear_padding(q_tile, do_tile, first_row, thread)

    def gradient_at_once(
        self,
        scores: tuple[cute.Tensor, cute.Tensor],
        delta: cute.Tensor,
        staging: cute.Tensor,
        value_gradient: tuple[cute.Tensor, cute.Tensor],
        thread: Int32,
    ) -> cute.Tensor:
        """Computes dS^T, writes it to shared memory, and issues dV.

        Args:
          scores: P^T, and dP^T, which is replaced by dS^T; capped ones have been.
          staging: (n, m) tile of dS in shared memory.
          value_gradient: dV, and dO transposed as its operand.

        Returns:
          dS^T as operand of dK.
        """
        (values, dp), (dv, dot), products = scores, value_gradient, self.products()
        if not self.soft_cap:
            self.score_gradient(values, dp, delta)
        mma = products.dk.tiled()
        p, ds = self.operand(mma, values), self.operand(mma, dp)
        self.to_shared(dp, staging, thread)
        products.dv.issue(dv, p, dot, accumulate=True)
        return ds

    def gradient_by_parts(
        self,
        scores: tuple[cute.Tensor, cute.Tensor],
        delta: cute.Tensor,
        staging: cute.Tensor,
        value_gradient: tuple[cute.Tensor, cute.Tensor],
        thread: Int32,
    ) -> cute.Tensor:
        """Does what `gradient_at_once` does, in two parts of the queries.

        The tensor core, which both warpgroups leave idle meanwhile, begins dV after the first part.
        """
        (values, dp), (dv, dot), products = scores, value_gradient, self.products()
        shape = products.dk.tiled().partition_shape_A((self.tile.n, self.tile.m))
        p, ds = (cute.make_rmem_tensor(shape, self.dtype) for _ in range(2))
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype)
        copy = cute.make_tiled_copy_C(atom, products.scores.tiled()).get_slice(thread)
        target = copy.partition_D(staging)
        source = cute.make_tensor(ds.iterator, cute.make_layout(target.shape))
        slices = self.tile.m // wgmma.SLICE
        for first, end in ((0, self.tile.first_slices), (self.tile.first_slices, slices)):
            self.score_gradient(values, dp, delta, range(2 * first, 2 * end))
            wgmma.round_slices(values, p, first, end)
            wgmma.round_slices(dp, ds, first, end)
            for k in range(first, end):
                place = ((None, k), None, None)
                cute.copy(atom, source[place], target[place])
            products.dv.issue_more(dv, p, dot, first, end)
        warpgroup.commit_group()
        return ds

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


def source(key: KernelKey) -> KernelSource:
    """Returns the main backward kernel of a key, with its launch."""
    kernel = Backward(key)
    tile = kernel.tile
    return backward_source(kernel, key, {"m": tile.m, "n": tile.n, "stages": tile.stages})
