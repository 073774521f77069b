"""Which tile comes when: the order of work that forward and backward share."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kernels.common import bands


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


def batch_band(extents: cute.Pointer, batch: Int32, window: tuple | None) -> bands.Band:
    """The band of a batch element; window (left, right) or None for a dense kernel."""
    limits = cute.make_tensor(extents + batch * 4, cute.make_layout(4))
    left, right = (bands.UNBOUNDED, bands.UNBOUNDED) if window is None else window
    return bands.Band(limits[0], limits[1], limits[2], left, right)
