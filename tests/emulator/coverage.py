"""Which synchronising and asynchronous instructions of a kernel its mutation problems execute.

    python -m tests.emulator.coverage [--only "sm_100f_bwd*_d64*"]

prints a Markdown table of the kernels in survivors.SURVIVORS and returns 1 if anything is
neither executed nor in EXPLAINED: a mutation of an instruction that no problem executes survives
for a reason that says nothing about the kernel.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import itertools
import re
from collections import Counter
from collections.abc import Sequence

from fa4_jax import catalogue
from fa4_jax.key import KernelKey, Pass
from kernels import emulator
from kernels.emulator import Policy
from kernels.emulator.driver import arguments
from kernels.emulator.instructions import binding
from kernels.emulator.ptx.parser import parse
from kernels.emulator.ptx.syntax import Instruction
from kernels.sm90.tiles import ForwardTile, forward_tile
from tests.emulator import attention, mutation_score
from tests.emulator.attention import Attention
from tests.emulator.small_l2 import with_small_l2
from tests.emulator.survivors import SURVIVORS

_CLASSES = frozenset({"synchronisation", "TMA", "matrix product", "tensor memory"})
_OTHERS = re.compile(
    r"(setmaxnreg|griddepcontrol|clusterlaunchcontrol|tcgen05|cp\.async|atom)\b"
    r"|st\.async|red\.(release|async)|ld\.acquire"
)
_QUICK = Policy("in_order", "early", races=False)


@dataclasses.dataclass(frozen=True)
class Explained:
    """Instructions of a kernel that no problem executes: a mnemonic, how many, and why."""

    kernel: str
    mnemonic: str
    count: int
    reason: str


_NO_EMPTY_TILE = (
    "the release of Q, and the wait for the output's memory, of a tile without blocks: calls with "
    "lengths take a kernel with a band"
)


def _tile(key: KernelKey) -> ForwardTile:
    return forward_tile(key)


EXPLAINED = (
    *(
        Explained(
            kernel,
            "bar.arrive",
            1,
            "the arrival at the barrier of the rescaling factors in the body of masked blocks: "
            "without a band only a tile's first block is masked, and the first block does not "
            "arrive",
        )
        for kernel in ("sm_100f_fwd_bf16_d128", "sm_100f_fwd_bf16_d256")
    ),
    *(
        Explained(key.name, mnemonic, 1, _NO_EMPTY_TILE)
        for key in catalogue.keys("sm_90a")
        if key.kernel is Pass.FORWARD and not key.band
        for mnemonic in ("mbarrier.arrive.shared.b64", "mbarrier.try_wait.parity.shared.b64")
        # An output that has memory of its own waits for nothing.
        if "arrive" in mnemonic or not _tile(key).own_output
    ),
)


@dataclasses.dataclass(frozen=True)
class Coverage:
    """The synchronising and asynchronous instructions of a kernel, and those not executed."""

    kernel: str
    instructions: tuple[Instruction, ...]
    missed: tuple[Instruction, ...]

    @property
    def explained(self) -> Counter[str]:
        """What EXPLAINED says of the kernel, by mnemonic."""
        return Counter({e.mnemonic: e.count for e in EXPLAINED if e.kernel == self.kernel})

    @property
    def is_complete(self) -> bool:
        """Whether exactly those instructions are not executed that EXPLAINED lists."""
        return Counter(instruction.mnemonic for instruction in self.missed) == self.explained


def is_counted(instruction: Instruction) -> bool:
    """Whether it synchronises or is asynchronous."""
    if binding.kind_of(instruction) in _CLASSES:
        return True
    return _OTHERS.match(instruction.mnemonic) is not None


def coverage(key: KernelKey, problems: Sequence[Attention]) -> Coverage:
    """What the problems, launches of one kernel, execute of its instructions.

    The problems run under a quick policy first, then under the others, which reach what that leaves
    out, such as a load that polls.
    """
    code, executed = attention.ptx(key), set[int]()
    text = with_small_l2(key, code.text)
    instructions = parse(text).kernels[code.symbol].instructions
    counted = {at for at, instruction in enumerate(instructions) if is_counted(instruction)}
    for policy, problem in itertools.product((_QUICK, *mutation_score.policies(key)), problems):
        if counted <= executed:
            break
        packed = arguments.pack(
            code.launch, problem.arrays, problem.attributes, problem.multiprocessors
        )
        done = emulator.launch(text, code.symbol, **packed.keywords, policy=policy)
        executed |= done.executed
    missed = sorted(counted - executed)
    return Coverage(
        key.name,
        tuple(instructions[at] for at in sorted(counted)),
        tuple(instructions[at] for at in missed),
    )


def row(found: Coverage) -> str:
    """A row of the Markdown table; HEAD says what its columns are."""
    count, missed = len(found.instructions), len(found.missed)
    return f"| {found.kernel} | {count} | {count - missed} | {found.explained.total()} |"


HEAD = "| kernel | instructions | executed | explained |\n|---|---|---|---|"


def main() -> int:
    """Returns 1 if an instruction is neither executed nor explained, or explained in vain."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="*", help="pattern of the kernels' names")
    chosen = fnmatch.filter(SURVIVORS, parser.parse_args().only)
    keys = {key.name: key for key in catalogue.all_keys()}
    incomplete = []
    print(HEAD)
    for name in chosen:
        found = coverage(keys[name], mutation_score.problems(keys[name]))
        print(row(found), flush=True)
        if not found.is_complete:
            incomplete.append(found)
    for found in incomplete:
        for instruction in found.missed:
            print(f"{found.kernel} does not execute line {instruction.line}: {instruction.text}")
    attention.close()
    return int(bool(incomplete))


if __name__ == "__main__":
    raise SystemExit(main())
