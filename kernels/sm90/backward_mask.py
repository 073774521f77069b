"""The masks of the Hopper backward's transposed scores: a row is a key, a column is a query.

A thread's fragment (kernels/sm90/softmax.py) has keys key and key + 8, and pairs of queries, every
8 queries. The band limits the queries of a key, so it is applied row by row; ranges in memory limit
the keys of a query, so they are applied column by column.
"""

import itertools
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from fa4_jax import bands
from kernels.common import backward_ranges, row_ranges, tensors
from kernels.common.backward_schedule import Work
from kernels.common.row_ranges import Ranges
from kernels.common.softmax import select
from kernels.sm90 import softmax
from kernels.sm90.backward_data import Step
from kernels.sm90.tiles import WARPGROUP


def first_key(work: Work) -> Int32:
    """Returns the first key of this thread's fragment."""
    thread, _, _ = cute.arch.thread_idx()
    thread = thread - WARPGROUP
    return work.first_key + thread // 32 * 16 + thread % 32 // 4


def first_query() -> Int32:
    """Returns the first column (query of the block) of this thread's fragment."""
    thread, _, _ = cute.arch.thread_idx()
    return thread % 4 * 2


@cute.jit
def mask_band(work: Work, scores: cute.Tensor, block: Int32, m: cutlass.Constexpr[int]):
    """Sets scores of pairs outside the band to -inf, in blocks of m queries that hold any."""
    edge = (block < work.blocks.full_begin) | (block >= work.blocks.full_end)
    if edge | work.padded_keys:
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
    ranges, key, first = work.visits.ranges, first_key(work), place.block * m
    if place.hidden != backward_ranges.NOTHING:
        keys = [key + 8 * row for row in range(softmax.ROWS)]
        low, high = (_of_queries(ranges, x, first, m) for x in (ranges.low, ranges.high))
        _keep_between(scores, keys, low, high, past_high=True)
    if place.hidden == backward_ranges.BY_TAGS:
        tags = [row_ranges.key_tag(ranges, key + 8 * row) for row in range(softmax.ROWS)]
        low, high = (_of_queries(ranges, x, first, m) for x in (ranges.tag_low, ranges.tag_high))
        _keep_between(scores, tags, low, high, past_high=False)


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
