"""Turns of the MMA warpgroups of a Hopper kernel, and the release of what a warp has read."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kernels.common import resources
from kernels.description import NamedBarrier


class Turns:
    """Warpgroups that issue their products one after another; `forward`, Note [issue turns].

    Attributes:
      issue_turn: one barrier for each warpgroup.
    """

    issue_turn: NamedBarrier

    def await_turn(self, group: Int32):
        """Waits until this warpgroup may issue its products."""
        resources.meet(self.issue_turn, group)

    def pass_turn(self, group: Int32):
        """Lets the next warpgroup issue its products."""
        last = self.issue_turn.count - 1
        following = Int32(cutlass.select_(group == last, Int32(0), group + 1))
        resources.arrive(self.issue_turn, following)

    def release(self, empty: cute.Pointer):
        """Arrives, once per warp: this warp's products no longer read the slot."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(empty)
