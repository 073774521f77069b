"""tcgen05.mma against matrix products: operand sources, swizzles, majors, sizes, types."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kernels.emulator import EmulationError, Policy
from kernels.emulator.machine.cta import SHARED_BASE
from tests.emulator import sm100_ptx
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

IMAGE, A_AT, B_AT = 49_152, 0, 16_384
OPERANDS = SHARED_BASE + 1024
A_COLUMN = 256
ROW_BYTES = 1024
"""Behind the image, a row of `data` for each thread: A's and D's words, then the result."""
SWIZZLES = {0: (0, 0), 32: (6, 1), 64: (4, 3), 128: (2, 7)}
"""Code and chunk mask by span."""
BIG = Launch(threads=128, shared_bytes=65_536)
POLICIES = (Policy("random", "late"), Policy("random", "early"), Policy("starve", "random"))

TYPES: dict[str, tuple[str, int, Any]] = {
    "f16": ("f16", 0, np.dtype(np.float16)),
    "bf16": ("f16", 1, np.dtype(ml_dtypes.bfloat16)),
    "e4m3": ("f8f6f4", 0, np.dtype(ml_dtypes.float8_e4m3fn)),
    "e5m2": ("f8f6f4", 1, np.dtype(ml_dtypes.float8_e5m2)),
    "tf32": ("tf32", 2, np.dtype(np.float32)),
}


@dataclasses.dataclass(frozen=True)
class Layout:
    """How an operand lies in shared memory; `step` is the k step inside a K-major span."""

    span: int
    mn_major: bool = False
    step: int = 0

    def strides(self, size: int) -> tuple[int, int]:
        """Leading and stride byte offsets for elements of the given size."""
        if not self.span:
            return 128, (32 // size) // 8 * 128 + 128 if self.mn_major else 384
        return (32 // size * self.span if self.mn_major else 0), 8 * self.span

    def place(self, row: int, k: int, size: int) -> int:
        """Byte offset of an element, by the canonical layouts of the PTX ISA."""
        leading, stride = self.strides(size)
        per_chunk = 16 // size
        if not self.span:
            if self.mn_major:
                offset = row // per_chunk * stride + k // 8 * leading + k % 8 * 16
                return offset + row % per_chunk * size
            offset = row // 8 * stride + k // per_chunk * leading + row % 8 * 16
            return offset + k % per_chunk * size
        if self.mn_major:
            column, inside = divmod(row * size, self.span)
            offset = column * leading + k // 8 * stride + k % 8 * self.span + inside
        else:
            offset = row * self.span + 32 * self.step + k * size
        return offset ^ (offset >> 7 & SWIZZLES[self.span][1]) << 4

    def descriptor(self, at: int, size: int) -> int:
        """The matrix descriptor of an operand that starts there."""
        leading, stride = self.strides(size)
        start = OPERANDS + at + 32 * self.step
        code = SWIZZLES[self.span][0]
        return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | 1 << 46 | code << 61

    def image(self, operand: np.ndarray) -> np.ndarray:
        """The bytes of an operand (rows, k); the rest is NaN."""
        size = operand.itemsize
        data = np.full(32_768 // size, (1 << 8 * size) - 1, f"u{size}")
        words = operand.view(f"u{size}")
        for row, k in np.ndindex(operand.shape):
            data[self.place(row, k, size) // size] = words[row, k]
        return data.view(np.uint8)


@dataclasses.dataclass(frozen=True)
class Product:
    """One product; A comes from tensor memory where it has no layout."""

    rows: int = 128
    columns: int = 64
    a_type: str = "bf16"
    b_type: str = "bf16"
    a: Layout | None = Layout(128)
    b: Layout = Layout(128)
    lane: int = 0
    negated: tuple[bool, bool] = (False, False)
    accumulate: bool = False
    scale: int = 0
    masked: tuple[int, ...] = ()

    @property
    def kind(self) -> str:
        """The instruction's kind."""
        return TYPES[self.a_type][0]

    @property
    def depth(self) -> int:
        """k of one product."""
        return 32 // TYPES[self.a_type][2].itemsize

    @property
    def descriptor(self) -> int:
        """The instruction descriptor (PTX ISA)."""
        a_major = self.a is not None and self.a.mn_major
        return (
            1 << 4
            | TYPES[self.a_type][1] << 7
            | TYPES[self.b_type][1] << 10
            | self.negated[0] << 13
            | self.negated[1] << 14
            | a_major << 15
            | self.b.mn_major << 16
            | self.columns >> 3 << 17
            | self.rows >> 4 << 24
        )

    def lane_of(self, row: np.ndarray) -> np.ndarray:
        """Tensor memory's lane of a row: layouts D and F."""
        return row if self.rows == 128 else 32 * (row // 16) + row % 16 + self.lane

    def instruction(self) -> str:
        """The instruction."""
        a = "[%r7]" if self.a is None else "%rd10"
        words = [sum(1 << i % 32 for i in self.masked if i // 32 == word) for word in range(4)]
        mask = f"{{{', '.join(map(str, words))}}}, " if self.masked else ""
        scale = f", {self.scale}" if self.scale else ""
        return (
            f"tcgen05.mma.cta_group::1.kind::{self.kind}.collector::a::discard [%r8], {a}, %rd11, "
            f"{self.descriptor}, {mask}%p5{scale};\n"
        )


LOAD_IMAGE = one(
    """
    add.s32 %r9, %r2, 1024;
    mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r2+16], 49152;
    cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r9], [%rd1], 49152, [%r2+16];
    """
) + wait(16)
OWN_ROW = (
    f"mul.wide.u32 %rd2, %r1, {ROW_BYTES};\nadd.s64 %rd3, %rd1, %rd2;\n"
    f"add.s64 %rd3, %rd3, {IMAGE};\n"
)


def program(product: Product) -> str:
    """The whole program: A and D to tensor memory if they start there, the product, D's words."""
    body = ALLOCATE + LOAD_IMAGE + OWN_ROW
    body += "".join(f"ld.global.b32 %r{100 + i}, [%rd3+{4 * i}];\n" for i in range(9))
    body += f"add.s32 %r10, %r4, {A_COLUMN};\n"
    body += f"tcgen05.st.sync.aligned.32x32b.x8.b32 [%r10], {registers(100, 8)};\n"
    for first in range(0, product.columns if product.accumulate else 0, 8):
        body += f"add.s32 %r11, %r4, {first};\n"
        body += f"tcgen05.st.sync.aligned.32x32b.x8.b32 [%r11], {{{', '.join(['%r108'] * 8)}}};\n"
    body += WAIT_ST + BEFORE + "bar.sync 0;\n" + AFTER
    a = 0 if product.a is None else product.a.descriptor(A_AT, TYPES[product.a_type][2].itemsize)
    b = product.b.descriptor(B_AT, TYPES[product.b_type][2].itemsize)
    body += one(
        f"add.s32 %r8, %r3, {product.lane << 16};\n"
        f"add.s32 %r7, %r3, {(product.lane << 16) + A_COLUMN};\n"
        f"mov.b64 %rd10, {a};\nmov.b64 %rd11, {b};\n"
        f"setp.eq.b32 %p5, 0, {int(not product.accumulate)};\n" + product.instruction() + commit()
    )
    body += wait() + AFTER
    for first in range(0, product.columns, 8):
        body += f"add.s32 %r12, %r4, {first};\n"
        body += f"tcgen05.ld.sync.aligned.32x32b.x8.b32 {registers(200 + first, 8)}, [%r12];\n"
    body += WAIT_LD
    for i in range(product.columns):
        body += f"st.global.b32 [%rd3+{4 * i}], %r{200 + i};\n"
    return body + FREE


def values(rng: np.random.Generator, shape: tuple[int, int], dtype: Any) -> np.ndarray:
    """Random values; 32-bit ones that tf32 holds."""
    if dtype.itemsize < 4:
        return rng.normal(size=shape).astype(dtype)
    return rng.normal(size=shape).astype(ml_dtypes.bfloat16).astype(dtype)


def multiply(product: Product, rng: np.random.Generator, seed: int = 0) -> None:
    """Runs a product and compares every cell of D, those that are not written too."""
    (_, _, a_type), (_, _, b_type) = TYPES[product.a_type], TYPES[product.b_type]
    a = values(rng, (product.rows, product.depth), a_type)
    b = values(rng, (product.columns, product.depth), b_type)
    data = np.zeros(IMAGE + 128 * ROW_BYTES, np.uint8)
    if product.a is not None:
        data[A_AT:B_AT] = product.a.image(a)[: B_AT - A_AT]
    data[B_AT:IMAGE] = product.b.image(b)
    words = data[IMAGE:].view(np.uint32).reshape(128, -1)
    lanes = product.lane_of(np.arange(product.rows))
    words[:, :8] = 0xFFFFFFFF
    words[lanes, :8] = np.ascontiguousarray(a).view(np.uint32)
    words[:, 8] = np.array([3.0], np.float32).view(np.uint32)
    launch = dataclasses.replace(BIG, policy=POLICIES[seed % 3], seed=seed)
    sm100_ptx.run(program(product), data, launch)
    sign = -1 if product.negated[0] != product.negated[1] else 1
    expected = sign * (a.astype(np.float64) @ b.astype(np.float64).T)
    start = 3.0 if product.accumulate else np.nan
    expected += 3.0 * 2.0**-product.scale if product.accumulate else 0
    found = words.view(np.float32)[:, : product.columns]
    full = np.full((128, product.columns), start)
    full[lanes] = expected
    full[list(product.masked)] = start
    np.testing.assert_allclose(found, full, rtol=1e-5, atol=1e-4)


K_MAJOR = (Layout(0), Layout(32), Layout(64, step=1), Layout(128), Layout(128, step=3))
MN_MAJOR = tuple(Layout(span, mn_major=True) for span in (0, 32, 64, 128))


@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("b", K_MAJOR + MN_MAJOR, ids=str)
@pytest.mark.parametrize("a", [None, Layout(128), *MN_MAJOR, Layout(0)], ids=str)
def test_layouts(
    a: Layout | None, b: Layout, rows: int, rng: np.random.Generator, seed: int
) -> None:
    multiply(Product(rows, 64, a=a, b=b), rng, seed)


@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("columns", [8, 16, 48, 128, 192, 256])
def test_sizes(rows: int, columns: int, rng: np.random.Generator, seed: int) -> None:
    multiply(Product(rows, columns, b=Layout(128, mn_major=columns % 64 == 0)), rng, seed)


@pytest.mark.parametrize(
    ("a_type", "b_type"),
    [("f16", "f16"), ("f16", "bf16"), ("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2")],
)
@pytest.mark.parametrize("a", [None, Layout(128), Layout(64, mn_major=True)], ids=str)
def test_types(
    a: Layout | None, a_type: str, b_type: str, rng: np.random.Generator, seed: int
) -> None:
    for b in (Layout(128, step=2), Layout(64, mn_major=True), Layout(0, mn_major=True), Layout(0)):
        multiply(Product(a=a, b=b, a_type=a_type, b_type=b_type), rng, seed)


@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("a", [None, Layout(128, step=1), Layout(0)], ids=str)
def test_tf32(a: Layout | None, rows: int, rng: np.random.Generator, seed: int) -> None:
    for b in (Layout(128), Layout(64, step=1), Layout(0)):
        multiply(Product(rows, a=a, b=b, a_type="tf32", b_type="tf32"), rng, seed)
    with pytest.raises(EmulationError, match="not implemented: an MN-major operand of 32 bits"):
        b = Layout(128, mn_major=True)
        multiply(Product(rows, a=a, b=b, a_type="tf32", b_type="tf32"), rng, seed)


@pytest.mark.parametrize(
    "product",
    [
        Product(accumulate=True),
        Product(accumulate=True, a=None),
        Product(accumulate=True, scale=3),
        Product(negated=(True, False)),
        Product(negated=(False, True), accumulate=True),
        Product(negated=(True, True)),
        Product(masked=(0, 31, 64, 127)),
        Product(masked=tuple(range(1, 128, 2)), accumulate=True),
        Product(rows=64, lane=16),
        Product(rows=64, lane=16, a=None),
        Product(rows=64, lane=16, a=None, accumulate=True),
    ],
    ids=str,
)
def test_modifiers(product: Product, rng: np.random.Generator, seed: int) -> None:
    multiply(product, rng, seed)


@pytest.mark.parametrize(
    ("bits", "rule"),
    [
        (1 << 2, "not implemented"),
        (1 << 3, "descriptor"),
        (2 << 4, "descriptor"),
        (1 << 4, "not implemented"),
        (1 << 6, "descriptor"),
        (2 << 7, "descriptor"),
        (4 << 10, "descriptor"),
        (1 << 23, "descriptor"),
        (3 << 24, "descriptor"),
        (1 << 29, "descriptor"),
        (1 << 30, "descriptor"),
    ],
)
def test_instruction_descriptor(bits: int, rule: str, rng: np.random.Generator) -> None:
    """Every bit that does not belong there is refused."""

    @dataclasses.dataclass(frozen=True)
    class Wrong(Product):
        @property
        def descriptor(self) -> int:
            return super().descriptor ^ bits

    with pytest.raises(EmulationError) as caught:
        multiply(Wrong(), rng)
    assert caught.value.rule == rule, caught.value


@pytest.mark.parametrize(
    ("bits", "rule"),
    [
        (1 << 14, "descriptor"),
        (1 << 46, "descriptor"),
        (1 << 47, "descriptor"),
        (1 << 49, "not implemented"),
        (1 << 52, "not implemented"),
        (1 << 55, "descriptor"),
        (3 << 61, "not implemented"),
        (0x3000, "out-of-bounds"),
    ],
)
def test_matrix_descriptor(bits: int, rule: str, rng: np.random.Generator) -> None:
    @dataclasses.dataclass(frozen=True)
    class Wrong(Layout):
        def descriptor(self, at: int, size: int) -> int:
            return super().descriptor(at, size) ^ bits

    with pytest.raises(EmulationError) as caught:
        multiply(Product(b=Wrong(128)), rng)
    assert caught.value.rule == rule, caught.value


def test_rows_of_a_and_d() -> None:
    """64 rows of A lie in the lanes of D."""
    text = program(Product(rows=64, lane=16, a=None))
    text = text.replace(f"%r7, %r3, {(16 << 16) + A_COLUMN}", f"%r7, %r3, {A_COLUMN}")
    with pytest.raises(EmulationError, match="misaligned: 64 rows of A and D"):
        sm100_ptx.run(text, np.zeros(IMAGE + 131_072, np.uint8), BIG)


@pytest.mark.parametrize(("rows", "lane"), [(64, 8), (64, 32), (128, 16)])
def test_lane_of_a_result(rows: int, lane: int) -> None:
    with pytest.raises(EmulationError) as caught:
        sm100_ptx.run(program(Product(rows, lane=lane)), np.zeros(IMAGE + 131_072, np.uint8), BIG)
    assert caught.value.rule == "misaligned", caught.value
