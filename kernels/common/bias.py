"""A bias that kernels read from global memory, score by score: `interface.BiasBuffers`.

An element's address is linear in row and key, whatever the bias broadcasts over: rows that are
alike are a step of 0 apart, and of a bias by distance each row begins one element before the last.
"""

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kernels.common import ptx
from kernels.common.tensors import f32
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

    def of_key(self, key: Int32, first_row: Int32) -> "KeyBias":
        """Returns the bias of a key, by row from first_row on."""
        own = self.row(first_row) + cutlass.min(key, self.keys - 1)
        return KeyBias(own, self.row_step, self.last_row - first_row)


@dataclasses.dataclass(frozen=True)
class KeyBias:
    """The bias of one key and consecutive rows.

    Attributes:
      first: of the first row.
      row_step: elements from a row to the next one.
      last: the last row, counted from the first one.
      skipped: rows before those that are asked for.
    """

    first: cute.Pointer
    row_step: Int32
    last: Int32
    skipped: Int32 | int = 0

    def after(self, rows: Int32 | int) -> "KeyBias":
        """Returns the bias of the rows after the first ones."""
        return dataclasses.replace(self, skipped=self.skipped + rows)

    def element(self, row: int) -> Float32:
        """Returns what the score of a row gets."""
        place = cutlass.min(self.skipped + row, self.last)
        return f32(self.first, place * self.row_step)


@dataclasses.dataclass(frozen=True)
class BiasInMemory:
    """Where a call's bias is."""

    buffers: BiasBuffers
    sizes: Sizes

    def anew(self) -> "BiasInMemory":
        """Returns the same; nothing that follows from its shape is held before this place."""
        names = ("bias_heads", "bias_rows", "bias_columns")
        shape = {name: ptx.anew(getattr(self.buffers, name)) for name in names}
        return dataclasses.replace(self, buffers=dataclasses.replace(self.buffers, **shape))

    def plane(self, batch: Int32, head: Int32) -> cute.Pointer:
        """Returns the elements of a query head."""
        return self.buffers.bias + self._offset(batch, head)

    def _offset(self, batch: Int32, head: Int32) -> Int64:
        own = self.buffers
        plane = Int64(cutlass.select_(own.bias_batch == 1, Int32(0), batch))
        head = cutlass.select_(own.bias_heads == 1, Int32(0), head)
        return (plane * own.bias_heads + head) * own.bias_rows * own.bias_columns

    def of_head(self, batch: Int32, head: Int32) -> HeadBias:
        """Returns the bias of a query head."""
        own, sizes, plane = self.buffers, self.sizes, self._offset(batch, head)
        by_distance = own.bias_columns > sizes.key_length
        rows_differ = own.bias_rows > 1
        step = Int32(cutlass.select_(rows_differ, own.bias_columns, Int32(0)))
        step = Int32(cutlass.select_(by_distance, Int32(-1), step))
        first = Int32(cutlass.select_(by_distance, sizes.query_length - 1, Int32(0)))
        return HeadBias(own.bias + plane + first, step, sizes.query_length - 1, sizes.key_length)
