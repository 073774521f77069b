"""Hopper's main backward kernel for wide heads: a pair of CTAs computes dK, dV of one key tile.

The products are those of backward.py. A CTA has half of the tile's keys, n = 64, and its two
warpgroups have different products, since a warpgroup's registers hold one accumulator of 64 x 256:

    load warp        loads K, V, and of the other CTA's keys the columns of its own dQ; then Q,
                     lse_log2 and dO, delta of every step into two rings
    order warp       opens the turns to add dQ where their order is fixed
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
the same buffer two steps later: the copy has then read it, and the other CTA's buffer is free. It
waits for the last ones before it ends, so nothing comes for a CTA that is over. (FlashAttention-4
exchanges dS in this way between two CTAs of Blackwell.)

Note [messages]: P goes from warpgroup 0 to warpgroup 1 thread by thread, since both have the same
fragment of it; unrounded, because dS from the rounded P was outside our tolerance (fp16). One
buffer is enough: warpgroup 0 writes P(i + 1) after it has met `ds_ready` of step i, before which
warpgroup 1 has read P(i). Warpgroup 1 writes dS(i + 2) over dS(i) after `p_ready` of step i + 1,
before which warpgroup 0's dQ(i) is complete. After the last step both meet once more in the same
way: K and V have then been read, and dV and dK take their memory.
"""

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warp, warpgroup

from fa4_jax.key import KernelKey
from kernels.common import ptx, resources, tensors
from kernels.common.backward_schedule import StartIndex, Work
from kernels.common.hosts import backward_source
from kernels.common.resources import Maps, Shared
from kernels.common.softmax import slope_of_cap
from kernels.common.state import Exponents, Rows
from kernels.description import NamedBarrier
from kernels.interface import BackwardScalars
from kernels.kernel_source import KernelSource
from kernels.sm90 import softmax, wgmma
from kernels.sm90.backward import Backward
from kernels.sm90.backward_data import Step
from kernels.sm90.backward_description import SCORE_BUFFERS
from kernels.sm90.backward_mask import first_query
from kernels.sm90.tiles import WARPGROUP

_VECTOR = 4  # values of a message that a thread writes at once


class PairBackward(Backward):
    """The kernel of one key; attributes are compile-time constants."""

    def __init__(self, key: KernelKey):
        super().__init__(key)
        named = self.description.named_barrier
        self.p_ready, self.ds_ready = named("p_ready"), named("ds_ready")
        self.scores_meet, self.gradient_meet = named("scores_meet"), named("gradient_meet")

    def draws_ticket(self) -> cutlass.Boolean:
        """Whether the CTA draws a ticket: the even one does, for the pair."""
        return cute.arch.block_idx_in_cluster() == 0

    def start(self, shared: Shared) -> StartIndex:
        """Returns the pair's place in the order of work, and the CTA's rank in it."""
        cta, _, _ = cute.arch.block_idx()
        rank = cta % 2
        if self.deterministic:
            return StartIndex(cute.arch.make_warp_uniform(ptx.load_of_even(shared.ticket)), rank)
        return StartIndex(cta // 2, rank)

    @cute.jit
    def load_keys(self, maps: Maps, shared: Shared, work: Work, kv: cute.Tensor):
        """Loads K, V of the CTA's keys and its columns of the other's; kv: coordinates."""
        tile, kv_full = self.tile, shared.barriers.kv_full.first
        part, own, other = (
            self.head_dim // 2,
            work.tile * 2 + work.rank,
            work.tile * 2 + (work.rank ^ 1),
        )
        columns = self.head_dim + self.value_dim + part
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(kv_full, tile.n * columns * 2)
        own_k = cute.local_tile(kv, (tile.n, self.head_dim), (own, 0))
        own_v = cute.local_tile(kv, (tile.n, self.value_dim), (own, 0))
        tensors.tma_load(maps.k, own_k, shared.k, kv_full)
        tensors.tma_load(maps.v, own_v, shared.v, kv_full)
        other_tile = cute.local_tile(kv, (tile.n, part), (other, work.rank))
        tensors.tma_load(maps.other_k, other_tile, shared.other_k, kv_full)

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
        """MMA warpgroups: each has its products, and stores dV or dK."""
        thread, _, _ = cute.arch.thread_idx()
        thread = thread - WARPGROUP
        if work.steps() > 0:
            shared.barriers.kv_full.wait(0)
            if work.padded_keys:
                self.clear_keys(shared, work, thread)
        if cute.arch.make_warp_uniform(thread // WARPGROUP) == 0:
            self.scores(maps, shared, work, rows, exponents)
        else:
            self.gradient(maps, shared, work, rows, scalars)

    @cute.jit
    def clear_keys(self, shared: Shared, work: Work, thread: Int32):
        """Writes 0 to keys past the length, which may hold anything, of all tiles of keys."""
        rows = work.band.key_length - work.first_key
        own = cutlass.max(rows - work.rank * self.tile.n, 0)
        other = cutlass.max(rows - (work.rank ^ 1) * self.tile.n, 0)
        tensors.zero_rows(shared.other_k, other, thread, 2 * WARPGROUP)
        self.clear_padding(shared.k, shared.v, own, thread)

    @cute.jit
    def scores(self, maps: Maps, shared: Shared, work: Work, rows: Rows, exponents: Exponents):
        """Warpgroup 0: computes P of every step, dV, and half of the CTA's dQ."""
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
        steps = work.steps()
        if steps > 0:
            products.scores.load_slices(slices, shared.k, thread)
            self.receive_queries(shared, work, Int32(0), thread)
            self.issue_scores(scores, (slices, k), shared.q[None, None, 0])
            warpgroup.wait_group(0)
        for step in cutlass.range(steps, unroll=1):
            place, (use, do_use) = self.place(shared, work, step, 0), self.uses(shared, step)
            lse_log2 = self.statistics(shared.lse_log2, use.slot)
            if cutlass.const_expr(self.soft_cap):
                softmax.cap(scores, exponents.before_cap, self.tile.cap_at_once)
            self.mask(own, scores, place)
            if cutlass.const_expr(self.soft_cap):
                slopes = cute.make_rmem_tensor(scores.shape, Float32)
                for i in cutlass.range_constexpr(cute.size(scores)):
                    slopes[i] = slope_of_cap(scores[i])
                self.exponentiate(scores, lse_log2, exponents.scale_log2)
                p = self.operand(grads_mma, scores)
                for i in cutlass.range_constexpr(cute.size(scores)):
                    scores[i] = scores[i] * slopes[i]
                self.write_message(shared, scores, thread)
            else:
                self.exponentiate(scores, lse_log2, exponents.scale_log2)
                self.write_message(shared, scores, thread)
                p = self.operand(grads_mma, scores)
            if self.padded(work, place.block):
                resources.meet(self.padding)
            resources.arrive(self.p_ready)
            self.release_reads(barriers.q_empty.at(use))
            barriers.do_full.wait(do_use)
            self.issue_gradient(products.dv, dv, p, shared.dot[None, None, do_use.slot])
            if step + 1 < steps:
                self.receive_queries(shared, work, step + 1, thread)
            # The last step computes its scores once more, which spares a branch.
            following = barriers.q_full.use(cutlass.min(step + 1, steps - 1)).slot
            self.issue_scores(scores, (slices, k), shared.q[None, None, following])
            warpgroup.wait_group(1)
            self.release(barriers.do_empty.at(do_use))
            resources.meet(self.ds_ready)
            dq = self.issue_own_dq(shared, work, step, 0)
            self.issue_other_dq(shared, dq, step, 0)
            warpgroup.wait_group(0)
            self.release_dq(shared, work, step)
            self.query_gradient.add(shared, work, rows, dq, place)
        resources.arrive(self.p_ready)
        resources.meet(self.ds_ready)
        self.store(dv, shared.v, maps.dv, work, products.dv, self.scores_meet)

    @cute.jit
    def gradient(
        self, maps: Maps, shared: Shared, work: Work, rows: Rows, scalars: BackwardScalars
    ):
        """Warpgroup 1: computes dS of every step, dK, and half of the CTA's dQ."""
        tile, barriers, products = self.tile, shared.barriers, self.products()
        thread, _, _ = cute.arch.thread_idx()
        thread = thread % WARPGROUP
        scores_mma, grads_mma = products.scores.tiled(), products.dk.tiled()
        v = scores_mma.make_fragment_A(scores_mma.get_slice(0).partition_A(shared.v))
        dp = cute.make_rmem_tensor(scores_mma.partition_shape_C((tile.n, tile.m)), Float32)
        dk = cute.make_rmem_tensor(grads_mma.partition_shape_C((tile.n, self.head_dim)), Float32)
        dk.fill(0.0)
        slices = products.scores.make_slices(tile.n, self.slices[1])
        steps = work.steps()
        if steps > 0:
            products.scores.load_slices(slices, shared.v, thread)
            self.receive_gradients(shared, work, Int32(0), thread)
            self.issue_scores(dp, (slices, v), shared.do[None, None, 0])
            warpgroup.wait_group(0)
        for step in cutlass.range(steps, unroll=1):
            place, (use, do_use) = self.place(shared, work, step, 1), self.uses(shared, step)
            delta = self.statistics(shared.delta, do_use.slot)
            resources.meet(self.p_ready)
            p = self.read_message(shared, thread, dp)
            self.score_gradient(p, dp, delta)
            self.release_reads(barriers.do_empty.at(do_use))
            barriers.ds_empty.wait_free(step)
            ds = self.write_ds(shared, dp, step, thread)
            resources.meet(self.gradient_meet)
            resources.arrive(self.ds_ready)
            if thread // 32 == 0:
                self.send(shared, step, work.rank)
            barriers.q_full.wait(use)
            self.issue_gradient(products.dk, dk, ds, shared.qt[None, None, use.slot])
            dq = self.issue_own_dq(shared, work, step, 1)
            warpgroup.wait_group(1)
            self.release(barriers.q_empty.at(use))
            self.issue_other_dq(shared, dq, step, 1)
            if step + 1 < steps:
                self.receive_gradients(shared, work, step + 1, thread)
            following = barriers.do_full.use(cutlass.min(step + 1, steps - 1)).slot
            self.issue_scores(dp, (slices, v), shared.do[None, None, following])
            warpgroup.wait_group(1)
            self.release_dq(shared, work, step)
            self.query_gradient.add(shared, work, rows, dq, place)
            warpgroup.wait_group(0)
        for element in cutlass.range_constexpr(cute.size(dk)):
            dk[element] = dk[element] * scalars.scale
        resources.meet(self.p_ready)
        resources.arrive(self.ds_ready)
        self.store(dk, shared.k, maps.dk, work, products.dk, self.gradient_meet)
        for last in range(SCORE_BUFFERS):
            barriers.ds_empty.wait_free(steps + last)

    def issue_scores(
        self,
        scores: cute.Tensor,
        keys: tuple[cute.Tensor | None, cute.Tensor],
        rows: cute.Tensor,
    ):
        """Issues S^T or dP^T: (n, m), of K or V and a step's rows (m, d).

        keys: slices of operand A that registers hold, and operand A in shared memory.
        """
        slices, a = keys
        product = self.products().scores
        mma = product.tiled()
        b = mma.make_fragment_B(mma.get_slice(0).partition_B(rows))
        product.issue_with(slices, scores, a, b)

    def issue_gradient(
        self, product: wgmma.Wgmma, acc: cute.Tensor, scores: cute.Tensor, rows: cute.Tensor
    ):
        """Issues dV or dK: (n, d), of P or dS in registers and a step's transposed (d, m)."""
        mma = product.tiled()
        b = mma.make_fragment_B(mma.get_slice(0).partition_B(rows))
        product.issue(acc, scores, b, accumulate=True)

    def place(self, shared: Shared, work: Work, step: Int32, group: int) -> Step:
        """Returns what a step is for a warpgroup."""
        blocks = work.block_count()
        member = step // blocks
        block, hidden = self.visit(shared, work, member, step - member * blocks)
        return Step(member, block, step, Int32(group), hidden, self.words_of(shared, step))

    def padded(self, work: Work, block: Int32) -> cutlass.Boolean:
        """Whether a query block holds rows past the length that TMA reads."""
        return work.padded_queries & ((block + 1) * self.tile.m > work.band.query_length)

    @cute.jit
    def receive_queries(self, shared: Shared, work: Work, step: Int32, thread: Int32):
        """Warpgroup 0: waits for Q of a step, and writes 0 to rows past the length."""
        use, block = shared.barriers.q_full.use(step), self.place(shared, work, step, 0).block
        shared.barriers.q_full.wait(use)
        if self.padded(work, block):
            first_row = work.band.query_length - block * self.tile.m
            self.clear_rows(shared.q[None, None, use.slot], first_row, thread)
            resources.meet(self.scores_meet)

    @cute.jit
    def receive_gradients(self, shared: Shared, work: Work, step: Int32, thread: Int32):
        """Warpgroup 1: waits for dO of a step, and writes 0 to rows past the length.

        Warpgroup 0 waits for that before it publishes P of the step: so it has passed `padding` of
        one step before warpgroup 1 arrives there for another.
        """
        use, block = shared.barriers.do_full.use(step), self.place(shared, work, step, 1).block
        shared.barriers.do_full.wait(use)
        if self.padded(work, block):
            first_row = work.band.query_length - block * self.tile.m
            self.clear_rows(shared.do[None, None, use.slot], first_row, thread)
            resources.meet(self.gradient_meet)
            resources.arrive(self.padding)

    def clear_rows(self, tile: cute.Tensor, first_row: Int32, thread: Int32):
        """Writes 0 to rows of a tile by one warpgroup, which meets afterwards."""
        tensors.zero_rows(tile, first_row, thread, WARPGROUP)
        cute.arch.fence_proxy("async.shared", space="cta")

    def statistics(self, tensor: cute.Tensor, slot: Int32) -> cute.Tensor:
        """Returns where this thread's row statistics are in shared memory: (2, m / 8).

        Here shuffles cost more than loads: 1 to 4 % of the kernel's time (docs/hopper.md).
        """
        pointer = tensor[None, slot].iterator + first_query()
        return cute.make_tensor(pointer, cute.make_layout((2, self.tile.m // 8), stride=(1, 8)))

    def of_columns(self, statistics: cute.Tensor, pair: int) -> list[Float32]:
        """Returns the statistics of a pair of columns of this thread's fragment."""
        values = cute.make_rmem_tensor((2,), Float32)
        cute.autovec_copy(statistics[None, pair], values)
        return [values[0], values[1]]

    def release_reads(self, empty: cute.Pointer):
        """Arrives, once per warp: all its lanes have read the slot's row statistics."""
        cute.arch.sync_warp()
        self.release(empty)

    @cute.jit
    def write_message(self, shared: Shared, p: cute.Tensor, thread: Int32):
        """Publishes a thread's fragment of P; Note [messages]."""
        registers, message = self.message(shared, p, thread)
        for vector in cutlass.range_constexpr(cute.size(registers, mode=[1])):
            cute.autovec_copy(registers[None, vector], message[None, vector])

    @cute.jit
    def read_message(self, shared: Shared, thread: Int32, like: cute.Tensor) -> cute.Tensor:
        """Returns the fragment of P that warpgroup 0 has published; Note [messages]."""
        p = cute.make_rmem_tensor(like.shape, Float32)
        registers, message = self.message(shared, p, thread)
        for vector in cutlass.range_constexpr(cute.size(registers, mode=[1])):
            cute.autovec_copy(message[None, vector], registers[None, vector])
        return p

    def message(
        self, shared: Shared, p: cute.Tensor, thread: Int32
    ) -> tuple[cute.Tensor, cute.Tensor]:
        """Returns a fragment of P and the thread's place for it in shared memory, by vectors."""
        shape = (_VECTOR, cute.size(p) // _VECTOR)
        place = cute.make_layout(shape, stride=(1, WARPGROUP * _VECTOR))
        memory = cute.make_tensor(shared.p.iterator + thread * _VECTOR, place)
        return cute.make_tensor(p.iterator, cute.make_layout(shape)), memory

    def write_ds(self, shared: Shared, ds: cute.Tensor, step: Int32, thread: Int32) -> cute.Tensor:
        """Rounds dS, writes it to shared memory, and returns it as operand A of dK."""
        products = self.products()
        rounded = cute.make_rmem_tensor(ds.shape, self.dtype)
        wgmma.round_fragment(ds, rounded)
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype)
        copy = cute.make_tiled_copy_C(atom, products.scores.tiled()).get_slice(thread)
        target = shared.ds[None, None, step % SCORE_BUFFERS]
        cute.copy(atom, copy.retile(rounded), copy.partition_D(target))
        cute.arch.fence_proxy("async.shared", space="cta")
        shape = products.dk.tiled().partition_shape_A((self.tile.n, self.tile.m))
        return cute.make_tensor(rounded.iterator, cute.make_layout(shape))

    @cute.jit
    def issue_own_dq(
        self, shared: Shared, work: Work, step: Int32, group: cutlass.Constexpr[int]
    ) -> cute.Tensor:
        """Issues a warpgroup's columns of a step's dQ, from the own keys."""
        tile, product, part = self.tile, self.products().dq, self.head_dim // self.tile.ctas
        mma = product.tiled()
        mma_slice = mma.get_slice(group * WARPGROUP)
        dq = cute.make_rmem_tensor(mma.partition_shape_C((tile.m, part)), Float32)
        ds = shared.dst[None, None, step % SCORE_BUFFERS]
        k = cute.local_tile(shared.kt, (part, tile.n), (work.rank, 0))
        ds = mma.make_fragment_A(mma_slice.partition_A(ds))
        k = mma.make_fragment_B(mma_slice.partition_B(k))
        product.issue(dq, ds, k, accumulate=False)
        return dq

    @cute.jit
    def issue_other_dq(
        self, shared: Shared, dq: cute.Tensor, step: Int32, group: cutlass.Constexpr[int]
    ):
        """Issues what the other CTA's keys add to the same columns, when its dS has come."""
        product = self.products().dq
        mma = product.tiled()
        mma_slice = mma.get_slice(group * WARPGROUP)
        ds = shared.other_dst[None, None, step % SCORE_BUFFERS]
        ds = mma.make_fragment_A(mma_slice.partition_A(ds))
        k = mma.make_fragment_B(mma_slice.partition_B(shared.other_kt))
        shared.barriers.ds_full.wait(step)
        product.issue(dq, ds, k, accumulate=True)

    @cute.jit
    def send(self, shared: Shared, step: Int32, rank: Int32):
        """Copies a step's dS to the other CTA; one warp calls it. Note [exchange]."""
        buffer, full = step % SCORE_BUFFERS, shared.barriers.ds_full.at(step)
        num_bytes = self.tile.n * self.tile.m * 2
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, num_bytes)
            other, own = (ds[None, None, buffer].iterator for ds in (shared.other_ds, shared.ds))
            ptx.bulk_send(other, own, num_bytes, full, rank ^ 1)

    @cute.jit
    def release_dq(self, shared: Shared, work: Work, step: Int32):
        """Tells the other CTA, once per warp, that its dS of a step has been used."""
        with cute.arch.elect_one():
            ptx.arrive_in(shared.barriers.ds_empty.at(step), work.rank ^ 1)

    @cute.jit
    def store(
        self,
        acc: cute.Tensor,
        staging: cute.Tensor,
        result: cute.CopyAtom,
        work: Work,
        product: cutlass.Constexpr[wgmma.Wgmma],
        meeting: cutlass.Constexpr[NamedBarrier],
    ):
        """Stores dK or dV of the CTA's keys by way of the memory of K or V."""
        thread, _, _ = cute.arch.thread_idx()
        thread = thread % WARPGROUP
        values = cute.make_rmem_tensor(acc.shape, self.dtype)
        wgmma.round_fragment(acc, values)
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype)
        copy = cute.make_tiled_copy_C(atom, product.tiled()).get_slice(thread)
        cute.copy(atom, copy.retile(values), copy.partition_D(staging))
        cute.arch.fence_proxy("async.shared", space="cta")
        resources.meet(meeting)
        if thread // 32 == 0:
            kv = tensors.bthd_coordinates()[None, None, work.kv_head, work.batch]
            place = (work.tile * 2 + work.rank, 0)
            target = cute.local_tile(kv, (self.tile.n, product.n), place)
            tensors.tma_store(result, staging, target)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0)


def source(key: KernelKey) -> KernelSource:
    """Returns the main backward kernel of a key, with its launch."""
    kernel = PairBackward(key)
    tile = kernel.tile
    return backward_source(kernel, key, {"m": tile.m, "n": tile.keys, "stages": tile.stages})
