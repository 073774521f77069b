"""cp.async: copies from global to shared memory that each thread waits for in groups.

Their writes are the issuing thread's, from when it has waited for them.
"""

from __future__ import annotations

import functools
import itertools

import numpy as np

from kernels.emulator.instructions.mbarrier import barrier_at
from kernels.emulator.machine.barriers import TransactionBarrier
from kernels.emulator.machine.spaces import SHARED, Part, parts
from kernels.emulator.machine.trace import Copied
from kernels.emulator.machine.transfers import Transfer
from kernels.emulator.machine.warp import YIELD, Warp, Yield, address_reader, reader
from kernels.emulator.memory import Fault, Region
from kernels.emulator.ptx.entries import UNKNOWN, Cost, Demand, Effect, Entry, Gather, always
from kernels.emulator.ptx.program import LANES
from kernels.emulator.ptx.syntax import Immediate, Instruction, Register

_SIZES = (4, 8, 16)


def _copy(instruction: Instruction, symbols: dict[str, int]) -> Effect | None:
    target, source, size, *rest = instruction.operands
    spaces = [word for word in instruction.words[3:] if not word.startswith("L2:")]
    if spaces not in (["shared", "global"], ["shared:cta", "global"]):
        return None
    if not isinstance(size, Immediate) or size.value not in _SIZES:
        return None
    if "cg" in instruction.words and size.value != max(_SIZES):
        return None
    if "L2:cache_hint" in instruction.words:
        rest = rest[:-1]
    ignores = rest and isinstance(rest[0], Register) and rest[0].bank == "pred"
    whole = size.value
    amount_of = reader(rest[0] if rest and not ignores else size, "u32", symbols)
    ignored_of = reader(rest[0], "pred", symbols) if ignores else None
    target_of, source_of = address_reader(target, symbols), address_reader(source, symbols)

    def effect(warp: Warp, mask: np.ndarray) -> Yield:
        amounts = amount_of(warp).astype(np.int64)
        if ignored_of is not None:
            amounts = np.where(ignored_of(warp), 0, amounts)
        if (amounts[mask] > whole).any():
            lane = int(np.argmax(mask & (amounts > whole)))
            raise Fault("out-of-bounds", f"copies {amounts[lane]} of {whole} bytes", lane)
        (to,) = parts(warp, mask, target_of(warp), SHARED[0], whole)
        sources = source_of(warp)
        taken: list[tuple[Region, np.ndarray, np.ndarray]] = []
        reading = mask & (amounts > 0)
        if reading.any():
            for part in parts(warp, reading, sources, "global", whole):
                part.reads(whole)
                taken.append((part.region, part.lanes[mask], part.addresses))
        if to.home is not None and to.home.order is not None:
            to.home.order.copy_writes(to.threads, to.addresses, whole)
        perform = functools.partial(_perform, to, taken, amounts[mask], whole)
        transfer = Transfer(
            warp, int(np.argmax(mask)), instruction, warp.cta, perform, to.addresses
        )
        for lane in np.flatnonzero(mask):
            warp.copies.open[lane].append(transfer)
        warp.cta.issue(transfer)
        return YIELD

    return effect


def _perform(
    to: Part, taken: list[tuple[Region, np.ndarray, np.ndarray]], amounts: np.ndarray, whole: int
) -> None:
    """Performs the copy; bytes past the source's size are zero."""
    data = np.zeros((len(amounts), whole), np.uint8)
    for region, rows, addresses in taken:
        data[rows] = region.load(addresses, 4, whole // 4).view(np.uint8)
    data[np.arange(whole) >= amounts[:, None]] = 0
    to.region.store(to.addresses, data.view(np.uint32))
    to.warp.cta.shared_version += 1


def _commit(warp: Warp, mask: np.ndarray) -> None:
    copies = warp.copies
    for lane in np.flatnonzero(mask):
        copies.groups[lane].append(copies.open[lane])
        copies.open[lane] = []


def _bind_wait(instruction: Instruction, symbols: dict[str, int]) -> Effect:
    (count,) = instruction.operands
    assert isinstance(count, Immediate)
    return functools.partial(_wait, count.value)


def _wait(count: int, warp: Warp, mask: np.ndarray) -> Yield:
    """Performs the outstanding copies of all but the last `count` groups of every lane."""
    done: dict[int, tuple[Transfer, list[int]]] = {}
    for lane in np.flatnonzero(mask).tolist():
        groups = warp.copies.groups[lane]
        while len(groups) > count:
            for transfer in groups.pop(0):
                done.setdefault(id(transfer), (transfer, []))[1].append(lane)
    _finish(warp, done)
    return YIELD


def _wait_all(warp: Warp, mask: np.ndarray) -> Yield:
    _commit(warp, mask)
    return _wait(0, warp, mask)


def _finish(warp: Warp, done: dict[int, tuple[Transfer, list[int]]]) -> None:
    order = warp.cta.order
    for transfer, lanes in done.values():
        warp.cta.perform(transfer)
        if order is not None:
            order.copies_done(warp.lanes[lanes], transfer.chunks)


def _arrive(instruction: Instruction, symbols: dict[str, int]) -> Effect | None:
    """cp.async.mbarrier.arrive: an arrival that follows every copy that the thread has issued."""
    rest = set(instruction.words[4:-1])
    if rest - {"noinc", *SHARED} or instruction.words[-1] != "b64":
        return None
    counted = "noinc" not in rest
    address_of = address_reader(instruction.operands[0], symbols)

    def effect(warp: Warp, mask: np.ndarray) -> Yield:
        order = warp.cta.order
        for address in np.unique(address_of(warp)[mask]).tolist():
            lanes = np.flatnonzero(mask & (address_of(warp) == address)).tolist()
            barrier = barrier_at(warp, address, warp.lanes[lanes])
            done: dict[int, tuple[Transfer, list[int]]] = {}
            for lane in lanes:
                groups = itertools.chain(*warp.copies.groups[lane], warp.copies.open[lane])
                for transfer in groups:
                    done.setdefault(id(transfer), (transfer, []))[1].append(lane)
                warp.copies.groups[lane], warp.copies.open[lane] = [], []
            if counted:
                barrier.pending += len(lanes)
            if order is not None:
                phase = barrier.slot, barrier.phase + 1
                for transfer, of in done.values():
                    order.copies_done(warp.lanes[of], transfer.chunks, phase)
                barrier.give(order.clocks.release(warp.lanes[lanes]))
            barrier.copied = barrier.phase + 1
            warp.note(Copied(barrier, barrier.phase))
            first = [transfer for transfer, _ in done.values()]
            arrive = functools.partial(_arrived, warp, first, barrier, len(lanes))
            warp.cta.issue(
                Transfer(warp, lanes[0], instruction, warp.cta, arrive, np.zeros(0, int))
            )
        return YIELD

    return effect


def _arrived(warp: Warp, first: list[Transfer], barrier: TransactionBarrier, count: int) -> None:
    for transfer in first:
        warp.cta.perform(transfer)
    barrier.arrive(count, f"copies of warp {warp.index}")


def _copy_cost(instruction: Instruction) -> Cost:
    size = instruction.operands[2]
    assert isinstance(size, Immediate)
    action = Gather(LANES * size.value)
    return Cost("global memory", Demand("global memory", operands="sources", action=action))


_GROUPS = Cost("global memory", UNKNOWN)

ENTRIES = (
    Entry("cp.async.ca.*", _copy, _copy_cost),
    Entry("cp.async.cg.*", _copy, _copy_cost),
    Entry(
        "cp.async.mbarrier.arrive.*",
        _arrive,
        Cost("global memory", Demand("global memory", operands="sources")),
    ),
    Entry("cp.async.commit_group", always(_commit), _GROUPS),
    Entry("cp.async.wait_group", _bind_wait, _GROUPS),
    Entry("cp.async.wait_all", always(_wait_all), _GROUPS),
)
