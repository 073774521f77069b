"""Defines litmus programs and the two machines that run them: a GPU, and the emulator.

A litmus program repeats what a kernel of ours relies on, checks every result in the kernel, and
counts. It has a broken variant, which the emulator distinguishes from the right one. On a GPU the
broken variant runs, too, last of all: when it is wrong there, the program can see a violation on
that machine; when it is right, the right one's success says less.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from benchmarks.day_one.gpu import Gpu, Shape
from benchmarks.day_one.litmus_text import ENTRY, OWN
from benchmarks.day_one.outcome import Result, Verdict

HOPPER, BLACKWELL = "sm_90a", "sm_100f"
BOTH = (HOPPER, BLACKWELL)
SHARED_BYTES = 120 * 1024
"""The dynamic shared memory of a CTA of every program, so that a multiprocessor has one at a time:
two of them, or two pairs, would wait for each other's tensor memory.
"""


class Machine(Protocol):
    """A machine that runs programs."""

    arch: str
    emulated: bool
    multiprocessors: int

    def buffer(self, data: np.ndarray) -> int:
        """Returns the address of a copy of the data."""
        ...

    def launch(self, text: str, shape: Shape, values: Sequence[int]) -> None:
        """Queues the kernel of a text."""
        ...

    def read(self, address: int, data: np.ndarray) -> None:
        """Waits for all launches and copies into `data`."""
        ...


class OnGpu:
    """The first GPU as a machine."""

    emulated = False

    def __init__(self, gpu: Gpu):
        described = gpu.describe()
        self.gpu, self.multiprocessors = gpu, described["multiprocessors"]
        self.arch = HOPPER if described["capability"] == [9, 0] else BLACKWELL
        self.buffer = gpu.buffer

    def launch(self, text: str, shape: Shape, values: Sequence[int]) -> None:
        """Queues the kernel of a text."""
        self.gpu.launch(text, ENTRY, shape, values)

    def read(self, address: int, data: np.ndarray) -> None:
        """Waits for all launches and copies into `data`."""
        self.gpu.wait()
        self.gpu.read(address, data)


class Emulated:
    """The emulator as a machine: it runs one launch after the other, each under the next seed."""

    emulated = True
    multiprocessors = 2

    def __init__(self, arch: str, policy: Any = None, seed: int = 0):
        self.arch, self._policy, self._seed = arch, policy, seed
        self._memory: dict[int, np.ndarray] = {}

    def buffer(self, data: np.ndarray) -> int:
        """Returns the address of a copy of the data."""
        address = (1 << 20) * (1 + len(self._memory))
        self._memory[address] = np.ascontiguousarray(data).view(np.uint8).copy()
        return address

    def launch(self, text: str, shape: Shape, values: Sequence[int]) -> None:
        """Runs the kernel of a text.

        Raises:
          EmulationError: it breaks a rule.
        """
        from kernels import emulator

        self._seed += 1
        emulator.launch(
            text,
            ENTRY,
            grid=(shape.grid, 1, 1),
            block=(shape.threads, 1, 1),
            cluster=(shape.cluster, 1, 1),
            dynamic_smem=shape.shared_bytes,
            params=[int(value).to_bytes(8, "little") for value in values],
            memory=self._memory,
            policy=self._policy,
            seed=self._seed,
        )

    def read(self, address: int, data: np.ndarray) -> None:
        """Copies into `data`."""
        data[...] = self._memory[address][: data.nbytes].view(data.dtype).reshape(data.shape)


@dataclasses.dataclass(frozen=True)
class Count:
    """The counts of a run of a program.

    Attributes:
      checks: comparisons that took place, of `expected`.
      wrong: comparisons that failed.
      example: one that failed.
    """

    checks: int
    expected: int
    wrong: int
    example: str = ""

    @property
    def right(self) -> bool:
        """Returns whether everything was compared, and nothing was wrong."""
        return self.wrong == 0 and self.checks == self.expected

    def __str__(self) -> str:
        text = f"{self.wrong} of {self.checks} comparisons wrong"
        if self.checks != self.expected:
            text += f" (there should be {self.expected})"
        return text + (f", such as {self.example}" if self.wrong else "")


Play = Callable[[Machine, bool], Count]
"""Runs a program on a machine, right or broken."""


@dataclasses.dataclass(frozen=True)
class Litmus:
    """A program for one assumption.

    Attributes:
      play: function that runs it.
      refuted: what outcome refutes the claim.
      broken: what its broken variant does: "without ..." or "with ...".
      noticed: how the emulator notices that: rules, or "wrong" for wrong results, in any
        combination joined by "|"; "" where it cannot, with the reason in `unnoticed`.
      hangs: whether the broken variant may never end, so that no GPU runs it.
      archs: architectures of the machines that can run it.
      on_emulator: whether the emulator can run it.
      informs: what a wrong result says, where it refutes nothing that our kernels rely on.
      rules: fields of the emulator's Policy that are off by default and matter here.
    """

    name: str
    play: Play
    refuted: str
    broken: str
    noticed: str
    unnoticed: str = ""
    hangs: bool = False
    archs: tuple[str, ...] = (BLACKWELL,)
    on_emulator: bool = True
    informs: str = ""
    rules: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A litmus program of one kernel that counts for itself.

    Attributes:
      text: function to the module for a target, right or broken.
      threads: threads of a CTA.
      checks: comparisons of a repetition, by all threads of a CTA.
      repeats, ctas: their numbers on a GPU and on the emulator.
      cluster: number of CTAs of a cluster.
      data: the program's own words, after the results.
    """

    text: Callable[[str, bool], str]
    threads: int
    checks: int
    repeats: tuple[int, int]
    ctas: tuple[int, int]
    cluster: int = 1
    data: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.uint32))

    def __call__(self, machine: Machine, broken: bool) -> Count:
        repeats, ctas = self.repeats[machine.emulated], self.ctas[machine.emulated]
        shape = Shape(ctas, self.threads, SHARED_BYTES, self.cluster)
        words = np.concatenate([np.zeros(OWN // 4, np.uint32), self.data.view(np.uint32)])
        address = machine.buffer(words)
        machine.launch(self.text(machine.arch, broken), shape, (address, repeats))
        machine.read(address, words)
        return counted(words, repeats * ctas * self.checks)


def counted(words: np.ndarray, expected: int) -> Count:
    """Returns the count that a kernel left in the first words of its data."""
    wrong, checks, got, want = (int(word) for word in words[:4])
    # The kernel counts modulo 2^32.
    same = checks == expected % (1 << 32)
    example = f"{got:#x} instead of {want:#x}"
    return Count(expected if same else checks, expected, wrong, example)


def emulated(litmus: Litmus, seed: int, arch: str = "") -> list[Emulated]:
    """Returns emulators for a program, of its last architecture by default: operations late, early
    and random, and with one warp starved, too.
    """
    from kernels.emulator import Policy

    rules: dict[str, Any] = dict.fromkeys(litmus.rules, True)
    policies = (
        Policy(schedule="random", asynchronous="late", **rules),
        Policy(schedule="random", asynchronous="early", **rules),
        Policy(schedule="starve", asynchronous="random", **rules),
    )
    return [Emulated(arch or litmus.archs[-1], policy, seed) for policy in policies]


def judge(litmus: Litmus, machine: Machine) -> Result:
    """Runs a program as it should be."""
    if why := _why_not(litmus, machine):
        return Result(Verdict.NOT_RUN, why)
    count = litmus.play(machine, False)
    data: dict[str, Any] = dataclasses.asdict(count)
    if litmus.informs:
        return Result(
            Verdict.MEASURED, f"{litmus.informs} in {count.wrong} of {count.checks}", data
        )
    return Result(Verdict.HOLDS if count.right else Verdict.FALLS, str(count), data)


def control(litmus: Litmus, machine: Machine) -> Result:
    """Runs a program's broken variant; returns whether this machine shows the violation."""
    if why := _why_not(litmus, machine):
        return Result(Verdict.NOT_RUN, why)
    if litmus.hangs:
        return Result(Verdict.NOT_RUN, "it may never end")
    count = litmus.play(machine, True)
    seen = (
        "wrong, so that a violation shows"
        if not count.right
        else "right, so that success says less"
    )
    text = f"{litmus.broken}: {seen}; {count}"
    return Result(Verdict.MEASURED, text, dataclasses.asdict(count) | {"seen": not count.right})


def _why_not(litmus: Litmus, machine: Machine) -> str:
    if machine.arch not in litmus.archs:
        return f"for {', '.join(litmus.archs)}, this is {machine.arch}"
    if machine.emulated and not litmus.on_emulator:
        return "it needs hardware"
    return ""
