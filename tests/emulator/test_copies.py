"""TMA loads and stores against plain indexing: swizzles, dimensions, boxes that stick out."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from kernels.emulator import EmulationError
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
    ((200,), (64,), (160,)),
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
    store = STORE if min(at) >= 0 else ""
    body = (LOAD + store + DUMP_SHARED).format(**fields)
    programs.run(body, data, programs.Launch(threads=64, shared_bytes=65_536))
    inside = expected_box(tensor, box, at)
    dumped = data[DUMP : DUMP + size]
    np.testing.assert_array_equal(dumped, swizzled(inside.reshape(-1).view(np.uint8), span))
    stored = data[target_at : target_at + tensor.nbytes].view(np.uint16).reshape(tensor.shape)
    if not store:
        with pytest.raises(EmulationError, match=r"out-of-bounds: stores a box at"):
            launch = programs.Launch(threads=64, shared_bytes=65_536)
            programs.run((LOAD + STORE).format(**fields), data, launch)
    visited = expected_box(np.ones_like(tensor), box, at).sum() if store else 0
    assert (stored != 0).sum() == visited
    np.testing.assert_array_equal(stored[stored != 0], tensor[stored != 0])


def load_rows(tensor: TensorMap, values: np.ndarray, at: int, size: int) -> np.ndarray:
    """What a load of a two-dimensional box at (at, 0) leaves in shared memory."""
    data = np.zeros(DUMP + 65_536, np.uint8)
    data[:128] = np.frombuffer(encode(tensor), np.uint8)
    data[TENSOR : TENSOR + values.nbytes] = values.reshape(-1).view(np.uint8)
    fields = {
        "coordinates": f"mov.b32 %r40, {at}; mov.b32 %r41, 0;",
        "size": size,
        "rank": 2,
        "names": "%r40, %r41",
    }
    body = (LOAD + DUMP_SHARED).format(**fields)
    programs.run(body, data, programs.Launch(threads=64, shared_bytes=65_536))
    return data[DUMP : DUMP + size]


def test_rounding_to_tf32() -> None:
    """Bits that an H200 gave: to nearest even, infinity beyond the largest, one NaN."""
    given = [0x3F801000, 0x3F803000, 0x3F801001, 0x3F800FFF, 0xBF803000, 0x00000001, 0x807FFFFF]
    given += [0x7F800000, 0x7FC12345, 0x7F801FFF, 0x7F7FFFFF, 0x00B37868]
    rounded = [0x3F800000, 0x3F804000, 0x3F802000, 0x3F800000, 0xBF804000, 0, 0x80800000]
    rounded += [0x7F800000, 0x7FFFE000, 0x7FFFE000, 0x7F800000, 0x00B38000]
    values = np.array(given, np.uint32)
    fields = {"sizes": (12, 1), "byte_strides": (48,), "box": (12, 1)}
    for kind in ("f32", "f32_ftz"):
        tensor = TensorMap(programs.ADDRESS + TENSOR, kind, **fields, tf32=True)
        assert load_rows(tensor, values, 0, 48).view(np.uint32).tolist() == rounded
        tensor = TensorMap(programs.ADDRESS + TENSOR, kind, **fields)
        assert load_rows(tensor, values, 0, 48).view(np.uint32).tolist() == given


@pytest.mark.parametrize("kind", ["bf16", "fp16", "f32"])
def test_nan_outside(kind: str, rng: np.random.Generator) -> None:
    """Every 16 bits outside are 0x7ff7, as an H200 fills them."""
    values = rng.integers(0, 100, (2, 32), np.uint16)
    size = 4 if kind == "f32" else 2
    fields = {"sizes": (64 // size, 2), "byte_strides": (64,), "box": (64 // size, 3)}
    tensor = TensorMap(programs.ADDRESS + TENSOR, kind, **fields, nan_fill=True)
    loaded = load_rows(tensor, values, -16 // size, 192).view(np.uint16).reshape(3, 32)
    expected = np.full((3, 32), 0x7FF7, np.uint16)
    expected[:2, 8:] = values[:, :24]
    np.testing.assert_array_equal(loaded, expected)
    with pytest.raises(EmulationError, match=r"misaligned.*multiple of 16 bytes"):
        load_rows(tensor, values, 4 // size, 192)
    with pytest.raises(EmulationError, match="not implemented"):
        load_rows(dataclasses.replace(tensor, dtype="u16"), values, 0, 192)


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
        nan_fill=True,
        tf32=True,
        other_flags=DSL_FLAG,
    )
    assert len(encode(tensor)) == 128
    assert decode(encode(tensor)) == tensor
