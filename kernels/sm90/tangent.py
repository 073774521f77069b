"""Hopper tangents: those of O and LSE, from tangents of Q, K and V, by query tiles.

With LSE from the forward, dots for tangents, and S in units of the scores,

    S = scale Q K^T,  S' = scale (Q' K^T + Q K'^T),  P = exp(S - LSE),  W = P o S',
    p, w = the sums of P's and W's rows,  LSE' = w / p,  O' = (P V' + W V) / p - LSE' O.

p is 1 but for the rounding of LSE, which large scores would let through to all of a row.

    load warp      loads by TMA: per tile Q and Q', then K and K', V and V' of each block into two
                   rings, last block first, and O, which is needed last (tangent_load.py)
    MMA warpgroup w has 64 query rows, and S, S', P, W and O' in registers. Per block it computes
        S, S'  three products, operands from shared memory
        P, W   in storage type, P without any maximum since LSE is known; sums of rows
        O' += P V' + W V    two products, P and W from registers, issued in the next block's step
    then it subtracts LSE' O, and stores O' through O's shared memory by TMA, LSE' by ordinary
    stores. Above d = 128 O has no memory of its own: it comes in place of Q.

The five products bind: while P and W of a block are computed, those of the block before are
multiplied, and the other warpgroups' products run, issued in turn. Masks, turns, tickets and the
publication of a tile's work are the forward's (forward.py, Notes [issue turns], [work] and
[tickets]). Ranges in memory, sinks and soft caps are not supported. A row that sees no key has
LSE = -inf, and tangents 0. (FlashAttention-2, section 2.3, computes P from LSE in the backward.)
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warp, warpgroup

from fa4_jax.key import KernelKey
from kernels.common import resources, tensors
from kernels.common.resources import Maps, Shared
from kernels.common.ring import Use
from kernels.common.schedule import ForwardShape, Schedule
from kernels.common.softmax import exp2, select
from kernels.common.tangent_host import TangentHost, tangent_source
from kernels.common.tangent_statistics import Statistics
from kernels.description import NamedBarrier
from kernels.interface import BackwardScalars, Sizes
from kernels.kernel_source import KernelSource
from kernels.sm90 import softmax, wgmma
from kernels.sm90.forward_schedule import Work, is_tile, make_schedule, published
from kernels.sm90.tangent_data import Operands, Rows, make_rows
from kernels.sm90.tangent_description import of_key
from kernels.sm90.tangent_load import LoadRole
from kernels.sm90.tiles import L2_BUDGET_BYTES, TANGENT_TILES, WARPGROUP
from kernels.sm90.turns import Turns


class Tangent(TangentHost, Turns):
    """The kernel of one key; attributes are compile-time constants."""

    def __init__(self, key: KernelKey):
        self.dtype = tensors.TYPES[key.dtype]
        self.head_dim, self.band = key.head_dim, key.band
        self.tile = TANGENT_TILES[key.head_dim]
        self.description = of_key(key)
        names = ("issue_turn", "epilogue")
        self.issue_turn, self.epilogue = map(self.description.named_barrier, names)
        self.padding = self.description.named_barrier("padding") if key.band else None
        self.shape = ForwardShape(
            m=self.tile.m,
            n=self.tile.n,
            kv_row_bytes=4 * key.head_dim * 2,
            l2_bytes=L2_BUDGET_BYTES,
            band=key.band,
        )
        self.loads = LoadRole(self.tile, self.head_dim, self.shape)

    @cute.kernel
    def kernel(
        self,
        maps: Maps,
        extents: cute.Pointer,
        lse: cute.Pointer,
        lse_tangent: cute.Pointer,
        sizes: Sizes,
        scalars: BackwardScalars,
        tile_ticket: cute.Pointer | None = None,
    ):
        shared = resources.allocate(self.description, self.dtype)
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_index == 0:
            resources.prefetch(maps, self.description)
            with cute.arch.elect_one():
                resources.initialise(self.description, shared.barriers)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        schedule = make_schedule(extents, sizes, scalars.window, self.tile.m)
        load, mma = self.description.role("load"), self.description.role("mma")
        if warp_index < mma.first_warp:
            cute.arch.setmaxregister_decrease(load.registers)
            if warp_index == load.first_warp:
                self.loads.load(maps, shared, schedule, tile_ticket)
        else:
            cute.arch.setmaxregister_increase(mma.registers)
            self.mma(maps, shared, schedule, Statistics(lse, lse_tangent), scalars)

    @cute.jit
    def mma(
        self,
        maps: Maps,
        shared: Shared,
        schedule: Schedule,
        statistics: Statistics,
        scalars: BackwardScalars,
    ):
        """MMA warpgroup: computes all tiles of this CTA."""
        words, group = shared.work[None, 0], self.group()
        if group == self.tile.mma_warpgroups - 1:
            self.pass_turn(group)
        tiles_done, blocks_done = Int32(0), Int32(0)
        shared.barriers.q_full.wait(tiles_done)
        more = is_tile(words)
        while more:
            work = published(words, schedule.window if self.band else None)
            cute.arch.sync_warp()  # One lane releases Q, and the work with it, for all.
            own = statistics.of_head(work.batch, work.head, schedule.sizes)
            self.mma_tile(maps, shared, work, own, scalars, (tiles_done, blocks_done))
            tiles_done += 1
            blocks_done += work.blocks.end - work.blocks.begin
            shared.barriers.q_full.wait(tiles_done)
            more = is_tile(words)
        if group == 0:
            self.await_turn(group)
        # Shared memory and the CTA must outlive the last store.
        cute.arch.cp_async_bulk_wait_group(0)

    def make_operands(self, shared: Shared, group: Int32) -> Operands:
        """Makes a warpgroup's products, views of shared memory and registers."""
        tile, k_major = self.tile, wgmma.K_MAJOR
        groups = (tile.mma_warpgroups, 1)
        scores_product = wgmma.Wgmma(self.dtype, groups, tile.n, (k_major, k_major))
        majors = (k_major, wgmma.MN_MAJOR)
        output_product = wgmma.Wgmma(self.dtype, groups, self.head_dim, majors, wgmma.REGISTERS)
        of_scores, of_output = scores_product.tiled(), output_product.tiled()
        uniform = cute.make_layout(tile.mma_warpgroups, stride=WARPGROUP)(group)
        scores_part, output_part = of_scores.get_slice(uniform), of_output.get_slice(uniform)

        def left(x: cute.Tensor) -> cute.Tensor:
            return of_scores.make_fragment_A(scores_part.partition_A(x))

        def right(x: cute.Tensor) -> cute.Tensor:
            return of_scores.make_fragment_B(scores_part.partition_B(x))

        def values(x: cute.Tensor) -> cute.Tensor:
            return of_output.make_fragment_B(output_part.partition_B(x))

        block = of_scores.partition_shape_C((tile.m, tile.n))
        rounded = of_output.partition_shape_A((tile.m, tile.n))
        output = of_output.partition_shape_C((tile.m, self.head_dim))
        return Operands(
            scores_product=scores_product,
            output_product=output_product,
            q=left(shared.q),
            q_tangent=left(shared.q_tangent),
            k=right(shared.k),
            k_tangent=right(shared.k_tangent),
            v=values(shared.v_t),
            v_tangent=values(shared.v_tangent_t),
            scores=cute.make_rmem_tensor(block, Float32),
            tangents=cute.make_rmem_tensor(block, Float32),
            probabilities=cute.make_rmem_tensor(rounded, self.dtype),
            weights=cute.make_rmem_tensor(rounded, self.dtype),
            acc=cute.make_rmem_tensor(output, Float32),
        )

    @cute.jit
    def mma_tile(
        self,
        maps: Maps,
        shared: Shared,
        work: Work,
        statistics: tuple[cute.Tensor, cute.Tensor],
        scalars: BackwardScalars,
        done: tuple[Int32, Int32],
    ):
        """Computes 64 query rows of a tile whose Q is there.

        statistics: LSE of the head, and its tangent; done: the numbers of tiles and blocks before.
        """
        thread, _, _ = cute.arch.thread_idx()
        thread = thread - WARPGROUP
        lane = thread % 32
        mma = self.make_operands(shared, self.group())
        mma.acc.fill(0.0)
        first_row = work.first_row + (thread // 32) * 16 + lane // 4
        rows = make_rows(work, statistics[0], first_row, (lane % 4) * 2)
        (tiles_done, blocks_done), blocks = done, work.blocks
        ring_end = blocks_done + blocks.end - 1
        if blocks.end > blocks.begin:
            self.first_block(shared, work, mma, rows, scalars, blocks_done)
            for block in cutlass.range(blocks.end - 2, blocks.begin - 1, -1, unroll=1):
                self.step(shared, work, mma, rows, scalars, (block, ring_end - block))
        self.release(shared.barriers.q_empty.first)
        if blocks.end > blocks.begin:
            last = shared.barriers.v_full.use(ring_end - blocks.begin)
            self.issue_output(shared, mma, last)
            warpgroup.wait_group(0)
            self.release(shared.barriers.v_empty.at(last))
        shared.barriers.o_full.wait(tiles_done)
        tangent = self.finish(shared, work, mma.acc, rows, statistics[1])
        self.store(maps, shared, work, tangent)
        self.release(shared.barriers.o_empty.first)

    def issue_scores(self, shared: Shared, mma: Operands, use: Use):
        """Waits for a block of K and issues S and S'."""
        now, product = (None, None, None, use.slot), mma.scores_product
        shared.barriers.k_full.wait(use)
        if self.tile.by_slices:
            product.issue_by_slices(
                (mma.scores, mma.q, mma.k[now], False),
                (mma.tangents, mma.q_tangent, mma.k[now], False),
                (mma.tangents, mma.q, mma.k_tangent[now], True),
            )
            return
        product.issue(mma.scores, mma.q, mma.k[now], accumulate=False)
        product.issue(mma.tangents, mma.q_tangent, mma.k[now], accumulate=False)
        product.issue(mma.tangents, mma.q, mma.k_tangent[now], accumulate=True)

    def issue_output(self, shared: Shared, mma: Operands, use: Use):
        """Waits for a block of V and issues what it adds to O', two groups of products."""
        now, product = (None, None, None, use.slot), mma.output_product
        shared.barriers.v_full.wait(use)
        product.issue(mma.acc, mma.probabilities, mma.v_tangent[now], accumulate=True)
        product.issue(mma.acc, mma.weights, mma.v[now], accumulate=True)

    @cute.jit
    def first_block(
        self,
        shared: Shared,
        work: Work,
        mma: Operands,
        rows: Rows,
        scalars: BackwardScalars,
        blocks_done: Int32,
    ):
        """Computes P and W of a tile's first block; no product can run meanwhile yet."""
        use, block = shared.barriers.k_full.use(blocks_done), work.blocks.end - 1
        self.issue_scores(shared, mma, use)
        warpgroup.wait_group(0)
        self.release(shared.barriers.k_empty.at(use))
        self.weigh(work, mma, rows, scalars, block)
        self.round(mma)
        if cutlass.const_expr(self.padding is not None):
            if work.padded_keys:
                values = shared.barriers.v_full.use(blocks_done)
                shared.barriers.v_full.wait(values)
                first_row = work.band.key_length - block * self.tile.n
                clear_padding(shared, values.slot, first_row, self.padding)

    @cute.jit
    def step(
        self,
        shared: Shared,
        work: Work,
        mma: Operands,
        rows: Rows,
        scalars: BackwardScalars,
        place: tuple[Int32, Int32],
    ):
        """Issues a block's scores, and what the block before adds to O'; then computes P and W.

        place: the block, and its use of the rings.
        """
        use, last = shared.barriers.k_full.use(place[1]), shared.barriers.v_full.use(place[1] - 1)
        group = self.group()
        self.await_turn(group)
        self.issue_scores(shared, mma, use)
        self.issue_output(shared, mma, last)
        self.pass_turn(group)
        warpgroup.wait_group(2)
        self.release(shared.barriers.k_empty.at(use))
        self.weigh(work, mma, rows, scalars, place[0])
        warpgroup.wait_group(0)
        self.release(shared.barriers.v_empty.at(last))
        self.round(mma)

    def round(self, mma: Operands):
        """Rounds P and W to the storage type, as operands of products."""
        wgmma.round_fragment(mma.scores, mma.probabilities)
        wgmma.round_fragment(mma.tangents, mma.weights)

    @cute.jit
    def weigh(self, work: Work, mma: Operands, rows: Rows, scalars: BackwardScalars, block: Int32):
        """Replaces S by P and S' by W of a block, and adds both to the sums of rows."""
        if (block >= work.blocks.full_end) | (block < work.blocks.full_begin):
            self.hide(mma, rows, block)
        for row in cutlass.range_constexpr(softmax.ROWS):
            sums = [[rows.total[row], Float32(0.0)], [rows.weighted[row], Float32(0.0)]]
            for pair, column in softmax.fragment_columns(mma.scores):
                index = softmax.fragment_index(pair, row, column)
                p = exp2(mma.scores[index] * scalars.scale_log2 - rows.lse_log2[row])
                weight = p * (mma.tangents[index] * scalars.scale)
                mma.scores[index], mma.tangents[index] = p, weight
                for sum_, term in zip(sums, (p, weight), strict=True):
                    sum_[column] = sum_[column] + term
            rows.total[row], rows.weighted[row] = sums[0][0] + sums[0][1], sums[1][0] + sums[1][1]

    @cute.jit
    def hide(self, mma: Operands, rows: Rows, block: Int32):
        """Sets scores to -inf and their tangents to 0 of keys that rows do not see."""
        softmax.mask_band(mma.scores, block * self.tile.n + rows.first_column, rows.low, rows.high)
        for i in cutlass.range_constexpr(cute.size(mma.scores)):
            hidden = mma.scores[i] == -Float32.inf
            mma.tangents[i] = select(hidden, Float32(0.0), mma.tangents[i])

    def part(self, shared: Shared) -> tuple[cute.Tensor, Int32]:
        """Returns this warpgroup's 64 rows of O's shared memory, and which they are."""
        group = self.group()
        return cute.local_tile(shared.o, (64, self.head_dim), (group, 0)), group

    def copy(self, operation: type) -> tuple[cute.CopyAtom, cute.TiledCopy]:
        """Returns a copy of a fragment of output from or to shared memory."""
        thread, _, _ = cute.arch.thread_idx()
        majors = (wgmma.K_MAJOR, wgmma.MN_MAJOR)
        product = wgmma.Wgmma(self.dtype, (1, 1), self.head_dim, majors, wgmma.REGISTERS)
        atom = cute.make_copy_atom(operation(False, 4), self.dtype)
        return atom, cute.make_tiled_copy_C(atom, product.tiled()).get_slice(thread % WARPGROUP)

    @cute.jit
    def finish(
        self, shared: Shared, work: Work, acc: cute.Tensor, rows: Rows, lse_tangent: cute.Tensor
    ) -> cute.Tensor:
        """Returns O' in the storage type, and stores LSE' to global memory."""
        thread, _, _ = cute.arch.thread_idx()
        thread = thread - WARPGROUP
        lane = thread % 32
        first_row = work.first_row + (thread // 32) * 16 + lane // 4
        output = cute.make_rmem_tensor(acc.shape, self.dtype)
        source, _ = self.part(shared)
        atom, copy = self.copy(warp.LdMatrix8x8x16bOp)
        cute.copy(atom, copy.partition_S(source), copy.retile(output))
        cute.arch.sync_warp()  # O' comes where other lanes have read O.
        for row in cutlass.range_constexpr(softmax.ROWS):
            sums = (rows.total[row], rows.weighted[row])
            total, weighted = (softmax.quad_reduce(x, lambda a, b: a + b) for x in sums)
            seen = rows.lse_log2[row] != Float32.inf
            inverse = select(seen, 1.0 / total, Float32(0.0))
            moved = select(seen, weighted * inverse, Float32(0.0))
            query = first_row + 8 * row
            if (lane % 4 == 0) & (query < cute.size(lse_tangent)):
                lse_tangent[query] = moved
            for pair, column in softmax.fragment_columns(acc):
                index = softmax.fragment_index(pair, row, column)
                value = acc[index] * inverse - moved * Float32(output[index])
                acc[index] = select(seen, value, Float32(0.0))
        wgmma.round_fragment(acc, output)
        return output

    @cute.jit
    def store(self, maps: Maps, shared: Shared, work: Work, tangent: cute.Tensor):
        """Stores 64 rows of O' by way of the memory of O."""
        thread, _, _ = cute.arch.thread_idx()
        thread = thread - WARPGROUP
        target, group = self.part(shared)
        atom, copy = self.copy(warp.StMatrix8x8x16bOp)
        cute.copy(atom, copy.retile(tangent), copy.partition_D(target))
        cute.arch.fence_proxy("async.shared", space="cta")
        resources.meet(self.epilogue, group)
        if cute.arch.make_warp_uniform(thread // 32) % 4 == 0:
            rows = tensors.bthd_coordinates()[None, None, work.head, work.batch]
            rows = cute.domain_offset((work.first_row + group * 64, 0), rows)
            place = cute.local_tile(rows, (64, self.head_dim), (0, 0))
            tensors.tma_store(maps.o_tangent, target, place)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    def group(self) -> Int32:
        """Returns which of the MMA warpgroups this one is."""
        thread, _, _ = cute.arch.thread_idx()
        return cute.arch.make_warp_uniform((thread - WARPGROUP) // WARPGROUP)


@cute.jit
def clear_padding(
    shared: Shared, slot: Int32, first_row: Int32, padding: cutlass.Constexpr[NamedBarrier]
):
    """Writes 0 to values and tangents past the key length, which may hold anything."""
    thread, _, _ = cute.arch.thread_idx()
    for memory in (shared.v, shared.v_tangent):
        tile = memory[None, None, slot]
        tensors.zero_vectors(tile, first_row, thread - WARPGROUP, padding.threads)
    cute.arch.fence_proxy("async.shared", space="cta")
    resources.meet(padding)


def source(key: KernelKey) -> KernelSource:
    """Returns the tangent kernel of a key, with its launch."""
    kernel = Tangent(key)
    tile = kernel.tile
    sizes = {"m": tile.m, "n": tile.n, "k_stages": tile.k_stages, "v_stages": tile.v_stages}
    return tangent_source(kernel, key, sizes)
