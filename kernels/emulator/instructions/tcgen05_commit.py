"""tcgen05.commit, and tcgen05.fence around the synchronisation of threads."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from kernels.emulator.instructions.mbarrier import barrier_at
from kernels.emulator.machine.barriers import TransactionBarrier
from kernels.emulator.machine.cta import OFFSET_MASK, RANK_SHIFT, Cta
from kernels.emulator.machine.tensor_pipe import Pipe, pipe_of
from kernels.emulator.machine.trace import Committed
from kernels.emulator.machine.transfers import Transfer
from kernels.emulator.machine.warp import YIELD, Reader, Warp, Yield, address_reader, reader
from kernels.emulator.memory import Fault
from kernels.emulator.order.clocks import Knowledge
from kernels.emulator.ptx.entries import SOURCES, Cost, Effect, Entry, always
from kernels.emulator.ptx.syntax import Instruction


def _bind(instruction: Instruction, symbols: dict[str, int]) -> Effect | None:
    words = instruction.words
    if words[2] not in ("cta_group:1", "cta_group:2"):
        return None
    rest = tuple(word for word in words[3:] if word != "shared:cluster")
    multicast = "multicast:cluster" in rest
    if rest != ("mbarrier:arrive:one", *(("multicast:cluster",) if multicast else ()), "b64"):
        return None
    address, *ranks = instruction.operands
    ranks_of = reader(ranks[0], "u16", symbols) if multicast else None
    return functools.partial(_commit, instruction, address_reader(address, symbols), ranks_of)


def _fence_before(warp: Warp, mask: np.ndarray) -> None:
    clocks = warp.cta.tensor_clocks
    if clocks is not None:
        clocks.fence_before(warp.lanes[mask])


def _fence_after(warp: Warp, mask: np.ndarray) -> None:
    clocks = warp.cta.tensor_clocks
    if clocks is not None:
        clocks.fence_after(warp.lanes[mask])


def _commit(
    instruction: Instruction,
    address_of: Reader,
    ranks_of: Reader | None,
    warp: Warp,
    mask: np.ndarray,
) -> Yield:
    for lane in np.flatnonzero(mask).tolist():
        pipe = pipe_of(warp, int(warp.lanes[lane]))
        pipe.committed = pipe.issued
        address = int(address_of(warp)[lane])
        addresses = [address]
        if ranks_of is not None:
            ranks, offset = int(ranks_of(warp)[lane]), address & OFFSET_MASK
            addresses = [rank << RANK_SHIFT | offset for rank in range(16) if ranks >> rank & 1]
        homes = [_home(warp, lane, address) for address in addresses]
        for home, barrier in homes:
            warp.note(Committed(barrier, barrier.phase, home.rank))
        perform = functools.partial(_arrive, pipe, pipe.issued, pipe.done(pipe.issued), homes)
        in_order = not warp.cta.machine.policy.unordered_commits
        if in_order and pipe.commit is not None and not pipe.commit.performed:
            perform = functools.partial(_both, warp.cta, pipe.commit, perform)
        nothing = np.zeros(0, np.int64)
        pipe.commit = Transfer(warp, lane, instruction, warp.cta, perform, nothing)
        warp.cta.issue(pipe.commit)
    return YIELD


def _both(cta: Cta, earlier: Transfer, perform: Callable[[], None]) -> None:
    cta.perform(earlier)
    perform()


def _home(warp: Warp, lane: int, address: int) -> tuple[Cta, TransactionBarrier]:
    """The mbarrier at an address and its CTA, both of which the thread knows of."""
    threads = warp.lanes[lane : lane + 1]
    barrier, order = barrier_at(warp, address, threads), warp.cta.order
    if order is not None and order.fenced[threads[0], barrier.slot] < 0:
        raise Fault(
            "proxy-fence",
            f"mbarrier {address:#x}: no fence.mbarrier_init or fence.proxy.async between its "
            "initialisation and its use by a commit",
            lane,
        )
    return warp.cta.cluster.holding(address), barrier


def _arrive(
    pipe: Pipe,
    number: int,
    known: Knowledge | None,
    homes: list[tuple[Cta, TransactionBarrier]],
) -> None:
    """Performs what was committed, and arrives on every barrier."""
    pipe.perform(number)
    for cta, barrier in homes:
        if cta.ended and not cta.machine.policy.clean_exits:
            continue
        if cta.ended:
            raise Fault(
                "cluster-exit",
                f"a commit arrives at an mbarrier of CTA {cta.rank}, which has exited",
            )
        barrier.give(known)
        if cta.machine.policy.clean_exits:
            barrier.copied = max(barrier.copied, barrier.phase + 1)
        barrier.arrive(1, f"a commit of thread {pipe.thread}")


_SYNCHRONISATION = Cost("synchronisation", SOURCES)

ENTRIES = (
    Entry("tcgen05.commit.*", _bind, _SYNCHRONISATION),
    Entry("tcgen05.fence::before_thread_sync", always(_fence_before), _SYNCHRONISATION),
    Entry("tcgen05.fence::after_thread_sync", always(_fence_after), _SYNCHRONISATION),
)
