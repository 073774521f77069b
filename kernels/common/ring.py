"""Rings of mbarriers: the n-th use of a ring has one of its barriers and a phase of it."""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kernels.common import ptx


@dataclasses.dataclass(frozen=True)
class Use:
    """A use of a ring.

    Attributes:
      slot: its barrier, and its stage of the memory that the barriers guard.
      parity: of the phase of that barrier that the use completes.
    """

    slot: Int32
    parity: Int32


def nth_use(n: Int32, stages: int) -> Use:
    """Returns the n-th use, counted from 0, of a ring of `stages`."""
    if stages == 1:
        return Use(Int32(0), n & 1)
    if stages & (stages - 1) == 0:
        shift = stages.bit_length() - 1
        return Use(n & (stages - 1), (n >> shift) & 1)
    return Use(n % stages, (n // stages) & 1)


@dataclasses.dataclass(frozen=True)
class Ring:
    """The mbarriers of one name, used in turn.

    Use n, counted from 0, is of barrier n % stages and completes its phase n // stages. Methods
    accept n, or the `Use` that several rings of as many stages have in common.

    Attributes:
      first: the first of the barriers, which lie `stride` apart.
      stages: how many barriers take turns.
    """

    first: cute.Pointer
    stages: cutlass.Constexpr[int]
    stride: cutlass.Constexpr[int] = 1

    def __getitem__(self, index: Int32 | int) -> Ring:
        """Returns one of the barriers as a ring of one, where each barrier has uses of its own."""
        return Ring(self.first + (index if self.stride == 1 else index * self.stride), 1)

    def use(self, n: Int32 | int) -> Use:
        """Returns the n-th use."""
        return nth_use(n, self.stages)

    def at(self, use: Use | Int32) -> cute.Pointer:
        """Returns the barrier of a use."""
        if self.stages == 1:
            return self.first
        slot = self._use(use).slot
        return self.first + (slot if self.stride == 1 else slot * self.stride)

    def wait(self, use: Use | Int32 | int, ctas: int = 1):
        """Waits until a use is complete: what it stands for is there.

        ctas: 2 also waits for what the pair's other CTA did before it arrived.
        """
        use = self._use(use)
        ptx.mbarrier_wait(self.at(use), use.parity, ctas)

    def wait_free(self, use: Use | Int32 | int, ctas: int = 1):
        """Waits until the use before in the slot of this one is complete: the slot is free.

        The first pass over a ring finds it free: on a new barrier the wait for parity 1 passes.
        """
        use = self._use(use)
        ptx.mbarrier_wait(self.at(use), use.parity ^ 1, ctas)

    def _use(self, use: Use | Int32 | int) -> Use:
        return use if isinstance(use, Use) else self.use(use)
