"""The bias of the Hopper backward's transposed scores: a row is a key, a column is a query.

What lies in memory, and when it is loaded, is as in the forward (kernels/common/block_bias.py).
Pairs in memory are of keys: a warp loads matrices of 8 queries x 8 keys and transposes them. Where
a CTA takes tile after tile, each warp has copied its 16 keys of a step by then, while the step
before was under way, and to where its dS of the step goes afterwards; nobody else reads or writes
there in the meantime. 16 bytes of queries 4 to 7 of each 8 change places, so that the eight rows
of a matrix lie in different banks.
"""

import dataclasses
from collections.abc import Iterator

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
from kernels.sm90.tiles import WARPGROUP

_CHUNK = 8  # pairs that are loaded together
_CHUNKS = 2  # of 16 bytes, that are a warp's 16 keys of a query
_CHUNK_PAIRS = 4
_COPIED_QUERIES = 16  # by a warp at once
_QUERY_BYTES = 32
_WARP_KEYS = 16
_SPAN_BYTES = 128  # of dS
_FEW_QUERIES = 64  # of a step, whose pairs fit in registers all at once
_STEP = 8  # from a pair of queries of a key to the next one, and between the keys of a thread


@dataclasses.dataclass(frozen=True)
class StepBias:
    """What a thread adds to the scores of a step.

    Attributes:
      memory: where the bias is.
      work, place: of the step.
      m, n: queries and keys of a step.
      dtype: the kernel's storage type.
    """

    memory: BiasInMemory
    work: Work
    place: Step
    m: int
    n: int
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
    def start(self, staging: cute.Tensor):
        """Starts to copy the step's pairs of this warp's keys, where the bias has pairs.

        A lane copies 8 keys of every 16th query. Queries past the last are the last one, and keys
        past the last chunk those of it: nobody uses their scores.
        """
        if self.memory.in_pairs():
            batch, head, key = self.of()
            memory, first = self.memory.anew(), self.place.block * self.m
            lane = cute.arch.lane_idx()
            rows, columns = memory.buffers.bias_rows, memory.buffers.bias_columns
            chunk, query = lane % _CHUNKS, lane // _CHUNKS
            column = (key - lane // 4) // 2 + chunk * _CHUNK_PAIRS
            own = memory.plane(batch, head) + cutlass.min(column, columns - _CHUNK_PAIRS)
            row_bytes = INT32.select(rows > 1, columns * 4, Int32(0))
            last_row, target = memory.sizes.query_length - 1, self.staged(staging)
            target += query * _QUERY_BYTES + turned(query, chunk)
            for i in cutlass.range_constexpr(0, self.m, _COPIED_QUERIES):
                row = cutlass.min(first + query + i, last_row)
                ptx.copy_chunk(target, self.offset(i), own, row, row_bytes)
            cute.arch.cp_async_commit_group()

    def staged(self, staging: cute.Tensor) -> Int32:
        """Returns the address of this warp's keys of dS, where their bias is until it is used."""
        start = staging.iterator.toint().to(Int32)
        if self.m > _FEW_QUERIES:
            # No register of a thread is left for it.
            warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - WARPGROUP // 32
        else:
            thread, _, _ = cute.arch.thread_idx()
            warp = (ptx.anew(thread) - WARPGROUP) // 32
        return start + warp * (_WARP_KEYS * _SPAN_BYTES)

    def offset(self, query: int) -> int:
        """Returns where a query's 16 keys are, in bytes: 64 queries lie in a span of a tile."""
        of_span = _SPAN_BYTES // 2
        spans, query = divmod(query, of_span)
        return spans * (self.n * _SPAN_BYTES) + query * _QUERY_BYTES

    def take(self, staging: cute.Tensor) -> Iterator[tuple[int, tuple[Int32, ...]]]:
        """Yields the pairs that were copied: of an even pair of queries and the next one.

        Words are of queries 2 t and 2 t + 1 of the thread's two keys.
        """
        lane = cute.arch.lane_idx()
        query, chunk = lane % 8 + lane // 16 * 8, lane // 8 % 2
        address = self.staged(staging) + query * _QUERY_BYTES + turned(query, chunk)
        for pair in range(0, self.pairs, 2):
            yield pair, ptx.load_matrices(address, self.offset(_STEP * pair), transposed=True)

    def add_taken(self, scores: cute.Tensor, before_bias: Float32, staging: cute.Tensor):
        """Does what `add` does, of pairs that were copied.

        All are loaded before the first is added, where registers are left for them.
        """
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_warp()
        taken = self.take(staging)
        for pair, words in list(taken) if self.m <= _FEW_QUERIES else taken:
            for i, word in enumerate(words):
                added = ptx.widen_pair(self.dtype, word)
                add_pair(scores, (pair + i // 2, i % 2), before_bias, list(added))
        cute.arch.sync_warp()

    @cute.jit
    def add(self, scores: cute.Tensor, before_bias: Float32, staging: cute.Tensor | None = None):
        """Replaces products by scores: times before_bias, plus the bias of key and query.

        staging: where pairs have been copied to, or None where they are loaded from global memory.
        """
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
            if cutlass.const_expr(staging is not None):
                self.add_taken(scores, before_bias, staging)
            else:
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


def turned(query: Int32, chunk: Int32) -> Int32:
    """Returns where a chunk of a warp's keys is among those of a query, in bytes."""
    return (chunk ^ query // 4 % 2) * 16


def add_pair(scores: cute.Tensor, of: tuple[int, int], before_bias: Float32, added: list[Float32]):
    """Replaces two products by scores; of: their pair and row of the fragment."""
    for column in range(2):
        index = softmax.fragment_index(*of, column)
        scores[index] = scores[index] * before_bias + added[column]
