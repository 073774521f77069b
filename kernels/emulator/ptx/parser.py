"""PTX text -> syntax.Module.

A statement ends at `;`, or at a brace that opens or closes a scope. Scopes matter: inline assembly
declares registers and labels of its own, whose names come back many times.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

from kernels.emulator.errors import PtxError
from kernels.emulator.ptx.syntax import (
    Address,
    Immediate,
    Instruction,
    Kernel,
    Module,
    Operand,
    Pair,
    Parameter,
    Register,
    SharedVariable,
    SpecialRegister,
    Symbol,
    Variable,
    Vector,
)

VERSIONS = ((8, 0), (9, 9))
TARGETS = ("sm_90a", "sm_100a", "sm_100f", "sm_103a", "sm_103f")

_FAMILIES = {"wgmma": ("sm_90a",), "tcgen05": TARGETS[1:]}
"""Instructions that only some targets have."""

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_HEADER = re.compile(r"\s*\.version\s+(\d+)\.(\d+)\s*\.target\s+([\w, ]+?)\s*\.address_size\s+64\b")
_ENTRY = re.compile(r"(?:\.visible\s+)?\.entry\s+([\w$]+)\s*\((.*?)\)\s*([^{]*)\{", re.DOTALL)
_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.([bsuf]\d+)(?:\s+\.ptr[^,]*?)?\s+([\w$]+)(?:\[(\d+)\])?$"
)
_SHARED = re.compile(r"(?:\.extern\s+)?\.shared\s+\.align\s+(\d+)\s+\.b8\s+([\w$]+)\[(\d*)\]\s*;")
_LOCAL = re.compile(r"\.local\s+\.align\s+(\d+)\s+\.b8\s+([\w$]+)\[(\d+)\]$")
_VARIABLE = re.compile(
    r"^\s*(?:\.visible\s+|\.extern\s+)?\.(global|const)\s+(?:\.align\s+(\d+)\s+)?\.([bsuf]\d+)\s+"
    r"([\w$]+)(?:\[(\d*)\])?\s*(?:=\s*(\{[^}]*\}|[^;]+))?;",
    re.MULTILINE,
)
_VARIABLES_BASE = 0x7C00_0000_0000
_REQNTID = re.compile(r"\.reqntid\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?")
_REQNCTAPERCLUSTER = re.compile(r"\.reqnctapercluster\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?")
_MAXCLUSTERRANK = re.compile(r"\.maxclusterrank\s+(\d+)")
_MINNCTAPERSM = re.compile(r"\.minnctapersm\s+(\d+)")
_REG = re.compile(r"\.reg\s+\.(\w+)\s+(.*)", re.DOTALL)
_REG_NAME = re.compile(r"([%\w$]+?)(?:<(\d+)>)?$")
_LABEL = re.compile(r"\s*([$\w]+)\s*:(?!:)")
_INSTRUCTION = re.compile(r"(?:@(!?)([%\w$]+)\s+)?([a-z][\w.:]*?)\.?(?:\s+(.*))?$", re.DOTALL)
_TOKEN = re.compile(
    r"\s*(0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|-?0[xX][0-9a-fA-F]+U?|-?\d+U?"
    r"|%?[A-Za-z_$][\w$]*(?:\.[xyzw])?|%[\w.]+|[][{},+|!])"
)
_SPECIAL = re.compile(
    r"%laneid|%cluster_n?ctarank|%is_explicit_cluster|%n?warpid|%n?smid|%gridid"
    r"|%lanemask_(eq|le|lt|ge|gt)|%clock(_hi|64)?|%globaltimer(_lo|_hi)?"
    r"|%(dynamic|total|aggr)_smem_size"
    r"|%(tid|ntid|ctaid|nctaid|clusterid|nclusterid|cluster_ctaid|cluster_nctaid)\.[xyz]"
)
_PORTABLE_CLUSTER = 8
_BANKS = {"pred": "pred", "b128": "b128", "b8": "b16", "s8": "b16", "u8": "b16"} | {
    f"{kind}{bits}": f"b{bits}" for kind in "busf" for bits in (16, 32, 64)
}


@functools.lru_cache(maxsize=16)
def parse(text: str) -> Module:
    """Parses a module.

    Raises:
      PtxError: it is not PTX, or of another version or target, or uses unknown syntax.
    """
    text = _COMMENT.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    header = _HEADER.match(text)
    if header is None:
        raise PtxError("not PTX: .version, .target and .address_size 64 expected at its start")
    version = (int(header[1]), int(header[2]))
    if not VERSIONS[0] <= version <= VERSIONS[1]:
        raise PtxError(f"PTX version {version[0]}.{version[1]} is not supported")
    if header[3] not in TARGETS:
        raise PtxError(f".target {header[3]}: the emulator runs {', '.join(TARGETS)}")
    shared = tuple(
        SharedVariable(name, int(alignment), int(size) if size else None)
        for alignment, name, size in _SHARED.findall(text)
    )
    variables = tuple(_variables(text))
    kernels = {}
    for entry in _ENTRY.finditer(text):
        kernel = dataclasses.replace(_kernel(text, entry, shared), variables=variables)
        _check_target(kernel, header[3])
        kernels[kernel.name] = kernel
    return Module(version, header[3], kernels)


def _check_target(kernel: Kernel, target: str) -> None:
    for instruction in kernel.instructions:
        if target not in _FAMILIES.get(instruction.opcode, (target,)):
            raise PtxError(f"line {instruction.line}: {target} has no {instruction.text}")


def _kernel(text: str, entry: re.Match[str], shared: tuple[SharedVariable, ...]) -> Kernel:
    body = _Body(text, entry.end())
    most_ctas = _MAXCLUSTERRANK.search(entry[3])
    least_ctas = _MINNCTAPERSM.search(entry[3])
    return Kernel(
        name=entry[1],
        parameters=tuple(_parameter(part) for part in entry[2].split(",") if part.strip()),
        shared=shared,
        instructions=tuple(body.instructions),
        labels=body.labels,
        registers=body.registers,
        local=tuple(body.local),
        block=_sizes(_REQNTID.search(entry[3])),
        cluster=_sizes(_REQNCTAPERCLUSTER.search(entry[3])),
        explicit_cluster=".explicitcluster" in entry[3],
        most_ctas=_PORTABLE_CLUSTER if most_ctas is None else int(most_ctas[1]),
        least_ctas=1 if least_ctas is None else int(least_ctas[1]),
    )


def _variables(text: str) -> Iterator[Variable]:
    """Variables of the module in global and constant memory, one after the other."""
    address = _VARIABLES_BASE
    for match in _VARIABLE.finditer(text):
        space, alignment, kind, name, count, values = match.groups()
        size = int(kind[1:]) // 8
        address = -(-address // max(int(alignment or size), 16)) * max(int(alignment or size), 16)
        words = [value.strip() for value in (values or "").strip("{} ").split(",") if value.strip()]
        data = b"".join(_initial(word, size) for word in words)
        whole = size * (int(count) if count else max(len(words), 1))
        yield Variable(name, space, address, data.ljust(whole, b"\0"))
        address += whole


def _initial(word: str, size: int) -> bytes:
    if not re.fullmatch(r"-?(0[xXfFdD])?[0-9a-fA-F]+U?", word):
        raise PtxError(f"unknown initial value {word}")
    bits = int(word[2:], 16) if word[:2].lower() in ("0f", "0d") else int(word.rstrip("U"), 0)
    return (bits & ((1 << 8 * size) - 1)).to_bytes(size, "little")


def _sizes(match: re.Match[str] | None) -> tuple[int, int, int] | None:
    return None if match is None else (int(match[1]), int(match[2] or 1), int(match[3] or 1))


def _parameter(text: str) -> Parameter:
    match = _PARAMETER.match(text.strip())
    if match is None:
        raise PtxError(f"unknown parameter declaration: {text.strip()}")
    size = int(match[2][1:]) // 8
    return Parameter(match[3], size * int(match[4] or 1), int(match[1] or size))


@dataclasses.dataclass
class _Scope:
    """Names that a brace-delimited scope declares."""

    number: int
    registers: dict[str, Register] = dataclasses.field(default_factory=dict)
    families: dict[str, tuple[str, int]] = dataclasses.field(default_factory=dict)
    labels: set[str] = dataclasses.field(default_factory=set)


class _Body:
    """Statements of one kernel. Reads from `start`, just inside its opening brace, to its end."""

    def __init__(self, text: str, start: int):
        self.instructions: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self.registers: dict[str, int] = {"pred": 0, "b16": 0, "b32": 0, "b64": 0, "b128": 0}
        self.local: list[SharedVariable] = []
        self._text, self._scopes, self._count = text, [_Scope(0)], 1
        self._line, self._line_at = text.count("\n", 0, start) + 1, start
        self._read(start)
        self._bind_labels()

    def _read(self, position: int) -> None:
        text = self._text
        while self._scopes:
            while text[position].isspace():
                position += 1
            label = _LABEL.match(text, position)
            if text[position] == "{":
                self._scopes.append(_Scope(self._count))
                self._count += 1
                position += 1
            elif text[position] == "}":
                self._scopes.pop()
                position += 1
            elif label is not None:
                self._scopes[-1].labels.add(label[1])
                self.labels[self._scoped(label[1])] = len(self.instructions)
                position = label.end()
            else:
                end = text.index(";", position)
                self._line += text.count("\n", self._line_at, position)
                self._line_at = position
                self._statement(text[position:end].strip())
                position = end + 1

    def _scoped(self, label: str) -> str:
        return f"{label}@{self._scopes[-1].number}"

    def _statement(self, text: str) -> None:
        if text.startswith(".reg"):
            self._declare(text)
        elif text.startswith(".local"):
            local = _LOCAL.match(text)
            if local is None:
                raise PtxError(f"line {self._line}: unknown declaration {text}")
            self.local.append(SharedVariable(local[2], int(local[1]), int(local[3])))
        elif not text.startswith(".pragma"):
            self.instructions.append(self._instruction(text))

    def _declare(self, text: str) -> None:
        match = _REG.match(text)
        if match is None or match[1] not in _BANKS:
            raise PtxError(f"line {self._line}: unknown declaration {text}")
        for part in match[2].split(","):
            name = _REG_NAME.match(part.strip())
            if name is None:
                raise PtxError(f"line {self._line}: unknown declaration {text}")
            if name[2] is not None:
                self._scopes[-1].families[name[1]] = (_BANKS[match[1]], int(name[2]))
            else:
                self._scopes[-1].registers[name[1]] = self._new(_BANKS[match[1]], name[1])

    def _new(self, bank: str, name: str) -> Register:
        register = Register(bank, self.registers[bank], name)
        self.registers[bank] += 1
        return register

    def find(self, name: str) -> Register | None:
        family = re.match(r"(.*\D)(\d+)$", name)
        for scope in reversed(self._scopes):
            if name in scope.registers:
                return scope.registers[name]
            if family is not None and family[1] in scope.families:
                bank, count = scope.families[family[1]]
                if int(family[2]) < count:
                    scope.registers[name] = self._new(bank, name)
                    return scope.registers[name]
        return None

    def _instruction(self, text: str) -> Instruction:
        match = _INSTRUCTION.match(text)
        if match is None:
            raise PtxError(f"line {self._line}: not an instruction: {text}")
        guard = None
        if match[2] is not None:
            register = self.find(match[2])
            if register is None or register.bank != "pred":
                raise PtxError(f"line {self._line}: {match[2]} is no predicate")
            guard = (register, match[1] == "")
        operands = _Operands(self, match[4] or "", self._line).all()
        if match[3].split(".")[0] == "bra":
            target = operands[-1]
            assert isinstance(target, Symbol)
            operands = (Symbol(self._jump(target.name)),)
        short = " ".join(text.split())
        return Instruction(match[3], operands, guard, self._line, short)

    def _jump(self, label: str) -> str:
        """A label's name with every scope that may hold it, innermost first."""
        return "|".join(f"{label}@{scope.number}" for scope in reversed(self._scopes))

    def _bind_labels(self) -> None:
        for index, instruction in enumerate(self.instructions):
            if instruction.opcode != "bra":
                continue
            (target,) = instruction.operands
            assert isinstance(target, Symbol)
            found = next((name for name in target.name.split("|") if name in self.labels), None)
            if found is None:
                label = target.name.split("@")[0]
                raise PtxError(f"line {instruction.line}: no label {label}")
            bound = dataclasses.replace(instruction, operands=(Symbol(found),))
            self.instructions[index] = bound


class _Operands:
    """Recursive descent over the operand list of one instruction."""

    def __init__(self, body: _Body, text: str, line: int):
        self._body, self._line, self._text = body, line, text
        self._tokens: list[str] = []
        position = 0
        while text[position:].strip():
            match = _TOKEN.match(text, position)
            if match is None:
                raise PtxError(f"line {line}: unknown syntax at {text[position:]!r}")
            self._tokens.append(match[1])
            position = match.end()
        self._tokens.reverse()

    def all(self) -> tuple[Operand, ...]:
        operands = self._list("")
        if self._tokens:
            raise PtxError(f"line {self._line}: unknown syntax in {self._text!r}")
        return operands

    def _list(self, end: str) -> tuple[Operand, ...]:
        operands: list[Operand] = []
        while self._tokens and self._tokens[-1] != end:
            operands.append(self._operand())
            if self._tokens and self._tokens[-1] == ",":
                self._tokens.pop()
        return tuple(operands)

    def _operand(self) -> Operand:
        token = self._tokens.pop()
        if token == "{":
            elements = self._list("}")
            self._tokens.pop()
            return Vector(elements)
        if token == "[":
            inside = self._list("]")
            self._tokens.pop()
            return self._address(inside)
        operand = self._atom(token)
        if self._tokens and self._tokens[-1] == "|":
            self._tokens.pop()
            return Pair(operand, self._atom(self._tokens.pop()))
        if self._tokens and self._tokens[-1] == "+":
            self._tokens.pop()
            return Address(operand, int(self._tokens.pop(), 0))
        return operand

    def _address(self, inside: tuple[Operand, ...]) -> Address:
        base = inside[0]
        address = base if isinstance(base, Address) else Address(base)
        if len(inside) == 1:
            return address
        if len(inside) == 2 and isinstance(inside[1], Vector):
            return dataclasses.replace(address, coordinates=inside[1])
        raise PtxError(f"line {self._line}: unknown address in {self._text!r}")

    def _atom(self, token: str) -> Operand:
        if token[:2] in ("0f", "0F", "0d", "0D"):
            bits = int(token[2:], 16)
            return Immediate(bits, bits)
        if re.match(r"-?\d", token):
            return Immediate(int(token.rstrip("U"), 0))
        register = self._body.find(token)
        if register is not None:
            return register
        if _SPECIAL.fullmatch(token):
            return SpecialRegister(token)
        if token.startswith("%"):
            raise PtxError(f"line {self._line}: unknown register {token} in {self._text!r}")
        if not re.match(r"[A-Za-z_$]", token):
            raise PtxError(f"line {self._line}: unknown syntax {token!r} in {self._text!r}")
        return Symbol(token)


def parameter_offsets(parameters: tuple[Parameter, ...]) -> list[int]:
    """Where each parameter starts in the parameter block."""
    offsets, position = [], 0
    for parameter in parameters:
        position = math.ceil(position / parameter.alignment) * parameter.alignment
        offsets.append(position)
        position += parameter.size
    return offsets
