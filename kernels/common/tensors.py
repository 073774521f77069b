"""Views of shared and global memory that every kernel builds the same way."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup

from fa4_jax import bands

TYPES = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}

_VECTOR = 8  # 16-bit elements of 16 bytes

# Extents of a coordinate tensor exceed any tensor's, since the descriptor alone bounds a copy.
_ANY_LENGTH, _ANY_DIM, _ANY_COUNT = 1 << 30, 1 << 10, 1 << 20


def bthd_tensor(pointer: cute.Pointer, shape: tuple[Int32, Int32, Int32, Int32]):
    """Views row-major [B, length, heads, head_dim] memory as (length, head_dim, heads, batch)."""
    batch, length, heads, head_dim = shape
    row = Int64(heads) * Int64(head_dim)
    return cute.make_tensor(
        pointer,
        cute.make_layout(
            (length, head_dim, heads, batch),
            stride=(row, 1, Int64(head_dim), row * Int64(length)),
        ),
    )


def bthd_coordinates():
    """Makes the TMA coordinates of a (length, head_dim, heads, batch) tensor of any size.

    The kernel makes them itself, so that a tensor needs no parameter but its descriptor.
    """
    origin = cute.make_identity_tensor((_ANY_DIM, _ANY_LENGTH, _ANY_COUNT, _ANY_COUNT))
    layout = cute.make_layout(
        (_ANY_LENGTH, _ANY_DIM, _ANY_COUNT, _ANY_COUNT),
        stride=(cute.E(1), cute.E(0), cute.E(2), cute.E(3)),
    )
    return cute.make_tensor(origin.iterator, layout)


SWIZZLES = {
    128: warpgroup.SmemLayoutAtomKind.K_SW128,
    64: warpgroup.SmemLayoutAtomKind.K_SW64,
    32: warpgroup.SmemLayoutAtomKind.K_SW32,
}


def tile_layout(
    dtype, rows: int, cols: int, stages: int, span_bytes: int = 128
) -> cute.ComposedLayout:
    """Makes a swizzled shared-memory layout (rows, cols, stages) with contiguous columns."""
    atom = warpgroup.make_smem_layout_atom(SWIZZLES[span_bytes], dtype)
    return cute.tile_to_shape(atom, (rows, cols, stages), order=(0, 1, 2))


def single_layout(dtype, shape: tuple[int, int], span_bytes: int = 128) -> cute.ComposedLayout:
    """Makes the swizzled shared-memory layout of one (rows, cols) tile."""
    atom = warpgroup.make_smem_layout_atom(SWIZZLES[span_bytes], dtype)
    return cute.tile_to_shape(atom, shape, order=(0, 1))


def smem_tensor(storage, layout: cute.ComposedLayout, dtype: Any) -> cute.Tensor:
    """Makes the tensor of an operand: a swizzled layout over storage, of whatever type."""
    return storage.get_tensor(layout.outer, swizzle=layout.inner, dtype=dtype)


def transposed(layout: cute.ComposedLayout) -> cute.ComposedLayout:
    """Views the same memory as (cols, rows, stages): an operand contiguous along M or N."""
    return cute.make_composed_layout(
        layout.inner, layout.offset, cute.select(layout.outer, mode=[1, 0, 2])
    )


@cute.jit
def tma_load(atom: cute.CopyAtom, source: cute.Tensor, target: cute.Tensor, barrier: cute.Pointer):
    """Loads one 2-D tile; one thread of the calling warp issues it."""
    shared, coordinates = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(target, 0, 2), cute.group_modes(source, 0, 2)
    )
    cute.copy(atom, coordinates, shared, tma_bar_ptr=barrier)


@cute.jit
def tma_store(atom: cute.CopyAtom, source: cute.Tensor, target: cute.Tensor):
    """Stores one 2-D tile; one thread of the calling warp issues it."""
    shared, coordinates = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(source, 0, 2), cute.group_modes(target, 0, 2)
    )
    cute.copy(atom, shared, coordinates)


@cute.jit
def zero_rows(tile: cute.Tensor, first_row: Int32, thread: Int32, threads: cutlass.Constexpr[int]):
    """Writes 0 to rows [first_row, rows) of a (rows, cols) tile with the given threads.

    A product would multiply padding by 0, and 0 * NaN is NaN. The caller fences and synchronises.
    """
    rows, cols = cute.size(tile, mode=[0]), cute.size(tile, mode=[1])
    zero = tile.element_type(0.0)
    for element in cutlass.range(thread, (rows - first_row) * cols, threads, unroll=1):
        tile[first_row + element // cols, element % cols] = zero


@cute.jit
def zero_vectors(
    tile: cute.Tensor, first_row: Int32, thread: Int32, threads: cutlass.Constexpr[int]
):
    """Does what `zero_rows` does with stores of 16 bytes, which every swizzle keeps together."""
    rows, vectors = cute.size(tile, mode=[0]), cute.size(tile, mode=[1]) // _VECTOR
    zeros = cute.make_rmem_tensor((_VECTOR,), tile.element_type)
    zeros.fill(0.0)
    for place in cutlass.range(thread, (rows - first_row) * vectors, threads, unroll=1):
        row = tile[first_row + place // vectors, None]
        cute.autovec_copy(zeros, cute.local_tile(row, (_VECTOR,), (place % vectors,)))


def _select(condition, if_true: Int32, if_false: Int32) -> Int32:
    return Int32(cutlass.select_(condition, if_true, if_false))


INT32 = bands.Arithmetic(cutlass.min, cutlass.max, _select)


def f32(pointer: cute.Pointer, index: Int32) -> Float32:
    """Returns one fp32 value of an array in global memory."""
    return cute.make_tensor(pointer + index, cute.make_layout(1))[0]
