"""The entry of an instruction: its effect, what the report counts, what it asks of an SM.

Arithmetic has a table of its own (`arithmetic`), whose rows carry a `Cost`; every other instruction
has an `Entry` in the file of `instructions` that is named by its mnemonic.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from kernels.emulator.ptx.syntax import Instruction

Effect = Callable[[Any, np.ndarray], Any]
"""An instruction bound to its operands; called with a machine.warp.Warp and its executing lanes."""
Binder = Callable[[Instruction, dict[str, int]], Effect | None]
"""Makes the effect of an instruction from its operands and the values of symbols.

It returns None for a form that is not implemented."""
Amounts = Mapping[str, int]
"""Amounts by name of `costs.QUANTITIES`."""
Pipe = Literal[
    "fma",
    "alu",
    "multiply",
    "special",
    "convert",
    "shuffle",
    "shared memory",
    "global memory",
    "tensor memory",
    "control",
    "proxy fence",
    "free",
    "unknown",
]
"""The unit and the latency of an instruction, which `timing.plans` reads from the rates.

A free instruction takes neither; the timing model refuses a program with an unknown one."""


class Action:
    """What a step does to the clock beyond its instruction; the replay knows each kind."""


@dataclasses.dataclass(frozen=True)
class Multiply(Action):
    """A warp's quarter of wgmma, and the bytes of shared memory that it reads."""

    flops: int
    shared_bytes: int


@dataclasses.dataclass(frozen=True)
class CommitProducts(Action):
    """The warp's products since the last commit become a group."""


@dataclasses.dataclass(frozen=True)
class AwaitProducts(Action):
    """The warp waits until at most `pending` groups of products are in flight."""

    pending: int


@dataclasses.dataclass(frozen=True)
class AwaitTensorStores(Action):
    """The warp waits until its stores to tensor memory are done."""


@dataclasses.dataclass(frozen=True)
class Reduce(Action):
    """A warp adds these bytes to global memory."""

    size: int


@dataclasses.dataclass(frozen=True)
class Gather(Action):
    """A warp starts to copy these bytes from global to shared memory."""

    size: int


@dataclasses.dataclass(frozen=True)
class CommitStores(Action):
    """The warp's bulk stores since the last commit become a group."""


@dataclasses.dataclass(frozen=True)
class AwaitStores(Action):
    """The warp waits until at most `pending` groups are being read, or `written`."""

    pending: int
    written: bool


@dataclasses.dataclass(frozen=True)
class Demand:
    """What an instruction asks of an SM when a warp executes it once.

    Attributes:
      pipe: its unit and latency.
      issues: instructions that ptxas makes of it.
      results: of a lane, each of which occupies the unit; `issues` if it is None.
      shared_bytes: that go through the port of shared memory.
      broadcast: lanes that load from one address share its bytes.
      operands: whether the first operand is the result, all are sources, or the order in which
        warps issue does not depend on any.
      memory: whether it reads or writes memory, for loads that must not pass stores.
      movable: whether the compiler may move its neighbours across it.
      blocks: whether the warp's next instruction waits for its latency.
      scaled_sum: its part in a multiplication and addition that ptxas makes of two instructions: a
        scale by a constant, whose result nothing but one sum reads, or that sum.
      action: what else it does.
    """

    pipe: Pipe = "control"
    issues: int = 1
    results: float | None = None
    shared_bytes: int = 0
    broadcast: bool = False
    operands: Literal["result first", "sources", "untracked"] = "result first"
    memory: Literal["", "reads", "writes"] = ""
    movable: bool = False
    blocks: bool = False
    scaled_sum: Literal["", "scale", "sum"] = ""
    action: Action | None = None


FREE = Demand("free")
UNKNOWN = Demand("unknown")
SOURCES = Demand(operands="sources")
"""An instruction of the control unit without a result in registers."""


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one execution of an instruction by a warp costs.

    Attributes:
      kind: the class under which the report counts it.
      demand: what the timing model needs.
      per_lane, per_warp: what every active lane and every execution add to the report.
    """

    kind: str
    demand: Demand = Demand()
    per_lane: Amounts = dataclasses.field(default_factory=dict)
    per_warp: Amounts = dataclasses.field(default_factory=dict)


CONTROL = Cost("control", SOURCES)
"""Branches and exits."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """An instruction, or a family of them whose mnemonics begin alike.

    Attributes:
      mnemonic: the words; a star at the end stands for any further ones.
      bind: makes its effect.
      cost: of every form, or a function of the form.
    """

    mnemonic: str
    bind: Binder
    cost: Cost | Callable[[Instruction], Cost]

    @property
    def words(self) -> tuple[str, ...]:
        """The mnemonic as `Instruction.words` spells it."""
        return tuple(self.mnemonic.replace("::", ":").split("."))

    def cost_of(self, instruction: Instruction) -> Cost:
        """The cost of one of its forms."""
        return self.cost if isinstance(self.cost, Cost) else self.cost(instruction)


@dataclasses.dataclass(frozen=True)
class Bound:
    """An instruction that is ready to run, and its cost."""

    effect: Effect
    cost: Cost


def always(effect: Effect) -> Binder:
    """The binder of an instruction whose effect does not depend on its operands."""
    return lambda instruction, symbols: effect
