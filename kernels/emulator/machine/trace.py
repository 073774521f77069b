"""What the warps of chosen CTAs executed, in order: the input of a timing estimate."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from kernels.emulator.ptx.program import Program


class Event(NamedTuple):
    """What a step did that its text does not tell; it follows the step's number in a trace.

    kind      key, phase                         amount
    "arrive"  an mbarrier or a cluster's barrier, its phase
    "wait"    the same, of a phase that has completed
    "load"    the mbarrier that is told          bytes of a bulk load
    "carry"   the mbarrier that is told          bytes from this CTA's shared memory or registers
    "store"                                      bytes of a bulk store
    "meet"    a named barrier, its turn          1 if the warp waits there, else 0
    "product" FLOPs of tcgen05.mma, its CTAs     bytes that it reads of shared memory
    "commit"  the mbarrier that is told          (tcgen05.commit) and its phase
    "copied"  the same                           (cp.async.mbarrier.arrive)

    rank: of the CTA of the cluster whose barrier, or memory, it is.
    """

    kind: str
    key: Any = None
    phase: int = 0
    amount: int = 0
    rank: int = 0


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
