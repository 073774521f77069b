"""bar.sync, bar.arrive and bar.warp.sync: barriers of a CTA and of a warp."""

from __future__ import annotations

import numpy as np

from kernels.emulator.instructions.shfl_vote_elect import members, uniform_mask
from kernels.emulator.machine.barriers import NamedBarrier, uniform
from kernels.emulator.machine.trace import Met
from kernels.emulator.machine.warp import YIELD, Wait, Warp, Yield, reader
from kernels.emulator.memory import Fault
from kernels.emulator.ptx.entries import SOURCES, Cost, Effect, Entry
from kernels.emulator.ptx.program import LANES
from kernels.emulator.ptx.syntax import Instruction

_NAMED_BARRIERS = 16


def _warp_sync(instruction: Instruction, symbols: dict[str, int]) -> Effect:
    member_mask = reader(instruction.operands[0], "u32", symbols)

    def effect(warp: Warp, mask: np.ndarray) -> None:
        wanted = members(warp, mask, uniform_mask(member_mask(warp)))
        threads = warp.lanes[wanted]
        if warp.cta.clocks is not None:
            warp.cta.clocks.acquire(threads, warp.cta.clocks.release(threads))

    return effect


def _named(instruction: Instruction, symbols: dict[str, int]) -> Effect:
    number_of = reader(instruction.operands[0], "u32", symbols)
    counted = len(instruction.operands) > 1
    count_of = reader(instruction.operands[1], "u32", symbols) if counted else None
    waits = instruction.words[1] == "sync"

    def effect(warp: Warp, mask: np.ndarray) -> Wait | Yield:
        cta, threads = warp.cta, warp.lanes
        if not (mask | warp.exited).all():
            raise Fault("convergence", "some lanes of the warp are elsewhere")
        number = uniform(number_of(warp), "the barrier's number")
        count = cta.machine.threads
        if count_of is not None:
            count = uniform(count_of(warp), "the number of threads")
        if not 0 <= number < _NAMED_BARRIERS or count % LANES or not count:
            raise Fault("participants", f"barrier {number} of {count} threads")
        barrier = cta.named.setdefault(number, NamedBarrier(number))
        clocks = cta.clocks
        joined = barrier.arrive(
            warp.index,
            count,
            waits,
            None if clocks is None else clocks.release(threads),
            instruction.line if waits and cta.machine.policy.one_place else None,
        )
        warp.note(Met(barrier, joined, waits))
        if not waits:
            return YIELD

        def passed() -> None:
            knowledge = barrier.published.get(joined)
            if clocks is not None and knowledge is not None:
                clocks.acquire(threads, knowledge)

        return Wait(lambda: barrier.generation > joined, passed, barrier.describe)

    return effect


_SYNC = Cost("synchronisation", SOURCES, per_warp={"named_barrier_waits": 1})
_ARRIVE = Cost("synchronisation", SOURCES)

ENTRIES = (
    Entry("bar.sync.*", _named, _SYNC),
    Entry("barrier.sync.*", _named, _SYNC),
    Entry("bar.arrive.*", _named, _ARRIVE),
    Entry("barrier.arrive.*", _named, _ARRIVE),
    Entry("bar.warp.sync", _warp_sync, Cost("synchronisation", SOURCES)),
)
