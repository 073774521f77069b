"""TMA: tensor copies and reductions between global and shared memory, by tensor maps."""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np

from kernels.emulator import tensor_map
from kernels.emulator.instructions.cp_async_bulk import (
    REDUCTION,
    TMA,
    Extent,
    LoadForm,
    chunks_of,
    destinations,
    fill,
    issue_load,
    issue_store,
    updated,
)
from kernels.emulator.machine.cta import Cta
from kernels.emulator.machine.transfers import Transfer
from kernels.emulator.machine.warp import YIELD, Reader, Warp, Yield, address_reader, reader
from kernels.emulator.memory import Fault
from kernels.emulator.order.global_memory import GRAIN
from kernels.emulator.ptx.entries import Effect, Entry
from kernels.emulator.ptx.syntax import Address, Instruction, Operand
from kernels.emulator.subnormals import flush
from kernels.emulator.swizzle import CHUNK, swizzled
from kernels.emulator.tensor_map import TensorMap

_TO_SHARED = (("shared:cta", "global"), ("shared:cluster", "global"))
_TILED = ("tile", "mbarrier:complete_tx:bytes")
_TO_GLOBAL = ("global", "shared:cta", "tile", "bulk_group")
_REDUCTIONS = ("add", "min", "max", "inc", "dec", "and", "or", "xor")
_ALIGNMENT = 128
_NAN_FILLED = ("fp16", "bf16", "f32", "f32_ftz")
_NAN_FILL = 0x7FF7  # in every 16 bits (seen on an H200)
_TF32_BITS = 13  # of a float32's mantissa that tf32 drops


def _copy(instruction: Instruction, symbols: dict[str, int]) -> Effect | None:
    words = tuple(word for word in instruction.words if word != "L2:cache_hint")
    if words[5:] == _TO_GLOBAL:
        return _store(instruction, symbols, int(words[4][0]), None)
    if words[5:7] in _TO_SHARED and words[7:9] == _TILED:
        form = LoadForm.of(words, words[9:])
        return None if form is None else _load(instruction, symbols, words, form)
    return None


def _reduction(instruction: Instruction, symbols: dict[str, int]) -> Effect | None:
    words = tuple(word for word in instruction.words if word != "L2:cache_hint")
    if (*words[6:8], *words[9:]) == _TO_GLOBAL and words[8] in _REDUCTIONS:
        return _store(instruction, symbols, int(words[5][0]), words[8])
    return None


@functools.lru_cache(maxsize=256)
def _decoded(data: bytes) -> TensorMap:
    tensor = tensor_map.decode(data)
    size = tensor_map.ELEMENT_BYTES[tensor.dtype]
    unknown = tensor.nan_fill and tensor.dtype not in _NAN_FILLED
    if tensor.interleave or unknown or tensor.box[0] * size % CHUNK:
        raise Fault("not implemented", f"tensor map {tensor}")
    if tensor.swizzle_bytes and tensor.box[0] * size > tensor.swizzle_bytes:
        raise Fault("descriptor", f"the box is wider than the swizzle span: {tensor}")
    return tensor


def _fetch_map(warp: Warp, lane: int, address: int) -> TensorMap:
    region = warp.cta.machine.memory.holding(address)
    if region is None or address + tensor_map.BYTES > region.end:
        raise Fault("out-of-bounds", f"no tensor map at {address:#x}")
    if address % 64:
        raise Fault("misaligned", f"tensor map at {address:#x}: 64 bytes are expected")
    device, clocks = warp.cta.machine.global_order, warp.cta.clocks
    if device is not None and clocks is not None:
        thread = int(warp.lanes[lane])
        device.check_map(clocks, thread, region, address)
    start = address - region.base
    try:
        return _decoded(region.data[start : start + tensor_map.BYTES].tobytes())
    except ValueError as error:
        raise Fault("descriptor", str(error)) from error


def _global_view(home: Cta, tensor: TensorMap, writes: bool = False) -> np.ndarray:
    """The tensor in global memory, contiguous dimension last."""
    size = tensor_map.ELEMENT_BYTES[tensor.dtype]
    strides = (size, *tensor.byte_strides)
    last = sum((n - 1) * stride for n, stride in zip(tensor.sizes, strides, strict=True)) + size
    region = home.machine.memory.holding(tensor.address)
    if region is None or tensor.address + last > region.end:
        raise Fault("out-of-bounds", f"{last} bytes at {tensor.address:#x} of {tensor}")
    if writes:
        region.check_writable()
    return np.ndarray(
        tensor.sizes[::-1],
        f"u{size}",
        region.data,
        tensor.address - region.base,
        strides[::-1],
    )


def _window(tensor: TensorMap, at: tuple[int, ...]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """The part of a box that lies in the tensor: slices of the tensor and of the box."""
    inside, of_box = [], []
    for size, box, start in zip(tensor.sizes, tensor.box, at, strict=True):
        low, high = max(start, 0), max(min(start + box, size), max(start, 0))
        low, high = min(low, size), min(high, size)
        inside.append(slice(low, high))
        of_box.append(slice(low - start, high - start) if high > low else slice(0, 0))
    return tuple(inside[::-1]), tuple(of_box[::-1])


@dataclasses.dataclass(frozen=True)
class _Box:
    """Readers of the operands that name a box of a tensor."""

    map_of: Reader
    coordinates: list[Reader]

    @classmethod
    def of(cls, operand: Operand, symbols: dict[str, int], rank: int) -> _Box | None:
        """Reads [map, {coordinates}]; returns None if the number of coordinates is not the rank."""
        assert isinstance(operand, Address)
        if operand.coordinates is None or len(operand.coordinates.elements) != rank:
            return None
        coordinates = [reader(x, "s32", symbols) for x in operand.coordinates.elements]
        return cls(address_reader(operand, symbols), coordinates)

    def read(self, warp: Warp, lane: int) -> tuple[TensorMap, tuple[int, ...]]:
        """The map and the coordinates that a lane gives."""
        tensor = _fetch_map(warp, lane, int(self.map_of(warp)[lane]))
        if len(tensor.sizes) != len(self.coordinates):
            raise Fault("descriptor", f"{len(self.coordinates)} coordinates of {tensor}")
        at = tuple(int(coordinate(warp)[lane]) for coordinate in self.coordinates)
        if at[0] * tensor_map.ELEMENT_BYTES[tensor.dtype] % CHUNK:
            message = f"a box at {at}: the first coordinate must be a multiple of {CHUNK} bytes"
            raise Fault("misaligned", message, lane)
        return tensor, at


def _load(
    instruction: Instruction, symbols: dict[str, int], words: tuple[str, ...], form: LoadForm
) -> Effect | None:
    operands = instruction.operands
    box = _Box.of(operands[1], symbols, int(words[4][0]))
    if box is None:
        return None
    shared_of, barrier_of = (address_reader(operands[i], symbols) for i in (0, 2))
    mask_of = reader(operands[3], "u16", symbols) if form.multicast else None

    def effect(warp: Warp, mask: np.ndarray) -> Yield:
        for lane in np.flatnonzero(mask).tolist():
            tensor, at = box.read(warp, lane)
            to = None if mask_of is None else int(mask_of(warp)[lane])
            address, barrier = int(shared_of(warp)[lane]), int(barrier_of(warp)[lane])
            size = math.prod(tensor.box) * tensor_map.ELEMENT_BYTES[tensor.dtype]
            for destination in destinations(warp, form, address, barrier, to):
                home = destination.home
                chunks = chunks_of(home, destination.address, size, _ALIGNMENT)
                chunks = swizzled(chunks, tensor.swizzle_bytes)
                perform = functools.partial(_load_box, home, tensor, at, chunks)
                transfer = Transfer(warp, lane, instruction, home, perform, chunks)
                issue_load(transfer, destination.barrier, size, _extent(home, tensor, at))
        return YIELD

    return effect


def _store(
    instruction: Instruction, symbols: dict[str, int], rank: int, operation: str | None
) -> Effect | None:
    """Stores a box, or with an operation reduces it into the tensor."""
    box = _Box.of(instruction.operands[0], symbols, rank)
    if box is None:
        return None
    shared_of = address_reader(instruction.operands[1], symbols)
    kind = "async_write" if operation is None else "async_atomic"

    def effect(warp: Warp, mask: np.ndarray) -> Yield:
        seen: dict[tuple[TensorMap, tuple[int, ...], int], tuple[np.ndarray, Extent]] = {}
        for lane in np.flatnonzero(mask).tolist():
            tensor, at = box.read(warp, lane)
            if min(at) < 0:
                raise Fault("out-of-bounds", f"stores a box at {at}, before the tensor", lane)
            size = math.prod(tensor.box) * tensor_map.ELEMENT_BYTES[tensor.dtype]
            address = int(shared_of(warp)[lane])
            # Lanes that store the same box do not race: ptxas makes one store of theirs, but of 32
            # lanes' reductions 32 (both seen on an H200).
            again = operation is None and (tensor, at, address) in seen
            if (tensor, at, address) not in seen:
                chunks = chunks_of(warp.cta, address, size, _ALIGNMENT)
                chunks = swizzled(chunks, tensor.swizzle_bytes)
                seen[tensor, at, address] = chunks, _extent(warp.cta, tensor, at)
            chunks, extent = seen[tensor, at, address]
            transfer = Transfer(warp, lane, instruction, warp.cta, _nothing, chunks)
            write = functools.partial(_put_box, warp.cta, tensor, at, operation)
            issue_store(transfer, extent.nowhere() if again else extent, kind, write)
        return YIELD

    return effect


def _nothing() -> None:
    """Does nothing, until issue_store sets what the operation performs."""


def _extent(home: Cta, tensor: TensorMap, at: tuple[int, ...]) -> Extent:
    """Global memory that a box touches."""
    region = home.machine.memory.holding(tensor.address)
    device = home.machine.global_order
    if region is None:
        raise Fault("out-of-bounds", f"no memory at {tensor.address:#x} of {tensor}")
    if device is None or not device.shadowed:
        return Extent(region, np.zeros((1, 0), int))
    size = tensor_map.ELEMENT_BYTES[tensor.dtype]
    inside = _window(tensor, at)[0]
    columns = np.arange(inside[-1].start * size // GRAIN, -(-inside[-1].stop * size // GRAIN))
    places = np.full(1, (tensor.address - region.base) // GRAIN)
    for part, stride in zip(inside[:-1], tensor.byte_strides[::-1], strict=True):
        rows = np.arange(part.start, part.stop) * (stride // GRAIN)
        places = (places[:, None] + rows).reshape(-1)
    return Extent(region, (places[:, None] + columns).reshape(1, -1))


def _load_box(home: Cta, tensor: TensorMap, at: tuple[int, ...], chunks: np.ndarray) -> None:
    source = _global_view(home, tensor)
    inside, of_box = _window(tensor, at)
    box = np.zeros(tensor.box[::-1], source.dtype)
    if tensor.nan_fill:
        box.view(np.uint16)[...] = _NAN_FILL
    box[of_box] = _rounded(source[inside]) if tensor.tf32 else source[inside]
    fill(home, chunks, box.reshape(-1).view(np.uint8))


def _rounded(bits: np.ndarray) -> np.ndarray:
    """Bits of float32 values rounded to tf32, to nearest even; every NaN becomes one."""
    last = np.uint32(1 << _TF32_BITS)
    half = (last >> 1) - 1 + (bits >> _TF32_BITS & 1)
    nan = bits & 0x7FFFFFFF > 0x7F800000
    return np.where(nan, np.uint32(0x7FFFE000), (bits + half) & ~(last - 1))


def _put_box(
    home: Cta, tensor: TensorMap, at: tuple[int, ...], operation: str | None, data: np.ndarray
) -> None:
    target = _global_view(home, tensor, writes=True)
    inside, of_box = _window(tensor, at)
    box = data.view(target.dtype).reshape(tensor.box[::-1])[of_box]
    if operation is None:
        target[inside] = box
        return
    dtype = tensor_map.DTYPES[tensor.dtype]
    old = np.ascontiguousarray(target[inside]).view(dtype)
    new = np.ascontiguousarray(box).view(dtype)
    if tensor.dtype == "f32_ftz":
        result = flush(updated(operation, flush(old), flush(new)))
    else:
        result = updated(operation, old, new)
    target[inside] = np.ascontiguousarray(result).view(target.dtype)


ENTRIES = (
    Entry("cp.async.bulk.tensor.*", _copy, TMA),
    Entry("cp.reduce.async.bulk.tensor.*", _reduction, REDUCTION),
)
