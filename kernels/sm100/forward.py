"""Blackwell forward: O = softmax(scale * Q K^T) V and LSE, two query tiles of 128 rows in ping-pong.

    load warp         TMA: Q of both tiles, K and V blocks into one ring, last block first
    MMA warp          S_t(i) = Q_t K(i)^T      both operands from shared memory, S to tensor memory
                      O_t   += P_t(i) V(i)     P from tensor memory; its early keys before its late
    softmax group t   one row a thread: S from tensor memory to registers, reference maximum,
                      P = exp2(S * scale_log2 - reference * scale_log2) back over S, row sum last
    correction group  O_t *= factor in tensor memory where a row's reference moved; at the end
                      O_t / sum to shared memory
    store warp        TMA: output tiles to global memory

Order of the products: S_0(0) S_1(0), then for every block i: O_0 S_0(i+1) O_1 S_1(i+1): while one
tile's softmax works, the tensor core has the other's products.

    barrier      from -> to                     once per
    q_full       load -> mma                    query tile
    q_empty      mma -> load                    query tile
    kv_full      load -> mma                    block of K or V
    kv_empty     mma -> load                    block of K or V
    s_full       mma -> softmax                 block
    p_early      softmax, correction -> mma     block
    p_late       softmax -> mma                 block
    FACTORS      softmax -> correction          block but the first; named, of 2 warps each
    o_full       mma -> correction              query tile
    sums_full    softmax -> correction          query tile
    sums_empty   correction -> softmax          query tile
    out_full     correction -> store            query tile
    out_empty    store -> correction            query tile

Note [what needs no barrier]: S_t(i+1) overwrites S_t(i) and P_t(i), and comes behind O_t's product
of block i in the order in which the MMA warp issues; that product waited for all of P_t(i). A
factor is overwritten by the softmax warp of block i+1, which waited for S_t(i+1), and so for the
correction warps' arrival on p_early of block i, behind their reading the factor of block i. O_t is
overwritten by the next tile's first product, behind the correction warps' arrival on its p_early.
O_t may be rescaled when a factor is there: S_t(i) was complete, and so were all products before it.

(FlashAttention-4: ping-pong tiles, conditional rescaling, correction warps, P in two parts.)
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync

from fa4_jax.key import KernelKey
from fa4_jax.manifest import Factor, Launch, Param, Result
from kernels.common import bands, launches, tensors
from kernels.common import ptx as common_ptx
from kernels.common.schedule import ForwardShape, Schedule, Work, assign, make_schedule
from kernels.sm100 import products, ptx, softmax
from kernels.sm100.forward_data import (
    ARRIVALS,
    FACTORS,
    TILES,
    WARPS_OF_ROLE,
    Maps,
    Shared,
    allocate,
    barrier_count,
)
from kernels.sm100.tiles import FORWARD_TILES, L2_BUDGET_BYTES, TENSOR_MEMORY_COLUMNS
from kernels.sources import KernelSource

LN_2 = 0.6931471805599453
CHUNK = 32  # columns of tensor memory that a thread takes at a time
NO_OUTPUT = -1.0  # as an inverse sum: the row saw no key or does not exist


class Forward:
    """The kernel of one key; attributes are compile-time constants."""

    def __init__(self, key: KernelKey):
        self.dtype = tensors.TYPES[key.dtype]
        self.head_dim = key.head_dim
        self.band = key.band
        self.tile = FORWARD_TILES[key.head_dim]
        self.columns = self.tile.columns(key.head_dim)
        self.shape = ForwardShape(
            m=self.tile.m,
            n=self.tile.n,
            kv_row_bytes=2 * key.head_dim * 2,
            l2_bytes=L2_BUDGET_BYTES,
            band=key.band,
        )
        rows, n = self.tile.rows, self.tile.n
        k_major, mn_major = products.K_MAJOR, products.MN_MAJOR
        self.qk = products.Product(self.dtype, rows, n, (k_major, k_major))
        self.pv = products.Product(
            self.dtype, rows, key.head_dim, (k_major, mn_major), products.TENSOR
        )

    @cute.jit
    def __call__(
        self,
        q: cute.Pointer,
        k: cute.Pointer,
        v: cute.Pointer,
        extents: cute.Pointer,
        o: cute.Pointer,
        lse: cute.Pointer,
        batch: Int32,
        query_length: Int32,
        key_length: Int32,
        heads: Int32,
        kv_heads: Int32,
        head_dim: Int32,
        scale_log2: Float32,
        rescale_threshold_log2: Float32,
        window_left: Int32,
        window_right: Int32,
        sm_count: Int32,
        stream: cuda.CUstream,
    ):
        tile, d = self.tile, self.head_dim
        q_tensor = tensors.bthd_tensor(q, (batch, query_length, heads, head_dim))
        k_tensor = tensors.bthd_tensor(k, (batch, key_length, kv_heads, head_dim))
        v_tensor = tensors.bthd_tensor(v, (batch, key_length, kv_heads, head_dim))
        o_tensor = tensors.bthd_tensor(o, (batch, query_length, heads, head_dim))
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()

        def layout(rows):
            staged = tensors.tile_layout(self.dtype, rows, d, 1, tile.span_bytes)
            return cute.slice_(staged, (None, None, 0))

        q_map, _ = cpasync.make_tiled_tma_atom(load, q_tensor, layout(tile.rows), (tile.rows, d))
        k_map, _ = cpasync.make_tiled_tma_atom(load, k_tensor, layout(tile.n), (tile.n, d))
        v_map, _ = cpasync.make_tiled_tma_atom(load, v_tensor, layout(tile.n), (tile.n, d))
        o_map, _ = cpasync.make_tiled_tma_atom(store, o_tensor, layout(tile.rows), (tile.rows, d))
        ctas = cute.ceil_div(query_length, tile.m) * heads * batch
        ctas = cutlass.min(ctas, sm_count)
        self.kernel(
            q_map,
            k_map,
            v_map,
            o_map,
            extents,
            lse,
            batch,
            query_length,
            key_length,
            heads,
            kv_heads,
            scale_log2,
            rescale_threshold_log2,
            window_left,
            window_right,
        ).launch(
            grid=[ctas, 1, 1],
            block=[tile.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self,
        q_map: cute.CopyAtom,
        k_map: cute.CopyAtom,
        v_map: cute.CopyAtom,
        o_map: cute.CopyAtom,
        extents: cute.Pointer,
        lse: cute.Pointer,
        batch: Int32,
        query_length: Int32,
        key_length: Int32,
        heads: Int32,
        kv_heads: Int32,
        scale_log2: Float32,
        rescale_threshold_log2: Float32,
        window_left: Int32,
        window_right: Int32,
    ):
        maps = Maps(q_map, k_map, v_map, o_map)
        shared = allocate(self.dtype, self.head_dim, self.tile)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        mma_warp, _ = WARPS_OF_ROLE["mma"]
        if warp == mma_warp:
            cute.arch.alloc_tmem(TENSOR_MEMORY_COLUMNS, shared.tmem_base)
            cute.arch.relinquish_tmem_alloc_permit()
        if warp == WARPS_OF_ROLE["load"][0]:
            for descriptor in (maps.q, maps.k, maps.v, maps.o):
                cpasync.prefetch_descriptor(descriptor)
            with cute.arch.elect_one():
                for name, arrivals in ARRIVALS.items():
                    for i in cutlass.range_constexpr(barrier_count(name, self.tile)):
                        cute.arch.mbarrier_init(getattr(shared.barriers, name) + i, arrivals)
        cute.arch.mbarrier_init_fence()
        ptx.fence_before_sync()
        cute.arch.sync_threads()
        ptx.fence_after_sync()
        base = cute.arch.retrieve_tmem_ptr(Float32, 16, shared.tmem_base)

        sizes = (batch, query_length, key_length, heads, kv_heads)
        schedule = make_schedule(extents, sizes, (window_left, window_right), self.tile.m)
        scales = (scale_log2, rescale_threshold_log2)
        budget = self.tile.registers
        first_correction, _ = WARPS_OF_ROLE["correction"]
        if warp < first_correction:
            cute.arch.setmaxregister_increase(budget.softmax)
            self.soften(shared, schedule, base, lse, scales)
        elif warp < mma_warp:
            cute.arch.setmaxregister_decrease(budget.correction)
            self.correct(shared, schedule, base)
        else:
            cute.arch.setmaxregister_decrease(budget.others)
            if warp == mma_warp:
                self.multiply(shared, schedule, base)
            elif warp == WARPS_OF_ROLE["load"][0]:
                self.load(maps, shared, schedule)
            elif warp == WARPS_OF_ROLE["store"][0]:
                self.store(maps, shared, schedule)
        ptx.fence_before_sync()
        cute.arch.sync_threads()
        if warp == mma_warp:
            ptx.fence_after_sync()
            cute.arch.dealloc_tmem(base, TENSOR_MEMORY_COLUMNS)

    @cute.jit
    def load(self, maps: Maps, shared: Shared, schedule: Schedule):
        """Load warp: of every tile Q, then K and V of each block, last block first."""
        used, live = Int32(0), Int32(0)
        for turn in cutlass.range(schedule.rounds, unroll=1):
            if schedule.tile(turn) < schedule.tiles:
                work = assign(schedule.tile(turn), schedule, self.shape)
                count = work.blocks.end - work.blocks.begin
                if count > 0:
                    self.load_tile(maps, shared, work, live, used)
                    live += 1
                    used += count
        # Shared memory outlives every commit's arrival.
        for t in cutlass.range_constexpr(TILES):
            cute.arch.mbarrier_wait(shared.barriers.q_empty + t, (live & 1) ^ 1)
        for i in cutlass.range_constexpr(self.tile.kv_stages):
            slot, phase = tensors.ring_slot(2 * used + i, self.tile.kv_stages)
            cute.arch.mbarrier_wait(shared.barriers.kv_empty + slot, phase ^ 1)

    @cute.jit
    def load_tile(self, maps: Maps, shared: Shared, work: Work, live: Int32, used: Int32):
        """Loads of one tile that has blocks, after `live` such tiles and `used` blocks."""
        tile, d = self.tile, self.head_dim
        coordinates = tensors.bthd_coordinates()
        q = coordinates[None, None, work.head, work.batch]
        q_rows = cute.domain_offset((work.first_row, 0), q)
        kv = coordinates[None, None, work.kv_head, work.batch]
        kv_tiles = cute.local_tile(kv, (tile.n, d), (None, 0))
        for t in cutlass.range_constexpr(TILES):
            # The first pass finds everything empty: parity 1 passes on a new barrier.
            cute.arch.mbarrier_wait(shared.barriers.q_empty + t, (live & 1) ^ 1)
            full = shared.barriers.q_full + t
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, tile.rows * d * 2)
            source = cute.local_tile(q_rows, (tile.rows, d), (t, 0))
            tensors.tma_load(maps.q, source, shared.q[None, None, t], full)
            if t == 0:
                self.load_block(maps.k, shared, kv_tiles, (work.blocks.end - 1, 2 * used))
        count = work.blocks.end - work.blocks.begin
        for step in cutlass.range(count, unroll=1):
            block = work.blocks.end - 1 - step
            position = 2 * (used + step)
            self.load_block(maps.v, shared, kv_tiles, (block, position + 1))
            if step + 1 < count:
                self.load_block(maps.k, shared, kv_tiles, (block - 1, position + 2))

    @cute.jit
    def load_block(self, atom: cute.CopyAtom, shared: Shared, kv_tiles: cute.Tensor, what: tuple):
        """One block of K or V, what = (block, position in the ring's history), into the ring."""
        block, position = what
        slot, phase = tensors.ring_slot(position, self.tile.kv_stages)
        full = shared.barriers.kv_full + slot
        cute.arch.mbarrier_wait(shared.barriers.kv_empty + slot, phase ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, self.tile.n * self.head_dim * 2)
        tensors.tma_load(atom, kv_tiles[None, None, block], shared.kv[None, None, slot], full)

    @cute.jit
    def multiply(self, shared: Shared, schedule: Schedule, base: cute.Pointer):
        """MMA warp: all products of all tiles."""
        used, live = Int32(0), Int32(0)
        for turn in cutlass.range(schedule.rounds, unroll=1):
            if schedule.tile(turn) < schedule.tiles:
                work = assign(schedule.tile(turn), schedule, self.shape)
                count = work.blocks.end - work.blocks.begin
                if count > 0:
                    self.multiply_tile(shared, work, base, live, used)
                    live += 1
                    used += count

    @cute.jit
    def multiply_tile(
        self, shared: Shared, work: Work, base: cute.Pointer, live: Int32, used: Int32
    ):
        """Products of one tile that has blocks, after `live` such tiles and `used` blocks."""
        barriers = shared.barriers
        count = work.blocks.end - work.blocks.begin
        k_slot, k_phase = tensors.ring_slot(2 * used, self.tile.kv_stages)
        for t in cutlass.range_constexpr(TILES):
            cute.arch.mbarrier_wait(barriers.q_full + t, live & 1)
            if t == 0:
                cute.arch.mbarrier_wait(barriers.kv_full + k_slot, k_phase)
            self.multiply_scores(shared, base, t, k_slot)
        products.commit(barriers.kv_empty + k_slot)
        for step in cutlass.range(count - 1, unroll=1):
            v_slot, v_phase = tensors.ring_slot(2 * (used + step) + 1, self.tile.kv_stages)
            k_slot, k_phase = tensors.ring_slot(2 * (used + step) + 2, self.tile.kv_stages)
            self.await_values(shared, work, v_slot, v_phase, step)
            for t in cutlass.range_constexpr(TILES):
                self.multiply_values(shared, base, t, v_slot, (used + step, step > 0))
                if t == TILES - 1:
                    products.commit(barriers.kv_empty + v_slot)
                else:
                    cute.arch.mbarrier_wait(barriers.kv_full + k_slot, k_phase)
                self.multiply_scores(shared, base, t, k_slot)
            products.commit(barriers.kv_empty + k_slot)
        for t in cutlass.range_constexpr(TILES):
            products.commit(barriers.q_empty + t)
        v_slot, v_phase = tensors.ring_slot(2 * (used + count) - 1, self.tile.kv_stages)
        self.await_values(shared, work, v_slot, v_phase, count - 1)
        for t in cutlass.range_constexpr(TILES):
            self.multiply_values(shared, base, t, v_slot, (used + count - 1, count > 1))
            products.commit(barriers.o_full + t)
        products.commit(barriers.kv_empty + v_slot)

    @cute.jit
    def multiply_scores(
        self, shared: Shared, base: cute.Pointer, t: cutlass.Constexpr[int], k_slot: Int32
    ):
        """S_t = Q_t K^T."""
        q = self.qk.shared_a(shared.q)[None, None, None, t]
        k = self.qk.shared_b(shared.kv)[None, None, None, k_slot]
        scores = self.qk.accumulator(base, self.columns.s[t])
        steps = (0, self.head_dim // products.K_STEP)
        self.qk.issue(scores, q, k, False, steps)
        products.commit(shared.barriers.s_full + t)

    @cute.jit
    def multiply_values(
        self,
        shared: Shared,
        base: cute.Pointer,
        t: cutlass.Constexpr[int],
        v_slot: Int32,
        position: tuple,
    ):
        """O_t += P_t V, early keys first; position = (blocks before this one, accumulate)."""
        block, accumulate = position
        n, early = self.tile.n, self.tile.early_keys // products.K_STEP
        p = self.pv.tensor_a(base, self.columns.p[t], n)
        v = self.pv.shared_b(shared.kv_transposed)[None, None, None, v_slot]
        acc = self.pv.accumulator(base, self.columns.o[t])
        cute.arch.mbarrier_wait(shared.barriers.p_early + t, block & 1)
        ptx.fence_after_sync()
        self.pv.issue(acc, p, v, accumulate, (0, early))
        cute.arch.mbarrier_wait(shared.barriers.p_late + t, block & 1)
        ptx.fence_after_sync()
        self.pv.issue(acc, p, v, True, (early, n // products.K_STEP))

    @cute.jit
    def await_values(self, shared: Shared, work: Work, slot: Int32, phase: Int32, step: Int32):
        """V of a block; in the last block rows past the key length, which may be NaN, become 0."""
        cute.arch.mbarrier_wait(shared.barriers.kv_full + slot, phase)
        if (step == 0) & work.padded_keys:
            first_row = work.band.key_length - (work.blocks.end - 1) * self.tile.n
            lane, _, _ = cute.arch.thread_idx()
            tensors.zero_rows(shared.kv[None, None, slot], first_row, lane % 32, 32)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()

    @cute.jit
    def soften(
        self,
        shared: Shared,
        schedule: Schedule,
        base: cute.Pointer,
        lse: cute.Pointer,
        scales: tuple,
    ):
        """Softmax warps: probabilities of all blocks of all tiles, and the LSE."""
        scale_log2, rescale_threshold_log2 = scales
        scales = (scale_log2, rescale_threshold_log2 / scale_log2)
        _, query_length, _, heads, _ = schedule.sizes
        used, live = Int32(0), Int32(0)
        for turn in cutlass.range(schedule.rounds, unroll=1):
            if schedule.tile(turn) < schedule.tiles:
                work = assign(schedule.tile(turn), schedule, self.shape)
                count = work.blocks.end - work.blocks.begin
                row_lse = cute.make_tensor(
                    lse + (cutlass.Int64(work.batch) * heads + work.head) * query_length,
                    cute.make_layout(query_length),
                )
                self.soften_tile(shared, work, base, row_lse, scales, (live, used))
                if count > 0:
                    live += 1
                    used += count

    @cute.jit
    def soften_tile(
        self,
        shared: Shared,
        work: Work,
        base: cute.Pointer,
        row_lse: cute.Tensor,
        scales: tuple,
        position: tuple,
    ):
        """One row of one query tile, from scores to its inverse sum and LSE."""
        scale_log2, _ = scales
        live, used = position
        thread, _, _ = cute.arch.thread_idx()
        t = cute.arch.make_warp_uniform(thread // self.tile.rows)
        lane_row = thread % self.tile.rows
        row = work.first_row + thread
        low, high = bands.row_limits(work.band, row, tensors.INT32)
        reference, row_sum = -Float32.inf, Float32(0.0)
        begin, end = work.blocks.begin, work.blocks.end
        if end > begin:
            # Blocks masked on the right edge, then unmasked ones, then those masked on the left.
            right = cutlass.max(cutlass.min(work.blocks.full_end, end), begin)
            left = cutlass.max(cutlass.min(work.blocks.full_begin, right), begin)
            phases = ((end, right, True), (right, left, False), (left, begin, True))
            if cutlass.const_expr(not self.band):
                phases = ((end, right, True), (right, begin, False))
            for phase in cutlass.range_constexpr(len(phases)):
                above, down_to, masked = phases[phase]
                for block in cutlass.range(above - 1, down_to - 1, -1, unroll=1):
                    reference, row_sum = self.soften_block(
                        shared,
                        base,
                        (t, lane_row, block, used + end - 1 - block, block != end - 1),
                        (reference, row_sum),
                        scales,
                        (low, high),
                        masked,
                    )
        valid = (row < work.band.query_length) & (row_sum != 0.0)
        logarithm = (reference * scale_log2 + cute.math.log2(row_sum, fastmath=True)) * LN_2
        if row < cute.size(row_lse):
            row_lse[row] = softmax.select(valid, logarithm, -Float32.inf)
        if end > begin:
            cute.arch.mbarrier_wait(shared.barriers.sums_empty + t, (live & 1) ^ 1)
            shared.inverse_sums[lane_row, t] = softmax.select(
                valid, 1.0 / row_sum, Float32(NO_OUTPUT)
            )
            self.arrive(shared.barriers.sums_full + t)

    @cute.jit
    def soften_block(
        self,
        shared: Shared,
        base: cute.Pointer,
        position: tuple,
        row_state: tuple,
        scales: tuple,
        limits: tuple,
        masked: cutlass.Constexpr[bool],
    ):
        """P of one block from its S; returns the row's new reference and sum.

        position: (query tile, row in it, block, blocks before it, whether any is in this tile).
        """
        t, lane_row, block, ordinal, later = position
        reference, row_sum = row_state
        scale_log2, lag_limit = scales
        n = self.tile.n
        lanes = products.lane_base(base.toint())
        s_address = lanes + self.columns.s[0] + t * (self.columns.s[1] - self.columns.s[0])
        p_address = lanes + self.columns.p[0] + t * (self.columns.p[1] - self.columns.p[0])
        cute.arch.mbarrier_wait(shared.barriers.s_full + t, ordinal & 1)
        ptx.fence_after_sync()
        scores = ptx.tmem_load(s_address, n)
        if cutlass.const_expr(masked):
            scores = softmax.mask(scores, block * n, *limits)
        new = softmax.new_reference(scores, reference, lag_limit)
        factor = softmax.rescale_factor(reference, new, scale_log2)
        if later:
            shared.factors[lane_row, t] = factor
            warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
            cute.arch.barrier_arrive(barrier_id=FACTORS + warp, number_of_threads=64)
        shift = softmax.finite_reference(new) * scale_log2
        values = []
        for start in cutlass.range_constexpr(0, n, CHUNK):
            chunk = softmax.exponentiate(scores[start : start + CHUNK], shift, scale_log2)
            rounded = [
                common_ptx.round_pair(self.dtype, low, high)
                for low, high in zip(chunk[::2], chunk[1::2], strict=True)
            ]
            ptx.tmem_store(p_address + start // 2, rounded)
            values += chunk
            if start + CHUNK == self.tile.early_keys:
                self.release_probabilities(shared.barriers.p_early + t)
        self.release_probabilities(shared.barriers.p_late + t)
        return new, row_sum * factor + softmax.total(values)

    def release_probabilities(self, barrier: cute.Pointer):
        """What this warp has stored of P may be multiplied."""
        ptx.tmem_store_wait()
        ptx.fence_before_sync()
        self.arrive(barrier)

    def arrive(self, barrier: cute.Pointer):
        """One arrival per warp, behind what all its lanes did."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(barrier)

    @cute.jit
    def correct(self, shared: Shared, schedule: Schedule, base: cute.Pointer):
        """Correction warps: rescaling of O, and output tiles to shared memory."""
        used, live, turns = Int32(0), Int32(0), Int32(0)
        for turn in cutlass.range(schedule.rounds, unroll=1):
            if schedule.tile(turn) < schedule.tiles:
                work = assign(schedule.tile(turn), schedule, self.shape)
                count = work.blocks.end - work.blocks.begin
                if count > 0:
                    self.correct_tile(shared, base, count)
                for t in cutlass.range_constexpr(TILES):
                    self.write_output(shared, base, t, (count > 0, live, turns))
                turns += 1
                if count > 0:
                    live += 1
                    used += count

    @cute.jit
    def correct_tile(self, shared: Shared, base: cute.Pointer, count: Int32):
        """Rescales the accumulators of both query tiles, block by block."""
        thread, _, _ = cute.arch.thread_idx()
        lane_row = thread % self.tile.rows
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4
        lanes = products.lane_base(base.toint())
        for t in cutlass.range_constexpr(TILES):
            # The first product of a tile overwrites O, which these warps have read by now.
            ptx.fence_before_sync()
            self.arrive(shared.barriers.p_early + t)
        for _ in cutlass.range(count - 1, unroll=1):
            for t in cutlass.range_constexpr(TILES):
                cute.arch.barrier(barrier_id=FACTORS + 4 * t + warp, number_of_threads=64)
                ptx.fence_after_sync()
                factor = shared.factors[lane_row, t]
                if cute.arch.vote_any_sync(factor != 1.0):
                    for start in cutlass.range_constexpr(0, self.head_dim, CHUNK):
                        address = lanes + self.columns.o[t] + start
                        values = ptx.tmem_load(address, CHUNK)
                        ptx.tmem_store(address, softmax.multiply(values, factor))
                    ptx.tmem_store_wait()
                ptx.fence_before_sync()
                self.arrive(shared.barriers.p_early + t)

    @cute.jit
    def write_output(
        self,
        shared: Shared,
        base: cute.Pointer,
        t: cutlass.Constexpr[int],
        position: tuple,
    ):
        """O / sum of one query tile to shared memory; 0 where there is no output.

        position: (whether the tile has blocks, such tiles before it, tiles before it).
        """
        has_blocks, live, turn = position
        thread, _, _ = cute.arch.thread_idx()
        lane_row = thread % self.tile.rows
        inverse = Float32(NO_OUTPUT)
        if has_blocks:
            cute.arch.mbarrier_wait(shared.barriers.sums_full + t, live & 1)
            inverse = shared.inverse_sums[lane_row, t]
            self.arrive(shared.barriers.sums_empty + t)
            cute.arch.mbarrier_wait(shared.barriers.o_full + t, live & 1)
            ptx.fence_after_sync()
        cute.arch.mbarrier_wait(shared.barriers.out_empty + t, (turn & 1) ^ 1)
        lanes = products.lane_base(base.toint())
        # A loop that stays one: unrolled, the addresses of all stores would be kept in registers.
        for start in cutlass.range(0, self.head_dim, CHUNK, unroll=1):
            rounded = cute.make_rmem_tensor((CHUNK,), self.dtype)
            pairs = cute.recast_tensor(rounded, Int32)
            pairs.fill(0)
            if has_blocks:
                values = ptx.tmem_load(lanes + self.columns.o[t] + start, CHUNK)
                values = softmax.multiply(values, inverse)
                for i in cutlass.range_constexpr(CHUNK // 2):
                    pair = common_ptx.round_pair(self.dtype, values[2 * i], values[2 * i + 1])
                    pairs[i] = Int32(cutlass.select_(inverse < 0.0, Int32(0), pair))
            row = cute.local_tile(shared.o[lane_row, None, t], (CHUNK,), (start // CHUNK,))
            cute.autovec_copy(rounded, row)
        cute.arch.fence_proxy("async.shared", space="cta")
        self.arrive(shared.barriers.out_full + t)

    @cute.jit
    def store(self, maps: Maps, shared: Shared, schedule: Schedule):
        """Store warp: output tiles to global memory."""
        turns = Int32(0)
        for turn in cutlass.range(schedule.rounds, unroll=1):
            if schedule.tile(turn) < schedule.tiles:
                work = assign(schedule.tile(turn), schedule, self.shape)
                o = tensors.bthd_coordinates()[None, None, work.head, work.batch]
                o = cute.domain_offset((work.first_row, 0), o)
                for t in cutlass.range_constexpr(TILES):
                    cute.arch.mbarrier_wait(shared.barriers.out_full + t, turns & 1)
                    target = cute.local_tile(o, (self.tile.rows, self.head_dim), (t, 0))
                    tensors.tma_store(maps.o, shared.o[None, None, t], target)
                    cute.arch.cp_async_bulk_commit_group()
                for t in cutlass.range_constexpr(TILES):
                    cute.arch.cp_async_bulk_wait_group(TILES - 1 - t, read=True)
                    self.arrive(shared.barriers.out_empty + t)
                turns += 1
        # Shared memory and the CTA outlive the last store.
        cute.arch.cp_async_bulk_wait_group(0)


Forward.kernel.set_name_prefix("fa4_fwd", remove_cutlass_symbol=True, keep_mangled_name=False)
Forward.__call__.set_name_prefix(
    "fa4_fwd_host", remove_cutlass_symbol=True, keep_mangled_name=False
)


def source(key: KernelKey) -> KernelSource:
    """The forward kernel of a key, with its launch."""
    kernel = Forward(key)
    tile = kernel.tile
    scalars = (
        *launches.scalars("f32", "scale_log2", "rescale_threshold_log2"),
        *launches.scalars("i32", "window_left", "window_right"),
    )
    launch = Launch(
        operands=("q", "k", "v", "extents"),
        results=(
            Result("o", key.dtype, launches.dims("q", (0, 1, 2, 3))),
            Result("lse", "f32", launches.dims("q", (0, 2, 1))),
        ),
        params=(
            launches.bthd_map("q", tile.rows, tile.span_bytes),
            launches.bthd_map("k", tile.n, tile.span_bytes),
            launches.bthd_map("v", tile.n, tile.span_bytes),
            launches.bthd_map("o", tile.rows, tile.span_bytes),
            *launches.pointers("extents", "lse"),
            *launches.SIZES,
            *scalars,
        ),
        grid=(
            (
                Factor(buffer="q", axis=1, divisor=tile.m),
                Factor(buffer="q", axis=2),
                Factor(buffer="q", axis=0),
            ),
            launches.ONE,
            launches.ONE,
        ),
        block=(tile.threads, 1, 1),
        dynamic_smem_bytes=tile.smem_bytes(key.head_dim),
        persistent=True,
    )
    host_arguments = (
        *launches.pointers("q", "k", "v", "extents", "o", "lse"),
        *launches.SIZES,
        launches.dim("head_dim", "q", 3),
        *scalars,
        Param("sm_count", "sm_count"),
    )
    return KernelSource(
        host=kernel,
        arguments=launches.example_arguments(host_arguments, key.dtype),
        host_arguments=host_arguments,
        launch=launch,
        tile={"m": tile.m, "n": tile.n, "kv_stages": tile.kv_stages},
        symbol_prefix="fa4_fwd",
    )
