"""mbarrier: initialisation, arrivals, transactions and waits."""

from __future__ import annotations

import numpy as np

from kernels.emulator.machine.barriers import TransactionBarrier, uniform
from kernels.emulator.machine.cta import RANK_SHIFT
from kernels.emulator.machine.trace import Arrived, Waited
from kernels.emulator.machine.warp import (
    YIELD,
    Reader,
    Wait,
    Warp,
    Yield,
    address_reader,
    reader,
    write,
)
from kernels.emulator.memory import Fault
from kernels.emulator.ptx.entries import SOURCES, Cost, Effect, Entry
from kernels.emulator.ptx.syntax import Immediate, Instruction, Operand, Register

_ATTEMPTS = 8
_SEMANTICS = {"shared", "shared:cta", "shared:cluster", "b64"} | {
    "release",
    "acquire",
    "relaxed",
    "cta",
    "cluster",
}


def barrier_at(warp: Warp, address: int, threads: np.ndarray) -> TransactionBarrier:
    """The mbarrier at a shared::cluster address, whose initialisation these threads must know."""
    barrier = warp.cta.barriers.get(address)
    if barrier is None:
        home = warp.cta.cluster.holding(address)
        if home is not warp.cta and home.order is not None:
            home.order.check_started(threads)
        barrier = home.barriers.get(address)
    if barrier is None:
        raise Fault("phase-misuse", f"no mbarrier was initialised at shared address {address:#x}")
    clocks = warp.cta.clocks
    if clocks is not None and (clocks.clock[threads, barrier.slot] < 0).any():
        raise Fault("race", f"mbarrier {address:#x}: its initialisation may come later")
    return barrier


def _mbarrier(instruction: Instruction, symbols: dict[str, int]) -> Effect | None:
    """Semantics and scope default to release (arrive) or acquire (wait) of the CTA."""
    words = list(instruction.words[1:])
    relaxed = "relaxed" in words
    plain = [word for word in words if word not in _SEMANTICS]
    operands = instruction.operands
    kind, rest = plain[0], plain[1:]
    if plain == ["init"]:
        address_of = address_reader(operands[0], symbols)
        return _init(address_of, reader(operands[1], "u32", symbols))
    if plain == ["inval"]:
        return _invalidate(address_reader(operands[0], symbols))
    if kind in ("arrive", "arrive_drop") and rest in ([], ["expect_tx"]):
        return _Arrive(
            address_reader(operands[1], symbols),
            reader((*operands, Immediate(1))[2], "u32", symbols),
            operands[0] if isinstance(operands[0], Register) else None,
            expects=bool(rest),
            drops=kind == "arrive_drop",
            relaxed=relaxed,
            to_cluster={"release", "cluster"} <= set(words),
        )
    if plain in (["expect_tx"], ["complete_tx"]):
        address_of = address_reader(operands[0], symbols)
        return _transact(address_of, reader(operands[1], "u32", symbols), plain == ["expect_tx"])
    if kind in ("try_wait", "test_wait") and rest in ([], ["parity"]):
        result, address, phase = operands[:3]
        by_parity = bool(rest)
        phase_of = reader(phase, "u32" if by_parity else "u64", symbols)
        blocks = kind == "try_wait"
        address_of = address_reader(address, symbols)
        return _TryWait(result, address_of, phase_of, by_parity, blocks, relaxed)
    return None


def _init(address_of: Reader, count_of: Reader) -> Effect:
    def effect(warp: Warp, mask: np.ndarray) -> None:
        cta, threads = warp.cta, warp.lanes[mask]
        addresses, counts = address_of(warp)[mask], count_of(warp)[mask]
        cta.shared.check(addresses, np.flatnonzero(mask), 8)
        if cta.order is not None:
            cta.order.thread_writes(threads, addresses, 8)
        for address in np.unique(addresses).tolist():
            lanes = addresses == address
            first, *others = np.unique(counts[lanes]).tolist()
            if address in cta.barriers:
                raise Fault("phase-misuse", f"mbarrier {address:#x} is initialised twice")
            if others:
                message = f"lanes initialise mbarrier {address:#x} for {first} and {others}"
                raise Fault("phase-misuse", message)
            slot = 0
            if cta.clocks is not None:
                slot = cta.clocks.new_slot()
                cta.clocks.clock[threads[lanes], slot] = 0
            name = cta.machine.barrier_names.get(address, "")
            cta.barriers[address] = TransactionBarrier(address, first, slot, name)

    return effect


def _invalidate(address_of: Reader) -> Effect:
    def effect(warp: Warp, mask: np.ndarray) -> None:
        threads = warp.lanes[mask]
        for address in np.unique(address_of(warp)[mask]).tolist():
            barrier = barrier_at(warp, address, threads)
            if barrier.pending != barrier.expected or barrier.transactions:
                message = f"mbarrier.inval in mid-phase: {barrier.describe(barrier.phase & 1)}"
                raise Fault("phase-misuse", message)
            if warp.cta.order is not None:
                warp.cta.order.thread_writes(threads[:1], np.array([address]), 8)
            warp.cta.retired.append(warp.cta.barriers.pop(address))

    return effect


class _Arrive:
    """mbarrier.arrive and arrive_drop, of the own CTA or another of the cluster."""

    def __init__(
        self,
        address_of: Reader,
        amount_of: Reader,
        state: Register | None,
        *,
        expects: bool,
        drops: bool,
        relaxed: bool,
        to_cluster: bool,
    ):
        self._address_of, self._amount_of, self._state = address_of, amount_of, state
        self._expects, self._drops, self._relaxed = expects, drops, relaxed
        self._to_cluster = to_cluster

    def __call__(self, warp: Warp, mask: np.ndarray) -> Yield:
        addresses = self._address_of(warp)[mask]
        if (addresses == addresses[0]).all():
            self._arrive(warp, mask, int(addresses[0]))
            return YIELD
        for address in np.unique(addresses).tolist():
            self._arrive(warp, mask & (self._address_of(warp) == address), address)
        return YIELD

    def _arrive(self, warp: Warp, mask: np.ndarray, address: int) -> None:
        threads, clocks = warp.lanes[mask], warp.cta.clocks
        barrier = barrier_at(warp, address, threads)
        amounts = self._amount_of(warp)[mask].astype(np.int64)
        who = f"warp {warp.index}"
        if address >> RANK_SHIFT != warp.cta.rank:
            who += f" of CTA {warp.cta.rank}"
            moment = 0 if clocks is None else int(clocks.now[warp.number])
            barrier.visits |= dict.fromkeys(threads.tolist(), (moment, barrier.phase + 1))
        if clocks is not None:
            release = clocks.relaxed_release if self._relaxed else clocks.release
            barrier.give(release(threads))
        if self._state is not None:
            write(warp, mask, self._state, "u64", np.uint64(barrier.phase))
        if self._expects:
            barrier.expect(int(amounts.sum()))
        count = len(amounts) if self._expects else int(amounts.sum())
        if self._drops:
            barrier.drop(count)
        warp.note(Arrived(barrier, barrier.phase, address >> RANK_SHIFT, self._to_cluster))
        barrier.arrive(count, who)


def _transact(address_of: Reader, amount_of: Reader, expects: bool) -> Effect:
    """mbarrier.expect_tx and complete_tx: transactions without an arrival."""

    def effect(warp: Warp, mask: np.ndarray) -> Yield:
        for lane in np.flatnonzero(mask):
            barrier = barrier_at(warp, int(address_of(warp)[lane]), warp.lanes[lane : lane + 1])
            amount = int(amount_of(warp)[lane])
            (barrier.expect if expects else barrier.complete)(amount)
        return YIELD

    return effect


class _TryWait:
    """mbarrier.try_wait and test_wait: the first attempt may fail; try_wait blocks on a retry.

    test_wait does not block by itself, but who asks again and again sleeps until there is news.
    """

    def __init__(
        self,
        result: Operand,
        address_of: Reader,
        phase_of: Reader,
        by_parity: bool,
        blocks: bool,
        relaxed: bool,
    ):
        self._result, self._address_of, self._phase_of = result, address_of, phase_of
        self._by_parity, self._blocks, self._relaxed = by_parity, blocks, relaxed

    def __call__(self, warp: Warp, mask: np.ndarray) -> Wait | Yield:
        threads = warp.lanes[mask]
        address = uniform(self._address_of(warp)[mask], "the mbarrier's address")
        parity = uniform(self._phase_of(warp)[mask], "the parity or state")
        if self._by_parity and parity not in (0, 1):
            raise Fault("phase-misuse", f"mbarrier {address:#x}: parity {parity}")
        if address >> RANK_SHIFT != warp.cta.rank:
            raise Fault("phase-misuse", f"waits for mbarrier {address:#x} of another CTA")
        barrier = barrier_at(warp, address, threads)
        if not self._by_parity:
            if not barrier.phase - 1 <= parity <= barrier.phase:
                raise Fault("phase-misuse", f"mbarrier {address:#x}: state of phase {parity}")
            parity &= 1

        def succeed() -> None:
            warp.retrying = None
            warp.count("mbarrier_waits", 1)
            warp.note(Waited(barrier, barrier.phase - 1))
            self._pass(warp, threads, barrier)
            write(warp, mask, self._result, "pred", True)

        def fail() -> None:
            write(warp, mask, self._result, "pred", False)

        if barrier.passed(parity):
            succeed()
            return YIELD
        if warp.retrying != (address, parity):
            warp.retrying, warp.attempts = (address, parity), _ATTEMPTS
            fail()
            return YIELD
        if not self._blocks:
            return Wait(
                lambda: barrier.passed(parity) or warp.wakes(),
                lambda: succeed() if barrier.passed(parity) else fail(),
                lambda: barrier.describe(parity),
            )
        return Wait(lambda: barrier.passed(parity), succeed, lambda: barrier.describe(parity))

    def _pass(self, warp: Warp, threads: np.ndarray, barrier: TransactionBarrier) -> None:
        clocks, knowledge = warp.cta.clocks, barrier.knowledge()
        barrier.observed = barrier.phase
        if clocks is None:
            return
        if self._relaxed:
            clocks.acquire_later(threads, barrier.slot, barrier.phase, knowledge)
            return
        clocks.see_phase(threads, barrier.slot, barrier.phase)
        if knowledge is not None:
            clocks.acquire(threads, knowledge)


ENTRIES = (Entry("mbarrier.*", _mbarrier, Cost("synchronisation", SOURCES)),)
