"""tcgen05.cp: rows of shared memory to lanes of tensor memory; tcgen05.shift: lanes up by one."""

from __future__ import annotations

import functools

import numpy as np

from kernels.emulator.instructions.tcgen05_descriptor import Tile, tile_bytes
from kernels.emulator.machine.cta import Cta
from kernels.emulator.machine.pairs import pair_of
from kernels.emulator.machine.tensor_pipe import pipe_of
from kernels.emulator.machine.warp import YIELD, Reader, Warp, Yield, address_reader, reader
from kernels.emulator.memory import Fault
from kernels.emulator.order.tensor_memory import COPIED, SHIFTED, TENSOR_LANES, Rectangle
from kernels.emulator.ptx.entries import UNKNOWN, Cost, Effect, Entry
from kernels.emulator.ptx.program import LANES
from kernels.emulator.ptx.syntax import Instruction
from kernels.emulator.swizzle import CHUNK

_SHIFTED_COLUMNS = 8
# Shape and multicast: words of a row, and the first rows and the lanes that each piece gets.
_SHAPES: dict[tuple[str, ...], tuple[int, tuple[tuple[int, int], ...], int]] = {
    ("128x256b",): (8, ((0, 0),), 128),
    ("128x128b",): (4, ((0, 0),), 128),
    ("4x256b",): (8, ((0, 0), (1, 32), (2, 64), (3, 96)), 1),
    ("64x128b", "warpx2:02_13"): (4, ((0, 0), (32, 32), (0, 64), (32, 96)), 32),
    ("64x128b", "warpx2:01_23"): (4, ((0, 0), (0, 32), (32, 64), (32, 96)), 32),
    ("32x128b", "warpx4"): (4, ((0, 0), (0, 32), (0, 64), (0, 96)), 32),
}
_ROWS = {"128x256b": 128, "128x128b": 128, "64x128b": 64, "32x128b": 32, "4x256b": 4}


def _bind_shift(instruction: Instruction, symbols: dict[str, int]) -> Effect | None:
    words = instruction.words
    if words[2:] not in (("cta_group:1", "down"), ("cta_group:2", "down")):
        return None
    (address,) = instruction.operands
    return functools.partial(_shift, words[2] == "cta_group:2", address_reader(address, symbols))


def _bind_copy(instruction: Instruction, symbols: dict[str, int]) -> Effect | None:
    words = instruction.words
    if words[2] not in ("cta_group:1", "cta_group:2") or words[3:] not in _SHAPES:
        return None
    address, descriptor = instruction.operands
    paired = words[2] == "cta_group:2"
    target_of, source_of = address_reader(address, symbols), reader(descriptor, "u64", symbols)
    return functools.partial(_copy, words[3:], paired, target_of, source_of)


def _copy(
    shape: tuple[str, ...],
    paired: bool,
    target_of: Reader,
    source_of: Reader,
    warp: Warp,
    mask: np.ndarray,
) -> Yield:
    words, pieces, lanes = _SHAPES[shape]
    for lane in np.flatnonzero(mask).tolist():
        address, thread = int(target_of(warp)[lane]), int(warp.lanes[lane])
        if address >> 16:
            raise Fault("misaligned", f"tcgen05.cp to lane {address >> 16} of tensor memory", lane)
        source = tile_bytes(Tile(int(source_of(warp)[lane]), False, _ROWS[shape[0]], 4))[:, :words]
        targets = [(row, Rectangle(first, address & 0xFFFF, lanes, words)) for row, first in pieces]
        pipe = pipe_of(warp, thread)
        ctas = pair_of(warp, thread) if paired else (warp.cta,)
        chunks, number = np.unique(source // CHUNK), pipe.issued + 1
        for cta in ctas:
            if (chunks[-1] + 1) * CHUNK > cta.shared.data.size:
                raise Fault("out-of-bounds", "the source ends past shared memory", lane)
            for _, rectangle in targets:
                cta.tensor.check(rectangle)
            cta.tensor.touched[thread] = number
            shadow = cta.tensor.shadow
            if cta.order is None or shadow is None:
                continue
            cta.order.pipe_reads(thread, chunks, shadow.clocks.column(pipe.agent), number)
            for _, rectangle in targets:
                shadow.pipe_writes(thread, number, rectangle, COPIED)
        warp.count("tensor_written_bytes", 4 * words * lanes * len(pieces))
        pipe.issue(functools.partial(_perform, ctas, source, targets))
    return YIELD


def _perform(
    ctas: tuple[Cta, ...], source: np.ndarray, targets: list[tuple[int, Rectangle]]
) -> None:
    for cta in ctas:
        data = cta.shared.data
        rows = data[: data.size // 4 * 4].view(np.uint32)[source // 4]
        for row, rectangle in targets:
            cta.tensor.data[rectangle.cells] = rows[row : row + rectangle.lanes]


def _shift(paired: bool, target_of: Reader, warp: Warp, mask: np.ndarray) -> Yield:
    """Lane i of each quarter gets the 32 bytes of lane i + 1; the last lane keeps its own."""
    for lane in np.flatnonzero(mask).tolist():
        address, thread = int(target_of(warp)[lane]), int(warp.lanes[lane])
        if address >> 16:
            raise Fault("not implemented", f"tcgen05.shift from lane {address >> 16}", lane)
        rectangle = Rectangle(0, address & 0xFFFF, TENSOR_LANES, _SHIFTED_COLUMNS)
        pipe = pipe_of(warp, thread)
        ctas = pair_of(warp, thread) if paired else (warp.cta,)
        for cta in ctas:
            cta.tensor.check(rectangle)
            cta.tensor.touched[thread] = pipe.issued + 1
            if cta.tensor.shadow is not None:
                cta.tensor.shadow.pipe_writes(thread, pipe.issued + 1, rectangle, SHIFTED)
        pipe.issue(functools.partial(_make_shift, ctas, rectangle))
    return YIELD


def _make_shift(ctas: tuple[Cta, ...], rectangle: Rectangle) -> None:
    for cta in ctas:
        quarters = cta.tensor.data[rectangle.cells].reshape(-1, LANES, _SHIFTED_COLUMNS)
        moved = np.concatenate([quarters[:, 1:], quarters[:, -1:]], 1)
        cta.tensor.data[rectangle.cells] = moved.reshape(-1, _SHIFTED_COLUMNS)


ENTRIES = (
    Entry("tcgen05.cp.*", _bind_copy, Cost("matrix product", UNKNOWN)),
    Entry("tcgen05.shift.*", _bind_shift, Cost("matrix product", UNKNOWN)),
)
