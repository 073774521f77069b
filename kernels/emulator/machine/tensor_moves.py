"""Loads and stores of tensor memory that a warp has issued and not waited for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from kernels.emulator.memory import Fault
from kernels.emulator.order.tensor_memory import Rectangle
from kernels.emulator.ptx.program import LANES, Run, Single, Step
from kernels.emulator.ptx.syntax import Immediate, Instruction, Operand, Register, Vector, registers

if TYPE_CHECKING:
    from kernels.emulator.machine.warp import Warp


@dataclasses.dataclass
class Move:
    """An issued load or store, which `perform` carries out."""

    rectangles: tuple[Rectangle, ...]
    registers: frozenset[Register]
    perform: Callable[[], None]
    performed: bool = False


class Moves:
    """A warp's loads and stores that it has not waited for."""

    def __init__(self, warp: Warp):
        self._warp = warp
        self._loads: list[Move] = []
        self._stores: list[Move] = []
        self.registers: frozenset[Register] = frozenset()
        self._copies: list[tuple[Instruction, np.ndarray]] = []
        self._moved: dict[
            tuple[int, frozenset[Register]], tuple[list[Instruction], frozenset[Register]]
        ] = {}

    @property
    def outstanding(self) -> int:
        """How many there are."""
        return len(self._loads) + len(self._stores)

    def check_step(self, step: Step) -> None:
        """Faults if a step uses registers that a load may still write.

        A mov does not count: compilers pair registers before the wait. Its result waits, too.
        """
        if not isinstance(step, Run | Single) or self.registers.isdisjoint(
            step.reads | step.writes
        ):
            return
        key = (id(step), self.registers)
        if key not in self._moved:
            try:
                self._moved[key] = _moved(step, self.registers)
            except Fault:
                if self._warp.cta.machine.policy.tensor_load_waits:
                    raise
                self.wait_loads()
                return
        copies, self.registers = self._moved[key]
        self._copies += [(copy, self._warp.active) for copy in copies]

    def issue(self, move: Move, loads: bool) -> None:
        """Accepts a load or a store."""
        (self._loads if loads else self._stores).append(move)
        if loads:
            self.registers |= move.registers
        if self._warp.cta.machine.early():
            _perform(move)

    def wait_loads(self) -> None:
        """tcgen05.wait::ld"""
        for move in self._loads:
            _perform(move)
        shadow = self._warp.cta.tensor.shadow
        if shadow is not None:
            for rectangle in _of(self._loads):
                shadow.thread_read_done(int(self._warp.lanes[0]) // LANES, rectangle)
        for copy, mask in self._copies:
            _copy(self._warp, copy, mask)
        self._loads, self._copies, self.registers = [], [], frozenset()
        self._join()

    def wait_stores(self) -> None:
        """tcgen05.wait::st"""
        for move in self._stores:
            _perform(move)
        shadow = self._warp.cta.tensor.shadow
        if shadow is not None:
            for rectangle in _of(self._stores):
                shadow.thread_write_done(int(self._warp.lanes[0]) // LANES, rectangle)
        self._stores = []
        self._join()

    def _join(self) -> None:
        """Orders the lanes among each other if the policy makes the wait a barrier of the warp."""
        cta = self._warp.cta
        if cta.clocks is not None and not cta.machine.policy.tensor_lanes:
            threads = self._warp.lanes
            cta.clocks.acquire(threads, cta.clocks.release(threads))


def _moved(
    step: Run | Single, waiting: frozenset[Register]
) -> tuple[list[Instruction], frozenset[Register]]:
    """The moves in a step of registers that wait, and all registers that wait after it."""
    copies = []
    for instruction in step.instructions if isinstance(step, Run) else (step.instruction,):
        named = [frozenset(registers(operand)) for operand in instruction.operands]
        touched = waiting & frozenset[Register]().union(*named)
        if not touched:
            continue
        if instruction.opcode != "mov" or instruction.guard is not None or touched & named[0]:
            names = ", ".join(sorted(register.name for register in touched)[:4])
            raise Fault(
                "tensor-wait",
                f"line {instruction.line} ({instruction.text}) uses {names} before "
                "tcgen05.wait::ld: a load may still write them",
            )
        copies.append(instruction)
        waiting |= named[0]
    return copies, waiting


def _copy(warp: Warp, instruction: Instruction, mask: np.ndarray) -> None:
    """A mov, with one or two registers on either side, once the source is there."""
    target, source = instruction.operands
    bits = _bits(warp, source)
    parts = target.elements if isinstance(target, Vector) else (target,)
    width = 8 * bits.dtype.itemsize // len(parts)
    for i, part in enumerate(parts):
        if isinstance(part, Register):
            piece = bits >> bits.dtype.type(width * i)
            np.copyto(getattr(warp, f"u{width}")[part.index], piece, "unsafe", where=mask)


def _bits(warp: Warp, operand: Operand) -> np.ndarray:
    if isinstance(operand, Register):
        return getattr(warp, f"u{operand.bank[1:]}")[operand.index]
    assert isinstance(operand, Vector)
    low, high = operand.elements
    width = next(int(r.bank[1:]) for r in (low, high) if isinstance(r, Register))
    wide = np.dtype(f"u{width // 4}").type
    halves = []
    for half in (low, high):
        if isinstance(half, Register):
            halves.append(getattr(warp, f"u{width}")[half.index].astype(wide))
        else:
            assert isinstance(half, Immediate)
            halves.append(wide(half.value & ((1 << width) - 1)))
    return halves[0] | halves[1] << wide(width)


def _perform(move: Move) -> None:
    if not move.performed:
        move.performed = True
        move.perform()


def _of(moves: list[Move]) -> list[Rectangle]:
    return [rectangle for move in moves for rectangle in move.rectangles]
