"""Blackwell forward: O = softmax(scale * Q K^T) V and LSE, query tiles of 128 rows in ping-pong.

    load warp         TMA: Q of both tiles, K and V blocks into one ring, last block first
    MMA warp          S_t(i) = Q_t K(i)^T      both operands from shared memory, S to tensor memory
                      O_t   += P_t(i) V(i)     P from tensor memory, part by part
    softmax group t   one row a thread: S from tensor memory to registers, reference maximum,
                      P = exp2(S * scale_log2 - reference * scale_log2) back over S, row sum
    correction group  O_t *= factor in tensor memory where a row's reference moved; at the end
                      O_t / sum to shared memory
    store warp        TMA: output tiles to global memory

Two query tiles (head_dim <= 128): S_0(0) S_1(0), then for every block i: O_0 S_0(i+1) O_1 S_1(i+1);
while one tile's softmax works, the tensor core has the other's products. A single query tile (where
two accumulators O do not fit tensor memory) has two buffers of scores instead: S(0) S(1), then for
every block i: O S(i+2).

    barrier      from -> to                     once per
    q_full       load -> mma                    query tile
    q_empty      mma or store -> load           query tile
    kv_full      load -> mma                    block of K or V
    kv_empty     mma -> load                    block of K or V
    s_full       mma -> softmax                 block
    p_early      softmax, correction -> mma     block: the first part of P
    p_late       softmax -> mma                 block and other part of P
    FACTORS      softmax -> correction          block; named, of 2 warps each
    o_full       mma -> correction              query tile; block, with a single query tile
    sums_full    softmax -> correction          query tile
    sums_empty   correction -> softmax          query tile
    out_full     correction -> store            query tile
    out_empty    store -> correction            query tile

Note [what needs no barrier]: a buffer's next S overwrites its S and P, and comes behind the product
that read this P in the order in which the MMA warp issues. A factor is overwritten by the softmax
warp of the next block there, which waited for that S, and so for the correction warps' arrival on
p_early of this block, behind their reading the factor. O_t is overwritten by the next tile's first
product, behind the correction warps' arrival on its p_early. With two query tiles O_t may be
rescaled when a factor is there: S_t(i) was complete, and so was O_t's product of block i-1 before
it; with a single one S(i) comes before that product, which the correction warps then wait for.

(FlashAttention-4: ping-pong tiles, conditional rescaling, correction warps, P in parts.)
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync, warpgroup

from fa4_jax.key import KernelKey
from fa4_jax.manifest import Factor, Launch, Param, Result
from kernels.common import launches, tensors
from kernels.common.schedule import Schedule
from kernels.sm100 import products, ptx
from kernels.sm100.forward_data import (
    ARRIVALS,
    WARPS_OF_ROLE,
    Config,
    Maps,
    Shared,
    allocate,
    barrier_count,
    output_buffer,
    part_barrier,
)
from kernels.sm100.forward_rows import RowRoles
from kernels.sm100.packing import UNIT, Work, assign, make_schedule
from kernels.sm100.tiles import TENSOR_MEMORY_COLUMNS
from kernels.sources import KernelSource


class Forward:
    """The kernel of one key; attributes are compile-time constants."""

    def __init__(self, key: KernelKey):
        self.config = Config(key)
        self.rows = RowRoles(self.config)
        tile, dtype, d = self.config.tile, self.config.dtype, self.config.head_dim
        self.qk = products.Product(dtype, tile.rows, tile.n)
        self.pv = products.Product(dtype, tile.rows, d)

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
        tile, d = self.config.tile, self.config.head_dim
        q_tensor = tensors.bthd_tensor(q, (batch, query_length, heads, head_dim))
        k_tensor = tensors.bthd_tensor(k, (batch, key_length, kv_heads, head_dim))
        v_tensor = tensors.bthd_tensor(v, (batch, key_length, kv_heads, head_dim))
        o_tensor = tensors.bthd_tensor(o, (batch, query_length, heads, head_dim))
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()

        def layout(rows):
            swizzle = tensors.SWIZZLES[tile.span_bytes]
            atom = warpgroup.make_smem_layout_atom(swizzle, self.config.dtype)
            return cute.tile_to_shape(atom, (rows, d), order=(0, 1))

        q_map, _ = cpasync.make_tiled_tma_atom(load, q_tensor, layout(UNIT), (UNIT, d))
        k_map, _ = cpasync.make_tiled_tma_atom(load, k_tensor, layout(tile.n), (tile.n, d))
        v_map, _ = cpasync.make_tiled_tma_atom(load, v_tensor, layout(tile.n), (tile.n, d))
        o_map, _ = cpasync.make_tiled_tma_atom(store, o_tensor, layout(UNIT), (UNIT, d))
        q_rows_map, _ = cpasync.make_tiled_tma_atom(
            load, q_tensor, layout(tile.rows), (tile.rows, d)
        )
        o_rows_map, _ = cpasync.make_tiled_tma_atom(
            store, o_tensor, layout(tile.rows), (tile.rows, d)
        )
        ctas = cute.ceil_div(query_length, tile.m) * heads * batch
        ctas = cutlass.min(ctas, sm_count)
        self.kernel(
            q_map,
            k_map,
            v_map,
            o_map,
            q_rows_map,
            o_rows_map,
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
        q_rows_map: cute.CopyAtom,
        o_rows_map: cute.CopyAtom,
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
        maps = Maps(q_map, k_map, v_map, o_map, q_rows_map, o_rows_map)
        tile = self.config.tile
        shared = allocate(self.config.dtype, self.config.head_dim, tile)
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
                    for i in cutlass.range_constexpr(barrier_count(name, tile)):
                        cute.arch.mbarrier_init(getattr(shared.barriers, name) + i, arrivals)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        sizes = (batch, query_length, key_length, heads, kv_heads)
        window = (window_left, window_right)
        budget = tile.registers
        first_correction, _ = WARPS_OF_ROLE["correction"]
        # Each role makes its schedule: made once, its values would take registers of all of them.
        if warp < first_correction:
            ptx.set_registers(budget.softmax)
            if warp // 4 < tile.query_tiles:
                schedule = make_schedule(extents, sizes, window, tile.m)
                scales = (scale_log2, rescale_threshold_log2)
                self.rows.soften(shared, schedule, lse, scales)
        elif warp < mma_warp:
            ptx.set_registers(budget.correction)
            self.rows.correct(shared, make_schedule(extents, sizes, window, tile.m))
        else:
            ptx.set_registers(budget.others)
            schedule = make_schedule(extents, sizes, window, tile.m)
            if warp == mma_warp:
                self.multiply(shared, schedule)
            elif warp == WARPS_OF_ROLE["load"][0]:
                self.load(maps, shared, schedule)
            elif warp == WARPS_OF_ROLE["store"][0]:
                self.store(maps, shared, schedule)
        cute.arch.sync_threads()
        if warp == mma_warp:
            base = cute.arch.retrieve_tmem_ptr(Float32, 16, shared.tmem_base)
            cute.arch.dealloc_tmem(base, TENSOR_MEMORY_COLUMNS)

    @cute.jit
    def load(self, maps: Maps, shared: Shared, schedule: Schedule):
        """Load warp: of every tile Q, then K and V of each block, last block first."""
        tile = self.config.tile
        position, live, turns = Int32(0), Int32(0), Int32(0)
        for turn in cutlass.range(schedule.rounds, unroll=1):
            if schedule.tile(turn) < schedule.tiles:
                work = assign(schedule.tile(turn), schedule, self.config.shape)
                count = work.blocks.end - work.blocks.begin
                # Who takes the query tiles' memory for output does so without blocks, too.
                uses = turns if cutlass.const_expr(tile.output_tiles == 0) else live
                if count > 0:
                    self.load_tile(maps, shared, work, position, uses)
                    live += 1
                    position += 2 * count
                elif cutlass.const_expr(tile.output_tiles == 0):
                    for t in cutlass.range_constexpr(tile.query_tiles):
                        self.await_query_memory(shared, t, uses)
                turns += 1
        # Shared memory outlives every commit's arrival.
        if cutlass.const_expr(tile.output_tiles > 0):
            for t in cutlass.range_constexpr(tile.query_tiles):
                self.await_query_memory(shared, t, live)
        for i in cutlass.range_constexpr(tile.kv_stages):
            slot, phase = tensors.ring_slot(position + i, tile.kv_stages)
            cute.arch.mbarrier_wait(shared.barriers.kv_empty + slot, phase ^ 1)

    @cute.jit
    def await_query_memory(self, shared: Shared, t: cutlass.Constexpr[int], uses: Int32):
        """Waits until query tile t's memory has been left as often as it has been used."""
        # The first pass finds it empty: parity 1 passes on a new barrier.
        cute.arch.mbarrier_wait(shared.barriers.q_empty + t, (uses & 1) ^ 1)

    @cute.jit
    def load_tile(self, maps: Maps, shared: Shared, work: Work, position: Int32, uses: Int32):
        """Loads of one tile that has blocks, after `position` loads into the ring and `uses` of the
        query tiles' memory."""
        tile, d = self.config.tile, self.config.head_dim
        units = tile.rows // UNIT
        kv = tensors.bthd_coordinates()[None, None, work.kv_head, work.batch]
        kv_tiles = cute.local_tile(kv, (tile.n, d), (None, 0))
        last, count = work.blocks.end - 1, work.blocks.end - work.blocks.begin
        ahead = tile.buffers_per_tile
        self.load_block(maps.k, shared, kv_tiles, last, position)
        position += 1
        for t in cutlass.range_constexpr(tile.query_tiles):
            full = shared.barriers.q_full + t
            self.await_query_memory(shared, t, uses)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, tile.rows * d * 2)
            if work.pack == 1:
                source = self.coordinates(work, t * units, tile.rows)
                tensors.tma_load(maps.q_rows, source, shared.q[None, None, t], full)
            else:
                for unit in cutlass.range(units, unroll=1):
                    source = self.coordinates(work, t * units + unit, UNIT)
                    target = cute.local_tile(shared.q[None, None, t], (UNIT, d), (unit, 0))
                    tensors.tma_load(maps.q, source, target, full)
        for i in cutlass.range_constexpr(1, ahead):
            if i < count:
                self.load_block(maps.k, shared, kv_tiles, last - i, position)
                position += 1
        for step in cutlass.range(count, unroll=1):
            self.load_block(maps.v, shared, kv_tiles, last - step, position)
            position += 1
            if step + ahead < count:
                self.load_block(maps.k, shared, kv_tiles, last - step - ahead, position)
                position += 1

    def coordinates(self, work: Work, unit: Int32, rows: int) -> cute.Tensor:
        """TMA coordinates in [B, length, heads, head_dim] of rows from a unit of the tile on."""
        query, head = work.unit(unit)
        tensor = tensors.bthd_coordinates()[None, None, head, work.batch]
        return cute.local_tile(
            cute.domain_offset((query, 0), tensor), (rows, self.config.head_dim), (0, 0)
        )

    @cute.jit
    def load_block(
        self,
        atom: cute.CopyAtom,
        shared: Shared,
        kv_tiles: cute.Tensor,
        block: Int32,
        position: Int32,
    ):
        """One block of K or V into the ring, after `position` others."""
        tile = self.config.tile
        slot, phase = tensors.ring_slot(position, tile.kv_stages)
        full = shared.barriers.kv_full + slot
        cute.arch.mbarrier_wait(shared.barriers.kv_empty + slot, phase ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, tile.n * self.config.head_dim * 2)
        tensors.tma_load(atom, kv_tiles[None, None, block], shared.kv[None, None, slot], full)

    @cute.jit
    def multiply(self, shared: Shared, schedule: Schedule):
        """MMA warp: all products of all tiles."""
        used, live = Int32(0), Int32(0)
        for turn in cutlass.range(schedule.rounds, unroll=1):
            if schedule.tile(turn) < schedule.tiles:
                work = assign(schedule.tile(turn), schedule, self.config.shape)
                count = work.blocks.end - work.blocks.begin
                if count > 0:
                    self.multiply_tile(shared, work, live, used)
                    live += 1
                    used += count

    @cute.jit
    def multiply_tile(self, shared: Shared, work: Work, live: Int32, used: Int32):
        """Products of one tile that has blocks, after `live` such tiles and `used` blocks."""
        tile, barriers = self.config.tile, shared.barriers
        count = work.blocks.end - work.blocks.begin
        ahead, tiles = tile.buffers_per_tile, tile.query_tiles
        position = 2 * used
        for i in cutlass.range_constexpr(ahead):
            if i < count:
                slot = self.await_block(shared, position)
                for t in cutlass.range_constexpr(tiles):
                    if cutlass.const_expr(i == 0):
                        cute.arch.mbarrier_wait(barriers.q_full + t, live & 1)
                    self.multiply_scores(shared, t, slot, used + i, i == count - 1)
                products.commit(barriers.kv_empty + slot)
                position += 1
        for step in cutlass.range(count, unroll=1):
            v_slot = self.await_block(shared, position)
            position += 1
            if (step == 0) & work.padded_keys:
                self.clear_padding(shared.kv[None, None, v_slot], work)
            for t in cutlass.range_constexpr(tiles):
                self.multiply_values(shared, t, v_slot, used + step, step > 0)
                # Never a phase that nobody waits for: commits may arrive out of order.
                if (tiles == 1) | (step == count - 1):
                    products.commit(barriers.o_full + t)
                if cutlass.const_expr(t == tiles - 1):
                    products.commit(barriers.kv_empty + v_slot)
                if step + ahead < count:
                    k_slot = self.await_block(shared, position, t == 0)
                    last = step + ahead == count - 1
                    self.multiply_scores(shared, t, k_slot, used + step + ahead, last)
                    if cutlass.const_expr(t == tiles - 1):
                        products.commit(barriers.kv_empty + k_slot)
            if step + ahead < count:
                position += 1

    @cute.jit
    def await_block(
        self, shared: Shared, position: Int32, first: cutlass.Constexpr[bool] = True
    ) -> Int32:
        """Waits for a load into the ring, if this is its first use; returns its slot."""
        slot, phase = tensors.ring_slot(position, self.config.tile.kv_stages)
        if cutlass.const_expr(first):
            cute.arch.mbarrier_wait(shared.barriers.kv_full + slot, phase)
        return slot

    @cute.jit
    def multiply_scores(
        self,
        shared: Shared,
        t: cutlass.Constexpr[int],
        k_slot: Int32,
        ordinal: Int32,
        last: cutlass.Boolean,
    ):
        """S = Q_t K^T of the CTA's ordinal-th block; `last` of its tile."""
        buffer, _ = self.config.buffer(t, ordinal)
        tile, d = self.config.tile, self.config.head_dim
        row_bytes = d * 2
        q = products.k_major(shared.q.iterator, tile.rows, d, tile.span_bytes)
        k = products.k_major(shared.kv.iterator, tile.n, d, tile.span_bytes)
        self.qk.issue(
            self.config.columns.s[0] + buffer * tile.n,
            q.moved(t * tile.rows * row_bytes),
            k.moved(k_slot * (tile.n * row_bytes)),
            False,
            (0, d // products.K_STEP),
        )
        products.commit(shared.barriers.s_full + buffer)
        if cutlass.const_expr(tile.output_tiles > 0):
            if last:
                products.commit(shared.barriers.q_empty + t)

    @cute.jit
    def multiply_values(
        self,
        shared: Shared,
        t: cutlass.Constexpr[int],
        v_slot: Int32,
        ordinal: Int32,
        accumulate: cutlass.Boolean,
    ):
        """O_t += P V of the CTA's ordinal-th block, part by part."""
        tile = self.config.tile
        n = tile.n
        buffer, phase = self.config.buffer(t, ordinal)
        p = self.config.columns.p[0] + buffer * n
        v = products.mn_major(shared.kv.iterator, n, tile.span_bytes)
        v = v.moved(v_slot * (n * self.config.head_dim * 2))
        acc = self.config.columns.o[t]
        first = 0
        for part in cutlass.range_constexpr(len(tile.parts)):
            barrier = part_barrier(shared.barriers, tile, buffer, part)
            cute.arch.mbarrier_wait(barrier, phase)
            ptx.fence_after_sync()
            end = tile.parts[part] // products.K_STEP
            self.pv.issue(acc, p, v, accumulate if part == 0 else True, (first, end))
            first = end

    @cute.jit
    def clear_padding(self, v: cute.Tensor, work: Work):
        """Values of the last block past the key length, which may hold anything, to 0."""
        first_row = work.band.key_length - (work.blocks.end - 1) * self.config.tile.n
        thread, _, _ = cute.arch.thread_idx()
        tensors.zero_rows(v, first_row, thread % 32, 32)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()

    @cute.jit
    def store(self, maps: Maps, shared: Shared, schedule: Schedule):
        """Store warp: output tiles to global memory."""
        tile, d, turns = self.config.tile, self.config.head_dim, Int32(0)
        units = tile.rows // UNIT
        for turn in cutlass.range(schedule.rounds, unroll=1):
            if schedule.tile(turn) < schedule.tiles:
                work = assign(schedule.tile(turn), schedule, self.config.shape)
                for t in cutlass.range_constexpr(tile.query_tiles):
                    buffer, phase = output_buffer(tile, turns, t)
                    cute.arch.mbarrier_wait(shared.barriers.out_full + buffer, phase)
                    # One thread stores, since the group that it waits for is its own.
                    with cute.arch.elect_one():
                        if work.pack == 1:
                            target = self.coordinates(work, t * units, tile.rows)
                            tensors.tma_store(maps.o_rows, shared.o[None, None, buffer], target)
                        else:
                            for unit in cutlass.range(units, unroll=1):
                                target = self.coordinates(work, t * units + unit, UNIT)
                                tile_o = shared.o[None, None, buffer]
                                o = cute.local_tile(tile_o, (UNIT, d), (unit, 0))
                                tensors.tma_store(maps.o, o, target)
                        cute.arch.cp_async_bulk_commit_group()
                        # Behind the last tile, too: shared memory outlives what the stores read.
                        cute.arch.cp_async_bulk_wait_group(0, read=True)
                        cute.arch.mbarrier_arrive(shared.barriers.out_empty + buffer)
                        if cutlass.const_expr(tile.output_tiles == 0):
                            cute.arch.mbarrier_arrive(shared.barriers.q_empty + t)
                turns += 1


Forward.kernel.set_name_prefix("fa4_fwd", remove_cutlass_symbol=True, keep_mangled_name=False)
Forward.__call__.set_name_prefix(
    "fa4_fwd_host", remove_cutlass_symbol=True, keep_mangled_name=False
)


def source(key: KernelKey) -> KernelSource:
    """The forward kernel of a key, with its launch."""
    kernel = Forward(key)
    tile = kernel.config.tile
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
            launches.bthd_map("q", UNIT, tile.span_bytes),
            launches.bthd_map("k", tile.n, tile.span_bytes),
            launches.bthd_map("v", tile.n, tile.span_bytes),
            launches.bthd_map("o", UNIT, tile.span_bytes),
            launches.bthd_map("q", tile.rows, tile.span_bytes, "q_rows_map"),
            launches.bthd_map("o", tile.rows, tile.span_bytes, "o_rows_map"),
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
