"""shfl.sync, vote.sync and elect.sync: between the lanes of a warp."""

from __future__ import annotations

import numpy as np

from kernels.emulator.machine.warp import Warp, reader, write
from kernels.emulator.memory import Fault
from kernels.emulator.ptx.entries import Cost, Demand, Effect, Entry
from kernels.emulator.ptx.program import LANES
from kernels.emulator.ptx.syntax import Instruction, Pair, Register


def members(warp: Warp, mask: np.ndarray, member_mask: int) -> np.ndarray:
    """Lanes of a member mask; they must all be here."""
    wanted = (member_mask >> np.arange(LANES) & 1).astype(bool)
    missing = wanted & ~mask
    if missing.any():
        lane = int(np.argmax(missing))
        raise Fault("convergence", f"lane {lane} is in the member mask but not here", lane)
    return wanted


def uniform_mask(row: np.ndarray) -> int:
    """The member mask that all lanes give."""
    if (row != row[0]).any():
        raise Fault("convergence", "lanes give different member masks")
    return int(row[0])


def _shuffle(instruction: Instruction, symbols: dict[str, int]) -> Effect | None:
    mode = instruction.words[2]
    if instruction.words[-1] != "b32":
        return None
    if mode not in ("idx", "bfly", "up", "down"):
        raise Fault("not implemented", f"shfl.{mode}")
    target, *sources = instruction.operands
    second = target.second if isinstance(target, Pair) else None
    result = target.first if isinstance(target, Pair) else target
    value, position, control, mask_of = (reader(x, "u32", symbols) for x in sources)
    own = np.arange(LANES)

    def effect(warp: Warp, mask: np.ndarray) -> None:
        wanted = members(warp, mask, uniform_mask(mask_of(warp)))
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
        wanted = members(warp, mask, uniform_mask(member_mask(warp)))
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
        wanted = members(warp, mask, uniform_mask(member_mask(warp)))
        leader = int(np.argmax(wanted))
        if isinstance(result, Register):  # "_" if it is not wanted
            write(warp, mask, result, "u32", np.uint32(leader))
        write(warp, mask, elected, "pred", np.arange(LANES) == leader)

    return effect


ENTRIES = (
    Entry("shfl.sync.*", _shuffle, Cost("warp", Demand("shuffle"))),
    Entry("vote.sync.*", _vote, Cost("warp", Demand("alu"))),
    Entry("elect.sync", _elect, Cost("warp", Demand("alu"))),
)
