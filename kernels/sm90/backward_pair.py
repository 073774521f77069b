"""Hopper's main backward kernel for wide heads: a pair of CTAs computes dK, dV of key tiles.

The products are those of backward.py, and a pair takes tile after tile, too. A CTA has half of a
tile's keys, n = 64, and its two warpgroups have different products, since a warpgroup's registers
hold one accumulator of 64 x 256:

    load warp        takes tiles (backward_pair_load.py); loads K, V, and of the other CTA's keys
                     the columns of its own dQ; then Q, lse_log2 and dO, delta of every step into
                     two rings
    order warps      open the turns to add dQ where their order is fixed
    scores           warpgroup 0: S and P of every step, dV, and half of the CTA's dQ
    gradient         warpgroup 1: dP and dS of every step, dK, and the other half

                     scores                                   gradient
    step i           P(i) from S(i); publishes it             dP(i) is complete
                     dV += P(i)^T dO(i); S(i + 1) begins      dS(i) from P(i); sends it
                                                              dK += dS(i)^T Q(i)
                     dQ(i): adds its half                     dQ(i); dP(i + 1) begins; adds its half

So the tensor core always has a product of one warpgroup while the other one computes exponentials
or gradients, and P and dS are operands in registers for dV and dK.

Note [exchange]: both CTAs visit the same query blocks, and CTA r adds half of dQ's columns for the
keys of both, so each element of dQ is added to once a pair instead of twice:

    dQ[:, columns of r] = dS(own keys) K(own keys, columns of r)
                        + dS(other keys) K(other keys, columns of r)

When dS of a step is in shared memory, one thread copies it to the other CTA, where `ds_full` counts
the bytes, and announces as many from there at its own `ds_full`. When both warpgroups have used
what came, their warps arrive at the sender's `ds_empty`. The sender waits for that before it writes
the same buffer two steps later: the copy has then read it, and the other CTA's buffer is free. The
pair meets before it ends, so nothing comes for a CTA that is over. (FlashAttention-4 exchanges dS
in this way between two CTAs of Blackwell.)

Note [messages]: P goes from warpgroup 0 to warpgroup 1 thread by thread, since both have the same
fragment of it; unrounded, because dS from the rounded P was outside our tolerance (fp16). One
buffer is enough: warpgroup 0 writes P(i + 1) after it has met `ds_ready` of step i, before which
warpgroup 1 has read P(i). Warpgroup 1 writes dS(i + 2) over dS(i) after `p_ready` of step i + 1,
before which warpgroup 0's dQ(i) is complete. After a tile's last step both meet once more in the
same way: that step's Q and dO have then been read, and dK and dV take their memory, while K and V
of the next tile come already. So their slots are released when the stores have read them. A tile
without steps has that of the next step, and then the load warp waits. The last step issues S and dP
of no step, of which nothing is used.

Note [late dQ]: with BackwardTile.late_dq both warpgroups compute dQ of step i - 1 in step i. So
neither waits for the other CTA's dS of the same step, and the next P is not held up. A tile's first
step then computes a dQ of no step, from memory that nobody writes at that time, and drops it: a
branch around products would make ptxas put them one after another. P(i + 1) is written after
`ds_ready` of step i all the same, and dS(i + 2) after `p_ready` of step i + 2, before which dQ(i)
is complete.
"""

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warp, warpgroup

from fa4_jax.key import KernelKey
from kernels.common import resources, tensors
from kernels.common.backward_schedule import Work
from kernels.common.hosts import backward_source
from kernels.common.resources import Maps, Shared
from kernels.common.ring import Ring, Use
from kernels.common.schedule import synchronise
from kernels.common.softmax import slope_of_cap
from kernels.common.state import Exponents, Rows, make_exponents, make_rows
from kernels.interface import (
    BackwardScalars,
    BiasBuffers,
    CapBuffer,
    RangeBuffers,
    RowBuffers,
    Sizes,
)
from kernels.kernel_source import KernelSource
from kernels.sm90 import softmax, wgmma
from kernels.sm90.backward_data import Step
from kernels.sm90.backward_description import ORDER_WARPS
from kernels.sm90.backward_pair_load import PairLoad
from kernels.sm90.backward_tiles import (
    Call,
    is_tile,
    published,
    words_of_tile,
)
from kernels.sm90.tiles import REGISTER_BUDGETS, WARPGROUP


class PairBackward(PairLoad):
    """The kernel of one key; attributes are compile-time constants."""

    @cute.kernel
    def kernel(
        self,
        maps: Maps,
        buffers: RowBuffers,
        sizes: Sizes,
        scalars: BackwardScalars,
        ranges: RangeBuffers | None = None,
        cap: CapBuffer | None = None,
        bias: BiasBuffers | None = None,
    ):
        shared = resources.allocate(self.description, self.dtype)
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_index == 0:
            resources.prefetch(maps, self.description)
            with cute.arch.elect_one():
                resources.initialise(self.description, shared.barriers)
        cute.arch.mbarrier_init_fence()
        synchronise(self.tile.ctas)

        cta, _, _ = cute.arch.block_idx()
        rank = cta % 2
        rows = make_rows(buffers, sizes.query_length, self.tile.m)
        window, group = scalars.window if self.band else None, sizes.heads // sizes.kv_heads
        call = Call(buffers.extents, sizes, group, window, ranges, None, bias)
        registers, load = REGISTER_BUDGETS[self.tile.mma_warpgroups], self.description.role("load")
        if warp_index < WARPGROUP // 32:
            cute.arch.setmaxregister_decrease(registers.load)
            if warp_index == load.first_warp:
                self.load_tiles(maps, shared, call, rows, (buffers.dq_ticket, rank))
            if cutlass.const_expr(self.deterministic):
                first = self.description.role("order").first_warp
                for order in cutlass.range_constexpr(ORDER_WARPS):
                    if warp_index == first + order:
                        self.query_gradient.open_turns(shared, call, self.shape, rows, order)
        else:
            cute.arch.setmaxregister_increase(registers.mma)
            of_call = (maps, shared, call, rows, scalars)
            exponents = make_exponents(scalars, cap, bias)
            if warp_index < 2 * (WARPGROUP // 32):
                self.mma_tiles(*of_call, exponents, rank, 0)
            else:
                self.mma_tiles(*of_call, exponents, rank, 1)
        # The other CTA sends to this one's memory, and arrives there.
        synchronise(self.tile.ctas)

    @cute.jit
    def mma_tiles(
        self,
        maps: Maps,
        shared: Shared,
        call: Call,
        rows: Rows,
        scalars: BackwardScalars,
        exponents: Exponents,
        rank: Int32,
        group: cutlass.Constexpr[int],
    ):
        """MMA warpgroup: computes its products of the pair's tiles, and stores dV or dK."""
        thread, _, _ = cute.arch.thread_idx()
        barriers = shared.barriers
        tiles_done, steps_done = Int32(0), Int32(0)
        barriers.kv_full.wait(tiles_done)
        more = is_tile(words_of_tile(shared, tiles_done))
        while more:
            work = published(words_of_tile(shared, tiles_done), call, self.shape, rank)
            if work.padded_keys & (work.steps() > 0):
                self.clear_keys(shared, work, thread - WARPGROUP, group)
            if cutlass.const_expr(group == 0):
                self.scores(maps, shared, work, rows, exponents, steps_done)
            else:
                self.gradient(maps, shared, work, rows, scalars, steps_done)
            steps_done += work.steps()
            tiles_done += 1
            barriers.kv_full.wait(tiles_done)
            more = is_tile(words_of_tile(shared, tiles_done))
        cute.arch.cp_async_bulk_wait_group(0)

    @cute.jit
    def clear_keys(self, shared: Shared, work: Work, thread: Int32, group: cutlass.Constexpr[int]):
        """Writes 0 to keys past the length, which may hold anything, of all tiles of keys.

        Each warpgroup has a barrier at which it waits for the other one, since they do so at two
        places of the text (`Policy.one_place` of the emulator).
        """
        rows = work.band.key_length - work.first_key
        own = cutlass.max(rows - work.rank * self.tile.n, 0)
        other = cutlass.max(rows - (work.rank ^ 1) * self.tile.n, 0)
        tensors.zero_vectors(shared.other_k, other, thread, 2 * WARPGROUP)
        self.clear_past(shared.k, shared.v, own, thread)
        resources.arrive(self.keys_cleared, 1 - group)
        resources.meet(self.keys_cleared, group)

    @cute.jit
    def scores(
        self,
        maps: Maps,
        shared: Shared,
        work: Work,
        rows: Rows,
        exponents: Exponents,
        done: Int32,
    ):
        """Warpgroup 0: computes P of a tile's steps, dV, and half of the CTA's dQ.

        done: the number of steps before.
        """
        tile, barriers, products = self.tile, shared.barriers, self.products()
        thread, _, _ = cute.arch.thread_idx()
        thread = thread % WARPGROUP
        scores_mma, grads_mma = products.scores.tiled(), products.dv.tiled()
        k = scores_mma.make_fragment_A(scores_mma.get_slice(0).partition_A(shared.k))
        scores = cute.make_rmem_tensor(scores_mma.partition_shape_C((tile.n, tile.m)), Float32)
        dv = cute.make_rmem_tensor(grads_mma.partition_shape_C((tile.n, self.value_dim)), Float32)
        dv.fill(0.0)
        own = dataclasses.replace(work, first_key=work.first_key + work.rank * tile.n)
        slices = products.scores.make_slices(tile.n, self.slices[0])
        blocks, before = work.block_count(), (Int32(0), Int32(0))
        step, end = done, done + work.steps()
        if blocks > 0:
            products.scores.load_slices(slices, shared.k, thread)
            self.receive_queries(shared, work, Int32(0), done, thread)
            first = barriers.q_full.use(done).slot
            self.issue_scores(scores, (slices, k), shared.q[None, None, first])
            warpgroup.wait_group(0)
        for member in cutlass.range(work.group, unroll=1):
            for index in cutlass.range(blocks, unroll=1):
                place = self.place(shared, work, (member, index), step, 0)
                use, do_use = self.uses(shared, step)
                is_last, following = step + 1 == end, self.next_index(work, index)
                lse_log2 = self.statistics(shared.lse_log2, use.slot)
                if cutlass.const_expr(self.soft_cap):
                    softmax.cap(scores, exponents.before_cap, self.tile.cap_at_once)
                self.add_bias(own, scores, place, exponents)
                self.mask(own, scores, place)
                p = self.send_probabilities(
                    shared, scores, lse_log2, exponents.scale_log2, (grads_mma, thread)
                )
                if self.padded(work, place.block):
                    resources.meet(self.padding)
                resources.arrive(self.p_ready)
                if not is_last:
                    self.release_reads(barriers.q_empty.at(use))
                barriers.do_full.wait(do_use)
                self.issue_gradient(products.dv, dv, p, shared.dot[None, None, do_use.slot])
                if not is_last:
                    self.receive_queries(shared, work, following, step + 1, thread)
                # The last step computes its scores once more, which spares a branch.
                slot = barriers.q_full.use(cutlass.min(step + 1, end - 1)).slot
                self.issue_scores(scores, (slices, k), shared.q[None, None, slot])
                if cutlass.const_expr(tile.late_dq):
                    dq = self.issue_dq(shared, work, step - 1, 0, step > done)
                    warpgroup.wait_group(3)
                    self.release_early(barriers.do_empty, do_use, is_last)
                    warpgroup.wait_group(0)
                    if step > done:
                        self.add_dq(shared, work, rows, dq, Step(*before, step - 1, Int32(0)))
                    before = (place.member, place.block)
                else:
                    warpgroup.wait_group(1)
                    self.release_early(barriers.do_empty, do_use, is_last)
                    resources.meet(self.ds_ready)
                    dq = self.issue_dq(shared, work, step, 0)
                    warpgroup.wait_group(0)
                    self.add_dq(shared, work, rows, dq, place)
                step += 1
        if blocks > 0:
            self.release_reads(barriers.q_empty.at(end - 1))
        self.meet_if_late()
        if cutlass.const_expr(tile.late_dq):
            self.add_last_dq(shared, work, rows, Step(*before, end - 1, Int32(0)), 0)
        resources.arrive(self.p_ready)
        resources.meet(self.ds_ready)
        self.store(dv, shared, maps.dv, work, end, 0)

    def send_probabilities(
        self,
        shared: Shared,
        scores: cute.Tensor,
        lse_log2: cute.Tensor,
        scale_log2: Float32,
        own: tuple[cute.TiledMma, Int32],
    ) -> cute.Tensor:
        """Warpgroup 0: makes P of scores, and sends what dS is a multiple of to warpgroup 1.

        own: the product whose operand P is, and the thread. Returns P as that operand.
        """
        grads_mma, thread = own
        if not self.soft_cap:
            self.exponentiate(scores, lse_log2, scale_log2)
            self.meet_if_late()
            self.write_message(shared, scores, thread)
            return self.operand(grads_mma, scores)
        slopes = cute.make_rmem_tensor(scores.shape, Float32)
        for i in range(cute.size(scores)):
            slopes[i] = slope_of_cap(scores[i])
        self.exponentiate(scores, lse_log2, scale_log2)
        p = self.operand(grads_mma, scores)
        for i in range(cute.size(scores)):
            scores[i] = scores[i] * slopes[i]
        self.meet_if_late()
        self.write_message(shared, scores, thread)
        return p

    @cute.jit
    def gradient(
        self,
        maps: Maps,
        shared: Shared,
        work: Work,
        rows: Rows,
        scalars: BackwardScalars,
        done: Int32,
    ):
        """Warpgroup 1: computes dS of a tile's steps, dK, half of dQ; done: the steps before it."""
        tile, barriers, products = self.tile, shared.barriers, self.products()
        thread, _, _ = cute.arch.thread_idx()
        thread = thread % WARPGROUP
        scores_mma, grads_mma = products.scores.tiled(), products.dk.tiled()
        v = scores_mma.make_fragment_A(scores_mma.get_slice(0).partition_A(shared.v))
        dp = cute.make_rmem_tensor(scores_mma.partition_shape_C((tile.n, tile.m)), Float32)
        dk = cute.make_rmem_tensor(grads_mma.partition_shape_C((tile.n, self.head_dim)), Float32)
        dk.fill(0.0)
        slices = products.scores.make_slices(tile.n, self.slices[1])
        blocks, before = work.block_count(), (Int32(0), Int32(0))
        step, end = done, done + work.steps()
        if cutlass.const_expr(tile.late_dq):
            resources.arrive(self.ds_ready)  # of the step before the first one
        if blocks > 0:
            products.scores.load_slices(slices, shared.v, thread)
            self.receive_gradients(shared, work, Int32(0), done, thread)
            first = barriers.do_full.use(done).slot
            self.issue_scores(dp, (slices, v), shared.do[None, None, first])
            warpgroup.wait_group(0)
        for member in cutlass.range(work.group, unroll=1):
            for index in cutlass.range(blocks, unroll=1):
                place = self.place(shared, work, (member, index), step, 1)
                use, do_use = self.uses(shared, step)
                is_last, following = step + 1 == end, self.next_index(work, index)
                delta = self.statistics(shared.delta, do_use.slot)
                resources.meet(self.p_ready)
                p = self.read_message(shared, thread, dp)
                self.score_gradient(p, dp, delta)
                if not is_last:
                    self.release_reads(barriers.do_empty.at(do_use))
                barriers.ds_empty.wait_free(step)
                ds = self.write_ds(shared, dp, step, thread)
                resources.meet(self.gradient_meet)
                resources.arrive(self.ds_ready)
                if thread // 32 == 0:
                    self.send(shared, step, work.rank)
                barriers.q_full.wait(use)
                self.issue_gradient(products.dk, dk, ds, shared.qt[None, None, use.slot])
                if cutlass.const_expr(tile.late_dq):
                    dq = self.issue_dq(shared, work, step - 1, 1, step > done)
                else:
                    dq = self.issue_own_dq(shared, work, step, 1)
                    warpgroup.wait_group(1)
                    self.release_early(barriers.q_empty, use, is_last)
                    self.issue_other_dq(shared, dq, step, 1)
                if not is_last:
                    self.receive_gradients(shared, work, following, step + 1, thread)
                slot = barriers.do_full.use(cutlass.min(step + 1, end - 1)).slot
                self.issue_scores(dp, (slices, v), shared.do[None, None, slot])
                if cutlass.const_expr(tile.late_dq):
                    warpgroup.wait_group(3)
                    self.release_early(barriers.q_empty, use, is_last)
                    warpgroup.wait_group(1)
                    if step > done:
                        self.add_dq(shared, work, rows, dq, Step(*before, step - 1, Int32(1)))
                    before = (place.member, place.block)
                else:
                    warpgroup.wait_group(1)
                    self.add_dq(shared, work, rows, dq, place)
                warpgroup.wait_group(0)
                step += 1
        if blocks > 0:
            self.release_reads(barriers.do_empty.at(end - 1))
        if cutlass.const_expr(tile.late_dq):
            self.add_last_dq(shared, work, rows, Step(*before, end - 1, Int32(1)), 1)
        self.scale(dk, scalars.scale)
        resources.meet(self.p_ready)
        resources.arrive(self.ds_ready)
        self.store(dk, shared, maps.dk, work, end, 1)

    @cute.jit
    def release_early(self, empty: Ring, use: Use, is_last: cutlass.Boolean):
        """Releases Q or dO of a step, but not the last, in whose place gradients are staged."""
        if not is_last:
            self.release(empty.at(use))

    @cute.jit
    def add_last_dq(
        self, shared: Shared, work: Work, rows: Rows, place: Step, group: cutlass.Constexpr[int]
    ):
        """Computes and adds what is left of dQ after the last step; Note [late dQ]."""
        if work.steps() > 0:
            dq = self.issue_dq(shared, work, place.index, group)
            warpgroup.wait_group(0)
            self.add_dq(shared, work, rows, dq, place)

    def meet_if_late(self):
        """Warpgroup 0: waits until dS of the step before is there, and its P has been read."""
        if self.tile.late_dq:
            resources.meet(self.ds_ready)

    @cute.jit
    def store(
        self,
        acc: cute.Tensor,
        shared: Shared,
        result: cute.CopyAtom,
        work: Work,
        end: Int32,
        group: cutlass.Constexpr[int],
    ):
        """Stores dV or dK of the CTA's keys through the memory of the last step's dO or Q.

        end: the number of steps with this tile's.
        """
        of_group = ((self.scores_meet, "do", self.products().dv),)
        of_group = (*of_group, (self.gradient_meet, "q", self.products().dk))[group]
        meeting, rows, product = of_group
        ring, empty = getattr(shared, rows), getattr(shared.barriers, f"{rows}_empty")
        thread, _, _ = cute.arch.thread_idx()
        thread = thread % WARPGROUP
        steps = work.steps()
        use = empty.use(cutlass.select_(steps > 0, end - 1, end))
        if steps > 0:
            self.release(shared.barriers.kv_empty.first)
        else:
            resources.meet(meeting)  # The store of the tile before has read its slot.
        staging = ring[None, None, use.slot]
        values = cute.make_rmem_tensor(acc.shape, self.dtype)
        wgmma.round_fragment(acc, values)
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype)
        copy = cute.make_tiled_copy_C(atom, product.tiled()).get_slice(thread)
        cute.copy(atom, copy.retile(values), copy.partition_D(staging))
        cute.arch.fence_proxy("async.shared", space="cta")
        resources.meet(meeting)
        if cute.arch.make_warp_uniform(thread // 32) == 0:
            kv = tensors.bthd_coordinates()[None, None, work.kv_head, work.batch]
            place = (work.tile * 2 + work.rank, 0)
            target = cute.local_tile(kv, (self.tile.n, product.n), place)
            tensors.tma_store(result, staging, target)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        if steps > 0:
            self.release(empty.at(use))
        else:
            self.release(shared.barriers.kv_empty.first)


def source(key: KernelKey) -> KernelSource:
    """Returns the main backward kernel of a key, with its launch."""
    kernel = PairBackward(key)
    tile = kernel.tile
    return backward_source(kernel, key, {"m": tile.m, "n": tile.keys, "stages": tile.stages})
