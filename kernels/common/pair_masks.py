"""A mask of pairs in global memory: bits of pairs, and states of boxes of 64 rows and 16 keys.

`fa4_jax.masks.bits` says how the library makes and lays them out. A tile of rows and a block of
keys consist of whole boxes; a block in which no box has a pair that is seen is not visited, and one
whose boxes all are seen in full needs no bits. A call may have no such mask: its arrays are then
empty.
"""

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32

from kernels.common.row_ranges import LANES, element
from kernels.interface import RangeBuffers, Sizes

BOX_ROWS, BOX_KEYS = 64, 16
"""fa4_jax.masks.bits.BOX_ROWS and BOX_KEYS."""

TILE_KEYS = 128  # fa4_jax.masks.bits.TILE_WORDS words
_STATE_KEYS = BOX_KEYS * LANES  # keys of a word of states


def is_given(buffers: RangeBuffers) -> Boolean:
    """Whether a call has a mask of pairs."""
    return buffers.mask_heads > 0


@dataclasses.dataclass(frozen=True)
class States:
    """The states of one batch element and head, or KV head.

    Attributes:
      given: whether there are any.
      tiles: rows of boxes; words: words of each.
      some, every: [tiles, words].
    """

    given: Boolean
    tiles: Int32
    words: Int32
    some: cute.Pointer
    every: cute.Pointer


def states(buffers: RangeBuffers, sizes: Sizes, batch: Int32, head: Int32) -> States:
    """Returns the states of a batch element and head, which may be those of all."""
    tiles = (sizes.query_length + BOX_ROWS - 1) // BOX_ROWS
    words = (sizes.key_length + _STATE_KEYS - 1) // _STATE_KEYS
    plane = plane_of(buffers.mask_batch, buffers.state_heads, batch, head)
    first = plane * tiles * words
    return States(
        is_given(buffers), tiles, words, buffers.mask_some + first, buffers.mask_every + first
    )


def plane_of(batches: Int32, heads: Int32, batch: Int32, head: Int32) -> Int32:
    """Returns the index of a batch element's and head's array, where dimensions may be 1."""
    own_batch = Int32(cutlass.select_(batches == 1, Int32(0), batch))
    own_head = Int32(cutlass.select_(heads == 1, Int32(0), head))
    return own_batch * heads + own_head


@dataclasses.dataclass(frozen=True)
class Shape:
    """Rows and keys of a tile whose boxes are asked for together."""

    rows: int
    keys: int


def seen(
    found: States, first_row: Int32, first_key: Int32, shape: Shape
) -> tuple[Boolean, Boolean]:
    """Returns whether any pair of a tile is seen, and whether all are; both if no mask is given.

    Args:
      first_row, first_key: multiples of 64 and of the keys; rows past the last count as the last.
    """
    count = shape.keys // BOX_KEYS
    ones = Uint32((1 << count) - 1)
    some, every = Uint32(0), ones
    for i in range(shape.rows // BOX_ROWS):
        tile = cutlass.min(first_row // BOX_ROWS + i, found.tiles - 1)
        of_tile = boxes(found, tile, first_key, count)
        some, every = some | (of_tile[0] & ones), every & of_tile[1]
    return some != 0, every == ones


def boxes(found: States, tile: Int32, first_key: Int32, count: int) -> tuple[Uint32, Uint32]:
    """Returns `some` and `every` of `count` boxes of a row of boxes, from a key on.

    They are in the lowest bits; of `some` the others mean nothing, of `every` neither.
    """
    some, every = (
        _boxes(pointer, found, tile, first_key, count) for pointer in (found.some, found.every)
    )
    return some, every


def _boxes(
    pointer: cute.Pointer, found: States, tile: Int32, first_key: Int32, count: int
) -> Uint32:
    """Returns the bits of `count` boxes from a key on, in the lowest bits of a word."""
    box = first_key // BOX_KEYS
    row, word = tile * found.words, box // LANES
    shift = Uint32(box % LANES)
    low = Uint32(element(pointer, row + cutlass.min(word, found.words - 1))) >> shift
    if LANES % count == 0:
        return low
    high = Uint32(element(pointer, row + cutlass.min(word + 1, found.words - 1)))
    # A shift by 32 is no shift of the language, so the last one is apart.
    return low | ((high << Uint32(1)) << (Uint32(LANES - 1) - shift))


@dataclasses.dataclass(frozen=True)
class BitsInMemory:
    """Where the bits of a batch element and head are, for a thread without registers for pointers.

    Attributes:
      plane: which of the arrays of batch elements and heads.
      first_row: of a tile.
    """

    buffers: RangeBuffers
    sizes: Sizes
    plane: Int32
    first_row: Int32 | int = 0

    def given(self) -> Boolean:
        """Whether there are any."""
        return is_given(self.buffers)

    def words(self) -> Int32:
        """Counts the words of a row."""
        return (self.sizes.key_length + TILE_KEYS - 1) // TILE_KEYS * (TILE_KEYS // LANES)

    def place(self, row: Int32, key: Int32) -> Int32:
        """Returns where the words begin of the 64 rows that a row lies in, and of keys from one on.

        Rows past the last count as the last; the key is a multiple of 32.
        """
        tiles = (self.sizes.query_length + BOX_ROWS - 1) // BOX_ROWS
        tile = cutlass.min(row // BOX_ROWS, tiles - 1)
        return ((self.plane * tiles + tile) * self.words() + key // LANES) * BOX_ROWS
