"""Between the CTAs of a cluster: mapa, getctarank, barrier.cluster."""

from __future__ import annotations

import numpy as np

from kernels.emulator.cta import OFFSET_MASK, RANK_SHIFT
from kernels.emulator.memory import Fault
from kernels.emulator.program import SHARED_WINDOW, Effect
from kernels.emulator.syntax import Address, Instruction, Operand, Register
from kernels.emulator.warp import YIELD, Reader, Wait, Warp, Yield, address_reader, reader, write


def bind(instruction: Instruction, symbols: dict[str, int]) -> Effect | None:
    """The effect of an instruction between CTAs of a cluster, or None if it is none."""
    words = instruction.words
    if words[0] == "mapa":
        return _map(instruction, symbols)
    if words[0] == "getctarank":
        return _rank(instruction, symbols)
    if words[:2] == ("barrier", "cluster"):
        return _barrier(instruction)
    return None


def _address(operand: Operand, symbols: dict[str, int]) -> Reader:
    return address_reader(operand if isinstance(operand, Address) else Address(operand), symbols)


def _map(instruction: Instruction, symbols: dict[str, int]) -> Effect | None:
    """mapa: the same place in the shared memory of the CTA of a rank."""
    words, (result, source, rank) = instruction.words, instruction.operands
    if words[1:-1] not in ((), ("shared:cluster",)):
        return None
    window = SHARED_WINDOW if len(words) == 2 else 0
    view = words[-1]
    address_of, rank_of = _address(source, symbols), reader(rank, "u32", symbols)

    def effect(warp: Warp, mask: np.ndarray) -> None:
        ranks, count = rank_of(warp).astype(np.int64), len(warp.cta.cluster.ctas)
        wrong = mask & (ranks >= count)
        if wrong.any():
            lane = int(np.argmax(wrong))
            message = f"mapa to rank {ranks[lane]} of a cluster of {count} CTAs"
            raise Fault("out-of-bounds", message, lane)
        addresses = address_of(warp) - window
        value = (addresses & OFFSET_MASK) + (ranks << RANK_SHIFT) + window
        write(warp, mask, result, view, value.astype(f"u{int(view[1:]) // 8}"))

    return effect


def _rank(instruction: Instruction, symbols: dict[str, int]) -> Effect | None:
    """getctarank: the rank of the CTA whose shared memory holds an address."""
    words, (result, source) = instruction.words, instruction.operands
    if words[1:-1] not in ((), ("shared:cluster",)):
        return None
    address_of = _address(source, symbols)
    window = SHARED_WINDOW if len(words) == 2 else 0

    def effect(warp: Warp, mask: np.ndarray) -> None:
        ranks = (address_of(warp) - window) >> RANK_SHIFT
        assert isinstance(result, Register)
        write(warp, mask, result, "u32", ranks.astype(np.uint32))

    return effect


def _barrier(instruction: Instruction) -> Effect | None:
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
        threads, order, given = warp.lanes[mask], warp.cta.order, None
        barrier = warp.cta.cluster.barrier
        warp.note("arrive", barrier, barrier.phase)
        if order is not None:
            given = order.relaxed_release(threads) if relaxed else order.release(threads)
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
            warp.note("wait", barrier, phase)
            knowledge, order = barrier.passed(threads), warp.cta.order
            if order is not None:
                order.started(threads)
                if knowledge is not None:
                    order.acquire(threads, knowledge)

        return Wait(lambda: barrier.phase > phase, finish, barrier.describe)

    return effect
