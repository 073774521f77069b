"""Conversions beyond `alu`: directed rounding, saturation, relu, fp8, tf32, whole numbers."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import ml_dtypes
import numpy as np

from kernels.emulator.ptx.alu import CONVERT, Function, Operation
from kernels.emulator.ptx.alu_float import BF16, FP16
from kernels.emulator.subnormals import flush

_FP8: dict[str, Any] = {
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2),
}
_INTEGERS = {"u32": np.uint32, "s32": np.int32, "u64": np.uint64, "s64": np.int64}
_WHOLE = {"i": np.rint, "z": np.trunc, "m": np.floor, "p": np.ceil}


def _to_half(dtype: Any, toward_zero: bool, relu: bool, saturates: bool, a: np.ndarray) -> Any:
    """Bits of float32 values in a 16-bit type, in 32-bit words."""
    limit = np.float32(ml_dtypes.finfo(dtype).max)
    near = a.astype(dtype)
    if toward_zero:
        over = np.abs(near.astype(np.float32)) > np.abs(a)
        near = np.where(over, (near.view(np.uint16) - 1).astype(np.uint16).view(dtype), near)
    if saturates:
        near = np.where(np.abs(a) > limit, np.copysign(limit, a).astype(dtype), near)
    bits = near.view(np.uint16).astype(np.uint32)
    bits = np.where(np.isnan(a), np.uint32(0x7FFF), bits)
    if relu:
        bits = np.where(~np.isnan(a) & (bits >> 15 == 1), np.uint32(0), bits)
    return bits


def _half(convert: Function, a: np.ndarray, out: np.ndarray) -> None:
    out[...] = convert(a)


def _half_pair(convert: Function, high: np.ndarray, low: np.ndarray, out: np.ndarray) -> None:
    out[...] = convert(high) << np.uint32(16) | convert(low)


def _to_fp8(dtype: Any, relu: bool, a: np.ndarray) -> np.ndarray:
    """Bits of float32 values in an 8-bit type, the largest number for what is beyond it."""
    limit = np.float32(ml_dtypes.finfo(dtype).max)
    bits = np.clip(a, -limit, limit).astype(dtype).view(np.uint8).astype(np.uint16)
    bits = np.where(np.isnan(a), np.uint16(0x7F), bits)
    return np.where(~np.isnan(a) & (bits >> 7 == 1), np.uint16(0), bits) if relu else bits


def _fp8_pair(convert: Function, high: np.ndarray, low: np.ndarray, out: np.ndarray) -> None:
    out[...] = convert(high) << np.uint16(8) | convert(low)


def _fp8_of_halves(convert: Function, source: Any, a: np.ndarray, out: np.ndarray) -> None:
    values = a.view(np.uint16).reshape(*a.shape, 2).view(source).astype(np.float32)
    out[...] = convert(values[..., 1]) << np.uint16(8) | convert(values[..., 0])


def _halves_of_fp8(dtype: Any, to: Any, relu: bool, a: np.ndarray, out: np.ndarray) -> None:
    values = a.view(np.uint8).reshape(*a.shape, 2).view(dtype).astype(np.float32)
    values = np.where(values < 0, np.float32(0), values) if relu else values
    bits = values.astype(to).view(np.uint16)
    bits = np.where(np.isnan(values), np.uint16(0x7FFF), bits)
    out[...] = bits[..., 0].astype(np.uint32) | bits[..., 1].astype(np.uint32) << np.uint32(16)


def _to_tf32(mode: str, a: np.ndarray, out: np.ndarray) -> None:
    """cvt.{rna,rn,rz}.tf32.f32: ten bits of fraction remain."""
    bits = a.view(np.uint32)
    more = {"rna": 0x1000, "rn": 0xFFF, "rz": 0}[mode]
    tie = bits >> 13 & 1 if mode == "rn" else np.uint32(0)
    rounded = (bits + np.uint32(more) + tie) & np.uint32(0xFFFFE000)
    out[...] = np.where(np.isnan(a), np.uint32(0x7FFFFFFF), rounded)


def _to_integer(to: Any, whole: Function, ftz: bool, a: np.ndarray, out: np.ndarray) -> None:
    """Saturates; NaN is zero."""
    limits = np.iinfo(to)
    value = whole((flush(a) if ftz else a).astype(np.float64))
    low, high = float(limits.min), float(limits.max)
    inside = np.where(np.isnan(value) | (value < low) | (value >= high), 0, value).astype(to)
    inside = np.where(value >= high, limits.max, inside)
    out[...] = np.where(value < low, limits.min, inside).astype(to)


def _of_integer(mode: str, a: np.ndarray, out: np.ndarray) -> None:
    """cvt.{rz,rm,rp}.f32 of an integer"""
    near = a.astype(np.float32)
    # float32 to integer is exact; beyond the range only the next power of two occurs.
    wide = [[int(v) for v in row] for row in (near.reshape(-1), a.reshape(-1))]
    over = np.array([n > v for n, v in zip(*wide, strict=True)]).reshape(a.shape)
    under = np.array([n < v for n, v in zip(*wide, strict=True)]).reshape(a.shape)
    down = over if mode == "m" else over & (a > 0) if mode == "z" else np.zeros_like(over)
    up = under if mode == "p" else under & (a < 0) if mode == "z" else np.zeros_like(over)
    near = np.where(down, np.nextafter(near, np.float32(-np.inf)), near)
    out[...] = np.where(up, np.nextafter(near, np.float32(np.inf)), near)


def _whole(function: Function, ftz: bool, a: np.ndarray, out: np.ndarray) -> None:
    out[...] = function(flush(a) if ftz else a)


def _saturate(a: np.ndarray, out: np.ndarray) -> None:
    """cvt.sat.f32.f32"""
    out[...] = np.where(np.isnan(a), np.float32(0), np.clip(a, 0, 1))


def _flush(a: np.ndarray, out: np.ndarray) -> None:
    """cvt.ftz.f32.f32"""
    out[...] = flush(a)


def _operations() -> dict[str, Operation]:
    table = {
        "cvt.sat.f32.f32": Operation(_saturate, ("f32",), ("f32",), CONVERT),
        "cvt.ftz.f32.f32": Operation(_flush, ("f32",), ("f32",), CONVERT),
    }
    partial, flags = functools.partial, (False, True)
    for (name, dtype), zero, relu, sat in itertools.product(
        (("bf16", BF16), ("f16", FP16)), flags, flags, flags
    ):
        convert = partial(_to_half, dtype, zero, relu, sat)
        words = f"cvt.r{'z' if zero else 'n'}{'.relu' if relu else ''}{'.satfinite' if sat else ''}"
        table[f"{words}.{name}.f32"] = Operation(
            partial(_half, convert), ("f32",), ("u16",), CONVERT
        )
        pair = partial(_half_pair, convert)
        table[f"{words}.{name}x2.f32"] = Operation(pair, ("f32", "f32"), ("u32",), CONVERT)
    for (name, dtype), relu in itertools.product(_FP8.items(), flags):
        end, convert = ".relu" if relu else "", partial(_to_fp8, dtype, relu)
        words = f"cvt.rn.satfinite{end}.{name}x2"
        pair = partial(_fp8_pair, convert)
        table[f"{words}.f32"] = Operation(pair, ("f32", "f32"), ("u16",), CONVERT)
        of_halves = partial(_fp8_of_halves, convert, FP16)
        table[f"{words}.f16x2"] = Operation(of_halves, ("u32",), ("u16",), CONVERT)
        halves = partial(_halves_of_fp8, dtype, FP16, relu)
        table[f"cvt.rn{end}.f16x2.{name}x2"] = Operation(halves, ("u16",), ("u32",), CONVERT)
    for mode in ("rna", "rn", "rz"):
        table[f"cvt.{mode}.tf32.f32"] = Operation(
            partial(_to_tf32, mode), ("f32",), ("u32",), CONVERT
        )
    for (mode, function), ftz in itertools.product(_WHOLE.items(), flags):
        words = f"cvt.r{mode}i" if mode != "i" else "cvt.rni"
        words += ".ftz" if ftz else ""
        whole = partial(_whole, function, ftz)
        table[f"{words}.f32.f32"] = Operation(whole, ("f32",), ("f32",), CONVERT)
        for name, to in _INTEGERS.items():
            integer = partial(_to_integer, to, function, ftz)
            table[f"{words}.{name}.f32"] = Operation(integer, ("f32",), (name,), CONVERT)
    for mode, name in itertools.product("zmp", _INTEGERS):
        table[f"cvt.r{mode}.f32.{name}"] = Operation(
            partial(_of_integer, mode), (name,), ("f32",), CONVERT
        )
    return table


OPERATIONS = _operations()
