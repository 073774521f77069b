"""Tensor memory: allocation; every shape of tcgen05.ld and st by its documented layout."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

from kernels.emulator import EmulationError, Policy, PtxError
from kernels.emulator.memory import NAN_WORD
from tests.emulator import sm100_ptx, test_tcgen05_products
from tests.emulator.programs import Launch
from tests.emulator.sm100_ptx import (
    AFTER,
    ALLOCATE,
    BEFORE,
    FREE,
    WAIT_LD,
    WAIT_ST,
    commit,
    one,
    registers,
    wait,
)
from tests.emulator.test_tcgen05_products import IMAGE, LOAD_IMAGE

COLUMNS = 128
POLICIES = (Policy("random", "late"), Policy("random", "early"), Policy("starve", "random"))


@dataclasses.dataclass(frozen=True)
class Layout:
    """Bits of a warp's part of tensor memory: (extent, stride) of thread and of register bits.

    Strides count bits, lane after lane of `lane_bits` bits a repetition each.
    """

    name: str
    registers: int
    lane_bits: int
    lanes: int
    thread: tuple[tuple[int, int], ...]
    words: tuple[tuple[int, int], ...]

    def cell(self, register: int, thread: int) -> tuple[int, int]:
        """Lane and 32-bit column of a register of a thread."""
        repeat, within = divmod(register, self.registers)
        bits = 0
        for extent, stride in self.thread:
            thread, digit = divmod(thread, extent)
            bits += digit * stride
        for extent, stride in self.words:
            within, digit = divmod(within, extent)
            bits += digit * stride
        lane, bit = divmod(bits, self.lane_bits)
        return lane, bit // 32 + repeat * self.lane_bits // 32


LAYOUTS = (
    Layout("32x32b", 1, 32, 32, ((32, 32),), ()),
    Layout("16x64b", 1, 64, 16, ((2, 512), (2, 32), (8, 64)), ()),
    Layout("16x128b", 2, 128, 16, ((4, 32), (8, 128)), ((2, 1024),)),
    Layout("16x256b", 4, 256, 16, ((4, 64), (8, 256)), ((2, 32), (2, 2048))),
)


def cells(layout: Layout, count: int, packed: bool) -> np.ndarray:
    """Lane and column of every (half, register, thread)."""
    found = np.zeros((2 if packed else 1, count, 32, 2), np.int64)
    for register, thread in itertools.product(range(count), range(32)):
        lane, column = layout.cell(register, thread)
        for half in range(len(found)):
            found[half, register, thread] = lane, column * len(found) + half
    return found


def addressed(first: int) -> str:
    """%rd3 is the address of the thread's row of `data`, 512 bytes each, from a row on."""
    return (
        f"add.s32 %r7, %r1, {first};\nmul.wide.u32 %rd2, %r7, {4 * COLUMNS};\n"
        "add.s64 %rd3, %rd1, %rd2;\n"
    )


def moved(kind: str, first: int, count: int) -> str:
    """Loads or stores registers from or to the thread's row."""
    orders = {"ld": "ld.global.b32 {r}, [{a}];\n", "st": "st.global.b32 [{a}], {r};\n"}
    return "".join(orders[kind].format(r=f"%r{first + i}", a=f"%rd3+{4 * i}") for i in range(count))


FILL = (
    addressed(0)
    + moved("ld", 200, COLUMNS)
    + f"tcgen05.st.sync.aligned.32x32b.x{COLUMNS}.b32 [%r4], {registers(200, COLUMNS)};\n"
    + WAIT_ST
)
"""Tensor memory's columns 0-127 get the first 128 rows of `data`."""
DRAIN = (
    f"tcgen05.ld.sync.aligned.32x32b.x{COLUMNS}.b32 {registers(200, COLUMNS)}, [%r4];\n"
    + WAIT_LD
    + addressed(128)
    + moved("st", 200, COLUMNS)
)
"""Rows 128-255 of `data` get tensor memory's columns 0-127."""

CASES = [
    (layout, repeats, packed, upper)
    for layout in LAYOUTS
    for repeats, packed in ((1, False), (8, False), (2, True), (32 // layout.registers, False))
    for upper in ((False, True) if layout.lanes == 16 else (False,))
]


def at(upper: bool, column: int = 0) -> str:
    """The warp's part of tensor memory, or its upper half, from a column on."""
    return f"add.s32 %r8, %r4, {(16 << 16 if upper else 0) + column};\n"


@pytest.mark.parametrize(("layout", "repeats", "packed", "upper"), CASES, ids=str)
def test_load(
    layout: Layout, repeats: int, packed: bool, upper: bool, rng: np.random.Generator, seed: int
) -> None:
    count, column = layout.registers * repeats, 4
    data = np.zeros((256, COLUMNS), np.uint32)
    data[:128] = rng.integers(0, 1 << 32, (128, COLUMNS), np.uint32)
    mnemonic = f"{layout.name}.x{repeats}{'.pack::16b' if packed else ''}"
    body = ALLOCATE + FILL + at(upper, column)
    body += f"tcgen05.ld.sync.aligned.{mnemonic}.b32 {registers(400, count)}, [%r8];\n" + WAIT_LD
    body += addressed(128) + moved("st", 400, count) + FREE
    sm100_ptx.run(body, data, Launch(threads=128, policy=POLICIES[seed % 3], seed=seed))
    where = cells(layout, count, packed)
    for warp in range(4):
        part = data[32 * warp : 32 * warp + 32]
        source = part[where[..., 0] + 16 * upper, where[..., 1] + column]
        expected = source[0] & 0xFFFF | source[1] << 16 if packed else source[0]
        found = data[128 + 32 * warp : 160 + 32 * warp, :count].T
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("layout", "repeats", "packed", "upper"), CASES, ids=str)
def test_store(
    layout: Layout, repeats: int, packed: bool, upper: bool, rng: np.random.Generator, seed: int
) -> None:
    count = layout.registers * repeats
    data = np.zeros((256, COLUMNS), np.uint32)
    data[:128] = rng.integers(0, 1 << 32, (128, COLUMNS), np.uint32)
    mnemonic = f"{layout.name}.x{repeats}{'.unpack::16b' if packed else ''}"
    body = ALLOCATE + addressed(0) + moved("ld", 400, count) + at(upper)
    body += f"tcgen05.st.sync.aligned.{mnemonic}.b32 [%r8], {registers(400, count)};\n" + WAIT_ST
    sm100_ptx.run(body + DRAIN + FREE, data, Launch(threads=128, policy=POLICIES[seed % 3]))
    where = cells(layout, count, packed)
    for warp in range(4):
        values = data[32 * warp : 32 * warp + 32, :count].T
        expected = np.full((32, COLUMNS), NAN_WORD, np.uint32)
        halves = (values & 0xFFFF, values >> 16) if packed else (values,)
        for half, place in zip(halves, where, strict=True):
            expected[place[..., 0] + 16 * upper, place[..., 1]] = half
        found = data[128 + 32 * warp : 160 + 32 * warp]
        mask = np.full((32, COLUMNS), 0xFFFFFFFF, np.uint32)
        if packed:  # nothing says what the upper half of a column gets
            mask[where[..., 0] + 16 * upper, where[..., 1]] = 0xFFFF
        np.testing.assert_array_equal(found & mask, expected & mask)


@pytest.mark.parametrize("repeats", [1, 16])
def test_split_halves(repeats: int, rng: np.random.Generator) -> None:
    """16x32bx2: threads 16-31 access the same lanes, an immediate number of columns further."""
    data = np.zeros((256, COLUMNS), np.uint32)
    data[:128] = rng.integers(0, 1 << 32, (128, COLUMNS), np.uint32)
    names = registers(400, repeats)
    body = ALLOCATE + FILL
    body += f"tcgen05.ld.sync.aligned.16x32bx2.x{repeats}.b32 {names}, [%r4], 40;\n" + WAIT_LD
    body += at(True, 64)
    body += f"tcgen05.st.sync.aligned.16x32bx2.x{repeats}.b32 [%r8], 24, {names};\n" + WAIT_ST
    sm100_ptx.run(body + DRAIN + FREE, data)
    parts = data[:128].reshape(4, 32, COLUMNS)
    expected = parts.copy()
    expected[:, 16:, 64 : 64 + repeats] = parts[:, :16, :repeats]
    expected[:, 16:, 88 : 88 + repeats] = parts[:, :16, 40 : 40 + repeats]
    np.testing.assert_array_equal(data[128:].reshape(4, 32, COLUMNS), expected)


@pytest.mark.parametrize("shape", ["32x32b", "16x32bx2"])
@pytest.mark.parametrize(
    "operation", ["max.f32", "min.abs.f32", "max.NaN.f32", "min.u32", "max.s32"]
)
def test_reduction(shape: str, operation: str, rng: np.random.Generator) -> None:
    """tcgen05.ld.red also gives the extreme of a thread's words."""
    data = np.zeros((256, COLUMNS), np.uint32)
    values = rng.normal(size=(128, COLUMNS)).astype(np.float32)
    values[5, 3] = values[40, 7] = np.nan
    data[:128] = values.view(np.uint32)
    gap = ", 16" if "x2" in shape else ""
    body = ALLOCATE + FILL
    body += f"tcgen05.ld.red.sync.aligned.{shape}.x8.{operation} {registers(400, 8)}, %r408, "
    body += f"[%r4]{gap};\n" + WAIT_LD + addressed(128) + moved("st", 400, 9) + FREE
    sm100_ptx.run(body, data)
    name, *flags, kind = operation.split(".")
    words = data[:128, :8]
    if gap:
        parts = data[:128].reshape(4, 32, COLUMNS)[:, :16]
        words = np.concatenate([parts[:, :, :8], parts[:, :, 16:24]], 1).reshape(128, 8)
    typed = words.view({"f32": np.float32, "u32": np.uint32, "s32": np.int32}[kind])
    typed = np.abs(typed) if "abs" in flags else typed
    quiet, strict = (np.fmax, np.maximum) if name == "max" else (np.fmin, np.minimum)
    function = quiet if kind == "f32" and "NaN" not in flags else strict
    found = data[128:, 8].view(typed.dtype)
    np.testing.assert_array_equal(found, function.reduce(typed, axis=1))
    np.testing.assert_array_equal(data[128:, :8], words)


COPIES = (
    # shape and multicast, rows, words of a row, and the lanes that each row reaches
    ("128x256b", 128, 8, lambda row: [row]),
    ("128x128b", 128, 4, lambda row: [row]),
    ("4x256b", 4, 8, lambda row: [32 * row]),
    ("32x128b.warpx4", 32, 4, lambda row: [row, row + 32, row + 64, row + 96]),
    ("64x128b.warpx2::02_13", 64, 4, lambda row: [row % 32 + 32 * (row // 32 + i) for i in (0, 2)]),
    (
        "64x128b.warpx2::01_23",
        64,
        4,
        lambda row: [row % 32 + 32 * (row // 32 * 2 + i) for i in (0, 1)],
    ),
)


@pytest.mark.parametrize("span", [0, 32])
@pytest.mark.parametrize(("shape", "rows", "words", "lanes_of"), COPIES, ids=lambda x: str(x)[:24])
def test_copy(
    shape: str, rows: int, words: int, lanes_of: Any, span: int, rng: np.random.Generator, seed: int
) -> None:
    """tcgen05.cp: rows of shared memory by a matrix descriptor, K-major, to lanes."""
    layout = test_tcgen05_products.Layout(span)
    source = rng.integers(0, 1 << 32, (rows, 8), np.uint32)
    data = np.zeros(IMAGE + 256 * 4 * COLUMNS, np.uint8)
    data[:32_768] = layout.image(source)
    body = (
        ALLOCATE
        + LOAD_IMAGE
        + one(
            f"mov.b64 %rd10, {layout.descriptor(0, 4)};\nadd.s32 %r8, %r3, 24;\n"
            f"tcgen05.cp.cta_group::1.{shape} [%r8], %rd10;\n" + commit()
        )
    )
    body += wait() + AFTER + f"add.s64 %rd1, %rd1, {IMAGE};\n" + DRAIN + FREE
    policy = POLICIES[seed % 3]
    launch = Launch(threads=128, shared_bytes=65_536, policy=policy, seed=seed)
    sm100_ptx.run(body, data, launch)
    expected = np.full((128, COLUMNS), NAN_WORD, np.uint32)
    for row in range(rows):
        expected[lanes_of(row), 24 : 24 + words] = source[row, :words]
    found = data[IMAGE:].view(np.uint32).reshape(256, COLUMNS)[128:]
    np.testing.assert_array_equal(found, expected)


def test_shift(rng: np.random.Generator, seed: int) -> None:
    """tcgen05.shift: lane i gets lane i + 1, but for the last one of every quarter."""
    data = np.zeros((256, COLUMNS), np.uint32)
    data[:128] = rng.integers(0, 1 << 32, (128, COLUMNS), np.uint32)
    body = ALLOCATE + FILL + BEFORE + "bar.sync 0;\n" + AFTER
    body += one("add.s32 %r8, %r3, 16;\ntcgen05.shift.cta_group::1.down [%r8];\n" + commit())
    launch = Launch(threads=128, policy=POLICIES[seed % 3], seed=seed)
    sm100_ptx.run(body + wait() + AFTER + DRAIN + FREE, data, launch)
    expected = data[:128].copy()
    for lane in range(128):
        if lane % 32 < 31:
            expected[lane, 16:24] = data[lane + 1, 16:24]
    np.testing.assert_array_equal(data[128:], expected)


def test_starts_as_nan() -> None:
    data = np.zeros((256, COLUMNS), np.float32)
    sm100_ptx.run(ALLOCATE + DRAIN + FREE, data)
    assert np.isnan(data[128:]).all()


def allocation(text: str) -> str:
    """A program of one warp; columns at [%r2+32] and [%r2+36], in %r3 and %r4."""
    names = {
        "alloc": "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32",
        "dealloc": "tcgen05.dealloc.cta_group::1.sync.aligned.b32",
        "relinquish": "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned",
        "read": "ld.shared.b32",
    }
    for short, name in names.items():
        text = text.replace(f"{short} ", f"{name} ").replace(f"{short};", f"{name};")
    return text.replace("de" + names["alloc"], names["dealloc"])


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("alloc [%r2], 64; bar.warp.sync -1; read %r3, [%r2]; dealloc %r3, 64;", None),
        (
            "alloc [%r2], 256; alloc [%r2+4], 256; bar.warp.sync -1; read %r3, [%r2];"
            "read %r4, [%r2+4]; dealloc %r4, 256; dealloc %r3, 256;",
            None,
        ),
        ("alloc [%r2], 64; bar.warp.sync -1; read %r3, [%r2];", "outstanding"),
        ("alloc [%r2], 48;", "allocation"),
        ("alloc [%r2], 16;", "allocation"),
        ("alloc [%r2], 1024;", "allocation"),
        ("relinquish; alloc [%r2], 32;", "allocation"),
        ("alloc [%r2], 512; alloc [%r2+4], 32;", "deadlock"),
        (
            "alloc [%r2], 64; bar.warp.sync -1; read %r3, [%r2]; dealloc %r3, 64;dealloc %r3, 64;",
            "allocation",
        ),
        ("alloc [%r2], 64; bar.warp.sync -1; read %r3, [%r2]; dealloc %r3, 32;", "allocation"),
        ("mov.b32 %r3, 0; tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r5}, [%r3];", "allocation"),
        (
            "alloc [%r2], 32; bar.warp.sync -1; read %r3, [%r2];"
            "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r5}, [%r3+32];",
            "allocation",
        ),
        (
            "alloc [%r2], 512; bar.warp.sync -1; read %r3, [%r2];"
            "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r5, %r6}, [%r3+511];",
            "out-of-bounds",
        ),
        (
            "alloc [%r2], 64; bar.warp.sync -1; read %r3, [%r2]; dealloc %r3, 64;"
            "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r5}, [%r3];",
            "allocation",
        ),
        (
            "setp.eq.u32 %p1, %r1, 7; @%p1 bra SKIP; alloc [%r2], 32; SKIP:",
            "convergence",
        ),
    ],
)
def test_allocation(text: str, rule: str | None) -> None:
    launch = Launch(threads=32)
    if rule is None:
        sm100_ptx.run(allocation(text), np.zeros(64, np.uint8), launch)
        return
    with pytest.raises(EmulationError) as caught:
        sm100_ptx.run(allocation(text), np.zeros(64, np.uint8), launch)
    assert caught.value.rule == rule, caught.value


@pytest.mark.parametrize(
    ("operation", "rule"),
    [
        ("ld.sync.aligned.32x32b.x1.b32 {%r9}, [%r3];", "lane-quarter"),
        ("st.sync.aligned.32x32b.x1.b32 [%r3], {%r9};", "lane-quarter"),
        ("ld.sync.aligned.16x64b.x1.b32 {%r9}, [%r3];", "lane-quarter"),
        ("ld.sync.aligned.32x32b.x1.b32 {%r9}, [%r4+1048576];", "lane-quarter"),
        ("ld.sync.aligned.16x64b.x1.b32 {%r9}, [%r4+524288];", "misaligned"),
    ],
)
def test_lanes_of_a_warp(operation: str, rule: str) -> None:
    """Warp w reaches lanes 32 (w mod 4) to 32 (w mod 4) + 31 alone."""
    with pytest.raises(EmulationError) as caught:
        sm100_ptx.run(ALLOCATE + f"tcgen05.{operation}" + WAIT_ST + WAIT_LD, np.zeros(64, np.uint8))
    assert caught.value.rule == rule, caught.value


@pytest.mark.parametrize(
    "body",
    [
        "tcgen05.mma.ws.cta_group::1.kind::f16 [%r5], %rd1, %rd2, %r6, %p1;",
        "tcgen05.mma.cta_group::1.kind::mxf4.block_scale [%r5], %rd1, %rd2, %r6, [%r7], [%r8], 1;",
        "tcgen05.mma.cta_group::1.kind::i8 [%r5], %rd1, %rd2, %r6, %p1;",
        "tcgen05.mma.sp.cta_group::1.kind::f16 [%r5], %rd1, %rd2, [%r7], %r6, %p1;",
        "tcgen05.mma.cta_group::1.kind::f16 [%r5], %rd1, %rd2, %r6, %p1, 16;",
        "tcgen05.shift.cta_group::1.up [%r5];",
        "tcgen05.cp.cta_group::1.128x256b.b8x16.b4x16_p64 [%r5], %rd1;",
        "tcgen05.ld.sync.aligned.16x256b.x64.b32 {%r5}, [%r6];",
        "tcgen05.commit.cta_group::1.mbarrier::arrive::two.b64 [%r5];",
    ],
)
def test_what_is_missing_is_named(body: str) -> None:
    with pytest.raises(PtxError, match=r"line \d+: not implemented: " + body.split()[0]):
        sm100_ptx.run(body, np.zeros(64, np.uint8))
