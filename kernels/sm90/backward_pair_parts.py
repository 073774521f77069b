"""What a pair of CTAs of Hopper's backward does in a step; backward_pair.py puts it in order.

Its notes say why messages and the exchange of dS are safe.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warp

from fa4_jax.key import KernelKey
from kernels.common import ptx, resources, tensors
from kernels.common.backward_schedule import Work
from kernels.common.resources import Shared
from kernels.common.state import Rows
from kernels.common.tensors import INT32
from kernels.sm90 import wgmma
from kernels.sm90.backward_data import Step
from kernels.sm90.backward_description import SCORE_BUFFERS
from kernels.sm90.backward_mask import first_query
from kernels.sm90.backward_parts import BackwardParts
from kernels.sm90.tiles import WARPGROUP

_VECTOR = 4  # values of a message that a thread writes at once


class PairParts(BackwardParts):
    """The parts of a step; attributes are compile-time constants."""

    def __init__(self, key: KernelKey):
        super().__init__(key)
        named = self.description.named_barrier
        self.p_ready, self.ds_ready = named("p_ready"), named("ds_ready")
        self.scores_meet, self.gradient_meet = named("scores_meet"), named("gradient_meet")
        self.keys_cleared = named("keys_cleared")

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

    def place(
        self, shared: Shared, work: Work, of_tile: tuple[Int32, Int32], step: Int32, group: int
    ) -> Step:
        """Returns what a step is for a warpgroup.

        of_tile: (query head of the group, index of the block among those of a head).
        """
        member, index = of_tile
        block, hidden = self.visit(shared, work, index, step)
        return Step(member, block, step, Int32(group), hidden, self.words_of(shared, step))

    def next_index(self, work: Work, index: Int32) -> Int32:
        """Returns the index of the next step's block among those of its head."""
        return INT32.select(index + 1 < work.block_count(), index + 1, Int32(0))

    def padded(self, work: Work, block: Int32) -> cutlass.Boolean:
        """Whether a query block holds rows past the length that TMA reads."""
        return work.padded_queries & ((block + 1) * self.tile.m > work.band.query_length)

    @cute.jit
    def receive_queries(self, shared: Shared, work: Work, index: Int32, step: Int32, thread: Int32):
        """Warpgroup 0: waits for Q of a step, and writes 0 to rows past the length."""
        use, (block, _) = shared.barriers.q_full.use(step), self.visit(shared, work, index, step)
        shared.barriers.q_full.wait(use)
        if self.padded(work, block):
            first_row = work.band.query_length - block * self.tile.m
            self.clear_rows(shared.q[None, None, use.slot], first_row, thread)
            resources.meet(self.scores_meet)

    @cute.jit
    def receive_gradients(
        self, shared: Shared, work: Work, index: Int32, step: Int32, thread: Int32
    ):
        """Warpgroup 1: waits for dO of a step, and writes 0 to rows past the length.

        Warpgroup 0 waits for that before it publishes P of the step: so it has passed `padding` of
        one step before warpgroup 1 arrives there for another.
        """
        use = shared.barriers.do_full.use(step)
        block, _ = self.visit(shared, work, index, step)
        shared.barriers.do_full.wait(use)
        if self.padded(work, block):
            first_row = work.band.query_length - block * self.tile.m
            self.clear_rows(shared.do[None, None, use.slot], first_row, thread)
            resources.meet(self.gradient_meet)
            resources.arrive(self.padding)

    def clear_rows(self, tile: cute.Tensor, first_row: Int32, thread: Int32):
        """Writes 0 to rows of a tile by one warpgroup, which meets afterwards."""
        tensors.zero_vectors(tile, first_row, thread, WARPGROUP)
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

    def issue_dq(
        self,
        shared: Shared,
        work: Work,
        step: Int32,
        group: cutlass.Constexpr[int],
        is_real: cutlass.Boolean | bool = True,
    ) -> cute.Tensor:
        """Issues a warpgroup's columns of a step's dQ, from the keys of both CTAs.

        is_real: not that of no step; Note [late dQ].
        """
        dq = self.issue_own_dq(shared, work, step, group)
        self.issue_other_dq(shared, dq, step, group, is_real)
        return dq

    @cute.jit
    def issue_own_dq(
        self, shared: Shared, work: Work, step: Int32, group: cutlass.Constexpr[int]
    ) -> cute.Tensor:
        """Issues a warpgroup's columns of a step's dQ, from the own keys."""
        tile, product, part = self.tile, self.products().dq, self.head_dim // self.tile.ctas
        mma = product.tiled()
        mma_slice = mma.get_slice(group * WARPGROUP)
        dq = cute.make_rmem_tensor(mma.partition_shape_C((tile.m, part)), Float32)
        ds = shared.dst[None, None, step & 1 if tile.late_dq else step % SCORE_BUFFERS]
        k = cute.local_tile(shared.kt, (part, tile.n), (work.rank, 0))
        ds = mma.make_fragment_A(mma_slice.partition_A(ds))
        k = mma.make_fragment_B(mma_slice.partition_B(k))
        product.issue(dq, ds, k, accumulate=False)
        return dq

    @cute.jit
    def issue_other_dq(
        self,
        shared: Shared,
        dq: cute.Tensor,
        step: Int32,
        group: cutlass.Constexpr[int],
        is_real: cutlass.Boolean | bool = True,
    ):
        """Issues what the other CTA's keys add to the same columns, when its dS has come."""
        product = self.products().dq
        mma = product.tiled()
        mma_slice = mma.get_slice(group * WARPGROUP)
        if cutlass.const_expr(self.tile.late_dq):
            # Of no step, before the first one, the CTA's own memory: the other one writes into its.
            own, is_real = step & 1, cutlass.Boolean(is_real)
            buffer = cutlass.select_(is_real, own + SCORE_BUFFERS, own)
            ds = shared.dst[None, None, Int32(buffer)]
        else:
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
            if cutlass.const_expr(self.tile.late_dq):
                other = shared.ds[None, None, SCORE_BUFFERS + buffer].iterator
            else:
                other = shared.other_ds[None, None, buffer].iterator
            own = shared.ds[None, None, buffer].iterator
            ptx.bulk_send(other, own, num_bytes, full, rank ^ 1)

    @cute.jit
    def add_dq(self, shared: Shared, work: Work, rows: Rows, dq: cute.Tensor, place: Step):
        """Adds a warpgroup's columns of a step's dQ, whose products are complete."""
        self.release_dq(shared, work, place.index)
        self.query_gradient.add(shared, work, rows, dq, place)

    @cute.jit
    def release_dq(self, shared: Shared, work: Work, step: Int32):
        """Tells the other CTA, once per warp, that its dS of a step has been used."""
        with cute.arch.elect_one():
            ptx.arrive_in(shared.barriers.ds_empty.at(step), work.rank ^ 1)
