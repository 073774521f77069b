"""Happens-before between CTAs, for reductions that a kernel promises to make in one order.

Relaxed reductions never race, but floating-point sums depend on their order. An event is a
red.release; who reads its address with ld.acquire learns of it, and of everything that its thread
knew. Sets of events are integers, one bit each.
"""

from __future__ import annotations

import numpy as np

from kernels.emulator.memory import Fault, Region
from kernels.emulator.order import Order

_GRAIN = 16


class DeviceOrder:
    """Releases of a launch, and who added last to every 16 bytes."""

    def __init__(self) -> None:
        self._events: list[tuple[int, np.ndarray]] = []
        self._messages: dict[int, int] = {}
        self._merged: dict[tuple[int, int], np.ndarray] = {}
        self._last: dict[int, np.ndarray] = {}

    def release(self, cta: int, order: Order, threads: np.ndarray, addresses: np.ndarray) -> None:
        """Threads release what they know to who acquires these addresses."""
        for thread, address in zip(threads.tolist(), addresses.tolist(), strict=True):
            known = order.events_of(thread) | 1 << len(self._events)
            self._events.append((cta, order.clock[thread, : order.threads].copy()))
            self._messages[address] = self._messages.get(address, 0) | known
        order.release(threads)

    def acquire(self, order: Order, threads: np.ndarray, addresses: np.ndarray) -> None:
        """Threads learn what was released to these addresses."""
        for thread, address in zip(threads.tolist(), addresses.tolist(), strict=True):
            order.learn(thread, self._messages.get(address, 0))

    def add(
        self, cta: int, order: Order, region: Region, threads: np.ndarray, addresses: np.ndarray
    ) -> None:
        """Faults unless these threads know of the last addition to each address."""
        if region.base not in self._last:
            self._last[region.base] = np.full((-(-region.data.size // _GRAIN), 3), -1, np.int64)
        last, index = self._last[region.base], (addresses - region.base) // _GRAIN
        before = last[index]
        for other in np.unique(before[:, 0]).tolist():
            for lane in np.flatnonzero(before[:, 0] == other) if other >= 0 else ():
                thread, (_, adder, moment) = int(threads[lane]), before[lane].tolist()
                known = order.clock[thread, adder] if other == cta else -1
                if other != cta:
                    known = self._known(order.events_of(thread), other, order.threads)[adder]
                if known < moment:
                    raise Fault(
                        "reduction-order",
                        f"adds to {int(addresses[lane]):#x}, to which thread {adder} of CTA "
                        f"{other} adds, and nothing orders the two",
                        thread % 32,
                    )
        last[index, 0], last[index, 1] = cta, threads
        last[index, 2] = order.now[threads // 32]

    def _known(self, events: int, cta: int, threads: int) -> np.ndarray:
        """What a set of events tells about the threads of a CTA."""
        key = (events, cta)
        if key not in self._merged:
            clocks = [np.zeros(threads, np.int32), *self._clocks(events, cta)]
            self._merged[key] = np.max(clocks, axis=0)
        return self._merged[key]

    def _clocks(self, events: int, cta: int) -> list[np.ndarray]:
        """Clocks of one CTA's events in a set."""
        chosen = []
        while events:
            bit = events & -events
            source, clock = self._events[bit.bit_length() - 1]
            chosen += [clock] if source == cta else []
            events ^= bit
        return chosen
