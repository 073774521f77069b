"""Tensor memory of a CTA: its cells, who owns its columns, and the instructions that allocate them.

An address has the lane in its upper and the column in its lower 16 bits.
"""

from __future__ import annotations

import functools

import numpy as np

from kernels.emulator.barriers import uniform
from kernels.emulator.memory import NAN_WORD, Fault
from kernels.emulator.program import Effect
from kernels.emulator.syntax import Instruction
from kernels.emulator.tensor_order import (
    TENSOR_COLUMNS,
    TENSOR_LANES,
    Rectangle,
    TensorClocks,
    TensorShadow,
)
from kernels.emulator.warp import Reader, Wait, Warp, address_reader, reader

_LEAST_COLUMNS = 32


class TensorMemory:
    """State of one CTA's tensor memory; `data` are (128, 512) words."""

    def __init__(self, clocks: TensorClocks | None):
        self.data = np.full((TENSOR_LANES, TENSOR_COLUMNS), NAN_WORD, np.uint32)
        self.shadow = None if clocks is None else TensorShadow(clocks)
        self.allocations: dict[int, int] = {}
        self.relinquished = False
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

    def place(self, columns: int) -> int | None:
        """The first column of a free piece, or None if there is none."""
        for first in range(0, TENSOR_COLUMNS - columns + 1, _LEAST_COLUMNS):
            if not self._owned[first : first + columns].any():
                return first
        return None

    def allocate(self, first: int, columns: int) -> None:
        """Gives columns to the CTA; nobody knows what they hold."""
        self.allocations[first] = columns
        self._owned[first : first + columns] = True
        self.data[:, first : first + columns] = NAN_WORD
        if self.shadow is not None:
            self.shadow.clear(Rectangle(0, first, TENSOR_LANES, columns))

    def free(self, thread: int, first: int, columns: int) -> None:
        """Takes columns back, in pieces as they were allocated."""
        if self.allocations.get(first) != columns:
            held = [f"{n} from {at}" for at, n in sorted(self.allocations.items())]
            message = f"frees {columns} columns from {first}; allocated are: {', '.join(held) or 0}"
            raise Fault("allocation", message)
        if self.shadow is not None:
            self.shadow.check_free(thread, Rectangle(0, first, TENSOR_LANES, columns))
        del self.allocations[first]
        self._owned[first : first + columns] = False


def bind(instruction: Instruction, symbols: dict[str, int]) -> Effect | None:
    """The effect of an instruction that allocates tensor memory, or None if it is none."""
    words = tuple(word for word in instruction.words if word not in ("shared:cta", "b32"))
    if words == ("tcgen05", "alloc", "cta_group:1", "sync", "aligned"):
        target, count = instruction.operands
        return functools.partial(
            _allocate, address_reader(target, symbols), reader(count, "u32", symbols)
        )
    if words == ("tcgen05", "dealloc", "cta_group:1", "sync", "aligned"):
        address, count = (reader(x, "u32", symbols) for x in instruction.operands)
        return functools.partial(_free, address, count)
    if words == ("tcgen05", "relinquish_alloc_permit", "cta_group:1", "sync", "aligned"):
        return _relinquish
    return None


def whole(warp: Warp, mask: np.ndarray) -> None:
    """Faults unless the whole warp is here."""
    if not (mask is warp.active and warp.full) and not mask.all():
        raise Fault("convergence", "some lanes of the warp are elsewhere")


def _columns(values: np.ndarray) -> int:
    count = uniform(values, "the number of columns")
    if not _LEAST_COLUMNS <= count <= TENSOR_COLUMNS or count & (count - 1):
        raise Fault("allocation", f"{count} columns: a power of two from 32 to 512 is expected")
    return count


def _allocate(target_of: Reader, count_of: Reader, warp: Warp, mask: np.ndarray) -> Wait | None:
    whole(warp, mask)
    cta, tensor, count = warp.cta, warp.cta.tensor, _columns(count_of(warp))
    target = target_of(warp)[:1]
    uniform(target_of(warp), "the address for the result")
    if tensor.relinquished:
        raise Fault("allocation", "allocates after tcgen05.relinquish_alloc_permit")
    cta.shared.check(target, np.zeros(1, np.int64), 4)

    def take() -> None:
        first = tensor.place(count)
        assert first is not None
        tensor.allocate(first, count)
        held = sum(tensor.allocations.values())
        cta.machine.most_tensor_columns = max(cta.machine.most_tensor_columns, held)
        if cta.order is not None:
            cta.order.thread_writes(warp.lanes[:1], target, 4)
        cta.shared.store(target, np.array([[first]], np.uint32))
        cta.shared_version += 1

    if tensor.place(count) is not None:
        take()
        return None
    return Wait(
        lambda: tensor.place(count) is not None,
        take,
        lambda: f"{count} columns of tensor memory; allocated are {tensor.allocations}",
    )


def _free(address_of: Reader, count_of: Reader, warp: Warp, mask: np.ndarray) -> None:
    whole(warp, mask)
    address = uniform(address_of(warp), "the tensor memory's address")
    if address >> 16:
        raise Fault("allocation", f"frees tensor memory at lane {address >> 16}")
    warp.cta.tensor.free(int(warp.lanes[0]), address & 0xFFFF, _columns(count_of(warp)))


def _relinquish(warp: Warp, mask: np.ndarray) -> None:
    whole(warp, mask)
    warp.cta.tensor.relinquished = True
