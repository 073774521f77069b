"""One thread block: its warps, shared memory, barriers and asynchronous operations."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from kernels.emulator.barriers import NamedBarrier, TransactionBarrier
from kernels.emulator.memory import Region, uninitialised
from kernels.emulator.order import Order
from kernels.emulator.products import Tile
from kernels.emulator.program import LANES
from kernels.emulator.tma import Transfer
from kernels.emulator.warp import Warp

if TYPE_CHECKING:
    from kernels.emulator.machine import Machine

SHARED_BASE = 1024
"""Hardware keeps the first KiB of the shared window for itself."""


@dataclasses.dataclass(frozen=True)
class Reduction:
    """Additions to global memory that have been issued and not made, at one moment of a warp."""

    region: Region
    threads: np.ndarray
    moment: int
    addresses: np.ndarray
    values: np.ndarray

    def perform(self, chosen: np.ndarray) -> list[Reduction]:
        """Makes the chosen ones; returns what is left."""
        self.region.add(self.addresses[chosen], self.values[chosen])
        rest = ~chosen
        if not rest.any():
            return []
        left = self.threads[rest], self.moment, self.addresses[rest], self.values[rest]
        return [Reduction(self.region, *left)]


class Cta:
    """State of a thread block while it is resident."""

    def __init__(self, machine: Machine, index: tuple[int, int, int]):
        self.machine, self.index = machine, index
        self.number = index[0] + machine.grid[0] * (index[1] + machine.grid[1] * index[2])
        size = SHARED_BASE + machine.shared_bytes
        self.shared = Region("shared memory", 0, uninitialised(size))
        self.shared_version = self.decoded_version = 0
        self.decoded: dict[tuple[Tile, str], np.ndarray] = {}
        threads = machine.threads
        self.order = Order(threads, self.shared.data.size) if machine.policy.races else None
        self.barriers: dict[int, TransactionBarrier] = {}
        self.named: dict[int, NamedBarrier] = {}
        self.transfers: list[Transfer] = []
        self.bulk_groups: dict[int, list[list[Transfer]]] = {}
        self.bulk_open: dict[int, list[Transfer]] = {}
        counts = machine.program.kernel.registers
        self.warps = [Warp(self, i, counts) for i in range(threads // LANES)]
        self.reductions: list[Reduction] = []
        self.free_registers = machine.registers_per_sm - machine.registers * threads
        self.register_budget = [machine.registers] * len(self.warps)
        self.starved = int(machine.rng.integers(len(self.warps)))

    def issue(self, transfer: Transfer) -> None:
        """Takes an asynchronous copy, which is made now or later, as the policy says."""
        self.transfers.append(transfer)
        if self.machine.early():
            self.perform(transfer)

    def perform(self, transfer: Transfer) -> None:
        """Makes a copy unless it has been made."""
        if not transfer.made:
            transfer.made = True
            self.transfers.remove(transfer)
            transfer.perform()

    def reduce(self, reduction: Reduction) -> None:
        """Takes additions, which are made now or later, as the policy says."""
        if self.order is None or self.machine.early():
            reduction.perform(np.ones(len(reduction.threads), bool))
            self.machine.memory.version += 1
        else:
            self.reductions.append(reduction)

    def release_reductions(self, threads: np.ndarray) -> None:
        """Makes what these threads know to come before their release to the whole device."""
        if self.order is None:
            return
        known = self.order.clock[threads].max(0)
        waiting, self.reductions = self.reductions, []
        for reduction in waiting:
            chosen = known[reduction.threads] >= reduction.moment
            self.reductions += reduction.perform(chosen) if chosen.any() else [reduction]
        self.machine.memory.version += 1
