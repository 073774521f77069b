"""Which keys a query row sees, and which key blocks a query tile visits: integers in, integers out.

Row i of a batch sees keys j with
    max(0, i + offset - window_left) <= j < min(key_length, i + offset + window_right + 1),
and none at all if i >= query_length. The same relation read from the keys' side is a band again
(`transposed`), so the backward, which visits query blocks of a key tile, uses the same functions.
The functions take plain integers (tests) or Int32 (kernels) and the caller's `Arithmetic`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

UNBOUNDED = 1 << 30
"""Window size that stands for no bound; sums with lengths stay below 2^31."""


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """minimum, maximum and select(condition, a, b) of the caller's integers."""

    minimum: Callable[[Any, Any], Any]
    maximum: Callable[[Any, Any], Any]
    select: Callable[[Any, Any, Any], Any]


PYTHON = Arithmetic(min, max, lambda condition, a, b: a if condition else b)


@dataclasses.dataclass(frozen=True)
class Band:
    """Row limits of one batch element; window sizes as in the FFI attributes."""

    query_length: Any
    key_length: Any
    offset: Any
    window_left: Any
    window_right: Any

    def transposed(self) -> Band:
        """The band seen from the keys: rows are keys, columns are queries."""
        return Band(
            self.key_length, self.query_length, -self.offset, self.window_right, self.window_left
        )


@dataclasses.dataclass(frozen=True)
class BlockRange:
    """Column blocks of a row tile: begin <= block < end; [full_begin, full_end) need no mask."""

    begin: Any
    full_begin: Any
    full_end: Any
    end: Any


def row_limits(band: Band, row: Any, use: Arithmetic) -> tuple[Any, Any]:
    """(first column, past-the-last column) that a row sees; empty if first >= last."""
    diagonal = row + band.offset
    low = use.maximum(diagonal - band.window_left, 0)
    high = use.minimum(band.key_length, diagonal + band.window_right + 1)
    return low, high


def visited_blocks(
    band: Band, first_row: Any, rows: int, block: int, use: Arithmetic
) -> BlockRange:
    """Column blocks that rows [first_row, first_row + rows) visit: those that hold a seen pair.

    Exactness matters: the deterministic backward counts on rows and columns agreeing on it.
    """
    last_row = use.minimum(first_row + rows, band.query_length) - 1
    low_first, high_first = row_limits(band, first_row, use)
    low_last, high_last = row_limits(band, last_row, use)
    seen = (low_first < high_last) & (first_row < band.query_length)
    begin = low_first // block
    end = use.select(seen, (use.maximum(high_last, 0) + block - 1) // block, begin)
    full_end = use.minimum(use.maximum(high_first, 0) // block, end)
    full_begin = use.maximum((low_last + block - 1) // block, begin)
    return BlockRange(begin, full_begin, full_end, end)
