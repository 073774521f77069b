"""griddepcontrol and nanosleep: waits that nothing in one launch ends."""

from __future__ import annotations

import numpy as np

from kernels.emulator.machine.warp import YIELD, Warp, Yield
from kernels.emulator.ptx.program import Effect
from kernels.emulator.ptx.syntax import Instruction


def bind(instruction: Instruction, symbols: dict[str, int]) -> Effect | None:
    """The effect of griddepcontrol or nanosleep, or None if it is none."""
    words = instruction.words
    if words[0] == "griddepcontrol" and words[1:] in (("wait",), ("launch_dependents",)):
        return _nothing
    if words == ("nanosleep", "u32"):
        return _sleep
    return None


def _nothing(warp: Warp, mask: np.ndarray) -> None:
    """griddepcontrol: in one launch there is no other grid to wait for or to let start."""


def _sleep(warp: Warp, mask: np.ndarray) -> Yield:
    return YIELD
