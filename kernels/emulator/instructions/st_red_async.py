"""st.async and red.async: stores and updates in a cluster that notify an mbarrier."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from kernels.emulator.instructions.atom_red import DTYPES, UPDATES
from kernels.emulator.instructions.cp_async_bulk import signal_after
from kernels.emulator.instructions.ld_st import PIPES, access_cost, elements, space_of
from kernels.emulator.instructions.mbarrier import barrier_at
from kernels.emulator.machine.cta import RANK_SHIFT
from kernels.emulator.machine.spaces import Part, check_shared
from kernels.emulator.machine.trace import Carried
from kernels.emulator.machine.transfers import Transfer
from kernels.emulator.machine.warp import YIELD, Warp, Yield, address_reader, reader
from kernels.emulator.memory import Fault
from kernels.emulator.ptx.entries import Cost, Demand, Effect, Entry
from kernels.emulator.ptx.syntax import Instruction, Register

_COUNTS = {"v2": 2, "v4": 4}
_HINTS = {"weak", "relaxed", "cluster", "shared:cluster", "mbarrier:complete_tx:bytes"}
_REDUCED = {
    "u32": {"inc", "dec", "min", "max", "add"},
    "s32": {"min", "max", "add"},
    "u64": {"add"},
    "b32": {"and", "or", "xor"},
}
_STORED = ("b32", "b64", "u32", "u64", "s32", "s64", "f32", "f64")


def _bind(instruction: Instruction, symbols: dict[str, int]) -> Effect | None:
    words = instruction.words
    if "mbarrier:complete_tx:bytes" not in words:
        return None
    rest, type_ = set(words[2:-1]) - _HINTS, words[-1]
    counts = rest & _COUNTS.keys()
    operation = "".join(rest - counts)
    if words[0] == "st" and (operation or type_ not in _STORED):
        return None
    if words[0] == "red" and (counts or operation not in _REDUCED.get(type_, ())):
        return None
    count = next((_COUNTS[word] for word in counts), 1)
    return _store(instruction, symbols, count, operation)


def _store(
    instruction: Instruction, symbols: dict[str, int], count: int, operation: str
) -> Effect | None:
    target, value, notified = instruction.operands
    size = int(instruction.words[-1][1:]) // 8
    given = elements(value)
    if len(given) != count:
        return None
    address_of, barrier_of = address_reader(target, symbols), address_reader(notified, symbols)
    sources = [
        reader(x, f"u{x.bank[1:] if isinstance(x, Register) else 8 * size}", symbols) for x in given
    ]
    dtype = DTYPES[instruction.words[-1]] if operation else None

    def effect(warp: Warp, mask: np.ndarray) -> Yield:
        addresses, barriers = address_of(warp), barrier_of(warp)
        values = np.stack([source(warp) for source in sources], 1).astype(f"u{size}")
        for barrier in np.unique(barriers[mask]).tolist():
            lanes = mask & (barriers == barrier)
            wrong = lanes & (addresses >> RANK_SHIFT != barrier >> RANK_SHIFT)
            if wrong.any():
                lane = int(np.argmax(wrong))
                message = f"stores to {addresses[lane]:#x}, but notifies mbarrier {barrier:#x}"
                raise Fault("descriptor", message, lane)
            home = warp.cta.cluster.of_rank(barrier >> RANK_SHIFT)
            part = Part(warp, home.shared, lanes, addresses[lanes], home)
            perform = functools.partial(_perform, part, values[lanes], operation, dtype)
            _issue(instruction, part, perform, (size * count, barrier, bool(operation)))
        return YIELD

    return effect


def _issue(
    instruction: Instruction, part: Part, perform: Callable[[], None], what: tuple[int, int, bool]
) -> None:
    whole, address, atomic = what
    warp, home, threads = part.warp, part.home, part.threads
    assert home is not None
    check_shared(home, part.addresses, part.lanes, whole)
    barrier = barrier_at(warp, address, threads)
    if home.order is not None:
        if home is not warp.cta:
            home.order.check_started(threads)
        phase = barrier.slot, barrier.phase + 1
        home.order.slot_writes(threads, part.addresses, whole, phase, atomic)
    barrier.copied = barrier.phase + 1
    warp.note(Carried(barrier, barrier.phase, whole * len(threads), home.rank))
    lane = int(np.argmax(part.lanes))
    transfer = Transfer(warp, lane, instruction, home, perform, np.zeros(0, int))
    signal_after(transfer, barrier, whole * len(threads))
    home.issue(transfer)


def _perform(part: Part, values: np.ndarray, operation: str, dtype: type | None) -> None:
    assert part.home is not None
    part.home.shared_version += 1
    if dtype is None:
        part.region.store(part.addresses, values)
        return
    size = values.dtype.itemsize
    for address, value in zip(part.addresses.reshape(-1, 1), values, strict=True):
        old = part.region.load(address, size, 1).view(dtype)
        new = UPDATES[operation](old, value.view(dtype)[None]).astype(dtype)
        part.region.store(address, new.view(f"u{size}"))


def _store_cost(instruction: Instruction) -> Cost:
    words = instruction.words
    count = next((_COUNTS[word] for word in words if word in _COUNTS), 1)
    return access_cost(words, count * int(words[-1][1:]) // 8)


def _update_cost(instruction: Instruction) -> Cost:
    space = space_of(instruction.words)
    return Cost(f"{space} memory", Demand(PIPES.get(space, "unknown"), operands="sources"))


ENTRIES = (
    Entry("st.async.*", _bind, _store_cost),
    Entry("red.async.*", _bind, _update_cost),
)
