"""Stores a tile's sums of a bias's gradient, which are in shared memory, as the bias has them."""

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kernels.common import ptx
from kernels.common.bias_gradient_work import Call, Work

AT_ONCE = 8
"""Rows whose sums a thread loads before it stores them, so that it waits for memory once."""


@dataclasses.dataclass(frozen=True)
class Sums:
    """The sums of a tile, as one of the threads that store them sees them.

    Attributes:
      memory: [keys, rows] in shared memory, with keys side by side and a column between rows.
      thread: of as many as a tile has diagonals, and one.
    """

    memory: cute.Tensor
    call: Call
    work: Work
    thread: Int32

    def plane(self) -> cute.Pointer:
        """Returns the numbers of dbias's first two dimensions."""
        call = self.call
        by_distance, is_band = call.memory.by_distance(), call.memory.is_band()
        rows = Int32(cutlass.select_(is_band, call.sizes.query_length, call.bias.bias_rows))
        rows = Int32(cutlass.select_(by_distance, Int32(2), rows))  # of lower and upper diagonals
        return call.buffers.dbias + Int64(self.work.plane) * call.shape.dbias_columns * rows


class SumsStore:
    """Stores the sums of a tile.

    Attributes:
      tile: its query rows, and keys; twice as many threads store.
      dtype: the kernel's storage type.
      pairwise: whether a dense bias may be of that type, in pairs; rows that differ are then stored
        elsewhere.
    """

    def __init__(self, tile: int, dtype: Any, pairwise: bool):
        self.tile, self.dtype, self.pairwise = tile, dtype, pairwise

    @cute.jit
    def store(self, own: Sums):
        """Stores what the bias has of them."""
        memory = own.call.memory
        if memory.by_distance():
            self.store_diagonals(own)
        elif memory.is_band():
            self.store_band(own)
        elif cutlass.const_expr(not self.pairwise):
            self.store_elements(own)
        elif memory.in_pairs():
            self.store_pairs(own)
        else:
            self.store_elements(own)

    @cute.jit
    def store_elements(self, own: Sums):
        """Stores the sums of a dense bias as fp32 numbers."""
        if own.call.rows_differ():
            self.store_tile(own)
        else:
            self.store_columns(own)

    @cute.jit
    def store_pairs(self, own: Sums):
        """Stores the sums of columns, of a dense bias whose rows are alike, as pairs of its type.

        Each pair is a word of dbias.
        """
        memory, key = own.memory, 2 * own.thread
        column = own.work.key_tile * (self.tile // 2) + own.thread
        if (own.thread < self.tile // 2) & (column < own.call.shape.dbias_columns):
            low, high = Float32(0.0), Float32(0.0)
            for row in cutlass.range(self.tile, unroll=AT_ONCE):
                low, high = low + memory[key, row], high + memory[key + 1, row]
            word = ptx.round_pair(self.dtype, low, high)
            target = own.plane() + column
            cute.make_tensor(target, cute.make_layout(1))[0] = word.bitcast(Float32)

    @cute.jit
    def store_tile(self, own: Sums):
        """Stores the sums as they are."""
        sizes, place = own.call.sizes, own.thread % self.tile
        key = own.work.key_tile * self.tile + place
        for row in cutlass.range(own.thread // self.tile, self.tile, 2, unroll=AT_ONCE):
            query = own.work.first_row_tile * self.tile + row
            if (query < sizes.query_length) & (key < sizes.key_length):
                target = own.plane() + (Int64(query) * sizes.key_length + key)
                cute.make_tensor(target, cute.make_layout(1))[0] = own.memory[place, row]

    @cute.jit
    def store_band(self, own: Sums):
        """Stores the sums whose row has a column there; a row's first key has its last column."""
        columns, key = own.call.memory.band_columns(), own.thread % self.tile
        for row in cutlass.range(own.thread // self.tile, self.tile, 2, unroll=AT_ONCE):
            query = own.work.first_row_tile * self.tile + row
            column = columns - 1 + row - own.work.key_tile * self.tile - key
            if (query < own.call.sizes.query_length) & (column >= 0) & (column < columns):
                target = own.plane() + (Int64(query) * columns + column)
                cute.make_tensor(target, cute.make_layout(1))[0] = own.memory[key, row]

    @cute.jit
    def store_columns(self, own: Sums):
        """Stores the sum of each column."""
        key = own.work.key_tile * self.tile + own.thread
        if (own.thread < self.tile) & (key < own.call.sizes.key_length):
            found = Float32(0.0)
            for row in cutlass.range(self.tile, unroll=AT_ONCE):
                found = found + own.memory[own.thread, row]
            cute.make_tensor(own.plane() + key, cute.make_layout(1))[0] = found

    @cute.jit
    def store_diagonals(self, own: Sums):
        """Stores the sum of each diagonal: thread t has key - row = t - (tile - 1)."""
        tile, columns = self.tile, own.call.shape.dbias_columns
        found, distance = Float32(0.0), own.thread - (tile - 1)
        first = cutlass.max(-distance, Int32(0))
        last = cutlass.min(Int32(tile), tile - distance)
        for row in cutlass.range(first, last, unroll=1):
            found = found + own.memory[row + distance, row]
        # `columns` lie between the lower diagonals, of t < tile, and the upper ones.
        past = own.thread - tile + columns
        place = Int32(cutlass.select_(own.thread < tile, own.thread, past))
        target = own.plane() + own.work.unit * tile + place
        cute.make_tensor(target, cute.make_layout(1))[0] = found
