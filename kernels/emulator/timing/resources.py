"""What an SM's estimate is replayed against: when its units and its ports are free."""

from __future__ import annotations

from kernels.emulator.timing.plans import PARTITIONS, UNITS


class Partition:
    """A sub-partition: when its issue slot, units and share of the tensor core are free."""

    def __init__(self) -> None:
        self.issue = 0.0
        self.units = [0.0] * len(UNITS)
        self.tensor = 0.0
        # Cycles of the products under way that do not need shared memory's port, and cycles for
        # which copies need it: these have time and wait for such.
        self.idle_port = self.copies = 0.0
        self.room = 0.0  # when the next product can be issued: one waits for the one under way


class Sm:
    """A multiprocessor: its sub-partitions, and when what they share is free."""

    def __init__(self) -> None:
        self.partitions = [Partition() for _ in range(PARTITIONS)]
        self.shared = self.loads = self.stores = self.additions = self.peers = 0.0
        self.tensor = TensorCore()

    def drained(self) -> float:
        """When all that was issued is over, also what no warp waits for."""
        ends = [self.shared, self.loads, self.stores, self.additions, self.peers]
        for partition in self.partitions:
            ends += [partition.issue, *partition.units, partition.tensor + partition.copies]
        return max(*ends, self.tensor.free + self.tensor.copies)

    def copied(self, cycles: float) -> None:
        """Copies need shared memory's port for so long."""
        for partition in self.partitions:
            partition.copies += cycles
        self.tensor.copies += cycles


class TensorCore:
    """The whole SM's tensor core, as tcgen05 uses it: when it is free; for how long its products
    leave shared memory's port idle, and for how long copies still need it."""

    def __init__(self) -> None:
        self.free = self.idle_port = self.copies = 0.0

    def idle(self, time: float) -> None:
        """Copies have had the port since the last product, if it has ended by then."""
        if self.free < time:
            self.copies = max(self.copies - (time - self.free), 0.0)
            self.idle_port = 0.0
            self.free = time

    def multiply(self, begin: float, flops: float, port: float) -> float:
        """Adds a product that needs the core and the port for these cycles; returns its end."""
        self.idle(begin)
        taken = max(flops, port)
        self.idle_port += taken - port
        copied = min(self.copies, self.idle_port)
        self.copies -= copied
        self.idle_port -= copied
        self.free = begin + taken
        return self.free

    def interrupt(self, time: float, taken: float) -> None:
        """An instruction takes the port: the products go on later unless they leave it idle.

        Between products the port is the copies', which go on later.
        """
        if self.free > time:
            idle = min(self.idle_port, taken)
            self.idle_port -= idle
            self.free += taken - idle
            return
        self.idle(time)
        if self.copies:
            self.copies += taken
