"""What a launch did: instructions by class, operations, bytes and waits, by warp role.

What an instruction costs follows from its text in nearly all cases, so a launch only counts how
often each step ran and how many lanes sat out; `costs` has the rest. Effects whose cost is known at
run time alone (sizes in descriptors) tell `Warp.count`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kernels.emulator.program import LANES, Program, Run
from kernels.emulator.syntax import Instruction, Vector

if TYPE_CHECKING:
    from rich.table import Table

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
    k_bytes = 32  # every kind takes so many of a row
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


@dataclasses.dataclass
class Tally:
    """What one warp index has done, over all CTAs.

    Attributes:
      counts: executions of every step.
      idle: lanes that sat out, summed over the executions of every step.
      extra: quantities that only the run knows.
    """

    counts: list[int]
    idle: list[int]
    extra: Counter[str]

    @classmethod
    def of(cls, program: Program) -> Tally:
        """Nothing yet."""
        steps = len(program.steps)
        return cls([0] * steps, [0] * steps, Counter())

    def instructions(self, static: Costs) -> Counter[str]:
        """Executions by mnemonic."""
        sums = np.array(self.counts) @ static.mix
        pairs = zip(static.mnemonics, sums.tolist(), strict=True)
        return Counter({name: count for name, count in pairs if count})

    def quantities(self, static: Costs) -> Counter[str]:
        """Every quantity that is not zero."""
        counts = np.array(self.counts)
        lanes = LANES * counts - np.array(self.idle)
        sums = lanes @ static.per_lane + counts @ static.per_warp
        total = Counter(dict(zip(QUANTITIES, sums.tolist(), strict=True)))
        unknown = self.extra.keys() - QUANTITIES.keys()
        if unknown:
            raise KeyError(f"no such quantities: {unknown}")
        total.update(self.extra)
        return Counter({name: amount for name, amount in total.items() if amount})


def executed(program: Program, tallies: Sequence[Tally]) -> frozenset[int]:
    """Positions in the kernel's text of the instructions that some lane has executed."""
    lanes = sum(LANES * np.array(tally.counts) - np.array(tally.idle) for tally in tallies)
    found, position = set(), 0
    for step, some in zip(program.steps, np.asarray(lanes) > 0, strict=True):
        size = len(step.instructions) if isinstance(step, Run) else 1
        if some:
            found.update(range(position, position + size))
        position += size
    return frozenset(found)


@dataclasses.dataclass(frozen=True)
class Activity:
    """What a role did: executed warp instructions by class, and `QUANTITIES`."""

    classes: dict[str, int]
    quantities: dict[str, int]

    @property
    def instructions(self) -> int:
        """All of them."""
        return sum(self.classes.values())


@dataclasses.dataclass(frozen=True)
class Report:
    """What a launch did.

    Attributes:
      grid: CTAs.
      roles: warp indices by name; every warp has one.
      instructions: warp instructions executed, by warp index and mnemonic, summed over CTAs.
      quantities: the rest, by warp index and name of `QUANTITIES`, summed over CTAs.
      executed: positions in the kernel's `instructions` of those that some lane executed.
      shared_bytes: shared memory of a CTA.
      tensor_columns: most columns of tensor memory that a CTA held at a time.
      seconds: time that the emulation took.
    """

    kernel: str
    grid: tuple[int, int, int]
    roles: dict[str, tuple[int, ...]]
    instructions: tuple[Counter[str], ...]
    quantities: tuple[Counter[str], ...]
    executed: frozenset[int]
    shared_bytes: int
    tensor_columns: int
    seconds: float

    @property
    def total(self) -> int:
        """All warp instructions."""
        return sum(sum(counter.values()) for counter in self.instructions)

    def of(self, quantity: str) -> int:
        """A quantity, summed over all warps."""
        if quantity not in QUANTITIES:
            raise KeyError(quantity)
        return sum(counter[quantity] for counter in self.quantities)

    def by_role(self) -> dict[str, Activity]:
        """What every role did, and "all"."""
        everyone = tuple(range(len(self.instructions)))
        return {
            name: self._activity(warps) for name, warps in (*self.roles.items(), ("all", everyone))
        }

    def _activity(self, warps: Sequence[int]) -> Activity:
        classes: Counter[str] = Counter()
        quantities: Counter[str] = Counter()
        for warp in warps:
            quantities.update(self.quantities[warp])
            for mnemonic, count in self.instructions[warp].items():
                classes[instruction_class(mnemonic)] += count
        return Activity(dict(sorted(classes.items())), dict(quantities))

    def to_json(self) -> str:
        """One line of JSON: sizes, and per role its warps, classes and quantities."""
        roles = {
            name: {"warps": self.roles.get(name), **dataclasses.asdict(activity)}
            for name, activity in self.by_role().items()
        }
        roles["all"]["warps"] = list(range(len(self.instructions)))
        document: dict[str, Any] = {
            "kernel": self.kernel,
            "grid": self.grid,
            "shared_bytes": self.shared_bytes,
            "tensor_columns": self.tensor_columns,
            "seconds": self.seconds,
            "roles": roles,
        }
        return json.dumps(document)

    def table(self) -> Table:
        """A row for every class and quantity that is not zero, a column for every role."""
        from rich.table import Table

        activities = self.by_role()
        table = Table("", *activities, title=self._title(), box=None)
        for column in table.columns[1:]:
            column.justify = "right"
        classes = activities["all"].classes
        rows = [("instructions", [a.instructions for a in activities.values()])]
        rows += [(f"  {c}", [a.classes.get(c, 0) for a in activities.values()]) for c in classes]
        rows += [
            (name.replace("_", " "), [a.quantities.get(name, 0) for a in activities.values()])
            for name in QUANTITIES
            if activities["all"].quantities.get(name)
        ]
        for name, values in rows:
            table.add_row(name, *(f"{value:,}" if value else "" for value in values))
        return table

    def _title(self) -> str:
        columns = f", {self.tensor_columns} tensor columns" if self.tensor_columns else ""
        size = f"{self.shared_bytes / 1024:.1f} KiB shared"
        return f"{self.kernel}: {math.prod(self.grid)} CTAs, {size}{columns}"


def check_roles(
    roles: Mapping[str, Sequence[int]] | None, warps: int
) -> dict[str, tuple[int, ...]]:
    """Roles with every warp in one: those without a name are "warp 3".

    Raises:
      ValueError: a warp has two roles or does not exist.
    """
    named = {name: tuple(indices) for name, indices in (roles or {}).items()}
    seen = [index for indices in named.values() for index in indices]
    if len(set(seen)) != len(seen) or "all" in named:
        raise ValueError(f"{roles=}: one role a warp, none called 'all'")
    if seen and not 0 <= min(seen) <= max(seen) < warps:
        raise ValueError(f"{roles=}: warps are 0 to {warps - 1}")
    rest = {f"warp {index}": (index,) for index in range(warps) if index not in seen}
    return named | rest
