"""How many of a dense backward's last key tiles are split, and into how many parts.

The kernel that splits them asks, and the one before it, which clears their buffers.
"""

import cutlass
from cutlass import Int32

_LEAST_QUERIES = 256
"""Queries of a part at least: its K and V are loaded, and its dK and dV added, for these alone."""


def division(tiles: Int32, ctas: Int32, query_length: Int32, room: Int32) -> tuple[Int32, Int32]:
    """Returns how many of the last tiles are split, and the parts of each.

    Args:
      tiles: of the call.
      ctas: that take them, one after the other.
      room: how many tiles the buffers have room for.
    """
    rest = tiles % ctas
    parts = cutlass.min(ctas // cutlass.max(rest, 1), query_length // _LEAST_QUERIES)
    return cutlass.select_((parts > 1) & (rest <= room), rest, Int32(0)), parts
