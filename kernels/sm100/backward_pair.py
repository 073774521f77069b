"""Blackwell's backward for wide heads: a pair of CTAs computes dK and dV of one key tile.

The products are those of backward.py, and each is the pair's: the even CTA's MMA warp issues it,
and CTA r has half of every operand and result (tile.m = 64 queries, tile.n = 128 keys, d = 256
columns):

    operand in shared memory         of CTA r                                is
    k, v         (64, 256)           its keys, all columns                   A of S, dP
    kt           (128, 128)          all keys, its columns                   A of dQ
    q, do        (32, 256)           its queries, all columns                B of S, dP
    qt, dot      (64, 128)           all queries, its columns                B of dK, dV
    p, ds        (64, 64) twice      its keys, all queries                   A of dV, dK
    dst          (128, 32) twice     all keys, its queries: dS               B of dQ

    product              M x N x K          tensor memory of CTA r
    S^T  = K Q^T         128 x 64 x 256     lane 64 h + key: queries 32 h to 32 h + 31; two buffers
    dP^T = V dO^T        128 x 64 x 256     as S
    dV  += P^T dO        128 x 256 x 64     lane 64 h + key: columns 128 h to 128 h + 127
    dK  += dS^T Q        128 x 256 x 64     as dV
    dQ^T = K^T dS        256 x 64 x 128     lane: column 128 r + lane; 64 queries; two buffers

    load warp        loads k, v, kt once; then of every step q, lse_log2, delta, do, dot, qt
    MMA warp         issues all products (even CTA), or relays the completion of its loads to the
                     even CTA (odd CTA)
    compute warps    compute P and dS: two warpgroups have every second step each, a thread has one
                     key and half of the queries; P goes to p, dS to ds and, in the CTA whose
                     queries they are, to dst
    reduce warps     add dQ from tensor memory to global memory; a thread has one column
    order warp       deterministic only: draws the pair's ticket and opens its turns to add dQ

Order of the products: S(0) dP(0), then for every step i: S(i+1) dP(i+1) dV(i) dK(i) dQ(i). The
loads follow the same order: q(i+1) do(i+1) dot(i) qt(i).

`backward_description.py` lists the warps, the barriers (who signals, who waits, once per what) and
the memory; docs/kernels.md shows them.

The even CTA's MMA warp waits for loads, compute and reduce warps of both CTAs; its commits arrive
in both. Loads arrive in the CTA that issues them; the odd CTA's MMA warp relays them.

Note [what needs no barrier]: in a buffer S(i+2) overwrites S(i), and dP(i+2) overwrites dP(i),
after dV(i) and dK(i), which waited for P(i) and dS(i); dQ(i)'s fence comes between. Compute warps
overwrite p, ds and dst of step i after s_full and dp_full of step i+2, whose commits say that
dV(i), dK(i) and dQ(i) are complete. A new q may be loaded once s_full has come, since S has read q
then, and a new do once dp_full has come. A load overwrites lse_log2 and delta of step i after
s_full of step i+2, whose product was issued after ds_full of step i.

Each CTA adds half of the columns of dQ, so both may have their turn at the same time.

(FlashAttention-4, backward: 2-CTA mode; M = 128 here, so that the accumulators of 256 columns fit.)
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from fa4_jax.key import KernelKey
from kernels.common import ptx as common_ptx
from kernels.common import ring, tensors
from kernels.common.backward_ranges import make_walk
from kernels.common.backward_schedule import Work
from kernels.common.hosts import backward_source
from kernels.common.resources import Maps, Shared
from kernels.common.state import Rows
from kernels.kernel_source import KernelSource
from kernels.sm100 import products, ptx
from kernels.sm100.backward_data import publish
from kernels.sm100.backward_pair_data import Config, use_of_buffer
from kernels.sm100.backward_pair_kernel import PairKernel
from kernels.sm100.backward_pair_rows import RowRoles


class PairBackward(PairKernel):
    """The kernel of one key; attributes are compile-time constants."""

    config: Config

    def __init__(self, key: KernelKey):
        config = Config(key)
        super().__init__(config, RowRoles(config))

    @cute.jit
    def load(self, maps: Maps, shared: Shared, work: Work, rows: Rows):
        """Load warp: loads this CTA's parts of all operands."""
        barriers, steps, walk = shared.barriers, work.steps(), make_walk(work.visits)
        if steps > 0:
            publish(self.config, work, walk, Int32(0))
            self.load_keys(maps, shared, work)
            self.load_rows(maps, shared, work, rows, Int32(0))
        for step in cutlass.range(steps, unroll=1):
            if step + 1 < steps:
                publish(self.config, work, walk, step + 1)
                self.load_rows(maps, shared, work, rows, step + 1)
            barriers.dot_empty.wait_free(step)
            self.load_columns(maps.dot, work, step, shared.dot, barriers.dot_full.at(step))
            barriers.qt_empty.wait_free(step)
            self.load_columns(maps.qt, work, step, shared.qt, barriers.qt_full.at(step))
        # Shared memory must outlive every commit's arrival.
        barriers.dot_empty.wait_free(steps)
        barriers.qt_empty.wait_free(steps)

    @cute.jit
    def load_rows(self, maps: Maps, shared: Shared, work: Work, rows: Rows, step: Int32):
        """Loads q, lse_log2, delta and do of a step, after S and dP of the step before."""
        tile, barriers = self.config.tile, shared.barriers
        head, block = work.step(step, self.config.deterministic)
        row = rows.tile(work.batch, work.heads, head, block) * tile.m
        slot = ring.nth_use(step, tile.statistics).slot
        before = use_of_buffer(step - 1)
        q_full, do_full = barriers.q_full.at(step), barriers.do_full.at(step)
        of_head = tensors.bthd_coordinates()[None, None, head, work.batch]
        place = (block * tile.ctas + work.rank, 0)
        source = cute.local_tile(of_head, (tile.queries, tile.head_dim), place)
        num_bytes = tile.queries * tile.head_dim * 2
        if step > 0:
            barriers.s_full.wait(before)
        lse_log2, delta = shared.lse_log2[None, slot], shared.delta[None, slot]
        with cute.arch.elect_one():
            expected = num_bytes + tile.m * (4 + 4)
            cute.arch.mbarrier_arrive_and_expect_tx(q_full, expected)
            common_ptx.bulk_load(lse_log2.iterator, rows.lse_log2 + row, tile.m * 4, q_full)
            common_ptx.bulk_load(delta.iterator, rows.delta + row, tile.m * 4, q_full)
        tensors.tma_load(maps.q, source, shared.q, q_full)
        if step > 0:
            barriers.dp_full.wait(before)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(do_full, num_bytes)
        tensors.tma_load(maps.do, source, shared.do, do_full)

    @cute.jit
    def relay_loads(self, shared: Shared, work: Work):
        """MMA warp of the odd CTA: relays the completion of its loads to the even CTA."""
        barriers, steps = shared.barriers, work.steps()
        if steps > 0:
            self.receive_keys(shared, work)
            products.signal(barriers.kv_full.first, ctas=2)
            self.relay_rows(shared, work, Int32(0))
        for step in cutlass.range(steps, unroll=1):
            if step + 1 < steps:
                self.relay_rows(shared, work, step + 1)
            self.receive(shared.dot, barriers.dot_full, work, step)
            products.signal(barriers.dot_full.at(step), ctas=2)
            self.receive(shared.qt, barriers.qt_full, work, step)
            products.signal(barriers.qt_full.at(step), ctas=2)

    @cute.jit
    def relay_rows(self, shared: Shared, work: Work, step: Int32):
        """Relays q and do of a step."""
        self.receive(shared.q, shared.barriers.q_full, work, step)
        products.signal(shared.barriers.q_full.at(step), ctas=2)
        self.receive(shared.do, shared.barriers.do_full, work, step)
        products.signal(shared.barriers.do_full.at(step), ctas=2)

    @cute.jit
    def mma(self, shared: Shared, work: Work):
        """MMA warp of the even CTA: issues all five products of all steps."""
        steps = work.steps()
        if steps > 0:
            self.receive_keys(shared, work)
            self.mma_rows(shared, work, Int32(0))
        for step in cutlass.range(steps, unroll=1):
            if step + 1 < steps:
                self.mma_rows(shared, work, step + 1)
            self.mma_columns(shared, work, step)
            self.mma_dq(shared, step)
        if steps > 0:
            products.commit(shared.barriers.grads_full.first, 2)

    @cute.jit
    def mma_rows(self, shared: Shared, work: Work, step: Int32):
        """Issues S^T = K Q^T and dP^T = V dO^T: (keys, queries), over head_dim."""
        tile, barriers, columns = self.config.tile, shared.barriers, self.config.columns
        use = use_of_buffer(step)
        for a, b, b_full, column, full in (
            (shared.k, shared.q, barriers.q_full, columns("s"), barriers.s_full),
            (shared.v, shared.do, barriers.do_full, columns("dp"), barriers.dp_full),
        ):
            self.receive(b, b_full, work, step)
            keys = products.k_major(a.iterator, tile.keys, tile.head_dim, tile.span_bytes)
            queries = products.k_major(b.iterator, tile.queries, tile.head_dim, tile.span_bytes)
            steps = (0, tile.head_dim // products.K_STEP)
            first = column.first + use.slot * column.step
            self.config.scores.issue(first, keys, queries, False, steps)
            products.commit(full.at(use), 2)

    @cute.jit
    def mma_columns(self, shared: Shared, work: Work, step: Int32):
        """Issues dV += P^T dO and dK += dS^T Q: (keys, columns), over the queries."""
        tile, barriers, columns = self.config.tile, shared.barriers, self.config.columns
        use = use_of_buffer(step)
        of_dv = (shared.p, barriers.p_full, shared.dot, barriers.dot_full, barriers.dot_empty)
        of_dk = (shared.ds, barriers.ds_full, shared.qt, barriers.qt_full, barriers.qt_empty)
        for column, (a, a_full, b, b_full, b_empty) in (
            (columns("dv").first, of_dv),
            (columns("dk").first, of_dk),
        ):
            self.receive(b, b_full, work, step)
            a_full.wait(use, 2)
            keys = products.k_major(a.iterator, tile.keys, tile.m, tile.span_bytes)
            keys = keys.moved(use.slot * (tile.keys * tile.m * 2))
            values = products.mn_major(b.iterator, tile.m, tile.span_bytes)
            self.config.grads.issue(column, keys, values, step > 0, (0, tile.m // products.K_STEP))
            products.commit(b_empty.at(step), 2)

    @cute.jit
    def mma_dq(self, shared: Shared, step: Int32):
        """Issues dQ^T = K^T dS, after dK has waited for dS."""
        tile, barriers = self.config.tile, shared.barriers
        use = use_of_buffer(step)
        barriers.dq_empty.wait_free(use, 2)
        # What follows is ordered after the reads of dQ(i-2), S(i) and dP(i): dQ(i), S(i+2) and
        # dP(i+2) overwrite them.
        ptx.fence_after_sync()
        columns = products.mn_major(shared.kt.iterator, tile.n, tile.span_bytes)
        scores = products.mn_major(shared.dst.iterator, tile.n, tile.queries * 2)
        scores = scores.moved(use.slot * (tile.n * tile.queries * 2))
        dq, steps = self.config.columns("dq"), (0, tile.n // products.K_STEP)
        self.config.dq.issue(dq.first + use.slot * dq.step, columns, scores, False, steps)
        products.commit(barriers.dq_full.at(use), 2)


def source(key: KernelKey) -> KernelSource:
    """Returns the main backward kernel of a key, with its launch."""
    kernel = PairBackward(key)
    tile = kernel.config.tile
    sizes = {"m": tile.m, "n": tile.n, "head_dim": tile.head_dim}
    return backward_source(kernel, key, sizes)
