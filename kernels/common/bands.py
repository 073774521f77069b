"""Which keys a query row sees, and which key blocks a query tile visits: integers in, integers out.

Row i of a batch sees keys j with
    max(0, i + offset - window_left) <= j < min(key_length, i + offset + window_right + 1),
and none at all if i >= query_length. The functions take plain integers (tests) or Int32 (kernels);
`minimum` and `maximum` come from the caller's world.
"""

from __future__ import annotations

import dataclasses
from typing import Any

UNBOUNDED = 1 << 30
"""Window size that stands for no bound; sums with lengths stay below 2^31."""


@dataclasses.dataclass(frozen=True)
class Band:
    """Row limits of one batch element; window sizes as in the FFI attributes."""

    query_length: Any
    key_length: Any
    offset: Any
    window_left: Any
    window_right: Any


@dataclasses.dataclass(frozen=True)
class BlockRange:
    """Key blocks of a query tile: begin <= block < end; those in [full_begin, full_end) need no mask."""

    begin: Any
    full_begin: Any
    full_end: Any
    end: Any


def row_limits(band: Band, row: Any, minimum, maximum) -> tuple[Any, Any]:
    """(first key, past-the-last key) that a row sees; empty if first >= last."""
    diagonal = row + band.offset
    low = maximum(diagonal - band.window_left, 0)
    high = minimum(band.key_length, diagonal + band.window_right + 1)
    return low, high


def key_blocks(band: Band, first_row: Any, rows: int, block: int, minimum, maximum) -> BlockRange:
    """Key blocks that query rows [first_row, first_row + rows) visit."""
    last_row = minimum(first_row + rows, band.query_length) - 1
    low_first, high_first = row_limits(band, first_row, minimum, maximum)
    low_last, high_last = row_limits(band, last_row, minimum, maximum)
    end = (maximum(high_last, 0) + block - 1) // block
    begin = minimum(low_first // block, end)
    full_end = minimum(maximum(high_first, 0) // block, end)
    full_begin = maximum((low_last + block - 1) // block, begin)
    return BlockRange(begin, full_begin, full_end, end)
