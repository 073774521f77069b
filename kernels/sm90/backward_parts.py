"""What a step of Hopper's backward does, in one CTA as in a pair: loads, masks, P and dS.

backward.py and backward_pair.py put it in order.
"""

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warp

from fa4_jax.key import KernelKey
from kernels.common import launches, ptx, resources, tensors
from kernels.common.backward_ranges import NOTHING, make_walk
from kernels.common.backward_schedule import BackwardShape, Work
from kernels.common.hosts import BackwardHost
from kernels.common.resources import Maps, Shared
from kernels.common.ring import Use
from kernels.common.softmax import exp2
from kernels.common.state import Exponents, Rows
from kernels.common.tensors import INT32
from kernels.sm90 import backward_mask, softmax, wgmma
from kernels.sm90.backward_bias import StepBias
from kernels.sm90.backward_data import Products, Step, make_products
from kernels.sm90.backward_description import of_key
from kernels.sm90.backward_dq import QueryGradient
from kernels.sm90.tiles import BACKWARD_TILES, WARPGROUP, backward_row_bytes


class BackwardParts(BackwardHost):
    """The parts of a step; attributes are compile-time constants."""

    def __init__(self, key: KernelKey):
        self.dtype = tensors.TYPES[key.dtype]
        self.head_dim, self.value_dim = key.head_dim, key.value_dim
        self.band, self.ranges = key.band, key.ranges
        self.soft_cap = self.reads_cap = key.soft_cap
        self.reads_mask = key.reads_mask
        self.deterministic, self.bias = key.deterministic, key.bias
        self.pairwise = key.pairwise_bias
        tile = BACKWARD_TILES[key.head_dim, key.value_dim]
        self.tile = tile.of_kernel(key.deterministic, key.soft_cap)
        self.slices = self.tile.slices(key.ranges, key.soft_cap, key.bias)
        self.description = of_key(key)
        self.shape = BackwardShape(
            m=self.tile.m,
            n=self.tile.keys,
            row_bytes=backward_row_bytes(key.head_dim, key.value_dim),
            l2_bytes=self.tile.l2_bytes(key.band, key.ranges, key.deterministic),
            least_heads=self.tile.least_heads(key.band, key.deterministic),
            band=key.band,
            batches_together=key.bias,
        )
        self.query_gradient = QueryGradient(self.tile, key.head_dim, key.band, key.deterministic)
        self.counters = launches.counters_of(key.deterministic, self.description.division)
        self.padding = self.description.named_barrier("padding")

    @cute.jit
    def load(self, maps: Maps, shared: Shared, work: Work, rows: Rows, steps_done: Int32 | int = 0):
        """Load warp: loads Q, lse_log2 and dO, delta of every step.

        steps_done: of the CTA's tiles before.
        """
        tile, dims = self.tile, (self.head_dim, self.value_dim)
        coordinates = tensors.bthd_coordinates()
        steps, walk = work.block_count(), make_walk(work.visits)
        for of_tile in cutlass.range(steps * work.group, unroll=1):
            member, step = of_tile // steps, steps_done + of_tile
            block = self.query_gradient.query_block(work, of_tile - member * steps, walk)
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
    def clear_padding(self, a: cute.Tensor, b: cute.Tensor, first_row: Int32, thread: Int32):
        """Writes 0 to the rows past the length of both tiles; the MMA warps meet afterwards."""
        self.clear_past(a, b, first_row, thread)
        resources.meet(self.padding)

    def clear_past(self, a: cute.Tensor, b: cute.Tensor, first_row: Int32, thread: Int32):
        """Writes 0 to the rows past the length, which may hold anything, of both tiles."""
        threads = self.tile.mma_warpgroups * WARPGROUP
        tensors.zero_vectors(a, first_row, thread, threads)
        tensors.zero_vectors(b, first_row, thread, threads)
        cute.arch.fence_proxy("async.shared", space="cta")

    def products(self) -> Products:
        """Returns the products, made anew: see `Wgmma.tiled`."""
        return make_products(self.dtype, self.head_dim, self.value_dim, self.tile)

    def visit(
        self, shared: Shared, work: Work, index: Int32, step: Int32
    ) -> tuple[Int32, Int32 | int]:
        """Returns a step's query block, the index-th of its head, and what ranges hide in it.

        With ranges it waits for the step's Q.
        """
        if not self.ranges:
            return self.query_gradient.query_block(work, index), NOTHING
        use = shared.barriers.q_full.use(step)
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

    def to_shared(self, values: cute.Tensor, staging: cute.Tensor, thread: Int32):
        """Rounds a score fragment to the storage type and writes it to a (n, m) tile."""
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype)
        copy = cute.make_tiled_copy_C(atom, self.products().scores.tiled())
        copy = copy.get_slice(thread)
        rounded = cute.make_rmem_tensor(values.shape, self.dtype)
        wgmma.round_fragment(values, rounded)
        cute.copy(atom, copy.retile(rounded), copy.partition_D(staging))

    def mask(self, work: Work, scores: cute.Tensor, place: Step):
        """Sets scores of pairs that do not see each other to -inf."""
        backward_mask.mask_band(work, scores, place, self.tile.m)
        if self.ranges:
            backward_mask.mask_ranges(work, scores, place, self.tile.m)

    def step_bias(self, work: Work, place: Step) -> StepBias:
        """Returns what a step's scores get, of a call with a bias."""
        return StepBias(work.bias, work, place, self.tile.m, self.tile.n, self.dtype)

    @property
    def delta_after_bias(self) -> bool:
        """Whether delta is loaded after a step's bias, whose pairs take its registers."""
        return self.bias and self.tile.m > 64

    @property
    def stages_bias(self) -> bool:
        """Whether a warp copies pairs of a bias to where its dS goes later."""
        return self.bias and self.pairwise and self.tile.persistent

    def copy_bias(self, shared: Shared, work: Work, place: Step):
        """Starts to copy a step's pairs of a bias."""
        self.step_bias(work, place).start(shared.ds[None, None, place.index & 1])

    @cute.jit
    def copy_first_bias(self, shared: Shared, work: Work, place: Step):
        """Starts to copy the pairs of a tile's first step; place: without its block."""
        if cutlass.const_expr(self.stages_bias):
            if work.block_count() > 0:
                block = self.query_gradient.query_block(work, Int32(0))
                self.copy_bias(shared, work, dataclasses.replace(place, block=block))

    @cute.jit
    def copy_next_bias(self, shared: Shared, work: Work, place: Step):
        """Starts to copy the pairs of the step after this one, which has met at `scores_ready`.

        All warps' products of the step before have read the other buffer of dS.
        """
        if cutlass.const_expr(self.stages_bias):
            following = self.step_after(work, place)
            if following.member < work.group:
                self.copy_bias(shared, work, following)

    def step_after(self, work: Work, place: Step) -> Step:
        """Returns the next step in a fixed order, or one of a member past the last.

        Kernels with a bias have no other order.
        """
        blocks, ends = work.blocks, place.block == work.blocks.begin
        block = INT32.select(ends, blocks.end - 1, place.block - 1)
        member = place.member + INT32.select(ends, Int32(1), Int32(0))
        return dataclasses.replace(place, member=member, block=block, index=place.index + 1)

    def add_bias(
        self,
        work: Work,
        scores: cute.Tensor,
        place: Step,
        exponents: Exponents,
        shared: Shared | None = None,
    ):
        """Replaces products by biased scores, where a call has a bias; shared: of `stages_bias`."""
        if self.bias:
            bias, before = self.step_bias(work, place), exponents.before_bias
            if self.pairwise:
                ds = None
                if shared is not None and self.stages_bias:
                    ds = shared.ds[None, None, place.index & 1]
                bias.add(scores, before, ds)
            else:
                bias.add_elements(scores, before)

    def statistics(self, tensor: cute.Tensor, slot: Int32) -> cute.Tensor:
        """Returns this lane's share of a step's row statistics, for `of_columns`: (2, m / 64).

        A warp holds each of them once, in registers, before it waits for the scores. If each thread
        loaded all of its own, these loads would wait behind the products' reads of shared memory.
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

    def scale(self, values: cute.Tensor, factor: Float32):
        """Multiplies a fragment by a factor."""
        for element in range(cute.size(values)):
            values[element] = values[element] * factor

    def exponentiate(self, scores: cute.Tensor, lse_log2: cute.Tensor, scale_log2: Float32):
        """Replaces scores by P^T = exp2(scores * scale_log2 - lse_log2)."""
        for pair in range(cute.size(scores.shape[0][2])):
            values = self.of_columns(lse_log2, pair)
            for row in range(softmax.ROWS):
                for column in range(2):
                    index = softmax.fragment_index(pair, row, column)
                    exponent = scores[index] * scale_log2 - values[column]
                    scores[index] = exp2(exponent)

    def score_gradient(
        self, p: cute.Tensor, dp: cute.Tensor, delta: cute.Tensor, pairs: range | None = None
    ):
        """Replaces dp by dS^T = P^T * (dP^T - delta), in some pairs of columns or in all."""
        for pair in pairs or range(cute.size(p.shape[0][2])):
            values = self.of_columns(delta, pair)
            for row in range(softmax.ROWS):
                for column in range(2):
                    index = softmax.fragment_index(pair, row, column)
                    dp[index] = p[index] * (dp[index] - values[column])

    def release(self, empty: cute.Pointer):
        """Arrives, once per warp: this warp's wgmma no longer reads the slot."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(empty)
