"""How blocks of a dense bias come to the scores of Hopper's forward: through shared memory.

A thread's pairs of a block are 16 bytes apart. Loaded from where they are, a warp's word a lane
would be 16 bytes of each of eight rows, whose lines the unit takes one after another, and a block
32 such loads. So each warp copies its own 16 rows by cp.async, 16 bytes a lane, two rows at a time,
and loads its pairs by ldmatrix. Nobody else reads them, so lanes of a warp meet and no others. A
block's copy starts when the pairs of the block before are in registers. Blocks in which something
is masked, of which a tile has few, are loaded from where they are.

The rows lie in the memory of the output tile, which a tile needs when its last block is done, and
in the same layout, so that a warp's rows of both have the same places. Before a tile's first copy
the output of the tile before must have been stored.
"""

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kernels.common import matrix_rows, ptx
from kernels.common.bias import BiasInMemory
from kernels.common.tensors import INT32
from kernels.sm90.forward_schedule import Work
from kernels.sm90.tiles import WARPGROUP, ForwardTile

_WARP_ROWS = 16
_CHUNK = 8  # elements, of 16 bytes
_LANES_OF_ROW = 16  # of a copy: a chunk each; all tiles of kernels with pairs have 128 keys
_COPY_ROWS = 2


@dataclasses.dataclass(frozen=True)
class StagedBias:
    """A thread's part of a tile's blocks, and where it lies in shared memory.

    What is the same in all blocks is computed once a tile: a block's copy is three instructions for
    each two rows.

    Attributes:
      source: what this lane copies of row 0 and of the first block, if the row were the only one.
      row, last_row: the first row that it copies of, and the last one that is there.
      row_bytes: from row to row.
      target: where the first row's chunk goes.
      matrices: this lane's row of ldmatrix.
      tile: of the kernel.
    """

    source: cute.Pointer
    row: Int32
    last_row: Int32
    row_bytes: Int32
    target: Int32
    matrices: Int32
    tile: ForwardTile

    @cute.jit
    def start(self, block: Int32):
        """Starts to copy this warp's rows of a block of keys, all of which are there.

        Rows past the last are the last one: nobody uses their scores.
        """
        own = self.source + block * (self.tile.n // 2)
        for i in cutlass.range_constexpr(0, _WARP_ROWS, _COPY_ROWS):
            bits, offset = matrix_rows.row_place(i, self.tile.span_bytes)
            row = cutlass.min(self.row + i, self.last_row)
            ptx.copy_chunk(self.target ^ bits, offset, own, row, self.row_bytes)
        cute.arch.cp_async_commit_group()

    def load(self) -> cute.Tensor:
        """Returns this thread's pairs of the block that was copied last, two rows of each pair."""
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_warp()
        pairs = self.tile.n // _CHUNK
        words = cute.make_rmem_tensor((2 * pairs,), Int32)
        for pair in range(0, pairs, 2):
            column = _CHUNK * pair
            bits, offset = matrix_rows.place(0, column, self.tile.span_bytes, self.tile.m)
            for i, word in enumerate(ptx.load_matrices(self.matrices ^ bits, offset)):
                words[2 * pair + i] = word
        cute.arch.sync_warp()
        return words


def stage(memory: cute.Tensor, source: BiasInMemory, work: Work, tile: ForwardTile) -> StagedBias:
    """Returns a thread's part of the blocks of a tile.

    memory: [m, n] shared memory, in the layout of an operand.
    """
    thread, _, _ = cute.arch.thread_idx()
    thread, span = thread - WARPGROUP, tile.span_bytes
    chunk, row = thread % _LANES_OF_ROW, thread % 32 // _LANES_OF_ROW
    first_row, chunks = thread // 32 * _WARP_ROWS + row, span // 16
    # Of rows of 128 bytes the odd ones, this lane's or not, have other places of chunks.
    turned = chunk % chunks ^ (row if chunks == _CHUNK else 0)
    target = memory.iterator.toint().to(Int32) + first_row * span
    target += chunk // chunks * (tile.m * span) + turned * 16
    (matrices,) = matrix_rows.lane_addresses((), (memory,), span)
    rows, columns = source.buffers.bias_rows, source.buffers.bias_columns
    return StagedBias(
        source=source.plane(work.batch, work.head) + chunk * (_CHUNK // 2),
        row=work.first_row + first_row,
        last_row=source.sizes.query_length - 1,
        row_bytes=INT32.select(rows > 1, columns * 4, Int32(0)),
        target=target,
        matrices=matrices + thread // 32 * (_WARP_ROWS * span),
        tile=tile,
    )
