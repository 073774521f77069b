"""The key blocks of a tile that the 64 rows of one MMA warpgroup of the Hopper forward see.

A tile's blocks are loaded for all of its warpgroups, but under a diagonal, or where documents meet,
some rows see none of the first or the last of them, and rows past the last one see nothing at all.
A warpgroup leaves such blocks out: it waits for them, releases them and takes its turns, but
computes nothing. Under a band the load warp finds out which.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from fa4_jax import bands
from kernels.common import row_ranges, tensors
from kernels.common.resources import Shared
from kernels.sm90.forward_data import Place, TileRanges, row_range
from kernels.sm90.forward_description import GROUP_WORDS
from kernels.sm90.forward_schedule import Work
from kernels.sm90.tiles import WARPGROUP_ROWS, ForwardTile
from kernels.sm90.turns import Turns

_NO_KEY = 2**30  # no key is as far as this


@cute.jit
def publish_groups(
    work: Work, own: TileRanges | None, words: cute.Tensor, tile: cutlass.Constexpr[ForwardTile]
):
    """Writes the blocks that each warpgroup's rows see, as `seen_by` reads them; whole warp.

    words: i32 [GROUP_WORDS, warpgroups].
    """
    for group in cutlass.range_constexpr(tile.mma_warpgroups):
        first_row = work.first_row + group * WARPGROUP_ROWS
        blocks = bands.visited_blocks(work.band, first_row, WARPGROUP_ROWS, tile.n, tensors.INT32)
        if cutlass.const_expr(own is not None):
            least, most = _keys_of_range(work, first_row)
            if work.high == row_ranges.EACH_ROW:
                least, most = _keys_seen(work, own, first_row)
            full = (work.blocks.full_begin, work.blocks.full_end)
            blocks = bands.BlockRange(least // tile.n, *full, (most + tile.n - 1) // tile.n)
        begin = cutlass.max(blocks.begin, work.blocks.begin)
        end = cutlass.min(blocks.end, work.blocks.end)
        seen = begin < end
        # Where nothing is seen the range is empty, and begins where the tile's does.
        begin = Int32(cutlass.select_(seen, begin, work.blocks.begin))
        end = Int32(cutlass.select_(seen, end, begin))
        with cute.arch.elect_one():
            values = (begin, blocks.full_begin, blocks.full_end, end)
            for i in cutlass.range_constexpr(GROUP_WORDS):
                words[i, group] = values[i]


def seen_by(words: cute.Tensor, group: Int32) -> bands.BlockRange:
    """Returns the blocks of a tile that a warpgroup's rows see; maybe none."""
    uniform = cute.arch.make_warp_uniform
    return bands.BlockRange(*(uniform(words[i, group]) for i in range(GROUP_WORDS)))


class OwnBlocks(Turns):
    """What a warpgroup does with blocks that its rows do not see; `forward`, Note [own blocks]."""

    tile: ForwardTile

    @cute.jit
    def leave_out(self, shared: Shared, work: Work, place: Place, blocks: tuple[Int32, Int32]):
        """Passes blocks, down from (above - 1) to the other one, of which its rows see nothing."""
        above, down_to = blocks
        for block in cutlass.range(above - 1, down_to - 1, -1, unroll=1):
            self.leave_block_out(shared, work, place, block)

    @cute.jit
    def leave_block_out(self, shared: Shared, work: Work, place: Place, block: Int32):
        """Passes one such block."""
        barriers = shared.barriers
        use = barriers.k_full.use(place.ring_end - block)
        barriers.k_full.wait(use)
        barriers.v_full.wait(use)
        cute.arch.sync_warp()
        self.release(barriers.k_empty.at(use))
        self.release(barriers.v_empty.at(use))
        if block < work.blocks.end - 1:  # A tile's first block takes no turn.
            self.await_turn(place.group)
            self.pass_turn(place.group)


def _keys_of_range(work: Work, first_row: Int32) -> tuple[Int32, Int32]:
    """Returns (first, past-the-last) key that 64 rows see which have the tile's range."""
    last_row = cutlass.min(first_row + WARPGROUP_ROWS, work.band.query_length) - 1
    least, _ = bands.row_limits(work.band, first_row, tensors.INT32)
    _, most = bands.row_limits(work.band, last_row, tensors.INT32)
    least, most = cutlass.max(least, work.low), cutlass.min(most, work.high)
    seen = (least < most) & (first_row <= last_row)
    return (
        Int32(cutlass.select_(seen, least, Int32(_NO_KEY))),
        Int32(cutlass.select_(seen, most, Int32(0))),
    )


def _keys_seen(work: Work, own: TileRanges, first_row: Int32) -> tuple[Int32, Int32]:
    """Returns (first, past-the-last) key that 64 rows with ranges see; each lane asks two rows."""
    least, most = Int32(_NO_KEY), Int32(0)
    for half in range(WARPGROUP_ROWS // row_ranges.LANES):
        row = first_row + half * row_ranges.LANES + cute.arch.lane_idx()
        low, high = bands.row_limits(work.band, row, tensors.INT32)
        own_low, own_high = row_range(work, own.ranges, row)
        low, high = cutlass.max(low, own_low), cutlass.min(high, own_high)
        seen = (low < high) & (row < work.band.query_length)
        least = cutlass.min(least, Int32(cutlass.select_(seen, low, Int32(_NO_KEY))))
        most = cutlass.max(most, Int32(cutlass.select_(seen, high, Int32(0))))
    for step in range(5):
        offset = 1 << step
        least = cutlass.min(least, Int32(cute.arch.shuffle_sync_bfly(least, offset=offset)))
        most = cutlass.max(most, Int32(cute.arch.shuffle_sync_bfly(most, offset=offset)))
    return least, most
