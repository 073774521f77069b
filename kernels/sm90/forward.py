"""Hopper forward: O = softmax(scale * Q K^T) V and LSE, by query tiles.

    load warp      loads by TMA: per tile Q, then K_n, V_n into two rings, last block first; it runs
                   ahead into the next tile while the warpgroups finish this one
    schedule warp  with ranges: finds out what the next tile's work is (Note [work])
    MMA warpgroup w has 64 query rows, and S, P, O in registers; per key block (i counts from the
    last one) it computes
        S(i)  = Q K(i)^T        wgmma, both operands from shared memory
        O    += P(i-1) V(i-1)   wgmma, P from registers; runs while softmax works on S(i)
        P(i)  = exp2(S(i) * scale_log2 - reference * scale_log2),  row sums alongside
    then it stores O / sum through shared memory by TMA, and LSE by ordinary stores.

Work overlaps inside a warpgroup: softmax of block i runs under the PV product of block i - 1. It
overlaps across warpgroups, too: they issue their products in turn (Note [issue turns]), so that the
softmax of one runs under the products of another. (FlashAttention-3, sections 3.1 and 3.2;
FlashAttention-4 for the rescaling threshold and the tile order; its polynomial exponentials do not
pay here, see docs/hopper.md.)

With ranges (kernels/common/row_ranges.py) rows' limits, and tags where they are needed, come from
memory, and so do sinks (forward_output.py); each head's largest score goes there. A call may then
have a mask of pairs, too (forward_visits.py). A bias (forward_bias.py) is loaded while the products
run, in blocks that need it. Dropout is not supported.

Note [issue turns]: warpgroup w waits on its `issue_turn` barrier before it issues the products of a
block, but not of a tile's first, and arrives on its successor's barrier afterwards. The last
warpgroup opens the first turn of the kernel, the first one closes the last turn, so that every
arrival is matched when the CTA exits. Between tiles nothing is opened or closed: all warpgroups
have as many turns in a tile.

Note [own blocks]: rows of a tall tile's three warpgroups see different blocks under a diagonal, or
where documents meet. The load warp stores which ones each warpgroup sees, too (forward_groups.py).
A warpgroup waits for the others at either end, releases them and takes its turns, no more. Without
a band a warpgroup of such a tile does so with all blocks if its rows lie past the last one.

Note [work]: the load warp finds out which rows, head and blocks a tile has, and stores them to
`work` before it arrives on `q_full`; all warps have read them when they release Q. So the MMA
warpgroups divide nothing and load no extents between tiles. Work of no tile, which comes without Q,
ends the CTA. A persistent CTA holds two tiles' Q and work: the next one's are there when a tile
begins. With ranges a schedule warp does so in its place where heads are no wider than 128
(forward_work.py), and arrives on `work_full`; then the load warp, too, reads what it has stored.

Note [tickets]: under a band tiles are not equally long, so persistent CTAs take them when they need
them: a CTA's first tile is its block index, each later one the number of CTAs plus a ticket from
`tile_ticket`, which is 0 when the kernel starts. The load warp takes the ticket of the next tile
when few blocks of a tile are left, whose loads hide the latency, or arrives on `ticket_due`, and
the schedule warp takes it. No CTA waits for another, so they may start in any order.
"""

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from fa4_jax import bands
from fa4_jax.key import KernelKey
from kernels.common import resources, tensors
from kernels.common.bias import BiasInMemory
from kernels.common.hosts import ForwardHost, forward_source
from kernels.common.pages import whole_sizes
from kernels.common.resources import Maps, Shared
from kernels.common.ring import Use
from kernels.common.schedule import ForwardShape, Schedule
from kernels.common.state import Scales
from kernels.interface import (
    BiasBuffers,
    ForwardScalars,
    LogitBuffers,
    PageBuffers,
    RangeBuffers,
    Sizes,
)
from kernels.kernel_source import KernelSource
from kernels.sm90 import forward_bias, softmax, wgmma
from kernels.sm90.forward_bias import BiasedScores, Form
from kernels.sm90.forward_data import (
    Operands,
    Place,
    Rows,
    Scores,
    TileRanges,
    make_rows,
    ranges_of,
    start_with_sink,
)
from kernels.sm90.forward_description import has_schedule_warp, of_key
from kernels.sm90.forward_groups import OwnBlocks, seen_by
from kernels.sm90.forward_load import Loads
from kernels.sm90.forward_mask import clear_padding, hide, visit_of
from kernels.sm90.forward_output import HeadResults, Output, RowResults, of_head, scales_of
from kernels.sm90.forward_schedule import Work, is_tile, make_schedule, published
from kernels.sm90.forward_softmax import RowSoftmax
from kernels.sm90.forward_work import OfCall
from kernels.sm90.tiles import WARPGROUP, WARPGROUP_ROWS, forward_tile, leaves_out, leaves_past_rows


class Forward(ForwardHost, Loads, OwnBlocks, BiasedScores, RowSoftmax):
    """The kernel of one key; attributes are compile-time constants."""

    def __init__(self, key: KernelKey):
        self.dtype = tensors.TYPES[key.dtype]
        self.head_dim, self.value_dim = key.head_dim, key.value_dim
        self.band, self.ranges = key.band, key.ranges
        self.soft_cap = self.reads_cap = key.soft_cap
        self.reads_mask = key.reads_mask
        self.paged, self.bias, self.sinks = key.paged, key.bias, key.sinks
        self.pairwise_bias = key.bias and key.pairwise_bias
        self.band_as_given = key.band_as_given
        self.tile = forward_tile(key)
        in_memory = key.ranges or key.bias or key.paged
        self.q_slices = 0 if in_memory else self.tile.q_slices
        self.description = of_key(key)
        self.takes_turns = self.tile.mma_warpgroups > 1
        self.issue_turn = self.description.named_barrier("issue_turn") if self.takes_turns else None
        epilogue = self.description.named_barrier("epilogue")
        self.padding = self.description.named_barrier("padding") if key.band else None
        self.leaves_out, self.leaves_past_rows = leaves_out(key), leaves_past_rows(key)
        self.has_schedule_warp = has_schedule_warp(key)
        # Otherwise the compiler has too few registers for three warpgroups beside a schedule warp.
        anew = self.has_schedule_warp and self.tile.mma_warpgroups > 2
        self.output = Output(self.tile, self.value_dim, self.dtype, epilogue, anew)
        self.by_ticket = self.description.division.by_ticket
        self.shape = ForwardShape(
            m=self.tile.m,
            n=self.tile.n,
            kv_row_bytes=(key.head_dim + key.value_dim) * 2,
            l2_bytes=self.tile.l2_bytes,
            band=key.band,
            shorter_last=self.leaves_past_rows,
            batches_together=key.bias,
        )

    @cute.kernel
    def kernel(
        self,
        maps: Maps,
        extents: cute.Pointer,
        lse: cute.Pointer,
        sizes: Sizes,
        scalars: ForwardScalars,
        tile_ticket: cute.Pointer | None = None,
        of_keys: RangeBuffers | PageBuffers | None = None,
        logits: LogitBuffers | None = None,
        bias: BiasBuffers | None = None,
        sinks: cute.Pointer | None = None,
    ):
        shared = resources.allocate(self.description, self.dtype)
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_index == 0:
            resources.prefetch(maps, self.description)
            with cute.arch.elect_one():
                resources.initialise(self.description, shared.barriers)
        if cutlass.const_expr(self.pairwise_bias):
            thread, _, _ = cute.arch.thread_idx()
            forward_bias.write_ramp(shared.ramp, thread, self.tile.n)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        ranges, pages = (None, of_keys) if self.paged else (of_keys, None)
        page_length = sizes.key_length
        if cutlass.const_expr(self.paged):
            sizes = whole_sizes(sizes, pages)
        schedule = make_schedule(extents, sizes, scalars.window, self.tile.m)
        load, mma = self.description.role("load"), self.description.role("mma")
        if warp_index < mma.first_warp:
            cute.arch.setmaxregister_decrease(load.registers)
            of_call = OfCall(schedule, ranges, sinks)
            if cutlass.const_expr(not self.has_schedule_warp):
                if warp_index == load.first_warp:
                    self.load(maps, shared, of_call, tile_ticket, (pages, page_length))
            elif warp_index == load.first_warp:
                self.load_found(maps, shared, of_call)
            elif warp_index == self.description.role("schedule").first_warp:
                self.find_all_work(shared, of_call, tile_ticket)
        else:
            cute.arch.setmaxregister_increase(mma.registers)
            added = None
            if cutlass.const_expr(self.bias):
                memory = BiasInMemory(bias, sizes, extents, self.band_as_given)
                added = forward_bias.make_call_bias(memory, scalars)
            self.mma(maps, shared, schedule, RowResults(lse, logits, added), scalars, ranges)

    @cute.jit
    def mma(
        self,
        maps: Maps,
        shared: Shared,
        schedule: Schedule,
        results: RowResults,
        scalars: ForwardScalars,
        ranges: RangeBuffers | None,
    ):
        """MMA warpgroup: computes all tiles of this CTA."""
        scales = scales_of(results, scalars, self.dtype)
        thread, _, _ = cute.arch.thread_idx()
        group = cute.arch.make_warp_uniform((thread - WARPGROUP) // WARPGROUP)
        last = self.tile.mma_warpgroups - 1
        if cutlass.const_expr(self.takes_turns):
            if group == last:
                self.pass_turn(group)
        tiles_done, blocks_done = Int32(0), Int32(0)
        shared.barriers.q_full.wait(tiles_done)
        more = is_tile(self.words(shared, tiles_done))
        while more:
            words = self.words(shared, tiles_done)
            work = published(words, schedule.window if self.band else None, self.sinks)
            if cutlass.const_expr(self.leaves_out):
                slot = shared.barriers.q_full.use(tiles_done).slot
                seen = seen_by(shared.groups[None, None, slot], group)
                work = dataclasses.replace(work, seen=seen)
            cute.arch.sync_warp()  # One lane releases Q, and the work with it, for all.
            head = of_head(results, work, schedule.sizes)
            own = ranges_of(ranges, schedule.sizes, work)
            self.mma_tile(maps, shared, work, own, head, scales, tiles_done, blocks_done)
            tiles_done += 1
            blocks_done += work.blocks.end - work.blocks.begin
            shared.barriers.q_full.wait(tiles_done)
            more = is_tile(self.words(shared, tiles_done))
        if cutlass.const_expr(self.takes_turns):
            if group == 0:
                self.await_turn(group)
        # Shared memory and the CTA must outlive the last store.
        cute.arch.cp_async_bulk_wait_group(0)

    def make_operands(self, shared: Shared, group: Int32, q_slot: Int32) -> Operands:
        """Makes a warpgroup's products, views of shared memory and registers."""
        tile = self.tile
        warpgroups = (tile.mma_warpgroups, 1)
        majors = (wgmma.K_MAJOR, wgmma.K_MAJOR)
        qk_product = wgmma.Wgmma(self.dtype, warpgroups, tile.n, majors)
        majors = (wgmma.K_MAJOR, wgmma.MN_MAJOR)
        pv_product = wgmma.Wgmma(self.dtype, warpgroups, self.value_dim, majors, wgmma.REGISTERS)
        qk, pv = qk_product.tiled(), pv_product.tiled()
        uniform = cute.make_layout(tile.mma_warpgroups, stride=WARPGROUP)(group)
        qk_group, pv_group = qk.get_slice(uniform), pv.get_slice(uniform)
        return Operands(
            qk_product=qk_product,
            pv_product=pv_product,
            q=qk.make_fragment_A(qk_group.partition_A(shared.q))[None, None, None, q_slot],
            q_slices=qk_product.make_slices(tile.m, self.q_slices),
            k=qk.make_fragment_B(qk_group.partition_B(shared.k)),
            vt=pv.make_fragment_B(pv_group.partition_B(shared.vt)),
            scores=cute.make_rmem_tensor(qk.partition_shape_C((tile.m, tile.n)), Float32),
            probabilities=cute.make_rmem_tensor(pv.partition_shape_A((tile.m, tile.n)), self.dtype),
            acc=cute.make_rmem_tensor(pv.partition_shape_C((tile.m, self.value_dim)), Float32),
        )

    @cute.jit
    def mma_tile(
        self,
        maps: Maps,
        shared: Shared,
        work: Work,
        ranges: TileRanges | None,
        head: HeadResults,
        scales: Scales,
        tiles_done: Int32,
        blocks_done: Int32,
    ):
        """Computes 64 query rows of a tile whose Q is there, from scores to the output."""
        tile = self.tile
        thread, _, _ = cute.arch.thread_idx()
        thread = thread - WARPGROUP
        group = cute.arch.make_warp_uniform(thread // WARPGROUP)
        lane = thread % 32
        q_slot = shared.barriers.q_full.use(tiles_done).slot
        mma = self.make_operands(shared, group, q_slot)
        mma.qk_product.load_slices(mma.q_slices, shared.q[None, None, q_slot], thread)
        if cutlass.const_expr(mma.q_slices is not None):
            cute.arch.sync_warp()  # One lane releases Q for all, at once if no row sees a key.
        mma.acc.fill(0.0)
        first_row = work.first_row + (thread // 32) * 16 + lane // 4
        rows = make_rows(work, ranges, first_row, (lane % 4) * 2)
        if cutlass.const_expr(self.sinks):
            start_with_sink(rows, work.sink_log2, scales.scale_log2)

        begin, end = work.blocks.begin, work.blocks.end
        count = end - begin
        seen, seen_count, first_use = work.blocks, count, blocks_done
        if cutlass.const_expr(self.leaves_past_rows):
            has_rows = work.first_row + group * WARPGROUP_ROWS < work.band.query_length
            seen_count = Int32(cutlass.select_(has_rows, count, Int32(0)))
            ring_end, past = blocks_done + end - 1, begin + seen_count
            self.leave_out(shared, work, Place(group, ring_end), (end, past))
        if cutlass.const_expr(self.leaves_out):
            # All warpgroups meet, at one place of the text: some may leave this block out.
            if work.padded_keys & (count > 0):
                self.clear_values(shared, work, shared.barriers.v_full.use(blocks_done), end - 1)
            seen = work.seen_blocks()
            seen_count, first_use = seen.end - seen.begin, blocks_done + end - seen.end
            self.leave_out(shared, work, Place(group, blocks_done + end - 1), (end, seen.end))
        if seen_count > 0:
            own = Scores(work, scales, self.tile_bias(head.bias, work))
            self.first_block(shared, work, mma, rows, own, seen, group, first_use)

            place = Place(group, blocks_done + end - 1)
            # Blocks masked on the right edge come next, then unmasked ones, then those masked on
            # the left.
            right = cutlass.max(cutlass.min(seen.full_end, seen.end - 1), seen.begin)
            left = cutlass.max(cutlass.min(seen.full_begin, right), seen.begin)
            phases = ((seen.end - 1, right, True), (right, left, False), (left, seen.begin, True))
            if cutlass.const_expr(not self.band):
                phases = ((seen.end - 1, seen.begin, False),)
            for phase in cutlass.range_constexpr(len(phases)):
                self.steps(shared, mma, rows, own, place, phases[phase])

            use = shared.barriers.v_full.use(first_use + seen_count - 1)
            shared.barriers.v_full.wait(use)
            vt = mma.vt[None, None, None, use.slot]
            mma.pv_product.issue(mma.acc, mma.probabilities, vt, accumulate=True)
            self.release(shared.barriers.q_empty.at(tiles_done))
            warpgroup.wait_group(0)
            self.release(shared.barriers.v_empty.at(use))
        else:
            self.release(shared.barriers.q_empty.at(tiles_done))
        if cutlass.const_expr(self.leaves_out):
            self.leave_out(shared, work, Place(group, blocks_done + end - 1), (seen.begin, begin))
        output = self.output.divide(work, mma.acc, rows, head, scales.scale_log2)
        if cutlass.const_expr(tile.own_output):
            self.output.store(maps, shared.o, work, output)
        else:
            # Warpgroup w writes into the slot of V's last use but one, or of the last.
            use = shared.barriers.v_full.use(blocks_done + count - tile.mma_warpgroups + group)
            shared.barriers.v_empty.wait(use)
            if count == 0:  # No V of this tile was loaded after the output before had been read.
                shared.barriers.o_empty.wait_free(tiles_done)
            self.output.store(maps, shared.v[None, None, use.slot], work, output)
            self.release(shared.barriers.o_empty.first)

    @cute.jit
    def steps(
        self,
        shared: Shared,
        mma: Operands,
        rows: Rows,
        own: Scores,
        place: Place,
        phase: tuple[Int32, Int32, bool],
    ):
        """Does the steps of blocks down from `above - 1` to `down_to`, all of them masked or none.

        A bias has loops of its own where no block is masked (forward_bias).
        """
        above, down_to, masked = phase
        if cutlass.const_expr(masked or own.bias is None):
            for block in cutlass.range(above - 1, down_to - 1, -1, unroll=1):
                self.step(shared, mma, rows, own, place, block, masked)
        else:
            self.biased_phase(shared, mma, rows, own, place, (above, down_to))

    @cute.jit
    def first_block(
        self,
        shared: Shared,
        work: Work,
        mma: Operands,
        rows: Rows,
        own: Scores,
        seen: bands.BlockRange,
        group: Int32,
        first_use: Int32,
    ):
        """Computes P of a warpgroup's first block; no product can run under its softmax yet.

        Args:
          seen: the blocks that the warpgroup sees.
          first_use: of the K and V rings, by the first of these blocks.
        """
        end = seen.end
        use = shared.barriers.k_full.use(first_use)
        shared.barriers.k_full.wait(use)
        if cutlass.const_expr(self.leaves_out):
            if end < work.blocks.end:
                self.await_turn(group)
                self.pass_turn(group)
        self.issue_scores(shared, mma, own, (end - 1, use.slot))
        warpgroup.wait_group(0)
        visit = visit_of(shared, rows, use.slot, end)
        self.release(shared.barriers.k_empty.at(use))
        if cutlass.const_expr(self.soft_cap):
            softmax.cap(mma.scores, own.scales.before_cap, cute.size(mma.scores))
        self.add_bias(mma.scores, own, end - 1)
        bases = self.bases(own, end - 1)
        if (end > seen.full_end) | (end <= seen.full_begin):
            hide(mma.scores, rows, end - 1, visit, self.tile.n)
        self.softmax_block(mma.scores, rows, own.scales, bases)
        wgmma.round_fragment(mma.scores, mma.probabilities)
        if cutlass.const_expr(self.padding is not None and not self.leaves_out):
            if work.padded_keys:
                self.clear_values(shared, work, use, end - 1 if visit is None else visit[0])

    def clear_values(self, shared: Shared, work: Work, use: Use, block: Int32):
        """Waits for V of a tile's first block, and writes 0 to keys past the length; all meet."""
        thread, _, _ = cute.arch.thread_idx()
        shared.barriers.v_full.wait(use)
        v, thread = shared.v[None, None, use.slot], thread - WARPGROUP
        clear_padding(v, thread, work.band.key_length - block * self.tile.n, self.padding)

    @cute.jit
    def step(
        self,
        shared: Shared,
        mma: Operands,
        rows: Rows,
        own: Scores,
        place: Place,
        block: Int32,
        masked: cutlass.Constexpr[bool],
        form: cutlass.Constexpr[Form | None] = None,
    ):
        """Issues a block's scores and the output product of the block before; then its softmax."""
        now = place.ring_end - block
        use, last = shared.barriers.k_full.use(now), shared.barriers.v_full.use(now - 1)
        shared.barriers.k_full.wait(use)
        if cutlass.const_expr(self.takes_turns):
            self.await_turn(place.group)
        self.issue_scores(shared, mma, own, (block, use.slot), form)
        words = self.load_distances(own, block, form)
        shared.barriers.v_full.wait(last)
        vt = mma.vt[None, None, None, last.slot]
        mma.pv_product.issue(mma.acc, mma.probabilities, vt, accumulate=True)
        if cutlass.const_expr(self.takes_turns):
            self.pass_turn(place.group)
        if cutlass.const_expr(form == "pairs"):
            words = self.take_pairs(own, block)
        warpgroup.wait_group(1)
        if cutlass.const_expr(masked):
            visit = visit_of(shared, rows, use.slot, block + 1)
        self.release(shared.barriers.k_empty.at(use))
        if cutlass.const_expr(self.soft_cap and not masked):
            factors = self.capped_softmax(mma.scores, rows, own.scales)
        else:
            if cutlass.const_expr(self.soft_cap):
                softmax.cap(mma.scores, own.scales.before_cap, cute.size(mma.scores))
            self.add_bias(mma.scores, own, block, form, words)
            bases = self.bases(own, block, form)
            if cutlass.const_expr(masked):
                hide(mma.scores, rows, block, visit, self.tile.n)
            factors = self.softmax_block(mma.scores, rows, own.scales, bases)
        warpgroup.wait_group(0)
        self.release(shared.barriers.v_empty.at(last))
        self.rescale(mma.acc, factors)
        wgmma.round_fragment(mma.scores, mma.probabilities)


def source(key: KernelKey) -> KernelSource:
    """Returns the forward kernel of a key, with its launch."""
    kernel = Forward(key)
    tile = kernel.tile
    return forward_source(kernel, key, {"m": tile.m, "n": tile.n, "kv_stages": tile.kv_stages})
