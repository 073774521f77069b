"""The visits of a tile of the Blackwell forward (kernels/common/key_visits.py).

The schedule warp counts them, and the load warp walks over them. When it loads K of a visit, it
publishes which block that is, and whether band and ranges hide any of it. It reads it again for V;
softmax warps read it, of masked visits, when the scores are there.
"""

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32

from kernels.common import key_visits, pair_masks
from kernels.common.key_visits import NO_VISITS, Visits
from kernels.common.pair_masks import BOX_ROWS, BitsInMemory, States
from kernels.common.row_ranges import element
from kernels.common.schedule import ForwardShape
from kernels.interface import RangeBuffers, Sizes
from kernels.sm100.forward_description import UNIT
from kernels.sm100.forward_schedule import Work, queries_of


@dataclasses.dataclass(frozen=True)
class _Tile:
    """What a mask says of a tile's rows: boxes first to last of rows, of consecutive heads.

    keys: of a block.
    """

    states: States
    heads: Int32
    first: Int32
    last: Int32
    keys: int

    @property
    def given(self) -> Boolean:
        """Whether there is a mask."""
        return self.states.given

    def seen(self, first_key: Int32) -> tuple[Boolean, Boolean]:
        """Returns whether any pair of the tile and a block is seen, and whether all are."""
        return _seen(self, first_key)


@cute.jit
def _seen(tile: _Tile, first_key: Int32) -> tuple[Boolean, Boolean]:
    count = tile.keys // pair_masks.BOX_KEYS
    ones = Uint32((1 << count) - 1)
    some, every = Uint32(0), Uint32(ones)
    for head in cutlass.range(tile.heads, unroll=1):
        for box in cutlass.range(tile.first, tile.last + 1, unroll=1):
            row = head * tile.states.tiles + box
            found = pair_masks.boxes(tile.states, row, first_key, count)
            some, every = some | (found[0] & ones), every & found[1]
    return some != 0, every == ones


def _tile(work: Work, buffers: RangeBuffers, sizes: Sizes, shape: ForwardShape) -> _Tile:
    """Returns what a mask says of the rows of a tile, in a pair of the pair's."""
    states = pair_masks.states(buffers, sizes, work.batch, work.head)
    heads = Int32(cutlass.select_(buffers.state_heads == 1, Int32(1), work.pack))
    first, last = queries_of(work.first_unit, work.pack, shape.m)
    last = cutlass.min(last, sizes.query_length - 1)
    return _Tile(states, heads, first // BOX_ROWS, last // BOX_ROWS, shape.n)


def by_mask(work: Work, buffers: RangeBuffers, sizes: Sizes, shape: ForwardShape) -> Work:
    """Returns a tile's work in visits; a whole warp calls it. Without a mask it stays in blocks."""
    tile = _tile(work, buffers, sizes, shape)
    counts = key_visits.count(Visits(tile, work.blocks, shape.n, Int32(0)))
    return dataclasses.replace(
        work,
        blocks=counts.of_tile(tile.given, work.blocks),
        padded_keys=work.padded_keys & counts.has_last,
        own=work.blocks,
    )


def visits_of(
    work: Work, buffers: RangeBuffers | None, sizes: Sizes, shape: ForwardShape, ctas: int
) -> Visits | None:
    """Returns a tile's visits for the load warp of each CTA, or None."""
    if buffers is None:
        return NO_VISITS
    if ctas > 1:
        units = cute.arch.block_idx_in_cluster() * (shape.m // UNIT // ctas)
        work = dataclasses.replace(work, first_unit=work.first_unit - units)
    tile = _tile(work, buffers, sizes, shape)
    return Visits(tile, work.own, shape.n, work.blocks.end - work.blocks.full_end)


@cute.jit
def publish(
    memory: cute.Tensor, visits: Visits, walk: cute.Tensor, end: Int32, step: Int32, ordinal: Int32
) -> Int32:
    """Returns the block of a step, whose K the load warp loads, and publishes it.

    Args:
      ordinal: of the visit among all of the CTA.
    """
    block, limited = key_visits.block_of_step(visits, walk, end, step)
    with cute.arch.elect_one():
        memory[ordinal % cute.size(memory)] = block * 2 + limited
    cute.arch.sync_warp()
    return block


def published(memory: cute.Tensor, ordinal: Int32) -> tuple[Int32, Int32]:
    """Returns the block of a visit, and whether band or ranges may hide any of it."""
    word = memory[ordinal % cute.size(memory)]
    return word // 2, word % 2


@dataclasses.dataclass(frozen=True)
class Hidden:
    """What hides keys of a thread's row in a masked block: limits, tags and bits, by `words`.

    Attributes:
      compares: whether tags are compared.
      bits: of the row's head; query: the row.
    """

    compares: Int32
    bits: BitsInMemory
    query: Int32

    def word(self, first_key: Int32) -> Uint32:
        """Returns the bits of 32 keys from one on."""
        query = cutlass.min(self.query, self.bits.sizes.query_length - 1)
        place = self.bits.place(query, first_key) + query % BOX_ROWS
        return Uint32(element(self.bits.buffers.mask_bits, place))


def hidden_of(work: Work, buffers: RangeBuffers, sizes: Sizes, query: Int32, head: Int32) -> Hidden:
    """Returns what hides keys of a row."""
    plane = pair_masks.plane_of(buffers.mask_batch, buffers.mask_heads, work.batch, head)
    return Hidden(Int32(work.compares), BitsInMemory(buffers, sizes, plane), query)
