"""One warp: 32 lanes in lockstep, their registers, and the stack of divergent branches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from kernels.emulator.machine.tensor_moves import Moves
from kernels.emulator.machine.trace import Event
from kernels.emulator.machine.transfers import Copies
from kernels.emulator.machine.wgmma import Products
from kernels.emulator.memory import NAN_WORD, Fault, Region, uninitialised
from kernels.emulator.ptx import alu
from kernels.emulator.ptx.program import LANES
from kernels.emulator.ptx.syntax import Address, Immediate, Operand, Register, Symbol

if TYPE_CHECKING:
    from kernels.emulator.machine.cta import Cta


@dataclasses.dataclass(frozen=True)
class Wait:
    """Returned by an effect that cannot finish yet.

    Attributes:
      ready: whether it can.
      finish: called when it can, before the next step.
      reason: what the warp waits for, and who should bring it.
    """

    ready: Callable[[], bool]
    finish: Callable[[], None]
    reason: Callable[[], str]


@dataclasses.dataclass(frozen=True)
class Yield:
    """Returned by an effect after which others may run first."""


YIELD = Yield()


@dataclasses.dataclass
class _Divergence:
    """Lanes of a branch that went two ways: they meet again at `meet`."""

    meet: int
    arrived: np.ndarray
    pending: list[tuple[int, np.ndarray]]


class Rows(dict[int, np.ndarray]):
    """Rows of a register bank by index, each made when it is first asked for.

    A warp names few of a kernel's registers; making all rows took a sixth of a Blackwell run.
    """

    def __init__(self, bank: np.ndarray):
        super().__init__()
        self._bank = bank

    def __missing__(self, index: int) -> np.ndarray:
        row = self[index] = self._bank[index]
        return row


class Warp:
    """State of a warp. Views of the register banks have rows: warp.f32[7] is 32 lanes.

    `lanes` and `number` count threads and warps through the cluster, `index` through the CTA.
    """

    pred: Rows
    u16: Rows
    s16: Rows
    u32: Rows
    s32: Rows
    f32: Rows
    u64: Rows
    s64: Rows
    f64: Rows

    def __init__(self, cta: Cta, index: int, counts: dict[str, int]):
        self.cta, self.index = cta, index
        self.step = 0
        self.active = np.ones(LANES, bool)
        self.full = True
        self.exited = np.zeros(LANES, bool)
        self.done = False
        self.waiting: Wait | None = None
        self.retrying: tuple[int, int] | None = None
        self.polled: tuple[int, bytes, bytes, tuple[int, int]] | None = None
        self.attempts = 0
        first = cta.rank * cta.machine.threads + index * LANES
        self.lanes = np.arange(first, first + LANES)
        self.number = first // LANES
        trace = cta.machine.trace
        place = cta.cluster.number, cta.rank
        self.trace = None if trace is None else trace.of_warp(cta.number, index, place)
        self.products = Products(self)
        self.copies = Copies()
        local = uninitialised(-(-cta.machine.program.kernel.local_bytes // 16) * 16 * LANES)
        self.local = Region("local memory", 0, local)
        self.moves = Moves(self)
        self._divergences: list[_Divergence] = []
        self.b16 = np.full((max(counts["b16"], 1), LANES), NAN_WORD >> 16, np.uint16)
        self.b32 = np.full((max(counts["b32"], 1), LANES), NAN_WORD, np.uint32)
        self.b64 = np.full((max(counts["b64"], 1), LANES), NAN_WORD << 32, np.uint64)
        self.b128 = np.full((max(counts["b128"], 1), LANES, 2), NAN_WORD << 32, np.uint64)
        banks = {"16": self.b16, "32": self.b32, "64": self.b64}
        self.pred = Rows(np.zeros((max(counts["pred"], 1), LANES), bool))
        for view, dtype in alu.DTYPES.items():
            if view != "pred":
                setattr(self, view, Rows(banks[view[1:]].view(dtype)))
        threads = np.arange(index * LANES, (index + 1) * LANES, dtype=np.uint32)
        x, y, _ = cta.machine.block
        self.special = cta.special | {
            "%tid.x": threads % x,
            "%tid.y": threads // x % y,
            "%tid.z": threads // (x * y),
            "%laneid": threads % LANES,
            "%warpid": np.full(LANES, index, np.uint32),
        }
        bits = np.uint32(1) << np.arange(LANES, dtype=np.uint32)
        self.special |= {
            "%lanemask_eq": bits,
            "%lanemask_lt": bits - 1,
            "%lanemask_le": bits | bits - 1,
            "%lanemask_gt": ~(bits | bits - 1),
            "%lanemask_ge": ~(bits - 1),
        }

    def count(self, quantity: str, amount: int) -> None:
        """Adds to one of costs.QUANTITIES what the instruction's text does not say."""
        self.cta.machine.tallies[self.index].extra[quantity] += amount

    def note(self, event: Event) -> None:
        """Adds to a trace, if there is one."""
        if self.trace is not None:
            self.trace.append(event)

    def note_spread(self, line: int) -> None:
        """Adds to a trace that the lanes of a load asked for several addresses."""
        trace = self.cta.machine.trace
        if trace is not None:
            trace.spread.add(line)

    def wakes(self) -> bool:
        """Whether this polling warp, which sleeps, is to try again because nothing else can run."""
        if not self.cta.machine.stuck or not self.attempts:
            return False
        self.attempts -= 1
        return True

    def split(self, taken: np.ndarray, target: int, meet: int) -> None:
        """Executes a branch that lanes `taken` of the active ones take."""
        fall = self.step + 1
        if not taken.any():
            self.step = fall
        elif taken[self.active].all():
            self.step = target
        else:
            sides = [(target, taken), (fall, self.active & ~taken)]
            if self.cta.machine.coin():
                sides.reverse()
            self._divergences.append(_Divergence(meet, np.zeros(LANES, bool), sides))
            self._next_side()

    def meet(self) -> None:
        """Where the sides of a branch meet, lanes wait for the others."""
        while self._divergences and self._divergences[-1].meet == self.step:
            self._divergences[-1].arrived |= self.active
            self._next_side()

    def leave(self, lanes: np.ndarray) -> None:
        """Lanes exit."""
        self.exited = self.exited | lanes
        self.done = bool(self.exited.all())
        self._set(self.active & ~lanes)
        if not self.active.any():
            if self._divergences:
                self._next_side()
        else:
            self.step += 1

    def _set(self, active: np.ndarray) -> None:
        self.active, self.full = active, bool(active.all())

    def _next_side(self) -> None:
        """Continues with the other side of the last divergence, or after the sides have met."""
        while self._divergences:
            last = self._divergences[-1]
            while last.pending:
                step, lanes = last.pending.pop()
                if step == last.meet:
                    last.arrived |= lanes
                else:
                    self.step = step
                    self._set(lanes)
                    return
            self._divergences.pop()
            if last.arrived.any():
                self.step = last.meet
                self._set(last.arrived)
                return


Reader = Callable[[Warp], np.ndarray]


def reader(operand: Operand, view: str, symbols: dict[str, int] | None = None) -> Reader:
    """Reads a register or a constant as rows of a view."""
    if isinstance(operand, Register):
        index = operand.index
        return lambda warp: getattr(warp, view)[index]
    if isinstance(operand, Symbol) and symbols is not None and operand.name in symbols:
        constant = reader(Immediate(symbols[operand.name]), view)
        shared = f"&{operand.name}"
        return lambda warp: warp.special[shared] if shared in warp.special else constant(warp)
    if not isinstance(operand, Immediate):
        raise TypeError(f"not a value: {operand}")
    dtype = alu.DTYPES[view]
    if view == "pred":
        row = np.full(LANES, bool(operand.value))
    else:
        bits = operand.value & ((1 << (8 * dtype.itemsize)) - 1)
        row = np.full(LANES, bits, np.dtype(f"u{dtype.itemsize}")).view(dtype)
    return lambda warp: row


def address_reader(operand: Operand, symbols: dict[str, int]) -> Reader:
    """Reads an address as int64 rows."""
    assert isinstance(operand, Address)
    base, offset = operand.base, operand.offset
    wide = isinstance(base, Register) and base.bank == "b64"
    read = reader(base, "u64" if wide else "u32", symbols)
    return lambda warp: read(warp).astype(np.int64) + offset


def write(warp: Warp, mask: np.ndarray, operand: Operand, view: str, value: Any) -> None:
    """Writes a register in some lanes."""
    assert isinstance(operand, Register)
    np.copyto(getattr(warp, view)[operand.index], value, where=mask)


def whole(warp: Warp, mask: np.ndarray) -> None:
    """Faults unless the whole warp is here."""
    if not (mask is warp.active and warp.full) and not mask.all():
        raise Fault("convergence", "some lanes of the warp are elsewhere")
