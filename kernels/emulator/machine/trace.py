"""What the warps of chosen CTAs executed, in order: the input of a timing estimate."""

from __future__ import annotations

import dataclasses

from kernels.emulator.ptx.program import Program


class Event:
    """What a step did that its text does not say; it follows the step's number in a trace.

    `rank` is of the CTA of the cluster whose barrier, or memory, it is.
    """


@dataclasses.dataclass(frozen=True)
class Contribution(Event):
    """What a phase of a barrier waits for."""

    barrier: object
    phase: int


@dataclasses.dataclass(frozen=True)
class Arrived(Contribution):
    """An arrival on an mbarrier or on a cluster's barrier.

    `releases_to_cluster`: it begins with a memory barrier, for which the warp stands still.
    """

    rank: int
    releases_to_cluster: bool = False


@dataclasses.dataclass(frozen=True)
class Loaded(Contribution):
    """A bulk load from global memory was issued."""

    size: int
    rank: int


@dataclasses.dataclass(frozen=True)
class Carried(Contribution):
    """Bytes of this CTA's shared memory or registers went to a CTA's shared memory."""

    size: int
    rank: int


@dataclasses.dataclass(frozen=True)
class Committed(Contribution):
    """tcgen05.commit was issued."""

    rank: int


@dataclasses.dataclass(frozen=True)
class Copied(Contribution):
    """cp.async.mbarrier.arrive was issued."""


@dataclasses.dataclass(frozen=True)
class Met(Contribution):
    """A warp came to a named barrier, and waits there or goes on; the phase is its generation."""

    waits: bool


@dataclasses.dataclass(frozen=True)
class Waited(Event):
    """A wait ended for a phase of an mbarrier or of a cluster's barrier."""

    barrier: object
    phase: int


@dataclasses.dataclass(frozen=True)
class Stored(Event):
    """A bulk store to global memory was issued."""

    size: int


@dataclasses.dataclass(frozen=True)
class Multiplied(Event):
    """tcgen05.mma was issued for `ctas` CTAs; `size` is what it reads of shared memory."""

    flops: int
    ctas: int
    size: int


@dataclasses.dataclass
class Trace:
    """Give one to `launch`, which fills it.

    Attributes:
      ctas: numbers (x fastest) of the CTAs to record.
      warps: per recorded CTA, in the order of their start, steps and events of every warp.
      places: cluster and rank in it of every recorded CTA.
      cluster_size: CTAs of a cluster.
      spread: lines of loads from shared memory whose lanes had several addresses.
      program: whose steps they are.
    """

    ctas: frozenset[int] = frozenset({0})
    warps: dict[int, list[list[int | Event]]] = dataclasses.field(default_factory=dict)
    places: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)
    cluster_size: int = 1
    spread: set[int] = dataclasses.field(default_factory=set)
    program: Program | None = None

    def of_warp(self, cta: int, index: int, place: tuple[int, int]) -> list[int | Event] | None:
        """Where a warp that starts records; None if it does not."""
        if cta not in self.ctas:
            return None
        self.places[cta] = place
        warps = self.warps.setdefault(cta, [])
        assert len(warps) == index
        warps.append([])
        return warps[-1]
