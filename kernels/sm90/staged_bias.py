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
from cutlass import Int32, Int64

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
    """A warp's rows of a block of bias.

    Attributes:
      memory: [m, n] shared memory, in the layout of an operand.
      tile: of the kernel.
    """

    memory: cute.Tensor
    tile: ForwardTile

    @property
    def span(self) -> int:
        """Bytes of a row that lie side by side."""
        return self.tile.span_bytes

    @cute.jit
    def start(self, source: BiasInMemory, work: Work, block: Int32):
        """Starts to copy this warp's rows of a block of keys, all of which are there.

        Rows past the last are the last one: nobody uses their scores.
        """
        thread, _, _ = cute.arch.thread_idx()
        thread = ptx.anew(thread) - WARPGROUP
        chunk, row = thread % _LANES_OF_ROW, thread % 32 // _LANES_OF_ROW
        first_row, source = thread // 32 * _WARP_ROWS + row, source.anew()
        chunks = self.span // 16
        # Of rows of 128 bytes the odd ones, this lane's or not, have other places of chunks.
        turned = chunk % chunks ^ (row if chunks == _CHUNK else 0)
        target = self.memory.iterator.toint().to(Int32) + first_row * self.span
        target += chunk // chunks * (self.tile.m * self.span) + turned * 16
        rows, columns = source.buffers.bias_rows, source.buffers.bias_columns
        step = INT32.select(rows > 1, columns, Int32(0))
        plane = source.plane(ptx.anew(work.batch), ptx.anew(work.head))
        own = plane + (block * (self.tile.n // 2) + chunk * (_CHUNK // 2))
        last_row = source.sizes.query_length - 1
        self.copy(own, (work.first_row + first_row, last_row, step), target)
        cute.arch.cp_async_commit_group()

    def copy(self, own: cute.Pointer, rows: tuple[Int32, Int32, Int32], target: Int32):
        """Starts the copies of a lane's chunk; rows: the first, the last one there, and words."""
        first, last, step = rows
        for i in range(0, _WARP_ROWS, _COPY_ROWS):
            bits, offset = matrix_rows.row_place(i, self.span)
            row = cutlass.min(first + i, last)
            ptx.copy_chunk(target ^ bits, offset, own + Int64(row) * step)

    def load(self) -> cute.Tensor:
        """Returns this thread's pairs of the block that was copied last, two rows of each pair."""
        thread, _, _ = cute.arch.thread_idx()
        warp = (ptx.anew(thread) - WARPGROUP) // 32
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_warp()
        (address,) = matrix_rows.lane_addresses((), (self.memory,), self.span)
        address += warp * (_WARP_ROWS * self.span)
        pairs = self.tile.n // _CHUNK
        words = cute.make_rmem_tensor((2 * pairs,), Int32)
        for pair in range(0, pairs, 2):
            bits, offset = matrix_rows.place(0, _CHUNK * pair, self.span, self.tile.m)
            for i, word in enumerate(ptx.load_matrices(address ^ bits, offset)):
                words[2 * pair + i] = word
        cute.arch.sync_warp()
        return words
