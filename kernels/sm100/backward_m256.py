"""Blackwell's backward for pairs whose CTAs have 128 keys each: products have M = 256.

The products are those of backward.py, and each is the pair's: the even CTA's MMA warp issues it.
A pair has 256 keys, and the two CTAs share what they read. With d = 128 a step has 128 queries:

    operand in shared memory         of CTA r                                is
    k, v         (128, 128)          its keys, all columns                   A of S, dP
    kt           (256, 64)           all keys, its columns                   B of dQ
    q, do        (64, 128)           queries 64 r to 64 r + 63, all columns  B of S, dP
    qt, dot      (128, 64)           all queries, its columns                B of dK, dV
    dst          (256, 64) twice     all keys, its queries: dS               A of dQ

    product              M x N x K          tensor memory of CTA r
    S^T  = K Q^T         256 x 128 x 128    lane: key; 128 queries
    dP^T = V dO^T        256 x 128 x 128    as S
    dV  += P^T dO        256 x 128 x 128    lane: key; 128 columns; A is P in tensor memory
    dK  += dS^T Q        256 x 128 x 128    as dV; A is dS in tensor memory
    dQ   = dS K          128 x 128 x 256    lane 64 h + query: columns 64 h to 64 h + 63

With (192, 128) it has 64 queries: S, dP and dQ have 64 columns of tensor memory each, beside 128 of
dV and 192 of dK. dQ is transposed:

    k            (128, 192)          kt, qt    (256, 96), (64, 96)
    v            (128, 128)          dot       (64, 64)
    q, do        (32, 192), (32, 128)          dst       (256, 32) twice     B of dQ
    dQ^T = K^T dS        256 x 64 x 256     lane < 96: column 96 r + lane; 64 queries

Of a step's parts of 64 queries, compute warpgroup c has 32 c to 32 c + 31, in both CTAs. CTA r has
the queries of warpgroup r in dst, and in dQ where that is not transposed.

    load warp        loads k, v, kt once; then of every step q, lse_log2, qt, do, delta, dot
    MMA warp         issues all products (even CTA), or relays the completion of its loads to the
                     even CTA (odd CTA)
    compute warps    compute P and dS: a thread has one key and half of the queries; P and dS go to
                     tensor memory, dS also to dst of the CTA whose queries they are
    reduce warps     add dQ from tensor memory to global memory; a thread has half of a query's row,
                     or one column
    order warp       deterministic only: draws the pair's ticket and opens its turns to add dQ

Order of the products: S(0) dP(0) dV(0), then for every step i: S(i+1) dK(i) dP(i+1) dQ(i) dV(i+1).
The loads follow the same order: q(i+1) qt(i) do(i+1) dot(i+1). P(i+1) is computed under dK(i),
dP(i+1) and dQ(i), dS(i+1) under dV(i+1) and S(i+2); reduce warps read dQ(i) under dV(i+1).

`backward_description.py` lists the warps, the barriers (who signals, who waits, once per what) and
the memory; docs/kernels.md shows them.

Note [what needs no barrier]: S(i+1) overwrites P(i), which dV(i), issued before, has read, and
dP(i+1) overwrites dS(i), after dK(i). Where dQ(i) overwrites columns of S(i+1), it does so after
s_read or, in the last step, of S(i) after p_full. Compute warps overwrite dst of step i after
dp_full of step i+2, whose commit says that dQ(i) is complete. A new q may be loaded once s_full has
come, and a new do once dp_full has come. lse_log2 of step i+2, which comes with q after s_full of
step i+1, overwrites that of step i: S(i+1) comes after dV(i), which has waited for P(i). delta of
step i+2 comes with do after dp_full of step i+1; dP(i+1) comes after dK(i), which has waited for
dS(i).

Note [what is released]: compute warps arrive at dst_full with release to the cluster, since their
stores go to both CTAs, and so do relays, which may have cleared padding; the MMA warp acquires both
from the cluster. All else that reaches the even CTA's barriers hands over tensor memory, which its
own fences order.

(FlashAttention-4, backward: 2-CTA mode.)
"""

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from fa4_jax.key import KernelKey
from kernels.common import ptx as common_ptx
from kernels.common import ring, tensors
from kernels.common.backward_ranges import make_walk
from kernels.common.backward_schedule import Work
from kernels.common.hosts import backward_source
from kernels.common.resources import Maps, Shared
from kernels.common.ring import Ring
from kernels.common.state import Rows
from kernels.description import Columns
from kernels.kernel_source import KernelSource
from kernels.sm100 import products, ptx
from kernels.sm100.backward_data import publish
from kernels.sm100.backward_description import COMPUTE_GROUPS
from kernels.sm100.backward_m256_rows import RowRoles
from kernels.sm100.backward_pair_data import M256Config
from kernels.sm100.backward_pair_kernel import PairKernel


@dataclasses.dataclass(frozen=True)
class ByRows:
    """What a CTA loads by rows: its queries of Q or dO, with a statistic of all queries.

    Attributes:
      atom: copies the rows.
      memory: gets them.
      source: statistic of all rows of the call.
      statistic: gets the step's.
      full: the barrier of both.
    """

    atom: cute.CopyAtom
    memory: cute.Tensor
    source: cute.Pointer
    statistic: cute.Tensor
    full: Ring


@dataclasses.dataclass(frozen=True)
class Operands:
    """Where a product over queries reads and adds.

    Attributes:
      a: P or dS in tensor memory.
      b: dot or qt in shared memory.
      accumulator: first column of dV or dK.
    """

    a: Columns
    b: products.Operand
    accumulator: int


class M256Backward(PairKernel):
    """The kernel of one key; attributes are compile-time constants."""

    config: M256Config

    def __init__(self, key: KernelKey):
        config = M256Config(key)
        super().__init__(config, RowRoles(config))

    @cute.jit
    def load(self, maps: Maps, shared: Shared, work: Work, rows: Rows):
        """Load warp: loads this CTA's parts of all operands."""
        barriers, steps, walk = shared.barriers, work.steps(), make_walk(work.visits)
        if steps > 0:
            publish(self.config, work, walk, Int32(0))
            self.load_keys(maps, shared, work)
            self.load_queries(maps, shared, work, rows, Int32(0))
            self.load_outputs(maps, shared, work, rows, Int32(0))
            self.load_columns(maps.dot, work, Int32(0), shared.dot, barriers.dot_full.first)
        for step in cutlass.range(steps, unroll=1):
            more = step + 1 < steps
            if more:
                publish(self.config, work, walk, step + 1)
                barriers.s_full.wait(step)
                self.load_queries(maps, shared, work, rows, step + 1)
            barriers.qt_empty.wait_free(step)
            self.load_columns(maps.qt, work, step, shared.qt, barriers.qt_full.first)
            if more:
                barriers.dp_full.wait(step)
                self.load_outputs(maps, shared, work, rows, step + 1)
                barriers.dot_empty.wait_free(step + 1)
                self.load_columns(maps.dot, work, step + 1, shared.dot, barriers.dot_full.first)
        # Shared memory must outlive every commit's arrival.
        barriers.dot_empty.wait_free(steps)
        barriers.qt_empty.wait_free(steps)

    @cute.jit
    def load_queries(self, maps: Maps, shared: Shared, work: Work, rows: Rows, step: Int32):
        """Loads q and lse_log2 of a step."""
        full = shared.barriers.q_full
        parts = ByRows(maps.q, shared.q, rows.lse_log2, shared.lse_log2, full)
        self.load_rows(parts, work, rows, step)

    @cute.jit
    def load_outputs(self, maps: Maps, shared: Shared, work: Work, rows: Rows, step: Int32):
        """Loads do and delta of a step."""
        full = shared.barriers.do_full
        parts = ByRows(maps.do, shared.do, rows.delta, shared.delta, full)
        self.load_rows(parts, work, rows, step)

    @cute.jit
    def load_rows(self, parts: ByRows, work: Work, rows: Rows, step: Int32):
        """Loads a CTA's rows of a step, and the statistic of all of the step's rows."""
        tile, full = self.config.tile, parts.full.first
        head, block = work.step(step, self.config.deterministic)
        row = rows.tile(work.batch, work.heads, head, block) * tile.m
        columns = cute.size(parts.memory, mode=[1])
        of_head = tensors.bthd_coordinates()[None, None, head, work.batch]
        place = (block * tile.ctas + work.rank, 0)
        source = cute.local_tile(of_head, (tile.queries, columns), place)
        statistic = parts.statistic[None, ring.nth_use(step, tile.statistics).slot]
        with cute.arch.elect_one():
            num_bytes = tile.queries * columns * 2 + tile.m * 4
            cute.arch.mbarrier_arrive_and_expect_tx(full, num_bytes)
            common_ptx.bulk_load(statistic.iterator, parts.source + row, tile.m * 4, full)
        tensors.tma_load(parts.atom, source, parts.memory, full)

    @cute.jit
    def relay_loads(self, shared: Shared, work: Work):
        """MMA warp of the odd CTA: relays the completion of its loads to the even CTA."""
        barriers, steps = shared.barriers, work.steps()
        if steps > 0:
            self.receive_keys(shared, work)
            products.signal(barriers.kv_full.first, ctas=2)
            self.relay(shared.q, barriers.q_full, work, Int32(0))
            self.relay(shared.do, barriers.do_full, work, Int32(0))
            self.relay(shared.dot, barriers.dot_full, work, Int32(0))
        for step in cutlass.range(steps, unroll=1):
            more = step + 1 < steps
            if more:
                self.relay(shared.q, barriers.q_full, work, step + 1)
            self.relay(shared.qt, barriers.qt_full, work, step)
            if more:
                self.relay(shared.do, barriers.do_full, work, step + 1)
                self.relay(shared.dot, barriers.dot_full, work, step + 1)

    @cute.jit
    def relay(self, memory: cute.Tensor, full: Ring, work: Work, step: Int32):
        """Relays the completion of q, do, qt or dot of a step."""
        self.receive(memory, full, work, step)
        products.signal(full.first, ctas=2)

    @cute.jit
    def mma(self, shared: Shared, work: Work):
        """MMA warp of the even CTA: issues all five products of all steps."""
        steps, barriers = work.steps(), shared.barriers
        if steps > 0:
            self.receive_keys(shared, work)
            self.mma_scores(shared, work, Int32(0))
            self.mma_dp(shared, work, Int32(0))
            self.mma_dv(shared, work, Int32(0))
        for step in cutlass.range(steps, unroll=1):
            more = step + 1 < steps
            if cutlass.const_expr(not self.config.tile.dq_transposed):
                # S(i+1), or dQ(i) in the last step, overwrites dQ(i-1).
                self.await_dq_read(shared, step)
            if more:
                self.mma_scores(shared, work, step + 1)
            self.mma_dk(shared, work, step)
            if more:
                self.mma_dp(shared, work, step + 1)
            self.mma_dq(shared, step, more)
            if more:
                self.mma_dv(shared, work, step + 1)
        if steps > 0:
            products.commit(barriers.grads_full.first, 2)

    @cute.jit
    def mma_scores(self, shared: Shared, work: Work, step: Int32):
        """Issues S^T = K Q^T."""
        barriers, column = shared.barriers, self.config.columns("s").first
        self.receive(shared.q, barriers.q_full, work, step)
        self.product_of_rows(shared.k, shared.q, column)
        products.commit(barriers.s_full.first, 2)

    @cute.jit
    def mma_dp(self, shared: Shared, work: Work, step: Int32):
        """Issues dP^T = V dO^T."""
        barriers, column = shared.barriers, self.config.columns("dp").first
        self.receive(shared.do, barriers.do_full, work, step)
        self.product_of_rows(shared.v, shared.do, column)
        products.commit(barriers.dp_full.first, 2)

    def product_of_rows(self, a: cute.Tensor, b: cute.Tensor, column: int):
        """Issues (keys, queries) = a b^T from shared memory, over all columns of both."""
        tile, d = self.config.tile, cute.size(a, mode=[1])
        keys = products.k_major(a.iterator, tile.keys, d, tile.span_bytes)
        queries = products.k_major(b.iterator, tile.queries, d, tile.span_bytes)
        self.config.scores.issue(column, keys, queries, False, (0, d // products.K_STEP))

    @cute.jit
    def mma_dv(self, shared: Shared, work: Work, step: Int32):
        """Issues dV += P^T dO, by parts of the queries."""
        tile, barriers, columns = self.config.tile, shared.barriers, self.config.columns
        self.receive(shared.dot, barriers.dot_full, work, step)
        outputs = products.mn_major(shared.dot.iterator, tile.m, tile.span_bytes)
        for part in cutlass.range_constexpr(tile.parts):
            barriers.p_full[part].wait(step)
            ptx.fence_after_sync()
            operands = Operands(columns("p"), outputs, columns("dv").first)
            self.product_of_part(self.config.dv, operands, part, step > 0)
        products.commit(barriers.dot_empty.first, 2)

    @cute.jit
    def mma_dk(self, shared: Shared, work: Work, step: Int32):
        """Issues dK += dS^T Q."""
        tile, barriers, columns = self.config.tile, shared.barriers, self.config.columns
        self.receive(shared.qt, barriers.qt_full, work, step)
        barriers.ds_full.wait(step)
        ptx.fence_after_sync()
        queries = products.mn_major(shared.qt.iterator, tile.m, tile.part_span_bytes)
        for part in cutlass.range_constexpr(tile.parts):
            operands = Operands(columns("ds"), queries, columns("dk").first)
            self.product_of_part(self.config.dk, operands, part, step > 0)
        products.commit(barriers.qt_empty.first, 2)

    def product_of_part(
        self, product: products.Product, operands: Operands, part: int, accumulate: Boolean
    ):
        """Issues (keys, columns of b) += a b over a part of the queries.

        The queries of a part are half warpgroup 0's and half warpgroup 1's.
        """
        chunk = self.config.tile.chunk
        count = chunk // products.K_STEP
        for group in range(COMPUTE_GROUPS):
            begin = (part * COMPUTE_GROUPS + group) * count
            # `issue` counts steps from here: a would begin here if its pieces lay side by side.
            first = operands.a.firsts[group] + part * (chunk // 2) - begin * (products.K_STEP // 2)
            before = accumulate if part == 0 and group == 0 else True
            steps = (begin, begin + count)
            product.issue(operands.accumulator, first, operands.b, before, steps)

    @cute.jit
    def mma_dq(self, shared: Shared, step: Int32, more: Boolean):
        """Issues dQ = dS K, or its transpose K^T dS^T.

        `more`: there is a next step, and dQ may overwrite columns of its S. Where columns of K are
        lanes, those past a CTA's get columns of V, which come next in memory; nobody reads them.
        """
        tile, barriers = self.config.tile, shared.barriers
        use = barriers.dst_full.use(step)
        barriers.dst_full.wait(use, 2)
        if cutlass.const_expr(tile.dq_transposed):
            self.await_dq_read(shared, step)
        else:
            if more:
                barriers.s_read.wait(step + 1)
            ptx.fence_after_sync()
        scores = products.mn_major(shared.dst.iterator, tile.n, tile.queries * 2)
        scores = scores.moved(use.slot * (tile.n * tile.queries * 2))
        keys = products.mn_major(shared.kt.iterator, tile.n, tile.part_span_bytes)
        operands = (keys, scores) if tile.dq_transposed else (scores, keys)
        dq, steps = self.config.columns("dq"), (0, tile.n // products.K_STEP)
        self.config.dq.issue(dq.first, *operands, False, steps)
        products.commit(barriers.dq_full.first, 2)

    @cute.jit
    def await_dq_read(self, shared: Shared, step: Int32):
        """Waits until the reduce warps of both CTAs have read dQ of the step before this one."""
        shared.barriers.dq_empty.wait_free(step)
        ptx.fence_after_sync()


def source(key: KernelKey) -> KernelSource:
    """Returns the main backward kernel of a key, with its launch."""
    kernel = M256Backward(key)
    tile = kernel.config.tile
    sizes = {"m": tile.m, "n": tile.n, "head_dim": tile.head_dim}
    return backward_source(kernel, key, sizes)
