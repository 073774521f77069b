"""Blackwell's main backward kernel: a CTA computes dK, dV of one key tile and adds its share to dQ.

P = exp2(S * scale_log2 - lse_log2) and delta = rowsum(dO * O) - dLSE. Scores are transposed, so
that keys are the lanes of tensor memory:
    S^T  = K Q^T                dP^T = V dO^T
    dV  += P^T dO               dS^T = P^T * (dP^T - delta)
    dK  += dS^T Q               dQ  += dS K        (scale is applied at the end, to dK here)

    load warp        loads K, V once; then for every query head of the KV head's group and every
                     query block that sees the key tile: Q, lse_log2, delta and dO into two rings
    MMA warp         issues all products: S, dP from shared memory; dV, dK with P, dS from tensor
                     memory; dQ with dS from shared memory
    compute warps    compute P and dS from S and dP: two warpgroups have half of the queries each, a
                     thread has one key; at the end they store dV and dK
    reduce warps     add dQ from tensor memory to global memory, by vectors; a thread has one query
    order warp       deterministic only: draws the CTA's ticket and opens its turns to add dQ

Order of the products: S(0) dP(0) dV(0), then for every step i: S(i+1) dK(i) dQ(i) dP(i+1) dV(i+1):
while compute warps compute dS(i), the tensor core computes S(i+1), and under dK(i), dQ(i) they
compute P(i+1).

`backward_description.py` lists the warps, the barriers (who signals, who waits, once per what) and
the memory; docs/kernels.md shows them.

Note [what needs no barrier]: S(i+1) overwrites S(i), which compute warps have read before P(i) was
full, and P(i), which dV(i), issued before, has read. Likewise dP(i+1) overwrites dP(i) and dS(i),
after dK(i). Where dQ begins with dP's columns, dQ(i) comes after dK(i), which has read dS(i), and
dP(i+1) waits for dq_empty. dS(i+1) overwrites dS(i) in shared memory after dp_full of step i+1,
whose commit also says that dQ(i) is complete. A commit's arrival is ordered after all that the MMA
warp has waited for. So s_full comes after q_full, and compute warps find lse_log2 and delta there;
and q_empty comes after ds_full, which follows their last use of both.

Note [dq_acc]: tile t of head h holds m x head_dim fp32 values as [column / 4][row][column % 4], or,
where dQ is transposed, as [column / 128][row / 4][column % 128][row % 4]. So a warp adds 512
consecutive bytes with one instruction; bwd_post undoes the layout. The additions come straight from
registers: staging 64 KB a step would take 1024 cycles of shared memory, which limits this kernel.

(FlashAttention-4, backward: transposed scores, five products in tensor memory.)
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from fa4_jax.key import KernelKey
from kernels.common import ptx as common_ptx
from kernels.common import tensors
from kernels.common.backward_ranges import make_walk
from kernels.common.backward_schedule import Work
from kernels.common.hosts import backward_source
from kernels.common.resources import Maps, Shared
from kernels.common.state import Rows
from kernels.description import Columns
from kernels.kernel_source import KernelSource
from kernels.sm100 import products, ptx
from kernels.sm100.backward_data import Config, publish
from kernels.sm100.backward_description import COMPUTE_GROUPS
from kernels.sm100.backward_kernel import BackwardKernel
from kernels.sm100.backward_rows import RowRoles
from kernels.sm100.tiles import LANES


class Backward(BackwardKernel):
    """The kernel of one key; attributes are compile-time constants."""

    config: Config

    def __init__(self, key: KernelKey):
        config = Config(key)
        super().__init__(config, RowRoles(config))

    @cute.jit
    def load(self, maps: Maps, shared: Shared, work: Work, rows: Rows):
        """Load warp: loads K and V, then Q, lse_log2, delta and dO of every step."""
        tile, barriers = self.config.tile, shared.barriers
        kv_full = barriers.kv_full.first
        kv = tensors.bthd_coordinates()[None, None, work.kv_head, work.batch]
        steps, walk = work.steps(), make_walk(work.visits)
        if steps > 0:
            publish(self.config, work, walk, Int32(0))
            with cute.arch.elect_one():
                num_bytes = tile.n * (tile.head_dim + tile.value_dim) * 2
                cute.arch.mbarrier_arrive_and_expect_tx(kv_full, num_bytes)
            for atom, columns, memory in (
                (maps.k, tile.head_dim, shared.k),
                (maps.v, tile.value_dim, shared.v),
            ):
                key_tile = cute.local_tile(kv, (tile.n, columns), (work.tile, 0))
                tensors.tma_load(atom, key_tile, memory, kv_full)
            self.load_queries(maps, shared, work, rows, Int32(0))
            self.load_outputs(maps, shared, work, Int32(0))
        for step in cutlass.range(1, steps, unroll=1):
            publish(self.config, work, walk, step)
            # dV releases the slot of dO before dK releases that of Q.
            barriers.do_empty.wait_free(step)
            self.load_outputs(maps, shared, work, step)
            barriers.q_empty.wait_free(step)
            self.load_queries(maps, shared, work, rows, step)
        # Shared memory must outlive every commit's arrival.
        for i in cutlass.range_constexpr(tile.stages):
            barriers.q_empty.wait_free(steps + i)
            barriers.do_empty.wait_free(steps + i)

    @cute.jit
    def load_queries(self, maps: Maps, shared: Shared, work: Work, rows: Rows, step: Int32):
        """Loads Q, lse_log2 and delta of a step."""
        tile = self.config.tile
        head, block = work.step(step, self.config.deterministic)
        row = rows.tile(work.batch, work.heads, head, block) * tile.m
        use = shared.barriers.q_full.use(step)
        slot, full = use.slot, shared.barriers.q_full.at(use)
        lse_log2, delta = shared.lse_log2[None, slot], shared.delta[None, slot]
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, tile.m * (tile.head_dim * 2 + 4 + 4))
            common_ptx.bulk_load(lse_log2.iterator, rows.lse_log2 + row, tile.m * 4, full)
            common_ptx.bulk_load(delta.iterator, rows.delta + row, tile.m * 4, full)
        source = self.query_tile(work, head, block, tile.head_dim)
        tensors.tma_load(maps.q, source, shared.q[None, None, slot], full)

    @cute.jit
    def load_outputs(self, maps: Maps, shared: Shared, work: Work, step: Int32):
        """Loads dO of a step."""
        tile = self.config.tile
        head, block = work.step(step, self.config.deterministic)
        use = shared.barriers.do_full.use(step)
        slot, full = use.slot, shared.barriers.do_full.at(use)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, tile.m * tile.value_dim * 2)
        source = self.query_tile(work, head, block, tile.value_dim)
        tensors.tma_load(maps.do, source, shared.do[None, None, slot], full)

    def query_tile(self, work: Work, head: Int32, block: Int32, columns: int) -> cute.Tensor:
        """Returns the TMA coordinates of a query block of Q or dO."""
        rows = tensors.bthd_coordinates()[None, None, head, work.batch]
        return cute.local_tile(rows, (self.config.tile.m, columns), (block, 0))

    @cute.jit
    def mma(self, shared: Shared, work: Work):
        """MMA warp: issues all five products of all steps."""
        steps, barriers = work.steps(), shared.barriers
        if steps > 0:
            barriers.kv_full.wait(0)
            if work.padded_keys:
                rows = work.band.key_length - work.first_key
                self.clear_padding([shared.k, shared.v], rows)
            self.mma_scores(shared, work, Int32(0))
            self.mma_dp(shared, work, Int32(0))
            self.mma_dv(shared, Int32(0))
        for step in cutlass.range(steps, unroll=1):
            more = step + 1 < steps
            if more:
                self.mma_scores(shared, work, step + 1)
            self.mma_dk(shared, step)
            self.mma_dq(shared, step)
            if more:
                if cutlass.const_expr(self.config.dq_takes_dp):
                    self.await_dq_read(shared, step + 1)
                self.mma_dp(shared, work, step + 1)
                self.mma_dv(shared, step + 1)
        if steps > 0:
            products.commit(barriers.grads_full.first)

    @cute.jit
    def mma_scores(self, shared: Shared, work: Work, step: Int32):
        """Issues S^T = K Q^T."""
        use = shared.barriers.q_full.use(step)
        shared.barriers.q_full.wait(use)
        self.clear_queries(shared.q[None, None, use.slot], work, step)
        d = self.config.tile.head_dim
        self.product_of_shared(shared.k, shared.q, d, use.slot, self.config.columns("s").first)
        products.commit(shared.barriers.s_full.at(step))

    @cute.jit
    def mma_dp(self, shared: Shared, work: Work, step: Int32):
        """Issues dP^T = V dO^T."""
        use = shared.barriers.do_full.use(step)
        shared.barriers.do_full.wait(use)
        self.clear_queries(shared.do[None, None, use.slot], work, step)
        d = self.config.tile.value_dim
        self.product_of_shared(shared.v, shared.do, d, use.slot, self.config.columns("dp").first)
        products.commit(shared.barriers.dp_full.at(step))

    def product_of_shared(self, a: cute.Tensor, b: cute.Tensor, d: int, slot: Int32, column: int):
        """Issues (keys, queries) = a b^T from shared memory, where a and b have d columns."""
        tile = self.config.tile
        keys = products.k_major(a.iterator, tile.n, d, tile.span_bytes)
        queries = products.k_major(b.iterator, tile.m, d, tile.span_bytes)
        queries = queries.moved(slot * (tile.m * d * 2))
        self.config.scores.issue(column, keys, queries, False, (0, d // products.K_STEP))

    @cute.jit
    def mma_dv(self, shared: Shared, step: Int32):
        """Issues dV += P^T dO."""
        use = shared.barriers.do_empty.use(step)
        shared.barriers.p_full.wait(step)
        ptx.fence_after_sync()
        tile, columns = self.config.tile, self.config.columns
        outputs = products.mn_major(shared.do.iterator, tile.m, tile.span_bytes)
        outputs = outputs.moved(use.slot * (tile.m * tile.value_dim * 2))
        self.product_of_tensor(self.config.dv, columns("p"), outputs, columns("dv").first, step > 0)
        products.commit(shared.barriers.do_empty.at(use))

    @cute.jit
    def mma_dk(self, shared: Shared, step: Int32):
        """Issues dK += dS^T Q."""
        use = shared.barriers.q_empty.use(step)
        shared.barriers.ds_full.wait(step)
        ptx.fence_after_sync()
        tile, columns = self.config.tile, self.config.columns
        queries = products.mn_major(shared.q.iterator, tile.m, tile.span_bytes)
        queries = queries.moved(use.slot * (tile.m * tile.head_dim * 2))
        self.product_of_tensor(
            self.config.dk, columns("ds"), queries, columns("dk").first, step > 0
        )
        products.commit(shared.barriers.q_empty.at(use))

    def product_of_tensor(
        self,
        product: products.Product,
        a: Columns,
        b: products.Operand,
        accumulator: int,
        accumulate: Boolean,
    ):
        """Issues (keys, columns of b) += a b with a in tensor memory, by halves of the queries."""
        m = self.config.tile.m
        half = m // COMPUTE_GROUPS // products.K_STEP
        for part in range(COMPUTE_GROUPS):
            # `issue` counts steps from here: a would begin here if its halves lay side by side.
            begin = a.firsts[part] - part * a.width
            steps = (part * half, (part + 1) * half)
            before = accumulate if part == 0 else True
            product.issue(accumulator, begin, b, before, steps)

    @cute.jit
    def mma_dq(self, shared: Shared, step: Int32):
        """Issues dQ = dS K, or its transpose K^T dS^T, after dK has waited for dS.

        Where columns of K are lanes and not a multiple of them, the last product's other lanes get
        columns of V, which come next in memory; nobody reads them.
        """
        if cutlass.const_expr(not self.config.dq_takes_dp):
            self.await_dq_read(shared, step)
        tile, dq = self.config.tile, self.config.columns("dq")
        keys = products.mn_major(shared.k.iterator, tile.n, tile.span_bytes)
        scores = products.mn_major(shared.ds.iterator, tile.n, 128)
        steps = (0, tile.n // products.K_STEP)
        for index in range(tile.dq_products):
            lanes = keys.moved(index * (LANES * tile.n * 2))
            operands = (lanes, scores) if tile.dq_transposed else (scores, lanes)
            column = dq.first + index * dq.step
            self.config.dq.issue(column, *operands, False, steps)
        products.commit(shared.barriers.dq_full.at(step))

    @cute.jit
    def await_dq_read(self, shared: Shared, step: Int32):
        """Waits until the reduce warps have read dQ of the step before this one."""
        shared.barriers.dq_empty.wait_free(step)
        ptx.fence_after_sync()

    @cute.jit
    def clear_queries(self, queries: cute.Tensor, work: Work, step: Int32):
        """Writes 0 to rows of Q or dO past the query length, which may hold anything."""
        if work.padded_queries:
            _, block = work.step(step, self.config.deterministic)
            rows = work.band.query_length - block * self.config.tile.m
            if rows < self.config.tile.m:
                self.clear_padding([queries], rows)

    @cute.jit
    def clear_padding(self, tiles: list[cute.Tensor], first_row: Int32):
        """Writes 0 to rows of tiles from first_row on, before this warp's products read them."""
        thread, _, _ = cute.arch.thread_idx()
        for tile in tiles:
            tensors.zero_rows(tile, first_row, thread % 32, 32)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()


def source(key: KernelKey) -> KernelSource:
    """Returns the main backward kernel of a key, with its launch."""
    kernel = Backward(key)
    tile = kernel.config.tile
    sizes = {"m": tile.m, "n": tile.n, "stages": tile.stages, "head_dim": tile.head_dim}
    return backward_source(kernel, key, sizes)
