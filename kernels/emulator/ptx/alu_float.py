"""Floating-point arithmetic beyond `alu`: directed rounding, flushing, saturation, packed pairs.

Sums and products are taken in float64 with the error of the last step, from which every rounding
to float32 follows.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import ml_dtypes
import numpy as np

from kernels.emulator.ptx import alu
from kernels.emulator.ptx.alu import EXTREME, FMA, FMA_PAIR, Function, Operation, special
from kernels.emulator.subnormals import flush

BF16: Any = np.dtype(ml_dtypes.bfloat16)
FP16: Any = np.dtype(np.float16)


def _sum(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """a + b in float64 and what that misses."""
    total = a + b
    back = total - a
    return total, (a - (total - back)) + (b - back)


def directed(total: np.ndarray, error: np.ndarray, mode: str) -> np.ndarray:
    """total + error rounded to float32: n to nearest even, z to zero, m down, p up."""
    bits = total.view(np.int64)
    # The sum is rounded to odd first, so that narrowing rounds once.
    inexact = (error != 0) & np.isfinite(total) & (bits & 1 == 0)
    toward = np.where((error > 0) == (total > 0), 1, -1)
    near = (bits + np.where(inexact, toward, 0)).view(np.float64).astype(np.float32)
    if mode == "n":
        return near
    off = near - total  # exact: the two are neighbours
    down, up = off > error, off < error
    if mode == "z":
        down, up = down & (total > 0), up & (total < 0)
    lowest, highest = np.float32(-np.inf), np.float32(np.inf)
    finite = np.isfinite(total)
    if mode in "zm":
        near = np.where(down & finite, np.nextafter(near, lowest), near)
    if mode in "zp":
        near = np.where(up & finite, np.nextafter(near, highest), near)
    return near


def _add(mode: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    result = directed(*_sum(a.astype(np.float64), b.astype(np.float64)), mode)
    # x - x is -0 only where rounding is down.
    cancelled = (result == 0) & (a == -b) & (a != 0)
    signed = (result == 0) & (a == 0) & (np.signbit(a) != np.signbit(b))
    zero = np.float32(-0.0 if mode == "m" else 0.0)
    return np.where(cancelled | signed, zero, result)


def _subtract(mode: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return _add(mode, a, -b)


def _multiply(mode: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    product = a.astype(np.float64) * b  # exact
    return directed(product, np.zeros_like(product), mode)


def _fma(mode: str, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    product = a.astype(np.float64) * b
    result = directed(*_sum(product, c.astype(np.float64)), mode)
    if mode == "m":
        cancelled = (product == -c.astype(np.float64)) & (np.signbit(product) != np.signbit(c))
        result = np.where(cancelled, np.float32(-0.0), result)
    return result


def _nearest(function: Function, *sources: np.ndarray) -> np.ndarray:
    return function(*sources)


def _fma_nearest(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    out = np.empty_like(a)
    alu.fma(a, b, c, out)
    return out


_EXACT = {"add": _add, "sub": _subtract, "mul": _multiply, "fma": _fma}
_NEAREST = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "fma": _fma_nearest}


def _core(name: str, mode: str) -> Function:
    if mode == "n":
        return functools.partial(_nearest, _NEAREST[name])
    return functools.partial(_EXACT[name], mode)


def _modified(core: Function, ftz: bool, sat: bool, *operands: np.ndarray) -> None:
    """Flushes subnormal sources and results, clamps to [0, 1]; the last operand is the result."""
    *sources, out = operands
    result = core(*(flush(source) if ftz else source for source in sources))
    result = flush(result) if ftz else result
    if sat:
        result = np.where(np.isnan(result), np.float32(0), np.clip(result, 0, 1))
    out[...] = result


def _pairwise(dtype: Any, function: Function, *operands: np.ndarray) -> None:
    """A function on every half of wider registers."""
    function(*(operand.view(dtype) for operand in operands))


def _pair_nearest(function: Any, a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """The commonest pairs, without detours."""
    function(a.view(np.float32), b.view(np.float32), out=out.view(np.float32))


def _pair_fma(a: np.ndarray, b: np.ndarray, c: np.ndarray, out: np.ndarray) -> None:
    narrow = np.float32
    alu.fma(a.view(narrow), b.view(narrow), c.view(narrow), out.view(narrow))


def _mixed(dtype: Any, core: Function, narrow: int, *operands: np.ndarray) -> None:
    """The first `narrow` sources are 16-bit patterns; the rest and the result are float32."""
    *sources, out = operands
    wide = [x.view(dtype).astype(np.float32) if i < narrow else x for i, x in enumerate(sources)]
    out[...] = core(*wide)


def _half(dtype: Any, core: Function, *operands: np.ndarray) -> None:
    """16-bit arithmetic with one rounding: float32 (float64 for fma) holds more than is needed."""
    *sources, out = (operand.view(dtype) for operand in operands)
    out[...] = core(*sources)


def _half_fma(dtype: Any, a: Any, b: Any, c: Any) -> Any:
    a, b, c = (x.astype(np.float64) for x in (a, b, c))
    total, error = _sum(a * b, c)
    return directed_to(dtype, total, error)


def directed_to(dtype: Any, total: np.ndarray, error: np.ndarray) -> np.ndarray:
    """total + error rounded to nearest in a 16-bit type."""
    bits = total.view(np.int64)
    inexact = (error != 0) & np.isfinite(total) & (bits & 1 == 0)
    toward = np.where((error > 0) == (total > 0), 1, -1)
    odd = (bits + np.where(inexact, toward, 0)).view(np.float64)
    if dtype == FP16:
        return odd.astype(np.float16)
    # bfloat16 is cut from float32; rounding to odd there keeps the second rounding right.
    near = odd.astype(np.float32)
    off = near - odd
    words = near.view(np.int32)
    back = np.where((off != 0) & np.isfinite(near) & (words & 1 == 0), 1, 0)
    direction = np.where((off > 0) == (near > 0), -1, 1)
    return (words + back * direction).astype(np.int32).view(np.float32).astype(dtype)


def _half_two(dtype: Any, function: Function, a: Any, b: Any) -> Any:
    exact = function(a.astype(np.float64), b.astype(np.float64))
    return directed_to(dtype, exact, np.zeros_like(exact))


def _half_extreme(function: Function, a: Any, b: Any) -> Any:
    return function(a.astype(np.float32), b.astype(np.float32)).astype(a.dtype)


def _three(core: Function, ftz: bool, a: Any, b: Any, c: Any, out: np.ndarray) -> None:
    """max and min of three"""
    result = core(core(a, b), c)
    out[...] = flush(result) if ftz else result


def _unary(function: Function, ftz: bool, a: np.ndarray, out: np.ndarray) -> None:
    result = function(flush(a) if ftz else a)
    out[...] = flush(result) if ftz else result


def _copysign(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """copysign: the sign of a on b"""
    np.copysign(b, a, out=out)


def _arithmetic() -> dict[str, Operation]:
    """add, sub, mul, fma of float32 and of pairs, in every rounding."""
    table = {}
    for name, mode, ftz, sat in itertools.product(_EXACT, ("", *"nzmp"), (0, 1), (0, 1)):
        if name == "fma" and not mode:
            continue
        core = _core(name, mode or "n")
        function = functools.partial(_modified, core, bool(ftz), bool(sat))
        words = [name, f"r{mode}" if mode else "", "ftz" if ftz else "", "sat" if sat else ""]
        mnemonic = ".".join(word for word in words if word)
        count = 3 if name == "fma" else 2
        table[f"{mnemonic}.f32"] = Operation(function, ("f32",) * count, ("f32",), FMA)
        if not sat:
            pairs: Function = functools.partial(_pairwise, np.float32, function)
            if mode in ("", "n") and not ftz:
                pairs = functools.partial(_pair_nearest, _NEAREST[name])
                pairs = _pair_fma if name == "fma" else pairs
            table[f"{mnemonic}.f32x2"] = Operation(pairs, ("u64",) * count, ("u64",), FMA_PAIR)
        for kind, dtype in (("bf16", BF16), ("f16", FP16)) if not ftz and not sat else ():
            narrow = {"add": 1, "sub": 1, "fma": 2}.get(name)
            if narrow is not None:
                mixed = functools.partial(_mixed, dtype, core, narrow)
                views = ("u16",) * narrow + ("f32",)
                table[f"{mnemonic}.f32.{kind}"] = Operation(mixed, views, ("f32",), FMA)
    return table


def _halves() -> dict[str, Operation]:
    """16-bit arithmetic, single and in pairs."""
    table = {}
    for kind, dtype in (("bf16", BF16), ("f16", FP16)):
        cores: dict[str, tuple[int, Function]] = {
            "fma.rn": (3, functools.partial(_half_fma, dtype)),
            "neg": (1, np.negative),
            "abs": (1, np.absolute),
        }
        for rounding in ("", ".rn"):
            for name, function in (("add", np.add), ("sub", np.subtract), ("mul", np.multiply)):
                cores[name + rounding] = (2, functools.partial(_half_two, dtype, function))
        for name, number, strict in (
            ("max", np.fmax, np.maximum),
            ("min", np.fmin, np.minimum),
        ):
            cores[name] = (2, functools.partial(_half_extreme, number))
            cores[f"{name}.NaN"] = (2, functools.partial(_half_extreme, strict))
        for name, (count, core) in cores.items():
            function = functools.partial(_half, dtype, core)
            extreme = name.split(".")[0] in ("neg", "abs", "max", "min")
            one, two = (EXTREME, EXTREME) if extreme else (FMA, FMA_PAIR)
            table[f"{name}.{kind}"] = Operation(function, ("u16",) * count, ("u16",), one)
            table[f"{name}.{kind}x2"] = Operation(function, ("u32",) * count, ("u32",), two)
    return table


def _others() -> dict[str, Operation]:
    """Three-input extremes, approximations, flushing forms."""
    table = {"copysign.f32": Operation(_copysign, ("f32", "f32"), ("f32",), FMA)}
    for name, number, strict in (("max", np.fmax, np.maximum), ("min", np.fmin, np.minimum)):
        for nan, ftz in itertools.product((0, 1), (0, 1)):
            core = strict if nan else number
            mnemonic = f"{name}{'.ftz' if ftz else ''}{'.NaN' if nan else ''}.f32"
            function = functools.partial(_modified, core, bool(ftz), False)
            table[mnemonic] = Operation(function, ("f32", "f32"), ("f32",), EXTREME)
            three = functools.partial(_three, core, bool(ftz))
            table[f"three {mnemonic}"] = Operation(three, ("f32",) * 3, ("f32",), EXTREME)
    for name, function in (
        ("ex2.approx", np.exp2),
        ("lg2.approx", np.log2),
        ("rcp.approx", np.reciprocal),
        ("rcp.rn", np.reciprocal),
        ("sqrt.approx", np.sqrt),
        ("sqrt.rn", np.sqrt),
        ("rsqrt.approx", lambda x: (1 / np.sqrt(x.astype(np.float64))).astype(np.float32)),
        ("tanh.approx", np.tanh),
        ("sin.approx", np.sin),
        ("cos.approx", np.cos),
        ("neg", np.negative),
        ("abs", np.absolute),
    ):
        cost = EXTREME if name in ("neg", "abs") else special()
        for ftz in (False, True):
            one = functools.partial(_unary, function, ftz)
            table[f"{name}{'.ftz' if ftz else ''}.f32"] = Operation(one, ("f32",), ("f32",), cost)
    del table["tanh.approx.ftz.f32"]
    return table


OPERATIONS = _arithmetic() | _halves() | _others() | alu.OPERATIONS
"""`alu`'s own functions come first: they are faster."""
