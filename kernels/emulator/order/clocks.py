"""Vector clocks of a cluster: what every thread knows of the others, and what it hands over.

Threads and warps are numbered through the cluster, CTA by CTA. Agents are its threads and its
mbarriers: clock[t, u] says up to which of its moments thread t knows what thread u did, and which
phases of a barrier it has seen complete. What one elected lane signals orders only what that lane
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


class Clocks:
    """What every thread of a cluster knows of its threads, its mbarriers, and its CTAs' starts."""

    def __init__(
        self, ctas: int, threads_per_cta: int, tensor: bool = False, tensor_maps: bool = False
    ):
        self.threads = threads = ctas * threads_per_cta
        self.threads_per_cta = threads_per_cta
        self.first_slot, self.slots = threads + ctas, 0
        # Behind the mbarriers comes what order.tensor_memory keeps: pipes, and threads once more.
        self.first_pipe = self.first_slot + ctas * BARRIER_SLOTS
        agents = self.first_pipe + (2 * PIPE_SLOTS + threads if tensor else 0)
        self.clock = np.zeros((threads, agents), np.int32)
        everyone = np.arange(threads)
        self.clock[everyone, everyone] = 1
        self.clock[everyone, threads + everyone // threads_per_cta] = 1
        self.fenced = np.zeros((ctas + 1 + tensor_maps, threads, agents), np.int32)
        # Until a thread knows of a barrier's initialisation, it knows less than phase 0 of it.
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
        for warp in np.unique(threads // LANES):
            lanes = np.arange(warp * LANES, (warp + 1) * LANES)
            self.now[warp] += 1
            self.clock[lanes, lanes] = self.now[warp]
