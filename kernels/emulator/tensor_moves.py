"""Loads and stores of tensor memory that a warp has issued and not waited for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from kernels.emulator.memory import Fault
from kernels.emulator.program import LANES, Run, Single, Step
from kernels.emulator.syntax import Register
from kernels.emulator.tensor_order import Rectangle

if TYPE_CHECKING:
    from kernels.emulator.warp import Warp


@dataclasses.dataclass
class Move:
    """An issued load or store. `perform` makes it."""

    rectangles: tuple[Rectangle, ...]
    registers: frozenset[Register]
    perform: Callable[[], None]
    made: bool = False


class Moves:
    """A warp's loads and stores that it has not waited for."""

    def __init__(self, warp: Warp):
        self._warp = warp
        self._loads: list[Move] = []
        self._stores: list[Move] = []
        self.registers: frozenset[Register] = frozenset()

    @property
    def outstanding(self) -> int:
        """How many there are."""
        return len(self._loads) + len(self._stores)

    def check_step(self, step: Step) -> None:
        """Faults if a step touches registers that a load may still write."""
        if not isinstance(step, Run | Single):
            return
        touched = self.registers & (step.reads | step.writes)
        if touched:
            names = ", ".join(sorted(register.name for register in touched)[:4])
            message = f"{names} are touched before tcgen05.wait::ld: a load may still write them"
            raise Fault("tensor-wait", message)

    def issue(self, move: Move, loads: bool) -> None:
        """Takes a load or a store."""
        (self._loads if loads else self._stores).append(move)
        if loads:
            self.registers |= move.registers
        if self._warp.cta.machine.early():
            _make(move)

    def wait_loads(self) -> None:
        """tcgen05.wait::ld"""
        for move in self._loads:
            _make(move)
        shadow = self._warp.cta.tensor.shadow
        if shadow is not None:
            for rectangle in _of(self._loads):
                shadow.thread_read_done(int(self._warp.lanes[0]) // LANES, rectangle)
        self._loads, self.registers = [], frozenset()

    def wait_stores(self) -> None:
        """tcgen05.wait::st"""
        for move in self._stores:
            _make(move)
        shadow = self._warp.cta.tensor.shadow
        if shadow is not None:
            for rectangle in _of(self._stores):
                shadow.thread_write_done(int(self._warp.lanes[0]) // LANES, rectangle)
        self._stores = []


def _make(move: Move) -> None:
    if not move.made:
        move.made = True
        move.perform()


def _of(moves: list[Move]) -> list[Rectangle]:
    return [rectangle for move in moves for rectangle in move.rectangles]
