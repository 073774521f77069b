"""Runs each Hopper kernel that a call of attention launches under compute-sanitizer.

    python -m tests.gpu.sanitize memcheck [--processes 8] [--only "sm_90a_bwd_bf16_d64*"]
    python -m tests.gpu.sanitize synccheck

A kernel gets small calls, its mutations' problems, which have several tiles and use the slots of
its rings again. Results are not compared: other tests do that. Kernels share a process, since
starting one takes seconds. Each process has its own cores: without, the compilers' threads of many
keep each other from coming to an end. The tool itself crashes now and then, whatever the kernel;
such a process is started again. The command prints what is reported, process by process,
and returns 1 if anything is, or if a kernel's calls do not come to their end. Kernels that read
pages get calls of `decode`.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import functools
import os
import queue
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed

from rich.console import Console
from rich.progress import track

from fa4_jax import catalogue, designs
from fa4_jax.conformance.case import Case
from fa4_jax.conformance.oracle import make_inputs
from fa4_jax.conformance.paged import PagedCase, make_cache, run_paged_case
from fa4_jax.conformance.runner import compute, run_hessian, run_tangents
from fa4_jax.key import HESSIAN_PASSES, KernelKey, Pass
from fa4_jax.paged.arguments import DecodeCall, canonicalise
from fa4_jax.paged.kernel import of_pages
from fa4_jax.plan import hessian_keys, kernel_keys, tangent_key
from tests.emulator import mutation_cases

TOOLS = ("memcheck", "synccheck")
_KERNELS_OF_PROCESS = 2
_MOST_SECONDS = 120
_MOST_CHARACTERS = 3000
_TRIES = 5
_FORWARDS = (Pass.FORWARD, Pass.FORWARD_SPLIT)
_OF_BACKWARD = (Pass.BACKWARD, Pass.BIAS_GRADIENT)
_PASSES = (*_FORWARDS, *_OF_BACKWARD, Pass.TANGENT, *HESSIAN_PASSES)


@dataclasses.dataclass(frozen=True)
class Report:
    """What the tool said of one process.

    Attributes:
      ended: names of the kernels whose call came to its end.
      errors: how many there were, or None without a summary: the process ended before its time.
      text: all of it.
      seconds: that the process took.
    """

    ended: frozenset[str]
    errors: int | None
    text: str
    seconds: float = 0.0

    def first_lines(self) -> str:
        """Returns how the tool's own lines begin, without the callers on the host.

        What it says first is what went wrong; a launch that fails then makes the runtime complain
        at length.
        """
        lines = (x for x in self.text.splitlines() if x.startswith("=====") and "Host" not in x)
        return "\n".join(lines)[:_MOST_CHARACTERS]


def checked_keys(only: str = "*") -> list[KernelKey]:
    """Returns the kernels that have a call, and whose names match."""
    return [
        key
        for key in catalogue.keys("sm_90a")
        if key.kernel in _PASSES and fnmatch.fnmatchcase(key.name, only)
    ]


def cases(key: KernelKey) -> tuple[Case | PagedCase, ...]:
    """Returns the cases whose calls launch a kernel.

    With pages, of 64 keys and of 16, which are copied in other boxes, entries have no block of 64
    keys, a part of one, two, and more than any ring has slots; two tiles of rows, or two rows.
    """
    if not key.paged:
        return mutation_cases.cases(key)
    rows, lengths = 2 if key.kernel is Pass.FORWARD_SPLIT else 200, (1100, 0, 40, 128)
    case = functools.partial(
        PagedCase, key.dtype, key.head_dim, key.value_dim, rows=rows, lengths=lengths
    )
    return case(page=64, table_pages=18, window=500), case(page=16, table_pages=70)


def kernels(key: KernelKey, case: Case | PagedCase) -> tuple[KernelKey, ...]:
    """Returns the main kernels that the call of a key with a case launches on Hopper."""
    if isinstance(case, PagedCase):
        cache = make_cache(case, 0)
        problem = of_pages(canonicalise(DecodeCall(*cache.arrays, **cache.options))[1])
    else:
        problem = case.problem
    forward, backward = kernel_keys(problem, key.arch, design=designs.design_of(key))
    if key.kernel is Pass.TANGENT:
        return *forward, tangent_key(problem, key.arch)
    if key.kernel in HESSIAN_PASSES:
        return *forward, *hessian_keys(problem, key.arch)
    return forward if key.kernel in _FORWARDS else forward + backward


def run(key: KernelKey, case: Case | PagedCase) -> None:
    """Makes the call of a key with a case."""
    with designs.asking(designs.design_of(key)):
        _run(key, case)


def _run(key: KernelKey, case: Case | PagedCase) -> None:
    if isinstance(case, PagedCase):
        run_paged_case(case, 0, "kernel")
    elif key.kernel is Pass.TANGENT:
        run_tangents(case, 0, "kernel")
    elif key.kernel in HESSIAN_PASSES:
        run_hessian(case, 0, "kernel")
    else:
        gradients = key.kernel in _OF_BACKWARD
        compute(case, make_inputs(case, 0), "kernel", gradients)


def parse(text: str) -> Report:
    """Reads what a process and the tool wrote."""
    ended = frozenset(re.findall(r"^ended (\S+)$", text, re.MULTILINE))
    summary = re.findall(r"ERROR SUMMARY: (\d+) errors?$", text, re.MULTILINE)
    return Report(ended, int(summary[-1]) if summary else None, text)


def check(tool: str, names: list[str], cores: str) -> Report:
    """Runs the calls of some kernels in one process under a tool; again, where the tool crashes.

    cores: of the process, as taskset takes them.
    """
    # `timeout` ends the tool's children, too, which would hold the output open.
    command = ["taskset", "--cpu-list", cores, "timeout", "--kill-after=5", str(_MOST_SECONDS)]
    command += ["compute-sanitizer", "--tool", tool, "--kernel-name", "kns=fa4"]
    command += [sys.executable, "-m", "tests.gpu.sanitize", tool, "--run", *names]
    report, start = parse(""), time.monotonic()
    for _ in range(_TRIES):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        report = parse(done.stdout + done.stderr)
        if report.errors is not None or time.monotonic() - start > _MOST_SECONDS:
            break
    return dataclasses.replace(report, seconds=time.monotonic() - start)


def shares_of_cores(processes: int) -> queue.SimpleQueue[str]:
    """Returns lists of cores, one for each process; they overlap where there are fewer cores."""
    cores = sorted(os.sched_getaffinity(0))
    share, shares = max(len(cores) // processes, 1), queue.SimpleQueue[str]()
    for process in range(processes):
        first = process * share % len(cores)
        shares.put(",".join(map(str, cores[first : first + share])))
    return shares


def main() -> int:
    """Returns 1 if something is reported or missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("tool", choices=TOOLS)
    parser.add_argument("--only", default="*", help="pattern of the kernels' names")
    parser.add_argument("--processes", type=int, default=8, help="beside each other (8)")
    parser.add_argument("--run", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        for key in checked_keys():
            if key.name in options.run:
                for case in cases(key):
                    run(key, case)
                print("ended", key.name, flush=True)
        return 0
    if shutil.which("compute-sanitizer") is None:
        raise SystemExit("compute-sanitizer is not on the path")
    console, wanted = Console(width=120), [key.name for key in checked_keys(options.only)]
    firsts = range(0, len(wanted), _KERNELS_OF_PROCESS)
    groups = [wanted[first : first + _KERNELS_OF_PROCESS] for first in firsts]
    missing, reported, shares = set(wanted), 0, shares_of_cores(options.processes)

    def checked(names: list[str]) -> Report:
        cores = shares.get()
        try:
            return check(options.tool, names, cores)
        finally:
            shares.put(cores)

    with ThreadPoolExecutor(options.processes) as pool:
        running = {pool.submit(checked, names): names for names in groups}
        for done in track(as_completed(running), options.tool, len(groups)):
            names, report = running[done], done.result()
            missing -= report.ended
            # Each at once: a run that is ended before its time has said what is done.
            ended = " ".join(sorted(report.ended))
            console.print(f"{report.seconds:.0f} s, {report.errors} errors, ended: {ended}")
            if report.errors or report.errors is None:
                reported += 1
                said = f"{report.first_lines()}\n...\n{report.text[-_MOST_CHARACTERS:]}"
                console.print(f"{', '.join(names)}: {report.errors} errors\n{said}")
    console.print(f"{len(wanted) - len(missing)} of {len(wanted)} kernels' calls came to their end")
    if missing:
        console.print(f"not: {', '.join(sorted(missing))}")
    return int(bool(missing) or reported > 0)


if __name__ == "__main__":
    raise SystemExit(main())
