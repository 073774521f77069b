"""Roles of the Blackwell backward that work row by row: compute and reduce warps."""

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from fa4_jax import bands
from kernels.common import ptx as common_ptx
from kernels.common import resources, tensors
from kernels.common.backward_schedule import NO_RANGES, Work
from kernels.common.bias import KeyBias
from kernels.common.resources import Maps, Shared
from kernels.common.softmax import exp2, select
from kernels.common.state import Exponents, Limits, Rows
from kernels.sm100 import backward_mask, products, ptx, softmax
from kernels.sm100.backward_data import Config
from kernels.sm100.backward_description import COMPUTE_GROUPS
from kernels.sm100.backward_mask import HiddenKeys
from kernels.sm100.tiles import LANES

CHUNK = 32  # columns of tensor memory that a thread loads at a time


def statistics(tensor: cute.Tensor, slot: Int32, first: Int32, count: int) -> cute.Tensor:
    """Loads values of `count` consecutive queries of a step, the same for every thread.

    tensor: (queries, stage).
    """
    values = cute.make_rmem_tensor((count,), Float32)
    source = tensor[None, slot]
    source = cute.make_tensor(source.iterator + first, cute.make_layout((4, count // 4)))
    parts = cute.make_tensor(values.iterator, cute.make_layout((4, count // 4)))
    for part in range(count // 4):
        cute.autovec_copy(source[None, part], parts[None, part])
    return values


@dataclasses.dataclass(frozen=True)
class Queries:
    """The queries of a step that a thread works on, and which of them see its key.

    Attributes:
      first: of the step.
      step: of the CTA.
      limits: queries low <= i < high see the key, counted from `first`.
      is_edge: some pair may be hidden; otherwise the limits say nothing.
      keys: what ranges in memory hide besides.
      bias: what is added to the scores, if anything is.
    """

    first: Int32
    step: Int32
    limits: Limits
    is_edge: Boolean
    keys: HiddenKeys = NO_RANGES
    bias: KeyBias = NO_RANGES

    def after(self, skipped: int) -> "Queries":
        """Returns the queries without the first ones."""
        limits = Limits(self.limits.low - skipped, self.limits.high - skipped)
        keys, bias = self.keys, self.bias
        if keys is not None:
            keys = dataclasses.replace(keys, first_query=keys.first_query + skipped)
        if bias is not None:
            bias = bias.after(skipped)
        return Queries(self.first + skipped, self.step, limits, self.is_edge, keys, bias)

    def biased(self, scores: list[Float32], before_bias: Float32) -> list[Float32]:
        """Returns products as biased scores, where a call has a bias."""
        if self.bias is None:
            return scores
        found = cute.make_rmem_tensor((len(scores),), Float32)
        for i, score in enumerate(scores):
            found[i] = score
        add_bias(found, before_bias, self.bias)
        return [found[i] for i in range(len(scores))]


@cute.jit
def add_bias(scores: cute.Tensor, before_bias: Float32, bias: KeyBias):
    """Replaces products of one key by scores: times before_bias, plus the bias if there is any."""
    if cute.arch.vote_any_sync(bias.meets(cute.size(scores))):
        for i in cutlass.range_constexpr(cute.size(scores)):
            scores[i] = scores[i] * before_bias + bias.element(i)
    else:
        for i in cutlass.range_constexpr(cute.size(scores)):
            scores[i] = scores[i] * before_bias


@cute.jit
def probabilities(
    scores: list[Float32], lse_log2: cute.Tensor, scale_log2: Float32, queries: Queries
) -> cute.Tensor:
    """Returns exp2(S * scale_log2 - lse_log2) of one key, in fp32; 0 where the pair is hidden."""
    count = len(scores)
    p = cute.make_rmem_tensor((count,), Float32)
    for i in cutlass.range_constexpr(0, count, 2):
        exponents = cute.arch.fma_packed_f32x2(
            (scores[i], scores[i + 1]),
            (scale_log2, scale_log2),
            (-lse_log2[i], -lse_log2[i + 1]),
        )
        p[i], p[i + 1] = exp2(exponents[0]), exp2(exponents[1])
    if queries.is_edge:
        for i in cutlass.range_constexpr(count):
            inside = (i >= queries.limits.low) & (i < queries.limits.high)
            p[i] = select(inside, p[i], Float32(0.0))
    return p


@dataclasses.dataclass(frozen=True)
class StepStatistics:
    """One of the values that a step's queries have in shared memory."""

    tensor: cute.Tensor
    slot: Int32

    def load(self, first: Int32, count: int) -> cute.Tensor:
        """Loads them of `count` consecutive queries."""
        return statistics(self.tensor, self.slot, first, count)


@cute.jit
def exponents_with_ranges(
    scores: list[Float32], lse: StepStatistics, scales: Exponents, queries: Queries
) -> cute.Tensor:
    """Returns capped S * scale_log2 - lse_log2 of one key; -inf where the pair is hidden."""
    count = len(scores)
    limits = backward_mask.load_limits(queries.keys, count)
    scores = softmax.capped(scores, scales.before_cap)
    lse_log2 = lse.load(queries.first, count)
    exponents = cute.make_rmem_tensor((count,), Float32)
    for i in cutlass.range_constexpr(0, count, 2):
        exponents[i], exponents[i + 1] = cute.arch.fma_packed_f32x2(
            (scores[i], scores[i + 1]),
            (scales.scale_log2, scales.scale_log2),
            (-lse_log2[i], -lse_log2[i + 1]),
        )
    if queries.is_edge:
        for i in cutlass.range_constexpr(count):
            inside = (i >= queries.limits.low) & (i < queries.limits.high)
            exponents[i] = select(inside, exponents[i], -Float32.inf)
    backward_mask.hide(exponents, queries.keys, limits)
    return exponents


@cute.jit
def probabilities_with_ranges(
    dtype: type[cutlass.Numeric],
    scores: list[Float32],
    lse: StepStatistics,
    scales: Exponents,
    queries: Queries,
) -> tuple[list[Int32], cute.Tensor]:
    """Returns P of one key, rounded, by pairs, and P times the slope of the soft cap, in fp32."""
    count = len(scores)
    values = exponents_with_ranges(scores, lse, scales, queries)
    words = cute.make_rmem_tensor((count // 2,), Int32)
    if scales.before_cap != 0.0:
        per_cap = cute.arch.rcp_approx(scales.scale_log2)
        lse_log2 = lse.load(queries.first, count)
        for i in cutlass.range_constexpr(0, count, 2):
            p = exp2(values[i]), exp2(values[i + 1])
            words[i // 2] = common_ptx.round_pair(dtype, *p)
            for j in cutlass.range_constexpr(2):
                # What is hidden becomes -1, and so does the NaN of a row without keys: P is 0.
                capped = cute.arch.fmax((values[i + j] + lse_log2[i + j]) * per_cap, -1.0)
                values[i + j] = p[j] * (1.0 - capped * capped)
    else:
        for i in cutlass.range_constexpr(0, count, 2):
            values[i], values[i + 1] = exp2(values[i]), exp2(values[i + 1])
            words[i // 2] = common_ptx.round_pair(dtype, values[i], values[i + 1])
    return [words[i] for i in range(count // 2)], values


def probabilities_of(
    dtype: type[cutlass.Numeric],
    scores: list[Float32],
    lse: StepStatistics,
    scales: Exponents,
    queries: Queries,
) -> tuple[list[Int32], cute.Tensor]:
    """Returns P of one key, rounded, by pairs, and in fp32, times the slope of a soft cap."""
    if queries.keys is not None:
        return probabilities_with_ranges(dtype, scores, lse, scales, queries)
    lse_log2 = lse.load(queries.first, len(scores))
    scores = queries.biased(scores, scales.before_bias)
    p = probabilities(scores, lse_log2, scales.scale_log2, queries)
    return rounded_pairs(dtype, [p[i] for i in range(len(scores))]), p


def score_gradients(
    p: cute.Tensor, first: int, dp: list[Float32], delta: cute.Tensor
) -> list[Float32]:
    """Returns P * (dP - delta) of one key; dp and delta begin with query `first` of p."""
    values = []
    for i in range(0, len(dp), 2):
        difference = cute.arch.sub_packed_f32x2((dp[i], dp[i + 1]), (delta[i], delta[i + 1]))
        pair = (p[first + i], p[first + i + 1])
        values += list(cute.arch.mul_packed_f32x2(pair, difference))
    return values


def rounded_pairs(dtype: type[cutlass.Numeric], values: list[Float32]) -> list[Int32]:
    """Rounds pairs of values to the storage type."""
    return [
        common_ptx.round_pair(dtype, low, high)
        for low, high in zip(values[::2], values[1::2], strict=True)
    ]


class RowRoles:
    """The compute and the reduce role.

    A compute thread has half of the queries of one key; a reduce thread has one query, or, where dQ
    is transposed, some columns of all queries.
    """

    def __init__(self, config: Config):
        self.config = config

    @cute.jit
    def compute(
        self,
        maps: Maps,
        shared: Shared,
        work: Work,
        scale: Float32,
        exponents: Exponents,
    ):
        """Compute warps: compute P and dS of all steps, then store dV and dK."""
        thread, _, _ = cute.arch.thread_idx()
        thread = thread - self.config.description.role("compute").first_warp * 32
        half = cute.arch.make_warp_uniform(thread // self.config.tile.n)
        key_row = thread % self.config.tile.n
        key = work.first_key + key_row
        low, high = bands.row_limits(work.band.transposed(), key, tensors.INT32)
        high = Int32(cutlass.select_(key < work.band.key_length, high, Int32(0)))
        steps = work.steps()
        for step in cutlass.range(steps, unroll=1):
            if cutlass.const_expr(work.ranges is not None):
                # The slot is used again only after dK, which needs this thread's dS.
                shared.barriers.q_full.wait(step)
            head, block = work.step(step, self.config.deterministic)
            edge = (block < work.blocks.full_begin) | (block >= work.blocks.full_end)
            edge = edge | (work.first_key + self.config.tile.n > work.band.key_length)
            first = half * (self.config.tile.m // COMPUTE_GROUPS)
            first_query = block * self.config.tile.m + first
            # A block that needs no mask gets bounds that hide no query.
            begin = Int32(cutlass.select_(edge, low - first_query, Int32(0)))
            end = Int32(cutlass.select_(edge, high - first_query, Int32(self.config.tile.m)))
            keys = backward_mask.of_step(work, step, key, first_query)
            bias = work.bias_of(head, key, first_query)
            queries = Queries(first, step, Limits(begin, end), edge, keys, bias)
            p = self.probabilities(shared, queries, exponents)
            self.score_gradients(shared, queries, key_row, p)
        self.write_gradients(maps, shared, work, half, key_row, scale)

    @cute.jit
    def probabilities(
        self, shared: Shared, queries: Queries, exponents: Exponents
    ) -> list[Float32]:
        """Writes P of a step to tensor memory.

        Returns what (dP - delta) is multiplied with: P in fp32, times the slope of a soft cap.
        """
        first, step = queries.first, queries.step
        tile, barriers = self.config.tile, shared.barriers
        count = tile.m // COMPUTE_GROUPS
        slot = barriers.q_full.use(step).slot
        scores_at = products.lane_base() + self.config.columns("s").first + first
        barriers.s_full.wait(step)
        ptx.fence_after_sync()
        lse, weights = StepStatistics(shared.lse_log2, slot), []
        # With ranges or a bias there are no registers for all scores at once.
        chunk = CHUNK if self.config.ranges or self.config.bias else count
        for start in cutlass.range_constexpr(0, count, chunk):
            scores = ptx.tmem_load(scores_at + start, chunk)
            of_chunk = queries if chunk == count else queries.after(start)
            words, values = probabilities_of(self.config.dtype, scores, lse, exponents, of_chunk)
            ptx.tmem_store(scores_at + start // 2, words)
            weights += [values[i] for i in range(chunk)]
        ptx.tmem_store_wait()
        ptx.fence_before_sync()
        products.arrive(barriers.p_full.at(step))
        return weights

    @cute.jit
    def score_gradients(self, shared: Shared, queries: Queries, key_row: Int32, p: list[Float32]):
        """Writes dS = P * (dP - delta) of a step to tensor and to shared memory.

        key_row: the thread's key in the tile. p: times the slope of a soft cap.
        """
        first, step = queries.first, queries.step
        tile, barriers = self.config.tile, shared.barriers
        count = tile.m // COMPUTE_GROUPS
        slot = barriers.q_full.use(step).slot
        dp_at = products.lane_base() + self.config.columns("dp").first + first
        barriers.dp_full.wait(step)
        ptx.fence_after_sync()
        for start in cutlass.range_constexpr(0, count, CHUNK):
            dp = ptx.tmem_load(dp_at + start, CHUNK)
            delta = statistics(shared.delta, slot, first + start, CHUNK)
            rounded = self.rounded(score_gradients(p, start, dp, delta))
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
        products.arrive(barriers.ds_full.at(step))

    def key_tile(self, work: Work) -> Int32:
        """Returns which of the KV head's tiles of as many keys the CTA has."""
        return work.tile

    def rounded(self, values: list[Float32]) -> list[Int32]:
        """Rounds pairs of values to the storage type."""
        return rounded_pairs(self.config.dtype, values)

    @cute.jit
    def write_gradients(
        self,
        maps: Maps,
        shared: Shared,
        work: Work,
        group: Int32,
        key_row: Int32,
        scale: Float32,
    ):
        """Stores dV (compute warpgroup 0) and scale * dK (1), which are 0 if there is no step.

        key_row: the thread's key in the tile.
        """
        steps = work.steps()
        tile, columns = self.config.tile, self.config.columns
        if steps > 0:
            shared.barriers.grads_full.wait(0)
            ptx.fence_after_sync()
        for part in cutlass.range_constexpr(COMPUTE_GROUPS):
            if group == part:
                column, staging, d = (
                    (columns("dv").first, shared.v, tile.value_dim),
                    (columns("dk").first, shared.k, tile.head_dim),
                )[part]
                factor = (Float32(1.0), scale)[part]
                first = products.lane_base() + column
                # The loop is not unrolled, for the reason that the forward's write_output gives.
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
        resources.meet(self.config.description.named_barrier("stored"))
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == self.config.description.role("compute").first_warp:
            kv = tensors.bthd_coordinates()[None, None, work.kv_head, work.batch]
            dv = cute.local_tile(kv, (tile.keys, tile.value_dim), (self.key_tile(work), 0))
            dk = cute.local_tile(kv, (tile.keys, tile.head_dim), (self.key_tile(work), 0))
            with cute.arch.elect_one():
                tensors.tma_store(maps.dv, shared.v, dv)
                tensors.tma_store(maps.dk, shared.k, dk)
                cute.arch.cp_async_bulk_commit_group()
                # Shared memory must outlive the stores' reads.
                cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def reduce(self, shared: Shared, work: Work, rows: Rows):
        """Reduce warps: add dQ of every step to dq_acc (backward.py, Note [dq_acc])."""
        tile = self.config.tile
        width, tile_size = tile.dq_width, tile.m * tile.head_dim
        thread, _, _ = cute.arch.thread_idx()
        first = products.lane_base() + self.config.columns("dq").first
        for step in cutlass.range(work.steps(), unroll=1):
            if cutlass.const_expr(work.ranges is not None):
                shared.barriers.dq_full.wait(step)
            head, block = work.step(step, self.config.deterministic)
            query_tile = rows.tile(work.batch, work.heads, head, block)
            target = rows.dq_acc + query_tile * tile_size + thread * 4
            shared.barriers.dq_full.wait(step)
            ptx.fence_after_sync()
            values = ptx.tmem_load(first, tile.dq_products * width)
            ptx.fence_before_sync()
            products.arrive(shared.barriers.dq_empty.at(step))
            if cutlass.const_expr(self.config.deterministic):
                shared.barriers.dq_turn.wait(step)
            for index in cutlass.range_constexpr(tile.dq_products):
                lanes = LANES
                if cutlass.const_expr(tile.dq_transposed):
                    lanes = min(LANES, tile.head_dim - index * LANES)
                if thread < lanes:
                    for chunk in cutlass.range_constexpr(width // 4):
                        place = index * LANES * width + chunk * lanes * 4
                        begin = index * width + chunk * 4
                        common_ptx.reduce_add_v4(target + place, values[begin : begin + 4])
            if cutlass.const_expr(self.config.deterministic):
                products.arrive(shared.barriers.dq_added.at(step))
