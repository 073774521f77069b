"""What the work of the next tile of a Hopper forward is, and which warp finds it out.

With ranges that takes loads which wait for each other: the ticket, the order of tiles, the tile
table, limits of rows. Where `forward_description.has_schedule_warp` says so, a warp of its own does
it, while the load warp loads the last blocks of the tile before; elsewhere the load warp does it in
between.
"""

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kernels.common import ptx, row_ranges
from kernels.common.resources import Shared
from kernels.common.schedule import ForwardShape, Schedule
from kernels.common.softmax import LOG2_E
from kernels.interface import RangeBuffers
from kernels.sm90.forward_data import ranges_of
from kernels.sm90.forward_groups import publish_groups
from kernels.sm90.forward_schedule import Work, assign, by_table, publish, publish_end
from kernels.sm90.tiles import ForwardTile


@dataclasses.dataclass(frozen=True)
class OfCall:
    """What a tile's work follows from.

    sinks: of each head, where a kernel without ranges takes them.
    """

    schedule: Schedule
    ranges: RangeBuffers | None
    sinks: cute.Pointer | None


class FindsWork:
    """What a warp does that finds out tiles' work; attributes are those of `forward.Forward`."""

    ranges: bool
    leaves_out: bool
    paged: bool
    tile: ForwardTile
    shape: ForwardShape

    @cute.jit
    def find_all_work(self, shared: Shared, call: OfCall, tile_ticket: cute.Pointer):
        """Schedule warp: publishes the work of all tiles of this CTA.

        It takes a tile's ticket when few blocks of the tile before are left, as the load warp does
        without it: until then another CTA may be the one that is ahead.
        """
        ctas, _, _ = cute.arch.grid_dim()
        index, tiles_done = call.schedule.tile(Int32(0)), Int32(0)
        barriers = shared.barriers
        while index < call.schedule.tiles:
            work = self.find_work(index, call)
            self.publish_work(shared, work, call, tiles_done)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(barriers.work_full.at(tiles_done))
            barriers.ticket_due.wait(tiles_done)
            ticket = Int32(0)
            if cute.arch.lane_idx() == 0:
                ticket = ptx.take_ticket(tile_ticket)
            index = ctas + cute.arch.make_warp_uniform(ticket)
            tiles_done += 1
        barriers.q_empty.wait_free(tiles_done)
        with cute.arch.elect_one():
            publish_end(self.words(shared, tiles_done))
            cute.arch.mbarrier_arrive(barriers.work_full.at(tiles_done))

    @cute.jit
    def find_work(self, index: Int32, call: OfCall) -> Work:
        """Returns a tile's work, but for the visits of a mask of pairs."""
        schedule, ranges = call.schedule, call.ranges
        work = assign(index, schedule, self.shape, ranges)
        if cutlass.const_expr(self.ranges):
            if row_ranges.are_given(ranges):
                work = by_table(work, ranges, schedule.sizes, self.shape)
        if cutlass.const_expr(self.paged):
            # What lies past the last key in its page, or past the table, is padding.
            padded = work.blocks.end * self.tile.n > work.band.key_length
            work = dataclasses.replace(work, padded_keys=padded)
        if cutlass.const_expr(call.sinks is not None):
            sink = cute.make_tensor(call.sinks + work.head, cute.make_layout(1))[0]
            work = dataclasses.replace(work, sink_log2=sink * LOG2_E)
        return work

    @cute.jit
    def publish_work(self, shared: Shared, work: Work, call: OfCall, tiles_done: Int32):
        """Writes a tile's work when its memory, and that of its Q, is free; whole warp."""
        shared.barriers.q_empty.wait_free(tiles_done)
        with cute.arch.elect_one():
            publish(work, self.words(shared, tiles_done))
        if cutlass.const_expr(self.leaves_out):
            own = ranges_of(call.ranges, call.schedule.sizes, work)
            slot = shared.barriers.q_full.use(tiles_done).slot
            publish_groups(work, own, shared.groups[None, None, slot], self.tile)

    def words(self, shared: Shared, tiles_done: Int32) -> cute.Tensor:
        """Returns the words that a tile's work is published in."""
        return shared.work[None, shared.barriers.q_full.use(tiles_done).slot]
