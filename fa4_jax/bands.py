"""Which keys a row sees: the one definition that the library and the kernels share.

Row i of a batch entry sees the keys j with

    max(0, i + offset - left) <= j < min(key_length, i + offset + right + 1),

and none if i >= query_length. A window (left, right) holds causality, too: right is then at most 0.
The same relation read from the keys' side is a band again (`Band.transposed`), so the backward,
which visits the query blocks of a key tile, uses the same functions.

The module knows integers only. They may be Python's, JAX's arrays or a kernel's registers: the
caller passes the `Arithmetic` of its own. It imports neither JAX nor NumPy, since kernels are built
without either.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

UNBOUNDED = 2**30
"""Window side without a limit."""

LIMIT = 2**29
"""Lengths and the absolute value of offsets stay below it, so that no int32 sum overflows: the
largest is row + offset + right + 1 <= 2 (LIMIT - 1) + UNBOUNDED + 1 = 2^31 - 1."""

Window = tuple[int, int]
"""(left, right) in keys, causality included; UNBOUNDED for a side without limit."""

EVERYTHING: Window = (UNBOUNDED, UNBOUNDED)
"""The window that hides no key."""

CAUSAL: Window = (UNBOUNDED, 0)
"""The window of a causal mask."""


def limits(left: int | None, right: int | None, is_causal: bool) -> Window:
    """The window of a call's arguments; None is a side without a limit."""
    left = UNBOUNDED if left is None else min(left, UNBOUNDED)
    right = UNBOUNDED if right is None else min(right, UNBOUNDED)
    return left, min(right, 0) if is_causal else right


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """minimum, maximum and select(condition, a, b) of the caller's integers."""

    minimum: Callable[[Any, Any], Any]
    maximum: Callable[[Any, Any], Any]
    select: Callable[[Any, Any, Any], Any]


PYTHON = Arithmetic(min, max, lambda condition, a, b: a if condition else b)


@dataclasses.dataclass(frozen=True)
class Band:
    """What limits the keys of the rows of one batch entry, as the module's equation has it."""

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


def may_meet(band: Band, rows: range, columns: range) -> bool:
    """Whether one of the rows may see one of the columns; lengths are not looked at."""
    first_seen = rows.start + band.offset - band.window_left
    past_seen = rows.stop + band.offset + band.window_right
    return columns.start < past_seen and columns.stop > first_seen


def visible_pairs(band: Band, rows: int | None = None) -> int:
    """The number of pairs (row, key) that see each other, among the first `rows` rows or all."""
    count = band.query_length if rows is None else min(rows, band.query_length)
    past = _clipped_sum(band.offset + band.window_right + 1, count, band.key_length)
    before = _clipped_sum(band.offset - band.window_left, count, band.key_length)
    return past - before


def _clipped_sum(first: int, count: int, limit: int) -> int:
    """The sum over i < count of first + i, each clipped to [0, limit]."""
    begin = min(max(-first, 0), count)  # from here on first + i is positive
    end = min(max(limit - first, begin), count)  # from here on it is at least the limit
    rising = (2 * first + begin + end - 1) * (end - begin) // 2
    return rising + limit * (count - end)
