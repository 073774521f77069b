"""Happens-before through global memory, and through atomic operations of any memory.

What a thread releases at an address is an event: its clock at that moment. A thread that acquires
there learns of the event and of all that the releasing thread knew; sets of events are integers,
one bit each. So a thread knows threads of other clusters by the events that record their work.

The shadow of global memory holds, for every kind of access and every cluster, the last agent to
access every two bytes: a thread, or the mbarrier that ends a copy (see clocks.Clocks). It is kept
only if the policy asks for races in global memory or for one order of reductions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

from kernels.emulator import tensor_map
from kernels.emulator.memory import Fault, Region
from kernels.emulator.order.clocks import PENDING, Clocks
from kernels.emulator.ptx.program import LANES

GRAIN = 2
_GENERIC = ("write", "atomic", "count")
_ASYNC = ("async_write", "async_atomic")
_CONFLICTS = {
    "read": (*_GENERIC, *_ASYNC),
    "poll": ("write", "async_write"),
    "write": ("read", "poll", *_GENERIC, *_ASYNC),
    "atomic": ("read", "write", "async_write"),
    "count": ("read", "write", "async_write"),
    "async_read": (*_GENERIC, *_ASYNC),
    "async_write": ("read", "poll", *_GENERIC, *_ASYNC),
    "async_atomic": ("read", "write", "async_write"),
}
"""The kinds of earlier accesses that must be ordered before an access of each kind.

Atomic operations need no order among themselves, nor do polls and atomic operations. "count" is an
atomic addition of integers, whose sum is the same in any order. What it returns may differ: a
ticket, which kernels that promise an order draw, too.
"""
_RECORDED = {"async_read": "read"}
_SAYS = {
    "read": "reads",
    "poll": "reads",
    "write": "writes",
    "atomic": "updates",
    "count": "counts at",
    "async_read": "copies from",
    "async_write": "copies to",
    "async_atomic": "reduces to",
}
_MOST_MERGED = 1024


Known = Callable[[np.ndarray], np.ndarray]
"""A function from agents to the last moment of each that a thread knows."""


@dataclasses.dataclass(frozen=True)
class Event:
    """What a thread of a cluster knew at a release."""

    cluster: int
    clock: np.ndarray
    fenced: np.ndarray


@dataclasses.dataclass(frozen=True)
class Access:
    """Granules of a region that agents (of one cluster, in its `clocks`) access.

    `agents` and `moments` are recorded; `threads` issue it and must know what came before. All
    three are as long as the first axis of `granules`, or one for all.
    """

    kind: str
    clocks: Clocks
    region: Region
    granules: np.ndarray
    threads: np.ndarray
    agents: np.ndarray
    moments: np.ndarray


class _Plane:
    """The last accesses to every granule, of one kind, by one cluster."""

    def __init__(self, size: int):
        self.agent, self.moment = np.zeros(size, np.int16), np.zeros(size, np.int32)
        self.low, self.high = size, -1


class GlobalOrder:
    """Events of a launch and the shadow of its global memory."""

    def __init__(self, races: bool, ordered: bool):
        self.shadowed, self._races, self._ordered = races or ordered, races, ordered
        self._events: list[Event] = []
        self.messages: dict[int, int] = {}
        self._merged: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
        self._planes: dict[int, dict[str, dict[int, _Plane]]] = {}

    def release(
        self, clocks: Clocks, threads: np.ndarray, addresses: np.ndarray, updates: bool
    ) -> None:
        """Threads release what they know; an update adds to what was released there before."""
        if not updates:
            self.overwrite(addresses)
        for thread, address in zip(threads.tolist(), addresses.tolist(), strict=True):
            clock, fenced = clocks.clock[thread].copy(), clocks.fenced_global[thread].copy()
            self._post(address, clocks.events_of(thread), Event(clocks.cluster, clock, fenced))
        clocks.release(threads)

    def release_fenced(
        self, clocks: Clocks, threads: np.ndarray, addresses: np.ndarray, updates: bool
    ) -> None:
        """A relaxed store or update hands over what a fence before it released, if there is one."""
        if not updates:
            self.overwrite(addresses)
        if clocks.published is None or not clocks.fences:
            return
        for thread, address in zip(threads.tolist(), addresses.tolist(), strict=True):
            clock = clocks.published[thread].copy()
            fenced = np.minimum(clocks.fenced_global[thread], clock)
            known = clocks.published_events.get(thread, 0)
            if clock[: clocks.threads].any() or known:
                self._post(address, known, Event(clocks.cluster, clock, fenced))

    def _post(self, address: int, known: int, event: Event) -> None:
        known |= 1 << len(self._events)
        self._events.append(event)
        self.messages[address] = self.messages.get(address, 0) | known

    def overwrite(self, addresses: np.ndarray) -> None:
        """Another store: what was released at these addresses before is no longer read there."""
        if self.messages:
            for address in addresses.tolist():
                self.messages.pop(address, None)

    def acquire(
        self, clocks: Clocks, threads: np.ndarray, addresses: np.ndarray, relaxed: bool
    ) -> None:
        """Threads learn what was released at these addresses, relaxed ones at their next fence."""
        if not self.messages:
            return
        later = clocks.later_events
        for thread, address in zip(threads.tolist(), addresses.tolist(), strict=True):
            events = self.messages.get(address, 0)
            if events and relaxed:
                later[thread] = later.get(thread, 0) | events
            elif events:
                self._learn(clocks, thread, events)

    def fence(self, clocks: Clocks, threads: np.ndarray) -> None:
        """fence.acq_rel, before the clocks' own part of it."""
        for thread in threads.tolist():
            events = clocks.later_events.pop(thread, 0)
            if events:
                self._learn(clocks, thread, events)
            if clocks.events_of(thread):
                clocks.published_events[thread] = clocks.events_of(thread)

    def _learn(self, clocks: Clocks, thread: int, events: int) -> None:
        clocks.learn(thread, events)
        clock, fenced = self._known(events, clocks.cluster, clocks)
        np.maximum(clocks.clock[thread], clock, out=clocks.clock[thread])
        np.maximum(clocks.fenced_global[thread], fenced, out=clocks.fenced_global[thread])

    def _known(self, events: int, cluster: int, clocks: Clocks) -> tuple[np.ndarray, np.ndarray]:
        """The clock and the fenced moments of a cluster's agents that a set of events includes."""
        key = (events, cluster)
        if key not in self._merged:
            if len(self._merged) > _MOST_MERGED:
                self._merged.clear()
            clock = np.full(clocks.clock.shape[1], -1, np.int32)
            clock[: clocks.first_slot] = 0
            fenced = clock.copy()
            for event in self._of_cluster(events, cluster):
                np.maximum(clock, event.clock, out=clock)
                np.maximum(fenced, event.fenced, out=fenced)
            self._merged[key] = clock, fenced
        return self._merged[key]

    def _of_cluster(self, events: int, cluster: int) -> list[Event]:
        chosen = []
        while events:
            bit = events & -events
            event = self._events[bit.bit_length() - 1]
            chosen += [event] if event.cluster == cluster else []
            events ^= bit
        return chosen

    def check(self, access: Access) -> None:
        """Faults unless what conflicts with an access is ordered before it; records the access."""
        planes = self._planes.setdefault(access.region.base, {})
        low, high = int(access.granules.min()), int(access.granules.max())
        kinds = _CONFLICTS[access.kind] if self._races else ()
        if self._ordered and access.kind in ("atomic", "async_atomic"):
            kinds = (*kinds, "atomic", "async_atomic")
        for kind in kinds:
            for cluster, plane in planes.get(kind, {}).items():
                if plane.low <= high and low <= plane.high:
                    self._compare(access, kind, cluster, plane)
        kind = _RECORDED.get(access.kind, access.kind)
        of_kind = planes.setdefault(kind, {})
        if access.clocks.cluster not in of_kind:
            of_kind[access.clocks.cluster] = _Plane(-(-access.region.data.size // GRAIN))
        plane = of_kind[access.clocks.cluster]
        shape = (-1,) + (1,) * (access.granules.ndim - 1)
        plane.agent[access.granules] = access.agents.reshape(shape)
        plane.moment[access.granules] = access.moments.reshape(shape)
        plane.low, plane.high = min(plane.low, low), max(plane.high, high)

    def check_map(self, clocks: Clocks, thread: int, region: Region, address: int) -> None:
        """Faults unless a tensor map that the kernel wrote was passed on to TMA's map proxy.

        The writer releases it by a tensormap fence, and `thread` acquires it by one of the map's
        address.
        """
        planes = self._planes.get(region.base, {})
        words = granules(region, np.array([address]), tensor_map.BYTES)[0]
        for kind in (*_GENERIC, *_ASYNC):
            for writer, plane in planes.get(kind, {}).items():
                moments, agents = plane.moment[words], plane.agent[words]
                if not moments.any():
                    continue
                if writer != clocks.cluster:
                    message = f"a tensor map ({address:#x}) that another cluster has written"
                    raise Fault("not implemented", message)
                if (moments > clocks.clock[thread, agents]).any():
                    message = f"uses the tensor map {address:#x}, which another thread wrote"
                    raise Fault("race", f"{message}, and nothing orders the two", thread % LANES)
                known = clocks.acquired_maps.get((thread, address))
                if known is None or (moments > known[agents]).any():
                    message = f"uses the tensor map {address:#x}, which the kernel wrote, without"
                    missing = "fence.proxy.tensormap: .release after the write, then .acquire"
                    raise Fault("proxy-fence", f"{message} {missing}", thread % LANES)

    def done(self, access: Access, moment: int) -> None:
        """The thread that issued a pending access has waited for it."""
        plane = self._planes[access.region.base][access.kind][access.clocks.cluster]
        agents, moments = plane.agent[access.granules], plane.moment[access.granules]
        mine = (moments == PENDING) & (agents == access.agents[0])
        plane.moment[access.granules[mine]] = moment

    def _compare(self, access: Access, kind: str, cluster: int, plane: _Plane) -> None:
        moments = plane.moment[access.granules]
        if not moments.any():
            return
        agents = plane.agent[access.granules]
        fenced_too = access.kind.startswith("async") and kind in _GENERIC
        for rows, clock, fenced in self._views(access, cluster):
            late = moments[rows] > clock(agents[rows])
            if late.any():
                self._fail(access, kind, cluster, (rows, late), agents)
            late = moments[rows] > fenced(agents[rows]) if fenced_too else late
            if late.any():
                self._fail(access, kind, cluster, (rows, late), agents, "fence")

    def _views(self, access: Access, cluster: int) -> Iterator[tuple[np.ndarray, Known, Known]]:
        """Rows of the granules, and what their threads know of a cluster's agents."""
        clocks, threads = access.clocks, access.threads
        everything = np.arange(len(access.granules))
        if cluster == access.clocks.cluster:
            rows = threads.reshape(-1, *(1,) * (access.granules.ndim - 1))
            yield (
                everything,
                lambda a: clocks.clock[rows, a],
                lambda a: clocks.fenced_global[rows, a],
            )
            return
        known = [clocks.events_of(thread) for thread in threads.tolist()]
        for events in set(known):
            clock, fenced = self._known(events, cluster, clocks)
            rows = np.array([i for i, of_thread in enumerate(known) if of_thread == events])
            rows = everything if len(threads) == 1 else rows
            yield rows, clock.__getitem__, fenced.__getitem__

    def _fail(
        self,
        access: Access,
        kind: str,
        cluster: int,
        where: tuple[np.ndarray, np.ndarray],
        agents: np.ndarray,
        missing: str = "",
    ) -> None:
        rows, late = where
        granule, agent = int(access.granules[rows][late][0]), int(agents[rows][late][0])
        row = int(rows[np.argwhere(late)[0][0]])
        thread = int(access.threads[row if len(access.threads) > 1 else 0])
        other = f"thread {agent}" if agent < access.clocks.threads else "a copy"
        address = access.region.base + granule * GRAIN
        both = "atomic" in access.kind and "atomic" in kind
        rule = "proxy-fence" if missing else "reduction-order" if both else "race"
        lacks = "without a fence.proxy.async" if missing else "and nothing orders the two"
        raise Fault(
            rule,
            f"{_SAYS[access.kind]} global address {address:#x}, which {other} of cluster {cluster} "
            f"{_SAYS[kind]}, {lacks}",
            thread % LANES,
        )


def granules(region: Region, addresses: np.ndarray, size: int) -> np.ndarray:
    """Granules of `size` bytes at every address: (addresses, granules)."""
    first = (addresses - region.base) // GRAIN
    return first[:, None] + np.arange(max(size // GRAIN, 1))
