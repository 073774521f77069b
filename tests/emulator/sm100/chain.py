"""O = (Q K^T) V by one CTA: P goes from tensor memory through registers back as operand A.

Blocks of 64 keys use the same shared memory and columns again; P lies in the upper half of S.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.cute.runtime import make_fake_compact_tensor, make_ptr
from cutlass.utils import blackwell_helpers as sm100

from tests.emulator.sm100.gemm import MMA_WARP, ROWS, fence_after, fence_before

KEYS, HEAD_DIM = 64, 64
S_COLUMN, P_COLUMN, O_COLUMN = 0, KEYS // 2, 64


def program(blocks: int):
    """A program and its arguments for compilation; V is (head_dim, keys), contiguous head_dim."""
    length = blocks * KEYS
    tensors = [
        make_fake_compact_tensor(BFloat16, shape, stride_order=order, assumed_align=16)
        for shape, order in (
            ((ROWS, HEAD_DIM), (1, 0)),
            ((length, HEAD_DIM), (1, 0)),
            ((HEAD_DIM, length), (0, 1)),
        )
    ]
    result = make_ptr(Float32, 0, cute.AddressSpace.gmem, assumed_align=16)
    return Chain(blocks), (*tensors, result)


class Chain:
    """Warps 0-3 turn S into P and write O, warp 4 loads and multiplies."""

    def __init__(self, blocks: int):
        self.blocks = blocks

    def mma(self, v_major: bool):
        """S = Q K^T, or O = P V."""
        major = OperandMajorMode.MN if v_major else OperandMajorMode.K
        source = tcgen05.OperandSource.TMEM if v_major else tcgen05.OperandSource.SMEM
        return sm100.make_trivial_tiled_mma(
            BFloat16,
            BFloat16,
            OperandMajorMode.K,
            major,
            Float32,
            tcgen05.CtaGroup.ONE,
            (ROWS, HEAD_DIM),
            source,
        )

    def layouts(self):
        """Shared memory of Q, K and V."""
        of_s, of_o = self.mma(False), self.mma(True)
        tiler = (ROWS, KEYS, HEAD_DIM)
        return (
            sm100.make_smem_layout_a(of_s, tiler, BFloat16, 1),
            sm100.make_smem_layout_b(of_s, tiler, BFloat16, 1),
            sm100.make_smem_layout_b(of_o, (ROWS, HEAD_DIM, KEYS), BFloat16, 1),
        )

    @cute.jit
    def __call__(self, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, o: cute.Pointer):
        of_s, of_o = self.mma(False), self.mma(True)
        q_layout, k_layout, v_layout = (
            cute.select(layout, mode=[0, 1, 2]) for layout in self.layouts()
        )
        load = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.ONE)
        tiler = (ROWS, KEYS, HEAD_DIM)
        q_map = cute.nvgpu.make_tiled_tma_atom_A(load, q, q_layout, tiler, of_s)
        k_map = cute.nvgpu.make_tiled_tma_atom_B(load, k, k_layout, tiler, of_s)
        v_map = cute.nvgpu.make_tiled_tma_atom_B(load, v, v_layout, (ROWS, HEAD_DIM, KEYS), of_o)
        self.kernel(*q_map, *k_map, *v_map, o).launch(grid=[1, 1, 1], block=[160, 1, 1])

    @cute.kernel
    def kernel(
        self,
        q_map: cute.CopyAtom,
        q_tiles: cute.Tensor,
        k_map: cute.CopyAtom,
        k_tiles: cute.Tensor,
        v_map: cute.CopyAtom,
        v_tiles: cute.Tensor,
        o: cute.Pointer,
    ):
        q_layout, k_layout, v_layout = self.layouts()

        @cute.struct
        class Storage:
            full: cute.struct.MemRange[Int64, 1]
            empty: cute.struct.MemRange[Int64, 1]
            s_full: cute.struct.MemRange[Int64, 1]
            p_full: cute.struct.MemRange[Int64, 1]
            tensor_memory: Int32
            q: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(q_layout)], 1024]
            k: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(k_layout)], 1024]
            v: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(v_layout)], 1024]

        shared = cutlass.memory.SmemAllocator().allocate(Storage)
        barriers = tuple(
            field.data_ptr() for field in (shared.full, shared.empty, shared.s_full, shared.p_full)
        )
        q, k, v = (
            field.get_tensor(layout.outer, swizzle=layout.inner)
            for field, layout in ((shared.q, q_layout), (shared.k, k_layout), (shared.v, v_layout))
        )
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == MMA_WARP:
            with cute.arch.elect_one():
                for barrier, count in zip(barriers, (1, 1, 1, ROWS), strict=True):
                    cute.arch.mbarrier_init(barrier, count)
            cute.arch.alloc_tmem(128, shared.tensor_memory.ptr)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        base = cute.arch.retrieve_tmem_ptr(Float32, 16, shared.tensor_memory.ptr)
        if warp == MMA_WARP:
            maps = ((q_map, q_tiles), (k_map, k_tiles), (v_map, v_tiles))
            self.multiply(maps, (q, k, v), base, barriers)
        else:
            self.convert(base, o, barriers, thread)
        cute.arch.sync_threads()
        if warp == MMA_WARP:
            cute.arch.relinquish_tmem_alloc_permit()
            cute.arch.dealloc_tmem(base, 128)

    def accumulator(self, base: cute.Pointer, column: int, columns: int):
        """(128, columns) words of tensor memory."""
        mma = sm100.make_trivial_tiled_mma(
            BFloat16,
            BFloat16,
            OperandMajorMode.K,
            OperandMajorMode.K,
            Float32,
            tcgen05.CtaGroup.ONE,
            (ROWS, columns),
        )
        layout = mma.make_fragment_C(mma.partition_shape_C((ROWS, columns))).layout
        return cute.make_tensor(base + column, layout)

    def load(self, atom, tiles, tile, tiler, partition, block: int, barrier: cute.Pointer):
        """One TMA load."""
        blocks = partition(cute.local_tile(tiles, tiler, (0, None)))
        grouped = cute.group_modes(tile, 0, 3), cute.group_modes(blocks, 0, 3)
        target, source = cpasync.tma_partition(atom, 0, cute.make_layout(1), *grouped)
        cute.copy(atom, source[None, block], target[None, 0], tma_bar_ptr=barrier)

    @cute.jit
    def multiply(self, maps, tiles, base: cute.Pointer, barriers):
        """S = Q K^T, wait for P, O (+)= P V, block after block."""
        of_s, of_o = self.mma(False), self.mma(True)
        full, empty, s_full, p_full = barriers
        s = self.accumulator(base, S_COLUMN, KEYS)
        o = self.accumulator(base, O_COLUMN, HEAD_DIM)
        p_layout = sm100.make_smem_layout_a(of_o, (ROWS, HEAD_DIM, KEYS), BFloat16, 1)
        p = cute.make_tensor(
            cute.recast_ptr(base + P_COLUMN, dtype=BFloat16),
            of_o.make_fragment_A(p_layout.outer.shape).layout,
        )
        q, k = of_s.make_fragment_A(tiles[0]), of_s.make_fragment_B(tiles[1])
        v = of_o.make_fragment_B(tiles[2])
        slices = of_s.get_slice(0), of_o.get_slice(0)
        for block in cutlass.range_constexpr(self.blocks):
            if cutlass.const_expr(block > 0):
                # No fence is needed: the users of S and P arrived on p_full, after their own fence.
                cute.arch.mbarrier_wait(empty, (block - 1) % 2)
            rows = 2 * KEYS + (ROWS if block == 0 else 0)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, rows * HEAD_DIM * 2)
            if cutlass.const_expr(block == 0):
                a_tiler, partition = (ROWS, HEAD_DIM), slices[0].partition_A
                self.load(*maps[0], tiles[0], a_tiler, partition, 0, full)
            tiler = (KEYS, HEAD_DIM)
            k_blocks = slices[0].partition_B(cute.local_tile(maps[1][1], tiler, (None, 0)))
            k_target, k_source = cpasync.tma_partition(
                maps[1][0],
                0,
                cute.make_layout(1),
                cute.group_modes(tiles[1], 0, 3),
                cute.group_modes(k_blocks, 0, 3),
            )
            cute.copy(maps[1][0], k_source[None, block], k_target[None, 0], tma_bar_ptr=full)
            partition = slices[1].partition_B
            self.load(*maps[2], tiles[2], (HEAD_DIM, KEYS), partition, block, full)
            cute.arch.mbarrier_wait(full, block % 2)
            for step in cutlass.range_constexpr(cute.size(q, mode=[2])):
                of_s.set(tcgen05.Field.ACCUMULATE, step > 0)
                cute.gemm(of_s, s, q[None, None, step, 0], k[None, None, step, 0], s)
            with cute.arch.elect_one():
                tcgen05.commit(s_full)
            cute.arch.mbarrier_wait(p_full, block % 2)
            fence_after()
            for step in cutlass.range_constexpr(cute.size(p, mode=[2])):
                of_o.set(tcgen05.Field.ACCUMULATE, block > 0 or step > 0)
                cute.gemm(of_o, o, p[None, None, step, 0], v[None, None, step, 0], o)
            with cute.arch.elect_one():
                tcgen05.commit(empty)

    @cute.jit
    def convert(self, base: cute.Pointer, o: cute.Pointer, barriers, thread: Int32):
        """P = S in bfloat16, a row a thread; then O to global memory."""
        _, empty, s_full, p_full = barriers
        load = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition.x32), Float32)
        store = cute.make_copy_atom(tcgen05.St32x32bOp(tcgen05.Repetition.x32), Float32)
        s = self.accumulator(base, S_COLUMN, KEYS)[(None, None), 0, 0]
        words = self.accumulator(base, P_COLUMN, KEYS // 2)[(None, None), 0, 0]
        from_s, to_p = tcgen05.make_tmem_copy(load, s), tcgen05.make_tmem_copy(store, words)
        own_s, own_p = from_s.get_slice(thread), to_p.get_slice(thread)
        identity = cute.make_identity_tensor((ROWS, KEYS))
        for block in cutlass.range_constexpr(self.blocks):
            cute.arch.mbarrier_wait(s_full, block % 2)
            fence_after()
            values = cute.make_rmem_tensor(own_s.partition_D(identity).shape, Float32)
            cute.copy(from_s, own_s.partition_S(s), values)
            cute.arch.fence_view_async_tmem_load()
            narrow = cute.make_rmem_tensor(values.shape, BFloat16)
            narrow.store(values.load().to(BFloat16))
            target = own_p.partition_D(words)
            packed = cute.make_tensor(
                cute.recast_ptr(narrow.iterator, dtype=Float32),
                cute.make_layout(
                    own_p.partition_S(cute.make_identity_tensor((ROWS, KEYS // 2))).shape
                ),
            )
            cute.copy(to_p, packed, target)
            cute.arch.fence_view_async_tmem_store()
            fence_before()
            cute.arch.mbarrier_arrive(p_full)
        cute.arch.mbarrier_wait(empty, (self.blocks - 1) % 2)
        fence_after()
        result = cute.make_tensor(o, cute.make_layout((ROWS, HEAD_DIM), stride=(HEAD_DIM, 1)))
        accumulator = self.accumulator(base, O_COLUMN, HEAD_DIM)[(None, None), 0, 0]
        from_o = tcgen05.make_tmem_copy(load, accumulator)
        own_o = from_o.get_slice(thread)
        target = own_o.partition_D(result)
        values = cute.make_rmem_tensor(target.shape, Float32)
        cute.copy(from_o, own_o.partition_S(accumulator), values)
        cute.arch.fence_view_async_tmem_load()
        cute.autovec_copy(values, target)
