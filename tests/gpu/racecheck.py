"""Checks that compute-sanitizer's racecheck reports nothing of the Hopper kernels but what is
explained.

    python -m tests.gpu.racecheck [--only "sm_90a_bwd_bf16_d64*"]

Each bf16 forward of many rows, backward and kernel for tangents runs in a process of its own under
racecheck, with the kernels of its call. A report names two machine instructions by kernel and
address; the cubin tells which instructions these are. The command prints the classes that it finds,
kernel by kernel. It returns 1 if one is not in EXPLAINED, if a process fails, or if there is no
report at all: then racecheck has not seen the kernels.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import functools
import pathlib
import re
import shutil
import subprocess
import sys
from collections import Counter

from rich.console import Console

from fa4_jax import catalogue, designs
from fa4_jax.conformance.cases import Case
from fa4_jax.conformance.oracle import make_inputs
from fa4_jax.conformance.runner import compute, run_tangents
from fa4_jax.key import KernelKey, Pass
from fa4_jax.plan import kernel_keys
from fa4_jax.target import current_target
from kernels.build import cubin_info
from kernels.descriptions import describe
from kernels.sm90.tiles import BACKWARD_TILES
from tests.emulator import mutation_cases

_OPCODES = {
    0x3BA: "UBLKCP",
    0x984: "LDS",
    0x388: "STS",
    0x988: "STS",
    0x5B4: "UTMALDG",
    0x3B5: "UTMASTG",
}
_INSTRUCTION_BYTES = 16
_CONTROL = "sm_90a_bwd_bf16_d64_band"
_MOST_SECONDS = 300
_SANITIZER = ("compute-sanitizer", "--tool", "racecheck", "--racecheck-report", "analysis")
_OPTIONS = ("--print-limit", "100000", "--kernel-name", "kns=fa4")

_OF_A_SLOT = (
    "The load warp's stores of {what} follow the MMA warps' loads of what was there. All lanes "
    "load; then {meeting}; then one lane arrives on q_empty; the load warp waits for these "
    "arrivals and stores. racecheck does not carry a lane's loads over {barrier} to the lane that "
    "arrives; the emulator's happens-before does, and it refuses the same program without that "
    "barrier (tests/emulator/test_litmus.py, store over it)."
)
_WARP = {"meeting": "the warp synchronises", "barrier": "the warp's barrier"}
_BY_SCORES_READY = {"meeting": "all warps pass SCORES_READY", "barrier": "the named barrier"}

EXPLAINED = {
    ("bwd", "UBLKCP", "LDS"): (
        "The load warp's bulk copy of a later step's row statistics (lse_log2, delta) follows the "
        "MMA warps' loads of the slot. All lanes load; then all warps pass the named barrier "
        "SCORES_READY (in a pair of CTAs the warp synchronises); then one lane of each warp "
        "arrives on q_empty or do_empty; the load warp waits for these arrivals and issues the "
        "copy. racecheck does not carry a lane's loads over either barrier to the lane that "
        "arrives. The emulator's happens-before does: it "
        "accepts the kernels, and refuses the same program without the named barrier "
        "(tests/emulator/test_litmus.py, loads by all lanes and an arrival of one)."
    ),
    **{
        (kernel, "STS", "LDS"): _OF_A_SLOT.format(what="the next tile's work", **_WARP)
        for kernel in ("fwd", "tangent")
    },
    ("bwd with ranges", "STS", "LDS"): _OF_A_SLOT.format(
        what="which query block a later step is", **_BY_SCORES_READY
    ),
    ("bwd of a pair with ranges", "STS", "LDS"): (
        _OF_A_SLOT.format(what="which query block a later step is", **_WARP)
        + " Where dQ is late, pairs of the next class may be among them."
    ),
    ("bwd with late dQ", "STS", "LDS"): (
        "P goes from warpgroup 0 to 1, thread by thread (backward_pair.py, Note [messages]). "
        "racecheck reports this only where dQ is late. The stores follow bar.sync ds_ready, at "
        "which warpgroup 1 has arrived after its loads of the step before; the loads follow "
        "bar.sync p_ready, at which warpgroup 0 has arrived after its stores. A warpgroup arrives "
        "and goes on, here one step ahead of the other. The emulator orders both, and refuses the "
        "kernel without either barrier."
    ),
}
"""(kernel, writing instruction, reading instruction): the order that makes the pair safe.

Ranges and pairs are said only where they matter.
"""


@dataclasses.dataclass(frozen=True)
class Access:
    """One side of a report: "Read" or "Write", the kernel's symbol, the byte offset of its code."""

    kind: str
    symbol: str
    offset: int


def parse(text: str) -> list[tuple[Access, Access]]:
    """Returns pairs of accesses, the first of each report with each of its others.

    Raises:
      ValueError: the text has no summary: the program ended before its time.
    """
    if "RACECHECK SUMMARY" not in text:
        raise ValueError(f"no summary of racecheck: {text[-500:]}")
    pairs: list[tuple[Access, Access]] = []
    first = None
    for line in text.splitlines():
        found = re.search(r"(Read|Write) access at (\w+)\+0x([0-9a-f]+)", line)
        if found is None:
            continue
        access = Access(found[1], found[2], int(found[3], 16))
        if "Race reported between" in line:
            first = access
        elif first is not None:
            pairs.append((first, access))
    return pairs


def hazard(pair: tuple[Access, Access], code: dict[str, list[tuple[int, int]]]) -> tuple[str, ...]:
    """Returns the class of a pair: the kernel, then the instructions, a write first.

    `code` has the machine instructions of each kernel by symbol.
    """
    names = []
    for access in sorted(pair, key=lambda access: access.kind, reverse=True):
        word = code[access.symbol][access.offset // _INSTRUCTION_BYTES]
        number = cubin_info.opcode(word)
        names.append(_OPCODES.get(number, f"opcode {number:#x}"))
    return pair[0].symbol.removeprefix("fa4_").rsplit("_", 1)[0], *names


def case_of(key: KernelKey) -> Case:
    """Returns a case with several steps of a CTA, so that every slot of its rings is used again.

    Where CTAs split tiles, they do. With ranges racecheck takes too long for more than this.
    """
    if key.kernel is Pass.FORWARD:
        return mutation_cases.cases(key)[-1 if key.bias else 0]
    rows = 600 if describe(key).division.splits_tail else 300
    few_rows = 400 if describe(key).division.rows == 128 else 300
    return Case(
        batch=1,
        heads=(1, 1) if key.ranges else (2, 1),
        query_length=few_rows if key.ranges else rows,
        key_length=130 if key.ranges else 300,
        head_dim=key.head_dim,
        value_dim=key.value_dim,
        is_causal=key.band,
        masks=("scattered",) if key.ranges else (),
        soft_cap=4.0 if key.soft_cap else None,
        bias=(1, 1, rows, 300) if key.bias else None,
        deterministic=key.deterministic,
    )


def kernels(key: KernelKey) -> tuple[KernelKey, ...]:
    """Returns the kernels of the case of a key, itself among them."""
    forward, backward = kernel_keys(case_of(key).problem, key.arch, design=designs.design_of(key))
    if key.kernel is Pass.FORWARD:
        return forward
    return (*forward, key) if key.kernel is Pass.TANGENT else forward + backward


def keys() -> list[KernelKey]:
    """Returns the kernels that run."""
    of_rows = (Pass.FORWARD, Pass.BACKWARD, Pass.TANGENT)
    return [
        key
        for key in catalogue.keys("sm_90a")
        if key.kernel in of_rows and key.dtype == "bf16" and not key.paged
    ]


def run(key: KernelKey) -> None:
    """Makes the call of a key."""
    with designs.asking(designs.design_of(key)):
        if key.kernel is Pass.TANGENT:
            run_tangents(case_of(key), 0, "kernel")
        else:
            gradients = key.kernel is Pass.BACKWARD
            compute(case_of(key), make_inputs(case_of(key), 0), "kernel", gradients)


@functools.cache
def _code(folder: pathlib.Path, file: str, symbol: str) -> list[tuple[int, int]]:
    return cubin_info.instructions((folder / file).read_bytes(), symbol)


def check(key: KernelKey) -> Counter[tuple[str, ...]]:
    """Returns the classes, with counts, that racecheck reports of a key's kernel and those around.

    Raises:
      ValueError: the program failed or did not come to its end in _MOST_SECONDS.
    """
    manifest = current_target().manifest
    assert manifest is not None
    code = {}
    for found in kernels(key):
        cubin = manifest.cubins[found]
        code[cubin.symbol] = _code(manifest.directory, cubin.file, cubin.symbol)
    # `timeout` ends the tool's children, too, which would hold the output open.
    command = ["timeout", "--kill-after=5", str(_MOST_SECONDS), *_SANITIZER, *_OPTIONS]
    command += [sys.executable, "-m", "tests.gpu.racecheck", "--run", key.name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ValueError(f"{key.name} returned {done.returncode}: {done.stdout[-500:]}")
    pairs = parse(done.stdout + done.stderr)
    return Counter(of_kernel(key, hazard(pair, code)) for pair in pairs)


def of_kernel(key: KernelKey, kind: tuple[str, ...]) -> tuple[str, ...]:
    """Returns a class that says, of stores in a backward, what kernel they are in."""
    if kind != ("bwd", "STS", "LDS"):
        return kind
    tile = BACKWARD_TILES[key.head_dim, key.value_dim].of_kernel(key.deterministic, key.soft_cap)
    pair = " of a pair" if tile.ctas > 1 else ""
    late = " with late dQ" if tile.late_dq else ""
    return f"bwd{pair} with ranges" if key.ranges else f"bwd{late}", *kind[1:]


def chosen(only: str) -> list[KernelKey]:
    """Returns the kernels whose names match, after one that racecheck always reports something of.

    Without it nothing could also mean that racecheck has not seen the kernels.
    """
    found = [key for key in keys() if fnmatch.fnmatchcase(key.name, only)]
    return [*(key for key in keys() if key.name == _CONTROL and key not in found), *found]


def main() -> int:
    """Returns 1 if racecheck reports what is not explained, or nothing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="*", help="pattern of the kernels' names")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        key = next(key for key in keys() if key.name == options.run)
        # racecheck prints what it found in a launch when another one follows, not at the end.
        for _ in range(2):
            run(key)
        return 0
    if shutil.which(_SANITIZER[0]) is None:
        raise SystemExit(f"{_SANITIZER[0]} is not on the path")
    console = Console(width=120)
    classes: set[tuple[str, ...]] = set()
    failed = 0
    for key in chosen(options.only):
        try:
            found = check(key)
        except ValueError as error:
            console.print(str(error), markup=False)
            failed += 1
            continue
        classes |= set(found)
        for kind, count in sorted(found.items()):
            explained = "explained" if kind in EXPLAINED else "NOT EXPLAINED"
            console.print(f"{key.name}: {' '.join(kind)}, {count} pairs, {explained}")
        if not found:
            console.print(f"{key.name}: nothing")
    for kind, reason in EXPLAINED.items():
        console.print(f"{', '.join(kind)}: {reason}")
    if not classes:
        console.print("racecheck reports nothing at all: it has not seen the kernels")
    return int(failed > 0 or not classes or not classes <= set(EXPLAINED))


if __name__ == "__main__":
    raise SystemExit(main())
