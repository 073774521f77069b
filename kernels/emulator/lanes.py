"""Instructions between the lanes of a warp: shuffles, votes, election, register budgets."""

from __future__ import annotations

import numpy as np

from kernels.emulator.memory import Fault
from kernels.emulator.program import LANES, Effect
from kernels.emulator.syntax import Immediate, Instruction, Pair, Register
from kernels.emulator.warp import Wait, Warp, reader, write


def bind(instruction: Instruction, symbols: dict[str, int]) -> Effect | None:
    """The effect of a warp-level instruction, or None if it is none."""
    words = instruction.words
    if words[:2] == ("shfl", "sync") and words[-1] == "b32":
        return _shuffle(instruction, symbols)
    if words[:2] == ("vote", "sync"):
        return _vote(instruction, symbols)
    if words == ("elect", "sync"):
        return _elect(instruction, symbols)
    if words == ("bar", "warp", "sync"):
        return _warp_sync(instruction, symbols)
    if words[0] == "setmaxnreg":
        return _budget(instruction)
    return None


def members(warp: Warp, mask: np.ndarray, member_mask: int) -> np.ndarray:
    """Lanes of a member mask; they must all be here."""
    wanted = (member_mask >> np.arange(LANES) & 1).astype(bool)
    missing = wanted & ~mask
    if missing.any():
        lane = int(np.argmax(missing))
        raise Fault("convergence", f"lane {lane} is in the member mask but not here", lane)
    return wanted


def _uniform_mask(row: np.ndarray) -> int:
    if (row != row[0]).any():
        raise Fault("convergence", "lanes give different member masks")
    return int(row[0])


def _shuffle(instruction: Instruction, symbols: dict[str, int]) -> Effect:
    mode = instruction.words[2]
    if mode not in ("idx", "bfly", "up", "down"):
        raise Fault("not implemented", f"shfl.{mode}")
    target, *sources = instruction.operands
    second = target.second if isinstance(target, Pair) else None
    result = target.first if isinstance(target, Pair) else target
    value, position, control, mask_of = (reader(x, "u32", symbols) for x in sources)
    own = np.arange(LANES)

    def effect(warp: Warp, mask: np.ndarray) -> None:
        wanted = members(warp, mask, _uniform_mask(mask_of(warp)))
        controls = control(warp).astype(np.int64)
        clamp, segment = controls & 31, controls >> 8 & 31
        step = position(warp).astype(np.int64) & 31
        least, most = own & segment, (own & segment) | (clamp & ~segment)
        if mode == "idx":
            source = least | (step & ~segment)
            valid = source <= most
        elif mode == "bfly":
            source = own ^ step
            valid = source <= most
        elif mode == "up":
            source = own - step
            valid = source >= most
        else:
            source = own + step
            valid = source <= most
        source = np.where(valid, source, own)
        absent = mask & ~wanted[source]
        if absent.any():
            lane = int(np.argmax(absent))
            raise Fault("convergence", f"reads lane {source[lane]}, which takes no part", lane)
        write(warp, mask, result, "u32", value(warp)[source])
        if second is not None:
            write(warp, mask, second, "pred", valid)

    return effect


def _vote(instruction: Instruction, symbols: dict[str, int]) -> Effect | None:
    mode = instruction.words[2]
    if mode not in ("any", "all", "ballot", "uni"):
        return None
    result, predicate, mask_of = instruction.operands
    source, member_mask = reader(predicate, "pred", symbols), reader(mask_of, "u32", symbols)

    def effect(warp: Warp, mask: np.ndarray) -> None:
        wanted = members(warp, mask, _uniform_mask(member_mask(warp)))
        votes = source(warp)[wanted]
        if mode == "ballot":
            bits = int((source(warp) & wanted) @ (1 << np.arange(LANES)))
            write(warp, mask, result, "u32", np.uint32(bits))
            return
        answers = {"any": votes.any(), "all": votes.all(), "uni": votes.all() or not votes.any()}
        write(warp, mask, result, "pred", bool(answers[mode]))

    return effect


def _elect(instruction: Instruction, symbols: dict[str, int]) -> Effect:
    target, mask_of = instruction.operands
    assert isinstance(target, Pair)
    member_mask, result, elected = reader(mask_of, "u32", symbols), target.first, target.second

    def effect(warp: Warp, mask: np.ndarray) -> None:
        wanted = members(warp, mask, _uniform_mask(member_mask(warp)))
        leader = int(np.argmax(wanted))
        if isinstance(result, Register):  # "_" if it is not wanted
            write(warp, mask, result, "u32", np.uint32(leader))
        write(warp, mask, elected, "pred", np.arange(LANES) == leader)

    return effect


def _warp_sync(instruction: Instruction, symbols: dict[str, int]) -> Effect:
    member_mask = reader(instruction.operands[0], "u32", symbols)

    def effect(warp: Warp, mask: np.ndarray) -> None:
        wanted = members(warp, mask, _uniform_mask(member_mask(warp)))
        threads = warp.lanes[wanted]
        if warp.cta.order is not None:
            warp.cta.order.acquire(threads, warp.cta.order.release(threads))

    return effect


def _budget(instruction: Instruction) -> Effect:
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
