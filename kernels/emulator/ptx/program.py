"""Makes a parsed kernel ready to run: compiles straight-line arithmetic to Python, binds the rest.

The unit of execution is the step: a run of arithmetic, a branch, an exit, or one instruction with
an effect beyond its own registers. Branches know where their two sides meet again: at the nearest
step that every path to the exit passes (the immediate post-dominator).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from kernels.emulator.errors import PtxError
from kernels.emulator.ptx import alu, arithmetic
from kernels.emulator.ptx.entries import CONTROL, Bound, Cost, Effect
from kernels.emulator.ptx.syntax import (
    Immediate,
    Instruction,
    Kernel,
    Operand,
    Pair,
    Register,
    SpecialRegister,
    Symbol,
    Vector,
    registers,
)

LANES = 32
_EXTREMES_OF_THREE = 3
BRANCHES = ("bra", "ret", "exit")
"""Instructions that become a `Branch` or an `Exit`."""
VOLATILE = frozenset(
    {"%clock", "%clock_hi", "%clock64", "%globaltimer", "%globaltimer_lo", "%globaltimer_hi"}
)
"""Special registers that are read anew by every mov."""


@dataclasses.dataclass(frozen=True)
class Run:
    """Arithmetic instructions in a row. `full` is for warps with all lanes active."""

    instructions: tuple[Instruction, ...]
    costs: tuple[Cost, ...]
    full: Callable[[Any], None]
    masked: Callable[[Any, np.ndarray], None]
    reads: frozenset[Register]
    writes: frozenset[Register]


@dataclasses.dataclass(frozen=True)
class Branch:
    """A branch to step `target` for the lanes whose guard holds; both sides meet at step `meet`."""

    instruction: Instruction
    target: int
    meet: int


@dataclasses.dataclass(frozen=True)
class Exit:
    """ret, exit"""

    instruction: Instruction


@dataclasses.dataclass(frozen=True)
class Single:
    """One instruction with an effect."""

    instruction: Instruction
    cost: Cost
    effect: Effect
    reads: frozenset[Register]
    writes: frozenset[Register]


Step = Run | Branch | Exit | Single


def priced(step: Step) -> Iterator[tuple[Instruction, Cost]]:
    """The instructions of a step, each with its cost."""
    match step:
        case Run():
            yield from zip(step.instructions, step.costs, strict=True)
        case Single():
            yield step.instruction, step.cost
        case Branch() | Exit():
            yield step.instruction, CONTROL


@dataclasses.dataclass(frozen=True)
class Program:
    """Steps of a kernel; execution starts at the first. `shared` are offsets of its variables."""

    kernel: Kernel
    steps: tuple[Step, ...]
    shared: dict[str, int]

    @functools.cached_property
    def uses_tensor_memory(self) -> bool:
        """Whether there is any tcgen05 instruction."""
        return any(i.opcode == "tcgen05" for i in self.kernel.instructions)

    @functools.cached_property
    def fences_tensor_maps(self) -> bool:
        """Whether there is any fence.proxy.tensormap."""
        return any("tensormap:generic" in i.words for i in self.kernel.instructions)


def make_program(
    kernel: Kernel, symbols: dict[str, int], bind: Callable[[Instruction], Bound | None]
) -> Program:
    """Makes a kernel ready.

    Args:
      symbols: values of the names of shared variables and parameters.
      bind: makes an instruction ready that is not arithmetic; None if there is none like it.

    Raises:
      PtxError: an instruction is not implemented.
    """
    shared = {variable.name: symbols[variable.name] for variable in kernel.shared}
    compiler = _Compiler(symbols, frozenset(shared))
    pieces: list[_Piece] = []
    positions: dict[int, int] = {}
    for index, instruction in enumerate(kernel.instructions):
        piece = _piece(instruction, compiler, bind)
        starts = index == 0 or index in kernel.labels.values()
        if starts:
            positions[index] = len(pieces)
        if piece.calls and not starts and pieces and pieces[-1].calls:
            pieces[-1] = pieces[-1].followed_by(piece)
        else:
            pieces.append(piece)
    end = len(pieces)
    targets = {name: positions.get(index, end) for name, index in kernel.labels.items()}
    meets = _meeting_points(pieces, targets)
    steps = []
    for piece, meet in zip(pieces, meets, strict=True):
        first = piece.instructions[0]
        if piece.calls:
            steps.append(compiler.run(piece.instructions, piece.calls))
        elif piece.bound is not None:
            steps.append(Single(first, piece.bound.cost, piece.bound.effect, *_used(first)))
        elif first.opcode == "bra":
            steps.append(Branch(first, targets[_label(first)], meet))
        else:
            steps.append(Exit(first))
    return Program(kernel, tuple(steps), shared)


@dataclasses.dataclass(frozen=True)
class _Piece:
    """What becomes one step: arithmetic if it has calls, control flow if it has nothing."""

    instructions: tuple[Instruction, ...]
    calls: tuple[_Call, ...] = ()
    bound: Bound | None = None

    def followed_by(self, other: _Piece) -> _Piece:
        """Both runs of arithmetic as one."""
        return _Piece(self.instructions + other.instructions, self.calls + other.calls)


def _piece(
    instruction: Instruction,
    compiler: _Compiler,
    bind: Callable[[Instruction], Bound | None],
) -> _Piece:
    if instruction.opcode in BRANCHES:
        return _Piece((instruction,))
    call = compiler.call(instruction)
    if call is not None and instruction.guard is None:
        return _Piece((instruction,), calls=(call,))
    bound = bind(instruction) if call is None else Bound(compiler.guarded(call), call.cost)
    if bound is None:
        raise PtxError(f"line {instruction.line}: not implemented: {instruction.text}")
    return _Piece((instruction,), bound=bound)


def _is_sink(operand: Operand) -> bool:
    """Whether a half is not wanted: the underscore in place of a register."""
    return isinstance(operand, Symbol) and operand.name == "_"


def _label(branch: Instruction) -> str:
    (target,) = branch.operands
    assert isinstance(target, Symbol)
    return target.name


def _used(instruction: Instruction) -> tuple[frozenset[Register], frozenset[Register]]:
    """Registers that an instruction may read, and those that it may write."""
    named = [frozenset(registers(operand)) for operand in instruction.operands]
    everything = frozenset[Register]().union(*named)
    if instruction.guard is not None:
        everything |= {instruction.guard[0]}
    first = instruction.operands[0] if instruction.operands else None
    writes = named[0] if isinstance(first, Register | Vector | Pair) else frozenset()
    return everything, frozenset(writes)


def _meeting_points(pieces: list[_Piece], targets: dict[str, int]) -> list[int]:
    """Immediate post-dominator of every piece; the end is the number of pieces."""
    end = len(pieces)
    following: list[list[int]] = []
    for position, piece in enumerate(pieces):
        first = piece.instructions[0]
        falls = [] if first.guard is None else [position + 1]
        if piece.calls or piece.bound is not None:
            following.append([position + 1])
        else:
            target = targets[_label(first)] if first.opcode == "bra" else end
            following.append([target, *falls])
    meets: list[int | None] = [None] * end + [end]
    order = _postorder(following, end)
    rank = {node: i for i, node in enumerate(order)}

    def meet(a: int, b: int) -> int:
        while a != b:
            while rank[a] > rank[b]:
                a = _known(meets[a])
            while rank[b] > rank[a]:
                b = _known(meets[b])
        return a

    changed = True
    while changed:
        changed = False
        for node in order[1:]:
            ready = [n for n in following[node] if meets[n] is not None]
            new = functools.reduce(meet, ready)
            changed |= meets[node] != new
            meets[node] = new
    return [end if m is None else m for m in meets[:-1]]


def _known(node: int | None) -> int:
    assert node is not None
    return node


def _postorder(following: list[list[int]], end: int) -> list[int]:
    """Pieces that can reach the end, the end first: reverse postorder of the reversed graph."""
    preceding: list[list[int]] = [[] for _ in range(end + 1)]
    for node, nexts in enumerate(following):
        for n in nexts:
            preceding[n].append(node)
    seen, order = {end}, []
    stack = [(end, iter(preceding[end]))]
    while stack:
        node, nodes = stack[-1]
        fresh = next((n for n in nodes if n not in seen), None)
        if fresh is None:
            order.append(node)
            stack.pop()
        else:
            seen.add(fresh)
            stack.append((fresh, iter(preceding[fresh])))
    return order[::-1]


@dataclasses.dataclass(frozen=True)
class _Call:
    """An arithmetic instruction: its function, and where its sources and results are, as text."""

    function: str
    cost: Cost
    sources: tuple[str, ...]
    results: tuple[str, ...]
    views: tuple[str, ...]
    reads: frozenset[Register]
    writes: frozenset[Register]


class _Compiler:
    """Turns arithmetic into Python text and that into functions."""

    def __init__(self, symbols: dict[str, int], shared: frozenset[str]):
        self._symbols, self._shared = symbols, shared
        self._names: dict[Any, str] = {}
        self._namespace: dict[str, Any] = {"copyto": np.copyto}
        self._constants: dict[tuple[str, int], str] = {}
        for view, dtype in alu.DTYPES.items():
            for i in range(2):
                self._namespace[f"t{i}_{view}"] = np.empty(LANES, dtype)
            self._namespace[f"sink_{view}"] = np.empty(LANES, dtype)

    def call(self, instruction: Instruction) -> _Call | None:
        """The call of an arithmetic instruction, or None if it is none."""
        key, results, sources = _arrange(instruction)
        if any(isinstance(x, SpecialRegister) and x.name in VOLATILE for x in sources):
            return None
        operation = arithmetic.OPERATIONS.get(key)
        if operation is None:
            return None
        if len(results) != len(operation.results) or len(sources) != len(operation.sources):
            raise PtxError(f"line {instruction.line}: wrong operand count: {instruction.text}")
        unpacks = key.startswith("unpack")
        views = [
            view if unpacks and _is_sink(operand) else self._view(instruction, operand, view)
            for operand, view in zip(results, operation.results, strict=True)
        ]
        texts = [
            self._source(instruction, operand, view)
            for operand, view in zip(sources, operation.sources, strict=True)
        ]
        function = operation.function
        if operation.function in (alu.shift_left, alu.shift_right):
            function, texts[1] = self._shift(instruction, operation, sources, texts[1])
        return _Call(
            self._function(function),
            operation.cost,
            tuple(texts),
            tuple(
                f"{view}[{x.index}]" if isinstance(x, Register) else f"sink_{view}"
                for view, x in zip(views, results, strict=True)
            ),
            tuple(views),
            frozenset(r for operand in sources for r in registers(operand)),
            frozenset(operand for operand in results if isinstance(operand, Register)),
        )

    def _shift(
        self, instruction: Instruction, operation: alu.Operation, sources: list[Operand], text: str
    ) -> tuple[Any, str]:
        """A shift by a constant that is less than the width needs no checks."""
        view = operation.sources[0]
        if not isinstance(sources[1], Immediate) or sources[1].value >= int(view[1:]):
            return operation.function, text
        plain = np.left_shift if operation.function is alu.shift_left else np.right_shift
        return plain, self._source(instruction, sources[1], view)

    def _view(self, instruction: Instruction, operand: Operand, view: str) -> str:
        if not isinstance(operand, Register):
            raise PtxError(f"line {instruction.line}: a register is expected: {instruction.text}")
        if view == "pred" or operand.bank == "pred":
            fits = view == operand.bank
        else:
            bits = int(operand.bank[1:])
            fits = int(view[1:]) == bits or (instruction.opcode == "cvt" and view[0] in "us")
            view = f"{view[0]}{bits}"
        if not fits:
            raise PtxError(f"line {instruction.line}: {operand.name} does not fit {view}")
        return view

    def _source(self, instruction: Instruction, operand: Operand, view: str) -> str:
        if isinstance(operand, Register):
            return f"{self._view(instruction, operand, view)}[{operand.index}]"
        if isinstance(operand, SpecialRegister):
            return f"special[{operand.name!r}]"
        if isinstance(operand, Symbol) and operand.name in self._shared:
            return f"special['&{operand.name}']"
        if isinstance(operand, Symbol) and operand.name in self._symbols:
            operand = Immediate(self._symbols[operand.name])
        if not isinstance(operand, Immediate):
            raise PtxError(f"line {instruction.line}: unknown operand: {instruction.text}")
        return self._constant(view, operand)

    def _constant(self, view: str, operand: Immediate) -> str:
        key = (view, operand.value)
        if key not in self._constants:
            dtype = alu.DTYPES[view]
            if view == "pred":
                value = np.full(LANES, bool(operand.value))
            else:
                unsigned = np.dtype(f"uint{8 * dtype.itemsize}")
                bits = operand.value & ((1 << (8 * dtype.itemsize)) - 1)
                value = np.full(LANES, bits, unsigned).view(dtype)
            value.flags.writeable = False
            self._constants[key] = f"k{len(self._constants)}"
            self._namespace[self._constants[key]] = value
        return self._constants[key]

    def _function(self, function: Any) -> str:
        if function not in self._names:
            self._names[function] = f"op{len(self._names)}"
            self._namespace[self._names[function]] = function
        return self._names[function]

    def run(self, instructions: tuple[Instruction, ...], calls: tuple[_Call, ...]) -> Run:
        """A run; its two functions are compiled when they are first called."""

        def later(masked: bool) -> Callable[..., None]:
            compiled: list[Callable[..., None]] = []

            def first(*arguments: Any) -> None:
                if not compiled:
                    compiled.append(self._compile(calls, masked))
                compiled[0](*arguments)

            return first

        return Run(
            instructions,
            tuple(call.cost for call in calls),
            later(False),
            later(True),
            frozenset[Register]().union(*(call.reads for call in calls)),
            frozenset[Register]().union(*(call.writes for call in calls)),
        )

    def guarded(self, call: _Call) -> Effect:
        """One arithmetic instruction under a guard."""
        masked = self._compile((call,), True)

        def effect(warp: Any, mask: np.ndarray) -> None:
            masked(warp, mask)

        return effect

    def _compile(self, calls: tuple[_Call, ...], masked: bool) -> Callable[..., None]:
        lines = [f"def run(w{', m' if masked else ''}):"]
        lines += [f" {view} = w.{view}" for view in (*alu.DTYPES, "special")]
        for call in calls:
            if masked:
                held = [f"t{i}_{view}" for i, view in enumerate(call.views)]
                lines.append(f" {call.function}({', '.join((*call.sources, *held))})")
                lines += [
                    f" copyto({result}, {name}, where=m)"
                    for result, name in zip(call.results, held, strict=True)
                ]
            else:
                arguments = ", ".join((*call.sources, *call.results))
                lines.append(f" {call.function}({arguments})")
        namespace = self._namespace
        exec("\n".join(lines), namespace)
        return namespace["run"]


def _arrange(instruction: Instruction) -> tuple[str, list[Operand], list[Operand]]:
    """The table's key of an instruction, its results and its sources."""
    mnemonic, operands = instruction.mnemonic, list(instruction.operands)
    if not operands:
        return mnemonic, [], []
    results, sources = operands[:1], operands[1:]
    if instruction.opcode in ("min", "max") and len(sources) == _EXTREMES_OF_THREE:
        return f"three {mnemonic}", results, sources
    if instruction.opcode == "mov" and isinstance(results[0], Vector):
        return mnemonic.replace("mov", "unpack"), list(results[0].elements), sources
    if instruction.opcode == "mov" and isinstance(sources[0], Vector):
        return mnemonic.replace("mov", "pack"), results, list(sources[0].elements)
    return mnemonic, results, sources
