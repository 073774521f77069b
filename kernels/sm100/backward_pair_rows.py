"""Roles of the Blackwell backward for pairs that work row by row: compute and reduce warps."""

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from fa4_jax import bands
from kernels.common import ptx as common_ptx
from kernels.common import resources, ring, tensors
from kernels.common.backward_schedule import Work
from kernels.common.resources import Maps, Shared
from kernels.common.state import Exponents, Limits, Rows
from kernels.sm100 import backward_mask, products, ptx, softmax
from kernels.sm100.backward_pair_data import Config, use_of_buffer
from kernels.sm100.backward_rows import (
    CHUNK,
    Queries,
    StepStatistics,
    probabilities_of,
    rounded_pairs,
    score_gradients,
    statistics,
)
from kernels.sm100.tiles import BUFFERS, LANES


@dataclasses.dataclass(frozen=True)
class Place:
    """What a thread of the compute warps works on.

    Attributes:
      group: the compute warpgroup, which has every second step.
      half: of the queries of a step.
      key_row: the key in the pair's tile.
    """

    group: Int32
    half: Int32
    key_row: Int32


class RowRoles:
    """The compute and the reduce role.

    A compute warpgroup has every second step; a thread has one key and half of the queries, or, of
    dV and dK, half of the columns. A thread of the reduce warps has one column of dQ.
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
        tile = self.config.tile
        thread, _, _ = cute.arch.thread_idx()
        thread = thread - self.config.description.role("compute").first_warp * 32
        group = cute.arch.make_warp_uniform(thread // LANES)
        half = cute.arch.make_warp_uniform(thread % LANES // tile.keys)
        key_row = work.rank * tile.keys + thread % tile.keys
        key = work.first_key + key_row
        low, high = bands.row_limits(work.band.transposed(), key, tensors.INT32)
        high = Int32(cutlass.select_(key < work.band.key_length, high, Int32(0)))
        steps = work.steps()
        for step in cutlass.range(group, steps, BUFFERS, unroll=1):
            if cutlass.const_expr(work.ranges is not None):
                shared.barriers.s_full[group].wait(ring.nth_use(step // BUFFERS, 1))
            head, block = work.step(step, self.config.deterministic)
            edge = (block < work.blocks.full_begin) | (block >= work.blocks.full_end)
            edge = edge | (work.first_key + tile.n > work.band.key_length)
            first_query = block * tile.m + half * tile.queries
            # A block that needs no mask gets bounds that hide no query.
            begin = Int32(cutlass.select_(edge, low - first_query, Int32(0)))
            end = Int32(cutlass.select_(edge, high - first_query, Int32(tile.m)))
            keys = backward_mask.of_step(work, step, key, first_query)
            bias = work.bias_of(head, key, first_query)
            queries = Queries(half * tile.queries, step, Limits(begin, end), edge, keys, bias)
            self.compute_step(shared, Place(group, half, key_row), queries, exponents)
        place = Place(group, half, thread % tile.keys)
        self.write_gradients(maps, shared, work, place, scale)

    @cute.jit
    def compute_step(self, shared: Shared, place: Place, of_step: Queries, exponents: Exponents):
        """Computes P and dS of one key and half of a step's queries; the buffer is the group's."""
        buffer, half, key_row, step = place.group, place.half, place.key_row, of_step.step
        tile, barriers, columns = self.config.tile, shared.barriers, self.config.columns
        queries, own_row = tile.queries, key_row % tile.keys
        first = of_step.first
        # A group has the barriers of a buffer for itself.
        use = ring.nth_use(step // BUFFERS, 1)
        slot = ring.nth_use(step, tile.statistics).slot
        barriers.s_full[buffer].wait(use)
        ptx.fence_after_sync()
        scores = ptx.tmem_load(
            products.lane_base() + columns("s").first + buffer * columns("s").step, queries
        )
        lse = StepStatistics(shared.lse_log2, slot)
        rounded, p = probabilities_of(self.config.dtype, scores, lse, exponents, of_step)
        self.write_row(shared.p[own_row, None, buffer], half, rounded)
        cute.arch.fence_proxy("async.shared", space="cta")
        products.arrive(barriers.p_full[buffer].first, ctas=2)

        barriers.dp_full[buffer].wait(use)
        ptx.fence_after_sync()
        dp = ptx.tmem_load(
            products.lane_base() + columns("dp").first + buffer * columns("dp").step, queries
        )
        delta = statistics(shared.delta, slot, first, queries)
        rounded = rounded_pairs(self.config.dtype, score_gradients(p, 0, dp, delta))
        self.write_row(shared.ds[own_row, None, buffer], half, rounded)
        # CTA `half` has the rows of these queries for dQ.
        row = shared.dst.iterator.toint().to(Int32) + (buffer * tile.n + key_row) * (queries * 2)
        ptx.store_swizzled_row(row, (key_row // 2 & 3) * 16, rounded, half)
        ptx.fence_proxy_of_cluster()
        # The reads of S and dP are complete.
        ptx.fence_before_sync()
        products.arrive(barriers.ds_full[buffer].first, ctas=2)

    def write_row(self, row: cute.Tensor, half: Int32, pairs: list[Int32]):
        """Writes half of a row of P or dS to shared memory."""
        fragment = cute.make_rmem_tensor((2 * len(pairs),), self.config.dtype)
        words = cute.recast_tensor(fragment, Int32)
        for i in range(len(pairs)):
            words[i] = pairs[i]
        cute.autovec_copy(fragment, cute.local_tile(row, (2 * len(pairs),), (half,)))

    @cute.jit
    def write_gradients(self, maps: Maps, shared: Shared, work: Work, place: Place, scale: Float32):
        """Stores dV (compute warpgroup 0) and scale * dK (1), which are 0 if there is no step.

        place: the half is of the columns, the key is the CTA's.
        """
        group, half, key_row, steps = place.group, place.half, place.key_row, work.steps()
        tile, columns = self.config.tile, self.config.columns
        if steps > 0:
            shared.barriers.grads_full.wait(0)
            ptx.fence_after_sync()
        for part in cutlass.range_constexpr(2):
            if group == part:
                column, staging = ((columns("dv"), shared.v), (columns("dk"), shared.k))[part]
                factor = (Float32(1.0), scale)[part]
                first = products.lane_base() + column.first
                # The loop is not unrolled, for the reason that the forward's write_output gives.
                for start in cutlass.range(0, tile.part, CHUNK, unroll=1):
                    fragment = cute.make_rmem_tensor((CHUNK,), self.config.dtype)
                    pairs = cute.recast_tensor(fragment, Int32)
                    pairs.fill(0)
                    if steps > 0:
                        values = softmax.multiply(ptx.tmem_load(first + start, CHUNK), factor)
                        rounded = rounded_pairs(self.config.dtype, values)
                        for i in cutlass.range_constexpr(CHUNK // 2):
                            pairs[i] = rounded[i]
                    chunk = ((half * tile.part + start) // CHUNK,)
                    cute.autovec_copy(
                        fragment, cute.local_tile(staging[key_row, None], (CHUNK,), chunk)
                    )
        cute.arch.fence_proxy("async.shared", space="cta")
        resources.meet(self.config.description.named_barrier("stored"))
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == self.config.description.role("compute").first_warp:
            kv = tensors.bthd_coordinates()[None, None, work.kv_head, work.batch]
            of_cta = (work.tile * tile.ctas + work.rank, 0)
            target = cute.local_tile(kv, (tile.keys, tile.head_dim), of_cta)
            with cute.arch.elect_one():
                tensors.tma_store(maps.dv, shared.v, target)
                tensors.tma_store(maps.dk, shared.k, target)
                cute.arch.cp_async_bulk_commit_group()
                # Shared memory must outlive the stores' reads.
                cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def reduce(self, shared: Shared, work: Work, rows: Rows):
        """Reduce warps: add dQ of every step to dq_acc (backward.py, Note [dq_acc])."""
        tile = self.config.tile
        thread, _, _ = cute.arch.thread_idx()
        for step in cutlass.range(work.steps(), unroll=1):
            if cutlass.const_expr(work.ranges is not None):
                shared.barriers.dq_full.wait(use_of_buffer(step))
            head, block = work.step(step, self.config.deterministic)
            query_tile = rows.tile(work.batch, work.heads, head, block)
            target = rows.dq_acc + query_tile * (tile.m * tile.head_dim)
            target = target + work.rank * (tile.m * tile.part) + thread * 4
            use = use_of_buffer(step)
            shared.barriers.dq_full.wait(use)
            ptx.fence_after_sync()
            dq = self.config.columns("dq")
            first = products.lane_base() + dq.first + use.slot * dq.step
            values = ptx.tmem_load(first, tile.m)
            ptx.fence_before_sync()
            products.arrive(shared.barriers.dq_empty.at(use), ctas=2)
            if cutlass.const_expr(self.config.deterministic):
                shared.barriers.dq_turn.wait(step)
            for chunk in cutlass.range_constexpr(tile.m // 4):
                common_ptx.reduce_add_v4(
                    target + chunk * (LANES * 4), values[4 * chunk : 4 * chunk + 4]
                )
            if cutlass.const_expr(self.config.deterministic):
                products.arrive(shared.barriers.dq_added.at(step))
