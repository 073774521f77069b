"""C = A B^T by a pair of CTAs: each loads half of A and of B, the even one multiplies."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.cute.runtime import make_fake_compact_tensor, make_ptr
from cutlass.utils import blackwell_helpers as sm100

from tests.emulator.sm100.gemm import BLOCK_K, MMA_WARP, fence_after

ROWS, BOTH = 256, 3


def program(columns: int, depth: int):
    """A program and its arguments for compilation."""
    a = make_fake_compact_tensor(BFloat16, (ROWS, depth), stride_order=(1, 0), assumed_align=16)
    b = make_fake_compact_tensor(BFloat16, (columns, depth), stride_order=(1, 0), assumed_align=16)
    c = make_ptr(Float32, 0, cute.AddressSpace.gmem, assumed_align=16)
    return Pair(columns, depth), (a, b, c)


class Pair:
    """Warps 0-3 of each CTA write its rows, warp 4 loads, and in the even CTA multiplies."""

    def __init__(self, columns: int, depth: int):
        self.columns, self.depth = columns, depth

    def mma(self):
        """The products' shape and types."""
        return sm100.make_trivial_tiled_mma(
            BFloat16,
            BFloat16,
            OperandMajorMode.K,
            OperandMajorMode.K,
            Float32,
            tcgen05.CtaGroup.TWO,
            (ROWS, self.columns),
        )

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Pointer):
        mma, tiler = self.mma(), (ROWS, self.columns, BLOCK_K)
        a_layout = cute.select(sm100.make_smem_layout_a(mma, tiler, BFloat16, 1), mode=[0, 1, 2])
        b_layout = cute.select(sm100.make_smem_layout_b(mma, tiler, BFloat16, 1), mode=[0, 1, 2])
        load = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.TWO)
        a_map, a_tiles = cute.nvgpu.make_tiled_tma_atom_A(load, a, a_layout, tiler, mma)
        b_map, b_tiles = cute.nvgpu.make_tiled_tma_atom_B(load, b, b_layout, tiler, mma)
        self.kernel(a_map, a_tiles, b_map, b_tiles, c).launch(
            grid=[2, 1, 1], block=[160, 1, 1], cluster=[2, 1, 1]
        )

    @cute.kernel
    def kernel(
        self,
        a_map: cute.CopyAtom,
        a_tiles: cute.Tensor,
        b_map: cute.CopyAtom,
        b_tiles: cute.Tensor,
        c: cute.Pointer,
    ):
        mma, tiler = self.mma(), (ROWS, self.columns, BLOCK_K)
        a_layout = sm100.make_smem_layout_a(mma, tiler, BFloat16, 1)
        b_layout = sm100.make_smem_layout_b(mma, tiler, BFloat16, 1)

        @cute.struct
        class Storage:
            full: cute.struct.MemRange[Int64, 1]
            empty: cute.struct.MemRange[Int64, 1]
            done: cute.struct.MemRange[Int64, 1]
            tensor_memory: Int32
            a: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(a_layout)], 1024]
            b: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(b_layout)], 1024]

        shared = cutlass.memory.SmemAllocator().allocate(Storage)
        full, empty = shared.full.data_ptr(), shared.empty.data_ptr()
        done = shared.done.data_ptr()
        a_tile = shared.a.get_tensor(a_layout.outer, swizzle=a_layout.inner)
        b_tile = shared.b.get_tensor(b_layout.outer, swizzle=b_layout.inner)
        thread, _, _ = cute.arch.thread_idx()
        rank, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == MMA_WARP:
            with cute.arch.elect_one():
                for barrier in (full, empty, done):
                    cute.arch.mbarrier_init(barrier, 1)
            cute.arch.alloc_tmem(256, shared.tensor_memory.ptr, is_two_cta=True)
        cute.arch.mbarrier_init_fence()
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        pointer = cute.arch.retrieve_tmem_ptr(Float32, 16, shared.tensor_memory.ptr)
        d = cute.make_tensor(pointer, mma.make_fragment_C(mma.partition_shape_C(tiler[:2])).layout)

        if warp == MMA_WARP:
            barriers = full, empty, done
            of_a, of_b = (a_map, a_tiles, a_tile), (b_map, b_tiles, b_tile)
            self.multiply(mma, of_a, of_b, d, barriers, rank)
        else:
            self.write(mma, d, c, done, thread, rank)
        cute.arch.sync_threads()
        if warp == MMA_WARP:
            cute.arch.relinquish_tmem_alloc_permit(is_two_cta=True)
            cute.arch.dealloc_tmem(pointer, 256, is_two_cta=True)

    @cute.jit
    def multiply(self, mma, of_a, of_b, d, barriers, rank: Int32):
        """Loads block after block of k into both CTAs, and multiplies in the even one."""
        slices, operands = mma.get_slice(rank), []
        full, empty, done = barriers
        for atom, tiles, tile, tiler, partition in (
            (*of_a, (ROWS, BLOCK_K), slices.partition_A),
            (*of_b, (self.columns, BLOCK_K), slices.partition_B),
        ):
            blocks = partition(cute.local_tile(tiles, tiler, (0, None)))
            grouped = cute.group_modes(tile, 0, 3), cute.group_modes(blocks, 0, 3)
            operands.append((atom, *cpasync.tma_partition(atom, 0, cute.make_layout(1), *grouped)))
        a, b = mma.make_fragment_A(of_a[2]), mma.make_fragment_B(of_b[2])
        blocks = self.depth // BLOCK_K
        for block in cutlass.range_constexpr(blocks):
            if cutlass.const_expr(block > 0):
                cute.arch.mbarrier_wait(empty, (block - 1) % 2)
            if rank == 0:
                with cute.arch.elect_one():
                    size = (ROWS + self.columns) * BLOCK_K * 2
                    cute.arch.mbarrier_arrive_and_expect_tx(full, size)
            for atom, target, source in operands:
                cute.copy(atom, source[None, block], target[None, 0], tma_bar_ptr=full)
            if rank == 0:
                cute.arch.mbarrier_wait(full, block % 2)
                for k in cutlass.range_constexpr(cute.size(a, mode=[2])):
                    mma.set(tcgen05.Field.ACCUMULATE, block > 0 or k > 0)
                    cute.gemm(mma, d, a[None, None, k, 0], b[None, None, k, 0], d)
                with cute.arch.elect_one():
                    told = empty if block + 1 < blocks else done
                    tcgen05.commit(told, BOTH, tcgen05.CtaGroup.TWO)

    @cute.jit
    def write(self, mma, d, c: cute.Pointer, done: cute.Pointer, thread: Int32, rank: Int32):
        """Tensor memory to registers to global memory, a row a thread."""
        cute.arch.mbarrier_wait(done, 0)
        fence_after()
        whole = cute.make_tensor(
            c, cute.make_layout((ROWS, self.columns), stride=(self.columns, 1))
        )
        result = mma.get_slice(rank).partition_C(whole)[(None, None), 0, 0]
        accumulator = d[(None, None), 0, 0]
        atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition.x32), Float32)
        copy = tcgen05.make_tmem_copy(atom, accumulator)
        own = copy.get_slice(thread)
        source, target = own.partition_S(accumulator), own.partition_D(result)
        values = cute.make_rmem_tensor(target.shape, Float32)
        cute.copy(copy, source, values)
        cute.arch.fence_view_async_tmem_load()
        cute.autovec_copy(values, target)
