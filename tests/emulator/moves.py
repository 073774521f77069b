"""Where a synchronising instruction can move: over its neighbours in a kernel's text.

A neighbour is what comes before or after it in its basic block, arithmetic left out: moving over
arithmetic changes no order. What moves, and what is moved over, is an item:

- a statement,
- a scope of inline assembly, such as a wait with its loop,
- instructions that a branch skips, such as an arrival of an elected lane with that branch,
- a loop of one block, such as the one that clears padding.

Registers stay defined: arithmetic that the moving item needs moves with it, and where it needs the
neighbour's result, or would change the neighbour's operands, there is no move.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Iterator, Sequence

from kernels.emulator.instructions import binding
from kernels.emulator.ptx.parser import parse
from kernels.emulator.ptx.syntax import Address, Instruction, Register, Symbol, registers

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_BODY = re.compile(r"\.entry\b[^{]*\{")
_ELEMENT = re.compile(r"\s*(?:([$\w]+)\s*:(?!:)|([{}])|([^;{}][^;]*);)")
_DIRECTIVES = (".reg", ".pragma", ".local")

_ASYNCHRONOUS_CLASSES = frozenset({"matrix product", "TMA", "tensor memory"})
_ORDERED_CLASSES = (
    frozenset(
        {f"{space} memory" for space in ("global", "shared", "local", "generic")}
        | {"synchronisation"}
    )
    | _ASYNCHRONOUS_CLASSES
)
_ORDERED_OPCODES = frozenset({"griddepcontrol", "clusterlaunchcontrol", "tcgen05"})
_UNORDERED_OPCODES = frozenset({"prefetch", "nanosleep"})
_MOVING = re.compile(
    r"(bar|barrier|fence|membar|mbarrier|griddepcontrol|clusterlaunchcontrol|atom)\."
    r"|wgmma\.(fence|commit_group|wait_group)|cp\.async\.(bulk\.)?(commit_group|wait_group)"
    r"|st\.async|red\.(release|async)|ld\.acquire"
    r"|tcgen05\.(alloc|dealloc|relinquish_alloc_permit|commit|fence|wait)"
)
_WITHOUT_RESULT = frozenset({"bar", "barrier", "bra", "nanosleep", "setmaxnreg", "tcgen05"})
"""Opcodes whose first operand is read if it is a register."""
_OF_REGISTERS = re.compile(r"wgmma\.(fence|wait_group)|tcgen05\.wait")
"""Instructions that order accesses to registers: where none is left, arithmetic is a neighbour."""

_WAITS = re.compile(
    r"mbarrier\.(try|test)_wait|barrier\.cluster\.wait|griddepcontrol\.wait|ld\.acquire"
)
_BEGINS = re.compile(r"tcgen05\.fence::after")
"""Instructions that concern operations which the thread issues later, after an earlier wait."""
_ARRIVALS = re.compile(
    r"mbarrier\.arrive|barrier\.cluster\.arrive|bar\.arrive|griddepcontrol\.launch"
    r"|red\.(release|async)|st\.async"
)
_ENDS = re.compile(
    r"tcgen05\.(commit|fence::before)|(wgmma|cp\.async|cp\.async\.bulk)\.commit_group"
)
"""Instructions that concern operations which the thread has issued before them."""
_OF_ISSUED = re.compile(r"(wgmma|cp\.async|cp\.async\.bulk)\.wait_group|tcgen05\.wait")
"""Waits for asynchronous operations that the thread itself has issued."""
_PROXY_FENCE = re.compile(r"fence\.proxy\.async")
_COMMUTING = (
    (re.compile(r"mbarrier\.init"), re.compile(r"mbarrier\.init")),
    (re.compile(r"tcgen05\.commit"), re.compile(r"tcgen05\.commit")),
    (_WAITS, _WAITS),
    (
        re.compile(r"wgmma\.fence|(wgmma|cp\.async|cp\.async\.bulk)\.commit_group"),
        re.compile(r"bar\.|mbarrier\.|fence\.|wgmma\.fence|st\.|stmatrix\."),
    ),
)
"""Neighbours whose order nothing in the emulator can tell: initialisations of two mbarriers; two
commits, which arrive for the same products; waits, after both of which all that either brings is
known; wgmma.fence is about registers alone, a group about what its own thread has issued."""


@dataclasses.dataclass(frozen=True)
class Item:
    """Text that stays together, from `start` to `end`, and all instructions in it."""

    start: int
    end: int
    instructions: tuple[Instruction, ...]

    @functools.cached_property
    def ordered(self) -> tuple[Instruction, ...]:
        """The instructions whose place among others may matter."""
        return tuple(instruction for instruction in self.instructions if _is_ordered(instruction))

    @functools.cached_property
    def moves(self) -> bool:
        """Whether it is one synchronising instruction, with what that needs."""
        return len(self.ordered) == 1 and _MOVING.match(self.ordered[0].mnemonic) is not None

    @functools.cached_property
    def used(self) -> frozenset[Register]:
        """Registers that it names."""
        return frozenset(register for i in self.instructions for register in _used(i))

    @functools.cached_property
    def written(self) -> frozenset[Register]:
        """Registers that it may write."""
        return frozenset(register for i in self.instructions for register in _written(i))

    def depends(self, other: Item) -> bool:
        """Whether registers hold the two in their order."""
        return not (self.written.isdisjoint(other.used) and other.written.isdisjoint(self.used))


@dataclasses.dataclass(frozen=True)
class Move:
    """An item that moves up or down over a neighbour to a place in the text.

    Attributes:
      over: the neighbour; None for arithmetic alone.
      companions: the arithmetic that moves with the item, in order.
    """

    item: Item
    over: Item | None
    up: bool
    companions: tuple[Item, ...]
    place: int

    @property
    def instruction(self) -> Instruction:
        """The one that moves."""
        return self.item.ordered[0]

    @property
    def change(self) -> str:
        """The direction, and the instruction of the neighbour that is passed first."""
        passed = "arithmetic"
        if self.over is not None:
            passed = self.over.ordered[-1 if self.up else 0].mnemonic
        return f"moved {'up' if self.up else 'down'} over {passed}"

    def text(self, ptx: str) -> str:
        """The kernel's text after the move; the other lines keep their numbers."""
        moved = [*self.companions, self.item] if self.up else [self.item, *self.companions]
        inserted = "".join(f" {' '.join(_plain(ptx[m.start : m.end]).split())} " for m in moved)
        edits = [(m.start, m.end, re.sub(r"[^\n]", "", ptx[m.start : m.end])) for m in moved]
        edits.append((self.place, self.place, inserted))
        for start, end, new in sorted(edits, reverse=True):
            ptx = ptx[:start] + new + ptx[end:]
        return ptx


def moves(ptx: str) -> Iterator[Move]:
    """Every move of a kernel's synchronising instructions, each over its two neighbours.

    Of two that are neighbours of each other only the first moves over the second, which is the
    same. Moves that take no order away, but may delay something, are left out.
    """
    for block in blocks(ptx):
        for at, item in enumerate(block):
            if item.moves:
                found = (_move(block, at, -1), _move(block, at, 1))
                yield from (move for move in found if move is not None)


def _move(block: Sequence[Item], at: int, step: int) -> Move | None:
    item, place, up = block[at], at + step, step < 0
    companions: list[Item] = []
    while 0 <= place < len(block) and not block[place].ordered:
        if any(block[place].depends(other) for other in (item, *companions)):
            companions.append(block[place])
        place += step
    companions = companions[::step]
    if not 0 <= place < len(block):
        last = block[place - step]
        if last is item or companions or not _OF_REGISTERS.match(item.ordered[0].mnemonic):
            return None
        return Move(item, None, up, (), last.start if up else last.end)
    over = block[place]
    if any(over.depends(other) for other in (item, *companions)):
        return None
    if _only_delays(*((over, item) if up else (item, over))):
        return None
    if up and over.moves and _move(block, place, 1) is not None:
        return None
    return Move(item, over, up, tuple(companions), over.start if up else over.end)


def _only_delays(first: Item, second: Item) -> bool:
    """Whether two items that change places are in no order, or in more of it than before.

    So are those of _COMMUTING; a wait before memory accesses and asynchronous operations, an
    arrival, a commit or a proxy fence after them; an arrival after a wait for the own operations.
    """
    names, others = _mnemonics(first), _mnemonics(second)
    if any(
        _all(one, names) and _all(other, others)
        for pair in _COMMUTING
        for one, other in (pair, pair[::-1])
    ):
        return True
    if not any(map(_MOVING.match, names)):
        waits = _all(_WAITS, others) or _all(_BEGINS, others)
        return waits or (_all(_OF_ISSUED, others) and not _issues(first))
    if not any(map(_MOVING.match, others)):
        arrives = _all(_ARRIVALS, names) or _all(_ENDS, names)
        return arrives or (_all(_PROXY_FENCE, names) and not _issues(second))
    return _all(_ARRIVALS, names) and _all(_OF_ISSUED, others)


def _mnemonics(item: Item) -> list[str]:
    return [instruction.mnemonic for instruction in item.ordered]


def _all(pattern: re.Pattern[str], names: Sequence[str]) -> bool:
    return all(map(pattern.match, names))


def _issues(item: Item) -> bool:
    """Whether there are asynchronous operations in it."""
    return any(binding.kind_of(i) in _ASYNCHRONOUS_CLASSES for i in item.ordered)


@dataclasses.dataclass(frozen=True)
class _Edge:
    """Where a basic block ends: a label, a branch to it, or an exit, which has none."""

    start: int
    end: int
    label: str
    instruction: Instruction | None = None

    def encloses_with(self, other: _Edge) -> bool:
        """Whether one is a label and the other a branch to it that may fall through."""
        branches = [i for i in (self.instruction, other.instruction) if i is not None]
        guarded = len(branches) == 1 and branches[0].guard is not None
        return guarded and self.label == other.label != ""


def blocks(ptx: str) -> Iterator[tuple[Item, ...]]:
    """The basic blocks of a module's only kernel; also those inside of items."""
    plain = _plain(ptx)
    body = _BODY.search(plain)
    assert body is not None
    (kernel,) = parse(ptx).kernels.values()
    reader = _Reader(plain, body.end(), iter(kernel.instructions))
    elements = reader.scope()
    assert next(reader.instructions, None) is None
    branches = Counter(e.label for e in elements if isinstance(e, _Edge) and e.instruction)
    yield from reader.inner
    while (region := _innermost(elements, branches)) is not None:
        first, last = region
        inside = tuple(e for e in elements[first + 1 : last] if isinstance(e, Item))
        yield inside
        edges = (elements[first], elements[last])
        instructions = [e.instruction for e in edges if isinstance(e, _Edge) and e.instruction]
        instructions += [instruction for item in inside for instruction in item.instructions]
        elements[first : last + 1] = [Item(edges[0].start, edges[1].end, tuple(instructions))]
    yield from _straight(elements)


def _innermost(elements: Sequence[Item | _Edge], branches: Counter[str]) -> tuple[int, int] | None:
    """Places of a label and its only branch between which there are items alone."""
    before = None
    for place, edge in enumerate(elements):
        if isinstance(edge, Item):
            continue
        if before is not None and branches[edge.label] == 1:
            first = elements[before]
            if isinstance(first, _Edge) and first.encloses_with(edge):
                return before, place
        before = place
    return None


def _straight(elements: Sequence[Item | _Edge]) -> Iterator[tuple[Item, ...]]:
    """Runs of items between edges."""
    block: list[Item] = []
    for element in elements:
        if isinstance(element, Item):
            block.append(element)
        else:
            yield tuple(block)
            block = []
    yield tuple(block)


class _Reader:
    """Reads a kernel's elements, which it pairs with the parsed instructions.

    Attributes:
      inner: the blocks of scopes that it has met.
    """

    def __init__(self, text: str, at: int, instructions: Iterator[Instruction]):
        self._text, self._at, self.instructions = text, at, instructions
        self.inner: list[tuple[Item, ...]] = []

    def scope(self) -> list[Item | _Edge]:
        """The elements up to the brace that closes the scope."""
        elements: list[Item | _Edge] = []
        while True:
            match = _ELEMENT.match(self._text, self._at)
            assert match is not None, self._text[self._at : self._at + 80]
            self._at = match.end()
            label, brace, statement = match.groups()
            if brace == "}":
                return elements
            if brace:
                elements.append(self._whole(match.start(2)))
            elif label:
                elements.append(_Edge(match.start(1), match.end(), label))
            elif not statement.startswith(_DIRECTIVES):
                elements.append(self._statement(match.start(3), match.end()))

    def _whole(self, start: int) -> Item:
        elements = self.scope()
        self.inner += _straight(elements)
        instructions = []
        for element in elements:
            if isinstance(element, Item):
                instructions += element.instructions
            elif element.instruction is not None:
                instructions.append(element.instruction)
        return Item(start, self._at, tuple(instructions))

    def _statement(self, start: int, end: int) -> Item | _Edge:
        instruction = next(self.instructions)
        if instruction.opcode in ("ret", "exit"):
            return _Edge(start, end, "", instruction)
        if instruction.opcode == "bra":
            (target,) = instruction.operands
            assert isinstance(target, Symbol)
            return _Edge(start, end, target.name.split("@")[0], instruction)
        return Item(start, end, (instruction,))


def _is_ordered(instruction: Instruction) -> bool:
    """Whether it accesses memory, is asynchronous or synchronises."""
    if instruction.opcode in _UNORDERED_OPCODES:
        return False
    kind = binding.kind_of(instruction)
    return kind in _ORDERED_CLASSES or instruction.opcode in _ORDERED_OPCODES


def _used(instruction: Instruction) -> Iterator[Register]:
    for operand in instruction.operands:
        yield from registers(operand)
    if instruction.guard is not None:
        yield instruction.guard[0]


def _written(instruction: Instruction) -> Iterator[Register]:
    for operand in instruction.operands[:1]:
        if isinstance(operand, Register) and instruction.opcode in _WITHOUT_RESULT:
            return
        if not isinstance(operand, Address):
            yield from registers(operand)


def _plain(text: str) -> str:
    """The text with comments blanked."""
    return _COMMENT.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
