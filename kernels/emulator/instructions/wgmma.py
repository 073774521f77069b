"""wgmma: fences, groups, and products whose operands are in shared memory or registers."""

from __future__ import annotations

import functools

import numpy as np

from kernels.emulator.machine.warp import Warp, whole
from kernels.emulator.machine.wgmma import Form, Product, Tile, tile_chunks
from kernels.emulator.memory import Fault
from kernels.emulator.ptx.entries import (
    AwaitProducts,
    CommitProducts,
    Cost,
    Demand,
    Effect,
    Entry,
    Multiply,
    always,
)
from kernels.emulator.ptx.syntax import Immediate, Instruction, Operand, Register, Vector
from kernels.emulator.swizzle import CHUNK

_WARPGROUP = 4
_WARP_ROWS, _DEPTH, _K_BYTES = 16, 16, 32


def _fence(warp: Warp, mask: np.ndarray) -> None:
    whole(warp, mask)
    warp.products.unfenced.clear()
    warp.products.fenced = True


def _commit(warp: Warp, mask: np.ndarray) -> None:
    whole(warp, mask)
    warp.products.commit()


def _bind_wait(instruction: Instruction, symbols: dict[str, int]) -> Effect:
    return functools.partial(_wait, _pending(instruction))


def _wait(count: int, warp: Warp, mask: np.ndarray) -> None:
    whole(warp, mask)
    warp.products.wait(count)


def _pending(instruction: Instruction) -> int:
    (count,) = instruction.operands
    assert isinstance(count, Immediate)
    return count.value


def _product(instruction: Instruction, symbols: dict[str, int]) -> Effect | None:
    shape, *types = instruction.words[4:]
    columns = int(shape.removeprefix("m64n").removesuffix("k16"))
    if shape != f"m64n{columns}k16" or types not in (
        ["f32", "bf16", "bf16"],
        ["f32", "f16", "f16"],
    ):
        return None
    accumulators, a, b, accumulate, *constants = instruction.operands
    assert isinstance(accumulators, Vector)
    assert isinstance(b, Register)
    signs, majors = _constants(constants)
    in_registers = isinstance(a, Vector)
    if len(accumulators.elements) != columns // 2 or len(majors) != (1 if in_registers else 2):
        return None
    form = Form(
        columns=columns,
        dtype=types[1],
        accumulators=_rows(accumulators),
        a_registers=_rows(a) if isinstance(a, Vector) else None,
        a_mn_major=not in_registers and bool(majors[0]),
        b_mn_major=bool(majors[-1]),
        signs=signs,
        written=frozenset(_registers(accumulators)),
        read=frozenset(_registers(a)) if isinstance(a, Vector) else frozenset(),
    )
    a_index = a.index if isinstance(a, Register) else None
    b_index = b.index
    assert isinstance(accumulate, Register)
    flag_index = accumulate.index

    def effect(warp: Warp, mask: np.ndarray) -> None:
        whole(warp, mask)
        flag = warp.pred[flag_index]
        if (flag != flag[0]).any():
            raise Fault("convergence", "lanes disagree whether to accumulate")
        warp.products.check_fenced(form, warp.cta.machine.program.steps)
        b_tile = Tile(_uniform(warp, b_index), form.b_mn_major, 0, columns)
        chunks, a_tile = tile_chunks(b_tile), None
        if a_index is not None:
            first = 16 * (warp.index % _WARPGROUP)
            a_tile = Tile(_uniform(warp, a_index), form.a_mn_major, first, 16)
            chunks = np.concatenate([tile_chunks(a_tile), chunks])
        if (chunks.max() + 1) * CHUNK > warp.cta.shared.data.size:
            raise Fault("out-of-bounds", "an operand ends past shared memory")
        warp.products.issue(Product(form, a_tile, b_tile, bool(flag[0]), chunks, instruction))

    return effect


def _constants(operands: list[Operand]) -> tuple[tuple[int, int], list[int]]:
    values = [operand.value for operand in operands if isinstance(operand, Immediate)]
    return (values[0], values[1]), values[2:]


def _registers(operand: Vector) -> list[Register]:
    return [element for element in operand.elements if isinstance(element, Register)]


def _rows(operand: Vector) -> np.ndarray:
    return np.array([register.index for register in _registers(operand)])


def _uniform(warp: Warp, index: int) -> int:
    descriptors = warp.u64[index]
    if (descriptors != descriptors[0]).any():
        raise Fault("convergence", "lanes give different matrix descriptors")
    return int(descriptors[0])


def _product_cost(instruction: Instruction) -> Cost:
    """A warp's quarter of the product: four warps share the reads of B, each reads its own A."""
    columns = int(instruction.words[4].removeprefix("m64n").removesuffix("k16"))
    from_registers = isinstance(instruction.operands[1], Vector)
    rows = columns // _WARPGROUP + (0 if from_registers else _WARP_ROWS)
    product = Multiply(2 * _WARP_ROWS * columns * _DEPTH, rows * _K_BYTES)
    return Cost(
        "matrix product",
        Demand(operands="untracked", action=product),
        per_warp={"mma_flops": product.flops, "shared_mma_bytes": product.shared_bytes},
    )


def _wait_cost(instruction: Instruction) -> Cost:
    action = AwaitProducts(_pending(instruction))
    return Cost("synchronisation", Demand(operands="untracked", action=action))


ENTRIES = (
    Entry(
        "wgmma.fence.*",
        always(_fence),
        Cost("synchronisation", Demand(operands="untracked")),
    ),
    Entry("wgmma.mma_async.sync.aligned.*", _product, _product_cost),
    Entry(
        "wgmma.commit_group.*",
        always(_commit),
        Cost("synchronisation", Demand(operands="untracked", action=CommitProducts())),
    ),
    Entry("wgmma.wait_group.*", _bind_wait, _wait_cost),
)
