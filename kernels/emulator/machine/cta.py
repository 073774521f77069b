"""One thread block: its warps, shared memory, barriers and asynchronous operations."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

import numpy as np

from kernels.emulator.machine.barriers import NamedBarrier, TransactionBarrier
from kernels.emulator.machine.tensor_memory import TensorMemory
from kernels.emulator.machine.tensor_pipe import Pipe
from kernels.emulator.machine.transfers import Transfer
from kernels.emulator.machine.warp import Warp
from kernels.emulator.memory import Fault, Region, uninitialised
from kernels.emulator.order.shared_memory import SharedOrder
from kernels.emulator.order.tensor_memory import TensorClocks
from kernels.emulator.ptx.program import LANES

if TYPE_CHECKING:
    from kernels.emulator.machine.cluster import Cluster
    from kernels.emulator.machine.machine import Machine

SHARED_BASE = 1024
"""Hardware keeps the first KiB of the shared window for itself."""
RANK_SHIFT = 24
"""Addresses of shared memory carry the rank of the CTA in its cluster from this bit up."""
OFFSET_MASK = (1 << RANK_SHIFT) - 1


@dataclasses.dataclass(frozen=True)
class Reduction:
    """Additions to global memory that a warp issued at one moment and that are outstanding."""

    region: Region
    threads: np.ndarray
    moment: int
    addresses: np.ndarray
    values: np.ndarray

    def perform(self, chosen: np.ndarray) -> list[Reduction]:
        """Performs the chosen ones; returns what is left."""
        self.region.add(self.addresses[chosen], self.values[chosen])
        rest = ~chosen
        if not rest.any():
            return []
        left = self.threads[rest], self.moment, self.addresses[rest], self.values[rest]
        return [Reduction(self.region, *left)]


class Cta:
    """State of a thread block while it is resident. `cluster.ctas` are its peers, by `rank`."""

    def __init__(self, machine: Machine, cluster: Cluster, rank: int, index: tuple[int, int, int]):
        self.machine, self.cluster, self.rank, self.index = machine, cluster, rank, index
        self.base, self.ended = rank << RANK_SHIFT, False
        self.number = index[0] + machine.grid[0] * (index[1] + machine.grid[1] * index[2])
        size = SHARED_BASE + machine.shared_bytes
        self.shared = Region("shared memory", self.base, uninitialised(size))
        self.shared_version = self.decoded_version = 0
        self.decoded: dict[tuple[Hashable, str], np.ndarray] = {}
        threads = machine.threads
        self.clocks = clocks = cluster.clocks
        self.order = None if clocks is None else SharedOrder(clocks, rank, size, self.base)
        self.barriers: dict[int, TransactionBarrier] = {}
        self.retired: list[TransactionBarrier] = []
        self.named: dict[int, NamedBarrier] = {}
        self.transfers: list[Transfer] = []
        self.signalled: dict[int, int] = {}
        """Phases of other CTAs' barriers (by slot) that end copies into this one's memory."""
        self.pipes: dict[int, Pipe] = {}
        self.tensor_operations: collections.deque[tuple[Pipe, Callable[[], None]]] = (
            collections.deque()
        )
        self.bulk_groups: dict[int, list[list[Transfer]]] = {}
        self.bulk_open: dict[int, list[Transfer]] = {}
        self.special = _special(self)
        counts = machine.program.kernel.registers
        self.warps = [Warp(self, i, counts) for i in range(threads // LANES)]
        self.reductions: list[Reduction] = []
        # setmaxnreg hands out what the CTA was launched with, and none of what the SM has left.
        self.free_registers = 0
        self.register_budget = [machine.registers] * len(self.warps)
        self.starved = int(machine.rng.integers(len(self.warps)))

    @property
    def tensor_clocks(self) -> TensorClocks | None:
        """What the cluster's threads know of tensor memory; None where races are not checked."""
        return self.cluster.tensor_clocks

    @functools.cached_property
    def tensor(self) -> TensorMemory:
        """Its tensor memory."""
        return TensorMemory(self.tensor_clocks)

    def issue(self, transfer: Transfer) -> None:
        """Accepts an asynchronous copy, which is performed now or later, as the policy says."""
        self.transfers.append(transfer)
        if self.machine.early():
            self.perform(transfer)

    def unread(self, thread: int) -> bool:
        """Whether a thread has bulk stores whose sources may still be read."""
        groups = [self.bulk_open.get(thread, []), *self.bulk_groups.get(thread, [])]
        return any(not transfer.waited for group in groups for transfer in group)

    def perform(self, transfer: Transfer) -> None:
        """Performs a copy unless it has been performed."""
        if not transfer.performed:
            transfer.performed = True
            self.transfers.remove(transfer)
            transfer.perform()

    def check_end(self) -> None:
        """Faults unless everything that touches this CTA's memory and barriers is over."""
        for barrier in self.named.values():
            if barrier.arrived and self.machine.policy.clean_exits:
                raise Fault("participants", f"the CTA ends, but {barrier.describe()}")
        for barrier in (*self.barriers.values(), *self.retired):
            self._check_barrier(barrier)
        if self.order is None:
            return
        for slot, phase in self.signalled.items():
            if not self.order.seen(slot, phase):
                message = "the CTA ends, but does not know of the end of a copy into its memory"
                raise Fault("outstanding", message)
        visitor = self.order.unknown_visitor()
        if visitor is not None:
            raise Fault(
                "cluster-exit",
                f"the CTA ends, but nothing says that thread {visitor} of the cluster is done with "
                "its shared memory",
            )

    def _check_barrier(self, barrier: TransactionBarrier) -> None:
        if barrier.transactions and self.machine.policy.clean_exits:
            message = f"the CTA ends, but {barrier.describe(barrier.phase & 1)}"
            raise Fault("outstanding", message)
        order = self.order
        if order is None:
            return
        if barrier.observed < barrier.copied and not order.seen(barrier.slot, barrier.copied):
            message = f"the CTA ends, but nobody waits for the copies to {barrier.address:#x}"
            raise Fault("outstanding", message)
        for thread, (moment, phase) in barrier.visits.items():
            known = order.seen(barrier.slot, phase) or order.knows(thread, moment)
            if barrier.observed < phase and not known:
                raise Fault(
                    "cluster-exit",
                    f"the CTA ends, but nobody knows of the arrival of thread {thread} of the "
                    f"cluster on mbarrier {barrier.address:#x}",
                )

    def reduce(self, reduction: Reduction) -> None:
        """Accepts additions, which are performed now or later, as the policy says."""
        if self.order is None or self.machine.early():
            reduction.perform(np.ones(len(reduction.threads), bool))
            self.machine.memory.version += 1
        else:
            self.reductions.append(reduction)

    def settle(self, region: Region, threads: np.ndarray, addresses: np.ndarray) -> None:
        """Performs the reductions that these threads issued to what they now access themselves."""
        if not any(reduction.region is region for reduction in self.reductions):
            return
        left = []
        for reduction in self.reductions:
            own = reduction.region is region and np.isin(reduction.threads, threads).any()
            if own and np.isin(reduction.addresses, addresses).any():
                reduction.perform(np.ones(len(reduction.threads), bool))
            else:
                left.append(reduction)
        self.reductions = left

    def release_reductions(self, threads: np.ndarray) -> None:
        """Performs the reductions that these threads know of, before they release to the device."""
        for cta in self.cluster.ctas:
            if cta.reductions:
                cta.make_known_reductions(threads)

    def make_known_reductions(self, threads: np.ndarray) -> None:
        """Performs the reductions of this CTA that these threads of the cluster know of."""
        if self.clocks is None:
            return
        known = self.clocks.clock[threads].max(0)
        waiting, self.reductions = self.reductions, []
        for reduction in waiting:
            chosen = known[reduction.threads] >= reduction.moment
            self.reductions += reduction.perform(chosen) if chosen.any() else [reduction]
        self.machine.memory.version += 1


def _special(cta: Cta) -> dict[str, np.ndarray]:
    """Special registers that are the same in all threads, and the addresses of shared variables."""
    machine, cluster = cta.machine, cta.cluster
    values = {
        "cluster_ctarank": cta.rank,
        "cluster_nctarank": math.prod(cluster.shape),
    }
    processors = int(machine.rng.integers(1, 256))
    values |= {
        "nwarpid": 64,
        "smid": int(machine.rng.integers(processors)),
        "nsmid": processors,
        "gridid": int(machine.rng.integers(1 << 31)),
        "dynamic_smem_size": machine.dynamic_bytes,
        "total_smem_size": machine.shared_bytes,
        "aggr_smem_size": machine.shared_bytes + SHARED_BASE,
    }
    within = [at % size for at, size in zip(cta.index, cluster.shape, strict=True)]
    for name, of_axes in (
        ("ctaid", cta.index),
        ("nctaid", machine.grid),
        ("ntid", machine.block),
        ("clusterid", cluster.index),
        ("nclusterid", machine.cluster_grid),
        ("cluster_ctaid", within),
        ("cluster_nctaid", cluster.shape),
    ):
        values |= {f"{name}.{axis}": value for axis, value in zip("xyz", of_axes, strict=True)}
    rows = {f"%{name}": np.full(LANES, value, np.uint32) for name, value in values.items()}
    rows["%is_explicit_cluster"] = np.full(LANES, machine.explicit_cluster)
    for name, offset in machine.program.shared.items():
        rows[f"&{name}"] = np.full(LANES, cta.base | offset, np.uint32)
    return rows
