"""Bits of integers: fields, permutations, funnel shifts, counts, three-input logic."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from kernels.emulator.ptx.alu import Operation, integer


def _permute(a: np.ndarray, b: np.ndarray, selector: np.ndarray, out: np.ndarray) -> None:
    """prmt: each byte of the result is one of the eight of b:a, or its sign eight times."""
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    result = np.zeros_like(out)
    for place in range(4):
        nibble = selector >> np.uint32(4 * place) & np.uint32(15)
        byte = (both >> (nibble & np.uint32(7)).astype(np.uint64) * np.uint64(8)).astype(np.uint32)
        byte = byte & np.uint32(0xFF)
        byte = np.where(nibble & 8, np.where(byte & 0x80, 0xFF, 0), byte).astype(np.uint32)
        result |= byte << np.uint32(8 * place)
    out[...] = result


def _three_input(a: Any, b: Any, c: Any, table: np.ndarray, out: np.ndarray) -> None:
    """lop3: bit 4 a + 2 b + c of the table, for every bit."""
    result = np.zeros_like(out)
    for case in range(8):
        chosen = (a if case & 4 else ~a) & (b if case & 2 else ~b) & (c if case & 1 else ~c)
        result |= np.where(table >> np.uint32(case) & np.uint32(1), chosen, 0).astype(out.dtype)
    out[...] = result


def _extract(a: np.ndarray, first: np.ndarray, count: np.ndarray, out: np.ndarray) -> None:
    """bfe: a field of bits; of a signed one the last bit fills the rest."""
    width, signed = 8 * a.dtype.itemsize, a.dtype.kind == "i"
    start, length = (first & 0xFF).astype(np.int64), (count & 0xFF).astype(np.int64)
    place = np.arange(width)
    bits = (a[..., None].astype(f"u{a.dtype.itemsize}") >> place.astype(f"u{a.dtype.itemsize}")) & 1
    sign_at = np.minimum(start + length - 1, width - 1)
    sign = np.take_along_axis(bits, np.maximum(sign_at, 0)[..., None], -1)[..., 0]
    fill = np.where(length > 0, sign, 0) if signed else np.zeros_like(sign)
    source = np.minimum(place + start[..., None], width - 1)
    inside = (place < length[..., None]) & (place + start[..., None] < width)
    chosen = np.where(inside, np.take_along_axis(bits, source, -1), fill[..., None])
    out[...] = _number(chosen).astype(f"u{a.dtype.itemsize}").view(a.dtype)


def _number(bits: np.ndarray) -> np.ndarray:
    weights = np.uint64(1) << np.arange(bits.shape[-1], dtype=np.uint64)
    return (bits.astype(np.uint64) * weights).sum(-1, dtype=np.uint64)


def _insert(a: Any, b: Any, first: np.ndarray, count: np.ndarray, out: np.ndarray) -> None:
    """bfi: low bits of a over a field of b"""
    width = 8 * out.dtype.itemsize
    start, length = (first & 0xFF).astype(np.int64), (count & 0xFF).astype(np.int64)
    place = np.arange(width)
    inside = (place >= start[..., None]) & (place < (start + length)[..., None])
    mask = _number(inside).astype(out.dtype)
    shift = np.minimum(start, width - 1).astype(out.dtype)
    moved = np.where(start < width, a << shift, out.dtype.type(0))
    out[...] = (moved & mask) | (b & ~mask)


def _funnel(left: bool, wrap: bool, a: Any, b: Any, count: np.ndarray, out: np.ndarray) -> None:
    """shf: the upper (left) or lower half of b:a, shifted"""
    amount = (count & 31 if wrap else np.minimum(count, 32)).astype(np.uint64)
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    if left:
        upper = (both << amount) >> np.uint64(32)
        out[...] = upper.astype(np.uint32)
    else:
        out[...] = (both >> amount).astype(np.uint32)


def _count(a: np.ndarray, out: np.ndarray) -> None:
    """popc"""
    out[...] = np.bitwise_count(a)


def _highest(a: np.ndarray) -> np.ndarray:
    """Place of the highest bit that is set, -1 if none is."""
    width = 8 * a.dtype.itemsize
    bits = a[..., None] >> np.arange(width, dtype=a.dtype) & a.dtype.type(1)
    return np.where(bits.any(-1), width - 1 - np.argmax(bits[..., ::-1], -1), -1)


def _leading(a: np.ndarray, out: np.ndarray) -> None:
    """clz"""
    out[...] = 8 * a.dtype.itemsize - 1 - _highest(a)


def _find(shift: bool, a: np.ndarray, out: np.ndarray) -> None:
    """bfind: the highest bit that differs from the sign, or how far it is from the top"""
    width = 8 * a.dtype.itemsize
    plain = a if a.dtype.kind == "u" else np.where(a < 0, ~a, a).view(f"u{a.dtype.itemsize}")
    place = _highest(plain)
    place = np.where(place < 0, -1, width - 1 - place) if shift else place
    out[...] = place.astype(np.int32).view(np.uint32)


def _reverse(a: np.ndarray, out: np.ndarray) -> None:
    """brev"""
    width = 8 * a.dtype.itemsize
    bits = a[..., None] >> np.arange(width, dtype=a.dtype) & a.dtype.type(1)
    out[...] = _number(bits[..., ::-1]).astype(a.dtype)


def _operations() -> dict[str, Operation]:
    word = ("u32",)
    table = {
        "prmt.b32": Operation(_permute, word * 3, word, integer(32)),
        "lop3.b32": Operation(_three_input, word * 4, word, integer(32)),
    }
    for direction, mode in ((d, m) for d in "lr" for m in ("wrap", "clamp")):
        function = functools.partial(_funnel, direction == "l", mode == "wrap")
        table[f"shf.{direction}.{mode}.b32"] = Operation(function, word * 3, word, integer(32))
    for bits in ("32", "64"):
        whole, cost = (f"u{bits}",), integer(bits)
        table[f"bfi.b{bits}"] = Operation(_insert, whole * 2 + word * 2, whole, cost)
        table[f"popc.b{bits}"] = Operation(_count, whole, word, cost)
        table[f"clz.b{bits}"] = Operation(_leading, whole, word, cost)
        table[f"brev.b{bits}"] = Operation(_reverse, whole, whole, cost)
        for kind in "us":
            view = (f"{kind}{bits}",)
            table[f"bfe.{kind}{bits}"] = Operation(_extract, view + word * 2, view, cost)
            find = functools.partial(_find, False)
            table[f"bfind.{kind}{bits}"] = Operation(find, view, word, cost)
            far = functools.partial(_find, True)
            table[f"bfind.shiftamt.{kind}{bits}"] = Operation(far, view, word, cost)
    return table


OPERATIONS = _operations()
