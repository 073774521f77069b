"""What an instruction costs by its text: its class, operations and bytes."""

from __future__ import annotations

import dataclasses
import re

import numpy as np

from kernels.emulator.ptx.program import Program, Run
from kernels.emulator.ptx.syntax import Instruction, Vector

QUANTITIES = {
    "special_function_ops": "results of the special function unit, one per lane",
    "mma_flops": "multiplications and additions of matrix products",
    "global_read_bytes": "by ld.global",
    "global_written_bytes": "by st.global",
    "global_reduced_bytes": "by red and atom",
    "tma_loaded_bytes": "written to shared memory by bulk and tensor loads, zero fill included",
    "tma_stored_bytes": "read from shared memory by bulk and tensor stores",
    "shared_read_bytes": "by ld.shared and ldmatrix",
    "shared_written_bytes": "by st.shared and stmatrix",
    "shared_mma_bytes": "read from shared memory by matrix products: A once a warp, B once a group",
    "distributed_read_bytes": "by ld.shared::cluster",
    "distributed_written_bytes": "by st.shared::cluster",
    "tensor_read_bytes": "by tcgen05.ld",
    "tensor_written_bytes": "by tcgen05.st and tcgen05.cp",
    "mbarrier_waits": "mbarrier waits that ended, retries not counted",
    "named_barrier_waits": "bar.sync",
}
"""Everything that is counted but instructions, and what it means."""

_INTEGER = "and or xor not shl shr bfe bfi bfind brev popc clz lop3 shf prmt sad dp4a mul24 mad24"
_SPECIAL = {"ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos", "tanh"}
_CLASSES = {
    **dict.fromkeys(_INTEGER.split(), "integer"),
    **dict.fromkeys(_SPECIAL, "special function"),
    **dict.fromkeys(("setp", "selp", "set", "slct"), "compare"),
    **dict.fromkeys(("mov", "cvta", "mapa", "getctarank", "isspacep"), "move"),
    **dict.fromkeys(("shfl", "vote", "elect", "match", "redux", "activemask"), "warp"),
    **dict.fromkeys(("bra", "brx", "call", "ret", "exit", "nop"), "control"),
    **dict.fromkeys(("setmaxnreg", "griddepcontrol", "clusterlaunchcontrol"), "control"),
    **dict.fromkeys(("mbarrier", "bar", "barrier", "fence", "membar"), "synchronisation"),
    **dict.fromkeys(("stmatrix", "ldmatrix"), "shared memory"),
    "cvt": "conversion",
    "prefetch": "global memory",
    "nanosleep": "control",
}
_ARITHMETIC = {
    "add",
    "sub",
    "mul",
    "mad",
    "fma",
    "neg",
    "abs",
    "min",
    "max",
    "div",
    "rem",
    "copysign",
}
_SPACES = ("param", "shared", "global", "local", "const")
_TENSOR_BYTES = {"32x32b": 128, "16x32bx2": 128, "16x64b": 128, "16x128b": 256, "16x256b": 512}
"""Bytes that a warp moves per repetition of a tcgen05.ld or st shape."""
_PRODUCT_WARPS = 4


def instruction_class(mnemonic: str) -> str:
    """The class that a mnemonic is counted under; "other" if it has none."""
    words = mnemonic.replace("::", ":").split(".")
    first, kind = words[0], words[-1]
    if first in _ARITHMETIC:
        floating = kind.startswith(("f", "bf")) or any(word.startswith("f32") for word in words[1:])
        if first == "div" and floating:
            return "special function"
        return "floating point" if floating else "integer"
    if first in ("ld", "st", "red", "atom"):
        spaces = (word.split(":")[0] for word in words[1:])
        space = next((space for space in spaces if space in _SPACES), "generic")
        return f"{space} memory"
    if first == "cp":
        return "TMA" if words[1:3] == ["async", "bulk"] else "global memory"
    if first in ("wgmma", "tcgen05"):
        return _tensor_core_class(first, words[1])
    return _CLASSES.get(first, "other")


def _tensor_core_class(family: str, action: str) -> str:
    if action in ("mma", "mma_async", "cp", "shift"):
        return "matrix product"
    if family == "tcgen05" and action in ("ld", "st"):
        return "tensor memory"
    if action in ("alloc", "dealloc", "relinquish_alloc_permit"):
        return "control"
    return "synchronisation"


def of_lane(instruction: Instruction) -> dict[str, int]:
    """What every active lane adds."""
    words = instruction.words
    first, kind = words[0], words[-1]
    if instruction_class(instruction.mnemonic) == "special function":
        return {"special_function_ops": 2 if kind.endswith("x2") else 1}
    if first not in ("ld", "st", "red", "atom"):
        return {}
    count = next((int(word[1:]) for word in words if word in ("v2", "v4", "v8")), 1)
    size = count * int(re.sub(r"\D", "", kind.split("x")[0]) or 0) // 8
    size *= 2 if kind.endswith("x2") else 1
    spaces = [space for space in words[1:] if space.split(":")[0] in ("shared", "global")]
    if not spaces:
        return {}
    where = "distributed" if spaces[0] == "shared:cluster" else spaces[0].split(":")[0]
    if first in ("red", "atom"):
        return {"global_reduced_bytes": size} if where == "global" else {}
    return {f"{where}_{'read' if first == 'ld' else 'written'}_bytes": size}


def of_warp(instruction: Instruction) -> dict[str, int]:
    """What every execution by a warp adds."""
    words = instruction.words
    if words[0] in ("stmatrix", "ldmatrix"):
        count = next(int(word[1:]) for word in words if word in ("x1", "x2", "x4"))
        name = "shared_written_bytes" if words[0] == "stmatrix" else "shared_read_bytes"
        return {name: 128 * count}
    if words[:2] == ("wgmma", "mma_async"):
        return of_product(instruction)
    if words[:2] in (("tcgen05", "ld"), ("tcgen05", "st")):
        shape = next(word for word in words if word in _TENSOR_BYTES)
        count = next((int(w[1:]) for w in words if re.fullmatch(r"x\d+", w)), 1)
        name = "tensor_read_bytes" if words[1] == "ld" else "tensor_written_bytes"
        return {name: _TENSOR_BYTES[shape] * count}
    if words[0] in ("bar", "barrier") and words[1] == "sync":
        return {"named_barrier_waits": 1}
    return {}


def of_product(instruction: Instruction) -> dict[str, int]:
    """A warp's quarter of wgmma; its four warps share the reads of B."""
    shape = re.search(r"m64n(\d+)k(\d+)", instruction.mnemonic)
    assert shape is not None
    n, k = int(shape[1]), int(shape[2])
    k_bytes = 32  # of a row, whatever the kind
    from_registers = isinstance(instruction.operands[1], Vector)
    rows = n // _PRODUCT_WARPS + (0 if from_registers else 16)
    return {"mma_flops": 2 * 16 * n * k, "shared_mma_bytes": rows * k_bytes}


@dataclasses.dataclass(frozen=True)
class Costs:
    """What the steps of a program cost.

    Attributes:
      mnemonics: of the columns of `mix`.
      mix: (steps, mnemonics), how many instructions of each a step has.
      per_lane, per_warp: (steps, quantities), what an active lane and an execution add.
    """

    mnemonics: tuple[str, ...]
    mix: np.ndarray
    per_lane: np.ndarray
    per_warp: np.ndarray


def costs(program: Program) -> Costs:
    """The static costs of a program."""
    quantities = {name: i for i, name in enumerate(QUANTITIES)}
    mnemonics: dict[str, int] = {}
    entries: list[tuple[int, int]] = []
    shape = (len(program.steps), len(quantities))
    per_lane, per_warp = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for number, step in enumerate(program.steps):
        for instruction in step.instructions if isinstance(step, Run) else (step.instruction,):
            column = mnemonics.setdefault(instruction.mnemonic, len(mnemonics))
            entries.append((number, column))
            for table, added in (
                (per_lane, of_lane(instruction)),
                (per_warp, of_warp(instruction)),
            ):
                for name, amount in added.items():
                    table[number, quantities[name]] += amount
    mix = np.zeros((len(program.steps), len(mnemonics)), np.int64)
    np.add.at(mix, tuple(np.array(entries).T), 1)
    return Costs(tuple(mnemonics), mix, per_lane, per_warp)
