"""Which tile comes when: what the orders of work of all kernels have in common."""

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from fa4_jax import bands
from kernels.interface import Sizes, Window

UNBOUNDED = Window(bands.UNBOUNDED, bands.UNBOUNDED)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """From a tile's index to its work. Tiles are dealt to the CTAs in rounds, to and fro.

    To and fro, since tiles are sorted from long to short: who got the longest of one round gets
    the shortest of the next.
    """

    extents: cute.Pointer
    sizes: Sizes
    window: Window
    tiles: Int32
    rounds: Int32
    cluster: int = 1  # CTAs that share a tile

    def tile(self, round_index: Int32) -> Int32:
        """Index of this CTA's tile in a round; past the last one where the round is not full."""
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        if self.cluster > 1:
            cta, ctas = cta // self.cluster, ctas // self.cluster
        return round_index * ctas + Int32(
            cutlass.select_(round_index % 2 == 0, cta, ctas - 1 - cta)
        )

    def rounds_of_cta(self) -> Int32:
        """How many tiles this CTA has."""
        last_is_full = self.tile(self.rounds - 1) < self.tiles
        return self.rounds - 1 + Int32(last_is_full)


@dataclasses.dataclass(frozen=True)
class ForwardShape:
    """What an assignment depends on besides the schedule.

    Attributes:
      m, n: query rows of a tile, keys of a block.
      kv_row_bytes: of a key's row of K and of V together.
      l2_bytes: share of the L2 that K and V of the heads in flight may fill.
      band: whether the mask is a band; a dense kernel ignores the window.
    """

    m: int
    n: int
    kv_row_bytes: int
    l2_bytes: int
    band: bool


def nth_tile(index: Int32, section: Int32, heads: Int32, tiles: Int32) -> tuple[Int32, Int32]:
    """(tile, head) of the index-th unit of work of `heads` heads with `tiles` tiles each.

    Heads are taken `section` at a time, as many as the L2 holds operands of; within a section all
    heads' first tiles come first, then all second ones: equal tiles of neighbouring heads run
    together, and heads that share K and V share them in the L2.
    """
    section = cutlass.min(section, heads)  # so that no product below exceeds the number of units
    first_head = index // (section * tiles) * section
    in_section = index - first_head * tiles
    section = cutlass.min(section, heads - first_head)
    tile = in_section // section
    return tile, first_head + in_section - tile * section


def batch_band(extents: cute.Pointer, batch: Int32, window: Window | None) -> bands.Band:
    """The band of a batch element; no window for a dense kernel."""
    limits = cute.make_tensor(extents + batch * 4, cute.make_layout(4))
    window = window or UNBOUNDED
    return bands.Band(limits[0], limits[1], limits[2], window.left, window.right)
