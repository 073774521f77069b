"""The resources of an SM in a replay: when its units and its ports are free."""

from __future__ import annotations

import dataclasses
from collections import defaultdict

from kernels.emulator.ptx.entries import Multiply
from kernels.emulator.timing.plans import PARTITIONS, UNITS
from kernels.emulator.timing.rates import Rates


@dataclasses.dataclass(frozen=True)
class Interval:
    """Something that took place: a row of the timeline, a name, cycles."""

    row: str
    name: str
    start: float
    end: float


def row_of_warp(cta: int, warp: int) -> str:
    """The row of the timeline of a CTA's warp."""
    return f"CTA {cta} warp {warp:2}"


@dataclasses.dataclass(frozen=True)
class Record:
    """What has happened: cycles of work by resource, and the timeline."""

    busy: defaultdict[str, float] = dataclasses.field(default_factory=lambda: defaultdict(float))
    intervals: list[Interval] = dataclasses.field(default_factory=list)


class Partition:
    """A sub-partition: when its issue slot, units and share of the tensor core are free."""

    def __init__(self) -> None:
        self.issue = 0.0
        self.units = [0.0] * len(UNITS)
        self.tensor = 0.0
        # Cycles in which the products in flight leave the port of shared memory idle, and cycles
        # for which copies still need it: copies wait for idle ones.
        self.idle_port = self.copies = 0.0
        self.room = 0.0  # when the next product can be issued: one may queue after the one at work

    def multiply(self, time: float, flops: float, port: float) -> float:
        """Adds a product that needs the core and the port for these cycles; returns its start."""
        begin, taken = max(time, self.tensor), max(flops, port)
        if self.tensor < time:
            self.idle_port = 0.0
            self.copies = max(self.copies - (time - self.tensor), 0.0)
        self.room = begin
        self.idle_port += taken - port
        copied = min(self.copies, self.idle_port)
        self.copies -= copied
        self.idle_port -= copied
        self.tensor = begin + taken
        return begin


class Sm:
    """A multiprocessor: its sub-partitions, and when what they share is free.

    `label` tells its rows of the timeline from those of other SMs.
    """

    def __init__(self, rates: Rates, record: Record, label: str = "") -> None:
        self._rates, self._record, self._label = rates, record, label
        self.partitions = [Partition() for _ in range(PARTITIONS)]
        self.shared = self.additions = 0.0
        self.engines = {"TMA load": 0.0, "TMA store": 0.0, "SM to SM": 0.0}
        self.tensor = TensorCore()

    def show(self, row: str, name: str, begin: float, end: float) -> None:
        """Adds to the timeline."""
        self._record.intervals.append(Interval(row + self._label, name, begin, end))

    def share(self, time: float, size: float) -> float:
        """Moves bytes through the port of shared memory; returns the delay that it adds.

        Products in flight end later unless they leave the port idle.
        """
        taken = size / self._rates.shared_bytes
        begin = max(time, self.shared)
        self.shared = begin + taken
        self._record.busy["shared"] += taken
        for partition in self.partitions:
            if partition.tensor > begin:
                idle = min(partition.idle_port, taken)
                partition.idle_port -= idle
                partition.tensor += taken - idle
        self.tensor.interrupt(begin, taken)
        return self.shared - time

    def copy(self, engine: str, time: float, size: float, rate: float) -> float:
        """A bulk copy's turn on its engine; returns when its last byte has left."""
        begin = max(time, self.engines[engine])
        end = begin + size / rate
        self.engines[engine] = end
        self._record.busy[engine] += end - begin
        self.tensor.idle(time)
        self.receive(size)
        if self._rates.tensor_memory_bytes:
            end = max(end, time + self.tensor.copies)
        self.show(engine, f"{size / 1024:g} KiB", begin, end)
        return end

    def receive(self, size: float) -> None:
        """Bytes of a copy need the port of shared memory, which products leave them when idle."""
        taken = size / self._rates.shared_bytes
        self._record.busy["shared"] += taken
        for partition in self.partitions:
            partition.copies += taken
        self.tensor.copies += taken

    def multiply(self, warp: int, time: float, product: Multiply) -> float:
        """A warp's quarter of wgmma, on its sub-partition; returns when the result is there."""
        number, rates = warp % PARTITIONS, self._rates
        partition = self.partitions[number]
        flops = product.flops / (rates.mma_flops / PARTITIONS)
        port = product.shared_bytes / (rates.shared_bytes / PARTITIONS)
        begin = partition.multiply(time, flops, port)
        self._record.busy["tensor core"] += flops / PARTITIONS
        self._record.busy["shared"] += product.shared_bytes / rates.shared_bytes
        self.show(f"tensor core {number}", f"warp {warp}", begin, partition.tensor)
        return partition.tensor + rates.mma_latency

    def add(self, time: float, size: float) -> float:
        """Additions to global memory queue up; returns when these have been taken."""
        taken = size / self._rates.reduce_bytes
        begin = max(time, self.additions)
        self.additions = begin + taken
        self._record.busy["reduction"] += taken
        return self.additions

    def drained(self) -> float:
        """The time at which all that was issued has ended, even what no warp waits for."""
        ends = [self.shared, self.additions, *self.engines.values()]
        for partition in self.partitions:
            ends += [partition.issue, *partition.units, partition.tensor + partition.copies]
        return max(*ends, self.tensor.free + self.tensor.copies)


class TensorCore:
    """The whole SM's tensor core, as tcgen05 uses it.

    `free` is when it has no more to do, `idle_port` for how many cycles its products leave the port
    of shared memory idle, `copies` for how many cycles copies still need that port.
    """

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
        """An instruction uses the port: products end later unless they leave it idle.

        Between products the copies have the port, and end later.
        """
        if self.free > time:
            idle = min(self.idle_port, taken)
            self.idle_port -= idle
            self.free += taken - idle
            return
        self.idle(time)
        if self.copies:
            self.copies += taken
