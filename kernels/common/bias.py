"""A bias that kernels read from global memory, score by score: `interface.BiasBuffers`.

An element's address is linear in row and key, whatever the bias broadcasts over: rows that are
alike are a step of 0 apart, and of a bias by distance each row begins one element before the last.
So does a row of a banded one, after as many elements as a row has.

A banded bias is 0 but for the keys of a band. What lies before and after a row's elements are zeros
enough for a block of scores of which one is in the band; in other blocks nothing is loaded. Kernels
that read the caller's table (`KernelKey.band_as_given`) find no zeros there, and compare; a row's
elements then descend in key: `HeadBias.in_band`.
"""

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from fa4_jax.key import BAND_GAP, FAR_NUMBERS, NO_BAND
from kernels.common import ptx
from kernels.common.tensors import INT32, f32
from kernels.interface import BiasBuffers, Sizes


@dataclasses.dataclass(frozen=True)
class Band:
    """The keys whose scores of a row get anything: all, or low + row <= key < low + row + columns.

    Attributes:
      is_given: whether there is a band.
    """

    is_given: Boolean
    low: Int32
    columns: Int32

    def meets(self, rows: tuple[Int32, int], keys: tuple[Int32, int]) -> Boolean:
        """Whether any of some rows gets anything for any of some keys: the first, and how many."""
        (row, row_count), (key, key_count) = rows, keys
        place = key - row - self.low
        inside = (place > -key_count) & (place < self.columns + (row_count - 1))
        return inside | (self.is_given == Boolean(False))


@dataclasses.dataclass(frozen=True)
class BandElements:
    """A row's elements of a table as the caller has it, counted from a score.

    Attributes:
      own: where the score's element is if the score is in the band.
      place: the score's, which is 0 at the row's first key of the band.
      counts: the band's columns, and those of them that begin an 8-aligned pair.
    """

    own: cute.Pointer
    place: Int32
    counts: tuple[Int32, Int32]

    def pair(self, keys: int) -> tuple[Float32, Float32]:
        """Returns what the score some keys further, an even number, and the next one get."""
        return ptx.load_pair_down(self.own, keys, self.place, self.counts)


@dataclasses.dataclass(frozen=True)
class HeadBias:
    """The bias of one head of one batch element, for rows and keys within the call's lengths.

    Attributes:
      first: of row 0 and key 0; of a band's, where that would be, but its first column in a table
        as the caller has it.
      row_step: elements from a row to the next one.
      last_row: T - 1. Rows past it have its bias: nobody uses their scores.
      last_key: S - 1. Likewise.
      band: which scores get anything.
    """

    first: cute.Pointer
    row_step: Int32
    last_row: Int32
    last_key: Int32
    band: Band

    def meets(self, rows: tuple[Int32, int], keys: tuple[Int32, int]) -> Boolean:
        """Whether any of some rows gets anything for any of some keys: the first, and how many."""
        (row, row_count), (key, key_count) = rows, keys
        row, key = cutlass.min(row, self.last_row), cutlass.min(key, self.last_key)
        return self.band.meets((row, row_count), (key, key_count))

    def row(self, row: Int32) -> cute.Pointer:
        """Returns the elements of a row, by key."""
        return self.first + Int64(cutlass.min(row, self.last_row)) * self.row_step

    def in_band(self, row: Int32, key: Int32, rows: tuple[int, ...]) -> list[BandElements]:
        """Returns the elements of some rows after a row, of a table as the caller has it.

        Those of each row are counted from as many keys after the key, where the place is that of
        the row and the key. A row past the last one reads the last one's columns, so that nothing
        is read outside of the table.
        """
        place, columns = key - row - self.band.low, self.band.columns
        owns = [self.row(row + after) + (columns - 1 - place) for after in rows]
        aligned, pairs = Int32(4), columns - 1
        for own in owns:
            aligned = aligned & own.toint().to(Int32)
        pairs = INT32.select(aligned != 0, pairs, Int32(0))
        return [BandElements(own, place, (columns, pairs)) for own in owns]

    def of_row(self, row: Int32) -> "RowBias":
        """Returns the bias of a row from key 0 on."""
        return RowBias(self.row(row), self.last_key + 1, cutlass.min(row, self.last_row), self.band)

    def of_key(self, key: Int32, first_row: Int32) -> "KeyBias":
        """Returns the bias of a key, by row from first_row on."""
        key, row = cutlass.min(key, self.last_key), cutlass.min(first_row, self.last_row)
        return KeyBias(
            self.row(row) + key, self.row_step, self.last_row - row, key - row, self.band
        )


@dataclasses.dataclass(frozen=True)
class RowBias:
    """The bias of one row and consecutive keys.

    Attributes:
      first: of the first key.
      count: of keys that have an element from there on.
      place: the row minus the first key.
      band: of the head.
    """

    first: cute.Pointer
    count: Int32
    place: Int32
    band: Band

    def after(self, keys: Int32) -> "RowBias":
        """Returns the bias of the keys after the first ones."""
        return RowBias(self.first + keys, self.count - keys, self.place - keys, self.band)

    def meets(self, keys: int) -> Boolean:
        """Whether any of the first keys gets anything."""
        return self.band.meets((self.place, 1), (Int32(0), keys))


@dataclasses.dataclass(frozen=True)
class KeyBias:
    """The bias of one key and consecutive rows.

    Attributes:
      first: of the first row.
      row_step: elements from a row to the next one.
      last: the last row, counted from the first one.
      place: the key minus the first row.
      band: of the head.
      skipped: rows before those that are asked for.
    """

    first: cute.Pointer
    row_step: Int32
    last: Int32
    place: Int32
    band: Band
    skipped: Int32 | int = 0

    def after(self, rows: Int32 | int) -> "KeyBias":
        """Returns the bias of the rows after the first ones."""
        return dataclasses.replace(self, skipped=self.skipped + rows)

    def meets(self, rows: int) -> Boolean:
        """Whether any of the first rows gets anything."""
        row = cutlass.min(Int32(self.skipped), self.last)
        return self.band.meets((row, rows), (self.place, 1))

    def element(self, row: int) -> Float32:
        """Returns what the score of a row gets."""
        place = cutlass.min(self.skipped + row, self.last)
        return f32(self.first, place * self.row_step)


@dataclasses.dataclass(frozen=True)
class BiasInMemory:
    """Where a call's bias is.

    Attributes:
      extents: of each batch element.
      band_as_given: of the kernel's key.
    """

    buffers: BiasBuffers
    sizes: Sizes
    extents: cute.Pointer
    band_as_given: bool = False

    def anew(self) -> "BiasInMemory":
        """Returns the same; nothing that follows from its shape is held before this place."""
        names = ("bias_heads", "bias_rows", "bias_columns")
        shape = {name: ptx.anew(getattr(self.buffers, name)) for name in names}
        return dataclasses.replace(self, buffers=dataclasses.replace(self.buffers, **shape))

    def is_band(self) -> Boolean:
        """Whether the bias is banded."""
        return self.buffers.bias_first != NO_BAND

    def by_distance(self) -> Boolean:
        """Whether the distance of row and key alone decides."""
        longer = self.buffers.bias_columns > self.sizes.key_length
        return longer & (self.buffers.bias_first == NO_BAND)

    def in_pairs(self) -> Boolean:
        """Whether elements are of the kernel's storage type; a column is then a pair of them."""
        shorter = self.buffers.bias_columns < self.sizes.key_length
        return shorter & (self.buffers.bias_first == NO_BAND)

    def far_numbers(self, batch: Int32, head: Int32) -> list[Float32]:
        """Returns slope, low, high and reach of a bias by distance of which there are two copies.

        Of others they are 0; `fa4_jax.bias_buffer`.
        """
        own = self.plane(batch, head) + 2 * self.buffers.bias_columns
        count = INT32.select(self.by_distance(), Int32(FAR_NUMBERS), Int32(0))
        words = [ptx.load_word_below(own, i, count) for i in range(FAR_NUMBERS)]
        return [word.bitcast(Float32) for word in words]

    def band_columns(self) -> Int32:
        """Returns how many keys of a row a banded bias has elements for."""
        return self.buffers.bias_columns - (0 if self.band_as_given else BAND_GAP)

    def first_key_of_band(self, batch: Int32) -> Int32:
        """Returns the first of these keys of row 0; each row's is one after the last row's."""
        # Other biases do not wait for the load.
        offset = self.query_offset(batch, self.is_band())
        return offset - self.buffers.bias_first - self.band_columns() + 1

    def query_offset(self, batch: Int32, wanted: Boolean) -> Int32:
        """Returns the query offset of a batch entry, or 0 where nobody wants it."""
        words = INT32.select(wanted, Int32(4), Int32(0))
        return ptx.load_word_below(self.extents + batch * 4, 2, words)

    def plane(self, batch: Int32, head: Int32) -> cute.Pointer:
        """Returns the elements of a query head."""
        return self.buffers.bias + self._offset(batch, head)

    def _offset(self, batch: Int32, head: Int32) -> Int64:
        own = self.buffers
        plane = Int64(cutlass.select_(own.bias_batch == 1, Int32(0), batch))
        head = cutlass.select_(own.bias_heads == 1, Int32(0), head)
        return (plane * own.bias_heads + head) * own.bias_rows * own.bias_columns

    def of_head(self, batch: Int32, head: Int32, low: Int32 | None = None) -> HeadBias:
        """Returns the bias of a query head.

        low: `first_key_of_band`, where the caller has it.
        """
        own, sizes, plane = self.buffers, self.sizes, self._offset(batch, head)
        is_band, by_distance = self.is_band(), self.by_distance()
        low = self.first_key_of_band(batch) if low is None else low
        last_row = sizes.query_length - 1
        rows_differ = own.bias_rows > 1
        step = INT32.select(rows_differ, own.bias_columns, Int32(0))
        first = Int32(0)
        if not self.band_as_given:
            step = INT32.select(is_band, step - 1, step)
            first = INT32.select(is_band, BAND_GAP - low, first)
        step = INT32.select(by_distance, Int32(-1), step)
        first = INT32.select(by_distance, last_row, first)
        band = Band(is_band, low, self.band_columns())
        return HeadBias(own.bias + plane + first, step, last_row, sizes.key_length - 1, band)
