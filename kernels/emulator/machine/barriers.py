"""The barriers: mbarriers in shared memory, a CTA's sixteen named ones, a cluster's own."""

from __future__ import annotations

import numpy as np

from kernels.emulator.memory import Fault
from kernels.emulator.order.clocks import Knowledge

MOST_ARRIVALS = (1 << 20) - 1
MOST_TRANSACTIONS = (1 << 20) - 1


class TransactionBarrier:
    """An mbarrier. `phase` counts completed phases; the current one's parity is its lowest bit.

    `slot` is its agent in the happens-before order, `copied` the last phase that a copy completes,
    `observed` the last one that a wait has seen. `visits` are the last arrivals of threads of other
    CTAs: the thread's moment and the phase that counts it.
    """

    def __init__(self, address: int, expected: int, slot: int, name: str = ""):
        self.label = f"mbarrier {name} ({address:#x})" if name else f"mbarrier {address:#x}"
        if not 1 <= expected <= MOST_ARRIVALS:
            raise Fault("phase-misuse", f"mbarrier.init with a count of {expected}")
        self.address, self.expected, self.slot, self.name = address, expected, slot, name
        self.pending, self.transactions, self.phase = expected, 0, 0
        self.arrived: list[str] = []
        self.copied = self.observed = 0
        self.visits: dict[int, tuple[int, int]] = {}
        self._given: Knowledge | None = None
        self._published: dict[int, Knowledge | None] = {}

    def expect(self, amount: int) -> None:
        """More bytes must come before this phase completes."""
        self.transactions += amount
        if abs(self.transactions) > MOST_TRANSACTIONS:
            raise Fault(
                "phase-misuse",
                f"{self.label}: transaction count {self.transactions} out of range",
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
                f"{self.label}: {count} arrivals by {who}, but phase {self.phase} "
                f"lacks only {self.pending} of {self.expected} (arrived: {self.arrived})",
            )
        self.pending -= count
        self.arrived.append(who)
        self._settle()

    def drop(self, count: int) -> None:
        """Later phases expect fewer arrivals."""
        if count > self.expected:
            raise Fault("phase-misuse", f"{self.label}: drops {count} arrivals")
        self.expected -= count

    def complete(self, amount: int) -> None:
        """Bytes have arrived."""
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
        """The reason why a wait for this parity does not pass."""
        return (
            f"{self.label}, parity {parity}: phase {self.phase} lacks "
            f"{self.pending} of {self.expected} arrivals and {self.transactions} bytes "
            f"(arrived: {', '.join(self.arrived) or 'nobody'})"
        )


class ClusterBarrier:
    """The barrier of barrier.cluster, for all threads of a cluster that have not exited."""

    def __init__(self, threads: int):
        self.phase = 0
        self._joined = np.full(threads, -1)
        self._arrived, self._gone = np.zeros(threads, bool), np.zeros(threads, bool)
        self._given: Knowledge | None = None
        self._published: Knowledge | None = None

    def arrive(self, threads: np.ndarray, knowledge: Knowledge | None) -> None:
        """Threads arrive on the current phase."""
        twice = self._joined[threads] >= 0
        if twice.any():
            lane = int(threads[np.argmax(twice)]) % 32
            message = "barrier.cluster.arrive a second time without barrier.cluster.wait in between"
            raise Fault("participants", message, lane)
        self._joined[threads], self._arrived[threads] = self.phase, True
        if knowledge is not None:
            self._given = knowledge.merged(self._given)
        self._settle()

    def leave(self, threads: np.ndarray) -> None:
        """Threads exit: nobody waits for them any more."""
        self._gone[threads] = True
        self._settle()

    def _settle(self) -> None:
        if self._arrived.any() and (self._arrived | self._gone).all():
            self._published, self._given = self._given, None
            self._arrived[:] = False
            self.phase += 1

    def joined(self, threads: np.ndarray) -> int:
        """The phase that these threads wait for."""
        phases = self._joined[threads]
        if (phases < 0).any():
            lane = int(threads[np.argmax(phases < 0)]) % 32
            message = "barrier.cluster.wait without barrier.cluster.arrive before it"
            raise Fault("participants", message, lane)
        return int(phases.max())

    def passed(self, threads: np.ndarray) -> Knowledge | None:
        """Threads leave the barrier; returns what the others handed over."""
        self._joined[threads] = -1
        return self._published

    def describe(self) -> str:
        """What is missing."""
        missing = np.flatnonzero(~self._arrived & ~self._gone)
        warps = sorted({int(thread) // 32 for thread in missing})
        return (
            f"barrier.cluster, phase {self.phase}: {missing.size} threads have not arrived "
            f"(of warps {warps}, counted through the cluster)"
        )


class NamedBarrier:
    """A barrier of `bar.sync` and `bar.arrive`. `generation` counts completions."""

    def __init__(self, number: int):
        self.number, self.generation = number, 0
        self.threads = 0
        self.arrived: list[int] = []
        self._waited_at: int | None = None
        self._given: Knowledge | None = None
        self.published: dict[int, Knowledge | None] = {}

    def arrive(
        self,
        warp: int,
        threads: int,
        waits: bool,
        knowledge: Knowledge | None,
        line: int | None = None,
    ) -> int:
        """A warp arrives on a barrier of `count` threads; returns the generation that it joins.

        Warps that give a line wait at the same one (`Policy.one_place`). A warp that has arrived
        may come again to wait, which counts once more (seen on an H200). To arrive twice counts
        there, too, but is an error here: the warp has run ahead.
        """
        if self.arrived and threads != self.threads:
            raise Fault(
                "participants",
                f"barrier {self.number}: {threads} threads, but warps {self.arrived} came for "
                f"{self.threads}",
            )
        if warp in self.arrived and not waits:
            raise Fault(
                "participants",
                f"barrier {self.number}: warp {warp} arrives twice before it completes",
            )
        if line is not None and self._waited_at not in (None, line):
            raise Fault(
                "participants",
                f"barrier {self.number}: warps wait at lines {self._waited_at} and {line}",
            )
        self._waited_at = self._waited_at if line is None else line
        self.threads = threads
        self.arrived.append(warp)
        if knowledge is not None:
            self._given = knowledge.merged(self._given)
        joined = self.generation
        if len(self.arrived) * 32 == threads:
            self.published = {joined: self._given}
            self.generation, self.arrived, self._given = joined + 1, [], None
            self._waited_at = None
        return joined

    def describe(self) -> str:
        """What is missing."""
        return f"barrier {self.number}: warps {self.arrived} of {self.threads // 32} have arrived"


def uniform(values: np.ndarray, what: str) -> int:
    """The one value that all lanes give; faults if they differ."""
    if (values != values[0]).any():
        raise Fault("not implemented", f"{what} differs between lanes")
    return int(values[0])
