"""setmaxnreg: registers that warps of a CTA hand to each other."""

from __future__ import annotations

import numpy as np

from kernels.emulator.instructions.shfl_vote_elect import members
from kernels.emulator.machine.warp import Wait, Warp
from kernels.emulator.memory import Fault
from kernels.emulator.ptx.entries import CONTROL, Effect, Entry
from kernels.emulator.ptx.program import LANES
from kernels.emulator.ptx.syntax import Immediate, Instruction


def _budget(instruction: Instruction, symbols: dict[str, int]) -> Effect:
    """setmaxnreg: registers go back to the CTA's pool, or come from it once it holds enough."""
    (count,) = instruction.operands
    assert isinstance(count, Immediate)
    wanted, grows = count.value, instruction.words[1] == "inc"
    if wanted % 8 or not 24 <= wanted <= 256:
        raise Fault("registers", f"setmaxnreg {wanted}: a multiple of 8 from 24 to 256 is expected")

    def effect(warp: Warp, mask: np.ndarray) -> Wait | None:
        members(warp, mask | warp.exited, -1)
        cta = warp.cta
        change = (wanted - cta.register_budget[warp.index]) * LANES
        if (change > 0) != grows and change:
            held = cta.register_budget[warp.index]
            raise Fault("registers", f"setmaxnreg.{instruction.words[1]} {wanted} from {held}")

        def take() -> None:
            cta.free_registers -= change
            cta.register_budget[warp.index] = wanted

        if change <= cta.free_registers:
            take()
            return None
        return Wait(
            lambda: change <= cta.free_registers,
            take,
            lambda: f"{change} registers, of which {cta.free_registers} are free",
        )

    return effect


ENTRIES = (Entry("setmaxnreg.*", _budget, CONTROL),)
