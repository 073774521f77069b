"""Arithmetic: one table from mnemonic to a numpy function over lanes.

A function takes its sources and then its results, all arrays of the same shape, the last axis being
lanes; results may be the same arrays as sources. Floating-point rounding is to nearest even.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from kernels.emulator.ptx.entries import FREE, Cost, Demand
from kernels.emulator.ptx.windows import WINDOWS
from kernels.emulator.subnormals import flush

Function = Callable[..., Any]

DTYPES = {
    "pred": np.dtype(np.bool_),
    "u16": np.dtype(np.uint16),
    "s16": np.dtype(np.int16),
    "u32": np.dtype(np.uint32),
    "s32": np.dtype(np.int32),
    "f32": np.dtype(np.float32),
    "u64": np.dtype(np.uint64),
    "s64": np.dtype(np.int64),
    "f64": np.dtype(np.float64),
}
"""Views of registers that functions take."""
_LONG = 64
_WORD = 32
_QUOTIENTS = {"div.s32": 20, "div.u32": 16, "rem.s32": 20}
"""Instructions that ptxas makes of one, in round numbers; none is in a kernel's main loop."""


FMA = Cost("floating point", Demand("fma"))
FMA_PAIR = Cost("floating point", Demand("fma", results=2))
"""Two results of a lane by one instruction."""
EXTREME = Cost("floating point", Demand("alu"))
"""Extremes and signs, which the unit for integers computes."""
COMPARE = Cost("compare", Demand("alu"))
CONVERT = Cost("conversion", Demand("convert"))
MOVE = Cost("move", FREE)


def integer(bits: int | str, issues: int = 1) -> Cost:
    """The cost of an integer operation of which ptxas makes `issues`, or two if it has 64 bits."""
    return Cost("integer", Demand("alu", issues=2 if int(bits) == _LONG else issues))


def part_of_scaled_sum(bits: int | str, part: Literal["scale", "sum"]) -> Cost:
    """The cost of an integer operation that may be part of a multiplication and addition."""
    return Cost("integer", Demand("alu", scaled_sum=part)) if int(bits) == _WORD else integer(bits)


def product(bits: int | str) -> Cost:
    """The cost of an integer product; ptxas makes four instructions of one of 64 bits."""
    return Cost("integer", Demand("multiply", issues=4 if int(bits) == _LONG else 1))


def special(issues: int = 1) -> Cost:
    """The cost of a special function of which ptxas makes `issues` instructions."""
    return Cost("special function", Demand("special", issues=issues), {"special_function_ops": 1})


@dataclasses.dataclass(frozen=True)
class Operation:
    """What a mnemonic computes and costs.

    Attributes:
      function: takes the sources and then the results.
      sources, results: views of the registers.
      cost: of one execution by a warp.
    """

    function: Function
    sources: tuple[str, ...]
    results: tuple[str, ...]
    cost: Cost


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray, out: np.ndarray) -> None:
    """a * b + c with one rounding: the float64 sum is rounded to odd before it is narrowed."""
    product = a.astype(np.float64) * b
    total = product + c
    back = total - product
    error = (product - (total - back)) + (c - back)
    bits = total.view(np.int64)
    inexact = (error != 0) & np.isfinite(total) & (bits & 1 == 0)
    toward = np.where((error > 0) == (total > 0), 1, -1)
    out[...] = (bits + np.where(inexact, toward, 0)).view(np.float64)


def copy(a: np.ndarray, out: np.ndarray) -> None:
    """mov"""
    out[...] = a


def select(a: np.ndarray, b: np.ndarray, p: np.ndarray, out: np.ndarray) -> None:
    """selp"""
    out[...] = np.where(p, a, b)


def divide(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """Integer quotient toward zero; all ones where the divisor is zero, as an H200 gives."""
    safe = np.where(b == 0, b.dtype.type(1), b)
    out[...] = np.where(b == 0, ~b, (a - np.fmod(a, safe)) // safe)


def remainder(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """Integer remainder with the dividend's sign; all ones where the divisor is zero."""
    out[...] = np.where(b == 0, ~b, np.fmod(a, np.where(b == 0, b.dtype.type(1), b)))


def multiply_wide(wide: type, a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """The whole product."""
    np.multiply(a.astype(wide), b.astype(wide), out=out)


def multiply_high(wide: type, a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """The upper half of the product."""
    product = a.astype(wide) * b.astype(wide)
    out[...] = product >> (8 * a.dtype.itemsize)


def multiply_add(a: np.ndarray, b: np.ndarray, c: np.ndarray, out: np.ndarray) -> None:
    """mad.lo"""
    np.add(a * b, c, out=out)


def multiply_add_wide(
    wide: type, a: np.ndarray, b: np.ndarray, c: np.ndarray, out: np.ndarray
) -> None:
    """mad.wide"""
    np.add(a.astype(wide) * b.astype(wide), c, out=out)


def shift_left(a: np.ndarray, count: np.ndarray, out: np.ndarray) -> None:
    """shl; counts beyond the width give zero."""
    width = 8 * a.dtype.itemsize
    shifted = a << (count & (width - 1)).astype(a.dtype)
    out[...] = np.where(count < width, shifted, a.dtype.type(0))


def shift_right(a: np.ndarray, count: np.ndarray, out: np.ndarray) -> None:
    """shr; counts beyond the width act like the width minus one, twice."""
    width = 8 * a.dtype.itemsize
    shifted = a >> np.minimum(count, width - 1).astype(a.dtype)
    over = shifted >> a.dtype.type(width - 1) >> a.dtype.type(1) if a.dtype.kind == "u" else shifted
    out[...] = np.where(count < width, shifted, over)


def minimum(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """min; NaN where either is."""
    np.minimum(a, b, out=out)


def maximum(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """max; NaN where either is."""
    np.maximum(a, b, out=out)


def minimum_relu(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """min.relu"""
    np.maximum(np.minimum(a, b), 0, out=out)


def maximum_relu(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """max.relu"""
    np.maximum(np.maximum(a, b), 0, out=out)


def exp2(a: np.ndarray, out: np.ndarray) -> None:
    """ex2.approx.ftz; numpy's is nearer to the truth than the hardware's 2 ulp."""
    np.exp2(a, out=out)
    out[out < np.float32(2.0**-126)] = 0


def log2(a: np.ndarray, out: np.ndarray) -> None:
    """lg2.approx.ftz"""
    np.log2(flush(a), out=out)


def reciprocal(a: np.ndarray, out: np.ndarray) -> None:
    """rcp.rn"""
    np.divide(np.float32(1), a, out=out)


def reciprocal_flushed(a: np.ndarray, out: np.ndarray) -> None:
    """rcp.approx.ftz"""
    out[...] = flush(np.float32(1) / flush(a))


def round_bf16(a: np.ndarray) -> np.ndarray:
    """Bits of float32 values rounded to bfloat16, in the low halves of 32-bit words."""
    bits = a.view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + (bits >> 16 & 1))) >> 16
    return np.where(np.isnan(a), np.uint32(0x7FFF), rounded)


def round_fp16(a: np.ndarray) -> np.ndarray:
    """Bits of float32 values rounded to float16, in the low halves of 32-bit words."""
    bits = a.astype(np.float16).view(np.uint16).astype(np.uint32)
    return np.where(np.isnan(a), np.uint32(0x7FFF), bits)


def pack_rounded(rounded: Function, high: np.ndarray, low: np.ndarray, out: np.ndarray) -> None:
    """cvt.rn.{bf16x2,f16x2}.f32"""
    out[...] = rounded(high) << 16 | rounded(low)


def round_half(rounded: Function, a: np.ndarray, out: np.ndarray) -> None:
    """cvt.rn.{bf16,f16}.f32"""
    out[...] = rounded(a)


def widen_bf16(a: np.ndarray, out: np.ndarray) -> None:
    """cvt.f32.bf16"""
    out[...] = (a.astype(np.uint32) << 16).view(np.float32)


def widen_fp16(a: np.ndarray, out: np.ndarray) -> None:
    """cvt.f32.f16"""
    out[...] = a.view(np.float16)


def convert_integer(to: type, source: type, a: np.ndarray, out: np.ndarray) -> None:
    """cvt between integers: the source's low bits, then the result's, extended to the register."""
    out[...] = a.astype(source).astype(to)


def truncate_float(to: type, a: np.ndarray, out: np.ndarray) -> None:
    """cvt.rzi.{u32,s32}.f32: toward zero, saturating; NaN is zero."""
    limits = np.iinfo(to)
    out[...] = np.clip(np.nan_to_num(np.trunc(a.astype(np.float64)), nan=0), limits.min, limits.max)


def to_float(a: np.ndarray, out: np.ndarray) -> None:
    """cvt.rn.f32 of an integer"""
    out[...] = a.astype(np.float64) if a.dtype.itemsize < 8 else a.astype(np.float32)


def pack(low: np.ndarray, high: np.ndarray, out: np.ndarray) -> None:
    """mov.b64 d, {low, high}"""
    half = out.dtype.type(4 * out.dtype.itemsize)
    out[...] = low.astype(out.dtype) | high.astype(out.dtype) << half


def unpack(a: np.ndarray, low: np.ndarray, high: np.ndarray) -> None:
    """mov.b64 {low, high}, a"""
    half = a.dtype.type(4 * a.dtype.itemsize)
    upper = a >> half
    low[...] = a.astype(low.dtype)
    high[...] = upper.astype(high.dtype)


def ordered_not_equal(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """setp.ne of floats: false where either is NaN."""
    out[...] = (a != b) & ~np.isnan(a) & ~np.isnan(b)


def unordered(compare: Function, a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """setp.{equ,ltu,...}: true where either is NaN."""
    out[...] = compare(a, b) | np.isnan(a) | np.isnan(b)


def combined(
    compare: Function, combine: Function, a: np.ndarray, b: np.ndarray, p: np.ndarray, out: Any
) -> None:
    """setp with a third predicate."""
    out[...] = combine(compare(a, b), p)


_COMPARE = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_LOGIC = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
_WIDER = {"16": "32", "32": "64"}


def _integers() -> dict[str, Operation]:
    table = {}
    for view in ("u16", "s16", "u32", "s32", "u64", "s64"):
        kind, bits = view[0], view[1:]
        two, one = (view, view), (view,)
        for name, function in (
            ("sub", np.subtract),
            ("min", minimum),
            ("max", maximum),
            ("div", divide),
            ("rem", remainder),
        ):
            cost = integer(bits, _QUOTIENTS.get(f"{name}.{view}", 1))
            table[f"{name}.{view}"] = Operation(function, two, one, cost)
        table[f"add.{view}"] = Operation(np.add, two, one, part_of_scaled_sum(bits, "sum"))
        table[f"mul.lo.{view}"] = Operation(np.multiply, two, one, product(bits))
        table[f"mad.lo.{view}"] = Operation(multiply_add, (*two, view), one, product(bits))
        table[f"shr.{view}"] = Operation(shift_right, (view, "u32"), one, integer(bits))
        if kind == "s":
            table[f"neg.{view}"] = Operation(np.negative, one, one, integer(bits))
            table[f"abs.{view}"] = Operation(np.absolute, one, one, integer(bits))
            table[f"min.relu.{view}"] = Operation(minimum_relu, two, one, integer(bits))
            table[f"max.relu.{view}"] = Operation(maximum_relu, two, one, integer(bits))
        if bits in _WIDER:
            wider = f"{kind}{_WIDER[bits]}"
            wide = DTYPES[wider].type
            partial = functools.partial
            cost = product(bits)
            table[f"mul.wide.{view}"] = Operation(partial(multiply_wide, wide), two, (wider,), cost)
            table[f"mul.hi.{view}"] = Operation(partial(multiply_high, wide), two, one, cost)
            table[f"mad.wide.{view}"] = Operation(
                partial(multiply_add_wide, wide), (*two, wider), (wider,), cost
            )
    return table


def _logic() -> dict[str, Operation]:
    table = {}
    for name, view in (("pred", "pred"), ("b16", "u16"), ("b32", "u32"), ("b64", "u64")):
        cost = integer(1 if view == "pred" else view[1:])
        for opcode, function in _LOGIC.items():
            table[f"{opcode}.{name}"] = Operation(function, (view, view), (view,), cost)
        invert = np.logical_not if view == "pred" else np.invert
        table[f"not.{name}"] = Operation(invert, (view,), (view,), cost)
        table[f"mov.{name}"] = Operation(copy, (view,), (view,), MOVE)
        if view != "pred":
            scale = part_of_scaled_sum(view[1:], "scale")
            table[f"shl.{name}"] = Operation(shift_left, (view, "u32"), (view,), scale)
            table[f"shr.{name}"] = Operation(shift_right, (view, "u32"), (view,), cost)
            for kind in "busf":
                sources = (view, view, "pred")
                table[f"selp.{kind}{name[1:]}"] = Operation(select, sources, (view,), COMPARE)
                table[f"mov.{kind}{name[1:]}"] = Operation(copy, (view,), (view,), MOVE)
    return table


def _floats() -> dict[str, Operation]:
    table = {}
    one, two = ("f32",), ("f32", "f32")
    for rounding in ("", ".rn"):
        for name, function in (("add", np.add), ("sub", np.subtract), ("mul", np.multiply)):
            table[f"{name}{rounding}.f32"] = Operation(function, two, one, FMA)
    table["fma.rn.f32"] = Operation(fma, (*two, "f32"), one, FMA)
    table["div.rn.f32"] = Operation(np.divide, two, one, special(9))
    table["rcp.rn.f32"] = Operation(reciprocal, one, one, special(6))
    table["rcp.approx.ftz.f32"] = Operation(reciprocal_flushed, one, one, special())
    table["ex2.approx.ftz.f32"] = Operation(exp2, one, one, special())
    table["lg2.approx.ftz.f32"] = Operation(log2, one, one, special())
    table["neg.f32"] = Operation(np.negative, one, one, EXTREME)
    table["abs.f32"] = Operation(np.absolute, one, one, EXTREME)
    table["max.f32"] = Operation(np.fmax, two, one, EXTREME)
    table["min.f32"] = Operation(np.fmin, two, one, EXTREME)
    table["max.NaN.f32"] = Operation(maximum, two, one, EXTREME)
    table["min.NaN.f32"] = Operation(minimum, two, one, EXTREME)
    return table


def _conversions() -> dict[str, Operation]:
    partial = functools.partial
    table = {
        "cvt.f32.bf16": Operation(widen_bf16, ("u16",), ("f32",), CONVERT),
        "cvt.f32.f16": Operation(widen_fp16, ("u16",), ("f32",), CONVERT),
    }
    for name, rounded in (("bf16", round_bf16), ("f16", round_fp16)):
        packed = partial(pack_rounded, rounded)
        table[f"cvt.rn.{name}x2.f32"] = Operation(packed, ("f32", "f32"), ("u32",), CONVERT)
        table[f"cvt.rn.{name}.f32"] = Operation(
            partial(round_half, rounded), ("f32",), ("u16",), CONVERT
        )
    integers = {f"{kind}{bits}": None for kind in "us" for bits in (8, 16, 32, 64)}
    types = {
        name: np.dtype(name.replace("u", "uint").replace("s", "int")).type for name in integers
    }
    for to, source in ((a, b) for a in integers for b in integers):
        function = partial(convert_integer, types[to], types[source])
        table[f"cvt.{to}.{source}"] = Operation(function, (source,), (to,), CONVERT)
    for name in ("u32", "s32", "u64", "s64"):
        table[f"cvt.rn.f32.{name}"] = Operation(to_float, (name,), ("f32",), CONVERT)
        table[f"cvt.rzi.{name}.f32"] = Operation(
            partial(truncate_float, types[name]), ("f32",), (name,), CONVERT
        )
    return table


def _comparisons() -> dict[str, Operation]:
    table = {}
    for type_, view in (
        *((f"{kind}{bits}", f"{kind}{bits}") for kind in "us" for bits in (16, 32, 64)),
        *((f"b{bits}", f"u{bits}") for bits in (16, 32, 64)),
        ("f32", "f32"),
    ):
        for name, function in _COMPARE.items():
            if type_ == "f32":
                loose = functools.partial(unordered, function)
                table[f"setp.{name}u.f32"] = Operation(loose, (view, view), ("pred",), COMPARE)
                function = ordered_not_equal if name == "ne" else function
            table[f"setp.{name}.{type_}"] = Operation(function, (view, view), ("pred",), COMPARE)
            for word, logic in (
                ("and", operator.and_),
                ("or", operator.or_),
                ("xor", operator.xor),
            ):
                if type_ != "f32":
                    both = functools.partial(combined, function, logic)
                    sources = (view, view, "pred")
                    table[f"setp.{name}.{word}.{type_}"] = Operation(
                        both, sources, ("pred",), COMPARE
                    )
    return table


def _addresses() -> dict[str, Operation]:
    """cvta: a generic address is the address in its space and the start of the space's window."""
    table = {}
    for space, window in WINDOWS.items():
        for name, distance in ((f"cvta.{space}", window), (f"cvta.to.{space}", -window)):
            shift = functools.partial(np.add, np.uint64(distance % (1 << _LONG)))
            table[f"{name}.u64"] = Operation(shift, ("u64",), ("u64",), MOVE)
    return table


OPERATIONS = _integers() | _logic() | _floats() | _conversions() | _comparisons() | _addresses()
"""Every arithmetic mnemonic that exists here."""

for _bits, _half in ((64, "u32"), (32, "u16")):
    OPERATIONS[f"pack.b{_bits}"] = Operation(pack, (_half, _half), (f"u{_bits}",), MOVE)
    OPERATIONS[f"unpack.b{_bits}"] = Operation(unpack, (f"u{_bits}",), (_half, _half), MOVE)
