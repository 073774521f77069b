"""The bias of the Hopper backward's transposed scores: a row is a key, a column is a query.

What lies in memory, and when it is loaded, is as in the forward (kernels/common/block_bias.py).
Pairs in memory are of keys: a warp loads matrices of 8 queries x 8 keys and transposes them.
"""

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from kernels.common import ptx
from kernels.common.backward_schedule import Work
from kernels.common.bias import BiasInMemory
from kernels.common.block_bias import distances
from kernels.common.tensors import INT32, f32
from kernels.sm90 import softmax
from kernels.sm90.backward_data import Step
from kernels.sm90.backward_mask import first_key, first_query, of_tile
from kernels.sm90.backward_tiles import place_of_tile

_CHUNK = 8  # pairs that are loaded together
_STEP = 8  # from a pair of queries of a key to the next one, and between the keys of a thread


@dataclasses.dataclass(frozen=True)
class StepBias:
    """What a thread adds to the scores of a step.

    Attributes:
      memory: where the bias is.
      work, place: of the step.
      m: queries of a block.
      dtype: the kernel's storage type.
    """

    memory: BiasInMemory
    work: Work
    place: Step
    m: int
    dtype: type[cutlass.Numeric]

    @property
    def pairs(self) -> int:
        """Pairs of queries that a thread has of a key."""
        return self.m // _STEP

    def of(self) -> tuple[Int32, Int32, Int32]:
        """Returns batch entry, head, and the thread's first key."""
        kv_head, batch = self.work.kv_head, self.work.batch
        if self.place.of_tile is not None:
            _, kv_head, batch = place_of_tile(self.place.of_tile)
        key = first_key(of_tile(self.work, self.place))
        return batch, kv_head * self.work.group + self.place.member, key

    def load(self, by_distance: Boolean, in_pairs: Boolean, chunk: tuple[int, int]) -> cute.Tensor:
        """Starts to load the pairs begin <= p < end of a bias of one of these forms."""
        begin, end = chunk
        words = cute.make_rmem_tensor((2 * (end - begin + 1),), Int32)
        batch, head, key = self.of()
        memory, first = self.memory.anew(), self.place.block * self.m
        rows, columns = memory.buffers.bias_rows, memory.buffers.bias_columns
        last, plane = memory.sizes.query_length - 1, memory.plane(batch, head)
        lowest = last + key - first - first_query() - 1 - _STEP * (self.pairs - 1)
        # A lane loads of a matrix what it then has of the transposed one: of query lane / 4.
        lane = cute.arch.lane_idx()
        query, column = first + lane // 4, (key - lane // 4) // 2 + lane % 4
        step = INT32.select(rows > 1, columns, Int32(0))
        own = plane + (Int64(cutlass.min(query, last)) * step + column)
        source = distances(plane, columns, lowest).toint()
        source = cutlass.select_(by_distance, source, own.toint())
        source = cute.make_ptr(Float32, source, cute.AddressSpace.gmem)
        count = INT32.select(in_pairs, cutlass.max(columns - column, 0), Int32(0))
        count = INT32.select(by_distance, Int32(-1), count)
        last_row = cutlass.max(last - query, 0)
        for i in range(end - begin + 1):
            if begin + i == end:
                count = cutlass.min(count, 0)
            of_row = (_STEP * (begin + i), last_row, step)
            pair = _STEP * (self.pairs - end + i)
            words[2 * i], words[2 * i + 1] = ptx.load_pair_or_row(
                source, pair, of_row, _STEP // 2, count
            )
        return words

    @cute.jit
    def add(self, scores: cute.Tensor, before_bias: Float32):
        """Replaces products by scores: times before_bias, plus the bias of key and query."""
        yes, no = Boolean(True), Boolean(False)
        if self.memory.by_distance():
            for begin in cutlass.range_constexpr(0, self.pairs, _CHUNK):
                end = begin + _CHUNK
                words = self.load(yes, no, (begin, end))
                for pair in cutlass.range_constexpr(begin, end):
                    for row in cutlass.range_constexpr(softmax.ROWS):
                        # Distances fall from query to query.
                        at = 2 * (end - 1 - pair + row)
                        added = [words[at + 1].bitcast(Float32), words[at].bitcast(Float32)]
                        add_pair(scores, (pair, row), before_bias, added)
        elif self.memory.in_pairs():
            for begin in cutlass.range_constexpr(0, self.pairs, _CHUNK):
                words = self.load(no, yes, (begin, begin + _CHUNK))
                for pair in cutlass.range_constexpr(begin, begin + _CHUNK):
                    for row in cutlass.range_constexpr(softmax.ROWS):
                        word = ptx.transpose_matrix(words[2 * (pair - begin) + row])
                        added = ptx.widen_pair(self.dtype, word)
                        add_pair(scores, (pair, row), before_bias, added)
        else:
            self.add_elements(scores, before_bias)

    @cute.jit
    def add_elements(self, scores: cute.Tensor, before_bias: Float32):
        """Does what `add` does for fp32 elements."""
        batch, head, key = map(ptx.anew, self.of())
        bias, first = self.memory.anew().of_head(batch, head), ptx.anew(self.place.block) * self.m
        if cute.arch.vote_any_sync(bias.meets((first, self.m), (key, _STEP + 1))):
            last_key, of_block = bias.last_key, bias.row(first)
            keys = [cutlass.min(key + _STEP * row, last_key) for row in range(softmax.ROWS)]
            last = bias.last_row - first
            for pair in cutlass.range_constexpr(self.pairs):
                for column in cutlass.range_constexpr(2):
                    # Offsets within a block take half of an address's registers.
                    query = cutlass.min(first_query() + _STEP * pair + column, last)
                    query = query * bias.row_step
                    for row in cutlass.range_constexpr(softmax.ROWS):
                        index = softmax.fragment_index(pair, row, column)
                        scores[index] = scores[index] * before_bias + f32(
                            of_block, query + keys[row]
                        )
        else:
            for element in cutlass.range_constexpr(cute.size(scores)):
                scores[element] = scores[element] * before_bias


def add_pair(scores: cute.Tensor, of: tuple[int, int], before_bias: Float32, added: list[Float32]):
    """Replaces two products by scores; of: their pair and row of the fragment."""
    for column in range(2):
        index = softmax.fragment_index(*of, column)
        scores[index] = scores[index] * before_bias + added[column]
