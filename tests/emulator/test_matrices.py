"""Matrices in the registers of a warp against numpy: ldmatrix, stmatrix, movmatrix, mma.sync."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kernels.emulator.products import matrix_product
from tests.emulator import programs
from tests.emulator.test_memory import LANE


@pytest.mark.parametrize(("count", "trans"), [(1, ""), (2, ".trans"), (4, ""), (4, ".trans")])
def test_matrices_through_shared_memory(count: int, trans: str, rng: np.random.Generator) -> None:
    """stmatrix puts rows where ldmatrix finds them; lane 4 g + t has columns 2 t, 2 t + 1."""
    matrices = rng.integers(0, 1 << 16, (4, 8, 8), np.uint16)
    data = np.zeros((3, 4, 32), np.uint32)
    data[0] = matrices.view(np.uint32).reshape(4, 32)
    names = "{" + ", ".join(f"%r{20 + i}" for i in range(count)) + "}"
    loads = "".join(f"ld.global.b32 %r{20 + i}, [%rd3+{128 * i}];" for i in range(4))
    stores = "".join(f"st.global.b32 [%rd3+{1024 + 128 * i}], %r{20 + i};" for i in range(count))
    dumps = "".join(
        f"ld.shared.b32 %r30, [%r6+{128 * i}]; st.global.b32 [%rd3+{512 + 128 * i}], %r30;"
        for i in range(count)
    )
    body = (
        LANE.format(bytes=4)
        + loads
        + (
            "shl.b32 %r5, %r1, 4; add.s32 %r5, %r5, %r2;"
            "shl.b32 %r6, %r1, 2; add.s32 %r6, %r6, %r2;"
            f"stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%r5], {names};"
            f"bar.warp.sync -1; {dumps}"
            f"ldmatrix.sync.aligned.m8n8.x{count}.shared::cta.b16 {names}, [%r5]; {stores}"
        )
    )
    programs.run(body, data)
    rows = matrices.swapaxes(1, 2) if trans else matrices
    shared = data[1].view(np.uint16).reshape(4, 8, 8)
    np.testing.assert_array_equal(shared[:count], rows[:count])
    loaded = data[2].view(np.uint16).reshape(4, 8, 8)
    np.testing.assert_array_equal(loaded[:count], rows[:count])
    body = body.replace("ldmatrix.sync.aligned.m8n8.x1", "ldmatrix.sync.aligned.m8n8.x1")
    body = body.replace(".shared::cta.b16", ".trans.shared::cta.b16")
    programs.run(body, data)
    loaded = data[2].view(np.uint16).reshape(4, 8, 8)
    np.testing.assert_array_equal(loaded[:count], rows.swapaxes(1, 2)[:count])


def test_matrix_in_registers(rng: np.random.Generator) -> None:
    data = np.zeros((2, 8, 8), np.uint16)
    data[0] = rng.integers(0, 1 << 16, (8, 8), np.uint16)
    body = LANE.format(bytes=4) + (
        "ld.global.b32 %r20, [%rd3]; movmatrix.sync.aligned.m8n8.trans.b16 %r21, %r20;"
        "st.global.b32 [%rd3+128], %r21;"
    )
    programs.run(body, data)
    np.testing.assert_array_equal(data[1], data[0].T)


@pytest.mark.parametrize("depth", [8, 16])
@pytest.mark.parametrize("types", ["f32.bf16.bf16.f32", "f32.f16.f16.f32", "f16.f16.f16.f16"])
def test_warp_products(depth: int, types: str, rng: np.random.Generator) -> None:
    """The fragments by the ISA's index formulas, one element at a time."""
    dtype: Any = ml_dtypes.bfloat16 if "bf16" in types else np.float16
    halves = types.startswith("f16")
    a, b = (rng.integers(-4, 5, shape).astype(dtype) for shape in ((16, depth), (depth, 8)))
    c = rng.integers(-9, 10, (16, 8)).astype(np.float16 if halves else np.float32)
    fragments = np.zeros((10, 32), np.uint32)
    for lane in range(32):
        g, t = lane // 4, lane % 4
        pairs = [(a[g + 8 * (i % 2), 2 * t + 8 * (i // 2) :][:2]) for i in range(depth // 4)] + [
            b[2 * t + 8 * i :, g][:2] for i in range(depth // 8)
        ]
        words = [np.ascontiguousarray(pair).view(np.uint32)[0] for pair in pairs]
        rows = [c[g + 8 * i, 2 * t : 2 * t + 2] for i in range(2)]
        words += np.ascontiguousarray(np.concatenate(rows)).view(np.uint32).tolist()
        fragments[: len(words), lane] = words
    counts = [depth // 4, depth // 8, 2 if halves else 4]
    starts = np.cumsum([0, *counts])
    names = [
        "{" + ", ".join(f"%r{20 + i}" for i in range(start, start + n)) + "}"
        for start, n in zip(starts, counts, strict=False)
    ]
    loads = "".join(f"ld.global.b32 %r{20 + i}, [%rd3+{128 * i}];" for i in range(starts[3]))
    data = np.zeros((16, 32), np.uint32)
    data[:10] = fragments
    results = "{" + ", ".join(f"%r{40 + i}" for i in range(counts[2])) + "}"
    stores = "".join(
        f"st.global.b32 [%rd3+{1536 + 128 * i}], %r{40 + i};" for i in range(counts[2])
    )
    body = LANE.format(bytes=4) + loads
    body += f"mma.sync.aligned.m16n8k{depth}.row.col.{types} {results}, {', '.join(names)};"
    programs.run(body + stores, data)
    expected = a.astype(np.float32) @ b.astype(np.float32) + c.astype(np.float32)
    for lane in range(32):
        g, t = lane // 4, lane % 4
        words = np.ascontiguousarray(data[12 : 12 + counts[2], lane])
        values = words.view(np.float16 if halves else np.float32).reshape(2, 2)
        np.testing.assert_array_equal(values, expected[[g, g + 8], 2 * t : 2 * t + 2])


@pytest.mark.parametrize(("rows", "columns", "depth"), [(128, 128, 16), (64, 256, 16), (16, 64, 8)])
def test_a_row_s_product_is_the_same_in_every_place(
    rows: int, columns: int, depth: int, rng: np.random.Generator
) -> None:
    """Else a call's results would depend on how rows are dealt to tiles, as no GPU's do."""
    a, b = (
        rng.standard_normal((n, depth), np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)
        for n in (rows, columns)
    )
    order = rng.permutation(rows)
    assert np.array_equal(matrix_product(a[order], b), matrix_product(a, b)[order])
