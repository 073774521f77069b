"""The two kinds of barriers: mbarriers in shared memory and a CTA's sixteen named ones."""

from __future__ import annotations

import numpy as np

from kernels.emulator.memory import Fault
from kernels.emulator.order import Knowledge

MOST_ARRIVALS = (1 << 20) - 1
MOST_TRANSACTIONS = (1 << 20) - 1


class TransactionBarrier:
    """An mbarrier. `phase` counts completed phases; the current one's parity is its lowest bit.

    `slot` is its agent in the happens-before order, `copied` the last phase that a copy completes.
    """

    def __init__(self, address: int, expected: int, slot: int):
        if not 1 <= expected <= MOST_ARRIVALS:
            raise Fault("phase-misuse", f"mbarrier.init with a count of {expected}")
        self.address, self.expected, self.slot = address, expected, slot
        self.pending, self.transactions, self.phase = expected, 0, 0
        self.arrived: list[str] = []
        self.copied = 0
        self._given: Knowledge | None = None
        self._published: dict[int, Knowledge | None] = {}

    def expect(self, amount: int) -> None:
        """More bytes must come before this phase completes."""
        self.transactions += amount
        if abs(self.transactions) > MOST_TRANSACTIONS:
            raise Fault(
                "phase-misuse",
                f"mbarrier {self.address:#x}: transaction count {self.transactions} out of range",
            )

    def give(self, knowledge: Knowledge | None) -> None:
        """What an arriving thread hands over with this phase."""
        if knowledge is not None:
            self._given = knowledge.merged(self._given)

    def arrive(self, count: int, who: str) -> None:
        """Arrivals on the current phase."""
        if count > self.pending:
            raise Fault(
                "arrival-overflow",
                f"mbarrier {self.address:#x}: {count} arrivals by {who}, but phase {self.phase} "
                f"lacks only {self.pending} of {self.expected} (arrived: {self.arrived})",
            )
        self.pending -= count
        self.arrived.append(who)
        self._settle()

    def complete(self, amount: int) -> None:
        """Bytes have come."""
        self.expect(-amount)
        self._settle()

    def _settle(self) -> None:
        if self.pending or self.transactions:
            return
        self._published = {self.phase: self._given}
        self._given, self.arrived = None, []
        self.phase += 1
        self.pending = self.expected

    def passed(self, parity: int) -> bool:
        """Whether the phase of this parity is the one that completed last."""
        return self.phase & 1 != parity

    def knowledge(self) -> Knowledge | None:
        """What the phase that completed last hands over."""
        return self._published.get(self.phase - 1)

    def describe(self, parity: int) -> str:
        """Why a wait for this parity does not pass."""
        return (
            f"mbarrier {self.address:#x}, parity {parity}: phase {self.phase} lacks "
            f"{self.pending} of {self.expected} arrivals and {self.transactions} bytes "
            f"(arrived: {', '.join(self.arrived) or 'nobody'})"
        )


class NamedBarrier:
    """A barrier of `bar.sync` and `bar.arrive`. `generation` counts completions."""

    def __init__(self, number: int):
        self.number, self.generation = number, 0
        self.threads = 0
        self.arrived: list[int] = []
        self._given: Knowledge | None = None
        self.published: dict[int, Knowledge | None] = {}

    def arrive(self, warp: int, threads: int, knowledge: Knowledge | None) -> int:
        """A warp arrives on a barrier of so many threads; returns the generation that it joins."""
        if self.arrived and threads != self.threads:
            raise Fault(
                "participants",
                f"barrier {self.number}: {threads} threads, but warps {self.arrived} came for "
                f"{self.threads}",
            )
        if warp in self.arrived:
            raise Fault(
                "participants",
                f"barrier {self.number}: warp {warp} arrives twice before it completes",
            )
        self.threads = threads
        self.arrived.append(warp)
        if knowledge is not None:
            self._given = knowledge.merged(self._given)
        joined = self.generation
        if len(self.arrived) * 32 == threads:
            self.published = {joined: self._given}
            self.generation, self.arrived, self._given = joined + 1, [], None
        return joined

    def describe(self) -> str:
        """What is missing."""
        return f"barrier {self.number}: warps {self.arrived} of {self.threads // 32} have arrived"


def uniform(values: np.ndarray, what: str) -> int:
    """The one value that all lanes give."""
    if (values != values[0]).any():
        raise Fault("not implemented", f"{what} differs between lanes")
    return int(values[0])
