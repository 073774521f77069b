"""A bias that kernels read from global memory, score by score: `interface.BiasBuffers`.

An element's address is linear in row and key, whatever the bias broadcasts over: rows that are
alike are a step of 0 apart, and of a bias by distance each row begins one element before the last.
"""

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from kernels.interface import BiasBuffers, Sizes


@dataclasses.dataclass(frozen=True)
class HeadBias:
    """The bias of one head of one batch element, for rows and keys within the call's lengths.

    Attributes:
      first: of row 0 and key 0.
      row_step: elements from a row to the next one.
      last_row: T - 1. Rows past it have its bias: nobody uses their scores.
      keys: S.
    """

    first: cute.Pointer
    row_step: Int32
    last_row: Int32
    keys: Int32

    def row(self, row: Int32) -> cute.Pointer:
        """Returns the elements of a row, by key."""
        return self.first + Int64(cutlass.min(row, self.last_row)) * self.row_step


@dataclasses.dataclass(frozen=True)
class BiasInMemory:
    """Where a call's bias is."""

    buffers: BiasBuffers
    sizes: Sizes

    def of_head(self, batch: Int32, head: Int32) -> HeadBias:
        """Returns the bias of a query head."""
        own, sizes = self.buffers, self.sizes
        batch = Int64(cutlass.select_(own.bias_batch == 1, Int32(0), batch))
        head = cutlass.select_(own.bias_heads == 1, Int32(0), head)
        plane = (batch * own.bias_heads + head) * own.bias_rows * own.bias_columns
        by_distance = own.bias_columns > sizes.key_length
        rows_differ = own.bias_rows > 1
        step = Int32(cutlass.select_(rows_differ, own.bias_columns, Int32(0)))
        step = Int32(cutlass.select_(by_distance, Int32(-1), step))
        first = Int32(cutlass.select_(by_distance, sizes.query_length - 1, Int32(0)))
        return HeadBias(own.bias + plane + first, step, sizes.query_length - 1, sizes.key_length)
