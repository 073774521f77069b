"""How a warp executes the steps of its program, up to its next synchronising instruction."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kernels.emulator.errors import EmulationError, Place
from kernels.emulator.machine.warp import Wait, Warp
from kernels.emulator.memory import Fault
from kernels.emulator.ptx.program import LANES, Branch, Exit, Run, Single
from kernels.emulator.ptx.syntax import Instruction

if TYPE_CHECKING:
    from kernels.emulator.machine.tally import Tally

STEPS_AT_ONCE = 5000
"""Steps of a warp that does not synchronise, before others run."""


def located(
    fault: Fault, warp: Warp, instruction: Instruction | None, lane: int | None = None
) -> EmulationError:
    """The error of a fault: it names the warp and, where they are known, instruction and lane."""
    where = (None, "") if instruction is None else (instruction.line, instruction.text)
    lane = lane if fault.lane is None else fault.lane
    kernel = warp.cta.machine.program.kernel.name
    place = Place(kernel, warp.cta.index, warp.index, lane, *where)
    return EmulationError(fault.rule, fault.message, place)


def execute(warp: Warp, tally: Tally) -> bool:
    """Executes steps until another warp may run; False if that takes more than STEPS_AT_ONCE.

    Raises:
      EmulationError: the kernel breaks a rule.
    """
    steps, moves, trace = warp.cta.machine.program.steps, warp.moves, warp.trace
    products = warp.products
    for _ in range(STEPS_AT_ONCE):
        warp.meet()
        number = warp.step
        if number >= len(steps):
            fault = Fault("control-flow", "runs past the last instruction")
            raise located(fault, warp, None)
        step = steps[number]
        tally.counts[number] += 1
        if trace is not None:
            trace.append(number)
        try:
            if moves.registers:
                moves.check_step(step)
            if isinstance(step, Run):
                products.check_step(step)
                products.unfenced.add(number)
                if warp.full:
                    step.full(warp)
                else:
                    tally.idle[number] += LANES - int(np.count_nonzero(warp.active))
                    step.masked(warp, warp.active)
                warp.step = number + 1
            elif isinstance(step, Branch):
                warp.split(_guarded(step.instruction, warp), step.target, step.meet)
            elif isinstance(step, Exit):
                _leave(warp, step)
                if warp.done:
                    return True
            elif _effect(warp, step, number, tally):
                return True
        except Fault as fault:
            instruction = step.instructions[0] if isinstance(step, Run) else step.instruction
            raise located(fault, warp, instruction) from None
    return False


def _effect(warp: Warp, step: Single, number: int, tally: Tally) -> bool:
    """Executes an instruction with an effect; True if another warp may run now."""
    mask = _guarded(step.instruction, warp)
    if mask is not warp.active or not warp.full:
        tally.idle[number] += LANES - int(np.count_nonzero(mask))
    warp.products.check_step(step)
    warp.products.unfenced.add(number)
    warp.step = number + 1
    if mask is not warp.active and not mask.any():
        return False
    outcome = step.effect(warp, mask)
    if isinstance(outcome, Wait):
        warp.waiting = outcome
    return outcome is not None


def _leave(warp: Warp, step: Exit) -> None:
    mask = _guarded(step.instruction, warp)
    if not mask.any():
        warp.step += 1
        return
    cta, threads = warp.cta, warp.lanes[mask]
    if warp.products.outstanding:
        raise Fault("outstanding", f"exits with {warp.products.outstanding} products in flight")
    if warp.moves.outstanding:
        raise Fault("outstanding", "exits before tcgen05.wait::ld or tcgen05.wait::st")
    for thread in threads:
        if cta.machine.policy.clean_exits and cta.unread(int(thread)):
            message = "exits before the sources of its bulk stores have been read"
            raise Fault("outstanding", message, int(thread) % LANES)
    for lane in np.flatnonzero(mask).tolist():
        if warp.copies.left(lane):
            message = "exits before its cp.async copies have been waited for"
            raise Fault("outstanding", message, lane)
    warp.leave(mask)
    cta.cluster.barrier.leave(threads)


def _guarded(instruction: Instruction, warp: Warp) -> np.ndarray:
    """The active lanes for which the instruction's guard holds."""
    if instruction.guard is None:
        return warp.active
    predicate, wanted = instruction.guard
    row = warp.pred[predicate.index]
    return warp.active & (row if wanted else ~row)
