"""Reads an encoded CUtensorMap. Only its first 64 bytes carry anything."""

from __future__ import annotations

import dataclasses
import struct

_RANK = (4, 3)  # first bit and width within the flags word
_TYPE = (7, 4)
_INTERLEAVE = (11, 2)
_SWIZZLE = (13, 2)
_L2_PROMOTION = (17, 2)
_LARGE = (21, 1)
_KNOWN = (_RANK, _TYPE, _INTERLEAVE, _SWIZZLE, _L2_PROMOTION, _LARGE)

_TYPES = {6: "fp16", 7: "f32", 10: "bf16"}

DSL_FLAG = 1 << 1
"""Set by CuTe-DSL's packing, clear in the driver's; both run."""


@dataclasses.dataclass(frozen=True)
class TensorMap:
    """The fields of a descriptor. Sizes, strides and box are per dimension, contiguous one first.

    `other_flags` are flag bits that no field accounts for. Unused dimensions have size 1, stride 0.
    """

    address: int
    dtype: str
    sizes: tuple[int, ...]
    byte_strides: tuple[int, ...]
    box: tuple[int, ...]
    interleave: int
    swizzle_bytes: int
    l2_promotion: int
    large: bool
    other_flags: int


def decode(descriptor: bytes) -> TensorMap:
    """The fields of an encoded descriptor."""
    words = struct.unpack_from("<16I", descriptor)
    flags, high = words[2], words[7]
    rank = _field(flags, _RANK) + 1
    strides = tuple((words[3 + i] | (high >> (4 * i) & 15) << 32) * 16 for i in range(4))
    known = sum(((1 << width) - 1) << first for first, width in _KNOWN)
    swizzle = _field(flags, _SWIZZLE)
    return TensorMap(
        address=words[0] | words[1] << 32,
        dtype=_TYPES[_field(flags, _TYPE)],
        sizes=tuple(size + 1 for size in words[8 : 8 + rank]),
        byte_strides=strides[: rank - 1],
        box=tuple(size + 1 for size in descriptor[55 : 55 + rank]),
        interleave=_field(flags, _INTERLEAVE),
        swizzle_bytes=16 << swizzle if swizzle else 0,
        l2_promotion=_field(flags, _L2_PROMOTION),
        large=bool(_field(flags, _LARGE)),
        other_flags=flags & ~known,
    )


def _field(word: int, bits: tuple[int, int]) -> int:
    first, width = bits
    return word >> first & ((1 << width) - 1)
