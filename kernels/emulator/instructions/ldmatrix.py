"""ldmatrix, stmatrix and movmatrix: matrices in the registers of one warp.

Lane 4 g + t holds columns 2 t and 2 t + 1 of row g of an 8 x 8 matrix of 16-bit elements.
"""

from __future__ import annotations

import numpy as np

from kernels.emulator.instructions.ld_st import elements
from kernels.emulator.machine.spaces import SHARED, parts
from kernels.emulator.machine.warp import Reader, Warp, address_reader, reader, write
from kernels.emulator.memory import Fault
from kernels.emulator.ptx.entries import UNKNOWN, Cost, Demand, Effect, Entry
from kernels.emulator.ptx.program import LANES
from kernels.emulator.ptx.syntax import Instruction, Operand

_COUNTS = {"x1": 1, "x2": 2, "x4": 4}
_ROW_BYTES, _MATRIX_BYTES = 16, 128


def converged(warp: Warp, mask: np.ndarray) -> None:
    """Faults unless all lanes of the warp are here."""
    if not mask.all():
        raise Fault("convergence", "some lanes of the warp are elsewhere")


def _move(instruction: Instruction, symbols: dict[str, int]) -> Effect | None:
    """ldmatrix, stmatrix: row r of matrix i lies at the address of lane 8 i + r."""
    words = set(instruction.words[4:-1])
    counts = words & _COUNTS.keys()
    if len(counts) != 1 or words - counts - {"trans", *SHARED} or instruction.words[-1] != "b16":
        return None
    loads = instruction.opcode == "ldmatrix"
    registers, address = instruction.operands if loads else instruction.operands[::-1]
    addresses_of, count = address_reader(address, symbols), _COUNTS[counts.pop()]
    named = elements(registers)
    if len(named) != count:
        return None
    transposed, lanes = "trans" in words, np.arange(LANES) < 8 * count
    if loads:
        return _load(named, addresses_of, lanes, transposed)
    return _store([reader(x, "u32", symbols) for x in named], addresses_of, lanes, transposed)


def _load(
    results: tuple[Operand, ...], addresses_of: Reader, lanes: np.ndarray, transposed: bool
) -> Effect:
    def effect(warp: Warp, mask: np.ndarray) -> None:
        converged(warp, mask)
        (part,) = parts(warp, lanes, addresses_of(warp), "shared", _ROW_BYTES)
        part.reads(_ROW_BYTES)
        rows = part.region.load(part.addresses, 8, 2).view(np.uint16).reshape(-1, 8, 8)
        rows = rows.swapaxes(1, 2) if transposed else rows
        words = np.ascontiguousarray(rows).view(np.uint32).reshape(-1, LANES)
        for result, row in zip(results, words, strict=True):
            write(warp, mask, result, "u32", row)

    return effect


def _store(
    sources: list[Reader], addresses_of: Reader, lanes: np.ndarray, transposed: bool
) -> Effect:
    def effect(warp: Warp, mask: np.ndarray) -> None:
        converged(warp, mask)
        (part,) = parts(warp, lanes, addresses_of(warp), "shared", _ROW_BYTES)
        part.writes(_ROW_BYTES)
        rows = np.stack([source(warp) for source in sources]).view(np.uint16).reshape(-1, 8, 8)
        rows = rows.swapaxes(1, 2) if transposed else rows
        words = np.ascontiguousarray(rows.reshape(-1, 8)).view(np.uint64)
        part.region.store(part.addresses, words)
        part.changed()

    return effect


def _transpose(instruction: Instruction, symbols: dict[str, int]) -> Effect:
    result, source = instruction.operands
    source_of = reader(source, "u32", symbols)

    def effect(warp: Warp, mask: np.ndarray) -> None:
        converged(warp, mask)
        rows = np.ascontiguousarray(source_of(warp)).view(np.uint16).reshape(8, 8)
        write(warp, mask, result, "u32", np.ascontiguousarray(rows.T).view(np.uint32).reshape(-1))

    return effect


def _move_cost(instruction: Instruction) -> Cost:
    loads = instruction.opcode == "ldmatrix"
    count = next(_COUNTS[word] for word in instruction.words if word in _COUNTS)
    size = _MATRIX_BYTES * count
    return Cost(
        "shared memory",
        Demand(
            "shared memory",
            shared_bytes=size,
            operands="result first" if loads else "sources",
            memory="reads" if loads else "writes",
            movable=True,
        ),
        per_warp={"shared_read_bytes" if loads else "shared_written_bytes": size},
    )


ENTRIES = (
    Entry("ldmatrix.sync.aligned.m8n8.*", _move, _move_cost),
    Entry("stmatrix.sync.aligned.m8n8.*", _move, _move_cost),
    Entry("movmatrix.sync.aligned.m8n8.trans.b16", _transpose, Cost("other", UNKNOWN)),
)
