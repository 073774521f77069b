"""A dense bias in pairs, row by row, and its gradient: in shared memory of the warp that has them.

Each warp has 16 rows of a tile. It copies their pairs by cp.async, 16 bytes a lane, two rows at a
time, while the sums of the tile before are stored, and takes them by ldmatrix in each visit. Sums,
rounded to pairs, go by stmatrix into memory of the same layout, from where rows of the tile leave
whole. Nobody else reads or writes there, so lanes of a warp meet and no others.

A row's 16 chunks of 16 bytes lie together; chunk c of row r is in place c ^ (r % 8), so that the
eight rows of a matrix lie in different banks.
"""

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from kernels.common import ptx
from kernels.common.bias_gradient_sums import Sums
from kernels.common.bias_gradient_work import Call, Work
from kernels.sm90.bias_gradient_description import ROW_BYTES, TILE
from kernels.sm90.softmax import fragment_index

_WARP_ROWS = 16
_CHUNK_BYTES = 16
_CHUNK_PAIRS = 4
_LANES_OF_ROW = ROW_BYTES // _CHUNK_BYTES
_COPIED_ROWS = 2  # at once
_MATRIX_ROWS = 8
_SUMS = TILE * ROW_BYTES  # where they are, after the pairs of the bias


@dataclasses.dataclass(frozen=True)
class WarpRows:
    """Where a thread finds its warp's rows.

    Attributes:
      memory: the region of pairs, in shared memory.
      thread: of the MMA warpgroups.
    """

    memory: cute.Tensor
    thread: Int32

    def row(self) -> Int32:
        """Returns the first row of the tile that this lane copies a chunk of."""
        return self.thread // 32 * _WARP_ROWS + self.thread % 32 // _LANES_OF_ROW

    def chunk(self) -> Int32:
        """Returns which chunk of the row that is."""
        return self.thread % _LANES_OF_ROW

    def copied(self) -> Int32:
        """Returns the address of that chunk; `_turn` says what becomes of it in further rows."""
        row = self.row()
        turned = self.chunk() ^ row % _MATRIX_ROWS
        return self.first() + row * ROW_BYTES + turned * _CHUNK_BYTES

    def matrices(self) -> Int32:
        """Returns the address of this lane's row of the first four matrices, of 16 keys."""
        lane = self.thread % 32
        row = self.thread // 32 * _WARP_ROWS + lane % _WARP_ROWS
        turned = lane // _WARP_ROWS ^ lane % _MATRIX_ROWS
        return self.first() + row * ROW_BYTES + turned * _CHUNK_BYTES

    def first(self) -> Int32:
        """Returns the region's address."""
        return self.memory.iterator.toint().to(Int32)

    @cute.jit
    def start(self, call: Call, work: Work):
        """Starts to copy the bias of a tile.

        Rows past the last are the last one, and chunks past the last chunk that one: nobody uses
        their scores.
        """
        cute.arch.sync_warp()
        memory, columns = call.memory, call.bias.bias_columns
        pair = work.key_tile * (TILE // 2) + self.chunk() * _CHUNK_PAIRS
        source = memory.plane(work.first_batch, work.first_head)
        source = source + cutlass.min(pair, columns - _CHUNK_PAIRS)
        first, last = work.first_row_tile * TILE + self.row(), call.sizes.query_length - 1
        target = self.copied()
        for i in cutlass.range_constexpr(0, _WARP_ROWS, _COPIED_ROWS):
            row = cutlass.min(first + i, last)
            ptx.copy_chunk(target ^ _turn(i), i * ROW_BYTES, source, row, columns * 4)
        cute.arch.cp_async_commit_group()

    def await_copies(self):
        """Waits until the bias is there."""
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_warp()

    def load(self, pair: int) -> tuple[Int32, Int32, Int32, Int32]:
        """Returns pairs of the bias: of an even pair of keys and the next one, of two rows each."""
        return ptx.load_matrices(self.matrices() ^ (pair * _CHUNK_BYTES))

    @cute.jit
    def store(self, sums: cute.Tensor, dtype: cutlass.Constexpr, own: Sums):
        """Stores the sums of the warp's rows as pairs; sums: this thread's, as a fragment."""
        matrices = self.matrices()
        for pair in cutlass.range_constexpr(0, TILE // 8, 2):
            words = rounded(sums, pair, dtype)
            ptx.store_matrices(matrices ^ (pair * _CHUNK_BYTES), _SUMS, words)
        cute.arch.sync_warp()
        call, copied = own.call, self.copied()
        column = own.work.key_tile * (TILE // 2) + self.chunk() * _CHUNK_PAIRS
        first_row, columns = own.work.first_row_tile * TILE + self.row(), call.shape.dbias_columns
        target = own.plane() + (Int64(first_row) * columns + column)
        rows = cutlass.select_(column < columns, call.bias.bias_rows - first_row, Int32(0))
        for i in cutlass.range_constexpr(0, _WARP_ROWS, _COPIED_ROWS):
            words = ptx.load_chunk(copied ^ _turn(i), _SUMS + i * ROW_BYTES)
            ptx.store_chunk_below(target, (i, Int32(rows)), columns * 4, words)
        cute.arch.sync_warp()


def rounded(sums: cute.Tensor, pair: int, dtype: type[cutlass.Numeric]) -> list[Int32]:
    """Returns the sums of an even pair of keys and of the next one, of two rows each, as pairs."""
    found = []
    for i in range(4):
        low, high = (sums[fragment_index(pair + i // 2, i % 2, column)] for column in range(2))
        found.append(ptx.round_pair(dtype, low, high))
    return found


def _turn(row: int) -> int:
    """Returns what changes in the place of a chunk some rows further, an even number."""
    return row % _MATRIX_ROWS * _CHUNK_BYTES
