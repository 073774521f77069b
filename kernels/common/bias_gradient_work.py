"""What the kernels of a bias's gradient sum: a CTA's tile, and the pairs of tiles that it visits.

    S = Q K^T   dP = dO V^T   P = exp2((S * scale + bias) * log2(e) - lse_log2)
    dS = P * (dP - delta)     dbias = the sum of dS over all pairs that have the same bias

A CTA has a tile of sums, in registers, and visits all pairs of tiles that add to them:

    a dense bias       one pair of tiles, of every batch element and head that share the bias
    rows alike         one key tile, with every query tile, likewise; rows are summed at the end
    by distance        the pairs of tiles along a diagonal, likewise: all have the same distances
                       in the same places; diagonals are summed at the end
    banded             one query tile, and keys counted from where the band begins in its first
                       row, likewise: in each batch element they have the same columns of the rows

So the bias is the same in all visits of a tile, place by place. Every sum is one thread's, in a
fixed order: equal inputs give equal bits, and nothing is added in global memory. Distances meet in
two tiles' diagonals, the lower and the upper ones; each tile has a place of its own for either, and
the library adds the two.
"""

import dataclasses

import cutlass
from cutlass import Boolean, Int32

from fa4_jax import bands
from kernels.common import ptx, tensors
from kernels.common.bias import BiasInMemory
from kernels.common.schedule import batch_band
from kernels.interface import (
    BackwardScalars,
    BiasBuffers,
    BiasGradientBuffers,
    BiasGradientShape,
    Sizes,
)


@dataclasses.dataclass(frozen=True)
class Call:
    """The parameters of a launch but tensor maps; tile: query rows, and keys, of a tile."""

    tile: cutlass.Constexpr[int]
    buffers: BiasGradientBuffers
    sizes: Sizes
    shape: BiasGradientShape
    scalars: BackwardScalars
    bias: BiasBuffers

    @property
    def memory(self) -> BiasInMemory:
        """Where the bias is."""
        return BiasInMemory(self.bias, self.sizes, self.buffers.extents)

    def in_rows(self) -> Boolean:
        """Whether a dense bias, and so its gradient, has pairs, and rows of their own."""
        return self.memory.in_pairs() & (self.bias.bias_rows > 1)

    def rows_differ(self) -> Boolean:
        """Whether each row has elements of its own, unless the bias is by distance."""
        return self.bias.bias_rows > 1


@dataclasses.dataclass(frozen=True)
class Work:
    """What a CTA sums of a tile.

    Attributes:
      plane, unit: of which dimensions of the bias, and which of their tiles.
      first_batch, batches, first_head, heads: that share the plane.
      first_row_tile, row_tiles: query tiles that are visited.
      key_tile: of the first of them; by distance the next query tile has the next key tile, and
        banded tiles of keys are counted from the band's first key.
      key_step: by how much, then: 1 or 0.
    """

    plane: Int32
    unit: Int32
    first_batch: Int32
    batches: Int32
    first_head: Int32
    heads: Int32
    first_row_tile: Int32
    row_tiles: Int32
    key_tile: Int32
    key_step: Int32

    def visits(self) -> Int32:
        """Counts the pairs of tiles that are visited."""
        return self.batches * self.heads * self.row_tiles


@dataclasses.dataclass(frozen=True)
class Visit:
    """A pair of tiles of one head; seen: whether any pair of row and key may be."""

    batch: Int32
    head: Int32
    first_row: Int32
    first_key: Int32
    band: bands.Band
    seen: Boolean


def tile_count(call: Call) -> Int32:
    """Counts the tiles that are summed."""
    return call.bias.bias_batch * call.bias.bias_heads * call.shape.units


def assign(call: Call, index: Int32) -> Work:
    """Returns the work of the index-th tile, which is computed anew at each call."""
    sizes, bias, tile = call.sizes, call.bias, call.tile
    index = ptx.anew(index)
    plane = index // call.shape.units
    unit = index - plane * call.shape.units
    batch = plane // bias.bias_heads
    head = plane - batch * bias.bias_heads
    all_rows = (sizes.query_length + tile - 1) // tile
    all_keys = (sizes.key_length + tile - 1) // tile
    diagonal = unit - (all_rows - 1)  # the key tile minus the query tile
    first = cutlass.max(-diagonal, Int32(0))
    count = cutlass.min(all_rows, all_keys - diagonal) - first
    is_band = call.memory.is_band()
    # The rows of a tile have their columns at tile - 1 keys more than one row has.
    in_band = (call.memory.band_columns() + 2 * tile - 2) // tile
    across = Int32(cutlass.select_(is_band, in_band, all_keys))
    row_tile, key_tile = unit // across, unit - unit // across * across
    one, by_distance = Int32(1), call.memory.by_distance()
    rows_differ = call.rows_differ() | is_band

    def choose(of_distance: Int32, of_dense: Int32, of_alike: Int32) -> Int32:
        other = cutlass.select_(rows_differ, of_dense, of_alike)
        return Int32(cutlass.select_(by_distance, of_distance, Int32(other)))

    return Work(
        plane=plane,
        unit=unit,
        first_batch=batch,
        batches=Int32(cutlass.select_(bias.bias_batch == 1, sizes.batch, one)),
        first_head=head,
        heads=Int32(cutlass.select_(bias.bias_heads == 1, sizes.heads, one)),
        first_row_tile=choose(first, row_tile, Int32(0)),
        row_tiles=choose(count, one, all_rows),
        key_tile=choose(first + diagonal, key_tile, unit),
        key_step=choose(one, Int32(0), Int32(0)),
    )


def visit_of(call: Call, work: Work, index: Int32) -> Visit:
    """Returns a tile's index-th visit."""
    tile, rest = call.tile, index // work.row_tiles
    step = index - rest * work.row_tiles
    batch = rest // work.heads
    head = work.first_head + rest - batch * work.heads
    batch = work.first_batch + batch
    first_row = (work.first_row_tile + step) * tile
    first_key = (work.key_tile + step * work.key_step) * tile
    band = batch_band(call.buffers.extents, batch, call.scalars.window)
    begin = first_row + call.memory.first_key_of_band(batch)
    first_key += Int32(cutlass.select_(call.memory.is_band(), begin, Int32(0)))
    keys = bands.visited_blocks(band, first_row, tile, 1, tensors.INT32)
    seen = (first_key < keys.end) & (first_key + tile > keys.begin) & (keys.begin < keys.end)
    return Visit(batch, head, first_row, first_key, band, seen)
