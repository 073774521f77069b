"""Products of warpgroups, and fragments of registers that are their operands and results."""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup
from cutlass.utils import hopper_helpers

from kernels.common import ptx

K_MAJOR, MN_MAJOR = OperandMajorMode.K, OperandMajorMode.MN
SLICE = 16
"""Columns of operand A, and rows of B, that one instruction multiplies."""

_SLICE_ELEMENTS = 64 * SLICE // 128
"""What a thread holds of a slice of 64 rows."""

SHARED, REGISTERS = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM


def round_fragment(values: cute.Tensor, rounded: cute.Tensor):
    """Rounds values into `rounded`, element by element in the order of their registers.

    The conversion is an opaque instruction on purpose: an ordinary one would be moved by the
    compiler to its use, after the next product has been issued, and the fp32 values would stay in
    registers beside that product's accumulators.
    """
    round_slices(values, rounded, 0, cute.size(rounded) // _SLICE_ELEMENTS)


def round_slices(values: cute.Tensor, rounded: cute.Tensor, first: int, end: int):
    """Does what `round_fragment` does, for slices `first` to `end` of an operand A."""
    pairs = cute.recast_tensor(rounded, Int32)
    for i in range(first * _SLICE_ELEMENTS // 2, end * _SLICE_ELEMENTS // 2):
        pairs[i] = ptx.round_pair(rounded.element_type, values[2 * i], values[2 * i + 1])


@dataclasses.dataclass(frozen=True)
class Wgmma:
    """64 x n x 16 MMA with fp32 accumulators, tiled over warpgroups along M and N.

    majors: K_MAJOR or MN_MAJOR of operands A and B; a_source: SHARED or REGISTERS.
    """

    dtype: Any
    warpgroups: tuple[int, int]
    n: int
    majors: tuple[OperandMajorMode, OperandMajorMode]
    a_source: Any = SHARED

    def tiled(self) -> cute.TiledMma:
        """Makes a new TiledMma: its accumulate flag is traced and must not outlive a region."""
        return hopper_helpers.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            *self.majors,
            cutlass.Float32,
            (*self.warpgroups, 1),
            (64, self.n),
            self.a_source,
        )

    def issue(self, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, accumulate: bool):
        """Issues acc (+)= a b and commits it as one group; the caller waits."""
        mma = self.tiled()
        warpgroup.fence()
        for k in range(cute.size(a, mode=[2])):
            mma.set(warpgroup.Field.ACCUMULATE, accumulate or k > 0)
            cute.gemm(mma, acc, a[None, None, k], b[None, None, k], acc)
        warpgroup.commit_group()

    def issue_more(self, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, first: int, end: int):
        """Issues acc += a b of the slices from `first` to `end`; the caller commits the group."""
        mma = self.tiled()
        warpgroup.fence()
        mma.set(warpgroup.Field.ACCUMULATE, True)
        for k in range(first, end):
            cute.gemm(mma, acc, a[None, None, k], b[None, None, k], acc)

    def issue_by_slices(self, *products: tuple[cute.Tensor, cute.Tensor, cute.Tensor, bool]):
        """Issues several products (acc, a, b, accumulate), slice by slice, as one group.

        Each slice's descriptors are in registers only while its products are issued.
        """
        mma = self.tiled()
        warpgroup.fence()
        for k in range(cute.size(products[0][1], mode=[2])):
            for acc, a, b, accumulate in products:
                mma.set(warpgroup.Field.ACCUMULATE, accumulate or k > 0)
                cute.gemm(mma, acc, a[None, None, k], b[None, None, k], acc)
        warpgroup.commit_group()

    def from_registers(self) -> Wgmma:
        """The same product of an operand A in registers."""
        return dataclasses.replace(self, a_source=REGISTERS)

    def issue_with(
        self, slices: cute.Tensor | None, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor
    ):
        """Issues acc = a b as `issue` does; the first slices of a come from `slices`."""
        first, rest = self.from_registers().tiled(), self.tiled()
        count = 0 if slices is None else cute.size(slices, mode=[2])
        warpgroup.fence()
        for k in range(cute.size(b, mode=[2])):
            mma, source = (first, slices) if slices is not None and k < count else (rest, a)
            mma.set(warpgroup.Field.ACCUMULATE, k > 0)
            cute.gemm(mma, acc, source[None, None, k], b[None, None, k], acc)
        warpgroup.commit_group()

    def make_slices(self, rows: int, count: int) -> cute.Tensor | None:
        """Makes registers for `count` slices of operand A, SLICE columns each; None for none."""
        if count == 0:
            return None
        shape = self.from_registers().tiled().partition_shape_A((rows, count * SLICE))
        return cute.make_rmem_tensor(shape, self.dtype)

    @cute.jit
    def load_slices(self, slices: cute.Tensor | None, tile: cute.Tensor, thread: Int32):
        """Loads the first slices of operand A, a tile in shared memory."""
        if cutlass.const_expr(slices is not None):
            atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), self.dtype)
            copy = cute.make_tiled_copy_A(atom, self.from_registers().tiled()).get_slice(thread)
            source, target = copy.partition_S(tile), copy.retile(slices)
            for k in cutlass.range_constexpr(cute.size(slices, mode=[2])):
                cute.copy(atom, source[None, None, k], target[None, None, k])
