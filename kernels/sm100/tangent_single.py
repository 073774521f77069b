"""The MMA warp of the Blackwell tangent kernel with one query tile: head dims above 128.

It issues each block's scores before the products with V of the block before, into two buffers in
turn: the tensor core computes the former while the softmax group works on the latter's.

    S(0), S(1) O'(0), S(2) O'(1), ...

A slot of the ring holds one operand, and is free when its last product is complete.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from kernels.common.resources import Shared
from kernels.common.ring import Use
from kernels.sm100 import products, ptx
from kernels.sm100.forward_data import pop_work
from kernels.sm100.forward_schedule import Work
from kernels.sm100.tangent_description import PAIR
from kernels.sm100.tangent_products import ProductRole


class SingleProductRole(ProductRole):
    """Issues S, S' and O' += W V + P V' of one query tile."""

    @cute.jit
    def mma(self, shared: Shared, rounds: Int32):
        """MMA warp: issues all products of all tiles."""
        blocks_done = Int32(0)
        for round_index in cutlass.range(rounds, unroll=1):
            work = pop_work(self.config, shared, round_index)
            count = work.blocks.end - work.blocks.begin
            shared.barriers.q_full[0].wait(round_index)
            if count > 0:
                self.issue_scores(shared, 2 * blocks_done, blocks_done, count == 1)
                for step in cutlass.range(count, unroll=1):
                    ordinal = blocks_done + step
                    load = 2 * ordinal + 1
                    if step + 1 < count:
                        self.issue_scores(shared, load, ordinal + 1, step == count - 2)
                        load += 1
                    self.issue_output(shared, work, load, ordinal, step == 0)
                products.commit(shared.barriers.acc_full[0].first)
            else:  # No product that a commit could stand for has read Q.
                products.signal(shared.barriers.q_empty[0].first)
            blocks_done += count

    def uses(self, shared: Shared, load: Int32) -> tuple[Use, Use]:
        """Returns the uses of the ring by a block and its tangent, after `load` others."""
        own, tangent = (shared.barriers.kv_full.use(PAIR * load + i) for i in range(PAIR))
        return own, tangent

    @cute.jit
    def issue_scores(self, shared: Shared, load: Int32, ordinal: Int32, last: Boolean):
        """Waits for K of the CTA's ordinal-th block and issues S and S'.

        last: it is the last of its tile.
        """
        tile, d, barriers = self.config.tile, self.config.head_dim, shared.barriers
        rows = products.k_major(shared.q.iterator, tile.rows, d, tile.span_bytes)
        keys = products.k_major(shared.k.iterator, tile.n, d, tile.span_bytes)
        q, q_tangent = (rows.moved(i * tile.rows * d * 2) for i in range(PAIR))
        own, tangent = self.uses(shared, load)
        scores, tangents = (self.columns(x, ordinal) for x in ("s", "s_tangent"))
        steps = (0, d // products.K_STEP)
        barriers.kv_full.wait(own)
        self.scores.issue(scores, q, self.operand(keys, own), False, steps)
        self.scores.issue(tangents, q_tangent, self.operand(keys, own), False, steps)
        products.commit(barriers.kv_empty.at(own))
        barriers.kv_full.wait(tangent)
        self.scores.issue(tangents, q, self.operand(keys, tangent), True, steps)
        products.commit(barriers.kv_empty.at(tangent))
        products.commit(barriers.s_full.at(ordinal))
        if last:
            products.commit(barriers.q_empty[0].first)

    @cute.jit
    def issue_output(self, shared: Shared, work: Work, load: Int32, ordinal: Int32, first: Boolean):
        """Waits for V, P and W of the CTA's ordinal-th block and issues what they add to O'.

        first: it is the first that the tile visits, the last of its keys.
        """
        tile, barriers = self.config.tile, shared.barriers
        values = products.mn_major(shared.v.iterator, tile.n, tile.span_bytes)
        uses, left = self.uses(shared, load), [self.columns(x, ordinal) for x in ("w", "p")]
        acc, steps = self.config.columns("acc").first, (0, tile.n // products.K_STEP)
        for i in cutlass.range_constexpr(PAIR):
            barriers.kv_full.wait(uses[i])
            if first & work.padded_keys:
                self.clear_padding(shared, work, uses[i])
            if cutlass.const_expr(i == 0):
                barriers.p_full.wait(ordinal)
                ptx.fence_after_sync()
            accumulate = ~first if i == 0 else True
            self.output.issue(acc, left[i], self.operand(values, uses[i]), accumulate, steps)
            products.commit(barriers.kv_empty.at(uses[i]))

    def columns(self, name: str, ordinal: Int32) -> Int32:
        """Returns the first column of what a block has in tensor memory."""
        columns = self.config.columns(name)
        return columns.first + self.config.buffer(0, ordinal) * columns.step

    def operand(self, ring: products.Operand, use: Use) -> products.Operand:
        """Returns the operand of a use of the ring."""
        return ring.moved(use.slot * (self.config.tile.n * self.config.head_dim * 2))
