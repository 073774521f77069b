"""How the Hopper backward adds dQ to global memory: in bulk from shared memory, or from registers.

Note [dq_acc]: tile t of head h holds m x head_dim fp32 values as [chunk][thread][4]. `thread`
counts the threads of both MMA warpgroups; the four values are its accumulator registers 4 c to
4 c + 3 for chunk c, which hold two adjacent columns of row r and the same columns of row r + 8.
bwd_post undoes it with the same accumulator layout. Without pairs dQ is staged in shared memory,
where it has the same layout, so that one bulk copy adds a step's tile; in a pair each thread adds
its registers by vectors.

Note [late]: where dQ has two buffers, a step does not wait until its stores to shared memory are
visible to the copy. The tile's next one does, when it has issued its scores; after the last step
the tile's end does. With one buffer the step itself waits, while the tensor core has dK: the copy
then has read the buffer when the next step's dQ is there.

Note [dq order]: every (head, query tile) has a counter. The key tiles that visit the query tile add
to it in ascending order: a CTA waits until the counter equals the number of visiting key tiles
before its own, adds, and increments. A CTA draws a ticket from a counter for each of its key tiles,
in the order in which it works on them, and the ticket decides which tile that is. So a tile waits
only for tiles with lower tickets; of those that are not finished, the one with the lowest ticket
never waits, and its CTA has nothing to finish before it. Hence there is no deadlock, whatever the
number of resident CTAs and the order in which the hardware starts them (CUDA promises none). All
CTAs walk the query blocks from last to first: under a causal band, too, neighbours then start
together and follow one another at a distance of one addition. If they started at the diagonal, a
CTA would first wait for all lower ones to reach its first block. With ranges in memory the key
tiles that visit a query tile are consecutive, too (backward_ranges). Their order of the longest
first is therefore not for this kernel: in it a tile may start before one that it waits for, which
then finds no room on the GPU.

Two spare warps wait and increment, each for every other step, so that the products hide the
latency: a turn, from the wait to the release, takes about as long as a step, and one warp alone
held up the others (docs/hopper.md). Where dQ is staged, these reduce warps add it, too, and release
the counter when the addition is complete. A query tile's first one is a store: so nobody clears its
accumulators, and the kernel after this one asks the counter whether any key tile has visited it. In
a pair the order warps open `dq_turn` for the MMA warps and release the counter once all of them
have arrived on `dq_added`. Their additions happen before their arrivals, and these before the order
warp's release; by cumulativity the next CTA, which acquires the counter, adds after them.
"""

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kernels.common import backward_ranges, ptx
from kernels.common.backward_schedule import BackwardShape, Work, earlier_tiles
from kernels.common.resources import Shared
from kernels.common.schedule import await_count
from kernels.common.state import Rows
from kernels.sm90.backward_clear import await_cleared
from kernels.sm90.backward_data import Step
from kernels.sm90.backward_description import ORDER_WARPS
from kernels.sm90.backward_tiles import Call, is_tile, published, words_of_tile
from kernels.sm90.tiles import WARPGROUP, BackwardTile


@dataclasses.dataclass(frozen=True)
class QueryGradient:
    """Adds a kernel's dQ; attributes are compile-time constants.

    Attributes:
      tile, head_dim: dQ of a step is tile.m x head_dim.
      band: whether the mask is a band.
      deterministic: the order of additions is fixed.
    """

    tile: BackwardTile
    head_dim: int
    band: bool
    deterministic: bool

    @property
    def staged(self) -> bool:
        """Whether dQ passes through shared memory."""
        return self.tile.persistent

    def query_block(self, work: Work, index: Int32, walk: cute.Tensor | None = None) -> Int32:
        """Returns the index-th query block of a head; Note [dq order] gives the order.

        With `walk`, of a warp that walks by the tile table, the whole warp calls it.
        """
        if walk is not None:
            return backward_ranges.next_block(
                work.visits, walk, index, self.tile.m, self.deterministic
            )
        if self.deterministic:
            return work.blocks.end - 1 - index
        return work.blocks.begin + index

    @cute.jit
    def reduce_tiles(
        self, shared: Shared, call: Call, shape: BackwardShape, rows: Rows, rank: Int32
    ):
        """Reduce warp: adds dQ of the CTA's tiles; rank: among such warps."""
        tiles_done, steps_done = Int32(0), Int32(0)
        shared.barriers.kv_full.wait(tiles_done)
        more = is_tile(words_of_tile(shared, tiles_done))
        while more:
            work = published(words_of_tile(shared, tiles_done), call, shape)
            cute.arch.sync_warp()  # One lane releases the work for all.
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(shared.barriers.kv_empty.first)
            steps = work.steps()
            if cutlass.const_expr(rows.dq_cleared is not None):
                if steps > 0:
                    with cute.arch.elect_one():
                        await_cleared(work, call, shape, rows.dq_cleared)
            for index in cutlass.range(steps, unroll=1):
                if cutlass.const_expr(self.deterministic):
                    if (steps_done + index) % ORDER_WARPS == rank:
                        self.reduce(shared, work, rows, index, steps_done + index)
                else:
                    self.reduce(shared, work, rows, index, steps_done + index)
            steps_done += steps
            tiles_done += 1
            shared.barriers.kv_full.wait(tiles_done)
            more = is_tile(words_of_tile(shared, tiles_done))
        if cutlass.const_expr(not self.deterministic):
            with cute.arch.elect_one():
                cute.arch.cp_async_bulk_wait_group(0)

    @cute.jit
    def reduce(self, shared: Shared, work: Work, rows: Rows, index: Int32, step: Int32):
        """Adds dQ of a tile's step, in turn if the order is fixed.

        index: of the step in the tile; step: among all of the CTA's.
        """
        size, blocks = self.tile.m * self.head_dim, work.block_count()
        use, member = shared.barriers.dq_empty.use(step), index // blocks
        if cutlass.const_expr(work.visits is None):
            block = self.query_block(work, index - member * blocks)
            shared.barriers.dq_full.wait(step)
        else:
            shared.barriers.dq_full.wait(step)
            block = shared.dq_block[use.slot]
            cute.arch.sync_warp()  # One lane releases the buffer for all.
        head = work.kv_head * work.group + member
        query_tile = rows.tile(work.batch, work.heads, head, block)
        staging = shared.dq[None, use.slot].iterator
        with cute.arch.elect_one():
            target = rows.dq_acc + query_tile * size
            if cutlass.const_expr(self.deterministic):
                earlier = self.await_turn(work, rows, block, query_tile)
                cute.arch.fence_proxy("async.global")
                if earlier == 0:
                    ptx.bulk_store(target, staging, size * 4)
                else:
                    ptx.bulk_reduce_add(target, staging, size * 4)
            else:
                ptx.bulk_reduce_add(target, staging, size * 4)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.mbarrier_arrive(shared.barriers.dq_empty.at(use))
            if cutlass.const_expr(self.deterministic):
                cute.arch.cp_async_bulk_wait_group(0)
                cute.arch.fence_proxy("async.global")
                ptx.increment_release(rows.dq_order + query_tile)

    @cute.jit
    def open_turns(self, shared: Shared, call: Call, shape: BackwardShape, rows: Rows, rank: Int32):
        """Order warp of a pair's CTA: opens the turns to add dQ; rank: of the two such warps."""
        tiles_done, steps_done = Int32(0), Int32(0)
        shared.barriers.kv_full.wait(tiles_done)
        more = is_tile(words_of_tile(shared, tiles_done))
        while more:
            work = published(words_of_tile(shared, tiles_done), call, shape)
            cute.arch.sync_warp()  # One lane releases the work for all.
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(shared.barriers.kv_empty.first)
            steps_done = self.open_turns_of(shared, work, rows, rank, steps_done)
            tiles_done += 1
            shared.barriers.kv_full.wait(tiles_done)
            more = is_tile(words_of_tile(shared, tiles_done))

    @cute.jit
    def open_turns_of(
        self, shared: Shared, work: Work, rows: Rows, rank: Int32, steps_done: Int32
    ) -> Int32:
        """Order warp: opens the turns of a tile; returns the steps that are done then."""
        walk, step = backward_ranges.make_walk(work.visits), steps_done
        for member in cutlass.range(work.group, unroll=1):
            for index in cutlass.range(work.block_count(), unroll=1):
                block = self.query_block(work, index, walk)
                if step % ORDER_WARPS == rank:
                    with cute.arch.elect_one():
                        head = work.kv_head * work.group + member
                        query_tile = rows.tile(work.batch, work.heads, head, block)
                        self.await_turn(work, rows, block, query_tile)
                        cute.arch.mbarrier_arrive(shared.barriers.dq_turn.at(step))
                        shared.barriers.dq_added.wait(step)
                        ptx.increment_release(rows.dq_order + query_tile)
                step += 1
        return step

    def await_turn(self, work: Work, rows: Rows, block: Int32, query_tile: Int32) -> Int32:
        """Waits until the CTA may add to a query tile; Note [dq order].

        Returns how many additions came before, of CTAs.
        """
        earlier = earlier_tiles(work, block, self.band, (self.tile.m, self.tile.keys))
        if self.tile.ctas > 1:
            earlier = earlier * self.tile.ctas
        await_count(rows.dq_order + query_tile, earlier)
        return earlier

    @cute.jit
    def add(self, shared: Shared, work: Work, rows: Rows, dq: cute.Tensor, place: Step):
        """MMA warp: hands over its share of a step's dQ, or adds it; Note [dq_acc]."""
        thread, _, _ = cute.arch.thread_idx()
        offset = (thread - WARPGROUP) * 4
        stride = 2 * WARPGROUP * 4
        chunks = cute.size(dq) // 4
        if cutlass.const_expr(self.tile.ctas > 1):
            # A CTA's columns are those of a warpgroup of the post kernel.
            offset = (work.rank * WARPGROUP + thread % WARPGROUP) * 4
            offset = offset + place.group * (chunks * stride)
        if cutlass.const_expr(self.staged):
            use = shared.barriers.dq_empty.use(place.index)
            shared.barriers.dq_empty.wait_free(use)
            staging = cute.make_tensor(
                shared.dq[None, use.slot].iterator + cute.assume(offset, divby=4),
                cute.make_layout((4, chunks), stride=(1, stride)),
            )
            registers = cute.make_tensor(dq.iterator, cute.make_layout((4, chunks)))
            for chunk in cutlass.range_constexpr(chunks):
                cute.autovec_copy(registers[None, chunk], staging[None, chunk])
            if cutlass.const_expr(work.visits is not None):
                if thread == WARPGROUP:
                    shared.dq_block[use.slot] = place.block
        else:
            head = work.kv_head * work.group + place.member
            query_tile = rows.tile(work.batch, work.heads, head, place.block)
            target = rows.dq_acc + query_tile * (self.tile.m * self.head_dim) + offset
            if cutlass.const_expr(self.deterministic):
                shared.barriers.dq_turn.wait(place.index)
            for chunk in cutlass.range_constexpr(chunks):
                values = [dq[4 * chunk + i] for i in range(4)]
                ptx.reduce_add_v4(target + chunk * stride, values)
        if cutlass.const_expr(self.deterministic and not self.staged):
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(shared.barriers.dq_added.at(place.index))

    @cute.jit
    def hand_over(self, shared: Shared, step: Int32):
        """MMA warp: arrives on `dq_full`, so that the reduce warp adds what the warp has stored."""
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(shared.barriers.dq_full.at(step))
