"""tcgen05.alloc, dealloc and relinquish_alloc_permit, of one CTA or a pair."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import numpy as np

from kernels.emulator.errors import PtxError
from kernels.emulator.machine.barriers import uniform
from kernels.emulator.machine.pairs import peer_of
from kernels.emulator.machine.tensor_memory import LEAST_COLUMNS, TensorMemory
from kernels.emulator.machine.warp import Reader, Wait, Warp, address_reader, reader, whole
from kernels.emulator.memory import Fault
from kernels.emulator.order.tensor_memory import TENSOR_COLUMNS
from kernels.emulator.ptx.entries import CONTROL, Effect, Entry
from kernels.emulator.ptx.syntax import Instruction


def _bind(instruction: Instruction, symbols: dict[str, int]) -> Effect | None:
    words = tuple(word for word in instruction.words if word not in ("shared:cta", "b32"))
    if words[2:] not in (("cta_group:1", "sync", "aligned"), ("cta_group:2", "sync", "aligned")):
        return None
    paired = words[2] == "cta_group:2"
    if words[1] == "alloc":
        target, count = instruction.operands
        target_of, count_of = address_reader(target, symbols), reader(count, "u32", symbols)
        return functools.partial(_allocate, paired, target_of, count_of)
    if words[1] == "dealloc":
        address, count = (reader(x, "u32", symbols) for x in instruction.operands)
        return functools.partial(_free, paired, address, count)
    return _relinquish


def check_groups(instructions: Iterable[Instruction]) -> None:
    """All tcgen05 instructions of a kernel are for one CTA, or all are for a pair.

    Raises:
      PtxError: they differ.
    """
    first: Instruction | None = None
    for instruction in instructions:
        groups = {word for word in instruction.words if word.startswith("cta_group:")}
        if instruction.opcode != "tcgen05" or not groups:
            continue
        first = first or instruction
        if groups.isdisjoint(first.words):
            raise PtxError(
                f"line {instruction.line}: {instruction.text}: another cta_group than in line "
                f"{first.line}"
            )


def _columns(values: np.ndarray) -> int:
    count = uniform(values, "the number of columns")
    if not LEAST_COLUMNS <= count <= TENSOR_COLUMNS or count & (count - 1):
        raise Fault("allocation", f"{count} columns: a power of two from 32 to 512 is expected")
    return count


def _allocate(
    paired: bool, target_of: Reader, count_of: Reader, warp: Warp, mask: np.ndarray
) -> Wait | None:
    whole(warp, mask)
    cta, tensor, count = warp.cta, warp.cta.tensor, _columns(count_of(warp))
    target = target_of(warp)[:1]
    uniform(target_of(warp), "the address for the result")
    if tensor.relinquished:
        raise Fault("allocation", "allocates after tcgen05.relinquish_alloc_permit")
    cta.shared.check(target, np.zeros(1, np.int64), 4)
    if tensor.requested is not None:
        raise Fault("allocation", "another warp of the CTA waits for columns at the same time")
    tensor.requested = count
    everyone = (tensor, peer_of(warp).tensor) if paired else (tensor,)
    _grant(everyone)

    def take() -> None:
        assert tensor.granted is not None
        first, tensor.granted = tensor.granted, None
        held = sum(tensor.allocations.values())
        cta.machine.most_tensor_columns = max(cta.machine.most_tensor_columns, held)
        if cta.order is not None:
            cta.order.thread_writes(warp.lanes[:1], target, 4)
        cta.shared.store(target, np.array([[first]], np.uint32))
        cta.shared_version += 1

    def ready() -> bool:
        _grant(everyone)
        return tensor.granted is not None

    if ready():
        take()
        return None
    held = "and the same request of the peer " if paired else ""
    return Wait(
        ready,
        take,
        lambda: f"{count} columns of tensor memory {held}(allocated: {tensor.allocations})",
    )


def _grant(tensors: tuple[TensorMemory, ...]) -> None:
    """Allocates what all of these ask for, at the same place in each, if it is free."""
    counts = {tensor.requested for tensor in tensors}
    if None in counts:
        return
    if len(counts) > 1:
        raise Fault("cta-pair", f"the CTAs of a pair allocate different columns: {counts}")
    (count,) = counts
    assert count is not None
    free = [set(tensor.places(count)) for tensor in tensors]
    both = free[0].intersection(*free[1:])
    if not both:
        return
    for tensor in tensors:
        tensor.requested, tensor.granted = None, min(both)
        tensor.allocate(min(both), count)


def _free(
    paired: bool, address_of: Reader, count_of: Reader, warp: Warp, mask: np.ndarray
) -> Wait | None:
    whole(warp, mask)
    address, tensor = uniform(address_of(warp), "the tensor memory's address"), warp.cta.tensor
    if address >> 16:
        raise Fault("allocation", f"frees tensor memory at lane {address >> 16}")
    tensor.free(int(warp.lanes[0]), address & 0xFFFF, _columns(count_of(warp)))
    if not paired:
        return None
    tensor.freed += 1
    number, peer = tensor.freed, peer_of(warp).tensor
    return Wait(
        lambda: peer.freed >= number,
        lambda: None,
        lambda: "tcgen05.dealloc.cta_group::2 of the other CTA of the pair",
    )


def _relinquish(warp: Warp, mask: np.ndarray) -> None:
    whole(warp, mask)
    warp.cta.tensor.relinquished = True


ENTRIES = (
    Entry("tcgen05.alloc.*", _bind, CONTROL),
    Entry("tcgen05.dealloc.*", _bind, CONTROL),
    Entry("tcgen05.relinquish_alloc_permit.*", _bind, CONTROL),
)
