"""The masks of the Hopper backward's transposed scores: a row is a key, a column is a query.

A thread's fragment (kernels/sm90/softmax.py) has keys key and key + 8, and pairs of queries, every
8 queries. The band limits the queries of a key, so it is applied row by row; ranges in memory limit
the keys of a query, so they are applied column by column.
"""

import dataclasses
import itertools
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from fa4_jax import bands
from kernels.common import backward_ranges, ptx, row_ranges, tensors
from kernels.common.backward_schedule import Work
from kernels.common.pair_masks import BOX_ROWS, BitsInMemory, plane_of
from kernels.common.row_ranges import LANES, Ranges, element
from kernels.common.softmax import select
from kernels.sm90 import softmax
from kernels.sm90.backward_data import Step
from kernels.sm90.backward_tiles import reread
from kernels.sm90.tiles import WARPGROUP

_CTA_KEYS = 64
"""Keys of a CTA of a pair."""


def first_key(work: Work) -> Int32:
    """Returns the first key of this thread's fragment."""
    thread, _, _ = cute.arch.thread_idx()
    if isinstance(work.rank, int):
        # A CTA that takes tile after tile has no register for what is the same in all of them.
        thread = ptx.anew(thread)
    thread = thread - WARPGROUP
    return work.first_key + thread // 32 * 16 + thread % 32 // 4


def first_query() -> Int32:
    """Returns the first column (query of the block) of this thread's fragment."""
    thread, _, _ = cute.arch.thread_idx()
    return thread % 4 * 2


@cute.jit
def mask_band(work: Work, scores: cute.Tensor, place: Step, m: cutlass.Constexpr[int]):
    """Sets scores of pairs outside the band to -inf, in blocks of m queries that hold any."""
    block = place.block
    edge = (block < work.blocks.full_begin) | (block >= work.blocks.full_end)
    if edge | work.padded_keys:
        work = of_tile(work, place)
        key = first_key(work)
        low = cute.make_rmem_tensor((softmax.ROWS,), Int32)
        high = cute.make_rmem_tensor((softmax.ROWS,), Int32)
        for row in cutlass.range_constexpr(softmax.ROWS):
            index = key + 8 * row
            first, last = bands.row_limits(work.band.transposed(), index, tensors.INT32)
            low[row] = first
            high[row] = Int32(cutlass.select_(index < work.band.key_length, last, Int32(0)))
        softmax.mask_band(scores, block * m + first_query(), low, high)


@cute.jit
def mask_ranges(work: Work, scores: cute.Tensor, place: Step, m: cutlass.Constexpr[int]):
    """Sets scores of keys outside of their queries' ranges, or of other tags, to -inf."""
    by_ranges = place.hidden
    if cutlass.const_expr(work.visits.mask is not None):
        by_ranges = place.hidden % backward_ranges.BY_BITS
    if by_ranges != backward_ranges.NOTHING:
        own, first = of_tile(work, place), place.block * m
        ranges, key = _arrays(own), first_key(own)
        keys = [key + 8 * row for row in range(softmax.ROWS)]
        low, high = (_of_queries(ranges, x, first, m) for x in (ranges.low, ranges.high))
        _keep_between(scores, keys, low, high, past_high=True)
    if by_ranges == backward_ranges.BY_TAGS:
        own, first = of_tile(work, place), place.block * m
        ranges, key = _arrays(own), first_key(own)
        tags = [row_ranges.key_tag(ranges, key + 8 * row) for row in range(softmax.ROWS)]
        low, high = (_of_queries(ranges, x, first, m) for x in (ranges.tag_low, ranges.tag_high))
        _keep_between(scores, tags, low, high, past_high=False)
    if cutlass.const_expr(work.visits.mask is not None):
        if place.hidden >= backward_ranges.BY_BITS:
            _keep_bits(scores, work.visits.mask.bits, place.words, work.rank)


def _arrays(work: Work) -> Ranges:
    """Returns the arrays of the work's batch element."""
    return work.visits.ranges if work.ranges is None else work.ranges.arrays()


def of_tile(work: Work, place: Step) -> Work:
    """Returns the work for a mask or a bias, which needs more of it than registers always hold."""
    return work if place.of_tile is None else reread(work, place.of_tile)


def _keep_bits(scores: cute.Tensor, bits: BitsInMemory, visit: cute.Tensor, rank: Int32 | int):
    """Sets scores to -inf whose bits are 0.

    The keys of a warp lie in one word of each query. A lane loads those of its share of the block's
    queries, as `_of_queries` does.

    Args:
      visit: what the load warp has published of the step.
      rank: of the CTA in a pair, which has 64 of the tile's keys.
    """
    parts = cute.size(scores.shape[0][2]) // 8
    own = cute.make_rmem_tensor((2, parts), Int32)
    # No register is left for what is the same in every step.
    thread, _, _ = cute.arch.thread_idx()
    thread = ptx.anew(thread) - WARPGROUP
    lane = thread % LANES
    key = rank * _CTA_KEYS + thread // LANES * 16 + lane // 4
    place = key // LANES * BOX_ROWS + lane * 2
    for part, column in itertools.product(range(parts), range(2)):
        own[column, part] = element(bits.buffers.mask_bits + visit[2 + part] + place, column)
    for pair in range(cute.size(scores.shape[0][2])):
        words = [Uint32(word) >> Uint32(key % LANES) for word in of_columns(own, pair)]
        for row, column in itertools.product(range(softmax.ROWS), range(2)):
            index = softmax.fragment_index(pair, row, column)
            seen = (words[column] & (1 << (8 * row))) != 0
            scores[index] = select(seen, scores[index], -Float32.inf)


def visit_words(work: Work, block: Int32, member: Int32, m: int) -> tuple[Int32, ...]:
    """Returns what the load warp publishes of a step: its block, what is hidden in it, and where
    the bits of the tile's first keys are, for each 64 of its rows.

    A tile's keys lie in whole words, and the array has words for all keys of the last tile.
    """
    visits = work.visits
    hidden = backward_ranges.hidden(visits, block, m)
    if visits.mask is None:
        return block, hidden
    bits = visits.mask.bits
    head = work.kv_head * work.group + member
    plane = plane_of(bits.buffers.mask_batch, bits.buffers.mask_heads, work.batch, head)
    bits = dataclasses.replace(bits, plane=plane)
    rows = [block * m + part * BOX_ROWS for part in range(m // BOX_ROWS)]
    places = [bits.place(row, visits.first_key) for row in rows]
    return block, hidden, *places


def _of_queries(ranges: Ranges, values: cute.Pointer, first: Int32, m: int) -> cute.Tensor:
    """Loads this lane's share of a block's values, for `of_columns`: (2, m / 64).

    Args:
      values: [T] in global memory; past the last, the last one's are loaded.
      first: query of the block.
    """
    own = cute.make_rmem_tensor((2, m // 64), Int32)
    for part, column in itertools.product(range(m // 64), range(2)):
        query = first + part * 64 + cute.arch.lane_idx() * 2 + column
        query = cutlass.min(query, ranges.query_length - 1)
        own[column, part] = row_ranges.element(values, query)
    return own


def of_columns(values: cute.Tensor, pair: int) -> list[Any]:
    """Returns a pair of columns' values, of which a warp holds each once: (2, m / 64) a lane."""
    lane = pair % 8 * 4 + cute.arch.lane_idx() % 4
    return [cute.arch.shuffle_sync(values[i, pair // 8], lane) for i in range(2)]


def _keep_between(
    scores: cute.Tensor, rows: list[Int32], low: cute.Tensor, high: cute.Tensor, past_high: bool
):
    """Sets scores to -inf unless low <= row's value <= high of the column, or < if past_high."""
    for pair in range(cute.size(scores.shape[0][2])):
        lows, highs = of_columns(low, pair), of_columns(high, pair)
        for row, column in itertools.product(range(softmax.ROWS), range(2)):
            value, last = rows[row], highs[column]
            sees = (value >= lows[column]) & ((value < last) if past_high else (value <= last))
            index = softmax.fragment_index(pair, row, column)
            scores[index] = select(sees, scores[index], -Float32.inf)
