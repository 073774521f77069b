"""The driver's tensor map (CUtensorMap): 128 bytes, of which the hardware needs the first 64.

The driver (not CuTe-DSL) also writes the box's bytes at 64 and the alignment of its swizzle at 72;
kernels run with and without.
"""

from __future__ import annotations

import dataclasses
import struct
from typing import Any

import ml_dtypes
import numpy as np

BYTES = 128

_RANK = (4, 3)  # first bit and width within the flags word
_TYPE = (7, 4)
_INTERLEAVE = (11, 2)
_SWIZZLE = (13, 2)
_L2_PROMOTION = (17, 2)
_LARGE = (21, 1)
_NAN_FILL = (15, 1)
_TF32 = (16, 1)
_KNOWN = (_RANK, _TYPE, _INTERLEAVE, _SWIZZLE, _NAN_FILL, _TF32, _L2_PROMOTION, _LARGE)

_TYPES = {
    0: "u8",
    1: "u16",
    2: "u32",
    3: "i32",
    4: "u64",
    5: "i64",
    6: "fp16",
    7: "f32",
    8: "f32_ftz",
    9: "f64",
    10: "bf16",
}
"""The numbers that the driver (580.159.04) encodes; those of CUtensorMapDataType differ."""
DTYPES: dict[str, Any] = {
    "u8": np.uint8,
    "u16": np.uint16,
    "u32": np.uint32,
    "i32": np.int32,
    "u64": np.uint64,
    "i64": np.int64,
    "fp16": np.float16,
    "f32": np.float32,
    "f32_ftz": np.float32,
    "f64": np.float64,
    "bf16": ml_dtypes.bfloat16,
}
ELEMENT_BYTES = {name: np.dtype(dtype).itemsize for name, dtype in DTYPES.items()}

DSL_FLAG = 1 << 1
"""Set by CuTe-DSL's packing, clear in the driver's; both run."""


@dataclasses.dataclass(frozen=True)
class TensorMap:
    """The fields of a descriptor. Sizes, strides and box are per dimension, contiguous one first.

    `nan_fill` fills what lies outside with NaN instead of zero, `tf32` rounds float32 elements.
    `other_flags` are flag bits that no field accounts for. Unused dimensions have size 1, stride 0.
    """

    address: int
    dtype: str
    sizes: tuple[int, ...]
    byte_strides: tuple[int, ...]
    box: tuple[int, ...]
    interleave: int = 0
    swizzle_bytes: int = 0
    l2_promotion: int = 0
    large: bool = False
    nan_fill: bool = False
    tf32: bool = False
    other_flags: int = 0


def decode(descriptor: bytes) -> TensorMap:
    """The fields of an encoded descriptor.

    Raises:
      ValueError: it is none, or of an element type that is not known here.
    """
    words = struct.unpack_from("<16I", descriptor)
    flags, high = words[2], words[7]
    rank = _field(flags, _RANK) + 1
    if rank > 5 or _field(flags, _TYPE) not in _TYPES:
        raise ValueError(f"not a tensor map that is known here: flags {flags:#x}")
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
        nan_fill=bool(_field(flags, _NAN_FILL)),
        tf32=bool(_field(flags, _TF32)),
        other_flags=flags & ~known,
    )


def encode(tensor: TensorMap) -> bytes:
    """The descriptor with these fields; decode's inverse."""
    rank = len(tensor.sizes)
    swizzle = {0: 0, 32: 1, 64: 2, 128: 3}[tensor.swizzle_bytes]
    kind = next(number for number, name in _TYPES.items() if name == tensor.dtype)
    fields = (
        (_RANK, rank - 1),
        (_TYPE, kind),
        (_INTERLEAVE, tensor.interleave),
        (_SWIZZLE, swizzle),
        (_L2_PROMOTION, tensor.l2_promotion),
        (_LARGE, int(tensor.large)),
        (_NAN_FILL, int(tensor.nan_fill)),
        (_TF32, int(tensor.tf32)),
    )
    flags = tensor.other_flags | sum(value << first for (first, _), value in fields)
    words = [tensor.address & 0xFFFFFFFF, tensor.address >> 32, flags] + [0] * 13
    for i, stride in enumerate(tensor.byte_strides):
        if stride % 16:
            raise ValueError(f"{tensor.byte_strides=}: multiples of 16 bytes are expected")
        words[3 + i] = stride // 16 & 0xFFFFFFFF
        words[7] |= (stride // 16 >> 32) << (4 * i)
    for i, size in enumerate(tensor.sizes):
        words[8 + i] = size - 1
    data = bytearray(struct.pack("<16I", *words))
    for i, size in enumerate(tensor.box):
        data[55 + i] = size - 1
    return bytes(data) + bytes(BYTES - len(data))


def _field(word: int, bits: tuple[int, int]) -> int:
    first, width = bits
    return word >> first & ((1 << width) - 1)
