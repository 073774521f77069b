"""The machine: which CTAs are resident, which warp runs next, and what is outstanding."""

from __future__ import annotations

import collections
import itertools
import math

import numpy as np

from kernels.emulator.machine import steps, tensor_pipe
from kernels.emulator.machine.cluster import Cluster
from kernels.emulator.machine.cta import Cta, Reduction
from kernels.emulator.machine.geometry import Geometry, launch_registers
from kernels.emulator.machine.tally import Tally
from kernels.emulator.machine.trace import Trace
from kernels.emulator.machine.transfers import Transfer
from kernels.emulator.machine.warp import Warp
from kernels.emulator.memory import Fault, GlobalMemory
from kernels.emulator.order.global_memory import GlobalOrder
from kernels.emulator.policy import Policy
from kernels.emulator.ptx.program import LANES, Program, Run

_REFUSED_CHANCE = 0.1  # that a request to cancel a cluster fails, unless in order
_STARVED_STEPS = 512  # after which even a starved warp may run, since others may poll for it
_LATE_CHANCE = 0.1  # that a step of the "random" policy performs an asynchronous copy


class Machine:
    """Runs one launch."""

    def __init__(
        self,
        program: Program,
        geometry: Geometry,
        memory: GlobalMemory,
        policy: Policy,
        seed: int,
    ):
        self.program, self.memory, self.policy = program, memory, policy
        self.grid, self.block, self.cluster = geometry.grid, geometry.block, geometry.cluster
        self.cluster_grid = geometry.cluster_grid
        kernel = program.kernel
        named = kernel.cluster is not None or kernel.explicit_cluster
        self.explicit_cluster = named or math.prod(self.cluster) > 1
        self.threads, self.shared_bytes = geometry.threads, geometry.shared_bytes
        self.dynamic_bytes = geometry.dynamic_bytes
        self.rng = np.random.default_rng(seed)
        self.registers = launch_registers(kernel, self.threads)
        self.tallies = [Tally.of(program) for _ in range(self.threads // LANES)]
        self.most_tensor_columns = 0
        self.trace: Trace | None = None
        self.barrier_names: dict[int, str] = {}
        self.global_order = None
        if policy.races:
            self.global_order = GlobalOrder(policy.global_races, policy.ordered_reductions)
        self.stuck = False
        self._steps = 0
        self._leftover: list[Reduction] = []
        self._stores: list[Transfer] = []
        self._pending = collections.deque(self._in_order_of_start())
        self._epoch = int(self.rng.integers(1 << 40))
        self._ctas: list[Cta] = []

    def coin(self) -> bool:
        """A fair choice, unless the schedule is in order."""
        return self.policy.schedule != "in_order" and bool(self.rng.integers(2))

    def clock(self) -> int:
        """Cycles that have passed since some moment; never the same number twice."""
        self._epoch += 1 + int(self.rng.integers(1000))
        return self._epoch + self._steps

    def cancel(self) -> tuple[int, int, int] | None:
        """Removes a cluster from those that have not started; None if that does not succeed."""
        refused = self.policy.schedule != "in_order" and self.rng.random() < _REFUSED_CHANCE
        if refused or not self._pending:
            return None
        if self.policy.schedule != "in_order":
            self._pending.rotate(-int(self.rng.integers(len(self._pending))))
        return self._pending.popleft()

    def shuffled(self, things: list[int]) -> list[int]:
        """The things in any order, unless the schedule is in order."""
        if self.policy.schedule == "in_order":
            return things
        return [things[i] for i in self.rng.permutation(len(things))]

    def early(self) -> bool:
        """Whether an asynchronous operation that was just issued happens at once."""
        if self.policy.asynchronous == "random":
            return bool(self.rng.integers(2))
        return self.policy.asynchronous == "early"

    def run(self) -> None:
        """Runs every CTA to its end.

        Raises:
          EmulationError: the kernel breaks a rule or no warp can go on.
        """
        while True:
            self._start()
            if not self._ctas:
                self._reduce_leftover()
                return
            warp = self._choose() or self._unblock()
            if warp is None:
                continue
            self._advance(warp)
            if all(other.done for other in warp.cta.warps):
                self._finish(warp.cta)
            elif self.policy.asynchronous == "random" and self.rng.random() < _LATE_CHANCE:
                self._perform_any()

    def _start(self) -> None:
        """Clusters start while there is room for all their CTAs; one runs in any case."""
        size, pending = math.prod(self.cluster), self._pending
        while pending and (not self._ctas or len(self._ctas) + size <= self.policy.resident_ctas):
            self._ctas += Cluster(self, pending.popleft()).ctas

    def _reduce_leftover(self) -> None:
        """Performs at the end of the launch what nobody waited for, in any order."""
        while self._stores:
            self._store_any()
        for index in self.rng.permutation(len(self._leftover)):
            reduction = self._leftover[index]
            reduction.perform(np.ones(len(reduction.threads), bool))

    def _in_order_of_start(self) -> list[tuple[int, int, int]]:
        ranges = [range(extent) for extent in reversed(self.cluster_grid)]
        indices = [(x, y, z) for z, y, x in itertools.product(*ranges)]
        if self.policy.start_order == "index":
            return indices
        if self.policy.start_order == "reversed":
            return indices[::-1]
        return [indices[i] for i in self.rng.permutation(len(indices))]

    def _choose(self) -> Warp | None:
        """A warp that can run, by the policy; None if there is none."""
        ready = [
            warp
            for cta in self._ctas
            for warp in cta.warps
            if not warp.done and (warp.waiting is None or warp.waiting.ready())
        ]
        if not ready:
            return None
        if self.policy.schedule == "in_order":
            return ready[0]
        if self.policy.schedule == "starve" and self._steps % _STARVED_STEPS:
            ready = [warp for warp in ready if warp.index != warp.cta.starved] or ready
        return ready[int(self.rng.integers(len(ready)))]

    def _perform_any(self) -> bool:
        """Performs one of the outstanding copies or else reductions; False if there is neither."""
        waiting = [transfer for cta in self._ctas for transfer in cta.transfers]
        if not waiting and self._stores:
            self._store_any()
            return True
        if not waiting:
            return self._reduce_any()
        chosen = waiting[int(self.rng.integers(len(waiting)))]
        self._perform(chosen)
        return True

    def _store_any(self) -> None:
        """Performs one of the stores of CTAs that have ended."""
        transfer = self._stores.pop(int(self.rng.integers(len(self._stores))))
        if not transfer.performed:
            transfer.performed = True
            transfer.perform()

    def _reduce_any(self) -> bool:
        """Performs one of the outstanding reductions; False if there is none."""
        waiting = [
            pool for pool in (*(cta.reductions for cta in self._ctas), self._leftover) if pool
        ]
        if not waiting:
            return False
        reductions = waiting[int(self.rng.integers(len(waiting)))]
        reduction = reductions.pop(int(self.rng.integers(len(reductions))))
        reduction.perform(np.ones(len(reduction.threads), bool))
        self.memory.version += 1
        return True

    def _perform(self, transfer: Transfer) -> None:
        try:
            transfer.home.perform(transfer)
        except Fault as fault:
            raise steps.located(fault, transfer.warp, transfer.instruction, transfer.lane) from None

    def _unblock(self) -> Warp | None:
        """Performs a copy, or wakes a polling warp; if neither is left, that is a deadlock."""
        if self._perform_any():
            return None
        self.stuck = True
        warp = self._choose()
        self.stuck = False
        if warp is None:
            first = next(warp for cta in self._ctas for warp in cta.warps if not warp.done)
            lines = [
                f"CTA {cta.index} warp {warp.index} at line {self._line(warp)}: "
                f"{warp.waiting.reason()}"
                for cta in self._ctas
                for warp in cta.warps
                if warp.waiting is not None
            ]
            message = "no warp can go on\n  " + "\n  ".join(lines) + "\n"
            raise steps.located(Fault("deadlock", message), first, None)
        return warp

    def _line(self, warp: Warp) -> str:
        step = self.program.steps[warp.step - 1]
        if isinstance(step, Run):
            return "?"
        return f"{step.instruction.line} ({step.instruction.text})"

    def _advance(self, warp: Warp) -> None:
        """Runs a warp to its next synchronising instruction."""
        self._steps += 1
        if self._steps > self.policy.most_steps:
            fault = Fault("livelock", "too many steps: stuck in a loop")
            raise steps.located(fault, warp, None)
        if warp.waiting is not None:
            finish, warp.waiting = warp.waiting.finish, None
            finish()
        if not steps.execute(warp, self.tallies[warp.index]):
            self._steps += steps.STEPS_AT_ONCE

    def _finish(self, cta: Cta) -> None:
        """The end of a CTA: nothing may be left in flight."""
        if not self.policy.clean_exits:
            self._forgive(cta)
        self._stores += [transfer for transfer in cta.transfers if transfer.waited]
        for transfer in cta.transfers:
            if transfer.waited:
                continue
            raise steps.located(
                Fault("outstanding", "the CTA ends before this copy has been waited for"),
                transfer.warp,
                transfer.instruction,
                transfer.lane,
            )
        try:
            cta.check_end()
            tensor_pipe.check_end(cta)
        except Fault as fault:
            raise steps.located(fault, cta.warps[0], None) from None
        cta.ended = True
        self._ctas.remove(cta)
        self._leftover += cta.reductions

    def _forgive(self, cta: Cta) -> None:
        """Performs commits that a CTA has not waited for, and reads the sources of its stores."""
        for transfer in list(cta.transfers):
            if transfer.instruction.opcode == "tcgen05":
                try:
                    cta.perform(transfer)
                except Fault as fault:
                    at = transfer.warp, transfer.instruction, transfer.lane
                    raise steps.located(fault, *at) from None
            else:
                transfer.capture()
                transfer.waited = transfer.read is not None
