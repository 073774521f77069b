"""The MMA warp of the Blackwell tangent kernel."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from kernels.common import tensors
from kernels.common.resources import Shared
from kernels.common.ring import Use
from kernels.sm100 import products, ptx
from kernels.sm100.forward_data import pop_work
from kernels.sm100.forward_schedule import Work
from kernels.sm100.products import Operand
from kernels.sm100.tangent_data import Config
from kernels.sm100.tangent_description import PAIR


class ProductRole:
    """Issues S, S' and O' += P V' + W V, in the order that tangent.py gives."""

    def __init__(self, config: Config):
        self.config = config
        self.scores = products.Product(config.dtype, config.tile.rows, config.tile.n)
        self.output = products.Product(config.dtype, config.tile.rows, config.head_dim)

    @cute.jit
    def mma(self, shared: Shared, rounds: Int32):
        """MMA warp: issues all products of all tiles."""
        blocks_done = Int32(0)
        for round_index in cutlass.range(rounds, unroll=1):
            work = pop_work(self.config, shared, round_index)
            count = work.blocks.end - work.blocks.begin
            k = shared.barriers.kv_full.use(2 * blocks_done)
            if count > 0:
                shared.barriers.kv_full.wait(k)
            for t in cutlass.range_constexpr(self.config.tile.query_tiles):
                shared.barriers.q_full[t].wait(round_index)
                if count > 0:
                    self.mma_scores(shared, t, k, count == 1)
                else:  # No product that a commit could stand for has read Q.
                    products.signal(shared.barriers.q_empty[t].first)
            if count > 0:
                products.commit(shared.barriers.kv_empty.at(k))
                self.finish_tile(shared, work, count, blocks_done)
            blocks_done += count

    @cute.jit
    def finish_tile(self, shared: Shared, work: Work, count: Int32, blocks_done: Int32):
        """Issues the products of a tile of `count` blocks after its first scores."""
        barriers = shared.barriers
        for step in cutlass.range(count, unroll=1):
            ordinal, more = blocks_done + step, step + 1 < count
            v, k = (barriers.kv_full.use(2 * ordinal + i) for i in (1, 2))
            barriers.kv_full.wait(v)
            if (step == 0) & work.padded_keys:
                self.clear_padding(shared, work, v)
            for t in cutlass.range_constexpr(self.config.tile.query_tiles):
                self.mma_output(shared, t, v, ordinal, step > 0)
                if cutlass.const_expr(t == self.config.tile.query_tiles - 1):
                    products.commit(barriers.kv_empty.at(v))
                if more:
                    if cutlass.const_expr(t == 0):
                        barriers.kv_full.wait(k)
                    self.mma_scores(shared, t, k, step == count - 2)
                    if cutlass.const_expr(t == self.config.tile.query_tiles - 1):
                        products.commit(barriers.kv_empty.at(k))
                else:
                    products.commit(barriers.acc_full[t].first)

    @cute.jit
    def mma_scores(self, shared: Shared, t: cutlass.Constexpr[int], k: Use, last: Boolean):
        """Issues S_t and S'_t of a block whose K is there; `last`: it is the last of its tile."""
        tile, d = self.config.tile, self.config.head_dim
        rows = products.k_major(shared.q.iterator, tile.rows, d, tile.span_bytes)
        keys = products.k_major(shared.k.iterator, tile.n, d, tile.span_bytes)
        q, q_tangent = (rows.moved((PAIR * t + i) * tile.rows * d * 2) for i in range(PAIR))
        own, own_tangent = self.pair(keys, k)
        steps = (0, d // products.K_STEP)
        scores, tangents = (self.config.columns(x).firsts[t] for x in ("s", "s_tangent"))
        self.scores.issue(scores, q, own, False, steps)
        self.scores.issue(tangents, q_tangent, own, False, steps)
        self.scores.issue(tangents, q, own_tangent, True, steps)
        products.commit(shared.barriers.s_full[t].first)
        if last:
            products.commit(shared.barriers.q_empty[t].first)

    @cute.jit
    def mma_output(
        self, shared: Shared, t: cutlass.Constexpr[int], v: Use, ordinal: Int32, accumulate: Boolean
    ):
        """Waits for P_t and W_t of the CTA's ordinal-th block, and issues what they add to O'_t."""
        tile, steps = self.config.tile, (0, self.config.tile.n // products.K_STEP)
        values = products.mn_major(shared.v.iterator, tile.n, tile.span_bytes)
        own, own_tangent = self.pair(values, v)
        acc, p, w = (self.config.columns(x).firsts[t] for x in ("acc", "p", "w"))
        shared.barriers.p_full[t].wait(ordinal)
        ptx.fence_after_sync()
        self.output.issue(acc, p, own_tangent, accumulate, steps)
        self.output.issue(acc, w, own, True, steps)

    def pair(self, ring: Operand, use: Use) -> tuple[Operand, Operand]:
        """Returns an operand and its tangent, of a use of the ring."""
        block_bytes = self.config.tile.n * self.config.head_dim * 2
        first = ring.moved(use.slot * (PAIR * block_bytes))
        return first, first.moved(block_bytes)

    @cute.jit
    def clear_padding(self, shared: Shared, work: Work, v: Use):
        """Writes 0 to values and tangents past the key length, which may hold anything."""
        first_row = work.band.key_length - work.last_block * self.config.tile.n
        thread, _, _ = cute.arch.thread_idx()
        operands = self.config.tile.slot_operands
        for i in cutlass.range_constexpr(operands):
            block = shared.v[None, None, operands * v.slot + i]
            tensors.zero_vectors(block, first_row, thread % 32, 32)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
