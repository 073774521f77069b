"""Bulk copies: TMA tensor loads and stores, contiguous loads, and their groups.

What a copy reads and writes is checked when it is issued; the copy itself is made later or at
once, as the policy says. A load tells an mbarrier, a store is waited for by its group.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np

from kernels.emulator import tensor_map
from kernels.emulator.barriers import TransactionBarrier
from kernels.emulator.cta import OFFSET_MASK, RANK_SHIFT, Cta
from kernels.emulator.memory import Fault
from kernels.emulator.program import Effect
from kernels.emulator.swizzle import CHUNK, swizzled
from kernels.emulator.synchronise import barrier_at
from kernels.emulator.syntax import Address, Immediate, Instruction, Operand
from kernels.emulator.tensor_map import TensorMap
from kernels.emulator.transfers import Transfer
from kernels.emulator.warp import YIELD, Reader, Warp, Yield, address_reader, reader

_TO_SHARED = (("shared:cta", "global"), ("shared:cluster", "global"))
_COMPLETES = ("mbarrier:complete_tx:bytes",)
_TILED = ("tile", *_COMPLETES)
_TO_GLOBAL = ("global", "shared:cta", "tile", "bulk_group")


_PAIR = 2


def bind(instruction: Instruction, symbols: dict[str, int]) -> Effect | None:
    """The effect of a bulk copy instruction, or None if it is none."""
    words = tuple(word for word in instruction.words if word != "L2:cache_hint")
    if words[:3] != ("cp", "async", "bulk"):
        return None
    if words[3] == "tensor" and words[5:] == _TO_GLOBAL:
        return _tensor_store(instruction, symbols, int(words[4][0]))
    if words[3] == "tensor" and words[5:7] in _TO_SHARED and words[7:9] == _TILED:
        form = LoadForm.of(words, words[9:])
        return None if form is None else _tensor_load(instruction, symbols, words, form)
    if words[3:5] in _TO_SHARED and words[5:6] == _COMPLETES:
        form = LoadForm.of(words, words[6:])
        return None if form is None else _contiguous(instruction, symbols, form)
    if words[3:] == ("commit_group",):
        return _commit
    if words[3:] in (("wait_group",), ("wait_group", "read")):
        (count,) = instruction.operands
        assert isinstance(count, Immediate)
        return functools.partial(_wait, count.value)
    return None


@dataclasses.dataclass(frozen=True)
class LoadForm:
    """Where a load may go: into other CTAs, several of them, signalling the pair's barrier."""

    cluster: bool
    multicast: bool
    paired: bool

    @classmethod
    def of(cls, words: tuple[str, ...], rest: tuple[str, ...]) -> LoadForm | None:
        """By the mnemonic and its last modifiers; None if there are others."""
        if not set(rest) <= {"multicast:cluster", "cta_group:1", "cta_group:2"}:
            return None
        return cls("shared:cluster" in words, "multicast:cluster" in rest, "cta_group:2" in rest)


@dataclasses.dataclass(frozen=True)
class Destination:
    """One CTA's share of a load: where its data goes, and the barrier that it signals."""

    home: Cta
    address: int
    barrier: int


def _destinations(
    warp: Warp, form: LoadForm, address: int, barrier: int, mask: int | None
) -> list[Destination]:
    """Data and signal go to the same offsets in every CTA of the multicast mask.

    With .cta_group::2 the signal goes to that CTA of each pair whose parity the barrier's has.
    """
    cluster = warp.cta.cluster
    offset, barrier_offset = address & OFFSET_MASK, barrier & OFFSET_MASK
    rank, barrier_rank = address >> RANK_SHIFT, barrier >> RANK_SHIFT
    if mask is None:
        same = rank // _PAIR == barrier_rank // _PAIR if form.paired else rank == barrier_rank
        if not same or (not form.cluster and rank != warp.cta.rank):
            message = f"a copy to {address:#x} of CTA {warp.cta.rank} signals mbarrier {barrier:#x}"
            raise Fault("descriptor", message)
        return [Destination(cluster.of_rank(rank), address, barrier)]
    ranks = [bit for bit in range(mask.bit_length()) if mask >> bit & 1]
    if not ranks:
        raise Fault("descriptor", "a multicast to no CTA")
    signalled = [r & ~1 | barrier_rank & 1 if form.paired else r for r in ranks]
    return [
        Destination(
            cluster.of_rank(to), offset | to << RANK_SHIFT, barrier_offset | at << RANK_SHIFT
        )
        for to, at in zip(ranks, signalled, strict=True)
    ]


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
        """From [map, {coordinates}]; None if the coordinates are not as many as the rank."""
        assert isinstance(operand, Address)
        if operand.coordinates is None or len(operand.coordinates.elements) != rank:
            return None
        coordinates = [reader(x, "s32", symbols) for x in operand.coordinates.elements]
        return cls(address_reader(operand, symbols), coordinates)

    def read(self, warp: Warp, lane: int) -> tuple[TensorMap, tuple[int, ...]]:
        """The map and the coordinates that a lane gives."""
        tensor = _fetch_map(warp, int(self.map_of(warp)[lane]))
        if len(tensor.sizes) != len(self.coordinates):
            raise Fault("descriptor", f"{len(self.coordinates)} coordinates of {tensor}")
        return tensor, tuple(int(coordinate(warp)[lane]) for coordinate in self.coordinates)


def _tensor_load(
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
            for destination in _destinations(warp, form, address, barrier, to):
                home = destination.home
                chunks = swizzled(
                    _chunks(home, destination.address, size, 128), tensor.swizzle_bytes
                )
                make = functools.partial(_load_box, home, tensor, at, chunks)
                _issue_load(
                    Transfer(warp, lane, instruction, home, make, chunks), destination.barrier
                )
        return YIELD

    return effect


def _tensor_store(instruction: Instruction, symbols: dict[str, int], rank: int) -> Effect | None:
    box = _Box.of(instruction.operands[0], symbols, rank)
    if box is None:
        return None
    shared_of = address_reader(instruction.operands[1], symbols)

    def effect(warp: Warp, mask: np.ndarray) -> Yield:
        for lane in np.flatnonzero(mask).tolist():
            tensor, at = box.read(warp, lane)
            size = math.prod(tensor.box) * tensor_map.ELEMENT_BYTES[tensor.dtype]
            chunks = _chunks(warp.cta, int(shared_of(warp)[lane]), size, 128)
            chunks = swizzled(chunks, tensor.swizzle_bytes)
            make = functools.partial(_store_box, warp.cta, tensor, at, chunks)
            _issue_store(Transfer(warp, lane, instruction, warp.cta, make, chunks))
        return YIELD

    return effect


def _contiguous(instruction: Instruction, symbols: dict[str, int], form: LoadForm) -> Effect | None:
    operands = instruction.operands
    target_of, source_of = (address_reader(x, symbols) for x in operands[:2])
    size_of = reader(operands[2], "u32", symbols)
    barrier_of = address_reader(operands[3], symbols)
    mask_of = reader(operands[4], "u16", symbols) if form.multicast else None
    if "global" not in instruction.words:
        return None

    def effect(warp: Warp, mask: np.ndarray) -> Yield:
        for lane in np.flatnonzero(mask).tolist():
            size, source = int(size_of(warp)[lane]), int(source_of(warp)[lane])
            if size % CHUNK or source % CHUNK:
                raise Fault("misaligned", f"bulk copy of {size} bytes from {source:#x}")
            region = warp.cta.machine.memory.holding(source)
            if region is None or source + size > region.end:
                raise Fault("out-of-bounds", f"{size} bytes at {source:#x}")
            data = region.data[source - region.base :][:size]
            to = None if mask_of is None else int(mask_of(warp)[lane])
            address, barrier = int(target_of(warp)[lane]), int(barrier_of(warp)[lane])
            for destination in _destinations(warp, form, address, barrier, to):
                home = destination.home
                chunks = _chunks(home, destination.address, size, CHUNK)
                make = functools.partial(_fill, home, chunks, data)
                _issue_load(
                    Transfer(warp, lane, instruction, home, make, chunks), destination.barrier
                )
        return YIELD

    return effect


def _chunks(home: Cta, address: int, size: int, alignment: int) -> np.ndarray:
    """Numbers of the 16-byte chunks of a contiguous piece of a CTA's shared memory."""
    if address % alignment:
        raise Fault("misaligned", f"shared address {address:#x}: {alignment} bytes are expected")
    first = address - home.base
    if first < 0 or first + size > home.shared.data.size:
        raise Fault("out-of-bounds", f"{size} bytes at shared address {address:#x}")
    return np.arange(first // CHUNK, (first + size) // CHUNK)


def _shared_chunks(home: Cta) -> np.ndarray:
    data = home.shared.data
    return data[: data.size // CHUNK * CHUNK].reshape(-1, CHUNK)


def _fill(home: Cta, chunks: np.ndarray, data: np.ndarray) -> None:
    _shared_chunks(home)[chunks] = data.reshape(-1, CHUNK)
    home.shared_version += 1


def _load_box(home: Cta, tensor: TensorMap, at: tuple[int, ...], chunks: np.ndarray) -> None:
    source = _global_view(home, tensor)
    inside, of_box = _window(tensor, at)
    box = np.zeros(tensor.box[::-1], source.dtype)
    box[of_box] = source[inside]
    _fill(home, chunks, box.reshape(-1).view(np.uint8))


def _store_box(home: Cta, tensor: TensorMap, at: tuple[int, ...], chunks: np.ndarray) -> None:
    target = _global_view(home, tensor)
    inside, of_box = _window(tensor, at)
    data = np.ascontiguousarray(_shared_chunks(home)[chunks]).reshape(-1)
    target[inside] = data.view(target.dtype).reshape(tensor.box[::-1])[of_box]
    home.machine.memory.version += 1


def _issue_load(transfer: Transfer, barrier_address: int) -> None:
    warp, home = transfer.warp, transfer.home
    threads = warp.lanes[transfer.lane : transfer.lane + 1]
    thread, order = int(threads[0]), home.order
    if order is not None and home is not warp.cta:
        order.check_started(threads)
    barrier = barrier_at(warp, barrier_address, threads)
    if order is not None:
        if order.fenced[thread, barrier.slot] < 0:
            raise Fault(
                "proxy-fence",
                f"mbarrier {barrier_address:#x}: no fence.mbarrier_init or fence.proxy.async "
                "between its initialisation and its use by a copy",
            )
        order.async_writes(thread, transfer.chunks, barrier.slot, barrier.phase + 1)
    barrier.copied = barrier.phase + 1
    if barrier_address >> RANK_SHIFT != home.rank:
        home.signalled[barrier.slot] = barrier.phase + 1
    make, size, phase = transfer.perform, transfer.chunks.size * CHUNK, barrier.phase
    warp.count("tma_loaded_bytes", size)
    owner = warp.cta.cluster.holding(barrier_address)

    def perform() -> None:
        make()
        if owner.ended:
            raise Fault("cluster-exit", f"{size} bytes come for an mbarrier of an exited CTA")
        _arrived(barrier, phase, size)

    transfer.perform = perform
    home.issue(transfer)


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
    transfer.warp.count("tma_stored_bytes", transfer.chunks.size * CHUNK)
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
                    cta.order.async_read_done(warp.number, transfer.chunks)
    return YIELD
