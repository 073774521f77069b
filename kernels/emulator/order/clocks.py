"""Vector clocks of a cluster: what every thread knows of the others, and what it hands over.

Threads and warps are numbered through the cluster, CTA by CTA. Agents are its threads and its
mbarriers. clock[t, u] is the last moment of thread u whose work thread t knows, or the last phase
of barrier u that it has seen complete. What one elected lane signals orders only what that lane
knew: warps are no agents, except that

- a moment lasts until the warp's next release or proxy fence (all lanes of a warp count alike), and
- what a warp's asynchronous operation reads is known when any lane that waited for it is.

`fenced` is the part of `clock` that a proxy fence has passed on: what threads wrote must be known
there before the other proxy may touch it. It has a row for the asynchronous proxy (TMA, wgmma) of
every CTA's shared memory, since a fence of .shared::cta concerns that of the thread's own CTA; then
one for the asynchronous proxy of global memory; then, in programs with tensormap fences, one for
the proxy that reads tensor maps.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from kernels.emulator.memory import Fault
from kernels.emulator.ptx.program import LANES

BARRIER_SLOTS = 64
PIPE_SLOTS = 8
PENDING = np.iinfo(np.int32).max


@dataclasses.dataclass(frozen=True)
class Knowledge:
    """What a releasing thread hands over; `events` are other CTAs' (see global_order).

    fenced: (memory and proxy that it concerns, agent), see the module's text.
    """

    clock: np.ndarray
    fenced: np.ndarray
    events: int = 0

    def merged(self, other: Knowledge | None) -> Knowledge:
        """Both together."""
        if other is None:
            return self
        return Knowledge(
            np.maximum(self.clock, other.clock),
            np.maximum(self.fenced, other.fenced),
            self.events | other.events,
        )


def rows_of(threads: np.ndarray) -> np.ndarray | slice:
    """Returns an index of the rows of threads: a slice if they are neighbours, which is faster.

    threads: at least one, in ascending order.
    """
    first, last = int(threads[0]), int(threads[-1])
    return slice(first, last + 1) if last - first == len(threads) - 1 else threads


class Clocks:
    """What every thread of a cluster knows of its threads, its mbarriers, and its CTAs' starts.

    A thread learns by `acquire` what another handed over by `release`. `cluster` is its number.
    """

    def __init__(
        self,
        ctas: int,
        threads_per_cta: int,
        tensor: bool = False,
        tensor_maps: bool = False,
        cluster: int = 0,
    ):
        self.cluster = cluster
        self.threads = threads = ctas * threads_per_cta
        self.threads_per_cta = threads_per_cta
        self.first_slot, self.slots = threads + ctas, 0
        # The columns after the mbarriers' are order.tensor_memory's: pipes, and threads once more.
        self.first_pipe = self.first_slot + ctas * BARRIER_SLOTS
        agents = self.first_pipe + (2 * PIPE_SLOTS + threads if tensor else 0)
        self.clock = np.zeros((threads, agents), np.int32)
        self._own = self.clock.reshape(-1)[:: agents + 1]  # clock[t, t] of every thread
        everyone = np.arange(threads)
        self.clock[everyone, everyone] = 1
        self.clock[everyone, threads + everyone // threads_per_cta] = 1
        self.fenced = np.zeros((ctas + 1 + tensor_maps, threads, agents), np.int32)
        # A thread that does not know of a barrier's initialisation knows phase -1 of it.
        self.clock[:, self.first_slot :] = self.fenced[:, :, self.first_slot :] = -1
        self.fenced_shared, self.fenced_global = self.fenced[:ctas], self.fenced[ctas]
        self.fenced_maps = self.fenced[ctas + 1] if tensor_maps else None
        self.acquired_maps: dict[tuple[int, int], np.ndarray] = {}
        """What a thread's last acquiring tensormap fence of an address knew of `fenced_maps`."""
        self.now = np.ones(threads // LANES, np.int32)
        self.events: dict[int, int] = {}
        self.later: dict[int, Knowledge] = {}
        self.later_events: dict[int, int] = {}
        self.published_events: dict[int, int] = {}
        self.fences = False
        """Whether there has been any fence but fence.mbarrier_init."""
        self.published: np.ndarray | None = None
        """What fences have made ready for relaxed operations to carry; none before the first."""

    def new_slot(self) -> int:
        """An agent for a barrier."""
        self.slots += 1
        if self.first_slot + self.slots > self.first_pipe:
            raise Fault("not implemented", f"more than {BARRIER_SLOTS} mbarriers a CTA")
        return self.first_slot + self.slots - 1

    def advance(self, threads: np.ndarray) -> None:
        """The next moments of these threads' warps begin."""
        for warp in dict.fromkeys((threads // LANES).tolist()):
            self.now[warp] += 1
            self._own[warp * LANES : (warp + 1) * LANES] = self.now[warp]

    def release(self, threads: np.ndarray) -> Knowledge:
        """What these threads know now; their warps' next moments begin."""
        events = 0
        for thread in threads.tolist() if self.events else ():
            events |= self.events.get(thread, 0)
        rows = rows_of(threads)
        given = Knowledge(self.clock[rows].max(0), self.fenced[:, rows].max(1), events)
        self.advance(threads)
        return given

    def relaxed_release(self, threads: np.ndarray) -> Knowledge | None:
        """What a relaxed operation of these threads carries: what fences before it released."""
        if self.published is None:
            return None
        published = self.published[threads].max(0)
        fenced = self.fenced[:, threads].max(1)
        return Knowledge(published, np.minimum(fenced, published))

    def publish(self, threads: np.ndarray, only_barriers: bool = False) -> None:
        """A releasing fence: later relaxed operations of these threads carry what they know now.

        `only_barriers` is fence.mbarrier_init, which releases initialisations alone.
        """
        if self.published is None:
            self.published = np.zeros_like(self.clock)
            self.published[:, self.first_slot :] = -1
        if only_barriers:
            rows = np.minimum(self.clock[threads, self.first_slot :], 0)
            own = self.published[threads, self.first_slot :]
            self.published[threads, self.first_slot :] = np.maximum(own, rows)
        else:
            self.published[threads] = self.clock[threads]
            self.fences = True
            self.advance(threads)

    def acquire(self, threads: np.ndarray, given: Knowledge) -> None:
        """These threads learn what others handed over."""
        rows = rows_of(threads)
        self.clock[rows] = np.maximum(self.clock[rows], given.clock)
        self.fenced[:, rows] = np.maximum(self.fenced[:, rows], given.fenced[:, None])
        for thread in threads.tolist() if given.events else ():
            self.learn(thread, given.events)

    def acquire_later(
        self, threads: np.ndarray, slot: int, phase: int, given: Knowledge | None
    ) -> None:
        """A relaxed wait has seen a phase: the next fence will acquire what that hands over."""
        clock = np.zeros(self.clock.shape[1], np.int32)
        clock[slot] = phase
        given = Knowledge(clock, np.zeros_like(self.fenced[:, 0])).merged(given)
        for thread in threads.tolist():
            self.later[thread] = given.merged(self.later.get(thread))

    def fence(self, threads: np.ndarray) -> None:
        """fence.acq_rel: acquires what relaxed waits have seen, releases for relaxed arrivals."""
        for thread in threads.tolist() if self.later else ():
            given = self.later.pop(thread, None)
            if given is not None:
                self.acquire(np.array([thread]), given)
        self.publish(threads)

    def learn(self, thread: int, events: int) -> None:
        """A thread learns of events."""
        self.events[thread] = self.events.get(thread, 0) | events

    def events_of(self, thread: int) -> int:
        """The events that a thread knows of."""
        return self.events.get(thread, 0)

    def see_phase(self, threads: np.ndarray, slot: int, phase: int) -> None:
        """These threads have seen a barrier complete this many phases."""
        self.clock[threads, slot] = np.maximum(self.clock[threads, slot], phase)

    def see_starts(self, threads: np.ndarray) -> None:
        """These threads know that every CTA of the cluster runs."""
        self.clock[threads, self.threads : self.first_slot] = 1

    def fence_proxy(self, threads: np.ndarray, rank: int, space: str = "") -> None:
        """fence.proxy.async of threads of the CTA of a rank, for one state space or for all.

        It counts for what its own thread wrote: PTX has no rule for a fence of another thread that
        knows of the store. What no thread wrote, but a barrier's phase completes, any may fence.
        The next moments of the threads' warps begin, so that later stores do not count as fenced.
        """
        slots = slice(self.first_slot, None)
        concerned = [self.fenced_global] if space in ("", "global") else []
        if space == "shared:cta":
            concerned.append(self.fenced[rank])
        elif space != "global":
            concerned.extend(self.fenced_shared)
        for fenced in concerned:
            fenced[threads, threads] = self.clock[threads, threads]
            fenced[threads, slots] = self.clock[threads, slots]
        self.advance(threads)

    def release_maps(self, threads: np.ndarray) -> None:
        """fence.proxy.tensormap::generic.release: passes on what threads wrote into tensor maps."""
        assert self.fenced_maps is not None
        self.fenced_maps[threads] = self.clock[threads]
        self.advance(threads)

    def acquire_maps(self, threads: np.ndarray, addresses: np.ndarray) -> None:
        """fence.proxy.tensormap::generic.acquire of the map at each thread's address."""
        assert self.fenced_maps is not None
        for thread, address in zip(threads.tolist(), addresses.tolist(), strict=True):
            self.acquired_maps[thread, address] = self.fenced_maps[thread].copy()
