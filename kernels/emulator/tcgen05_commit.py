"""tcgen05.commit, and tcgen05.fence around the synchronisation of threads."""

from __future__ import annotations

import functools

import numpy as np

from kernels.emulator.barriers import TransactionBarrier
from kernels.emulator.memory import Fault
from kernels.emulator.order import Knowledge
from kernels.emulator.program import LANES, Effect
from kernels.emulator.synchronise import barrier_at
from kernels.emulator.syntax import Instruction
from kernels.emulator.tensor_pipe import Pipe, pipe_of
from kernels.emulator.transfers import Transfer
from kernels.emulator.warp import YIELD, Reader, Warp, Yield, address_reader


def bind(instruction: Instruction, symbols: dict[str, int]) -> Effect | None:
    """The effect of a commit or a fence, or None if it is none."""
    words = instruction.words
    if words == ("tcgen05", "fence:before_thread_sync"):
        return _fence_before
    if words == ("tcgen05", "fence:after_thread_sync"):
        return _fence_after
    if words[:2] != ("tcgen05", "commit"):
        return None
    rest = tuple(word for word in words[2:] if word != "shared:cluster")
    if rest == ("cta_group:1", "mbarrier:arrive:one", "b64"):
        (address,) = instruction.operands
        return functools.partial(_commit, instruction, address_reader(address, symbols))
    return None


def _fence_before(warp: Warp, mask: np.ndarray) -> None:
    clocks = warp.cta.tensor_clocks
    if clocks is not None:
        clocks.fence_before(warp.lanes[mask])


def _fence_after(warp: Warp, mask: np.ndarray) -> None:
    clocks = warp.cta.tensor_clocks
    if clocks is not None:
        clocks.fence_after(warp.lanes[mask])


def _commit(instruction: Instruction, address_of: Reader, warp: Warp, mask: np.ndarray) -> Yield:
    cta = warp.cta
    for lane in np.flatnonzero(mask):
        thread, address = int(warp.lanes[lane]), int(address_of(warp)[lane])
        barrier = barrier_at(warp, address, np.array([thread]))
        order = cta.order
        if order is not None and order.fenced[thread, barrier.slot] < 0:
            raise Fault(
                "proxy-fence",
                f"mbarrier {address:#x}: no fence.mbarrier_init or fence.proxy.async between its "
                "initialisation and its use by a commit",
                thread % LANES,
            )
        pipe = pipe_of(warp, thread)
        number, known = pipe.issued, pipe.done(pipe.issued)
        pipe.committed = number

        def perform(
            pipe: Pipe = pipe,
            number: int = number,
            known: Knowledge | None = known,
            barrier: TransactionBarrier = barrier,
        ) -> None:
            pipe.make(number)
            barrier.give(known)
            barrier.copied = max(barrier.copied, barrier.phase + 1)
            barrier.arrive(1, f"a commit of thread {pipe.thread}")

        nothing = np.zeros(0, np.int64)
        cta.issue(Transfer(warp, int(lane), instruction, cta, perform, nothing))
    return YIELD
