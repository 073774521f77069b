"""Tensor memory of a CTA: its cells, and which columns are allocated.

An address has the lane in its upper and the column in its lower 16 bits.
"""

from __future__ import annotations

import numpy as np

from kernels.emulator.memory import NAN_WORD, Fault
from kernels.emulator.order.tensor_memory import (
    TENSOR_COLUMNS,
    TENSOR_LANES,
    Rectangle,
    TensorClocks,
    TensorShadow,
)

LEAST_COLUMNS = 32


class TensorMemory:
    """State of one CTA's tensor memory; `data` are (128, 512) words."""

    def __init__(self, clocks: TensorClocks | None):
        self.data = np.full((TENSOR_LANES, TENSOR_COLUMNS), NAN_WORD, np.uint32)
        self.shadow = None if clocks is None else TensorShadow(clocks)
        self.allocations: dict[int, int] = {}
        self.relinquished = False
        self.touched: dict[int, int] = {}
        """The last operation of each issuing thread here."""
        self.requested: int | None = None
        self.granted: int | None = None
        self.freed = 0
        """The columns requested with cta_group::2, their place, and how often some were freed."""
        self._owned = np.zeros(TENSOR_COLUMNS, bool)

    def check(self, rectangle: Rectangle) -> None:
        """Faults unless the cells exist and their columns are allocated."""
        end = rectangle.column + rectangle.columns
        if end > TENSOR_COLUMNS or rectangle.lane + rectangle.lanes > TENSOR_LANES:
            raise Fault("out-of-bounds", f"tensor memory has no {rectangle}")
        owned = self._owned[rectangle.column : end]
        if not owned.all():
            column = rectangle.column + int(np.argmin(owned))
            raise Fault("allocation", f"column {column} of tensor memory is not allocated")

    def places(self, columns: int) -> list[int]:
        """First columns of free pieces."""
        starts = range(0, TENSOR_COLUMNS - columns + 1, LEAST_COLUMNS)
        return [first for first in starts if not self._owned[first : first + columns].any()]

    def allocate(self, first: int, columns: int) -> None:
        """Gives columns to the CTA; nobody knows what they hold."""
        self.allocations[first] = columns
        self._owned[first : first + columns] = True
        self.data[:, first : first + columns] = NAN_WORD
        if self.shadow is not None:
            self.shadow.clear(Rectangle(0, first, TENSOR_LANES, columns))

    def free(self, thread: int, first: int, columns: int) -> None:
        """Frees columns, in pieces as they were allocated."""
        if self.allocations.get(first) != columns:
            held = [f"{n} from {at}" for at, n in sorted(self.allocations.items())]
            message = f"frees {columns} columns from {first}; allocated are: {', '.join(held) or 0}"
            raise Fault("allocation", message)
        if self.shadow is not None:
            self.shadow.check_free(thread, Rectangle(0, first, TENSOR_LANES, columns))
        del self.allocations[first]
        self._owned[first : first + columns] = False
