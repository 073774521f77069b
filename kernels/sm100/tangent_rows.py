"""The softmax groups of the Blackwell tangent kernel: a thread has one row of one query tile."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from kernels.common import ptx as common_ptx
from kernels.common.resources import Shared
from kernels.common.softmax import select
from kernels.common.tangent_statistics import Statistics
from kernels.interface import BackwardScalars, Sizes
from kernels.sm100 import products, ptx, softmax
from kernels.sm100.forward_data import pop_work
from kernels.sm100.forward_description import UNIT
from kernels.sm100.forward_schedule import Work
from kernels.sm100.tangent_data import Config, Row, Sums, make_row
from kernels.sm100.tangent_description import PAIR

CHUNK = 32  # columns of tensor memory that a thread loads at a time


class RowRole:
    """Computes P and W of all blocks, then O' and LSE'."""

    def __init__(self, config: Config):
        self.config = config

    @cute.jit
    def softmax(
        self,
        shared: Shared,
        rounds: Int32,
        statistics: Statistics,
        sizes: Sizes,
        scalars: BackwardScalars,
    ):
        """Softmax warps: compute one row of every tile."""
        thread, _, _ = cute.arch.thread_idx()
        window = scalars.window if self.config.band else None
        tiles_done, blocks_done = Int32(0), Int32(0)
        for round_index in cutlass.range(rounds, unroll=1):
            work = pop_work(self.config, shared, round_index, window)
            query, head = work.unit(thread // UNIT)
            of_head = statistics.of_head(work.batch, head, sizes)
            row = make_row(work, query + thread % UNIT, of_head)
            sums = self.weigh_tile(shared, work, row, scalars, blocks_done)
            self.finish(shared, work, row, sums, (round_index, tiles_done))
            count = work.blocks.end - work.blocks.begin
            blocks_done += count
            if count > 0:
                tiles_done += 1

    def query_tile(self) -> Int32:
        """Returns which of the CTA's query tiles the thread's row is of."""
        thread, _, _ = cute.arch.thread_idx()
        return cute.arch.make_warp_uniform(thread // self.config.tile.rows)

    @cute.jit
    def weigh_tile(
        self, shared: Shared, work: Work, row: Row, scalars: BackwardScalars, blocks_done: Int32
    ) -> Sums:
        """Computes P and W of all blocks of a tile, and returns their sums."""
        begin, end = work.blocks.begin, work.blocks.end
        # Blocks masked on the right edge come first, then unmasked ones, then those masked on the
        # left.
        right = cutlass.max(cutlass.min(work.blocks.full_end, end), begin)
        left = cutlass.max(cutlass.min(work.blocks.full_begin, right), begin)
        phases = ((end, right, True), (right, left, False), (left, begin, True))
        if cutlass.const_expr(not self.config.band):
            phases = ((end, right, True), (right, begin, False))
        sums = Sums(Float32(0.0), Float32(0.0))
        for phase in cutlass.range_constexpr(len(phases)):
            above, down_to, masked = phases[phase]
            for block in cutlass.range(above - 1, down_to - 1, -1, unroll=1):
                ordinal = blocks_done + end - 1 - block
                sums = self.weigh(shared, row, scalars, (block, ordinal), sums, masked)
        return sums

    @cute.jit
    def weigh(
        self,
        shared: Shared,
        row: Row,
        scalars: BackwardScalars,
        place: tuple[Int32, Int32],
        sums: Sums,
        masked: cutlass.Constexpr[bool],
    ) -> Sums:
        """Replaces S by P and S' by W of a block, and adds both to the sums.

        place: the block, and how many the CTA had before; masked: whether rows may not see keys.
        """
        t, n, barriers = self.query_tile(), self.config.tile.n, shared.barriers
        first_key = place[0] * n
        s, p, w = (self.config.columns(x) for x in ("s", "p", "w"))
        at = products.lane_base() + s.first + self.config.buffer(t, place[1]) * s.step
        self.config.ring(barriers.s_full, t).wait(place[1])
        ptx.fence_after_sync()
        totals, weights = [], []
        for start in cutlass.range_constexpr(0, n, CHUNK):
            both = ptx.tmem_load_runs(at + start, PAIR, CHUNK, w.first - s.first)
            scores, tangents = both[:CHUNK], both[CHUNK:]
            if cutlass.const_expr(masked):
                bounds = first_key + start, row.low, row.high
                scores = softmax.mask(scores, *bounds)
                tangents = softmax.mask(tangents, *bounds, Float32(0.0))
            exponents = softmax.exponents(scores, -row.lse_log2, scalars.scale_log2)
            values = softmax.exponentials(exponents, 0, 0)
            moved = softmax.products(values, softmax.multiply(tangents, scalars.scale))
            totals, weights = softmax.accumulate(totals, values), softmax.accumulate(weights, moved)
            self.store(at + (p.first - s.first) + start // 2, values)
            self.store(at + (w.first - s.first) + start // 2, moved)
        ptx.tmem_store_wait()
        ptx.fence_before_sync()
        products.arrive(self.config.ring(barriers.p_full, t).at(place[1]))
        return Sums(sums.total + softmax.total(totals), sums.weighted + softmax.total(weights))

    def store(self, address: Int32, values: list[Float32]):
        """Stores values to tensor memory in the storage type."""
        ptx.tmem_store(address, self.rounded(values))

    def rounded(self, values: list[Float32]) -> list[Int32]:
        """Rounds values to the storage type, two a word."""
        pairs = zip(values[::2], values[1::2], strict=True)
        return [common_ptx.round_pair(self.config.dtype, low, high) for low, high in pairs]

    @cute.jit
    def finish(self, shared: Shared, work: Work, row: Row, sums: Sums, done: tuple[Int32, Int32]):
        """Writes a row of O' over that of O, and LSE' to global memory.

        done: the numbers of tiles before, and of those with blocks.
        """
        thread, _, _ = cute.arch.thread_idx()
        t, acc = self.query_tile(), self.config.columns("acc")
        has_blocks = work.blocks.end > work.blocks.begin
        inverse = select(row.sees, 1.0 / sums.total, Float32(0.0))
        lse_tangent = select(row.sees, sums.weighted * inverse, Float32(0.0))
        if row.query < cute.size(row.lse_tangent):
            row.lse_tangent[row.query] = lse_tangent
        shared.barriers.o_full[t].wait(done[0])
        if has_blocks:
            shared.barriers.acc_full[t].wait(done[1])
            ptx.fence_after_sync()
        own = shared.o[thread % self.config.tile.rows, None, PAIR * t]
        first = products.lane_base() + acc.first + t * acc.step
        # The loop is not unrolled: the addresses of all stores would stay in registers.
        for chunk in cutlass.range(self.config.head_dim // CHUNK, unroll=1):
            place = cute.local_tile(own, (CHUNK,), (chunk,))
            output = cute.make_rmem_tensor((CHUNK,), self.config.dtype)
            cute.autovec_copy(place, output)
            moved = cute.make_rmem_tensor((CHUNK,), Float32)
            moved.fill(0.0)
            if has_blocks:
                values = ptx.tmem_load(first + chunk * CHUNK, CHUNK)
                for i in cutlass.range_constexpr(CHUNK):
                    value = values[i] * inverse - lse_tangent * Float32(output[i])
                    moved[i] = select(row.sees, value, Float32(0.0))
            words = self.rounded([moved[i] for i in range(CHUNK)])
            pairs = cute.recast_tensor(output, Int32)
            for i in cutlass.range_constexpr(CHUNK // 2):
                pairs[i] = words[i]
            cute.autovec_copy(output, place)
        cute.arch.fence_proxy("async.shared", space="cta")
        products.arrive(shared.barriers.out_full[t].first)
