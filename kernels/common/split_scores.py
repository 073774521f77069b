"""What a split forward does to scores before the softmax: the soft cap, and tags that differ."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from kernels.common import ptx, row_ranges
from kernels.common.softmax import select, tanh
from kernels.common.split_data import Call, Place, Rows, Work
from kernels.common.split_description import MMA_WARPS, WARP_ROWS

HALVES = 2
"""Rows of a thread: lane // 4 and 8 more."""

TILE_KEYS = 8
"""Columns of one mma.sync."""


def own_token(place: Place, key_groups: Int32, half: int) -> Int32:
    """Returns the token of a thread's row; of a row past the last, that of the last."""
    thread, _, _ = cute.arch.thread_idx()
    row_tiles = MMA_WARPS // key_groups
    row = place.first_row + (thread // 32) % row_tiles * WARP_ROWS + (thread % 32) // 4 + 8 * half
    return cutlass.min(row, place.first_row + place.rows - 1) // place.group


@cute.jit
def cap(scores: cute.Tensor, before_cap: Float32):
    """Replaces products by their scores in units of the soft cap, where there is one."""
    if before_cap != 0.0:
        for i in cutlass.range_constexpr(cute.size(scores)):
            scores[i] = tanh(scores[i] * before_cap)


@cute.jit
def compare_tags(scores: cute.Tensor, rows: Rows, work: Work, call: Call, own_key: Int32):
    """Hides scores whose row and key have tags that do not fit; tags are read where they are.

    own_key: of the thread's first score.
    """
    if work.compares != 0:
        hidden = _hidden(rows, work, call, own_key, 2 * cute.size(scores, mode=[1]))
        for half in cutlass.range_constexpr(HALVES):
            for tile in cutlass.range_constexpr(cute.size(scores, mode=[1])):
                for column in cutlass.range_constexpr(2):
                    bit = 1 << (HALVES * (2 * tile + column) + half)
                    place = (2 * half + column, tile)
                    scores[place] = select(hidden & bit == 0, scores[place], -Float32.inf)


@cute.jit
def _hidden(
    rows: Rows, work: Work, call: Call, own_key: Int32, keys: cutlass.Constexpr[int]
) -> Int32:
    """Returns a bit for each of a thread's keys and rows: whether their tags do not fit.

    The loop is not unrolled: a thread that holds an output has few registers.
    """
    place = work.read_place()
    ranges = row_ranges.arrays(call.ranges, call.sizes, ptx.anew(place.batch))
    hidden = Int32(0)
    for half in cutlass.range_constexpr(HALVES):
        token = own_token(place, ptx.anew(rows.key_groups), half)
        low = row_ranges.element(ranges.tag_low, token)
        high = row_ranges.element(ranges.tag_high, token)
        for i in cutlass.range(keys, unroll=1):
            tag = row_ranges.key_tag(ranges, own_key + i // 2 * TILE_KEYS + i % 2)
            hides = Int32((tag < low) | (tag > high))
            hidden = hidden | (hides << (HALVES * i + half))
    return hidden
