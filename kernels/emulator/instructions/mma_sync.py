"""mma.sync: products of small matrices in the registers of one warp; see `ldmatrix`."""

from __future__ import annotations

import numpy as np

from kernels.emulator.instructions.ld_st import elements
from kernels.emulator.instructions.ldmatrix import converged
from kernels.emulator.machine.warp import Warp, reader, write
from kernels.emulator.products import matrix_product
from kernels.emulator.ptx.entries import UNKNOWN, Cost, Effect, Entry
from kernels.emulator.ptx.program import LANES
from kernels.emulator.ptx.syntax import Instruction


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
        converged(warp, mask)
        a, b, c = (np.stack([one(warp) for one in operand]) for operand in read)
        left = _values(a, types[1]).reshape(depth, 2, 8, 8).transpose(1, 2, 0, 3)
        right = _values(b, types[1]).transpose(1, 0, 2)
        update = matrix_product(left.reshape(16, 8 * depth), right.reshape(8, 8 * depth))
        if halves:
            total = (update + _values(c, "f16").reshape(16, 8)).astype(np.float16)
            words = total.reshape(2, 8, 8).view(np.uint32).reshape(2, LANES)
        else:
            # Registers 2 i and 2 i + 1 hold the even and odd columns of eight rows.
            before = c.view(np.float32).reshape(2, 2, 8, 4).transpose(0, 2, 3, 1).reshape(16, 8)
            back = (update + before).reshape(2, 8, 4, 2).transpose(0, 3, 1, 2)
            words = np.ascontiguousarray(back, np.float32).view(np.uint32).reshape(4, LANES)
        for result, row in zip(results, words, strict=True):
            write(warp, mask, result, "u32", row)

    return effect


ENTRIES = (Entry("mma.sync.aligned.*", _multiply, Cost("other", UNKNOWN)),)
