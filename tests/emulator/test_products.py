"""wgmma against matrix products: every operand source, swizzle and major; documented layouts."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kernels.emulator.machine.cta import SHARED_BASE
from tests.emulator import programs
from tests.emulator.test_copies import MASKS

IMAGE = 49_152
A_AT, B_AT = 0, 16_384
OPERANDS = SHARED_BASE + 1024
REGISTERS_AT, RESULT_AT = IMAGE, IMAGE + 2048
SWIZZLE_CODES = {0: 0, 128: 1, 64: 2, 32: 3}

LOAD_IMAGE = """
setp.ne.u32 %p1, %r1, 0;
@%p1 bra READY;
mbarrier.init.shared.b64 [%r2], 1;
fence.mbarrier_init.release.cluster;
READY:
bar.sync 0;
@%p1 bra ISSUED;
add.s32 %r9, %r2, 1024;
mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r2], 49152;
cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r9], [%rd1], 49152, [%r2];
ISSUED:
mbarrier.try_wait.parity.shared.b64 %p2, [%r2], 0, 1000;
@!%p2 bra ISSUED;
shl.b32 %r10, %r1, 4;
cvt.u64.u32 %rd2, %r10;
add.s64 %rd3, %rd1, %rd2;
ld.global.v4.b32 {%r100, %r101, %r102, %r103}, [%rd3+49152];
"""


@dataclasses.dataclass(frozen=True)
class Layout:
    """How an operand lies in shared memory; `step` is the k step inside a K-major span."""

    span: int
    mn_major: bool = False
    step: int = 0

    def place(self, row: int, k: int) -> int:
        """Byte offset of an element, by the canonical layouts of the PTX ISA."""
        if not self.span:
            return row // 8 * 256 + k // 8 * 128 + row % 8 * 16 + k % 8 * 2
        if self.mn_major:
            column, inside = divmod(row * 2, self.span)
            offset = column * 16 * self.span + k * self.span + inside
        else:
            offset = row * self.span + (16 * self.step + k) * 2
        return offset ^ (offset >> 7 & MASKS[self.span]) << 4

    def descriptor(self, at: int) -> int:
        """The matrix descriptor of an operand that starts there."""
        leading, stride = (128, 256) if not self.span else (0, 8 * self.span)
        leading = 16 * self.span if self.mn_major else leading
        start = OPERANDS + at + 32 * self.step
        return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | SWIZZLE_CODES[self.span] << 62


def image(operand: np.ndarray, layout: Layout) -> np.ndarray:
    """The bytes of an operand (rows, 16); the rest is NaN."""
    data = np.full(32_768, 0xFF, np.uint8).view(np.uint16)
    words = operand.view(np.uint16)
    for row, k in np.ndindex(operand.shape):
        data[layout.place(row, k) // 2] = words[row, k]
    return data.view(np.uint8)


K_MAJOR = [Layout(0), Layout(32), *(Layout(64, step=i) for i in range(2)), Layout(128, step=3)]
MN_MAJOR = [Layout(span, mn_major=True) for span in (32, 64, 128)]


@pytest.mark.parametrize("columns", [8, 64, 256])
@pytest.mark.parametrize("b_layout", K_MAJOR + MN_MAJOR, ids=str)
@pytest.mark.parametrize("a_layout", [None, Layout(128), *MN_MAJOR], ids=str)
def test_product(
    a_layout: Layout | None, b_layout: Layout, columns: int, rng: np.random.Generator
) -> None:
    dtype: Any = ml_dtypes.bfloat16 if columns == 64 else np.float16
    name = "bf16" if columns == 64 else "f16"
    a = rng.normal(size=(64, 16)).astype(dtype)
    b = rng.normal(size=(columns, 16)).astype(dtype)
    data = np.zeros(RESULT_AT + 128 * 512, np.uint8)
    if a_layout is not None:
        data[A_AT:B_AT] = image(a, a_layout)[: B_AT - A_AT]
    data[B_AT:IMAGE] = image(b, b_layout)
    thread = np.arange(128)
    row, k = (thread // 32 * 16 + thread % 32 // 4)[:, None], (thread % 4 * 2)[:, None]
    for register in range(4):
        rows, ks = row + 8 * (register & 1), k + 8 * (register >> 1) + np.arange(2)
        fragment = np.ascontiguousarray(a[rows, ks]).view(np.uint32)
        data[REGISTERS_AT:RESULT_AT].view(np.uint32).reshape(128, 4)[:, register] = fragment[:, 0]
    accumulators = [f"%r{120 + i}" for i in range(columns // 2)]
    body = LOAD_IMAGE + "".join(f"mov.b32 {r}, 0f3F800000;\n" for r in accumulators)
    body += f"mov.b64 %rd11, {b_layout.descriptor(B_AT)};\nsetp.eq.b32 %p5, 0, 0;\n"
    source, majors = "{%r100, %r101, %r102, %r103}", f"{int(b_layout.mn_major)}"
    if a_layout is not None:
        body += f"mov.b64 %rd10, {a_layout.descriptor(A_AT)};\n"
        source, majors = "%rd10", f"{int(a_layout.mn_major)}, {majors}"
    body += (
        "wgmma.fence.sync.aligned;\n"
        f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{name}.{name} "
        f"{{{', '.join(accumulators)}}}, {source}, %rd11, %p5, 1, -1, {majors};\n"
        "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n"
        f"mul.wide.u32 %rd4, %r1, {2 * columns};\nadd.s64 %rd5, %rd1, %rd4;\n"
    )
    body += "".join(
        f"st.global.b32 [%rd5+{RESULT_AT + 4 * i}], {r};\n" for i, r in enumerate(accumulators)
    )
    programs.run(body, data, programs.Launch(threads=128, shared_bytes=65_536))
    found = np.empty((64, columns), np.float32)
    values = data[RESULT_AT : RESULT_AT + 128 * 2 * columns].view(np.float32)
    for i, column in enumerate(values.reshape(128, -1).T):
        rows = row[:, 0] + 8 * (i // 2 % 2)
        found[rows, 8 * (i // 4) + thread % 4 * 2 + i % 2] = column
    expected = 1 - a.astype(np.float64) @ b.astype(np.float64).T
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
