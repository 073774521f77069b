"""Matrices in the registers of one warp: ldmatrix, stmatrix, movmatrix and mma.sync.

Lane 4 g + t holds columns 2 t and 2 t + 1 of row g of an 8 x 8 matrix of 16-bit elements.
"""

from __future__ import annotations

import numpy as np

from kernels.emulator.access import elements
from kernels.emulator.memory import Fault
from kernels.emulator.program import LANES, Effect
from kernels.emulator.spaces import SHARED, parts
from kernels.emulator.syntax import Instruction, Operand
from kernels.emulator.warp import Reader, Warp, address_reader, reader, write

_COUNTS = {"x1": 1, "x2": 2, "x4": 4}
_ROW_BYTES = 16


def bind(instruction: Instruction, symbols: dict[str, int]) -> Effect | None:
    """The effect of a matrix instruction of one warp, or None if it is none."""
    words = instruction.words
    if words[0] in ("ldmatrix", "stmatrix") and words[1:4] == ("sync", "aligned", "m8n8"):
        return _move(instruction, symbols)
    if words == ("movmatrix", "sync", "aligned", "m8n8", "trans", "b16"):
        return _transpose(instruction, symbols)
    if words[:3] == ("mma", "sync", "aligned"):
        return _multiply(instruction, symbols)
    return None


def _converged(warp: Warp, mask: np.ndarray) -> None:
    if not mask.all():
        raise Fault("convergence", "some lanes of the warp are elsewhere")


def _move(instruction: Instruction, symbols: dict[str, int]) -> Effect | None:
    """ldmatrix, stmatrix: row r of matrix i lies at the address of lane 8 i + r."""
    words = set(instruction.words[4:-1])
    counts = words & _COUNTS.keys()
    if len(counts) != 1 or words - counts - {"trans", *SHARED} or instruction.words[-1] != "b16":
        return None
    loads = instruction.opcode == "ldmatrix"
    registers, address = instruction.operands if loads else instruction.operands[::-1]
    addresses_of, count = address_reader(address, symbols), _COUNTS[counts.pop()]
    named = elements(registers)
    if len(named) != count:
        return None
    transposed, lanes = "trans" in words, np.arange(LANES) < 8 * count
    if loads:
        return _load(named, addresses_of, lanes, transposed)
    return _store([reader(x, "u32", symbols) for x in named], addresses_of, lanes, transposed)


def _load(
    results: tuple[Operand, ...], addresses_of: Reader, lanes: np.ndarray, transposed: bool
) -> Effect:
    def effect(warp: Warp, mask: np.ndarray) -> None:
        _converged(warp, mask)
        (part,) = parts(warp, lanes, addresses_of(warp), "shared", _ROW_BYTES)
        part.reads(_ROW_BYTES)
        rows = part.region.load(part.addresses, 8, 2).view(np.uint16).reshape(-1, 8, 8)
        rows = rows.swapaxes(1, 2) if transposed else rows
        words = np.ascontiguousarray(rows).view(np.uint32).reshape(-1, LANES)
        for result, row in zip(results, words, strict=True):
            write(warp, mask, result, "u32", row)

    return effect


def _store(
    sources: list[Reader], addresses_of: Reader, lanes: np.ndarray, transposed: bool
) -> Effect:
    def effect(warp: Warp, mask: np.ndarray) -> None:
        _converged(warp, mask)
        (part,) = parts(warp, lanes, addresses_of(warp), "shared", _ROW_BYTES)
        part.writes(_ROW_BYTES)
        rows = np.stack([source(warp) for source in sources]).view(np.uint16).reshape(-1, 8, 8)
        rows = rows.swapaxes(1, 2) if transposed else rows
        words = np.ascontiguousarray(rows.reshape(-1, 8)).view(np.uint64)
        part.region.store(part.addresses, words)
        part.changed()

    return effect


def _transpose(instruction: Instruction, symbols: dict[str, int]) -> Effect:
    result, source = instruction.operands
    source_of = reader(source, "u32", symbols)

    def effect(warp: Warp, mask: np.ndarray) -> None:
        _converged(warp, mask)
        rows = np.ascontiguousarray(source_of(warp)).view(np.uint16).reshape(8, 8)
        write(warp, mask, result, "u32", np.ascontiguousarray(rows.T).view(np.uint32).reshape(-1))

    return effect


def _values(registers: np.ndarray, dtype: str) -> np.ndarray:
    """(registers, 32) words as (registers, 8, 8) float32 values of 8 x 8 matrices."""
    halves = np.ascontiguousarray(registers).view(np.uint16).reshape(-1, 8, 8)
    if dtype == "f16":
        return halves.view(np.float16).astype(np.float32)
    return (halves.astype(np.uint32) << 16).view(np.float32)


def _multiply(instruction: Instruction, symbols: dict[str, int]) -> Effect | None:
    """mma.sync: D = A B + C with 16 x 8 D, A by rows and B by columns, float32 sums."""
    shape, *layouts = instruction.words[3:-4]
    types = instruction.words[-4:]
    depth = {"m16n8k16": 2, "m16n8k8": 1}.get(shape)
    if depth is None or layouts != ["row", "col"] or types[1] != types[2]:
        return None
    if types not in (("f32", types[1], types[1], "f32"), ("f16", "f16", "f16", "f16")):
        return None
    if types[1] not in ("f16", "bf16"):
        return None
    results, *sources = (elements(operand) for operand in instruction.operands)
    halves = types[0] == "f16"
    sums = 2 if halves else 4
    if [len(x) for x in (results, *sources)] != [sums, 2 * depth, depth, sums]:
        return None
    read = [[reader(x, "u32", symbols) for x in operand] for operand in sources]

    def effect(warp: Warp, mask: np.ndarray) -> None:
        _converged(warp, mask)
        a, b, c = (np.stack([one(warp) for one in operand]) for operand in read)
        left = _values(a, types[1]).reshape(depth, 2, 8, 8).transpose(1, 2, 0, 3)
        right = _values(b, types[1]).transpose(1, 0, 2)
        product = left.reshape(16, 8 * depth) @ right.reshape(8, 8 * depth).T
        if halves:
            total = (product + _values(c, "f16").reshape(16, 8)).astype(np.float16)
            words = total.reshape(2, 8, 8).view(np.uint32).reshape(2, LANES)
        else:
            # Registers 2 i and 2 i + 1 hold the even and odd columns of eight rows.
            before = c.view(np.float32).reshape(2, 2, 8, 4).transpose(0, 2, 3, 1).reshape(16, 8)
            back = (product + before).reshape(2, 8, 4, 2).transpose(0, 3, 1, 2)
            words = np.ascontiguousarray(back, np.float32).view(np.uint32).reshape(4, LANES)
        for result, row in zip(results, words, strict=True):
            write(warp, mask, result, "u32", row)

    return effect
