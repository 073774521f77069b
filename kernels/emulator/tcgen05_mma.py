"""tcgen05.mma: D (+)= A B, D in tensor memory, A there or in shared memory, B in shared memory."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from kernels.emulator.memory import Fault
from kernels.emulator.program import Effect
from kernels.emulator.swizzle import CHUNK, swizzled
from kernels.emulator.syntax import Address, Immediate, Instruction, Vector
from kernels.emulator.tensor_order import TENSOR_LANES, Rectangle
from kernels.emulator.tensor_pipe import Pipe, pipe_of
from kernels.emulator.warp import YIELD, Reader, Warp, Yield, address_reader, reader

if TYPE_CHECKING:
    from kernels.emulator.cta import Cta

_K_BYTES = 32
_SPANS = {0: 0, 2: 128, 4: 64, 6: 32}
_FORMATS = {
    "f16": {0: np.dtype(np.float16), 1: np.dtype(ml_dtypes.bfloat16)},
    "f8f6f4": {0: np.dtype(ml_dtypes.float8_e4m3fn), 1: np.dtype(ml_dtypes.float8_e5m2)},
}


@dataclasses.dataclass(frozen=True)
class Shape:
    """What an instruction descriptor says."""

    rows: int
    columns: int
    a_type: np.dtype
    b_type: np.dtype
    signs: tuple[bool, bool]
    mn_major: tuple[bool, bool]


@functools.lru_cache(maxsize=256)
def decode_instruction(descriptor: int, kind: str, group: int) -> Shape:
    """Decodes an instruction descriptor (PTX ISA, tcgen05 instruction descriptor).

    Raises:
      Fault: a field has a value that the kind does not take.
    """

    def field(first: int, bits: int) -> int:
        return descriptor >> first & ((1 << bits) - 1)

    def wrong(what: str) -> Fault:
        return Fault("descriptor", f"instruction descriptor {descriptor:#x} for {kind}: {what}")

    if field(0, 3):
        raise Fault("not implemented", f"instruction descriptor {descriptor:#x}: sparsity")
    for first, bits in ((3, 1), (6, 1), (23, 1), (29, 1), (30, 2)):
        if field(first, bits):
            raise wrong(f"bit {first} must be 0")
    if field(4, 2) != 1:
        if kind == "f16" and not field(4, 2):
            raise Fault("not implemented", "tcgen05.mma with a float16 result")
        raise wrong(f"result type {field(4, 2)}")
    types = []
    for name, first in (("A", 7), ("B", 10)):
        if field(first, 3) not in _FORMATS[kind]:
            if kind == "f8f6f4" and field(first, 3) in (3, 4, 5):
                raise Fault("not implemented", f"tcgen05.mma with {name} of 4 or 6 bits")
            raise wrong(f"type {field(first, 3)} of {name}")
        types.append(_FORMATS[kind][field(first, 3)])
    rows, columns = field(24, 5) << 4, field(17, 6) << 3
    step = 8 * group if rows in (64 * group, 128 * group) else 0
    if not step or not step <= columns <= 256 or columns % step:
        raise wrong(f"{rows} rows and {columns} columns with cta_group::{group}")
    return Shape(
        rows,
        columns,
        *types,
        signs=(bool(field(13, 1)), bool(field(14, 1))),
        mn_major=(bool(field(15, 1)), bool(field(16, 1))),
    )


@dataclasses.dataclass(frozen=True)
class Tile:
    """An operand in shared memory: its descriptor, rows of A or columns of B, element size."""

    descriptor: int
    mn_major: bool
    rows: int
    bytes: int


@functools.lru_cache(maxsize=4096)
def tile_bytes(tile: Tile) -> np.ndarray:
    """Offset in shared memory of every element of a tile: (rows, 32 / bytes).

    By the canonical layouts of the PTX ISA; addresses are swizzled as they are.
    """
    descriptor = tile.descriptor
    start = (descriptor & 0x3FFF) << 4
    leading = (descriptor >> 16 & 0x3FFF) << 4
    stride = (descriptor >> 32 & 0x3FFF) << 4
    if descriptor >> 46 & 7 != 1:
        raise Fault("descriptor", f"matrix descriptor {descriptor:#x}: bits 46-48 must be 1")
    if descriptor >> 53 & 0xFF or descriptor >> 14 & 3 or descriptor >> 30 & 3:
        raise Fault("descriptor", f"matrix descriptor {descriptor:#x}: reserved bits are set")
    if descriptor >> 49 & 7:
        raise Fault("not implemented", "a matrix descriptor with a base offset")
    if descriptor >> 52 & 1:
        raise Fault("not implemented", "a matrix descriptor with an absolute leading dimension")
    if descriptor >> 61 not in _SPANS:
        raise Fault("not implemented", f"swizzle mode {descriptor >> 61} of a matrix descriptor")
    span = _SPANS[descriptor >> 61]
    row = np.arange(tile.rows)[:, None]
    k = np.arange(_K_BYTES // tile.bytes)[None, :]
    if tile.mn_major:
        width = span or CHUNK
        columns, inside = row * tile.bytes // width, row * tile.bytes % width
        of_column, of_rows = (leading, stride) if span else (stride, leading)
        address = columns * of_column + inside + k // 8 * of_rows + k % 8 * width
    elif span:
        address = row // 8 * stride + row % 8 * span + k * tile.bytes
    else:
        chunk, inside = k * tile.bytes // CHUNK, k * tile.bytes % CHUNK
        address = row // 8 * stride + row % 8 * CHUNK + chunk * leading + inside
    address = start + address
    return swizzled(address // CHUNK, span) * CHUNK + address % CHUNK


@functools.lru_cache(maxsize=4096)
def tile_chunks(tile: Tile) -> np.ndarray:
    """The 16-byte chunks that a tile touches."""
    return np.unique(tile_bytes(tile) // CHUNK)


@dataclasses.dataclass(frozen=True)
class Operands:
    """Where one product reads and writes."""

    shape: Shape
    d: tuple[Rectangle, ...]
    a: Tile | tuple[Rectangle, ...]
    b: Tile
    accumulate: bool
    scale: float
    enabled: np.ndarray | None


def bind(instruction: Instruction, symbols: dict[str, int]) -> Effect | None:
    """The effect of tcgen05.mma, or None if it is none."""
    words = tuple(word for word in instruction.words if not word.startswith("collector:"))
    if words not in (
        ("tcgen05", "mma", "cta_group:1", "kind:f16"),
        ("tcgen05", "mma", "cta_group:1", "kind:f8f6f4"),
    ):
        return None
    d, a, b, descriptor, *rest = instruction.operands
    mask_of: list[Reader] = []
    lanes = rest[0]
    if isinstance(lanes, Vector):
        mask_of, rest = [reader(x, "u32", symbols) for x in lanes.elements], rest[1:]
        if len(mask_of) != TENSOR_LANES // 32:
            return None
    enable = reader(rest[0], "pred", symbols)
    scale = 1.0
    if len(rest) > 1:
        (_, power) = rest
        assert isinstance(power, Immediate)
        scale = 2.0**-power.value
    return _Mma(
        kind=words[3].removeprefix("kind:"),
        d_of=address_reader(d, symbols),
        a_of=address_reader(a, symbols) if isinstance(a, Address) else reader(a, "u64", symbols),
        a_in_tensor=isinstance(a, Address),
        b_of=reader(b, "u64", symbols),
        descriptor_of=reader(descriptor, "u32", symbols),
        mask_of=tuple(mask_of),
        enable_of=enable,
        scale=scale,
    )


@dataclasses.dataclass(frozen=True)
class _Mma:
    """One instruction, bound."""

    kind: str
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
        shape = decode_instruction(int(self.descriptor_of(warp)[lane]), self.kind, 1)
        cta, thread = warp.cta, int(warp.lanes[lane])
        d = rectangles(int(self.d_of(warp)[lane]), shape.rows, shape.columns)
        a_at, size = int(self.a_of(warp)[lane]), shape.a_type.itemsize
        if self.a_in_tensor:
            if shape.mn_major[0]:
                raise Fault("descriptor", "A in tensor memory cannot be transposed", lane)
            a = rectangles(a_at, shape.rows, _K_BYTES // 4)
        else:
            a = Tile(a_at, shape.mn_major[0], shape.rows, size)
        b = Tile(
            int(self.b_of(warp)[lane]), shape.mn_major[1], shape.columns, shape.b_type.itemsize
        )
        enabled = None
        if any(int(word(warp)[lane]) for word in self.mask_of):
            words = np.array([word(warp)[lane] for word in self.mask_of], np.uint32)
            bits = words[:, None] >> np.arange(32, dtype=np.uint32) & 1
            enabled = bits.reshape(-1) == 0
        accumulate = bool(self.enable_of(warp)[lane])
        operands = Operands(shape, d, a, b, accumulate, self.scale, enabled)
        pipe = pipe_of(warp, thread)
        _check(cta, pipe, operands, self.kind)
        shared_rows = shape.columns + (0 if self.a_in_tensor else shape.rows)
        warp.count("mma_flops", 2 * shape.rows * shape.columns * (_K_BYTES // size))
        warp.count("shared_mma_bytes", shared_rows * _K_BYTES)
        pipe.issue(functools.partial(_make, cta, operands))


def rectangles(address: int, rows: int, columns: int) -> tuple[Rectangle, ...]:
    """Where the rows of a matrix lie in tensor memory (PTX ISA, layouts D and F)."""
    lane, column = address >> 16, address & 0xFFFF
    if rows == TENSOR_LANES:
        if lane:
            raise Fault("misaligned", f"128 rows from lane {lane} of tensor memory")
        return (Rectangle(0, column, TENSOR_LANES, columns),)
    if lane not in (0, 16):
        raise Fault("misaligned", f"64 rows from lane {lane} of tensor memory: 0 or 16 is expected")
    return tuple(Rectangle(lane + 32 * i, column, 16, columns) for i in range(4))


def _check(cta: Cta, pipe: Pipe, operands: Operands, kind: str) -> None:
    """Faults unless every access is inside, allocated and ordered."""
    tensor, number = cta.tensor, pipe.issued + 1
    in_tensor = operands.a if not isinstance(operands.a, Tile) else ()
    for rectangle in (*operands.d, *in_tensor):
        tensor.check(rectangle)
    tiles = [x for x in (operands.a, operands.b) if isinstance(x, Tile)]
    for tile in tiles:
        if (tile_chunks(tile)[-1] + 1) * CHUNK > cta.shared.data.size:
            raise Fault("out-of-bounds", "an operand ends behind shared memory")
    if cta.order is None or tensor.shadow is None:
        return
    column = tensor.shadow.clocks.column(pipe.agent)
    for tile in tiles:
        cta.order.pipe_reads(pipe.thread, tile_chunks(tile), column, number)
    for rectangle in in_tensor:
        tensor.shadow.pipe_reads(pipe.thread, number, rectangle)
    form = _form(operands, kind)
    for rectangle in operands.d:
        tensor.shadow.pipe_writes(pipe.thread, number, rectangle, form)


@functools.cache
def _number_of_form(key: tuple[object, ...]) -> int:
    return next(_numbers)


_numbers = iter(range(1, 1 << 30))


def _form(operands: Operands, kind: str) -> int:
    """Products of one thread with the same accumulator, shape and kind are made in order."""
    return _number_of_form((operands.d, operands.shape.rows, operands.shape.columns, kind))


def _make(cta: Cta, operands: Operands) -> None:
    """Reads the operands and writes the result, now."""
    shape, data = operands.shape, cta.tensor.data
    if isinstance(operands.a, Tile):
        a = _values(cta, operands.a, shape.a_type)
    else:
        words = np.concatenate([data[rectangle.cells] for rectangle in operands.a])
        a = np.ascontiguousarray(words).view(shape.a_type).astype(np.float32)
    update = a @ _values(cta, operands.b, shape.b_type).T
    if shape.signs[0] != shape.signs[1]:
        update = -update
    first = 0
    for rectangle in operands.d:
        rows = update[first : first + rectangle.lanes]
        first += rectangle.lanes
        target = data[rectangle.cells].view(np.float32)
        if operands.accumulate:
            old = target if operands.scale == 1 else target * np.float32(operands.scale)
            rows = old + rows
        if operands.enabled is None:
            target[...] = rows
        else:
            chosen = operands.enabled[rectangle.cells[0]]
            target[chosen] = rows[chosen]


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
        values = words[tile_bytes(tile) // size].view(dtype).astype(np.float32)
        cta.decoded[key] = values
    return values
