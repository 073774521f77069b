"""The visits of a tile of the Hopper forward (kernels/common/key_visits.py).

With each block of K the load warp publishes which block it is, and whether band and ranges hide any
of it.
"""

import dataclasses

from cutlass import Boolean, Int32

from kernels.common import key_visits, pair_masks
from kernels.common.key_visits import Visits
from kernels.common.pair_masks import Shape, States
from kernels.common.schedule import ForwardShape
from kernels.interface import RangeBuffers, Sizes
from kernels.sm90.forward_schedule import Work


@dataclasses.dataclass(frozen=True)
class _Tile:
    """What a mask says of a tile's rows, which are whole boxes; `key_visits.Visits`."""

    states: States
    first_row: Int32
    shape: Shape

    @property
    def given(self) -> Boolean:
        """Whether there is a mask."""
        return self.states.given

    def seen(self, first_key: Int32) -> tuple[Boolean, Boolean]:
        """Returns whether any pair of the tile and a block is seen, and whether all are."""
        return pair_masks.seen(self.states, self.first_row, first_key, self.shape)


def make_visits(
    work: Work, buffers: RangeBuffers, sizes: Sizes, shape: ForwardShape
) -> tuple[Visits, Work]:
    """Returns a tile's visits, and its work in visits; a whole warp calls it.

    Without a mask the work stays in blocks.
    """
    states = pair_masks.states(buffers, sizes, work.batch, work.head)
    tile = _Tile(states, work.first_row, Shape(shape.m, shape.n))
    visits = Visits(tile, work.blocks, shape.n, Int32(0))
    counts = key_visits.count(visits)
    plane = pair_masks.plane_of(buffers.mask_batch, buffers.mask_heads, work.batch, work.head)
    work = dataclasses.replace(
        work,
        blocks=counts.of_tile(states.given, work.blocks),
        padded_keys=work.padded_keys & counts.has_last,
        plane=plane,
    )
    return dataclasses.replace(visits, masked=counts.masked), work
