"""Which tile a CTA works on when: what the schedules of all kernels have in common."""

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from fa4_jax import bands
from kernels.common import ptx, tensors
from kernels.interface import Sizes, Window

UNBOUNDED = Window(bands.UNBOUNDED, bands.UNBOUNDED)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How tiles are dealt to CTAs: in rounds, alternately from the first CTA on and from the last.

    Tiles are sorted from long to short, so a CTA that gets the longest tile of one round gets the
    shortest of the next.
    """

    extents: cute.Pointer
    sizes: Sizes
    window: Window
    tiles: Int32
    rounds: Int32
    cluster: int = 1  # CTAs that share a tile

    def tile(self, round_index: Int32) -> Int32:
        """Returns the index of this CTA's tile in a round.

        It may lie past the last tile in the last round.
        """
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        if self.cluster > 1:
            cta, ctas = cta // self.cluster, ctas // self.cluster
        return round_index * ctas + Int32(
            cutlass.select_(round_index % 2 == 0, cta, ctas - 1 - cta)
        )

    def rounds_of_cta(self) -> Int32:
        """Counts the rounds in which this CTA has a tile."""
        last_is_full = self.tile(self.rounds - 1) < self.tiles
        return self.rounds - 1 + Int32(last_is_full)


@dataclasses.dataclass(frozen=True)
class ForwardShape:
    """What an assignment depends on besides the schedule.

    Attributes:
      m, n: query rows of a tile, keys of a block.
      kv_row_bytes: of a key's row of K and of V together.
      l2_bytes: share of the L2 that K and V of the heads in flight may fill under a band.
      band: whether the mask is a band; a dense kernel ignores the window.
      shorter_last: whether the last tile of a head may take less time than the others, which take
        the same, so that each CTA should have as many of them.
      batches_together: of `HeadOrder`.
    """

    m: int
    n: int
    kv_row_bytes: int
    l2_bytes: int
    band: bool
    shorter_last: bool = False
    batches_together: bool = False


def nth_tile(index: Int32, section: Int32, heads: Int32, tiles: Int32) -> tuple[Int32, Int32]:
    """Returns (tile, head) of the index-th of all tiles of `heads` heads, which have `tiles` each.

    Heads form sections of `section` heads, whose operands the L2 holds. Within a section the first
    tiles of all heads come first, then the second ones, and so on: equal tiles of neighbouring
    heads run together, and heads that share K and V share them in the L2.
    """
    section = cutlass.min(section, heads)  # so that no product below exceeds the number of units
    first_head = index // (section * tiles) * section
    in_section = index - first_head * tiles
    section = cutlass.min(section, heads - first_head)
    tile = in_section // section
    return tile, first_head + in_section - tile * section


@dataclasses.dataclass(frozen=True)
class HeadOrder:
    """The order of the heads of all batch elements.

    Attributes:
      batch, heads: batch elements, and heads of each.
      group: heads that share K and V, and follow each other.
      batches_together: a group's heads in all batch elements follow each other, not all heads of a
        batch element: so CTAs that run together read a bias once that batch elements share.
    """

    batch: Int32
    heads: Int32
    group: Int32 | int
    batches_together: bool

    def batch_of(self, index: Int32) -> Int32:
        """Returns the batch element of the index-th head."""
        if not self.batches_together:
            return index // self.heads
        of_groups = self.group * self.batch
        return (index - index // of_groups * of_groups) // self.group

    def head_of(self, index: Int32, batch: Int32) -> Int32:
        """Returns which of its batch element's heads the index-th head is."""
        if not self.batches_together:
            return index - batch * self.heads
        groups = index // (self.group * self.batch)
        return index - (groups * (self.batch - 1) + batch) * self.group


def rotated(tile: Int32, head: Int32, tiles: Int32) -> Int32:
    """Returns another tile of a head for each, so that last tiles fall into all CTAs.

    Where the number of CTAs is a multiple of a head's tiles, a CTA's tiles have two places in their
    heads, one in even rounds and one in odd ones (`Schedule`). Both move on with two rounds.
    """
    ctas, _, _ = cute.arch.grid_dim()
    moved = tile + head * tiles // (2 * ctas)
    return moved - moved // tiles * tiles


def ordered_tile(
    order: cute.Pointer, orders: Int32, batch: Int32, place: Int32, tiles: Int32
) -> Int32:
    """Returns the tile at a place of a batch element's order, longest first (fa4_jax.masks.order).

    Args:
      order: [orders, tiles] in global memory; one for all batch elements, or one each.
    """
    first = cutlass.select_(orders == 1, Int32(0), batch) * tiles
    return cute.make_tensor(order + first + place, cute.make_layout(1))[0]


def batch_band(extents: cute.Pointer, batch: Int32, window: Window | None) -> bands.Band:
    """Returns the band of a batch element; a dense kernel gives no window."""
    limits = cute.make_tensor(extents + batch * 4, cute.make_layout(4))
    window = window or UNBOUNDED
    return bands.Band(limits[0], limits[1], limits[2], window.left, window.right)


def mask_words(
    band: bands.Band, blocks: bands.BlockRange, padded_keys: cutlass.Boolean
) -> list[Int32]:
    """Lists what limits a tile's keys as words in shared memory, but for the window."""
    return [
        *(band.query_length, band.key_length, band.offset),
        *(blocks.begin, blocks.full_begin, blocks.full_end, blocks.end),
        Int32(padded_keys),
    ]


def from_mask_words(
    words: list[Int32], window: Window | None
) -> tuple[bands.Band, bands.BlockRange, cutlass.Boolean]:
    """Inverts `mask_words`; a role that does not apply the mask gives no window."""
    window = window or UNBOUNDED
    band = bands.Band(*words[:3], window.left, window.right)
    return band, bands.BlockRange(*words[3:7]), words[7] != 0


def turn(band: bands.Band | None, key_tile: Int32, block: Int32, m: int, n: int) -> Int32:
    """Counts the key tiles of n keys before this one that visit a block of m rows.

    Args:
      band: None if all tiles visit all blocks.
    """
    if band is None:
        return key_tile
    return key_tile - bands.visited_blocks(band, block * m, m, n, tensors.INT32).begin


@cute.jit
def await_count(counter: cute.Pointer, count: Int32):
    """Waits until a counter in global memory is at least `count`, and for what came before it."""
    seen = count - 1
    while seen < count:
        seen = ptx.load_acquire(counter)


def synchronise(ctas: int):
    """Synchronises all threads of the CTA, or of a pair of CTAs."""
    if ctas == 1:
        cute.arch.sync_threads()
    else:
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
