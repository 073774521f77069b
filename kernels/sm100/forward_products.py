"""The MMA warp of the Blackwell forward: it issues products or, in an odd CTA, relays loads."""

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from kernels.common import tensors
from kernels.common.resources import Shared
from kernels.common.ring import Use
from kernels.common.state import Progress
from kernels.sm100 import products, ptx
from kernels.sm100.forward_data import Config, peek_work, pop_work
from kernels.sm100.forward_schedule import Work


@dataclasses.dataclass(frozen=True)
class Round:
    """Which of the CTA's tiles it is, and how many there are."""

    index: Int32
    count: Int32


class ProductRoles:
    """Issues S = Q K^T and O += P V, in the order that forward.py gives."""

    def __init__(self, config: Config):
        self.config = config
        tile, dtype = config.tile, config.dtype
        self.qk = products.Product(dtype, tile.rows * tile.ctas, tile.n, tile.ctas)
        self.pv = products.Product(dtype, tile.rows * tile.ctas, config.head_dim, tile.ctas)

    @cute.jit
    def mma(self, shared: Shared, rounds: Int32):
        """MMA warp: issues all products of all tiles."""
        done, begun = Progress(Int32(0), Int32(0)), Boolean(False)
        for round_index in cutlass.range(rounds, unroll=1):
            work = pop_work(self.config, shared, round_index)
            count = work.blocks.end - work.blocks.begin
            if count > 0:
                if not begun:
                    self.begin_tile(shared, count, done)
                begun = self.finish_tile(shared, work, Round(round_index, rounds), done)
                done = done.after(count)

    @cute.jit
    def begin_tile(self, shared: Shared, count: Int32, done: Progress):
        """Issues the first scores of a tile of `count` blocks."""
        for i in cutlass.range_constexpr(self.config.tile.buffers_per_tile):
            if i < count:
                for t in cutlass.range_constexpr(self.config.tile.query_tiles):
                    self.begin_scores(shared, t, i, count, done)

    @cute.jit
    def begin_scores(
        self,
        shared: Shared,
        t: cutlass.Constexpr[int],
        i: cutlass.Constexpr[int],
        count: Int32,
        done: Progress,
    ):
        """Issues S_t of block i of a tile of `count`, one of the blocks whose scores come first."""
        tile, barriers = self.config.tile, shared.barriers
        k = self.await_block(shared, 2 * done.blocks + i, t == 0)
        if cutlass.const_expr(i == 0):
            barriers.q_full[t].wait(done.tiles)
        self.mma_scores(shared, t, k.slot, done.blocks + i, i == count - 1)
        if cutlass.const_expr(t == tile.query_tiles - 1):
            products.commit(barriers.kv_empty.at(k), tile.ctas)

    @cute.jit
    def finish_tile(self, shared: Shared, work: Work, this_round: Round, done: Progress) -> Boolean:
        """Issues a tile's other products and, between its last ones, first scores of the next tile.

        Returns whether the next tile has been begun.
        """
        tile, barriers = self.config.tile, shared.barriers
        count = work.blocks.end - work.blocks.begin
        prefetch, tiles = tile.buffers_per_tile, tile.query_tiles
        following = Int32(0)
        if cutlass.const_expr(prefetch == 1):
            following = self.blocks_of_next(shared, this_round)
        loads_done = 2 * done.blocks + cutlass.min(count, prefetch)
        with_scores = cutlass.max(count - prefetch, 0)
        for step in cutlass.range(with_scores, unroll=1):
            v = self.await_block(shared, loads_done)
            if (step == 0) & work.padded_keys:
                self.clear_padding(shared.v[None, None, v.slot], work)
            last = step == with_scores - 1
            for t in cutlass.range_constexpr(tiles):
                self.mma_values(shared, t, v.slot, done.blocks + step, step > 0)
                if cutlass.const_expr(tiles == 1):
                    products.commit(barriers.o_full[t].first, tile.ctas)
                if cutlass.const_expr(t == tiles - 1):
                    products.commit(barriers.kv_empty.at(v), tile.ctas)
                k = self.await_block(shared, loads_done + 1, t == 0)
                self.mma_scores(shared, t, k.slot, done.blocks + step + prefetch, last)
                if cutlass.const_expr(t == tiles - 1):
                    products.commit(barriers.kv_empty.at(k), tile.ctas)
            loads_done += 2
        for step in cutlass.range(with_scores, count, unroll=1):
            v = self.await_block(shared, loads_done)
            if (step == 0) & work.padded_keys:
                self.clear_padding(shared.v[None, None, v.slot], work)
            for t in cutlass.range_constexpr(tiles):
                self.mma_values(shared, t, v.slot, done.blocks + step, step > 0)
                # Every phase of o_full has a waiter: commits may arrive out of order.
                products.commit(barriers.o_full[t].first, tile.ctas)
                if cutlass.const_expr(t == tiles - 1):
                    products.commit(barriers.kv_empty.at(v), tile.ctas)
                if following > 0:
                    self.begin_scores(shared, t, 0, following, done.after(count))
            loads_done += 1
        return following > 0

    @cute.jit
    def blocks_of_next(self, shared: Shared, this_round: Round) -> Int32:
        """Counts the blocks of the next round's tile, 0 after the last; its own round pops it.

        No role could wait for the round after the next one: the schedule warp finds that tile only
        when the correction warps, which wait for products of this tile, have popped the next one.
        """
        blocks = Int32(0)
        if this_round.index + 1 < this_round.count:
            work = peek_work(self.config, shared, this_round.index + 1)
            blocks = work.blocks.end - work.blocks.begin
        return blocks

    @cute.jit
    def await_block(
        self, shared: Shared, loads_done: Int32, first: cutlass.Constexpr[bool] = True
    ) -> Use:
        """Waits for a load into the ring, where it is first needed."""
        use = shared.barriers.kv_full.use(loads_done)
        if cutlass.const_expr(first):
            shared.barriers.kv_full.wait(use)
        return use

    @cute.jit
    def relay_loads(self, shared: Shared, rounds: Int32):
        """MMA warp of a pair's odd CTA: relays the completion of its loads to the even CTA."""
        tile, barriers = self.config.tile, shared.barriers
        tiles_done, loads_done = Int32(0), Int32(0)
        for round_index in cutlass.range(rounds, unroll=1):
            work = pop_work(self.config, shared, round_index)
            loads = 2 * (work.blocks.end - work.blocks.begin)
            # The first V block comes after the K blocks that are loaded first.
            first_v = cutlass.min(tile.buffers_per_tile, loads // 2)
            for load in cutlass.range(loads, unroll=1):
                use = barriers.kv_full.use(loads_done + load)
                barriers.kv_full.wait(use)
                if (load == first_v) & work.padded_keys:
                    self.clear_padding(shared.v[None, None, use.slot], work)
                products.arrive(barriers.kv_full.at(use), ctas=tile.ctas, stores=False)
                if load == 0:
                    for t in cutlass.range_constexpr(tile.query_tiles):
                        barriers.q_full[t].wait(tiles_done)
                        products.arrive(barriers.q_full[t].first, ctas=tile.ctas, stores=False)
            loads_done += loads
            if loads > 0:
                tiles_done += 1

    @cute.jit
    def mma_scores(
        self,
        shared: Shared,
        t: cutlass.Constexpr[int],
        k_slot: Int32,
        ordinal: Int32,
        last: cutlass.Boolean,
    ):
        """Issues S = Q_t K^T of the CTA's ordinal-th block; `last`: it is the last of its tile."""
        block = self.config.block(t, ordinal)
        tile, d = self.config.tile, self.config.head_dim
        row_bytes, scores = d * 2, self.config.columns("s")
        q = products.k_major(shared.q.iterator, tile.rows, d, tile.span_bytes)
        k = products.k_major(shared.k.iterator, tile.keys, d, tile.span_bytes)
        self.qk.issue(
            scores.first + block.slot * scores.step,
            q.moved(t * tile.rows * row_bytes),
            k.moved(k_slot * (tile.keys * row_bytes)),
            False,
            (0, d // products.K_STEP),
        )
        products.commit(shared.barriers.s_full.at(block), tile.ctas)
        if last:
            products.commit(shared.barriers.q_empty[t].first, tile.ctas)

    @cute.jit
    def mma_values(
        self,
        shared: Shared,
        t: cutlass.Constexpr[int],
        v_slot: Int32,
        ordinal: Int32,
        accumulate: cutlass.Boolean,
    ):
        """Issues O_t += P V of the CTA's ordinal-th block, part by part."""
        tile = self.config.tile
        n = tile.n
        block = self.config.block(t, ordinal)
        p = self.config.columns("p").first + block.slot * self.config.columns("p").step
        v = products.mn_major(shared.v.iterator, n, tile.span_bytes)
        v = v.moved(v_slot * (tile.keys * self.config.head_dim * 2))
        acc = self.config.columns("o").firsts[t]
        first = 0
        for part in cutlass.range_constexpr(len(tile.p_splits)):
            self.config.part_full(shared.barriers, part).wait(block)
            ptx.fence_after_sync()
            end = tile.p_splits[part] // products.K_STEP
            self.pv.issue(acc, p, v, accumulate if part == 0 else True, (first, end))
            first = end

    @cute.jit
    def clear_padding(self, v: cute.Tensor, work: Work):
        """Writes 0 to the last block's values past the key length, which may hold anything."""
        first_row = work.band.key_length - work.last_block * self.config.tile.n
        thread, _, _ = cute.arch.thread_idx()
        tensors.zero_rows(v, first_row, thread % 32, 32)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        if cutlass.const_expr(self.config.tile.ctas == 2):
            # The odd CTA's next arrival then releases the zeros to the even CTA, which acquires
            # them here after its wait: both operations themselves have the CTA's scope.
            cute.arch.fence_acq_rel_cluster()
