"""From a program's steps to what they ask of an SM: the compiled half of a timing estimate.

It knows neither ptxas's real instructions (register moves and parameter loads are taken to be free,
everything else to be one instruction, but for `_EXPANSIONS`) nor register banks and shared-memory
bank conflicts. Straight-line instructions, plain loads and stores among them, are ordered as a
compiler would.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Set

from kernels.emulator.ptx.costs import instruction_class, of_lane, of_product, of_warp
from kernels.emulator.ptx.program import Branch, Exit, Program, Run, Single, Step
from kernels.emulator.ptx.syntax import Immediate, Instruction, Register, registers
from kernels.emulator.timing.rates import Rates

PARTITIONS = 4
_LANES = 32
_FREE = ("move", "param memory")
UNITS = (
    *("fma", "alu", "multiply", "special", "convert", "shuffle", "memory", "control"),
    "tensor memory",
)
TENSOR_MEMORY = UNITS.index("tensor memory")
_MEMORY = Register("memory", 0, "memory")
"""For the order in which a warp issues: loads do not pass stores."""
_EXPANSIONS = {"div.s32": 20, "div.u32": 16, "rem.s32": 20, "div.rn.f32": 9, "rcp.rn.f32": 6}
"""Round numbers of instructions that ptxas makes of one; none is inside a kernel's main loop."""


@dataclasses.dataclass(frozen=True)
class Op:
    """One instruction for a warp.

    Attributes:
      cycles: of its unit, 0 if it is free.
      latency: to its results; where `blocks`, to the warp's next instruction.
      issue: cycles of the issue slot.
      shared_bytes: of shared memory that it reads or writes.
    """

    unit: int
    cycles: float
    latency: float
    reads: tuple[Register, ...]
    writes: tuple[Register, ...]
    shared_bytes: int = 0
    issue: float = 1.0
    blocks: bool = False


@dataclasses.dataclass(frozen=True)
class Action:
    """What a step does beyond its instruction: `kind` is a method of the replay."""

    kind: str
    amount: float = 0
    more: float = 0


@dataclasses.dataclass(frozen=True)
class Plan:
    """A step: its instructions in the order of their issue, then its action."""

    ops: tuple[Op, ...]
    action: Action | None = None


def make_plans(program: Program, rates: Rates, spread: Set[int]) -> list[Plan]:
    """What every step of a program asks of an SM.

    `spread` are lines of loads from shared memory whose lanes had several addresses.

    Steps in a row that neither branch nor have an action are one to the compiler: their
    instructions are scheduled together, as the first of them.
    """
    plans = [_plan(step, rates, spread) for step in program.steps]
    labels = {
        place
        for step in program.steps
        if isinstance(step, Branch)
        for place in (step.target, step.meet)
    }
    begin = 0
    while begin < len(plans):
        end = begin
        while (
            end < len(plans)
            and _plain(program.steps[end], plans[end])
            and (end == begin or end not in labels)
        ):
            end += 1
        if end > begin:
            ops = [op for plan in plans[begin:end] for op in plan.ops]
            plans[begin:end] = [Plan(_scheduled(ops)), *[Plan(())] * (end - begin - 1)]
        begin = max(end, begin + 1)
    return plans


def _plain(step: Step, plan: Plan) -> bool:
    """Whether the compiler may move what comes before and after it across."""
    if isinstance(step, Run):
        return True
    if not isinstance(step, Single) or plan.action is not None:
        return False
    return step.instruction.opcode in ("ld", "st", "stmatrix", "ldmatrix") and not (
        {"volatile", "acquire", "release", "relaxed"} & set(step.instruction.words)
    )


def _plan(step: Step, rates: Rates, spread: Set[int]) -> Plan:
    if isinstance(step, Run):
        return Plan(tuple(_op(instruction, rates, spread) for instruction in step.instructions))
    instruction = step.instruction
    if isinstance(step, Branch | Exit):
        guard = () if instruction.guard is None else (instruction.guard[0],)
        return Plan((Op(UNITS.index("control"), 1, 1, guard, ()),))
    return Plan((_op(instruction, rates, spread),), _action(step, rates))


def _op(instruction: Instruction, rates: Rates, spread: Set[int]) -> Op:
    reads, writes = _registers(instruction)
    if instruction.opcode in ("ld", "ldmatrix"):
        reads += (_MEMORY,)
    elif instruction.opcode in ("st", "stmatrix"):
        writes += (_MEMORY,)
    kind = instruction_class(instruction.mnemonic)
    if kind in _FREE or instruction.opcode == "prefetch":
        return Op(UNITS.index("control"), 0, 0, reads, writes)
    unit, lanes, latency = _unit(instruction, kind, rates)
    count = _EXPANSIONS.get(instruction.mnemonic, 1)
    wide = instruction.words[-1] in ("s64", "u64", "b64")
    if kind == "integer" and wide and "wide" not in instruction.words:
        count = 4 if unit == "multiply" else 2
    narrow = rates.narrow_issue if unit in ("alu", "convert") else 1.0
    issue = count * narrow  # packed or long ones issue once
    shared = _LANES * sum(n for name, n in of_lane(instruction).items() if "shared" in name)
    if instruction.opcode == "ld" and instruction.line not in spread and shared:
        shared = round(
            max(shared * rates.shared_bytes / rates.one_address_bytes, rates.shared_bytes)
        )
    if instruction.opcode in ("stmatrix", "ldmatrix"):
        shared = 128 * int(next(w for w in instruction.words if w in ("x1", "x2", "x4"))[1:])
    if unit == "fma" and instruction.words[-1].endswith("x2"):
        count = 2  # results of a lane
    if unit == "tensor memory":
        (count,) = (n / _LANES for n in of_warp(instruction).values())
    cycles, latency = count * _LANES / lanes, latency + (count - 1)
    if shared:  # the four sub-partitions share the port
        cycles = max(cycles, shared / (rates.shared_bytes / PARTITIONS) / PARTITIONS)
    blocks = instruction.words[:2] == ("fence", "proxy")
    return Op(UNITS.index(unit), cycles, latency, reads, writes, shared, issue, blocks)


def _unit(instruction: Instruction, kind: str, rates: Rates) -> tuple[str, float, float]:
    """Unit, lanes a cycle and latency of an instruction."""
    first = instruction.opcode
    arithmetic = rates.arithmetic_latency
    if kind == "floating point" and first not in ("min", "max", "neg", "abs"):
        return "fma", rates.fma_lanes, arithmetic
    if kind == "integer" and first in ("mul", "mad"):
        return "multiply", rates.multiply_lanes, arithmetic
    if kind in ("floating point", "integer", "compare"):
        return "alu", rates.alu_lanes, arithmetic
    if kind == "special function":
        return "special", rates.special_lanes, rates.special_latency
    if kind == "conversion":
        return "convert", rates.convert_lanes, rates.convert_latency
    if kind == "warp":
        if first == "shfl":
            return "shuffle", rates.shuffle_lanes, rates.shuffle_latency
        return "alu", rates.alu_lanes, arithmetic
    if kind == "shared memory":
        return "memory", rates.memory_lanes, rates.shared_latency
    if kind == "global memory":
        return "memory", rates.memory_lanes, rates.global_latency
    if kind == "tensor memory" and rates.tensor_memory_bytes:
        lanes = rates.tensor_memory_bytes / PARTITIONS
        return "tensor memory", lanes, rates.tensor_memory_latency
    if instruction.words[:2] == ("fence", "proxy"):
        return "control", _LANES, rates.proxy_fence_latency
    if kind in ("synchronisation", "control", "TMA", "matrix product"):
        return "control", _LANES, 1
    raise NotImplementedError(f"the timing of line {instruction.line}: {instruction.text}")


def _registers(instruction: Instruction) -> tuple[tuple[Register, ...], tuple[Register, ...]]:
    """Registers that an instruction waits for, and those that others wait for; not wgmma's."""
    if instruction.opcode == "wgmma":
        return (), ()
    named = [tuple(registers(operand)) for operand in instruction.operands]
    stores = instruction.opcode in ("st", "red", "stmatrix", "cp", "mbarrier", "bar", "bra")
    stores |= instruction.opcode == "tcgen05" and instruction.words[1] != "ld"
    writes = () if stores or not named else named[0]
    sources = named if stores else named[1:]
    reads = tuple(register for operand in sources for register in operand)
    if instruction.guard is not None:
        reads += (instruction.guard[0], *writes)
    return reads, writes


def _action(step: Single, rates: Rates) -> Action | None:
    instruction = step.instruction
    words = instruction.words
    if words[:2] == ("tcgen05", "wait:st"):
        return Action("await_tensor_stores")
    unknown = (("mma", "sync"), ("tcgen05", "cp"), ("tcgen05", "shift"))
    if words[:2] in unknown:
        raise NotImplementedError(f"the timing of line {instruction.line}: {instruction.text}")
    if words[:2] == ("wgmma", "mma_async"):
        costs = of_product(instruction)
        return Action("product", costs["mma_flops"], costs["shared_mma_bytes"])
    if words[:2] == ("wgmma", "commit_group"):
        return Action("commit_products")
    if words[:2] == ("wgmma", "wait_group"):
        return Action("await_products", _immediate(instruction))
    if words[:2] == ("red", "relaxed") or (words[0] == "red" and "global" in words):
        return Action("reduce", _LANES * of_lane(instruction)["global_reduced_bytes"])
    if words[:4] == ("cp", "async", "bulk", "commit_group"):
        return Action("commit_stores")
    if words[:4] == ("cp", "async", "bulk", "wait_group"):
        return Action("await_stores", _immediate(instruction), float("read" not in words))
    if words[:3] in (("cp", "async", "ca"), ("cp", "async", "cg")):
        size = instruction.operands[2]
        assert isinstance(size, Immediate)
        return Action("gather", _LANES * size.value)
    if words[:4] == ("cp", "async", "mbarrier", "arrive"):
        return None
    if words[:2] == ("cp", "async") and "bulk" not in words:
        raise NotImplementedError(f"the timing of line {instruction.line}: {instruction.text}")
    return None


def _immediate(instruction: Instruction) -> int:
    (count,) = instruction.operands
    assert isinstance(count, Immediate)
    return count.value


def _scheduled(ops: list[Op]) -> tuple[Op, ...]:
    """Straight-line instructions in the order that keeps the longest chain of results going."""
    following: list[list[int]] = [[] for _ in ops]
    missing = [0] * len(ops)
    last_write: dict[Register, int] = {}
    last_reads: dict[Register, list[int]] = defaultdict(list)

    def after(before: int, number: int) -> None:
        if before != number and number not in following[before]:
            following[before].append(number)
            missing[number] += 1

    for number, op in enumerate(ops):
        for register in op.reads:
            if register in last_write:
                after(last_write[register], number)
            last_reads[register].append(number)
        for register in op.writes:
            for reader in last_reads.pop(register, ()):
                after(reader, number)
            if register in last_write:
                after(last_write[register], number)
            last_write[register] = number
    height = [0.0] * len(ops)
    for number in reversed(range(len(ops))):
        tallest = max((height[n] for n in following[number]), default=0.0)
        height[number] = tallest + max(ops[number].latency, ops[number].cycles)
    return tuple(
        dataclasses.replace(op, reads=_but_memory(op.reads), writes=_but_memory(op.writes))
        for op in _listed(ops, following, missing, height)
    )


def _but_memory(named: tuple[Register, ...]) -> tuple[Register, ...]:
    return tuple(register for register in named if register != _MEMORY)


def _listed(
    ops: list[Op], following: list[list[int]], missing: list[int], height: list[float]
) -> tuple[Op, ...]:
    """List scheduling for one warp: of what could issue first, the one with the longest chain."""
    ready_at = [0.0] * len(ops)
    ready = [number for number, count in enumerate(missing) if not count]
    units = [0.0] * len(UNITS)
    now, order = 0.0, []
    while ready:
        begin, _, number = min(
            (
                max(now, ready_at[n], units[ops[n].unit]) if ops[n].cycles else ready_at[n],
                -height[n],
                n,
            )
            for n in ready
        )
        ready.remove(number)
        op = ops[number]
        if op.cycles:
            units[op.unit], now = begin + op.cycles, begin + op.issue
        order.append(op)
        for other in following[number]:
            ready_at[other] = max(ready_at[other], begin + op.latency)
            missing[other] -= 1
            if not missing[other]:
                ready.append(other)
    return tuple(order)
