"""TMA loads and stores against plain indexing: swizzles, dimensions, boxes that stick out."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kernels.emulator.tensor_map import DSL_FLAG, TensorMap, decode, encode
from tests.emulator import programs

MAP, TENSOR, DUMP = 0, 1024, 65_536
MASKS = {0: 0, 32: 1, 64: 3, 128: 7}
"""Bits of the row number that are XORed into the number of the 16-byte chunk."""

LOAD = """
setp.ne.u32 %p1, %r1, 0;
@%p1 bra READY;
mbarrier.init.shared.b64 [%r2], 1;
fence.mbarrier_init.release.cluster;
READY:
bar.sync 0;
{coordinates}
add.s32 %r9, %r2, 1024;
@%p1 bra ISSUED;
mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r2], {size};
cp.async.bulk.tensor.{rank}d.shared::cta.global.tile.mbarrier::complete_tx::bytes
  [%r9], [%rd1, {{{names}}}], [%r2];
ISSUED:
mbarrier.try_wait.parity.shared.b64 %p2, [%r2], 0, 1000;
@!%p2 bra ISSUED;
"""

DUMP_SHARED = """
shl.b32 %r20, %r1, 2;
DUMP:
add.s32 %r21, %r9, %r20;
ld.shared.b32 %r22, [%r21];
cvt.u64.u32 %rd2, %r20;
add.s64 %rd3, %rd1, %rd2;
st.global.b32 [%rd3+65536], %r22;
add.s32 %r20, %r20, 256;
setp.lt.u32 %p3, %r20, {size};
@%p3 bra DUMP;
"""

STORE = """
@%p1 bra STORED;
add.s64 %rd5, %rd1, 128;
cp.async.bulk.tensor.{rank}d.global.shared::cta.tile.bulk_group [%rd5, {{{names}}}], [%r9];
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
STORED:
"""

SHAPES = [
    # sizes, box, coordinates, contiguous dimension first
    ((64, 20), (64, 16), (0, 0)),
    ((64, 20), (64, 16), (0, 12)),
    ((96, 20), (64, 8), (64, -3)),
    ((64, 9, 5), (64, 4, 3), (-8, 7, 3)),
    ((64, 7, 3, 2), (64, 8, 1, 1), (0, 0, 2, 1)),
    ((64, 7, 3, 2), (64, 8, 2, 2), (0, -100, 0, 0)),
    ((64, 3, 2, 2, 2), (64, 2, 2, 1, 2), (0, 2, 1, 1, 1)),
]


def expected_box(tensor: np.ndarray, box: tuple[int, ...], at: tuple[int, ...]) -> np.ndarray:
    """Elements of the box, zero outside the tensor; slowest dimension first."""
    result = np.zeros(box[::-1], tensor.dtype)
    for index in itertools.product(*map(range, result.shape)):
        place = tuple(i + start for i, start in zip(index, at[::-1], strict=True))
        if all(0 <= p < size for p, size in zip(place, tensor.shape, strict=True)):
            result[index] = tensor[place]
    return result


def swizzled(data: np.ndarray, span: int) -> np.ndarray:
    """Bytes of a box where the swizzle puts them; the box starts on 1024 bytes."""
    result = np.empty_like(data)
    for offset in range(0, data.size, 16):
        to = offset ^ (offset >> 7 & MASKS[span]) << 4
        result[to : to + 16] = data[offset : offset + 16]
    return result


@pytest.mark.parametrize("span", [0, 32, 64, 128])
@pytest.mark.parametrize(("sizes", "box", "at"), SHAPES)
def test_load_then_store(
    sizes: tuple[int, ...],
    box: tuple[int, ...],
    at: tuple[int, ...],
    span: int,
    rng: np.random.Generator,
) -> None:
    box = (span // 2 if span else box[0], *box[1:])
    tensor = rng.integers(1, 1 << 16, sizes[::-1], np.uint16)
    data = np.zeros(DUMP + 65_536, np.uint8)
    strides = tuple(int(s) for s in tensor.strides[::-1][1:])
    source = TensorMap(programs.ADDRESS + TENSOR, "bf16", sizes, strides, box, swizzle_bytes=span)
    target_at = TENSOR + 32_768
    target = TensorMap(
        programs.ADDRESS + target_at, "bf16", sizes, strides, box, swizzle_bytes=span
    )
    data[MAP : MAP + 128] = np.frombuffer(encode(source), np.uint8)
    data[MAP + 128 : MAP + 256] = np.frombuffer(encode(target), np.uint8)
    data[TENSOR : TENSOR + tensor.nbytes] = tensor.reshape(-1).view(np.uint8)
    names = ", ".join(f"%r{40 + i}" for i in range(len(at)))
    size = 2 * int(np.prod(box))
    fields = {
        "coordinates": "".join(f"mov.b32 %r{40 + i}, {value};\n" for i, value in enumerate(at)),
        "size": size,
        "rank": len(at),
        "names": names,
    }
    body = (LOAD + STORE + DUMP_SHARED).format(**fields)
    programs.run(body, data, programs.Launch(threads=64, shared_bytes=65_536))
    inside = expected_box(tensor, box, at)
    dumped = data[DUMP : DUMP + size]
    np.testing.assert_array_equal(dumped, swizzled(inside.reshape(-1).view(np.uint8), span))
    stored = data[target_at : target_at + tensor.nbytes].view(np.uint16).reshape(tensor.shape)
    visited = expected_box(np.ones_like(tensor), box, at).sum()
    assert (stored != 0).sum() == visited
    np.testing.assert_array_equal(stored[stored != 0], tensor[stored != 0])


def test_tensor_map_of_every_field() -> None:
    tensor = TensorMap(
        address=0x7F12_3456_7890,
        dtype="fp16",
        sizes=(64, 70_000, 3, 2, 5),
        byte_strides=(128, 1 << 37, 16 * 3, 16 * 0xFFFF_FFFF),
        box=(32, 256, 1, 1, 1),
        swizzle_bytes=64,
        l2_promotion=2,
        large=True,
        other_flags=DSL_FLAG,
    )
    assert len(encode(tensor)) == 128
    assert decode(encode(tensor)) == tensor
