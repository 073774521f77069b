"""tcgen05 products: operands as tensors, one call issues all steps of 16 along K."""

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
from cutlass.utils import blackwell_helpers

K_MAJOR, MN_MAJOR = OperandMajorMode.K, OperandMajorMode.MN
SHARED, TENSOR = tcgen05.OperandSource.SMEM, tcgen05.OperandSource.TMEM
K_STEP = 16  # elements of a 16-bit operand that one instruction takes along K


@dataclasses.dataclass(frozen=True)
class Product:
    """m x n accumulators in tensor memory, fp32, from 16-bit operands.

    majors: K_MAJOR or MN_MAJOR of A and B; a_source: SHARED or TENSOR.
    """

    dtype: Any
    m: int
    n: int
    majors: tuple
    a_source: Any = SHARED

    def tiled(self) -> cute.TiledMma:
        """A fresh TiledMma: its accumulate flag is traced state and must not outlive a region."""
        return blackwell_helpers.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            *self.majors,
            cutlass.Float32,
            tcgen05.CtaGroup.ONE,
            (self.m, self.n),
            self.a_source,
        )

    def accumulator(self, base: cute.Pointer, column: int) -> cute.Tensor:
        """The accumulator that starts at a column of the CTA's tensor memory."""
        mma = self.tiled()
        layout = mma.make_fragment_C(mma.partition_shape_C((self.m, self.n))).layout
        return cute.make_tensor(base + column, layout)

    def shared_a(self, tile: cute.Tensor) -> cute.Tensor:
        """Operand A from (m, k) shared memory, or (m, k, stage)."""
        mma = self.tiled()
        return mma.make_fragment_A(mma.get_slice(0).partition_A(tile))

    def shared_b(self, tile: cute.Tensor) -> cute.Tensor:
        """Operand B from (n, k) shared memory, or (n, k, stage)."""
        mma = self.tiled()
        return mma.make_fragment_B(mma.get_slice(0).partition_B(tile))

    def tensor_a(self, base: cute.Pointer, column: int, k: int) -> cute.Tensor:
        """Operand A (m, k) in tensor memory: row r in lane r, two elements a column."""
        mma = self.tiled()
        layout = blackwell_helpers.make_smem_layout_a(mma, (self.m, self.n, k), self.dtype, 1)
        pointer = cute.recast_ptr(base + column, dtype=self.dtype)
        fragment = mma.make_fragment_A(layout.outer.shape)
        return cute.make_tensor(pointer, fragment.layout)[None, None, None, 0]

    def issue(
        self,
        acc: cute.Tensor,
        a: cute.Tensor,
        b: cute.Tensor,
        accumulate: Any,
        steps: tuple[int, int],
        first_of_a: int = 0,
    ):
        """acc (+)= a b over K steps [first, end); the whole warp calls, one thread issues.

        accumulate: of the first step, a constant or a runtime Boolean.
        first_of_a: the step that `a` starts with, if it holds only a part of K.
        """
        mma = self.tiled()
        for k in range(*steps):
            mma.set(tcgen05.Field.ACCUMULATE, accumulate if k == steps[0] else True)
            cute.gemm(mma, acc, a[None, None, k - first_of_a], b[None, None, k], acc)


def commit(barrier: cute.Pointer):
    """Arrives once all products that this warp has issued are complete."""
    with cute.arch.elect_one():
        tcgen05.commit(barrier)


def lane_base(base: Int32) -> Int32:
    """Address of column 0 in the first of the lanes that the calling warp reaches."""
    return base + ((cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4) << 21)


def arrive(*barriers: cute.Pointer):
    """One arrival per warp at each barrier, behind what all its lanes did."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        for barrier in barriers:
            cute.arch.mbarrier_arrive(barrier)
