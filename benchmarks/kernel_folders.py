"""Times our call with kernels of several folders, in turns: what a change of a kernel is worth.

    python -m kernels.build --only "sm_90a_fwd_*" --cubins AFTER    # in a tree with the change
    python -m benchmarks.kernel_folders BEFORE AFTER [--only "grid-d64-*"]

A process reads one manifest of kernels, so each folder has a process of its own. They take turns
burst by burst, in a new random order each time (benchmarks.timing), and never share the GPU. The
table has the median time with the first folder's kernels; for the others the first one's time over
theirs, and whether the results are the same bit by bit. The same folder twice shows the noise.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import hashlib
import multiprocessing
import os
import pathlib
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any
from unittest import mock

import jax
import numpy as np
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from benchmarks import measure, shapes
from benchmarks.peers import DETERMINISTIC, OURS
from benchmarks.shapes import Case
from benchmarks.timing import ORDERS, Call, Protocol, burst, estimate
from fa4_jax import runtime

Submit = Callable[..., Any]
"""Calls a function in a folder's process and returns its result."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one folder's kernels did with a case.

    Attributes:
      seconds: of one call, the median of its bursts.
      digest: of the bits of all results.
    """

    seconds: float
    digest: str


_current: list[Call] = []
"""In a folder's process: the call of the case that is timed."""


def prepare(case: Case, direction: str, name: str) -> tuple[float, str]:
    """Compiles a case's call; returns the seconds of one call and the digest of its results."""
    _current.clear()  # The case before gives its memory back.
    call = measure.our_pass(case, direction, name).call
    digest = hashlib.sha256()
    for result in jax.tree.leaves(call()):
        digest.update(np.asarray(result).tobytes())
    _current.append(call)
    return estimate(call), digest.hexdigest()


def timed(calls: int) -> float:
    """Returns the seconds of one of a burst's calls."""
    return burst(_current[0], calls)


def compare(
    folders: Sequence[Submit], case: Case, ways: tuple[str, str], protocol: Protocol
) -> list[Outcome]:
    """Times a case with the kernels of each folder, in turns; ways: the direction and our name."""
    first = [submit(prepare, case, *ways) for submit in folders]
    calls = [protocol.calls(seconds) for seconds, _ in first]
    bursts: list[list[float]] = [[] for _ in folders]
    for _ in range(protocol.loops):
        for i in ORDERS.sample(range(len(folders)), len(folders)):
            bursts[i].append(folders[i](timed, calls[i]))
    return [
        Outcome(statistics.median(seconds), digest)
        for seconds, (_, digest) in zip(bursts, first, strict=True)
    ]


def start(folder: pathlib.Path) -> ProcessPoolExecutor:
    """Returns a process whose kernels are those of a folder.

    Raises:
      ValueError: the folder has no manifest.
    """
    if not (folder / "manifest.json").is_file():
        raise ValueError(f"{folder} holds no manifest.json: write it by kernels.build --cubins")
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
    # A process reads them when it imports fa4_jax and JAX; this one has done so.
    variables = {
        runtime.KERNELS_VARIABLE: str(folder.resolve()),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    with mock.patch.dict(os.environ, variables):
        pool.submit(os.getpid).result()
    return pool


def row(case: Case, outcomes: Sequence[Outcome]) -> list[str]:
    """Returns a line of the table: microseconds, then speeds over the first folder's."""
    first, *others = outcomes
    cells = [case.id, f"{first.seconds * 1e6:.1f}"]
    for other in others:
        bits = "same bits" if other.digest == first.digest else "other bits"
        cells.append(f"{first.seconds / other.seconds:.3f}, {bits}")
    return cells


def main(argv: Sequence[str] | None = None) -> list[list[str]]:
    """Prints the table and returns its lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=pathlib.Path, help="manifests and kernels")
    parser.add_argument("--only", nargs="+", default=["grid-*"], metavar="GLOB", help="cases")
    parser.add_argument("--direction", choices=measure.DIRECTIONS, default="forward")
    parser.add_argument("--deterministic", action="store_true", help="dQ in a fixed order")
    parser.add_argument("--loops", type=int, default=7, help="bursts of each folder")
    parser.add_argument("--quick", action="store_true", help="tiny cases: their times mean nothing")
    options = parser.parse_args(argv)
    if options.deterministic and options.direction == "forward":
        raise ValueError("--deterministic: a forward has no dQ; take --direction backward")
    cases = [
        case
        for case in (shapes.QUICK if options.quick else shapes.ALL)
        if any(fnmatch.fnmatchcase(case.id, glob) for glob in options.only)
    ]
    if not cases:
        raise ValueError(f"--only {options.only!r}: no case has such a name")
    ways = (options.direction, DETERMINISTIC if options.deterministic else OURS)
    protocol = Protocol(1, 0.002) if options.quick else Protocol(options.loops)
    pools = [start(folder) for folder in options.folders]
    submits: list[Submit] = [
        lambda function, *arguments, pool=pool: pool.submit(function, *arguments).result()
        for pool in pools
    ]
    before, *others = options.folders
    table = Table("case", f"{before}, us", *(f"{x} over it" for x in others), box=MARKDOWN)
    rows = []
    for case in cases:
        rows.append(row(case, compare(submits, case, ways, protocol)))
        print(*rows[-1], flush=True)
        table.add_row(*rows[-1])
    for pool in pools:
        pool.shutdown()
    Console(width=140).print(table)
    return rows


if __name__ == "__main__":
    main()
