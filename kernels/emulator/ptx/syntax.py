"""PTX as typed objects: what the parser makes and everything else reads."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class Register:
    """A virtual register: row `index` of the bank "pred", "b16", "b32" or "b64"."""

    bank: str
    index: int
    name: str


@dataclasses.dataclass(frozen=True)
class Immediate:
    """A constant; `bits` is set for hexadecimal floating-point literals, which name a pattern."""

    value: int
    bits: int | None = None


@dataclasses.dataclass(frozen=True)
class Symbol:
    """A parameter, a shared variable or a label."""

    name: str


@dataclasses.dataclass(frozen=True)
class SpecialRegister:
    """A special register, such as %tid.x."""

    name: str


@dataclasses.dataclass(frozen=True)
class Vector:
    """{a, b, ...}"""

    elements: tuple[Operand, ...]


@dataclasses.dataclass(frozen=True)
class Address:
    """[base + offset], or [base, {coordinates}] of a tensor."""

    base: Operand
    offset: int = 0
    coordinates: Vector | None = None


@dataclasses.dataclass(frozen=True)
class Pair:
    """a|p: a result and its predicate."""

    first: Operand
    second: Operand


Operand = Register | Immediate | Symbol | SpecialRegister | Vector | Address | Pair


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction. `guard` is (predicate, wanted value) or None."""

    mnemonic: str
    operands: tuple[Operand, ...]
    guard: tuple[Register, bool] | None
    line: int
    text: str

    @functools.cached_property
    def words(self) -> tuple[str, ...]:
        """Opcode and modifiers."""
        return tuple(self.mnemonic.replace("::", ":").split("."))

    @functools.cached_property
    def opcode(self) -> str:
        """The first word of the mnemonic."""
        return self.words[0]


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A kernel parameter."""

    name: str
    size: int
    alignment: int


@dataclasses.dataclass(frozen=True)
class SharedVariable:
    """A variable in shared or local memory; `size` is None for the launch's dynamic part."""

    name: str
    alignment: int
    size: int | None


@dataclasses.dataclass(frozen=True)
class Variable:
    """A module's variable in global or constant memory, its address and initial value."""

    name: str
    space: str
    address: int
    data: bytes


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One entry of a module.

    Attributes:
      local: variables that every thread has of its own.
      variables: of the module, in global and constant memory.
      labels: index of the instruction that follows each label.
      registers: rows of each bank.
      block: the block size that it was compiled for, or None.
      cluster: the cluster size that it was compiled for, or None.
      explicit_cluster: it must be launched as a cluster.
      most_ctas: CTAs that a cluster may have.
      least_ctas: that a multiprocessor has to have room for at a time.
    """

    name: str
    parameters: tuple[Parameter, ...]
    shared: tuple[SharedVariable, ...]
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    registers: dict[str, int]
    block: tuple[int, int, int] | None
    cluster: tuple[int, int, int] | None = None
    explicit_cluster: bool = False
    most_ctas: int = 8
    least_ctas: int = 1
    local: tuple[SharedVariable, ...] = ()
    variables: tuple[Variable, ...] = ()

    @property
    def local_bytes(self) -> int:
        """Local memory of a thread, with room for alignment."""
        return sum((variable.size or 0) + variable.alignment for variable in self.local)


@dataclasses.dataclass(frozen=True)
class Module:
    """A PTX text."""

    version: tuple[int, int]
    target: str
    kernels: dict[str, Kernel]


def registers(operand: Operand) -> Iterator[Register]:
    """The registers that an operand names."""
    if isinstance(operand, Register):
        yield operand
    elif isinstance(operand, Vector):
        for element in operand.elements:
            yield from registers(element)
    elif isinstance(operand, Address):
        yield from registers(operand.base)
        if operand.coordinates is not None:
            yield from registers(operand.coordinates)
    elif isinstance(operand, Pair):
        yield from registers(operand.first)
        yield from registers(operand.second)
