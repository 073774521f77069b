"""mov from clocks and of 128 bits, which the table of arithmetic does not hold."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kernels.emulator.machine.warp import Warp, reader, write
from kernels.emulator.ptx.entries import FREE, Cost, Effect, Entry
from kernels.emulator.ptx.program import VOLATILE
from kernels.emulator.ptx.syntax import Instruction, Register, SpecialRegister, Vector

_LOW = (1 << 32) - 1
_READ: dict[str, Callable[[Warp], int]] = {
    "%clock": lambda warp: warp.cta.machine.clock() & _LOW,
    "%clock_hi": lambda warp: warp.cta.machine.clock() >> 32,
    "%clock64": lambda warp: warp.cta.machine.clock(),
    "%globaltimer": lambda warp: warp.cta.machine.clock(),
    "%globaltimer_lo": lambda warp: warp.cta.machine.clock() & _LOW,
    "%globaltimer_hi": lambda warp: warp.cta.machine.clock() >> 32,
}
assert set(_READ) == VOLATILE


def _clock(instruction: Instruction, symbols: dict[str, int]) -> Effect | None:
    result, source = instruction.operands
    if not isinstance(source, SpecialRegister) or source.name not in _READ:
        return None
    if not isinstance(result, Register):
        return None
    read, view = _READ[source.name], f"u{result.bank[1:]}"

    def effect(warp: Warp, mask: np.ndarray) -> None:
        value = np.array(read(warp), np.uint64).astype(f"u{int(view[1:]) // 8}")
        write(warp, mask, result, view, value)

    return effect


def _move(instruction: Instruction, symbols: dict[str, int]) -> Effect | None:
    """mov.b128 between a register and its two halves, low first."""
    target, source = instruction.operands
    if isinstance(target, Register) and isinstance(source, Vector):
        halves = [reader(x, "u64") for x in source.elements]
        index = target.index

        def pack(warp: Warp, mask: np.ndarray) -> None:
            warp.b128[index][mask] = np.stack([half(warp) for half in halves], 1)[mask]

        return pack if target.bank == "b128" and len(halves) == 2 else None
    if not isinstance(source, Register) or source.bank != "b128":
        return None
    index = source.index
    if isinstance(target, Vector) and len(target.elements) == 2:
        low, high = target.elements

        def unpack(warp: Warp, mask: np.ndarray) -> None:
            write(warp, mask, low, "u64", warp.b128[index][:, 0])
            write(warp, mask, high, "u64", warp.b128[index][:, 1])

        return unpack
    return None


ENTRIES = (
    Entry("mov.*", _clock, Cost("move", FREE)),
    Entry("mov.b128", _move, Cost("move", FREE)),
)
