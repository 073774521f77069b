"""tcgen05.mma: D (+)= A B, D in tensor memory, A there or in shared memory, B in shared memory.

With cta_group::2 a pair of CTAs multiplies: each has its half of A's and D's rows and of B's
columns, at the same addresses of its own memory.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from kernels.emulator.instructions.tcgen05_descriptor import (
    K_BYTES,
    Shape,
    Tile,
    decode_instruction,
    tile_bytes,
    tile_chunks,
)
from kernels.emulator.machine.cta import Cta
from kernels.emulator.machine.pairs import pair_of
from kernels.emulator.machine.tensor_pipe import Pipe, pipe_of
from kernels.emulator.machine.trace import Multiplied
from kernels.emulator.machine.warp import YIELD, Reader, Warp, Yield, address_reader, reader
from kernels.emulator.memory import Fault
from kernels.emulator.order.tensor_memory import TENSOR_LANES, Rectangle
from kernels.emulator.products import matrix_product
from kernels.emulator.ptx.entries import SOURCES, Cost, Effect, Entry
from kernels.emulator.ptx.syntax import Address, Immediate, Instruction, Vector
from kernels.emulator.swizzle import CHUNK

_MOST_SCALE = 15


@dataclasses.dataclass(frozen=True)
class Piece:
    """Rows and columns of a CTA's part of a matrix, from the first ones on, in tensor memory."""

    rectangle: Rectangle
    row: int = 0
    column: int = 0


@dataclasses.dataclass(frozen=True)
class Operands:
    """Where one product reads and writes, in every CTA that takes part.

    Attributes:
      d: pieces of a CTA's rows of D.
      a: a CTA's rows of A.
      b: a CTA's columns of B.
      scale: of D before the product is added.
      enabled: lanes of D that are written, (CTAs, 128), or None for all.
    """

    shape: Shape
    d: tuple[Piece, ...]
    a: Tile | tuple[Piece, ...]
    b: Tile
    accumulate: bool
    scale: float
    enabled: np.ndarray | None


def _bind(instruction: Instruction, symbols: dict[str, int]) -> Effect | None:
    words = tuple(word for word in instruction.words if not word.startswith("collector:"))
    if words[2] not in ("cta_group:1", "cta_group:2"):
        return None
    if words[3:] not in (("kind:f16",), ("kind:f8f6f4",), ("kind:tf32",)):
        return None
    group = int(words[2][-1])
    d, a, b, descriptor, *rest = instruction.operands
    mask_of: list[Reader] = []
    lanes = rest[0]
    if isinstance(lanes, Vector):
        mask_of, rest = [reader(x, "u32", symbols) for x in lanes.elements], rest[1:]
        if len(mask_of) != group * TENSOR_LANES // 32:
            return None
    scale = 1.0
    if len(rest) > 1:
        (_, power) = rest
        assert isinstance(power, Immediate)
        if words[3] == "kind:f8f6f4" or not 0 <= power.value <= _MOST_SCALE:
            return None
        scale = 2.0**-power.value
    return _Mma(
        kind=words[3].removeprefix("kind:"),
        group=group,
        d_of=address_reader(d, symbols),
        a_of=address_reader(a, symbols) if isinstance(a, Address) else reader(a, "u64", symbols),
        a_in_tensor=isinstance(a, Address),
        b_of=reader(b, "u64", symbols),
        descriptor_of=reader(descriptor, "u32", symbols),
        mask_of=tuple(mask_of),
        enable_of=reader(rest[0], "pred", symbols),
        scale=scale,
    )


@dataclasses.dataclass(frozen=True)
class _Mma:
    """One instruction, bound."""

    kind: str
    group: int
    d_of: Reader
    a_of: Reader
    a_in_tensor: bool
    b_of: Reader
    descriptor_of: Reader
    mask_of: tuple[Reader, ...]
    enable_of: Reader
    scale: float

    def __call__(self, warp: Warp, mask: np.ndarray) -> Yield:
        for lane in np.flatnonzero(mask):
            self._issue(warp, int(lane))
        return YIELD

    def _issue(self, warp: Warp, lane: int) -> None:
        operands = self._operands(warp, lane)
        shape, thread = operands.shape, int(warp.lanes[lane])
        ctas = (warp.cta,) if self.group == 1 else pair_of(warp, thread)
        pipe = pipe_of(warp, thread)
        _check(ctas, pipe, operands, self.kind)
        shared_rows = shape.columns + (0 if self.a_in_tensor else shape.rows)
        depth = K_BYTES // shape.a_type.itemsize
        flops = 2 * shape.rows * shape.columns * depth
        warp.count("mma_flops", flops)
        warp.count("shared_mma_bytes", shared_rows * K_BYTES)
        warp.note(Multiplied(flops, self.group, shared_rows * K_BYTES))
        pipe.issue(functools.partial(_perform, ctas, operands))

    def _operands(self, warp: Warp, lane: int) -> Operands:
        group = self.group
        shape = decode_instruction(int(self.descriptor_of(warp)[lane]), self.kind, group)
        rows, columns = shape.rows // group, shape.columns // group
        a_at = int(self.a_of(warp)[lane])
        if self.a_in_tensor:
            if shape.mn_major[0]:
                raise Fault("descriptor", "A in tensor memory cannot be transposed", lane)
            if group == 2 and rows < TENSOR_LANES:
                raise Fault("not implemented", "A in tensor memory with 128 rows of a pair", lane)
            if rows < TENSOR_LANES and a_at >> 16 != int(self.d_of(warp)[lane]) >> 16:
                raise Fault("misaligned", "64 rows of A and D start at different lanes", lane)
            a = _pieces(a_at, rows, K_BYTES // 4, False)
        else:
            a = Tile(a_at, shape.mn_major[0], rows, shape.a_type.itemsize)
        b_at = int(self.b_of(warp)[lane])
        enabled = None
        if any(int(word(warp)[lane]) for word in self.mask_of):
            words = np.array([word(warp)[lane] for word in self.mask_of], np.uint32)
            bits = words[:, None] >> np.arange(32, dtype=np.uint32) & 1
            enabled = bits.reshape(group, TENSOR_LANES) == 0
        return Operands(
            shape,
            _pieces(int(self.d_of(warp)[lane]), rows, shape.columns, group == 2),
            a,
            Tile(b_at, shape.mn_major[1], columns, shape.b_type.itemsize),
            bool(self.enable_of(warp)[lane]),
            self.scale,
            enabled,
        )


def _pieces(address: int, rows: int, columns: int, paired: bool) -> tuple[Piece, ...]:
    """Where a CTA's rows of a matrix lie in tensor memory (PTX ISA, layouts A, B, D and F)."""
    lane, column = address >> 16, address & 0xFFFF
    if rows == TENSOR_LANES:
        if lane:
            raise Fault("misaligned", f"128 rows from lane {lane} of tensor memory")
        return (Piece(Rectangle(0, column, TENSOR_LANES, columns)),)
    if paired:
        if lane:
            raise Fault("misaligned", f"rows of a pair from lane {lane} of tensor memory")
        half = columns // 2
        return tuple(Piece(Rectangle(64 * i, column, 64, half), column=half * i) for i in range(2))
    if lane not in (0, 16):
        raise Fault("misaligned", f"64 rows from lane {lane} of tensor memory: 0 or 16 is expected")
    return tuple(Piece(Rectangle(lane + 32 * i, column, 16, columns), row=16 * i) for i in range(4))


def _check(ctas: tuple[Cta, ...], pipe: Pipe, operands: Operands, kind: str) -> None:
    """Faults unless every access is inside, allocated and ordered."""
    in_tensor = operands.a if not isinstance(operands.a, Tile) else ()
    tiles = [x for x in (operands.a, operands.b) if isinstance(x, Tile)]
    for cta in ctas:
        for piece in (*operands.d, *in_tensor):
            cta.tensor.check(piece.rectangle)
        for tile in tiles:
            if (tile_chunks(tile)[-1] + 1) * CHUNK > cta.shared.data.size:
                raise Fault("out-of-bounds", "an operand ends past shared memory")
    number, form = pipe.issued + 1, _form(operands, kind)
    for cta in ctas:
        order, shadow = cta.order, cta.tensor.shadow
        cta.tensor.touched[pipe.thread] = number
        if order is None or shadow is None:
            continue
        for tile in tiles:
            column = shadow.clocks.column(pipe.agent)
            order.pipe_reads(pipe.thread, tile_chunks(tile), column, number)
        for piece in in_tensor:
            shadow.pipe_reads(pipe.thread, number, piece.rectangle)
        for piece in operands.d:
            shadow.pipe_writes(pipe.thread, number, piece.rectangle, form)


@functools.cache
def _number_of_form(key: tuple[object, ...]) -> int:
    return next(_numbers)


_numbers = iter(range(1, 1 << 30))


def _form(operands: Operands, kind: str) -> int:
    """Products of one thread with the same accumulator, shape and kind are performed in order."""
    return _number_of_form((operands.d, operands.shape.rows, operands.shape.columns, kind))


def _perform(ctas: tuple[Cta, ...], operands: Operands) -> None:
    """Reads the operands and writes the result, now."""
    shape = operands.shape
    b = np.concatenate([_values(cta, operands.b, shape.b_type) for cta in ctas])
    updates = [matrix_product(_a(cta, operands), b) for cta in ctas]
    for rank, (cta, update) in enumerate(zip(ctas, updates, strict=True)):
        if shape.signs[0] != shape.signs[1]:
            update = -update
        for piece in operands.d:
            place = piece.rectangle
            target = cta.tensor.data[place.cells].view(np.float32)
            rows = update[piece.row : piece.row + place.lanes]
            rows = rows[:, piece.column : piece.column + place.columns]
            if operands.accumulate:
                old = target if operands.scale == 1 else target * np.float32(operands.scale)
                rows = old + rows
            if operands.enabled is None:
                target[...] = rows
            else:
                chosen = operands.enabled[rank, place.cells[0]]
                target[chosen] = rows[chosen]


def _a(cta: Cta, operands: Operands) -> np.ndarray:
    """A CTA's rows of A as float32."""
    dtype = operands.shape.a_type
    if isinstance(operands.a, Tile):
        return _values(cta, operands.a, dtype)
    words = np.concatenate([cta.tensor.data[piece.rectangle.cells] for piece in operands.a])
    return narrowed(np.ascontiguousarray(words).view(dtype))


def narrowed(values: np.ndarray) -> np.ndarray:
    """Operands as the tensor core takes them: of 32-bit ones, the bits of tf32."""
    if values.dtype != np.float32:
        return values.astype(np.float32)
    return (values.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def _values(cta: Cta, tile: Tile, dtype: np.dtype) -> np.ndarray:
    """A tile's elements as float32; kept while shared memory is unchanged."""
    if cta.decoded_version != cta.shared_version:
        cta.decoded_version = cta.shared_version
        cta.decoded.clear()
    key = (tile, dtype.name)
    values = cta.decoded.get(key)
    if values is None:
        size = dtype.itemsize
        words = cta.shared.data[: cta.shared.data.size // size * size].view(f"u{size}")
        values = narrowed(words[tile_bytes(tile) // size].view(dtype))
        cta.decoded[key] = values
    return values


ENTRIES = (Entry("tcgen05.mma.*", _bind, Cost("matrix product", SOURCES)),)
