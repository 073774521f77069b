"""tcgen05.ld, st and their waits: a warp moves registers from and to its quarter of tensor memory.

A load's registers get their values at once or at tcgen05.wait::ld, a store's values reach tensor
memory at once or at tcgen05.wait::st, as the policy says. Until the wait, a load's registers are
NaN and must not be used. Sources are read when the store is issued.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from kernels.emulator.machine.barriers import uniform
from kernels.emulator.machine.tensor_memory import TensorMemory
from kernels.emulator.machine.tensor_moves import Move
from kernels.emulator.machine.warp import Reader, Warp, address_reader, reader, whole
from kernels.emulator.memory import NAN_WORD, Fault
from kernels.emulator.order.tensor_memory import Rectangle
from kernels.emulator.ptx.entries import (
    SOURCES,
    AwaitTensorStores,
    Cost,
    Demand,
    Effect,
    Entry,
    always,
)
from kernels.emulator.ptx.program import LANES
from kernels.emulator.ptx.syntax import Address, Immediate, Instruction, Operand, Register, Vector

_QUARTERS = 4
_MOST_REGISTERS = 128
_REPEATS = {f"x{1 << i}" for i in range(8)}
# Registers per repetition of a shape.
_SHAPES = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}


@dataclasses.dataclass(frozen=True)
class Shape:
    """How a warp's registers lie in tensor memory.

    Attributes:
      lanes: 16 or 32.
      columns: of one piece.
      pieces: rectangles of the same lanes; the second has a column of its own.
      lane_of, column_of, piece_of: cell of each (register, thread); the first of two if `halves`.
      halves: a register holds the low 16 bits of two columns.
    """

    lanes: int
    columns: int
    pieces: int
    lane_of: np.ndarray
    column_of: np.ndarray
    piece_of: np.ndarray
    halves: bool

    @functools.cached_property
    def thread_of(self) -> np.ndarray:
        """Thread of each cell: (pieces, lanes, columns)."""
        threads = np.zeros((self.pieces, self.lanes, self.columns), np.int64)
        owners = np.broadcast_to(np.arange(LANES), self.lane_of.shape)
        for column in (0, 1) if self.halves else (0,):
            threads[self.piece_of, self.lane_of, self.column_of + column] = owners
        return threads

    @property
    def plain(self) -> bool:
        """Whether a thread is a lane and a register a column."""
        return self.lanes == LANES and not self.halves


@functools.cache
def shape_of(name: str, repeats: int, halves: bool) -> Shape:
    """The layout of `name` (32x32b, 16x64b, ...) with .x`repeats`, packed in halves or not.

    It follows the figures of the PTX ISA, "matrix fragments" of tcgen05.ld and st. Each repetition
    starts at the column where the one before it ends.
    """
    each = _SHAPES[name]
    registers = each * repeats
    register, thread = np.arange(registers)[:, None], np.arange(LANES)[None, :]
    upper = 8 * (register // max(each // 2, 1) % 2)
    lane, column, piece = {
        "32x32b": (thread, register, 0),
        "16x64b": (thread // 4 + 8 * (thread % 2), thread // 2 % 2 + 2 * register, 0),
        "16x128b": (thread // 4 + upper, thread % 4 + 4 * (register // 2), 0),
        "16x256b": (thread // 4 + upper, 2 * (thread % 4) + register % 2 + 8 * (register // 4), 0),
        "16x32bx2": (thread % 16, register, thread // 16),
    }[name]
    zero = np.zeros((registers, LANES), np.int64)
    lane, column, piece = lane + zero, (column + zero) * (1 + halves), piece + zero
    pieces = int(piece.max()) + 1
    columns = int(column.max()) + 1 + halves
    return Shape(int(lane.max()) + 1, columns, pieces, lane, column, piece, halves)


def _bind(instruction: Instruction, symbols: dict[str, int]) -> Effect | None:
    words = instruction.words
    name, repeats, *rest = words[4:]
    packing = {"ld": "pack:16b", "st": "unpack:16b"}[words[1]]
    if name not in _SHAPES or repeats not in _REPEATS or rest not in (["b32"], [packing, "b32"]):
        return None
    shape = shape_of(name, int(repeats[1:]), len(rest) == 2)
    if len(shape.lane_of) > _MOST_REGISTERS:
        return None
    if words[1] == "ld":
        target, address, *gap = instruction.operands
    else:
        address, *gap, target = instruction.operands
    where = _place(address, gap, symbols, shape)
    registers = target.elements if isinstance(target, Vector) else (target,)
    if len(registers) != len(shape.lane_of):
        return None
    if words[1] == "ld":
        return functools.partial(_load, shape, where, registers, None)
    return functools.partial(_store, shape, where, [reader(x, "u32", symbols) for x in registers])


@dataclasses.dataclass(frozen=True)
class _Reduction:
    """What tcgen05.ld.red makes of a thread's words: the extreme of them, as `view`."""

    function: np.ufunc
    view: str
    magnitudes: bool
    result: Register

    def of(self, values: np.ndarray) -> np.ndarray:
        """One word per thread."""
        typed = np.ascontiguousarray(values).view(self.view)
        typed = np.abs(typed) if self.magnitudes else typed
        return self.function.reduce(typed, axis=0).view(np.uint32)


_EXTREMES = {
    "max": (np.fmax, np.maximum),
    "min": (np.fmin, np.minimum),
}


def _bind_reduced(instruction: Instruction, symbols: dict[str, int]) -> Effect | None:
    words = instruction.words
    name, repeats, operation, *flags = words[5:]
    view = {"f32": "f4", "u32": "u4", "s32": "i4"}.get(flags.pop())
    if (
        words[3:5] != ("sync", "aligned")
        or name not in ("32x32b", "16x32bx2")
        or repeats not in _REPEATS - {"x1"}
        or operation not in _EXTREMES
        or view is None
        or flags not in ([], ["abs"], ["NaN"], ["abs", "NaN"])
        or (flags and view != "f4")
    ):
        return None
    target, result, address, *gap = instruction.operands
    assert isinstance(target, Vector)
    assert isinstance(result, Register)
    shape = shape_of(name, int(repeats[1:]), False)
    if len(target.elements) != len(shape.lane_of):
        return None
    function = _EXTREMES[operation]["NaN" in flags or view != "f4"]
    reduction = _Reduction(function, view, "abs" in flags, result)
    where = _place(address, gap, symbols, shape)
    return functools.partial(_load, shape, where, target.elements, reduction)


Place = Callable[[Warp], tuple[Rectangle, ...]]


def _place(address: Operand, gap: list[Operand], symbols: dict[str, int], shape: Shape) -> Place:
    assert isinstance(address, Address)
    address_of: Reader = address_reader(address, symbols)
    offset = 0
    if shape.pieces == 2:
        (constant,) = gap
        assert isinstance(constant, Immediate)
        offset = constant.value

    def place(warp: Warp) -> tuple[Rectangle, ...]:
        value = uniform(address_of(warp), "the tensor memory's address")
        lane, column, quarter = value >> 16, value & 0xFFFF, warp.index % _QUARTERS
        first = LANES * quarter
        if not first <= lane <= first + LANES - shape.lanes:
            raise Fault(
                "lane-quarter",
                f"lanes {lane}-{lane + shape.lanes - 1} of tensor memory: warp {warp.index} may "
                f"access lanes {first}-{first + LANES - 1}",
            )
        if lane % shape.lanes:
            raise Fault("misaligned", f"tensor memory's lane {lane} for {shape.lanes} lanes")
        rectangles = tuple(
            Rectangle(lane, column + offset * i, shape.lanes, shape.columns)
            for i in range(shape.pieces)
        )
        for rectangle in rectangles:
            warp.cta.tensor.check(rectangle)
        return rectangles

    return place


def _gather(tensor: TensorMemory, shape: Shape, rectangles: tuple[Rectangle, ...]) -> np.ndarray:
    """Values of the registers, (registers, 32)."""
    if shape.plain:
        return tensor.data[rectangles[0].cells].T
    pieces = np.stack([tensor.data[rectangle.cells] for rectangle in rectangles])
    values = pieces[shape.piece_of, shape.lane_of, shape.column_of]
    if not shape.halves:
        return values
    upper = pieces[shape.piece_of, shape.lane_of, shape.column_of + 1]
    return values & np.uint32(0xFFFF) | upper << np.uint32(16)


def _scatter(
    tensor: TensorMemory, shape: Shape, rectangles: tuple[Rectangle, ...], values: np.ndarray
) -> None:
    if shape.plain:
        tensor.data[rectangles[0].cells] = values.T
        return
    pieces = np.empty((shape.pieces, shape.lanes, shape.columns), np.uint32)
    if shape.halves:
        # Nothing says what the upper half of a column gets.
        unknown, low = np.uint32(NAN_WORD & 0xFFFF0000), values & np.uint32(0xFFFF)
        pieces[shape.piece_of, shape.lane_of, shape.column_of] = low | unknown
        upper = values >> np.uint32(16) | unknown
        pieces[shape.piece_of, shape.lane_of, shape.column_of + 1] = upper
    else:
        pieces[shape.piece_of, shape.lane_of, shape.column_of] = values
    for piece, rectangle in zip(pieces, rectangles, strict=True):
        tensor.data[rectangle.cells] = piece


def _load(
    shape: Shape,
    where: Place,
    registers: tuple[Operand, ...],
    reduction: _Reduction | None,
    warp: Warp,
    mask: np.ndarray,
) -> None:
    whole(warp, mask)
    tensor, rectangles = warp.cta.tensor, where(warp)
    rows = np.array([r.index for r in registers if isinstance(r, Register)])
    if tensor.shadow is not None:
        for threads, rectangle in zip(shape.thread_of, rectangles, strict=True):
            tensor.shadow.thread_reads(int(warp.lanes[0]) + threads, rectangle)
    warp.b32[rows] = NAN_WORD

    written = frozenset(r for r in registers if isinstance(r, Register))
    if reduction is not None:
        warp.b32[reduction.result.index] = NAN_WORD
        written |= {reduction.result}

    def perform() -> None:
        values = _gather(tensor, shape, rectangles)
        warp.b32[rows] = values
        if reduction is not None:
            warp.b32[reduction.result.index] = reduction.of(values)

    warp.moves.issue(Move(rectangles, written, perform), loads=True)


def _store(shape: Shape, where: Place, sources: list[Reader], warp: Warp, mask: np.ndarray) -> None:
    whole(warp, mask)
    tensor, rectangles = warp.cta.tensor, where(warp)
    values = np.stack([source(warp) for source in sources])
    if tensor.shadow is not None:
        for threads, rectangle in zip(shape.thread_of, rectangles, strict=True):
            tensor.shadow.thread_writes(int(warp.lanes[0]) + threads, rectangle)

    def perform() -> None:
        _scatter(tensor, shape, rectangles, values)

    warp.moves.issue(Move(rectangles, frozenset(), perform), loads=False)


def _wait_loads(warp: Warp, mask: np.ndarray) -> None:
    whole(warp, mask)
    warp.moves.wait_loads()


def _wait_stores(warp: Warp, mask: np.ndarray) -> None:
    whole(warp, mask)
    warp.moves.wait_stores()


def _cost(instruction: Instruction) -> Cost:
    words = instruction.words
    registers = next(_SHAPES[word] for word in words if word in _SHAPES)
    repeats = next((int(word[1:]) for word in words if word in _REPEATS), 1)
    loads, results = words[1] == "ld", registers * repeats
    return Cost(
        "tensor memory",
        Demand(
            "tensor memory",
            results=results,
            operands="result first" if loads else "sources",
        ),
        per_warp={"tensor_read_bytes" if loads else "tensor_written_bytes": LANES * 4 * results},
    )


ENTRIES = (
    Entry("tcgen05.ld.sync.aligned.*", _bind, _cost),
    Entry("tcgen05.ld.red.*", _bind_reduced, _cost),
    Entry("tcgen05.st.sync.aligned.*", _bind, _cost),
    Entry("tcgen05.wait::ld.sync.aligned", always(_wait_loads), Cost("synchronisation", SOURCES)),
    Entry(
        "tcgen05.wait::st.sync.aligned",
        always(_wait_stores),
        Cost("synchronisation", Demand(operands="sources", action=AwaitTensorStores())),
    ),
)
