"""Descriptors of tcgen05: of an instruction's shape and types, of a matrix in shared memory."""

from __future__ import annotations

import dataclasses
import functools

import ml_dtypes
import numpy as np

from kernels.emulator.memory import Fault
from kernels.emulator.swizzle import CHUNK, swizzled

K_BYTES = 32
_SPANS = {0: 0, 2: 128, 4: 64, 6: 32}
_FORMATS = {
    "f16": {0: np.dtype(np.float16), 1: np.dtype(ml_dtypes.bfloat16)},
    "tf32": {2: np.dtype(np.float32)},
    "f8f6f4": {0: np.dtype(ml_dtypes.float8_e4m3fn), 1: np.dtype(ml_dtypes.float8_e5m2)},
}


@dataclasses.dataclass(frozen=True)
class Shape:
    """What an instruction descriptor says."""

    rows: int
    columns: int
    a_type: np.dtype
    b_type: np.dtype
    signs: tuple[bool, bool]
    mn_major: tuple[bool, bool]


@functools.lru_cache(maxsize=256)
def decode_instruction(descriptor: int, kind: str, group: int) -> Shape:
    """Decodes an instruction descriptor (PTX ISA, tcgen05 instruction descriptor).

    Raises:
      Fault: a field has a value that the kind does not take.
    """

    def field(first: int, bits: int) -> int:
        return descriptor >> first & ((1 << bits) - 1)

    def wrong(what: str) -> Fault:
        return Fault("descriptor", f"instruction descriptor {descriptor:#x} for {kind}: {what}")

    if field(0, 3):
        raise Fault("not implemented", f"instruction descriptor {descriptor:#x}: sparsity")
    for first, bits in ((3, 1), (6, 1), (23, 1), (29, 1), (30, 2)):
        if field(first, bits):
            raise wrong(f"bit {first} must be 0")
    if field(4, 2) != 1:
        if kind == "f16" and not field(4, 2):
            raise Fault("not implemented", "tcgen05.mma with a float16 result")
        raise wrong(f"result type {field(4, 2)}")
    types = []
    for name, first in (("A", 7), ("B", 10)):
        if field(first, 3) not in _FORMATS[kind]:
            if kind == "f8f6f4" and field(first, 3) in (3, 4, 5):
                raise Fault("not implemented", f"tcgen05.mma with {name} of 4 or 6 bits")
            raise wrong(f"type {field(first, 3)} of {name}")
        types.append(_FORMATS[kind][field(first, 3)])
    rows, columns = field(24, 5) << 4, field(17, 6) << 3
    step = 8 * group if rows in (64 * group, 128 * group) else 0
    if not step or not step <= columns <= 256 or columns % step:
        raise wrong(f"{rows} rows and {columns} columns with cta_group::{group}")
    return Shape(
        rows,
        columns,
        *types,
        signs=(bool(field(13, 1)), bool(field(14, 1))),
        mn_major=(bool(field(15, 1)), bool(field(16, 1))),
    )


@dataclasses.dataclass(frozen=True)
class Tile:
    """An operand in shared memory: its descriptor, rows of A or columns of B, element size."""

    descriptor: int
    mn_major: bool
    rows: int
    bytes: int


@functools.lru_cache(maxsize=4096)
def tile_bytes(tile: Tile) -> np.ndarray:
    """Offset in shared memory of every element of a tile: (rows, 32 / bytes).

    By the canonical layouts of the PTX ISA; addresses are swizzled as they are.
    """
    descriptor = tile.descriptor
    start = (descriptor & 0x3FFF) << 4
    leading = (descriptor >> 16 & 0x3FFF) << 4
    stride = (descriptor >> 32 & 0x3FFF) << 4
    if descriptor >> 46 & 7 != 1:
        raise Fault("descriptor", f"matrix descriptor {descriptor:#x}: bits 46-48 must be 1")
    if descriptor >> 53 & 0xFF or descriptor >> 14 & 3 or descriptor >> 30 & 3:
        raise Fault("descriptor", f"matrix descriptor {descriptor:#x}: reserved bits are set")
    if descriptor >> 49 & 7:
        raise Fault("not implemented", "a matrix descriptor with a base offset")
    if descriptor >> 52 & 1:
        raise Fault("not implemented", "a matrix descriptor with an absolute leading dimension")
    if descriptor >> 61 not in _SPANS:
        raise Fault("not implemented", f"swizzle mode {descriptor >> 61} of a matrix descriptor")
    span = _SPANS[descriptor >> 61]
    if tile.mn_major and tile.bytes > 2:
        raise Fault("not implemented", "an MN-major operand of 32 bits")
    row = np.arange(tile.rows)[:, None]
    k = np.arange(K_BYTES // tile.bytes)[None, :]
    if tile.mn_major:
        width = span or CHUNK
        columns, inside = row * tile.bytes // width, row * tile.bytes % width
        of_column, of_rows = (leading, stride) if span else (stride, leading)
        address = columns * of_column + inside + k // 8 * of_rows + k % 8 * width
    elif span:
        address = row // 8 * stride + row % 8 * span + k * tile.bytes
    else:
        chunk, inside = k * tile.bytes // CHUNK, k * tile.bytes % CHUNK
        address = row // 8 * stride + row % 8 * CHUNK + chunk * leading + inside
    address = start + address
    return swizzled(address // CHUNK, span) * CHUNK + address % CHUNK


@functools.lru_cache(maxsize=4096)
def tile_chunks(tile: Tile) -> np.ndarray:
    """The 16-byte chunks that a tile touches."""
    return np.unique(tile_bytes(tile) // CHUNK)
