"""Broken copies of a kernel: one wait, arrival, barrier, fence or byte count changed at a time."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator

import numpy as np

from kernels.emulator import EmulationError, Policy
from tests.emulator.attention import Attention
from tests.emulator.moves import moves

_REMOVED = (
    r"bar\.sync",
    r"bar\.arrive",
    r"bar\.warp\.sync",
    r"fence\.",
    r"wgmma\.fence",
    r"wgmma\.wait_group",
    r"wgmma\.commit_group",
    r"mbarrier\.init",
    r"barrier\.cluster",
    r"clusterlaunchcontrol\.try_cancel",
    r"st\.async",
    r"mbarrier\.arrive",
    r"cp\.async\.(commit|wait)_group",
    r"cp\.async\.bulk\.commit_group",
    r"cp\.async\.bulk\.wait_group",
    r"red\.release",
    r"tcgen05\.(alloc|dealloc|commit|fence|wait)",
)
"""Instructions whose absence must be noticed."""

_GUARDED = re.compile(r"(@!?%?\w+\s+|)(.*)", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One change of one line; the other lines keep their numbers."""

    line: int
    change: str
    text: str

    @property
    def kind(self) -> str:
        """The change and the instruction, without its guard and operands."""
        change, code = self.change.split(": ", 1)
        mnemonic = next(word for word in code.split() if not word.startswith("@"))
        return f"{change}: {mnemonic.rstrip(';')}"


@dataclasses.dataclass(frozen=True)
class Trial:
    """A launch that a broken kernel takes, and what a right one computes there."""

    launch: Attention
    expected: dict[str, np.ndarray]
    policy: Policy
    seed: int


def mutations(ptx: str, counts: bool = True) -> Iterator[Mutation]:
    """Every mutation of a kernel; `counts`: also other numbers of threads, arrivals, bytes."""
    lines = ptx.split("\n")
    constants = dict(re.findall(r"mov\.[bu]32\s+(%r\d+), (\d+);", ptx))
    for number, line in enumerate(lines, 1):
        statements = re.findall(r"[^;]+;?", line)
        for place, statement in enumerate(statements):
            guard, code = _GUARDED.match(statement.strip()).groups()  # type: ignore[union-attr]
            changes = [*_changes(code), *(_other_counts(code, constants) if counts else ())]
            for change, new in changes:
                new = new and guard + new
                broken = "".join([*statements[:place], new, *statements[place + 1 :]])
                text = "\n".join([*lines[: number - 1], broken, *lines[number:]])
                yield Mutation(number, f"{change}: {code}", text)


def moved(ptx: str) -> Iterator[Mutation]:
    """Every synchronising instruction of a kernel moved over its neighbours, see `moves`."""
    for move in moves(ptx):
        change = f"{move.change}: {move.instruction.text}"
        yield Mutation(move.instruction.line, change, move.text(ptx))


def notices(trials: Iterable[Trial], mutation: Mutation) -> tuple[str, int]:
    """The rule that a mutation breaks, and the number of trials that it takes to see that.

    The rule is "result" if the kernel computes something else, or "" if no trial notices it.
    """
    number = 0
    for number, trial in enumerate(trials, 1):
        try:
            results = trial.launch.run(trial.policy, trial.seed, lambda key, text: mutation.text)
        except EmulationError as error:
            return error.rule, number
        for name, expected in trial.expected.items():
            if not np.array_equal(results[name], expected, True):
                return "result", number
    return "", number


def _changes(code: str) -> Iterator[tuple[str, str]]:
    if any(re.match(pattern, code) for pattern in _REMOVED):
        yield "removed", ""
    waits = re.match(r"mbarrier\.try_wait\.parity\.shared\.b64 (\w+), (\[[^]]+\]), (\S+),", code)
    if waits:
        yield "never waits", f"setp.eq.b32 {waits[1]}, 0, 0;"
    if re.match(r"wgmma\.wait_group.*\s0;", code):
        yield "waits for all but one", code.replace("0;", "1;")
    if code.startswith("ld.acquire"):
        yield "relaxed", code.replace("acquire", "relaxed")
    if code.startswith("red.release"):
        yield "relaxed", code.replace("release", "relaxed")
    if re.match(r"barrier\.cluster\.arrive(\.aligned)?;", code):
        yield "relaxed", code.replace("arrive", "arrive.relaxed")
    if ".multicast::cluster" in code and code.endswith(";"):
        alone = re.sub(r"\.multicast::cluster(::all)?", "", code)
        yield "to itself alone", re.sub(r", %rs\d+", "", alone)
    barrier = re.match(r"bar\.sync\s+(\S+), (\d+);", code)
    if barrier:
        yield "fewer threads", f"bar.sync {barrier[1]}, {int(barrier[2]) - 32};"


def _other_counts(code: str, constants: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Other numbers of threads, registers, groups, arrivals and bytes."""
    if code.startswith("setmaxnreg"):
        yield "removed", ""
    barrier = re.match(r"(bar\.(sync|arrive)\s+\S+), (\d+);", code)
    if barrier:
        yield "more threads", f"{barrier[1]}, {int(barrier[3]) + 32};"
        if barrier[2] == "arrive":
            yield "fewer threads", f"{barrier[1]}, {int(barrier[3]) - 32};"
    if groups := re.match(r"(cp\.async\.bulk\.wait_group)(\.read)?\s+(\d+);", code):
        yield "waits for all but one more", f"{groups[1]}{groups[2] or ''} {int(groups[3]) + 1};"
        if not groups[2]:
            yield "waits for reads", f"{groups[1]}.read {groups[3]};"
    counted = re.match(r"(mbarrier\.(init|arrive\.expect_tx)\S*\s.*), (%r\d+);", code)
    if not counted or counted[3] not in constants:
        return
    count = int(constants[counted[3]])
    if counted[2] == "init":
        yield "one arrival more", f"{counted[1]}, {count + 1};"
        if count > 1:
            yield "one arrival fewer", f"{counted[1]}, {count - 1};"
    else:
        yield "fewer bytes", f"{counted[1]}, {count // 2};"
        yield "more bytes", f"{counted[1]}, {count + 16};"
