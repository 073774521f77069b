"""mbarrier, bar and fence instructions."""

from __future__ import annotations

import numpy as np

from kernels.emulator.barriers import NamedBarrier, TransactionBarrier, uniform
from kernels.emulator.memory import Fault
from kernels.emulator.program import LANES, Effect
from kernels.emulator.syntax import Instruction, Operand
from kernels.emulator.warp import (
    YIELD,
    Reader,
    Wait,
    Warp,
    Yield,
    address_reader,
    reader,
    write,
)

_NAMED_BARRIERS = 16


def bind(instruction: Instruction, symbols: dict[str, int]) -> Effect | None:
    """The effect of a synchronising instruction, or None if it is none."""
    words = instruction.words
    if words[0] == "mbarrier":
        return _mbarrier(instruction, symbols)
    if words[0] in ("bar", "barrier") and words[1] in ("sync", "arrive"):
        return _named(instruction, symbols)
    if words == ("fence", "mbarrier_init", "release", "cluster"):
        return _fence_init
    if instruction.mnemonic in ("fence.proxy.async.shared::cta", "fence.proxy.async"):
        return _fence_proxy
    return None


def barrier_at(warp: Warp, address: int, threads: np.ndarray) -> TransactionBarrier:
    """The mbarrier at an address, whose initialisation these threads must know of."""
    cta = warp.cta
    barrier = cta.barriers.get(address)
    if barrier is None:
        raise Fault("phase-misuse", f"no mbarrier was initialised at shared address {address:#x}")
    if cta.order is not None and (cta.order.clock[threads, barrier.slot] < 0).any():
        raise Fault("race", f"mbarrier {address:#x}: its initialisation may come later")
    return barrier


def _mbarrier(instruction: Instruction, symbols: dict[str, int]) -> Effect | None:
    words = [word for word in instruction.words if word not in ("shared", "shared:cta", "b64")]
    if words == ["mbarrier", "init"]:
        address_of = address_reader(instruction.operands[0], symbols)
        return _init(address_of, reader(instruction.operands[1], "u32", symbols))
    if words in (["mbarrier", "arrive"], ["mbarrier", "arrive", "expect_tx"]):
        count = reader(instruction.operands[2], "u32", symbols)
        address_of = address_reader(instruction.operands[1], symbols)
        return _arrive(address_of, count, expects=words[-1] == "expect_tx")
    if words == ["mbarrier", "try_wait", "parity"]:
        result, address, parity = instruction.operands[:3]
        return _TryWait(result, address_reader(address, symbols), reader(parity, "u32", symbols))
    return None


def _init(address_of: Reader, count_of: Reader) -> Effect:
    def effect(warp: Warp, mask: np.ndarray) -> None:
        cta, threads = warp.cta, warp.lanes[mask]
        addresses = address_of(warp)[mask]
        if len(addresses) != 1:
            raise Fault("phase-misuse", "several lanes initialise mbarriers at once")
        cta.shared.check(addresses, np.flatnonzero(mask), 8)
        address = int(addresses[0])
        if address in cta.barriers:
            raise Fault("phase-misuse", f"mbarrier {address:#x} is initialised twice")
        slot = 0
        if cta.order is not None:
            slot = cta.order.new_slot()
            cta.order.thread_writes(threads, addresses, 8)
            cta.order.clock[threads, slot] = 0
        cta.barriers[address] = TransactionBarrier(address, int(count_of(warp)[mask][0]), slot)

    return effect


def _arrive(address_of: Reader, amount_of: Reader, expects: bool) -> Effect:
    def effect(warp: Warp, mask: np.ndarray) -> Yield:
        threads = warp.lanes[mask]
        address = uniform(address_of(warp)[mask], "the mbarrier's address")
        barrier = barrier_at(warp, address, threads)
        cta = warp.cta
        amounts = amount_of(warp)[mask].astype(np.int64)
        if cta.order is not None:
            barrier.give(cta.order.release(threads))
        if expects:
            barrier.expect(int(amounts.sum()))
        barrier.arrive(len(amounts) if expects else int(amounts.sum()), f"warp {warp.index}")
        return YIELD

    return effect


class _TryWait:
    """mbarrier.try_wait.parity: the first attempt may fail, a retry blocks until it succeeds."""

    def __init__(self, result: Operand, address_of: Reader, parity_of: Reader):
        self._result, self._address_of, self._parity_of = result, address_of, parity_of

    def __call__(self, warp: Warp, mask: np.ndarray) -> Wait | Yield:
        threads = warp.lanes[mask]
        address = uniform(self._address_of(warp)[mask], "the mbarrier's address")
        parity = uniform(self._parity_of(warp)[mask], "the parity")
        if parity not in (0, 1):
            raise Fault("phase-misuse", f"mbarrier {address:#x}: parity {parity}")
        barrier = barrier_at(warp, address, threads)

        def succeed() -> None:
            warp.retrying = None
            order, knowledge = warp.cta.order, barrier.knowledge()
            if order is not None:
                order.see_phase(threads, barrier.slot, barrier.phase)
                if knowledge is not None:
                    order.acquire(threads, knowledge)
            write(warp, mask, self._result, "pred", True)

        if barrier.passed(parity):
            succeed()
            return YIELD
        if warp.retrying != (address, parity):
            warp.retrying = (address, parity)
            write(warp, mask, self._result, "pred", False)
            return YIELD
        return Wait(lambda: barrier.passed(parity), succeed, lambda: barrier.describe(parity))


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
        order = cta.order
        joined = barrier.arrive(
            warp.index, count, None if order is None else order.release(threads)
        )
        if not waits:
            return YIELD

        def passed() -> None:
            knowledge = barrier.published.get(joined)
            if order is not None and knowledge is not None:
                order.acquire(threads, knowledge)

        return Wait(lambda: barrier.generation > joined, passed, barrier.describe)

    return effect


def _fence_init(warp: Warp, mask: np.ndarray) -> None:
    order = warp.cta.order
    if order is not None:
        threads = warp.lanes[mask]
        for barrier in warp.cta.barriers.values():
            seen = order.clock[threads, barrier.slot]
            order.fenced[threads, barrier.slot] = np.maximum(
                order.fenced[threads, barrier.slot], seen
            )


def _fence_proxy(warp: Warp, mask: np.ndarray) -> None:
    if warp.cta.order is not None:
        warp.cta.order.fence_proxy(warp.lanes[mask])
