"""barrier.cluster: arrivals and waits of all threads of a cluster."""

from __future__ import annotations

import numpy as np

from kernels.emulator.machine.trace import Arrived, Waited
from kernels.emulator.machine.warp import YIELD, Wait, Warp, Yield
from kernels.emulator.memory import Fault
from kernels.emulator.ptx.entries import SOURCES, Cost, Effect, Entry
from kernels.emulator.ptx.syntax import Instruction


def _barrier(instruction: Instruction, symbols: dict[str, int]) -> Effect | None:
    words = set(instruction.words[2:])
    aligned = "aligned" in words
    words -= {"aligned"}
    if words in ({"arrive"}, {"arrive", "release"}, {"arrive", "relaxed"}):
        return _arrive(aligned, relaxed="relaxed" in words)
    if words in ({"wait"}, {"wait", "acquire"}):
        return _wait(aligned)
    return None


def _converged(warp: Warp, mask: np.ndarray) -> None:
    if not (mask | warp.exited).all():
        raise Fault("convergence", "some lanes of the warp are elsewhere")


def _arrive(aligned: bool, relaxed: bool) -> Effect:
    def effect(warp: Warp, mask: np.ndarray) -> Yield:
        if aligned:
            _converged(warp, mask)
        threads, clocks, given = warp.lanes[mask], warp.cta.clocks, None
        barrier = warp.cta.cluster.barrier
        warp.note(Arrived(barrier, barrier.phase, warp.cta.rank))
        if clocks is not None:
            given = clocks.relaxed_release(threads) if relaxed else clocks.release(threads)
        barrier.arrive(threads, given)
        return YIELD

    return effect


def _wait(aligned: bool) -> Effect:
    def effect(warp: Warp, mask: np.ndarray) -> Wait:
        if aligned:
            _converged(warp, mask)
        threads, barrier = warp.lanes[mask], warp.cta.cluster.barrier
        phase = barrier.joined(threads)

        def finish() -> None:
            warp.note(Waited(barrier, phase))
            knowledge, clocks = barrier.passed(threads), warp.cta.clocks
            if clocks is not None:
                clocks.see_starts(threads)
                if knowledge is not None:
                    clocks.acquire(threads, knowledge)

        return Wait(lambda: barrier.phase > phase, finish, barrier.describe)

    return effect


ENTRIES = (Entry("barrier.cluster.*", _barrier, Cost("synchronisation", SOURCES)),)
