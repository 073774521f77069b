"""Arithmetic of sm_100 kernels against exact fractions, Python integers and ml_dtypes."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.emulator.test_instructions import execute, floats, integers

BF16: Any = np.dtype(ml_dtypes.bfloat16)
FP16: Any = np.dtype(np.float16)
E4M3: Any = np.dtype(ml_dtypes.float8_e4m3fn)
E5M2: Any = np.dtype(ml_dtypes.float8_e5m2)

EXACT: dict[str, Callable[..., Fraction]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "fma": lambda a, b, c: a * b + c,
}


def ordinary(rng: np.random.Generator) -> np.ndarray:
    """Finite values of near magnitudes, so that sums cancel and round."""
    values = (rng.normal(size=32) * 2.0 ** rng.integers(-3, 4, 32)).astype(np.float32)
    values[:4] = 1, -1, 1 + 2**-23, 3
    rng.shuffle(values)
    return values


def rounded(exact: Fraction, mode: str, dtype: Any = np.float32) -> Any:
    """A fraction in a type: n to nearest even, z to zero, m down, p up. No overflow."""
    word = np.dtype(f"u{np.dtype(dtype).itemsize}")
    near = np.array(float(exact)).astype(dtype)
    around = [near]
    for toward in (-np.inf, np.inf):
        around.append(np.nextafter(near, np.array(toward).astype(dtype)))
    below = max((Fraction(float(x)), x) for x in around if Fraction(float(x)) <= exact)
    above = min((Fraction(float(x)), x) for x in around if Fraction(float(x)) >= exact)
    if mode in "mp" or below == above:
        return below[1] if mode == "m" else above[1]
    if mode == "z":
        return below[1] if exact > 0 else above[1]
    gap = (exact - below[0]) - (above[0] - exact)
    if gap:
        return below[1] if gap < 0 else above[1]
    return below[1] if not int(below[1].view(word)) & 1 else above[1]


@pytest.mark.parametrize("mode", "nzmp")
@pytest.mark.parametrize("name", EXACT)
def test_directed_rounding(name: str, mode: str, rng: np.random.Generator) -> None:
    """Every rounding is right, single and packed."""
    count = 3 if name == "fma" else 2
    for _ in range(4):
        sources = [np.stack([ordinary(rng), ordinary(rng)], 1) for _ in range(count)]
        expected = np.array(
            [
                rounded(EXACT[name](*(Fraction(float(x)) for x in lane)), mode)
                for lane in zip(*(source.reshape(-1) for source in sources), strict=True)
            ]
        )
        names = ", ".join(f"{{{i}}}" for i in range(count))
        packed = [np.ascontiguousarray(x).reshape(-1).view(np.uint64) for x in sources]
        found = execute(f"{name}.r{mode}.f32x2 {{d}}, {names};", packed, np.uint64)
        np.testing.assert_array_equal(found.view(np.float32), expected)
        low = [np.ascontiguousarray(x[:, 0]) for x in sources]
        found = execute(f"{name}.r{mode}.f32 {{d}}, {names};", low, np.float32)
        np.testing.assert_array_equal(found, expected[::2])


def test_zero_of_a_difference() -> None:
    """x - x is +0, and -0 where rounding is down."""
    ones = np.ones(32, np.float32)
    for mode, sign in (("n", False), ("z", False), ("p", False), ("m", True)):
        found = execute(f"sub.r{mode}.f32 {{d}}, {{0}}, {{1}};", [ones, ones], np.float32)
        assert (np.signbit(found) == sign).all()


def test_flushing_and_saturation(rng: np.random.Generator) -> None:
    a = np.full(32, 2.0**-126, np.float32)
    b = np.full(32, -(2.0**-127), np.float32)
    assert (execute("add.f32 {d}, {0}, {1};", [a, b], np.float32) == 2.0**-127).all()
    # The subnormal source counts as zero, in rounding down too.
    for text in ("add.ftz.f32", "add.rm.ftz.f32"):
        assert (execute(f"{text} {{d}}, {{0}}, {{1}};", [a, b], np.float32) == a).all()
    values = floats(rng)
    with np.errstate(all="ignore"):
        expected = np.where(np.isnan(values), 0, np.clip(values, 0, 1))
    zero = np.zeros(32, np.float32)
    found = execute("add.sat.f32 {d}, {0}, {1};", [values, zero], np.float32)
    np.testing.assert_array_equal(found, expected)


def test_polynomial_exponential(rng: np.random.Generator) -> None:
    """The magic constant of exp2's reduction: rounding down leaves the floor in the low bits."""
    x = rng.uniform(-100, 20, 32).astype(np.float32)
    magic = np.full(32, 12_582_912, np.float32)
    found = execute("add.rm.ftz.f32 {d}, {0}, {1};", [x, magic], np.float32)
    np.testing.assert_array_equal(found - magic, np.floor(x))


@pytest.mark.parametrize(("kind", "dtype"), [("bf16", BF16), ("f16", FP16)])
def test_mixed_precision(kind: str, dtype: Any, rng: np.random.Generator) -> None:
    a, b = (ordinary(rng).astype(dtype) for _ in range(2))
    c = ordinary(rng)
    words = [a.view(np.uint16), b.view(np.uint16), c]
    exact = [
        EXACT["fma"](*(Fraction(float(x)) for x in lane)) for lane in zip(a, b, c, strict=True)
    ]
    found = execute(f"fma.rn.f32.{kind} {{d}}, {{0}}, {{1}}, {{2}};", words, np.float32)
    np.testing.assert_array_equal(found, [rounded(x, "n") for x in exact])
    found = execute(f"add.rn.f32.{kind} {{d}}, {{0}}, {{2}};", words, np.float32)
    np.testing.assert_array_equal(found, a.astype(np.float32) + c)
    found = execute(f"sub.f32.{kind} {{d}}, {{0}}, {{2}};", words, np.float32)
    np.testing.assert_array_equal(found, a.astype(np.float32) - c)


@pytest.mark.parametrize(("kind", "dtype"), [("bf16", BF16), ("f16", FP16)])
@pytest.mark.parametrize("name", ["add", "sub", "mul", "fma.rn"])
def test_half_arithmetic(name: str, kind: str, dtype: Any, rng: np.random.Generator) -> None:
    """Each operation rounds once, fma too."""
    count = 3 if name == "fma.rn" else 2
    for _ in range(4):
        sources = [
            np.concatenate([ordinary(rng), ordinary(rng)]).astype(dtype) for _ in range(count)
        ]
        exact = EXACT[name.removesuffix(".rn")]
        expected = [
            rounded(exact(*(Fraction(float(x)) for x in lane)), "n", dtype)
            for lane in zip(*sources, strict=True)
        ]
        names = ", ".join(f"{{{i}}}" for i in range(count))
        packed = [source.view(np.uint32) for source in sources]
        found = execute(f"{name}.{kind}x2 {{d}}, {names};", packed, np.uint32)
        np.testing.assert_array_equal(found.view(dtype), np.array(expected, dtype))


@pytest.mark.parametrize("name", ["max", "min", "max.NaN", "min.NaN", "max.ftz"])
def test_extremes_of_three(name: str, rng: np.random.Generator) -> None:
    a, b, c = floats(rng), floats(rng), floats(rng)
    quiet, strict = (np.fmax, np.maximum) if "max" in name else (np.fmin, np.minimum)
    function = strict if "NaN" in name else quiet
    found = execute(f"{name}.f32 {{d}}, {{0}}, {{1}}, {{2}};", [a, b, c], np.float32)
    expected = function(function(a, b), c)
    if "ftz" in name:
        expected = np.where(np.abs(expected) < 2.0**-126, 0, expected)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("ex2.approx", np.exp2),
        ("lg2.approx", np.log2),
        ("rcp.approx", lambda x: 1 / x),
        ("sqrt.approx", np.sqrt),
        ("rsqrt.approx", lambda x: 1 / np.sqrt(x)),
        ("tanh.approx", np.tanh),
        ("sin.approx", np.sin),
        ("cos.approx", np.cos),
    ],
)
def test_approximations(name: str, reference: Any, rng: np.random.Generator) -> None:
    values = rng.uniform(0.01, 6, 32).astype(np.float32)
    found = execute(f"{name}.f32 {{d}}, {{0}};", [values], np.float32)
    np.testing.assert_allclose(found, reference(values.astype(np.float64)), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("kind", "dtype"), [("bf16", BF16), ("f16", FP16)])
@pytest.mark.parametrize("mode", "nz")
def test_narrowing(mode: str, kind: str, dtype: Any, rng: np.random.Generator) -> None:
    high, low = (np.clip(ordinary(rng) * 1000, -60_000, 60_000) for _ in range(2))
    text = f"cvt.r{mode}{{0}}.{kind}x2.f32 {{{{d}}}}, {{{{0}}}}, {{{{1}}}};"
    found = execute(text.format(""), [high, low], np.uint32).view(dtype).reshape(32, 2)
    expected = [rounded(Fraction(float(x)), mode, dtype) for x in np.stack([low, high], 1).flat]
    np.testing.assert_array_equal(found.reshape(-1), np.array(expected, dtype))
    found = execute(text.format(".relu"), [high, low], np.uint32).view(dtype)
    np.testing.assert_array_equal(found, np.maximum(np.array(expected, dtype), dtype.type(0)))
    huge = np.full(32, 3.4e38, np.float32)
    found = execute(text.format(".satfinite"), [huge, -huge], np.uint32).view(dtype)
    limit = float(ml_dtypes.finfo(dtype).max)
    np.testing.assert_array_equal(found.astype(np.float64), np.tile([-limit, limit], 32))


@pytest.mark.parametrize(("kind", "dtype"), [("e4m3", E4M3), ("e5m2", E5M2)])
def test_fp8(kind: str, dtype: Any, rng: np.random.Generator) -> None:
    high, low = ordinary(rng) * 50, floats(rng)
    limit = float(ml_dtypes.finfo(dtype).max)
    pairs = np.stack([low, high], 1).reshape(-1)
    with np.errstate(all="ignore"):
        expected = np.clip(pairs, -limit, limit).astype(dtype)
    text = f"cvt.rn.satfinite.{kind}x2.f32 {{d}}, {{0}}, {{1}};"
    bits = execute(text, [high, low], np.uint16)
    np.testing.assert_array_equal(bits.view(dtype).astype(float), expected.astype(float))
    wide = execute(f"cvt.rn.f16x2.{kind}x2 {{d}}, {{0}};", [bits], np.uint32)
    np.testing.assert_array_equal(wide.view(FP16).astype(float), expected.astype(float))
    back = execute(f"cvt.rn.satfinite.relu.{kind}x2.f16x2 {{d}}, {{0}};", [wide], np.uint16)
    with np.errstate(all="ignore"):
        positive = np.maximum(expected.astype(np.float64), 0)
    np.testing.assert_array_equal(back.view(dtype).astype(float), positive)


def test_tf32(rng: np.random.Generator) -> None:
    values = np.concatenate(
        [ordinary(rng)[:28], np.array([1 + 2**-11, 1 + 3 * 2**-11, -1, 0], np.float32)]
    )
    exact = values.astype(np.float64)
    step = 2.0 ** (np.floor(np.log2(np.abs(exact), where=exact != 0, out=np.zeros(32))) - 10)
    for mode, expected in (
        ("rn", np.rint(exact / step) * step),
        ("rna", np.copysign(np.floor(np.abs(exact) / step + 0.5), exact) * step),
        ("rz", np.trunc(exact / step) * step),
    ):
        found = execute(f"cvt.{mode}.tf32.f32 {{d}}, {{0}};", [values], np.float32)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("mode", "whole"), [("rni", np.rint), ("rzi", np.trunc), ("rmi", np.floor), ("rpi", np.ceil)]
)
def test_whole_numbers(mode: str, whole: Any, rng: np.random.Generator) -> None:
    values = ordinary(rng) * 10
    values[:4] = 2.5, -2.5, 1e10, np.nan
    expected = np.clip(np.nan_to_num(whole(values.astype(np.float64))), -(2.0**31), 2.0**31 - 1)
    found = execute(f"cvt.{mode}.s32.f32 {{d}}, {{0}};", [values], np.int32)
    np.testing.assert_array_equal(found, expected)
    found = execute(f"cvt.{mode}.f32.f32 {{d}}, {{0}};", [values], np.float32)
    np.testing.assert_array_equal(found, whole(values))


@pytest.mark.parametrize("mode", "zmp")
@pytest.mark.parametrize("kind", [np.int32, np.uint32, np.int64])
def test_integers_to_float(kind: type, mode: str, rng: np.random.Generator) -> None:
    name = f"{np.dtype(kind).kind}{8 * np.dtype(kind).itemsize}".replace("i", "s")
    values = integers(rng, kind)
    found = execute(f"cvt.r{mode}.f32.{name} {{d}}, {{0}};", [values], np.float32)
    np.testing.assert_array_equal(found, [rounded(Fraction(int(x)), mode) for x in values])


def permuted(a: int, b: int, selector: int) -> int:
    """prmt by its bytes."""
    data, result = [*a.to_bytes(4, "little"), *b.to_bytes(4, "little")], []
    for place in range(4):
        nibble = selector >> 4 * place & 15
        byte = data[nibble & 7]
        result.append((255 if byte & 128 else 0) if nibble & 8 else byte)
    return int.from_bytes(bytes(result), "little")


def field(value: int, start: int, length: int, width: int, signed: bool) -> int:
    """bfe by its bits; `value` is unsigned."""
    bits = value >> start & ((1 << length) - 1) if start < width else 0
    last = min(start + length - 1, width - 1)
    if signed and length and value >> last & 1:
        kept = max(min(length, width - start), 0)
        bits |= ((1 << width) - 1) & ~((1 << kept) - 1)
    return bits & ((1 << width) - 1)


def inserted(a: int, b: int, start: int, length: int) -> int:
    """bfi by its bits."""
    mask = ((1 << length) - 1) << start & 0xFFFFFFFF
    return a << start & mask | b & ~mask & 0xFFFFFFFF


BITS: list[tuple[str, Callable[..., int]]] = [
    ("prmt.b32 {d}, {0}, {1}, {2};", permuted),
    ("lop3.b32 {d}, {0}, {1}, {2}, 0xe8;", lambda a, b, c: a & b | a & c | b & c),
    ("lop3.b32 {d}, {0}, {1}, {2}, 0x96;", lambda a, b, c: a ^ b ^ c),
    ("lop3.b32 {d}, {0}, {1}, {2}, 0x10;", lambda a, b, c: a & ~b & ~c),
    (
        "and.b32 %r60, {1}, 63; and.b32 %r61, {2}, 40; bfe.u32 {d}, {0}, %r60, %r61;",
        lambda a, b, c: field(a, b & 63, c & 40, 32, False),
    ),
    (
        "and.b32 %r60, {1}, 31; and.b32 %r61, {2}, 31; bfe.s32 {d}, {0}, %r60, %r61;",
        lambda a, b, c: field(a, b & 31, c & 31, 32, True),
    ),
    (
        "and.b32 %r60, {2}, 31; bfi.b32 {d}, {0}, {1}, %r60, 7;",
        lambda a, b, c: inserted(a, b, c & 31, 7),
    ),
    (
        "and.b32 %r60, {2}, 63; shf.l.wrap.b32 {d}, {0}, {1}, %r60;",
        lambda a, b, c: ((b << 32 | a) << (c & 31)) >> 32 & 0xFFFFFFFF,
    ),
    (
        "and.b32 %r60, {2}, 63; shf.r.clamp.b32 {d}, {0}, {1}, %r60;",
        lambda a, b, c: (b << 32 | a) >> min(c & 63, 32) & 0xFFFFFFFF,
    ),
    ("popc.b32 {d}, {0};", lambda a, b, c: a.bit_count()),
    ("clz.b32 {d}, {0};", lambda a, b, c: 32 - a.bit_length()),
    ("brev.b32 {d}, {0};", lambda a, b, c: int(f"{a:032b}"[::-1], 2)),
    ("bfind.u32 {d}, {0};", lambda a, b, c: (a.bit_length() - 1) & 0xFFFFFFFF),
    (
        "bfind.shiftamt.u32 {d}, {0};",
        lambda a, b, c: 32 - a.bit_length() if a else 0xFFFFFFFF,
    ),
    (
        "bfind.s32 {d}, {0};",
        lambda a, b, c: ((~a & 0xFFFFFFFF if a >> 31 else a).bit_length() - 1) & 0xFFFFFFFF,
    ),
]


@pytest.mark.parametrize(
    ("instruction", "reference"), BITS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_bits(instruction: str, reference: Callable[..., int], rng: np.random.Generator) -> None:
    sources = [integers(rng, np.uint32) for _ in range(3)]
    expected = [reference(*map(int, lane)) for lane in zip(*sources, strict=True)]
    assert execute(instruction, sources, np.uint32).tolist() == expected


def test_copysign(rng: np.random.Generator) -> None:
    a, b = floats(rng), floats(rng)
    found = execute("copysign.f32 {d}, {0}, {1};", [a, b], np.float32)
    np.testing.assert_array_equal(found, np.copysign(b, a))
