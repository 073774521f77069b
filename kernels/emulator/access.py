"""Loads, stores and reductions of single lanes, and stmatrix."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from kernels.emulator.cta import RANK_SHIFT, Cta, Reduction
from kernels.emulator.memory import Fault
from kernels.emulator.program import LANES, PARAMETER_BASE, Effect
from kernels.emulator.syntax import Address, Instruction, Operand, Register, Symbol, Vector
from kernels.emulator.warp import (
    YIELD,
    Reader,
    Wait,
    Warp,
    Yield,
    address_reader,
    reader,
)

_CACHE_HINTS = {"nc", "relaxed", "weak", "gpu", "cta", "sys"}
_ATTEMPTS = 8
_COUNTS = {"v2": 2, "v4": 4, "v8": 8}


def bind(instruction: Instruction, symbols: dict[str, int]) -> Effect | None:
    """The effect of a memory access, or None if it is none."""
    words = instruction.words
    if instruction.mnemonic.startswith("stmatrix.sync.aligned.m8n8.x4."):
        return _matrix(instruction, symbols)
    if words[0] == "prefetch":
        return _nothing
    if words[0] not in ("ld", "st", "red"):
        return None
    kind, size = words[-1][0], words[-1][1:]
    if kind not in "busf" or size not in ("8", "16", "32", "64"):
        return None
    modifiers = set(words[1:-1])
    count = next((_COUNTS[word] for word in modifiers & _COUNTS.keys()), 1)
    space = modifiers & {"param", "shared", "shared:cta", "shared:cluster", "global"}
    modifiers -= {*space, *_COUNTS, *_CACHE_HINTS}
    if len(space) != 1:
        return None
    (where,) = space
    if words[0] == "ld" and modifiers <= {"acquire"}:
        polls = not {"acquire", "relaxed"}.isdisjoint(words)
        return _load(instruction, symbols, where, count, polls)
    if words[0] == "st" and not modifiers and where != "param":
        return _store(instruction, symbols, where, count)
    if words[0] == "red" and modifiers <= {"add", "release"} and where == "global":
        view = f"{'u' if kind == 'b' else kind}{size}"
        return _reduce(instruction, symbols, view, count, releases="release" in modifiers)
    return None


def _nothing(warp: Warp, mask: np.ndarray) -> None:
    """prefetch: no effect that a program could see."""


def _elements(operand: Operand) -> tuple[Operand, ...]:
    return operand.elements if isinstance(operand, Vector) else (operand,)


def _size(instruction: Instruction) -> int:
    return int(instruction.words[-1][1:]) // 8


def _shared_addresses(warp: Warp, mask: np.ndarray, address_of: Reader, size: int) -> np.ndarray:
    addresses = address_of(warp)[mask]
    _check_shared(warp.cta, addresses, mask, size)
    return addresses


def _check_shared(cta: Cta, addresses: np.ndarray, mask: np.ndarray, size: int) -> None:
    """Faults unless the addresses of these lanes are ordinary shared memory of a CTA."""
    cta.shared.check(addresses, np.flatnonzero(mask), size)
    low, high = addresses.min() - 8, addresses.max() + size
    for barrier in cta.barriers:
        if not low < barrier < high:
            continue
        inside = (addresses < barrier + 8) & (addresses + size > barrier)
        if inside.any():
            lane = int(np.flatnonzero(mask)[np.argmax(inside)])
            raise Fault("phase-misuse", f"an ordinary access to mbarrier {barrier:#x}", lane)


def _by_cta(
    warp: Warp, mask: np.ndarray, address_of: Reader, size: int
) -> Iterator[tuple[Cta, np.ndarray, np.ndarray]]:
    """The CTAs whose memory shared::cluster addresses name, with their lanes and addresses."""
    everything = address_of(warp)
    ranks = everything >> RANK_SHIFT
    for rank in np.unique(ranks[mask]).tolist():
        lanes = mask & (ranks == rank)
        home = warp.cta.cluster.holding(rank << RANK_SHIFT, warp.lanes[lanes])
        addresses = everything[lanes]
        _check_shared(home, addresses, lanes, size)
        yield home, lanes, addresses


def _load(
    instruction: Instruction, symbols: dict[str, int], space: str, count: int, polls: bool
) -> Effect:
    results, size = _elements(instruction.operands[0]), _size(instruction)
    acquires = "acquire" in instruction.words
    views = [f"u{result.bank[1:]}" for result in results if isinstance(result, Register)]
    address_of = address_reader(_generic(instruction.operands[1], space), symbols)

    def effect(warp: Warp, mask: np.ndarray) -> Yield | Wait | None:
        cta, whole = warp.cta, size * count
        if space in ("shared", "shared:cta"):
            addresses = _shared_addresses(warp, mask, address_of, whole)
            if cta.order is not None:
                cta.order.thread_reads(warp.lanes[mask], addresses, whole)
            words = cta.shared.load(addresses, size, count)
        elif space == "shared:cluster":
            addresses, words = address_of(warp)[mask], np.empty((mask.sum(), count), f"u{size}")
            for home, lanes, there in _by_cta(warp, mask, address_of, whole):
                if home.order is not None:
                    home.order.thread_reads(warp.lanes[lanes], there, whole)
                words[lanes[mask]] = home.shared.load(there, size, count)
        else:
            addresses, memory = address_of(warp)[mask], cta.machine.memory
            words = np.empty((len(addresses), count), f"u{size}")
            for region, held in memory.split(addresses, np.flatnonzero(mask), whole):
                words[held] = region.load(addresses[held], size, count)
        for column, (result, view) in enumerate(zip(results, views, strict=True)):
            assert isinstance(result, Register)
            getattr(warp, view)[result.index][mask] = words[:, column]
        device = cta.machine.device_order
        if acquires and device is not None and cta.order is not None:
            device.acquire(cta.order, warp.lanes[mask], addresses)
        return _polled(warp, instruction, addresses, words) if polls else None

    return effect


def _generic(operand: Operand, space: str) -> Operand:
    """A parameter that is named lies in the parameter block; a register holds its own address."""
    assert isinstance(operand, Address)
    if space == "param" and isinstance(operand.base, Symbol):
        return dataclasses.replace(operand, offset=operand.offset + PARAMETER_BASE)
    return operand


def _polled(
    warp: Warp, instruction: Instruction, addresses: np.ndarray, words: np.ndarray
) -> Yield | Wait:
    """Who reads the same value again and again sleeps until global memory changes.

    It might be no loop that waits for another value, so the sleeper gets a few more attempts when
    nothing else can run.
    """
    memory = warp.cta.machine.memory
    seen = (instruction.line, addresses.tobytes(), words.tobytes(), memory.version)
    version = memory.version
    if warp.polled != seen:
        warp.polled, warp.attempts = seen, _ATTEMPTS
        return YIELD
    return Wait(
        lambda: memory.version != version or warp.wakes(),
        lambda: None,
        lambda: f"another value than {words[0, 0]} in global memory",
    )


def _store(instruction: Instruction, symbols: dict[str, int], space: str, count: int) -> Effect:
    size = _size(instruction)
    address_of = address_reader(instruction.operands[0], symbols)
    sources = [_bits(x, size, symbols) for x in _elements(instruction.operands[1])]

    def effect(warp: Warp, mask: np.ndarray) -> None:
        cta, whole = warp.cta, size * count
        values = np.stack([source(warp)[mask] for source in sources], 1).astype(f"u{size}")
        if space in ("shared", "shared:cta"):
            addresses = _shared_addresses(warp, mask, address_of, whole)
            if cta.order is not None:
                cta.order.thread_writes(warp.lanes[mask], addresses, whole)
            cta.shared.store(addresses, values)
            cta.shared_version += 1
            return
        if space == "shared:cluster":
            for home, lanes, there in _by_cta(warp, mask, address_of, whole):
                if home.order is not None:
                    home.order.thread_writes(warp.lanes[lanes], there, whole)
                home.shared.store(there, values[lanes[mask]])
                home.shared_version += 1
            return
        addresses, memory = address_of(warp)[mask], cta.machine.memory
        for region, held in memory.split(addresses, np.flatnonzero(mask), whole):
            region.store(addresses[held], values[held])
        memory.version += 1

    return effect


def _bits(operand: Operand, size: int, symbols: dict[str, int]) -> Reader:
    """Reads the low `size` bytes of a register, which may be wider, or a constant."""
    wide = int(operand.bank[1:]) if isinstance(operand, Register) else 8 * size
    return reader(operand, f"u{wide}", symbols)


def _reduce(
    instruction: Instruction, symbols: dict[str, int], view: str, count: int, releases: bool
) -> Effect:
    """red.add: a relaxed one happens now, or when a release to the device is ordered behind it."""
    size = _size(instruction)
    address_of = address_reader(instruction.operands[0], symbols)
    sources = [reader(x, view, symbols) for x in _elements(instruction.operands[1])]

    def effect(warp: Warp, mask: np.ndarray) -> Yield | None:
        cta, threads, memory = warp.cta, warp.lanes[mask], warp.cta.machine.memory
        values = np.stack([source(warp)[mask] for source in sources], 1)
        addresses = address_of(warp)[mask]
        device = cta.machine.device_order
        if releases:
            cta.release_reductions(threads)
            if device is not None and cta.order is not None:
                device.release(cta.cluster.number, cta.order, threads, addresses)
        moment = 0 if cta.order is None else int(cta.order.now[warp.number])
        for region, held in memory.split(addresses, np.flatnonzero(mask), size * count):
            reduction = Reduction(region, threads[held], moment, addresses[held], values[held])
            if device is not None and cta.order is not None and not releases:
                device.add(cta.cluster.number, cta.order, region, threads[held], addresses[held])
            if releases:
                reduction.perform(np.ones(len(reduction.threads), bool))
            else:
                cta.reduce(reduction)
        memory.version += 1
        return YIELD if releases else None

    return effect


def _matrix(instruction: Instruction, symbols: dict[str, int]) -> Effect | None:
    """stmatrix: row r of matrix i goes to the address of lane 8 i + r."""
    transposed = "trans" in instruction.words
    if instruction.words[-1] != "b16":
        return None
    address_of = address_reader(instruction.operands[0], symbols)
    sources = [reader(x, "u32", symbols) for x in _elements(instruction.operands[1])]

    def effect(warp: Warp, mask: np.ndarray) -> None:
        if not mask.all():
            raise Fault("convergence", "some lanes of the warp are elsewhere")
        cta = warp.cta
        addresses = _shared_addresses(warp, mask, address_of, 16)
        if cta.order is not None:
            cta.order.thread_writes(warp.lanes, addresses, 16)
        registers = np.stack([source(warp) for source in sources])
        rows = registers.view(np.uint16).reshape(4, 8, 8)
        rows = rows.swapaxes(1, 2) if transposed else rows
        cta.shared.store(addresses, np.ascontiguousarray(rows.reshape(LANES, 8)).view(np.uint64))
        cta.shared_version += 1

    return effect
