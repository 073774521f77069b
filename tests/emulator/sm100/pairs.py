"""Row sums by clusters of two CTAs: multicast, st.async, cluster barriers, launch control."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_compact_tensor, make_ptr

ROWS, COLUMNS = 64, 64
HALF = ROWS // 2
LOAD_WARP = 4


def program(tiles: int):
    """A program and its arguments for compilation."""
    shape = (tiles * ROWS, COLUMNS)
    a = make_fake_compact_tensor(BFloat16, shape, stride_order=(1, 0), assumed_align=16)
    return Pairs(tiles), (a, make_ptr(Float32, 0, cute.AddressSpace.gmem, assumed_align=16))


class Pairs:
    """Each CTA loads half of a tile's rows for both, and sums half of the columns of all rows."""

    def __init__(self, tiles: int):
        self.tiles = tiles

    @cute.jit
    def __call__(self, a: cute.Tensor, c: cute.Pointer):
        layout = cute.make_layout((HALF, COLUMNS), stride=(COLUMNS, 1))
        load = cpasync.CopyBulkTensorTileG2SMulticastOp()
        a_map, a_rows = cpasync.make_tiled_tma_atom(
            load, a, layout, (HALF, COLUMNS), num_multicast=1
        )
        self.kernel(a_map, a_rows, c).launch(
            grid=[2 * self.tiles, 1, 1], block=[160, 1, 1], cluster=[2, 1, 1]
        )

    @cute.kernel
    def kernel(self, a_map: cute.CopyAtom, a_rows: cute.Tensor, c: cute.Pointer):
        @cute.struct
        class Storage:
            full: cute.struct.MemRange[Int64, 1]
            summed: cute.struct.MemRange[Int64, 1]
            answered: cute.struct.MemRange[Int64, 1]
            answer: cute.struct.Align[cute.struct.MemRange[Int32, 4], 16]
            sums: cute.struct.Align[cute.struct.MemRange[Int32, ROWS], 16]
            a: cute.struct.Align[cute.struct.MemRange[BFloat16, ROWS * COLUMNS], 1024]

        shared = cutlass.memory.SmemAllocator().allocate(Storage)
        full, summed = shared.full.data_ptr(), shared.summed.data_ptr()
        answered, answer = shared.answered.data_ptr(), shared.answer.data_ptr()
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        if warp == LOAD_WARP:
            with cute.arch.elect_one():
                for barrier in (full, summed, answered):
                    cute.arch.mbarrier_init(barrier, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.cluster_arrive_relaxed()
        cute.arch.cluster_wait()

        tile = shared.a.get_tensor(
            cute.make_layout((HALF, COLUMNS, 2), stride=(COLUMNS, 1, HALF * COLUMNS))
        )
        halves = cute.local_tile(a_rows, (HALF, COLUMNS), (None, 0))
        targets, sources = cpasync.tma_partition(
            a_map,
            0,
            cute.make_layout(1),
            cute.group_modes(tile, 0, 2),
            cute.group_modes(halves, 0, 2),
        )
        rows = shared.a.get_tensor(cute.make_layout((ROWS, COLUMNS), stride=(COLUMNS, 1)))
        sums = shared.sums.get_tensor(cute.make_layout(ROWS))
        results = cute.make_tensor(c, cute.make_layout((self.tiles * ROWS, 2), stride=(2, 1)))
        first, _, _ = cute.arch.block_idx()
        number, phase, more = first // 2, Int32(0), Int32(1)
        while more != 0:
            if warp == LOAD_WARP:
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full, ROWS * COLUMNS * 2)
                    cute.arch.mbarrier_arrive_and_expect_tx(summed, ROWS * 4)
                    cute.arch.mbarrier_arrive_and_expect_tx(answered, 16)
                cute.copy(
                    a_map,
                    sources[None, number * 2 + rank],
                    targets[None, rank],
                    tma_bar_ptr=full,
                    mcast_mask=cutlass.Int16(3),
                )
                if rank == 0:
                    with cute.arch.elect_one():
                        cute.arch.issue_clc_query(answered, answer)
            if thread < ROWS:
                cute.arch.mbarrier_wait(full, phase)
                total = Float32(0)
                for column in cutlass.range_constexpr(COLUMNS // 2):
                    total += rows[thread, rank * (COLUMNS // 2) + column].to(Float32)
                bits = cute.make_rmem_tensor(1, Float32)
                bits[0] = total
                word = cute.recast_tensor(bits, Int32)[0]
                cute.arch.store_async_dsmem(sums.iterator + thread, word, summed, 1 - rank)
                cute.arch.mbarrier_wait(summed, phase)
                other = cute.recast_tensor(sums, Float32)[thread]
                results[number * ROWS + thread, rank] = total + other + rank.to(Float32)
            cute.arch.mbarrier_wait(answered, phase)
            x, _, _, more = cute.arch.clc_response(answer)
            number, phase = x // 2, phase ^ 1
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
