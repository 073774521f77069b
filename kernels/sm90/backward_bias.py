"""The bias of the Hopper backward's transposed scores: a row is a key, a column is a query."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from kernels.common.backward_schedule import Work
from kernels.common.tensors import f32
from kernels.sm90 import softmax
from kernels.sm90.backward_data import Step
from kernels.sm90.backward_mask import first_key, first_query, of_tile
from kernels.sm90.backward_tiles import place_of_tile


def add(work: Work, scores: cute.Tensor, place: Step, m: int, before_bias: Float32):
    """Replaces products by scores: times before_bias, plus the bias of key and query.

    m: queries of a block.
    """
    kv_head, batch = work.kv_head, work.batch
    if place.of_tile is not None:
        _, kv_head, batch = place_of_tile(place.of_tile)
    bias = work.bias.of_head(batch, kv_head * work.group + place.member)
    key, first = first_key(of_tile(work, place)), place.block * m
    keys = [cutlass.min(key + 8 * row, bias.keys - 1) for row in range(softmax.ROWS)]
    of_block = bias.row(first)
    last = bias.last_row - first
    for pair, column in softmax.fragment_columns(scores):
        # Offsets within a block take half of an address's registers.
        query = cutlass.min(first_query() + 8 * pair + column, last) * bias.row_step
        for row in range(softmax.ROWS):
            index = softmax.fragment_index(pair, row, column)
            scores[index] = scores[index] * before_bias + f32(of_block, query + keys[row])
