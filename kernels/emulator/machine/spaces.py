"""State spaces: which memory the lanes of an access reach, and its checks of bounds and order."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from kernels.emulator.machine.cta import RANK_SHIFT, Cta
from kernels.emulator.machine.warp import Warp
from kernels.emulator.memory import Fault, Region
from kernels.emulator.order.global_memory import Access, granules
from kernels.emulator.ptx.windows import LOCAL_WINDOW, SHARED_WINDOW

SHARED = ("shared", "shared:cta")
SPACES = {"param", "param:entry", "const", "local", "global", "shared:cluster", *SHARED}
WINDOW_BYTES = 1 << 32
_CLUSTER_SHIFT = 48  # of the cluster's number in the key of a shared address


@dataclasses.dataclass(slots=True)
class Part:
    """Lanes of a warp whose addresses lie in one region; `home` owns it if it is shared memory."""

    warp: Warp
    region: Region
    lanes: np.ndarray
    addresses: np.ndarray
    home: Cta | None = None

    @property
    def threads(self) -> np.ndarray:
        """The threads, counted through the cluster."""
        return self.warp.lanes[self.lanes]

    @property
    def keys(self) -> np.ndarray:
        """Addresses that are unique in the launch, for what is released and acquired there."""
        if self.home is None:
            return self.addresses
        return self.addresses + SHARED_WINDOW + (self.home.cluster.number << _CLUSTER_SHIFT)

    def reads(self, size: int, atomic: bool = False) -> None:
        """Faults unless the lanes may load `size` bytes now."""
        if self.home is None:
            self._shadow("poll" if atomic else "read", size)
        elif self.home.order is not None and atomic:
            self.home.order.thread_updates(self.threads, self.addresses, size, polls=True)
        elif self.home.order is not None:
            self.home.order.thread_reads(self.threads, self.addresses, size)

    def writes(self, size: int, atomic: bool = False, counts: bool = False) -> None:
        """Faults unless the lanes may store `size` bytes now, or with `counts` may add integers."""
        home = self.home
        if home is None:
            self.region.check_writable()
            self._shadow("count" if counts else "atomic" if atomic else "write", size)
            return
        if home.order is not None and atomic:
            home.order.thread_updates(self.threads, self.addresses, size)
        elif home.order is not None:
            home.order.thread_writes(self.threads, self.addresses, size)

    def changed(self) -> None:
        """Notes that this memory has changed."""
        if self.home is None:
            self.warp.cta.machine.memory.version += 1
        else:
            self.home.shared_version += 1

    def settle(self) -> None:
        """Performs the outstanding reductions of these threads to these addresses."""
        self.warp.cta.settle(self.region, self.threads, self.addresses)

    def _shadow(self, kind: str, size: int) -> None:
        cta, device = self.warp.cta, self.warp.cta.machine.global_order
        if cta.reductions and kind not in ("atomic", "count"):
            self.settle()
        if device is None or not device.shadowed or not self.region.global_:
            return
        assert cta.clocks is not None
        threads = self.threads
        moments = np.full(1, cta.clocks.now[self.warp.number])
        where = granules(self.region, self.addresses, size)
        device.check(Access(kind, cta.clocks, self.region, where, threads, threads, moments))


def parts(
    warp: Warp, mask: np.ndarray, addresses: np.ndarray, space: str, size: int
) -> Iterator[Part]:
    """The regions that `size` aligned bytes at the addresses of the lanes in `mask` lie in.

    Args:
      addresses: int64 of all 32 lanes.
      space: a state space, or "" for generic addresses.
    """
    if space in SHARED:
        part = Part(warp, warp.cta.shared, mask, addresses[mask], warp.cta)
        check_shared(warp.cta, part.addresses, mask, size)
        yield part
    elif space == "shared:cluster":
        ranks = addresses >> RANK_SHIFT
        for rank in np.unique(ranks[mask]).tolist():
            lanes = mask & (ranks == rank)
            home = warp.cta.cluster.holding(rank << RANK_SHIFT, warp.lanes[lanes])
            part = Part(warp, home.shared, lanes, addresses[lanes], home)
            check_shared(home, part.addresses, lanes, size)
            yield part
    elif space == "local":
        yield _local(warp, mask, addresses, size)
    elif space == "":
        yield from _generic(warp, mask, addresses, size)
    else:
        there = addresses[mask]
        for region, held in warp.cta.machine.memory.split(there, np.flatnonzero(mask), size):
            lanes = mask
            if not held.all():
                lanes = np.zeros_like(mask)
                lanes[np.flatnonzero(mask)[held]] = True
            yield Part(warp, region, lanes, there[held])


def _local(warp: Warp, mask: np.ndarray, addresses: np.ndarray, size: int) -> Part:
    """Every thread has its own local memory; thread after thread, they share one region."""
    bytes_each = warp.local.data.size // len(mask)
    one = Region("local memory", 0, warp.local.data[:bytes_each])
    one.check(addresses[mask], np.flatnonzero(mask), size)
    own = addresses[mask] + np.flatnonzero(mask) * bytes_each
    return Part(warp, warp.local, mask, own)


def _generic(warp: Warp, mask: np.ndarray, addresses: np.ndarray, size: int) -> Iterator[Part]:
    shared = (addresses >= SHARED_WINDOW) & (addresses < SHARED_WINDOW + WINDOW_BYTES)
    local = (addresses >= LOCAL_WINDOW) & (addresses < LOCAL_WINDOW + WINDOW_BYTES)
    for where, space, base in (
        (shared, "shared:cluster", SHARED_WINDOW),
        (local, "local", LOCAL_WINDOW),
        (~shared & ~local, "global", 0),
    ):
        if (mask & where).any():
            yield from parts(warp, mask & where, addresses - base, space, size)


def check_shared(cta: Cta, addresses: np.ndarray, mask: np.ndarray, size: int) -> None:
    """Faults unless the addresses of these lanes are ordinary shared memory of a CTA."""
    cta.shared.check(addresses, np.flatnonzero(mask), size)
    low, high = addresses.min() - 8, addresses.max() + size
    for barrier in cta.barriers:
        if not low < barrier < high:
            continue
        inside = (addresses < barrier + 8) & (addresses + size > barrier)
        if inside.any():
            lane = int(np.flatnonzero(mask)[np.argmax(inside)])
            raise Fault("phase-misuse", f"an ordinary access to mbarrier {barrier:#x}", lane)
