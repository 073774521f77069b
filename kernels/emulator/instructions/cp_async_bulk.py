"""Bulk copies and reductions of contiguous bytes, and what all bulk operations have in common.

What an operation reads and writes is checked when it is issued; it is performed later or at once,
as the policy says. One into shared memory notifies an mbarrier; a thread waits for one into global
memory by its group, and wait_group.read only says that its sources have been read.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from kernels.emulator.instructions.atom_red import DTYPES, UPDATES
from kernels.emulator.instructions.mbarrier import barrier_at
from kernels.emulator.machine.barriers import TransactionBarrier
from kernels.emulator.machine.cta import OFFSET_MASK, RANK_SHIFT, Cta
from kernels.emulator.machine.trace import Carried, Loaded, Stored
from kernels.emulator.machine.transfers import Transfer
from kernels.emulator.machine.warp import YIELD, Warp, Yield, address_reader, reader
from kernels.emulator.memory import Fault, Region
from kernels.emulator.order.global_memory import GRAIN, Access
from kernels.emulator.ptx.entries import (
    SOURCES,
    AwaitStores,
    CommitStores,
    Cost,
    Demand,
    Effect,
    Entry,
    always,
)
from kernels.emulator.ptx.syntax import Immediate, Instruction
from kernels.emulator.swizzle import CHUNK

_FROM_GLOBAL = (("shared:cta", "global"), ("shared:cluster", "global"))
_COMPLETES = "mbarrier:complete_tx:bytes"
_PAIR = 2
_TO_CLUSTER_TYPES = ("b32", "u32", "s32", "b64", "u64")

Update = Callable[[np.ndarray, np.ndarray], np.ndarray]


def _copy(instruction: Instruction, symbols: dict[str, int]) -> Effect | None:
    words = tuple(word for word in instruction.words if word != "L2:cache_hint")
    if words[3:5] in _FROM_GLOBAL and words[5:6] == (_COMPLETES,):
        form = LoadForm.of(words, words[6:])
        return None if form is None else _load(instruction, symbols, form)
    if words[3:] == ("shared:cluster", "shared:cta", _COMPLETES):
        return _between(instruction, symbols, None)
    if words[3:] == ("global", "shared:cta", "bulk_group"):
        return _store(instruction, symbols, None)
    return None


@dataclasses.dataclass(frozen=True)
class LoadForm:
    """Where a load may go: into other CTAs, several of them, signalling the pair's barrier."""

    cluster: bool
    multicast: bool
    paired: bool

    @classmethod
    def of(cls, words: tuple[str, ...], rest: tuple[str, ...]) -> LoadForm | None:
        """Reads the mnemonic and its last modifiers; returns None if there are others."""
        if not set(rest) <= {"multicast:cluster", "cta_group:1", "cta_group:2"}:
            return None
        return cls("shared:cluster" in words, "multicast:cluster" in rest, "cta_group:2" in rest)


@dataclasses.dataclass(frozen=True)
class Destination:
    """One CTA's share of a load: where its data goes, and the barrier that it signals."""

    home: Cta
    address: int
    barrier: int


def destinations(
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


def chunks_of(home: Cta, address: int, size: int, alignment: int) -> np.ndarray:
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


def fill(home: Cta, chunks: np.ndarray, data: np.ndarray) -> None:
    """Writes bytes to 16-byte chunks of a CTA's shared memory."""
    _shared_chunks(home)[chunks] = data.reshape(-1, CHUNK)
    home.shared_version += 1


def taken(home: Cta, chunks: np.ndarray) -> np.ndarray:
    """Bytes of 16-byte chunks of a CTA's shared memory."""
    return np.ascontiguousarray(_shared_chunks(home)[chunks]).reshape(-1)


@dataclasses.dataclass(frozen=True)
class Extent:
    """Bytes of global memory that an operation touches, as granules of the global order."""

    region: Region
    granules: np.ndarray

    @classmethod
    def contiguous(cls, region: Region, address: int, size: int) -> Extent:
        """`size` bytes at an address."""
        first = (address - region.base) // GRAIN
        return cls(region, np.arange(first, first + size // GRAIN)[None, :])

    def nowhere(self) -> Extent:
        """An empty extent of the same region, for an operation that is not checked."""
        return Extent(self.region, self.granules[:, :0])

    def check(self, kind: str, warp: Warp, thread: int, agent: int, moment: int) -> Access | None:
        """Faults unless what conflicts is ordered before; None where that is not checked."""
        device, clocks = warp.cta.machine.global_order, warp.cta.clocks
        if device is None or clocks is None or not device.shadowed or not self.granules.size:
            return None
        one = np.array([agent]), np.array([moment])
        access = Access(kind, clocks, self.region, self.granules, np.array([thread]), *one)
        device.check(access)
        return access


def issue_load(transfer: Transfer, barrier_address: int, size: int, source: Extent | None) -> None:
    """Issues a write of chunks of shared memory, after which an mbarrier receives `size` bytes.

    Without a source in global memory they come from the CTA's shared memory.
    """
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
    if source is not None:
        source.check("async_read", warp, thread, barrier.slot, barrier.phase + 1)
    barrier.copied = barrier.phase + 1
    if barrier_address >> RANK_SHIFT != home.rank:
        home.signalled[barrier.slot] = barrier.phase + 1
    signal_after(transfer, barrier, size)
    warp.count("tma_loaded_bytes", size)
    kind = Carried if source is None else Loaded
    warp.note(kind(barrier, barrier.phase, size, home.rank))
    home.issue(transfer)


def signal_after(transfer: Transfer, barrier: TransactionBarrier, size: int) -> None:
    """Makes an operation notify an mbarrier of `size` bytes once it is performed."""
    write, phase = transfer.perform, barrier.phase
    owner = transfer.warp.cta.cluster.of_rank(barrier.address >> RANK_SHIFT)

    def perform() -> None:
        write()
        if owner.ended:
            raise Fault("cluster-exit", f"{size} bytes come for an mbarrier of an exited CTA")
        if barrier.phase != phase:
            raise Fault(
                "phase-misuse",
                f"{barrier.label} completed phase {phase} before these {size} bytes came",
            )
        barrier.complete(size)

    transfer.perform = perform


def issue_store(
    transfer: Transfer, target: Extent, kind: str, write: Callable[[np.ndarray], None]
) -> None:
    """Issues a write of global memory from chunks of shared memory; `write` takes their bytes."""
    warp, cta = transfer.warp, transfer.warp.cta
    thread = int(warp.lanes[transfer.lane])
    target.region.check_writable()
    if cta.order is not None:
        cta.order.async_reads(np.array([thread]), transfer.chunks)
        pending = np.iinfo(np.int32).max
        transfer.access = target.check(kind, warp, thread, thread, pending)

    def perform() -> None:
        transfer.capture()
        assert transfer.data is not None
        write(transfer.data)
        cta.machine.memory.version += 1

    transfer.read = functools.partial(taken, cta, transfer.chunks)
    transfer.perform = perform
    warp.count("tma_stored_bytes", transfer.chunks.size * CHUNK)
    warp.note(Stored(transfer.chunks.size * CHUNK))
    cta.bulk_open.setdefault(thread, []).append(transfer)
    cta.issue(transfer)


def _commit(warp: Warp, mask: np.ndarray) -> None:
    for thread in warp.lanes[mask]:
        group = warp.cta.bulk_open.pop(int(thread), [])
        warp.cta.bulk_groups.setdefault(int(thread), []).append(group)


def _bind_wait(instruction: Instruction, symbols: dict[str, int]) -> Effect:
    return functools.partial(_wait, _pending(instruction), "read" in instruction.words)


def _pending(instruction: Instruction) -> int:
    (count,) = instruction.operands
    assert isinstance(count, Immediate)
    return count.value


def _wait(count: int, reads_only: bool, warp: Warp, mask: np.ndarray) -> Yield:
    """Performs all but the last `count` groups of every lane, or reads their sources."""
    for thread in warp.lanes[mask]:
        groups = warp.cta.bulk_groups.get(int(thread), [])
        if reads_only:
            for group in groups[: max(len(groups) - count, 0)]:
                for transfer in group:
                    _capture(warp, transfer)
            continue
        while len(groups) > count:
            for transfer in groups.pop(0):
                _capture(warp, transfer)
                _complete(warp, transfer)
    return YIELD


def _capture(warp: Warp, transfer: Transfer) -> None:
    """The thread learns that the sources have been read."""
    if transfer.waited:
        return
    transfer.capture()
    transfer.waited = True
    if warp.cta.order is not None:
        warp.cta.order.async_read_done(warp.number, transfer.chunks)


def _complete(warp: Warp, transfer: Transfer) -> None:
    """The thread learns that the operation has been performed."""
    cta = warp.cta
    cta.perform(transfer)
    if transfer.access is not None and cta.clocks is not None:
        assert cta.machine.global_order is not None
        cta.machine.global_order.done(transfer.access, int(cta.clocks.now[warp.number]))


def _prefetch(warp: Warp, mask: np.ndarray) -> None:
    """cp.async.bulk.prefetch: no effect that a program could see."""


def _global(warp: Warp, address: int, size: int) -> Region:
    if size % CHUNK or address % CHUNK:
        raise Fault("misaligned", f"bulk operation on {size} bytes at {address:#x}")
    region = warp.cta.machine.memory.holding(address)
    if region is None or address + size > region.end:
        raise Fault("out-of-bounds", f"{size} bytes at {address:#x}")
    return region


def _load(instruction: Instruction, symbols: dict[str, int], form: LoadForm) -> Effect:
    operands = instruction.operands
    target_of, source_of = (address_reader(x, symbols) for x in operands[:2])
    size_of = reader(operands[2], "u32", symbols)
    barrier_of = address_reader(operands[3], symbols)
    mask_of = reader(operands[4], "u16", symbols) if form.multicast else None

    def effect(warp: Warp, mask: np.ndarray) -> Yield:
        for lane in np.flatnonzero(mask).tolist():
            size, source = int(size_of(warp)[lane]), int(source_of(warp)[lane])
            region = _global(warp, source, size)
            data = region.data[source - region.base :][:size]
            to = None if mask_of is None else int(mask_of(warp)[lane])
            address, barrier = int(target_of(warp)[lane]), int(barrier_of(warp)[lane])
            for destination in destinations(warp, form, address, barrier, to):
                home = destination.home
                chunks = chunks_of(home, destination.address, size, CHUNK)
                perform = functools.partial(fill, home, chunks, data)
                transfer = Transfer(warp, lane, instruction, home, perform, chunks)
                extent = Extent.contiguous(region, source, size)
                issue_load(transfer, destination.barrier, size, extent)
        return YIELD

    return effect


def _store(instruction: Instruction, symbols: dict[str, int], update: _Update | None) -> Effect:
    """The effect of a store to global memory, in a group; `update` is what a reduction does."""
    operands = instruction.operands
    target_of, source_of = (address_reader(x, symbols) for x in operands[:2])
    size_of = reader(operands[2], "u32", symbols)
    kind = "async_write" if update is None else "async_atomic"

    def effect(warp: Warp, mask: np.ndarray) -> Yield:
        for lane in np.flatnonzero(mask).tolist():
            size, address = int(size_of(warp)[lane]), int(target_of(warp)[lane])
            region = _global(warp, address, size)
            target = region.data[address - region.base :][:size]
            chunks = chunks_of(warp.cta, int(source_of(warp)[lane]), size, CHUNK)
            transfer = Transfer(warp, lane, instruction, warp.cta, _nothing, chunks)
            write = functools.partial(_put, target, update)
            issue_store(transfer, Extent.contiguous(region, address, size), kind, write)
        return YIELD

    return effect


def _nothing() -> None:
    """Does nothing, until issue_store sets what the operation performs."""


def _put(target: np.ndarray, update: _Update | None, data: np.ndarray) -> None:
    target[:] = data if update is None else update(target, data)


@dataclasses.dataclass(frozen=True)
class _Update:
    """A reduction of bytes: what is left of those in memory, from them and the operands'."""

    operation: str
    type_: str

    def __call__(self, old: np.ndarray, new: np.ndarray) -> np.ndarray:
        dtype = DTYPES[self.type_]
        result = updated(self.operation, old.view(dtype), np.ascontiguousarray(new).view(dtype))
        return np.ascontiguousarray(result).view(np.uint8)


def updated(operation: str, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """A reduction of values. Unlike red, it keeps subnormal numbers (seen on an H200)."""
    return UPDATES[operation](old, new).astype(old.dtype)


def _reduction(instruction: Instruction, symbols: dict[str, int]) -> Effect | None:
    words = (word for word in instruction.words[4:] if word not in ("L2:cache_hint", "noftz"))
    target, source, ends, operation, *types = words
    if source != "shared:cta" or operation not in UPDATES or len(types) != 1:
        return None
    if types[0] not in DTYPES or operation in ("exch", "cas"):
        return None
    update = _Update(operation, types[0])
    if (target, ends) == ("global", "bulk_group"):
        return _store(instruction, symbols, update)
    if (target, ends) == ("shared:cluster", _COMPLETES) and types[0] in _TO_CLUSTER_TYPES:
        return _between(instruction, symbols, update)
    return None


def _between(instruction: Instruction, symbols: dict[str, int], update: _Update | None) -> Effect:
    """The effect of a copy to shared memory of a CTA of the cluster, whose mbarrier is notified."""
    operands = instruction.operands
    target_of, source_of = (address_reader(x, symbols) for x in operands[:2])
    size_of = reader(operands[2], "u32", symbols)
    barrier_of = address_reader(operands[3], symbols)
    form = LoadForm(cluster=True, multicast=False, paired=False)

    def effect(warp: Warp, mask: np.ndarray) -> Yield:
        for lane in np.flatnonzero(mask).tolist():
            size, thread = int(size_of(warp)[lane]), int(warp.lanes[lane])
            if size % CHUNK:
                raise Fault("misaligned", f"bulk copy of {size} bytes")
            address, barrier_at_ = int(target_of(warp)[lane]), int(barrier_of(warp)[lane])
            (destination,) = destinations(warp, form, address, barrier_at_, None)
            home = destination.home
            chunks = chunks_of(home, address, size, CHUNK)
            sources = chunks_of(warp.cta, int(source_of(warp)[lane]), size, CHUNK)
            barrier = barrier_at(warp, barrier_at_, warp.lanes[lane : lane + 1])
            if warp.cta.order is not None:
                warp.cta.order.pipe_reads(thread, sources, barrier.slot, barrier.phase + 1)
            warp.cta.signalled[barrier.slot] = barrier.phase + 1
            perform = functools.partial(_carry, (warp.cta, sources), (home, chunks), update)
            transfer = Transfer(warp, lane, instruction, home, perform, chunks)
            issue_load(transfer, barrier_at_, size, None)
        return YIELD

    return effect


def _carry(
    source: tuple[Cta, np.ndarray], target: tuple[Cta, np.ndarray], update: _Update | None
) -> None:
    data = taken(*source)
    fill(*target, data if update is None else update(taken(*target), data))


TMA = Cost("TMA", SOURCES)
REDUCTION = Cost("global memory", Demand("global memory", operands="sources"))


def _wait_cost(instruction: Instruction) -> Cost:
    action = AwaitStores(_pending(instruction), "read" not in instruction.words)
    return Cost("TMA", Demand(operands="sources", action=action))


ENTRIES = (
    Entry("cp.async.bulk.*", _copy, TMA),
    Entry("cp.reduce.async.bulk.*", _reduction, REDUCTION),
    Entry("cp.async.bulk.prefetch.*", always(_prefetch), TMA),
    Entry(
        "cp.async.bulk.commit_group",
        always(_commit),
        Cost("TMA", Demand(operands="sources", action=CommitStores())),
    ),
    Entry("cp.async.bulk.wait_group", _bind_wait, _wait_cost),
    Entry("cp.async.bulk.wait_group.read", _bind_wait, _wait_cost),
)
