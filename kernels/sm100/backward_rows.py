"""Roles of the Blackwell backward that work row by row: compute and reduce warps."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kernels.common import bands, tensors
from kernels.common import ptx as common_ptx
from kernels.common.softmax import exp2
from kernels.sm100 import products, ptx, softmax
from kernels.sm100.backward_data import HALVES, WARPS_OF_ROLE, Config, Maps, Rows, Shared, Work

CHUNK = 32  # columns of tensor memory that a thread takes at a time
STORED = 1  # named barrier of all compute warps


class RowRoles:
    """Compute: a thread has half of the queries of one key. Reduce: a thread has one query."""

    def __init__(self, config: Config):
        self.config = config

    @cute.jit
    def compute(self, maps: Maps, shared: Shared, work: Work, scales: tuple):
        """Compute warps: P and dS of all steps, then dV and dK."""
        scale_log2, scale = scales
        first_warp, _ = WARPS_OF_ROLE["compute"]
        thread, _, _ = cute.arch.thread_idx()
        thread = thread - first_warp * 32
        half = cute.arch.make_warp_uniform(thread // self.config.tile.n)
        key_row = thread % self.config.tile.n
        key = work.first_key + key_row
        low, high = bands.row_limits(work.band.transposed(), key, tensors.INT32)
        high = Int32(cutlass.select_(key < work.band.key_length, high, Int32(0)))
        steps = work.steps()
        for step in cutlass.range(steps, unroll=1):
            _, block = work.step(step, self.config.deterministic)
            edge = (block < work.blocks.full_begin) | (block >= work.blocks.full_end)
            edge = edge | (work.first_key + self.config.tile.n > work.band.key_length)
            first_query = block * self.config.tile.m + half * (self.config.tile.m // HALVES)
            # A block that needs no mask gets bounds that hide nothing.
            first = Int32(cutlass.select_(edge, low - first_query, Int32(0)))
            last = Int32(cutlass.select_(edge, high - first_query, Int32(self.config.tile.m)))
            p = self.probabilities(shared, (half, step, edge), (first, last), scale_log2)
            self.score_gradients(shared, (half, step, key_row), p)
        self.write_gradients(maps, shared, work, (half, key_row, steps), scale)

    @cute.jit
    def probabilities(
        self,
        shared: Shared,
        position: tuple,
        limits: tuple,
        scale_log2: Float32,
    ):
        """P = exp2(S * scale_log2 - lse_log2) of a step, to tensor memory; returns it in fp32.

        position: (half, step, whether any pair may be hidden).
        """
        half, step, edge = position
        tile, barriers = self.config.tile, shared.barriers
        count = tile.m // HALVES
        slot, _ = tensors.ring_slot(step, tile.stages)
        first = half * count
        scores_at = products.lane_base() + self.config.columns.s + first
        cute.arch.mbarrier_wait(barriers.s_full, step & 1)
        ptx.fence_after_sync()
        scores = ptx.tmem_load(scores_at, count)
        lse_log2 = self.statistics(shared.lse_log2, slot, first, count)
        p = cute.make_rmem_tensor((count,), Float32)
        for i in cutlass.range_constexpr(0, count, 2):
            exponents = cute.arch.fma_packed_f32x2(
                (scores[i], scores[i + 1]),
                (scale_log2, scale_log2),
                (-lse_log2[i], -lse_log2[i + 1]),
            )
            p[i], p[i + 1] = exp2(exponents[0]), exp2(exponents[1])
        if edge:
            low, high = limits
            for i in cutlass.range_constexpr(count):
                inside = (i >= low) & (i < high)
                p[i] = softmax.select(inside, p[i], Float32(0.0))
        ptx.tmem_store(scores_at, self.rounded([p[i] for i in range(count)]))
        ptx.tmem_store_wait()
        ptx.fence_before_sync()
        products.arrive(barriers.p_full)
        return p

    @cute.jit
    def score_gradients(self, shared: Shared, position: tuple, p: cute.Tensor):
        """dS = P * (dP - delta) of a step, to tensor and to shared memory.

        position: (half, step, the thread's key in the tile).
        """
        half, step, key_row = position
        tile, barriers = self.config.tile, shared.barriers
        count = tile.m // HALVES
        slot, _ = tensors.ring_slot(step, tile.stages)
        first = half * count
        dp_at = products.lane_base() + self.config.columns.dp + first
        cute.arch.mbarrier_wait(barriers.dp_full, step & 1)
        ptx.fence_after_sync()
        for start in cutlass.range_constexpr(0, count, CHUNK):
            dp = ptx.tmem_load(dp_at + start, CHUNK)
            delta = self.statistics(shared.delta, slot, first + start, CHUNK)
            values = []
            for i in cutlass.range_constexpr(0, CHUNK, 2):
                difference = cute.arch.sub_packed_f32x2(
                    (dp[i], dp[i + 1]), (delta[i], delta[i + 1])
                )
                pair = (p[start + i], p[start + i + 1])
                values += list(cute.arch.mul_packed_f32x2(pair, difference))
            rounded = self.rounded(values)
            ptx.tmem_store(dp_at + start // 2, rounded)
            fragment = cute.make_rmem_tensor((CHUNK,), self.config.dtype)
            pairs = cute.recast_tensor(fragment, Int32)
            for i in cutlass.range_constexpr(CHUNK // 2):
                pairs[i] = rounded[i]
            row = cute.local_tile(shared.ds[key_row, None], (CHUNK,), ((first + start) // CHUNK,))
            cute.autovec_copy(fragment, row)
        ptx.tmem_store_wait()
        cute.arch.fence_proxy("async.shared", space="cta")
        ptx.fence_before_sync()
        products.arrive(barriers.ds_full)

    def statistics(self, tensor: cute.Tensor, slot: Int32, first: Int32, count: int) -> cute.Tensor:
        """Values of `count` consecutive queries of a step, the same for every thread."""
        values = cute.make_rmem_tensor((count,), Float32)
        source = tensor[None, slot]
        source = cute.make_tensor(source.iterator + first, cute.make_layout((4, count // 4)))
        parts = cute.make_tensor(values.iterator, cute.make_layout((4, count // 4)))
        for part in range(count // 4):
            cute.autovec_copy(source[None, part], parts[None, part])
        return values

    def rounded(self, values: list[Float32]) -> list[Int32]:
        """Pairs of values in the storage type."""
        return [
            common_ptx.round_pair(self.config.dtype, low, high)
            for low, high in zip(values[::2], values[1::2], strict=True)
        ]

    @cute.jit
    def write_gradients(
        self,
        maps: Maps,
        shared: Shared,
        work: Work,
        position: tuple,
        scale: Float32,
    ):
        """dV (compute warpgroup 0) and scale * dK (1) to global memory; 0 without any step.

        position: (half, the thread's key in the tile, steps).
        """
        half, key_row, steps = position
        columns, d = self.config.columns, self.config.part
        dv, dk = (
            cute.local_tile(memory, (self.config.tile.n, d), (0, work.part))
            for memory in (shared.v, shared.k)
        )
        if steps > 0:
            cute.arch.mbarrier_wait(shared.barriers.grads_full, 0)
            ptx.fence_after_sync()
        for part in cutlass.range_constexpr(HALVES):
            if half == part:
                column, staging = ((columns.dv, dv), (columns.dk, dk))[part]
                factor = (Float32(1.0), scale)[part]
                first = products.lane_base() + column
                # A loop that stays one, as in the forward's write_output.
                for start in cutlass.range(0, d, CHUNK, unroll=1):
                    fragment = cute.make_rmem_tensor((CHUNK,), self.config.dtype)
                    pairs = cute.recast_tensor(fragment, Int32)
                    pairs.fill(0)
                    if steps > 0:
                        values = softmax.multiply(ptx.tmem_load(first + start, CHUNK), factor)
                        rounded = self.rounded(values)
                        for i in cutlass.range_constexpr(CHUNK // 2):
                            pairs[i] = rounded[i]
                    row = cute.local_tile(staging[key_row, None], (CHUNK,), (start // CHUNK,))
                    cute.autovec_copy(fragment, row)
        cute.arch.fence_proxy("async.shared", space="cta")
        first_warp, warps = WARPS_OF_ROLE["compute"]
        cute.arch.barrier(barrier_id=STORED, number_of_threads=warps * 32)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == first_warp:
            kv = tensors.bthd_coordinates()[None, None, work.kv_head, work.batch]
            target = cute.local_tile(kv, (self.config.tile.n, d), (work.tile, work.part))
            with cute.arch.elect_one():
                tensors.tma_store(maps.dv, dv, target)
                tensors.tma_store(maps.dk, dk, target)
                cute.arch.cp_async_bulk_commit_group()
                # Shared memory outlives what the stores read.
                cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def reduce(self, shared: Shared, work: Work, rows: Rows):
        """Reduce warps: dQ of every step is added to dq_acc (backward.py, Note [dq_acc])."""
        tile, tile_size = self.config.tile, self.config.tile.m * self.config.head_dim
        count = self.config.part if tile.parts == 1 else tile.m
        lanes = WARPS_OF_ROLE["reduce"][1] * 32
        thread, _, _ = cute.arch.thread_idx()
        first = products.lane_base() + self.config.columns.dq
        for step in cutlass.range(work.steps(), unroll=1):
            head, block = work.step(step, self.config.deterministic)
            query_tile = (Int64(work.batch) * work.heads + head) * rows.tiles + block
            target = rows.dq_acc + query_tile * tile_size + work.part * (lanes * count)
            target = target + thread * 4
            cute.arch.mbarrier_wait(shared.barriers.dq_full, step & 1)
            ptx.fence_after_sync()
            values = ptx.tmem_load(first, count)
            ptx.fence_before_sync()
            products.arrive(shared.barriers.dq_empty)
            if cutlass.const_expr(self.config.deterministic):
                cute.arch.mbarrier_wait(shared.barriers.turn, step & 1)
            for chunk in cutlass.range_constexpr(count // 4):
                common_ptx.reduce_add_v4(
                    target + chunk * (lanes * 4), values[4 * chunk : 4 * chunk + 4]
                )
            if cutlass.const_expr(self.config.deterministic):
                products.arrive(shared.barriers.added)
