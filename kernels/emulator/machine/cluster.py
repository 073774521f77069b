"""A cluster: CTAs that are resident together and reach into each other's shared memory."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from kernels.emulator.machine.barriers import ClusterBarrier
from kernels.emulator.machine.cta import RANK_SHIFT, Cta
from kernels.emulator.memory import Fault
from kernels.emulator.order.clocks import Clocks
from kernels.emulator.order.tensor_memory import TensorClocks

if TYPE_CHECKING:
    from kernels.emulator.machine.machine import Machine


class Cluster:
    """State of a cluster while it is resident; `ctas` by rank, x fastest.

    `refused` says that it has seen a clusterlaunchcontrol request that did not succeed.
    """

    def __init__(self, machine: Machine, index: tuple[int, int, int]):
        self.index, self.shape = index, machine.cluster
        width, height, depth = self.shape
        (x, y, z), grid = index, machine.cluster_grid
        self.number = x + grid[0] * (y + grid[1] * z)
        places = [
            (i, j, k) for k, j, i in itertools.product(range(depth), range(height), range(width))
        ]
        tensor = machine.program.uses_tensor_memory
        self.clocks = self.tensor_clocks = None
        if machine.policy.races:
            maps = machine.program.fences_tensor_maps
            self.clocks = Clocks(len(places), machine.threads, tensor, maps, self.number)
        if self.clocks is not None and tensor:
            self.tensor_clocks = TensorClocks(self.clocks, machine.policy.tensor_fences)
        self.refused = False
        self.barrier = ClusterBarrier(len(places) * machine.threads)
        self.ctas = [
            Cta(machine, self, rank, (x * width + i, y * height + j, z * depth + k))
            for rank, (i, j, k) in enumerate(places)
        ]

    def of_rank(self, rank: int) -> Cta:
        """A CTA that must exist and not have ended."""
        if not 0 <= rank < len(self.ctas):
            raise Fault("out-of-bounds", f"rank {rank} of a cluster of {len(self.ctas)} CTAs")
        if self.ctas[rank].ended:
            raise Fault("cluster-exit", f"CTA {rank} of the cluster has exited")
        return self.ctas[rank]

    def holding(self, address: int, threads: np.ndarray | None = None) -> Cta:
        """The CTA whose shared memory holds an address, known by these threads to have started."""
        cta = self.of_rank(address >> RANK_SHIFT)
        order = cta.order
        if order is not None and threads is not None and int(threads[0]) not in order.own_threads:
            order.visit(threads)
        return cta
