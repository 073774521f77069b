"""Compiles a program's steps into what they ask of an SM: the first half of a timing estimate.

An instruction's own demand stands in its entry. This module adds what is general: what a pipe's
rates make of a demand, and the order in which a warp issues straight-line instructions, which are
ordered as a compiler would. Register moves and parameter loads are taken to be free; register banks
and bank conflicts of shared memory are not modelled.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping, Set

from kernels.emulator.ptx.entries import FREE, Action, Cost, Demand, Pipe
from kernels.emulator.ptx.program import Branch, Exit, Program, Run, Single, Step, priced
from kernels.emulator.ptx.syntax import Immediate, Instruction, Register, registers
from kernels.emulator.timing.rates import Rates

PARTITIONS = 4
_LANES = 32
_WORD_BYTES = 4
UNITS = (
    *("fma", "alu", "multiply", "special", "convert", "shuffle", "memory", "control"),
    "tensor memory",
)
TENSOR_MEMORY = UNITS.index("tensor memory")
_NARROW = ("alu", "convert")
"""Units of 16 lanes."""
_MEMORY = Register("memory", 0, "memory")
"""A pseudo register, through which loads do not pass stores when a warp's order is chosen."""


@dataclasses.dataclass(frozen=True)
class Route:
    """What a pipe means: the unit, how many lanes it serves in a cycle, and the latency."""

    unit: str
    lanes: Callable[[Rates], float]
    latency: Callable[[Rates], float]


PIPES: dict[Pipe, Route] = {
    "fma": Route("fma", lambda r: r.fma_lanes, lambda r: r.arithmetic_latency),
    "alu": Route("alu", lambda r: r.alu_lanes, lambda r: r.arithmetic_latency),
    "multiply": Route("multiply", lambda r: r.multiply_lanes, lambda r: r.arithmetic_latency),
    "special": Route("special", lambda r: r.special_lanes, lambda r: r.special_latency),
    "convert": Route("convert", lambda r: r.convert_lanes, lambda r: r.convert_latency),
    "shuffle": Route("shuffle", lambda r: r.shuffle_lanes, lambda r: r.shuffle_latency),
    "shared memory": Route("memory", lambda r: r.memory_lanes, lambda r: r.shared_latency),
    "global memory": Route("memory", lambda r: r.memory_lanes, lambda r: r.global_latency),
    "tensor memory": Route(
        "tensor memory",
        lambda r: r.tensor_memory_bytes / PARTITIONS / _WORD_BYTES,
        lambda r: r.tensor_memory_latency,
    ),
    "control": Route("control", lambda r: _LANES, lambda r: 1),
    "proxy fence": Route("control", lambda r: _LANES, lambda r: r.proxy_fence_latency),
}


@dataclasses.dataclass(frozen=True)
class Op:
    """One instruction for a warp.

    Attributes:
      cycles: for which it occupies its unit, 0 if it is free.
      latency: cycles until its results, or where `blocks` until the warp's next instruction.
      issue: cycles for which it occupies the issue slot.
      shared_bytes: bytes of shared memory that it reads or writes.
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
class Plan:
    """A step: its instructions in the order in which they issue, then its action."""

    ops: tuple[Op, ...]
    action: Action | None = None


def make_plans(program: Program, rates: Rates, spread: Set[int]) -> list[Plan]:
    """What every step of a program asks of an SM.

    `spread` are lines of loads from shared memory whose lanes had several addresses.

    Steps in a row that neither branch nor have an action are one to the compiler: their
    instructions are scheduled together, as the first of them. A shift and the addition of its
    result are one multiplication and addition (ptxas 13.0 makes IMAD of both).
    """
    fused = _scaled_sums(program)
    plans = [_plan(step, rates, spread, fused) for step in program.steps]
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
    return isinstance(step, Single) and plan.action is None and step.cost.demand.movable


def _scaled_sums(program: Program) -> dict[int, Demand]:
    """What scales and the sums of their results ask together, by the instruction's id."""
    listed = [pair for step in program.steps for pair in priced(step)]
    readers: dict[Register, list[tuple[Instruction, Cost]]] = defaultdict(list)
    for instruction, cost in listed:
        for operand in instruction.operands[1:]:
            for register in registers(operand):
                readers[register].append((instruction, cost))
    found: dict[int, Demand] = {}
    for scale, cost in listed:
        is_scale = cost.demand.scaled_sum == "scale"
        if is_scale and isinstance(scale.operands[2], Immediate):
            (result,) = registers(scale.operands[0])
            using = readers[result]
            if len(using) == 1 and using[0][1].demand.scaled_sum == "sum":
                found |= {id(scale): FREE, id(using[0][0]): Demand("multiply")}
    return found


def _plan(step: Step, rates: Rates, spread: Set[int], fused: Mapping[int, Demand]) -> Plan:
    if isinstance(step, Branch | Exit):
        guard = () if step.instruction.guard is None else (step.instruction.guard[0],)
        return Plan((Op(UNITS.index("control"), 1, 1, guard, ()),))
    ops = tuple(
        _op(instruction, fused.get(id(instruction), cost.demand), rates, spread)
        for instruction, cost in priced(step)
    )
    return Plan(ops, step.cost.demand.action if isinstance(step, Single) else None)


def _op(instruction: Instruction, demand: Demand, rates: Rates, spread: Set[int]) -> Op:
    reads, writes = _registers(instruction, demand)
    if demand.pipe == "free":
        return Op(UNITS.index("control"), 0, 0, reads, writes)
    route = PIPES.get(demand.pipe)
    lanes = 0 if route is None else route.lanes(rates)
    if route is None or not lanes:
        raise NotImplementedError(f"the timing of line {instruction.line}: {instruction.text}")
    shared = demand.shared_bytes
    if demand.broadcast and shared and instruction.line not in spread:
        together = shared * rates.shared_bytes / rates.one_address_bytes
        shared = round(max(together, rates.shared_bytes))
    results = demand.issues if demand.results is None else demand.results
    cycles, latency = results * _LANES / lanes, route.latency(rates) + (results - 1)
    if shared:  # the four sub-partitions share the port
        cycles = max(cycles, shared / (rates.shared_bytes / PARTITIONS) / PARTITIONS)
    issue = demand.issues * (rates.narrow_issue if route.unit in _NARROW else 1.0)
    unit = UNITS.index(route.unit)
    return Op(unit, cycles, latency, reads, writes, shared, issue, demand.blocks)


def _registers(
    instruction: Instruction, demand: Demand
) -> tuple[tuple[Register, ...], tuple[Register, ...]]:
    """Registers that an instruction waits for, and those that others wait for."""
    if demand.operands == "untracked":
        return (), ()
    named = [tuple(registers(operand)) for operand in instruction.operands]
    results = demand.operands == "result first"
    writes = named[0] if results and named else ()
    reads = tuple(register for operand in named[results:] for register in operand)
    if instruction.guard is not None:
        reads += (instruction.guard[0], *writes)
    if demand.memory == "reads":
        reads += (_MEMORY,)
    elif demand.memory == "writes":
        writes += (_MEMORY,)
    return reads, writes


def _scheduled(ops: list[Op]) -> tuple[Op, ...]:
    """Orders straight-line instructions so that the longest chain of results goes on."""
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
    """List scheduling for one warp: the earliest issues next, among equals the longest chain."""
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
