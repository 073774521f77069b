"""mapa and getctarank: addresses in the shared memory of a cluster."""

from __future__ import annotations

import numpy as np

from kernels.emulator.machine.cta import OFFSET_MASK, RANK_SHIFT
from kernels.emulator.machine.warp import Reader, Warp, address_reader, reader, write
from kernels.emulator.memory import Fault
from kernels.emulator.ptx.entries import FREE, Cost, Effect, Entry
from kernels.emulator.ptx.syntax import Address, Instruction, Operand, Register
from kernels.emulator.ptx.windows import SHARED_WINDOW


def _address(operand: Operand, symbols: dict[str, int]) -> Reader:
    return address_reader(operand if isinstance(operand, Address) else Address(operand), symbols)


def _map(instruction: Instruction, symbols: dict[str, int]) -> Effect | None:
    """mapa: the same place in the shared memory of the CTA of a rank."""
    words, (result, source, rank) = instruction.words, instruction.operands
    if words[1:-1] not in ((), ("shared:cluster",)):
        return None
    window = SHARED_WINDOW if len(words) == 2 else 0
    view = words[-1]
    address_of, rank_of = _address(source, symbols), reader(rank, "u32", symbols)

    def effect(warp: Warp, mask: np.ndarray) -> None:
        ranks, count = rank_of(warp).astype(np.int64), len(warp.cta.cluster.ctas)
        wrong = mask & (ranks >= count)
        if wrong.any():
            lane = int(np.argmax(wrong))
            message = f"mapa to rank {ranks[lane]} of a cluster of {count} CTAs"
            raise Fault("out-of-bounds", message, lane)
        addresses = address_of(warp) - window
        value = (addresses & OFFSET_MASK) + (ranks << RANK_SHIFT) + window
        write(warp, mask, result, view, value.astype(f"u{int(view[1:]) // 8}"))

    return effect


def _rank(instruction: Instruction, symbols: dict[str, int]) -> Effect | None:
    """getctarank: the rank of the CTA whose shared memory holds an address."""
    words, (result, source) = instruction.words, instruction.operands
    if words[1:-1] not in ((), ("shared:cluster",)):
        return None
    address_of = _address(source, symbols)
    window = SHARED_WINDOW if len(words) == 2 else 0

    def effect(warp: Warp, mask: np.ndarray) -> None:
        ranks = (address_of(warp) - window) >> RANK_SHIFT
        assert isinstance(result, Register)
        write(warp, mask, result, "u32", ranks.astype(np.uint32))

    return effect


ENTRIES = (
    Entry("mapa.*", _map, Cost("move", FREE)),
    Entry("getctarank.*", _rank, Cost("move", FREE)),
)
