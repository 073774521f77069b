"""Bulk copies: TMA tensor loads and stores, contiguous loads, and their groups.

What a copy reads and writes is checked when it is issued; the copy itself is made later or at
once, as the policy says. A load tells an mbarrier, a store is waited for by its group.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import numpy as np

from kernels.emulator import tensor_map
from kernels.emulator.barriers import TransactionBarrier
from kernels.emulator.memory import Fault
from kernels.emulator.program import Effect
from kernels.emulator.swizzle import CHUNK, swizzled
from kernels.emulator.synchronise import barrier_at
from kernels.emulator.syntax import Address, Immediate, Instruction
from kernels.emulator.tensor_map import TensorMap
from kernels.emulator.warp import YIELD, Warp, Yield, address_reader, reader

_TO_SHARED = ("shared:cta", "global", "tile", "mbarrier:complete_tx:bytes")
_TO_GLOBAL = ("global", "shared:cta", "tile", "bulk_group")


@dataclasses.dataclass
class Transfer:
    """An issued copy. `perform` makes it; `warp`, `lane` and `instruction` issued it."""

    warp: Warp
    lane: int
    instruction: Instruction
    perform: Callable[[], None]
    chunks: np.ndarray
    made: bool = False


def bind(instruction: Instruction, symbols: dict[str, int]) -> Effect | None:
    """The effect of a bulk copy instruction, or None if it is none."""
    words = tuple(word for word in instruction.words if word != "L2:cache_hint")
    if words[:3] != ("cp", "async", "bulk"):
        return None
    if words[3] == "tensor" and words[5:] in (_TO_SHARED, _TO_GLOBAL):
        return _tensor(instruction, symbols, int(words[4][0]), loads=words[5:] == _TO_SHARED)
    if words[3:] == ("shared:cta", "global", "mbarrier:complete_tx:bytes"):
        return _contiguous(instruction, symbols)
    if words[3:] == ("commit_group",):
        return _commit
    if words[3:] in (("wait_group",), ("wait_group", "read")):
        (count,) = instruction.operands
        assert isinstance(count, Immediate)
        return functools.partial(_wait, count.value)
    return None


@functools.lru_cache(maxsize=256)
def _decoded(data: bytes) -> TensorMap:
    tensor = tensor_map.decode(data)
    size = tensor_map.ELEMENT_BYTES[tensor.dtype]
    if tensor.interleave or tensor.box[0] * size % CHUNK:
        raise Fault("not implemented", f"tensor map {tensor}")
    if tensor.swizzle_bytes and tensor.box[0] * size > tensor.swizzle_bytes:
        raise Fault("descriptor", f"the box is wider than the swizzle span: {tensor}")
    return tensor


def _fetch_map(warp: Warp, address: int) -> TensorMap:
    region = warp.cta.machine.memory.holding(address)
    if region is None or address + tensor_map.BYTES > region.end:
        raise Fault("out-of-bounds", f"no tensor map at {address:#x}")
    if address % 64:
        raise Fault("misaligned", f"tensor map at {address:#x}: 64 bytes are expected")
    start = address - region.base
    try:
        return _decoded(region.data[start : start + tensor_map.BYTES].tobytes())
    except ValueError as error:
        raise Fault("descriptor", str(error)) from error


def _global_view(warp: Warp, tensor: TensorMap, writes: bool = False) -> np.ndarray:
    """The tensor in global memory, contiguous dimension last."""
    size = tensor_map.ELEMENT_BYTES[tensor.dtype]
    strides = (size, *tensor.byte_strides)
    last = sum((n - 1) * stride for n, stride in zip(tensor.sizes, strides, strict=True)) + size
    region = warp.cta.machine.memory.holding(tensor.address)
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


def _tensor(
    instruction: Instruction, symbols: dict[str, int], rank: int, loads: bool
) -> Effect | None:
    operands = instruction.operands
    shared, described = (operands[0], operands[1]) if loads else (operands[1], operands[0])
    assert isinstance(described, Address)
    if described.coordinates is None or len(described.coordinates.elements) != rank:
        return None
    coordinates = [reader(x, "s32", symbols) for x in described.coordinates.elements]
    shared_of, map_of = address_reader(shared, symbols), address_reader(described, symbols)
    barrier_of = address_reader(operands[2], symbols) if loads else None

    def effect(warp: Warp, mask: np.ndarray) -> Yield:
        for lane in np.flatnonzero(mask):
            tensor = _fetch_map(warp, int(map_of(warp)[lane]))
            if len(tensor.sizes) != rank:
                raise Fault("descriptor", f"{rank} coordinates of {tensor}")
            at = tuple(int(coordinate(warp)[lane]) for coordinate in coordinates)
            address = int(shared_of(warp)[lane])
            size = math.prod(tensor.box) * tensor_map.ELEMENT_BYTES[tensor.dtype]
            chunks = swizzled(_chunks(warp, address, size, 128), tensor.swizzle_bytes)
            if barrier_of is None:
                make = functools.partial(_store_box, warp, tensor, at, chunks)
                _issue_store(Transfer(warp, int(lane), instruction, make, chunks))
            else:
                make = functools.partial(_load_box, warp, tensor, at, chunks)
                transfer = Transfer(warp, int(lane), instruction, make, chunks)
                _issue_load(transfer, int(barrier_of(warp)[lane]))
        return YIELD

    return effect


def _contiguous(instruction: Instruction, symbols: dict[str, int]) -> Effect:
    target_of, source_of = (address_reader(x, symbols) for x in instruction.operands[:2])
    size_of = reader(instruction.operands[2], "u32", symbols)
    barrier_of = address_reader(instruction.operands[3], symbols)

    def effect(warp: Warp, mask: np.ndarray) -> Yield:
        for lane in np.flatnonzero(mask):
            size, source = int(size_of(warp)[lane]), source_of(warp)[lane : lane + 1]
            if size % CHUNK or source[0] % CHUNK:
                raise Fault("misaligned", f"bulk copy of {size} bytes from {source[0]:#x}")
            region = warp.cta.machine.memory.holding(int(source[0]))
            if region is None or source[0] + size > region.end:
                raise Fault("out-of-bounds", f"{size} bytes at {int(source[0]):#x}")
            chunks = _chunks(warp, int(target_of(warp)[lane]), size, CHUNK)
            first = int(source[0]) - region.base

            def make(
                data: np.ndarray = region.data[first : first + size], to: np.ndarray = chunks
            ) -> None:
                _shared_chunks(warp)[to] = data.reshape(-1, CHUNK)
                warp.cta.shared_version += 1

            transfer = Transfer(warp, int(lane), instruction, make, chunks)
            _issue_load(transfer, int(barrier_of(warp)[lane]))
        return YIELD

    return effect


def _chunks(warp: Warp, address: int, size: int, alignment: int) -> np.ndarray:
    """Numbers of the 16-byte chunks of a contiguous piece of shared memory."""
    if address % alignment:
        raise Fault("misaligned", f"shared address {address:#x}: {alignment} bytes are expected")
    if address < 0 or address + size > warp.cta.shared.end:
        raise Fault("out-of-bounds", f"{size} bytes at shared address {address:#x}")
    return np.arange(address // CHUNK, (address + size) // CHUNK)


def _shared_chunks(warp: Warp) -> np.ndarray:
    data = warp.cta.shared.data
    return data[: data.size // CHUNK * CHUNK].reshape(-1, CHUNK)


def _load_box(warp: Warp, tensor: TensorMap, at: tuple[int, ...], chunks: np.ndarray) -> None:
    source = _global_view(warp, tensor)
    inside, of_box = _window(tensor, at)
    box = np.zeros(tensor.box[::-1], source.dtype)
    box[of_box] = source[inside]
    _shared_chunks(warp)[chunks] = box.reshape(-1).view(np.uint8).reshape(-1, CHUNK)
    warp.cta.shared_version += 1


def _store_box(warp: Warp, tensor: TensorMap, at: tuple[int, ...], chunks: np.ndarray) -> None:
    target = _global_view(warp, tensor, writes=True)
    inside, of_box = _window(tensor, at)
    data = np.ascontiguousarray(_shared_chunks(warp)[chunks]).reshape(-1)
    target[inside] = data.view(target.dtype).reshape(tensor.box[::-1])[of_box]
    warp.cta.machine.memory.version += 1


def _issue_load(transfer: Transfer, barrier_address: int) -> None:
    warp, cta = transfer.warp, transfer.warp.cta
    thread = int(warp.lanes[transfer.lane])
    barrier = barrier_at(warp, barrier_address, np.array([thread]))
    order = cta.order
    if order is not None:
        if order.fenced[thread, barrier.slot] < 0:
            raise Fault(
                "proxy-fence",
                f"mbarrier {barrier_address:#x}: no fence.mbarrier_init or fence.proxy.async "
                "between its initialisation and its use by a copy",
            )
        order.async_writes(thread, transfer.chunks, barrier.slot, barrier.phase + 1)
    barrier.copied = barrier.phase + 1
    make, size, phase = transfer.perform, transfer.chunks.size * CHUNK, barrier.phase

    def perform() -> None:
        make()
        _arrived(barrier, phase, size)

    transfer.perform = perform
    cta.issue(transfer)


def _arrived(barrier: TransactionBarrier, phase: int, size: int) -> None:
    if barrier.phase != phase:
        raise Fault(
            "phase-misuse",
            f"mbarrier {barrier.address:#x} completed phase {phase} before these {size} bytes came",
        )
    barrier.complete(size)


def _issue_store(transfer: Transfer) -> None:
    cta = transfer.warp.cta
    thread = int(transfer.warp.lanes[transfer.lane])
    if cta.order is not None:
        cta.order.async_reads(np.array([thread]), transfer.chunks)
    cta.bulk_open.setdefault(thread, []).append(transfer)
    cta.issue(transfer)


def _commit(warp: Warp, mask: np.ndarray) -> None:
    for thread in warp.lanes[mask]:
        group = warp.cta.bulk_open.pop(int(thread), [])
        warp.cta.bulk_groups.setdefault(int(thread), []).append(group)


def _wait(count: int, warp: Warp, mask: np.ndarray) -> Yield:
    """Makes what is left of all but the last `count` groups of every lane."""
    cta = warp.cta
    for thread in warp.lanes[mask]:
        groups = cta.bulk_groups.get(int(thread), [])
        while len(groups) > count:
            for transfer in groups.pop(0):
                cta.perform(transfer)
                if cta.order is not None:
                    cta.order.async_read_done(warp.index, transfer.chunks)
    return YIELD
