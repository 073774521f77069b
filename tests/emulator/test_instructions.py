"""Arithmetic, conversions, predicates and lane exchange against Python integers and numpy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kernels.emulator import PtxError
from tests.emulator import programs

REGISTERS = {2: "%rs", 4: "%r", 8: "%rd"}
SPECIAL_FLOATS = (0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40, 3.4e38, -1.0, 0.5, 1.0)


def execute(instruction: str, sources: list[np.ndarray], result: type) -> np.ndarray:
    """Runs `instruction` with {d} and {0}, {1}, ... on 32 lanes of the sources."""
    data = np.zeros((len(sources) + 1, 32), np.uint64)
    body, names = "shl.b32 %r3, %r1, 3; cvt.u64.u32 %rd2, %r3; add.s64 %rd3, %rd1, %rd2;\n", []
    for i, source in enumerate(sources):
        data[i] = source.view(f"u{source.dtype.itemsize}")
        bits = 8 * source.dtype.itemsize
        names.append(f"{REGISTERS[source.dtype.itemsize]}{20 + i}")
        body += f"ld.global.b{bits} {names[-1]}, [%rd3+{256 * i}];\n"
    size = np.dtype(result).itemsize
    target = f"{REGISTERS[size]}40"
    text = instruction.format(*names, d=target)
    body += f"{text}\nst.global.b{8 * size} [%rd3+{256 * len(sources)}], {target};"
    programs.run(body, data)
    return data[-1].astype(f"u{size}").view(result)


def integers(rng: np.random.Generator, kind: type) -> np.ndarray:
    """Random values, small ones and the extremes."""
    limits = np.iinfo(kind)
    values = rng.integers(limits.min, limits.max, 32, kind, endpoint=True)
    values[:8] = rng.integers(1, 100, 8)
    values[8:12] = limits.min, limits.max, 0, limits.max
    rng.shuffle(values)
    return values


def wrap(value: int, kind: type) -> int:
    """The value modulo the type's range."""
    bits = 8 * np.dtype(kind).itemsize
    value &= (1 << bits) - 1
    return value - (1 << bits) if np.dtype(kind).kind == "i" and value >> (bits - 1) else value


def quotient(a: int, b: int) -> int:
    """Toward zero; all ones for a zero divisor."""
    return -1 if b == 0 else (abs(a) // abs(b)) * (1 if (a < 0) == (b < 0) else -1)


def remainder(a: int, b: int) -> int:
    """The remainder has the dividend's sign; a zero divisor gives all ones, as on an H200."""
    return -1 if b == 0 else a - b * quotient(a, b)


Reference = Callable[..., Any]
INTEGER: list[tuple[str, type, type, int, Reference]] = [
    # instruction, source type, result type, sources, meaning
    ("add.s32 {d}, {0}, {1};", np.int32, np.int32, 2, lambda a, b: a + b),
    ("sub.s32 {d}, {0}, {1};", np.int32, np.int32, 2, lambda a, b: a - b),
    ("add.s64 {d}, {0}, {1};", np.int64, np.int64, 2, lambda a, b: a + b),
    ("add.s16 {d}, {0}, {1};", np.int16, np.int16, 2, lambda a, b: a + b),
    ("mul.lo.s32 {d}, {0}, {1};", np.int32, np.int32, 2, lambda a, b: a * b),
    ("mul.lo.s64 {d}, {0}, {1};", np.int64, np.int64, 2, lambda a, b: a * b),
    ("mul.hi.s32 {d}, {0}, {1};", np.int32, np.int32, 2, lambda a, b: a * b >> 32),
    ("mul.hi.u32 {d}, {0}, {1};", np.uint32, np.uint32, 2, lambda a, b: a * b >> 32),
    ("mul.wide.s32 {d}, {0}, {1};", np.int32, np.int64, 2, lambda a, b: a * b),
    ("mul.wide.u32 {d}, {0}, {1};", np.uint32, np.uint64, 2, lambda a, b: a * b),
    ("mul.wide.s16 {d}, {0}, {1};", np.int16, np.int32, 2, lambda a, b: a * b),
    ("mad.lo.s32 {d}, {0}, {1}, {2};", np.int32, np.int32, 3, lambda a, b, c: a * b + c),
    ("mad.lo.s64 {d}, {0}, {1}, {2};", np.int64, np.int64, 3, lambda a, b, c: a * b + c),
    ("div.s32 {d}, {0}, {1};", np.int32, np.int32, 2, quotient),
    ("div.u32 {d}, {0}, {1};", np.uint32, np.uint32, 2, quotient),
    ("rem.s32 {d}, {0}, {1};", np.int32, np.int32, 2, remainder),
    ("rem.u64 {d}, {0}, {1};", np.uint64, np.uint64, 2, remainder),
    ("div.u64 {d}, {0}, {1};", np.uint64, np.uint64, 2, quotient),
    ("min.s32 {d}, {0}, {1};", np.int32, np.int32, 2, min),
    ("max.u32 {d}, {0}, {1};", np.uint32, np.uint32, 2, max),
    ("min.relu.s32 {d}, {0}, {1};", np.int32, np.int32, 2, lambda a, b: max(min(a, b), 0)),
    ("neg.s32 {d}, {0};", np.int32, np.int32, 1, lambda a: -a),
    ("abs.s32 {d}, {0};", np.int32, np.int32, 1, abs),
    ("not.b32 {d}, {0};", np.uint32, np.uint32, 1, lambda a: ~a),
    ("and.b16 {d}, {0}, {1};", np.uint16, np.uint16, 2, lambda a, b: a & b),
    ("or.b64 {d}, {0}, {1};", np.uint64, np.uint64, 2, lambda a, b: a | b),
    ("xor.b32 {d}, {0}, {1};", np.uint32, np.uint32, 2, lambda a, b: a ^ b),
    ("shl.b32 {d}, {0}, 7;", np.uint32, np.uint32, 1, lambda a: a << 7),
    ("shl.b64 {d}, {0}, 63;", np.uint64, np.uint64, 1, lambda a: a << 63),
    ("shr.s32 {d}, {0}, 31;", np.int32, np.int32, 1, lambda a: a >> 31),
    ("shr.u32 {d}, {0}, 9;", np.uint32, np.uint32, 1, lambda a: a >> 9),
    ("shr.s16 {d}, {0}, 5;", np.int16, np.int16, 1, lambda a: a >> 5),
    ("shl.b32 {d}, {0}, {1};", np.uint32, np.uint32, 2, lambda a, b: a << b if b < 32 else 0),
    ("shr.u32 {d}, {0}, {1};", np.uint32, np.uint32, 2, lambda a, b: a >> b if b < 32 else 0),
    ("cvt.s64.s32 {d}, {0};", np.int32, np.int64, 1, lambda a: a),
    ("cvt.u64.u32 {d}, {0};", np.uint32, np.uint64, 1, lambda a: a),
    ("cvt.u16.u32 {d}, {0};", np.uint32, np.uint16, 1, lambda a: a),
    ("cvt.s32.s16 {d}, {0};", np.int16, np.int32, 1, lambda a: a),
    ("cvt.s32.s8 {d}, {0};", np.int32, np.int32, 1, lambda a: wrap(a, np.int8)),
    ("cvt.s8.s32 {d}, {0};", np.int32, np.int16, 1, lambda a: wrap(a, np.int8)),
    ("mov.b32 {d}, 0f3F800000;", np.uint32, np.uint32, 1, lambda a: 0x3F800000),
    ("mov.b64 {d}, {{{0}, {1}}};", np.uint32, np.uint64, 2, lambda a, b: a | b << 32),
    (
        "setp.lt.s32 %p1, {0}, {1}; selp.b32 {d}, {0}, {1}, %p1;",
        np.int32,
        np.int32,
        2,
        min,
    ),
    (
        "setp.lt.u32 %p1, {0}, {1}; not.pred %p2, %p1; selp.b32 {d}, {0}, {1}, %p2;",
        np.uint32,
        np.uint32,
        2,
        max,
    ),
    (
        "mov.b32 {d}, {0}; setp.ge.s32 %p1, {0}, 50; @%p1 mov.b32 {d}, 1;",
        np.int32,
        np.int32,
        1,
        lambda a: 1 if a >= 50 else a,
    ),
    (
        "mov.b32 {d}, {0}; setp.ge.s32 %p1, {0}, 50; @!%p1 mov.b32 {d}, 1;",
        np.int32,
        np.int32,
        1,
        lambda a: a if a >= 50 else 1,
    ),
]


@pytest.mark.parametrize("entry", INTEGER, ids=lambda entry: entry[0])
def test_integers(entry: tuple[str, type, type, int, Reference], rng: np.random.Generator) -> None:
    instruction, source, result, count, reference = entry
    sources = [integers(rng, source) for _ in range(count)]
    if "{d}, {0}, {1};" in instruction and instruction[:3] in ("shl", "shr"):
        sources[1] = rng.integers(0, 40, 32).astype(source)
    expected = [wrap(reference(*map(int, lanes)), result) for lanes in zip(*sources, strict=True)]
    assert execute(instruction, sources, result).tolist() == expected


@pytest.mark.parametrize("operation", ["div", "rem"])
@pytest.mark.parametrize("kind", [np.uint16, np.int16, np.uint32, np.int32, np.uint64, np.int64])
def test_division_at_its_limits(operation: str, kind: type, rng: np.random.Generator) -> None:
    """Division by zero and by minus one gives what an H200 gives (driver 580.159.04)."""
    dtype, dividends = np.dtype(kind), integers(rng, kind)
    text = f"{operation}.{dtype.kind.replace('i', 's')}{8 * dtype.itemsize} {{d}}, {{0}}, {{1}};"
    reference = quotient if operation == "div" else remainder
    for divisor in (0, wrap(-1, kind)):
        expected = [wrap(reference(int(value), divisor), kind) for value in dividends]
        assert execute(text, [dividends, np.full(32, divisor, kind)], kind).tolist() == expected


def floats(rng: np.random.Generator) -> np.ndarray:
    """Random values of many magnitudes, and special ones."""
    values = (rng.normal(size=32) * 10.0 ** rng.integers(-6, 6, 32)).astype(np.float32)
    values[: len(SPECIAL_FLOATS)] = SPECIAL_FLOATS
    rng.shuffle(values)
    return values


def exact(function: Callable[..., Any]) -> Callable[..., np.ndarray]:
    """The function in extended precision, rounded once."""
    return lambda *x: function(*(v.astype(np.longdouble) for v in x)).astype(np.float32)


FLOAT: list[tuple[str, int, Callable[..., np.ndarray]]] = [
    ("add.f32 {d}, {0}, {1};", 2, exact(lambda a, b: a + b)),
    ("sub.rn.f32 {d}, {0}, {1};", 2, exact(lambda a, b: a - b)),
    ("mul.f32 {d}, {0}, {1};", 2, exact(lambda a, b: a * b)),
    ("div.rn.f32 {d}, {0}, {1};", 2, exact(lambda a, b: a / b)),
    ("rcp.rn.f32 {d}, {0};", 1, exact(lambda a: 1 / a)),
    ("neg.f32 {d}, {0};", 1, lambda a: -a),
    ("max.f32 {d}, {0}, {1};", 2, np.fmax),
    ("max.NaN.f32 {d}, {0}, {1};", 2, np.maximum),
    ("min.f32 {d}, {0}, {1};", 2, np.fmin),
    ("fma.rn.f32 {d}, {0}, {1}, {2};", 3, exact(lambda a, b, c: a * b + c)),
]


@pytest.mark.parametrize("entry", FLOAT, ids=lambda entry: entry[0])
def test_floats(entry: tuple[str, int, Any], rng: np.random.Generator) -> None:
    instruction, count, reference = entry
    sources = [floats(rng) for _ in range(count)]
    with np.errstate(all="ignore"):
        expected = reference(*sources)
    np.testing.assert_array_equal(execute(instruction, sources, np.float32), expected)


def test_unpacks_one_half(rng: np.random.Generator) -> None:
    x = integers(rng, np.uint64)
    for operands, shift in (("{{{d}, _}}", 0), ("{{_, {d}}}", 32)):
        for guard in ("", "setp.eq.s32 %p1, %r1, %r1;\n@%p1 "):
            found = execute(f"{guard}mov.b64 {operands}, {{0}};", [x], np.uint32)
            assert np.array_equal(found, (x >> np.uint64(shift)).astype(np.uint32))
    with pytest.raises(PtxError, match="a register is expected"):
        execute("mov.b32 {d}, 0; mov.b32 _, {0};", [x.astype(np.uint32)], np.uint32)


def test_fma_rounds_once() -> None:
    """The product's last bits decide a tie that two roundings would get wrong."""
    a = np.full(32, 1 + 2.0**-12, np.float32)
    c = np.full(32, 2.0**-24 + 2.0**-80, np.float32)
    expected = np.full(32, 1 + 2.0**-11 + 2.0**-23, np.float32)
    result = execute("fma.rn.f32 {d}, {0}, {1}, {2};", [a, a, c], np.float32)
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize(
    ("instruction", "reference"),
    [("ex2.approx.ftz.f32 {d}, {0};", np.exp2), ("lg2.approx.ftz.f32 {d}, {0};", np.log2)],
)
def test_special_functions(instruction: str, reference: Any, rng: np.random.Generator) -> None:
    values = rng.uniform(-20, 20, 32).astype(np.float32)
    values[:6] = math.inf, -math.inf, math.nan, -140, 1e-40, 0
    values = np.abs(values) if reference is np.log2 else values
    flushed = np.where(np.abs(values) < 2.0**-126, 0, values)
    with np.errstate(all="ignore"):
        expected = reference(flushed.astype(np.float64))
    expected = np.where(expected < 2.0**-126, 0, expected) if reference is np.exp2 else expected
    np.testing.assert_allclose(
        execute(instruction, [values], np.float32), expected, rtol=3e-7, atol=1e-7
    )


@pytest.mark.parametrize(("name", "dtype"), [("bf16", ml_dtypes.bfloat16), ("f16", np.float16)])
def test_half_precision(name: str, dtype: Any, rng: np.random.Generator) -> None:
    high, low = floats(rng), floats(rng)
    bits = execute(f"cvt.rn.{name}x2.f32 {{d}}, {{0}}, {{1}};", [high, low], np.uint32)
    halves = bits.view(np.uint16).reshape(32, 2).view(dtype).astype(np.float32)
    with np.errstate(all="ignore"):
        rounded = np.stack([low, high], 1).astype(dtype).astype(np.float32)
    np.testing.assert_array_equal(halves, rounded)
    source = rounded[:, 0].astype(dtype).view(np.uint16)
    widened = execute(f"cvt.f32.{name} {{d}}, {{0}};", [source], np.float32)
    np.testing.assert_array_equal(widened, rounded[:, 0])


@pytest.mark.parametrize("comparison", ["lt", "le", "eq", "ne", "gt", "ge", "neu", "ltu"])
def test_comparisons_with_nan(comparison: str, rng: np.random.Generator) -> None:
    a, b = floats(rng), floats(rng)
    b[::3] = a[::3]
    text = f"setp.{comparison}.f32 %p1, {{0}}, {{1}}; selp.b32 {{d}}, 1, 0, %p1;"
    ordered = comparison.removesuffix("u")
    plain = {"lt": a < b, "le": a <= b, "eq": a == b, "ne": a != b, "gt": a > b, "ge": a >= b}
    nan = np.isnan(a) | np.isnan(b)
    expected = plain[ordered] | nan if comparison.endswith("u") else plain[ordered] & ~nan
    assert execute(text, [a, b], np.uint32).astype(bool).tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("instruction", "source"),
    [
        ("shfl.sync.idx.b32 {d}, {0}, 5, 31, -1;", lambda lane: 5),
        ("shfl.sync.bfly.b32 {d}, {0}, 3, 31, -1;", lambda lane: lane ^ 3),
        (
            "shfl.sync.up.b32 {d}, {0}, 2, 0, -1;",
            lambda lane: lane - 2 if lane >= 2 else lane,
        ),
        ("shfl.sync.down.b32 {d}, {0}, 4, 31, -1;", lambda lane: lane + 4 if lane < 28 else lane),
        ("shfl.sync.idx.b32 {d}, {0}, 1, 6175, -1;", lambda lane: lane & 24 | 1),
    ],
)
def test_shuffles(instruction: str, source: Any, rng: np.random.Generator) -> None:
    values = integers(rng, np.uint32)
    expected = [int(values[source(lane)]) for lane in range(32)]
    assert execute(instruction, [values], np.uint32).tolist() == expected


def test_votes_and_election(rng: np.random.Generator) -> None:
    values = rng.integers(0, 2, 32).astype(np.uint32)
    ballot = "setp.ne.b32 %p1, {0}, 0; vote.sync.ballot.b32 {d}, %p1, -1;"
    expected = sum(int(v) << lane for lane, v in enumerate(values))
    assert set(execute(ballot, [values], np.uint32).tolist()) == {expected}
    some = "setp.ne.b32 %p1, {0}, 0; vote.sync.any.pred %p2, %p1, -1; selp.b32 {d}, 1, 0, %p2;"
    assert set(execute(some, [np.zeros(32, np.uint32)], np.uint32).tolist()) == {0}
    assert set(execute(some, [values | 1], np.uint32).tolist()) == {1}
    elect = "elect.sync %r90|%p1, -1; selp.b32 {d}, 1, 0, %p1;"
    assert execute(elect, [values], np.uint32).sum() == 1
    assert execute(elect.replace("%r90", "_"), [values], np.uint32).sum() == 1


def test_registers_of_any_name(rng: np.random.Generator) -> None:
    """Inline assembly declares families of them without a percent sign."""
    values = rng.integers(0, 1 << 31, 32).astype(np.uint32)
    text = "{{ .reg .b32 half; .reg .b64 wide_<2>; add.u32 half, {0}, 5; mov.b64 wide_1, "
    text += "{{half, 0x9}}; mov.b64 wide_0, wide_1; mov.b64 {d}, wide_0; }}"
    expected = (9 << 32) + values.astype(np.uint64) + 5
    assert execute(text, [values], np.uint64).tolist() == expected.tolist()
    beyond = text.replace("wide_1", "wide_2")
    with pytest.raises(PtxError, match="wide_2"):
        execute(beyond, [values], np.uint64)


def test_loops_of_different_lengths() -> None:
    """Lanes leave a loop one by one and meet after it; lanes that exit never come back."""
    body = """
    mov.b32 {d}, 0;
    mov.b32 %r50, 0;
    setp.gt.u32 %p3, %r1, 29;
    @%p3 ret;
    LOOP:
    add.s32 %r50, %r50, 1;
    add.s32 {d}, {d}, %r50;
    setp.lt.u32 %p1, %r50, {0};
    @%p1 bra LOOP;
    shfl.sync.idx.b32 %r51, {d}, 3, 31, 0x3fffffff;
    add.s32 {d}, {d}, %r51;
    """
    counts = np.arange(1, 33, dtype=np.uint32)
    sums = [n * (n + 1) // 2 + 10 if n <= 30 else 0 for n in range(1, 33)]
    assert execute(body, [counts], np.uint32).tolist() == sums


@pytest.mark.parametrize(
    "body",
    [
        "dp4a.u32.u32 %r5, %r1, %r6, %r7;",
        "ld.global.nc.L1::no_allocate.v3.b32 {%r5, %r6, %r7}, [%rd1];",
        "cvt.rs.bf16x2.f32 %r5, %r6, %r7, %r8;",
    ],
)
def test_what_is_missing_is_named(body: str) -> None:
    with pytest.raises(PtxError, match=r"line \d+: not implemented: " + body.split()[0]):
        programs.run(body, np.zeros(32, np.uint32))
