"""Row by row roles of the Blackwell backward for pairs with M = 256: compute and reduce warps."""

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from fa4_jax import bands
from kernels.common import ptx as common_ptx
from kernels.common import ring, tensors
from kernels.common.backward_schedule import NO_RANGES, Work
from kernels.common.bias import KeyBias
from kernels.common.resources import Maps, Shared
from kernels.common.state import Exponents, Limits, Rows
from kernels.sm100 import backward_mask, backward_rows, products, ptx
from kernels.sm100.backward_description import COMPUTE_GROUPS
from kernels.sm100.backward_mask import HiddenKeys
from kernels.sm100.backward_pair_data import M256Config
from kernels.sm100.backward_rows import (
    Queries,
    StepStatistics,
    probabilities_of,
    rounded_pairs,
    score_gradients,
    statistics,
)
from kernels.sm100.tiles import LANES


@dataclasses.dataclass(frozen=True)
class KeyOfStep:
    """One key and half of a step's queries: the work of a compute thread.

    Attributes:
      group: the thread's compute warpgroup, whose queries the CTA of that rank has in dst.
      row: of the key in the pair's tile.
      low, high: queries low <= i < high of the step see the key.
      is_edge: some pair may be hidden; otherwise the limits say nothing.
      keys: what ranges in memory hide besides, by part of the step.
      bias: what is added to the step's scores, if anything is.
    """

    group: Int32
    row: Int32
    low: Int32
    high: Int32
    is_edge: Boolean
    keys: tuple[HiddenKeys, ...] = ()
    bias: KeyBias = NO_RANGES

    def queries(self, part: int, chunk: int, step: Int32) -> Queries:
        """Returns the thread's `chunk` queries of a part of the step."""
        first = (part * COMPUTE_GROUPS + self.group) * chunk
        limits = Limits(self.low - first, self.high - first)
        keys = self.keys[part] if self.keys else NO_RANGES
        bias = NO_RANGES if self.bias is None else self.bias.after(first)
        return Queries(first, step, limits, self.is_edge, keys, bias)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a reduce thread's values lie in a tile of dq_acc.

    Attributes:
      first: of the first four values.
      step: from four values to the next four.
      has_values: whether the thread has any.
    """

    first: Int32
    step: Int32
    has_values: Boolean


class RowRoles(backward_rows.RowRoles):
    """The compute and the reduce role.

    A compute thread has half of the queries of one key. A reduce thread has half of the columns of
    one query or, where dQ is transposed, one column of all queries.
    """

    config: M256Config

    def key_tile(self, work: Work) -> Int32:
        """Returns which of the KV head's tiles of as many keys the CTA has."""
        return work.tile * self.config.tile.ctas + work.rank

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
        tile = self.config.tile
        thread, _, _ = cute.arch.thread_idx()
        thread = thread - self.config.description.role("compute").first_warp * 32
        group = cute.arch.make_warp_uniform(thread // tile.keys)
        row = work.rank * tile.keys + thread % tile.keys
        key = work.first_key + row
        low, high = bands.row_limits(work.band.transposed(), key, tensors.INT32)
        high = Int32(cutlass.select_(key < work.band.key_length, high, Int32(0)))
        blocks = work.block_count()
        # Two loops rather than one, whose steps would have to be divided by the number of blocks.
        for member in cutlass.range(work.group, unroll=1):
            for index in cutlass.range(blocks, unroll=1):
                block = self.query_block(shared, work, member, index)
                edge = (block < work.blocks.full_begin) | (block >= work.blocks.full_end)
                edge = edge | (work.first_key + tile.n > work.band.key_length)
                # A block that needs no mask gets bounds that hide no query.
                begin = Int32(cutlass.select_(edge, low - block * tile.m, Int32(0)))
                end = Int32(cutlass.select_(edge, high - block * tile.m, Int32(tile.m)))
                step = member * blocks + index
                keys = self.hidden_keys(work, step, key, block * tile.m + group * tile.chunk)
                bias = work.bias_of(work.kv_head * work.group + member, key, block * tile.m)
                of_step = KeyOfStep(group, row, begin, end, edge, keys, bias)
                self.compute_step(shared, of_step, step, exponents)
        self.write_gradients(maps, shared, work, group, thread % tile.keys, scale)

    def query_block(self, shared: Shared, work: Work, member: Int32, index: Int32) -> Int32:
        """Returns the query block of the index-th step of a head of the group."""
        if work.ranges is None:
            return work.block(index, self.config.deterministic)
        step = member * work.block_count() + index
        shared.barriers.s_full.wait(step)
        _, block = work.step(step, self.config.deterministic)
        return block

    def hidden_keys(
        self, work: Work, step: Int32, key: Int32, first_query: Int32
    ) -> tuple[HiddenKeys, ...]:
        """Returns what ranges in memory hide, by part; first_query: of the group's first part."""
        if work.ranges is None:
            return ()
        stride = COMPUTE_GROUPS * self.config.tile.chunk
        return tuple(
            backward_mask.of_step(work, step, key, first_query + part * stride)
            for part in range(self.config.tile.parts)
        )

    @cute.jit
    def compute_step(self, shared: Shared, key: KeyOfStep, step: Int32, exponents: Exponents):
        """Computes P and dS of one key and half of a step's queries."""
        tile, barriers, columns = self.config.tile, shared.barriers, self.config.columns
        chunk, slot = tile.chunk, ring.nth_use(step, tile.statistics).slot
        lane, of_group = products.lane_base(), key.group * chunk
        parts = [key.queries(part, chunk, step) for part in range(tile.parts)]
        if cutlass.const_expr(not key.keys):  # Otherwise `query_block` has waited for it.
            barriers.s_full.wait(step)
        ptx.fence_after_sync()
        s, p = lane + columns("s").first, []
        stride = COMPUTE_GROUPS * chunk
        scores = ptx.tmem_load_runs(s + of_group, tile.parts, chunk, stride)
        if cutlass.const_expr(columns("dq").shares == "s"):
            ptx.fence_before_sync()
            products.arrive(barriers.s_read.first, ctas=2, stores=False)
        for part, queries in enumerate(parts):
            lse = StepStatistics(shared.lse_log2, slot)
            of_part = scores[part * chunk : (part + 1) * chunk]
            rounded, weights = probabilities_of(self.config.dtype, of_part, lse, exponents, queries)
            p.append(weights)
            ptx.tmem_store(s + of_group + part * (chunk // 2), rounded)
            ptx.tmem_store_wait()
            ptx.fence_before_sync()
            products.arrive(barriers.p_full[part].first, ctas=2, stores=False)

        barriers.dp_full.wait(step)
        ptx.fence_after_sync()
        first_dp, words = lane + columns("dp").first, []
        for part, queries in enumerate(parts):
            dp = ptx.tmem_load(first_dp + queries.first, chunk)
            delta = statistics(shared.delta, slot, queries.first, chunk)
            words.append(rounded_pairs(self.config.dtype, score_gradients(p[part], 0, dp, delta)))
            ptx.tmem_store(first_dp + of_group + part * (chunk // 2), words[part])
        ptx.tmem_store_wait()
        ptx.fence_before_sync()
        products.arrive(barriers.ds_full.first, ctas=2, stores=False)
        self.send(shared, key, step, words)

    def send(self, shared: Shared, key: KeyOfStep, step: Int32, words: list[list[Int32]]):
        """Writes dS to dst of the CTA that has the thread's queries there; words: by parts."""
        tile, use = self.config.tile, shared.barriers.dst_full.use(step)
        row_bytes = tile.queries * 2
        row = shared.dst.iterator.toint().to(Int32) + (use.slot * tile.n + key.row) * row_bytes
        # A span is a row: every 128 bytes have another place for the same vector of 16 bytes.
        swizzle = key.row * row_bytes // 128 % (row_bytes // 16) * 16
        for part, some in enumerate(words):
            ptx.store_swizzled_row(row, swizzle, some, key.group, part * tile.chunk * 2)
        ptx.fence_proxy_of_cluster()
        products.arrive(shared.barriers.dst_full.at(use), ctas=2)

    @cute.jit
    def reduce(self, shared: Shared, work: Work, rows: Rows):
        """Reduce warps: add dQ of every step to dq_acc (backward.py, Note [dq_acc])."""
        tile, barriers = self.config.tile, shared.barriers
        thread, _, _ = cute.arch.thread_idx()
        own = self.place_of_thread(work, thread)
        first = products.lane_base() + self.config.columns("dq").first
        for step in cutlass.range(work.steps(), unroll=1):
            if cutlass.const_expr(work.ranges is not None):
                barriers.dq_full.wait(step)
            head, block = work.step(step, self.config.deterministic)
            query_tile = rows.tile(work.batch, work.heads, head, block)
            target = rows.dq_acc + query_tile * (tile.m * tile.head_dim) + own.first
            if cutlass.const_expr(work.ranges is None):
                barriers.dq_full.wait(step)
            ptx.fence_after_sync()
            values = ptx.tmem_load(first, tile.dq_width)
            ptx.fence_before_sync()
            products.arrive(barriers.dq_empty.first, ctas=2, stores=False)
            if cutlass.const_expr(self.config.deterministic):
                barriers.dq_turn.wait(step)
            if own.has_values:
                for chunk in cutlass.range_constexpr(tile.dq_width // 4):
                    place = target + chunk * own.step
                    common_ptx.reduce_add_v4(place, values[4 * chunk : 4 * chunk + 4])
            if cutlass.const_expr(self.config.deterministic):
                products.arrive(barriers.dq_added.at(step))

    def place_of_thread(self, work: Work, thread: Int32) -> Place:
        """Returns where a reduce thread's values lie in a tile of dq_acc."""
        tile = self.config.tile
        if tile.dq_transposed:
            column = work.rank * tile.part + thread
            block = column // LANES * LANES
            lanes = cutlass.min(Int32(LANES), tile.head_dim - block)
            return Place(block * tile.m + (column - block) * 4, lanes * 4, thread < tile.part)
        query = thread % tile.queries
        part = query // tile.chunk
        query = query % tile.chunk + (part * tile.ctas + work.rank) * tile.chunk
        column = thread // tile.queries * tile.part
        return Place(column * tile.m + query * 4, Int32(tile.m * 4), Boolean(True))
