"""The Blackwell forward on the emulator: every kernel, conformance cases, many seeded policies.

    python -m tests.emulator.blackwell_conformance --seeds 20 --report report.json

runs the conformance cases of at most 700 query rows and keys as they are. A kernel that fewer than
--least of them reach gets others, with its storage type, head dim and numerics. Seed by seed: what
--minutes cuts off are the last seeds of every case, and a second run may go on --from there.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import fnmatch
import functools
import itertools
import json
import multiprocessing
import pathlib
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from fa4_jax import catalogue
from fa4_jax.conformance.cases import CASES, Case
from fa4_jax.conformance.compare import Verdict, compare
from fa4_jax.conformance.oracle import REFERENCE_SHIFTS, Inputs, make_inputs, oracle, ordinary
from fa4_jax.key import KernelKey, Pass
from kernels.emulator import EmulationError, Policy
from tests.emulator import attention

ARCH = "sm_100f"
MOST_ROWS = 700
PROCESSES = 2
QUANTITIES = ("output", "lse")

POLICIES = tuple(
    Policy(schedule, asynchronous, resident_ctas, global_races=True, most_steps=2_000_000)
    for schedule, asynchronous, resident_ctas in itertools.product(
        ("random", "starve", "in_order"), ("late", "random", "early"), (4, 1)
    )
)


@dataclasses.dataclass(frozen=True)
class Run:
    """One case under one policy."""

    case: Case
    key: KernelKey
    seed: int

    @property
    def name(self) -> str:
        """What --only is matched with."""
        return f"{self.key.name}/{self.case.id}"

    @property
    def policy(self) -> Policy:
        """All of POLICIES in turn, neighbours as different as can be."""
        return POLICIES[7 * self.seed % len(POLICIES)]

    @property
    def inputs_seed(self) -> int:
        """One of two."""
        return self.seed // 2 % 2


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a run.

    Attributes:
      failure: a broken rule, a wrong result, or "".
      errors: by quantity the largest error, relative to what is allowed.
      seconds: of the processor.
    """

    run: Run
    failure: str
    errors: dict[str, float]
    seconds: float


def forward_key(case: Case) -> KernelKey:
    """The kernel that a case runs."""
    (key,) = attention.attention(case, make_inputs(case, 0), gradients=False, arch=ARCH).keys
    return key


def targets(least: int) -> list[tuple[Case, KernelKey]]:
    """Cases and the kernels that they reach; every kernel at least so often."""
    fitting = [
        case
        for case in CASES
        if case.has_kernel and max(case.query_length, case.key_length) <= MOST_ROWS
    ]
    found = [(case, forward_key(case)) for case in fitting]
    for key in catalogue.keys(ARCH):
        if key.kernel is not Pass.FORWARD:
            continue
        reached = sum(used == key for _, used in found)
        # The cases of masks, heads and numerics come last and ask for most.
        others = _retyped(reversed(fitting), key)
        found += itertools.islice(others, max(0, least - reached))
    return list(dict.fromkeys(found))


def _retyped(cases: Iterator[Case], key: KernelKey) -> Iterator[tuple[Case, KernelKey]]:
    numerics = ("fast", "exact")
    for case, mode in itertools.product(cases, numerics):
        other = dataclasses.replace(case, dtype=key.dtype, head_dim=key.head_dim, numerics=mode)
        if case.head_dim == key.head_dim and case.dtype == key.dtype:
            continue
        if forward_key(other) == key:
            yield other, key


@functools.lru_cache(maxsize=256)
def _expected(case: Case, seed: int) -> list[dict[str, np.ndarray]]:
    """The oracle's output and LSE, then those of ordinary computations."""
    inputs = inputs_of(case, seed)
    with np.errstate(all="ignore"):
        found = [oracle(case, inputs)]
        found += [ordinary(case, inputs, shift) for shift in REFERENCE_SHIFTS]
    return [{name: some[name] for name in QUANTITIES} for some in found]


def inputs_of(case: Case, seed: int) -> Inputs:
    """Inputs; of growing cases, odd seeds have the largest scores where the kernel comes last."""
    inputs = make_inputs(case, seed)
    return attention.reversed_keys(case, inputs) if case.growing and seed % 2 else inputs


def verdicts(case: Case, policy: Policy, seed: int, inputs_seed: int) -> list[Verdict]:
    """How output and LSE of the forward kernel compare with the oracle.

    Raises:
      EmulationError: the kernel broke a rule.
    """
    inputs = inputs_of(case, inputs_seed)
    launches = attention.attention(case, inputs, gradients=False, arch=ARCH)
    polynomial = any(key.polynomial_exp2 for key in launches.keys)
    results = launches.run(policy, seed)
    expected, *usual = _expected(case, inputs_seed)
    return [
        compare(
            name,
            case.dtype,
            results[name],
            expected[name],
            [some[name] for some in usual],
            polynomial,
        )
        for name in QUANTITIES
    ]


def perform(run: Run) -> Outcome:
    """One run, whatever comes of it."""
    start = time.process_time()
    try:
        found = verdicts(run.case, run.policy, run.seed, run.inputs_seed)
    except EmulationError as error:
        return Outcome(run, str(error), {}, time.process_time() - start)
    failures = [f"{verdict.name}: {verdict.failure}" for verdict in found if verdict.failure]
    errors = {
        verdict.name: verdict.worst / verdict.worst_allowed
        for verdict in found
        if verdict.worst_allowed
    }
    return Outcome(run, "; ".join(failures), errors, time.process_time() - start)


def summary(outcomes: list[Outcome]) -> list[dict]:
    """By kernel: cases, runs, failures, seeds of the case with the fewest, worst errors."""
    by_kernel = defaultdict(list)
    for outcome in outcomes:
        by_kernel[outcome.run.key.name].append(outcome)
    rows = []
    for kernel, some in sorted(by_kernel.items()):
        runs = defaultdict(int)
        for outcome in some:
            runs[outcome.run.case] += 1
        worst = {
            name: max((outcome.errors.get(name, 0.0) for outcome in some), default=0.0)
            for name in QUANTITIES
        }
        rows.append(
            {
                "kernel": kernel,
                "cases": len(runs),
                "runs": len(some),
                "fewest_seeds": min(runs.values()),
                "failures": sum(bool(outcome.failure) for outcome in some),
                "worst_relative_to_allowed": worst,
            }
        )
    return rows


def show(console: Console, rows: list[dict], failed: list[Outcome]) -> None:
    """The table, and every failure."""
    columns = ("kernel", "cases", "runs", "failures", "output", "LSE")
    table = Table(*columns, title="worst error relative to what is allowed")
    for row in rows:
        worst = row["worst_relative_to_allowed"]
        counts = (str(row[name]) for name in ("cases", "runs", "failures"))
        table.add_row(row["kernel"], *counts, *(f"{worst[name]:.2f}" for name in QUANTITIES))
    console.print(table)
    for outcome in failed:
        policy = outcome.run.policy
        console.print(f"{outcome.run.name} seed {outcome.run.seed} {policy}: {outcome.failure}")


def report(outcomes: list[Outcome], rows: list[dict]) -> dict:
    """What --report writes."""
    return {
        "date": datetime.date.today().isoformat(),
        "runs": len(outcomes),
        "cpu_seconds": round(sum(outcome.seconds for outcome in outcomes)),
        "seeds": sorted({outcome.run.seed for outcome in outcomes}),
        "kernels": rows,
        "failures": [
            {
                "run": outcome.run.name,
                "seed": outcome.run.seed,
                "policy": dataclasses.asdict(outcome.run.policy),
                "failure": outcome.failure,
            }
            for outcome in outcomes
            if outcome.failure
        ],
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20, help="policies that each case meets")
    parser.add_argument("--from", type=int, default=0, dest="first", help="the first seed")
    parser.add_argument("--least", type=int, default=2, help="cases that reach each kernel")
    parser.add_argument("--only", default="*", metavar="GLOB", help="kernel/case")
    parser.add_argument("--minutes", type=float, default=1e9, help="no run starts after these")
    parser.add_argument("--report", type=pathlib.Path, metavar="FILE.json")
    return parser.parse_args()


def main() -> int:
    """Returns how many runs failed, or 1 if there was nothing to run."""
    options, console = _options(), Console()
    chosen = [
        run
        for seed in range(options.first, options.first + options.seeds)
        for run in (Run(case, key, seed) for case, key in targets(options.least))
        if fnmatch.fnmatchcase(run.name, options.only)
    ]
    if not chosen:
        console.print(f"nothing matches {options.only}")
        return 1
    for key in sorted({run.key for run in chosen}):
        attention.ptx(key)  # The processes inherit it.
    attention.close()
    outcomes, end = [], time.monotonic() + 60 * options.minutes
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(PROCESSES, context) as pool, Progress(console=console) as progress:
        task = progress.add_task("runs", total=len(chosen))
        while chosen and time.monotonic() < end:
            some, chosen = chosen[:32], chosen[32:]
            for outcome in pool.map(perform, some):
                outcomes.append(outcome)
                progress.advance(task)
                if outcome.failure:
                    console.print(f"{outcome.run.name}: {outcome.failure}")
    rows = summary(outcomes)
    show(console, rows, [outcome for outcome in outcomes if outcome.failure])
    if options.report:
        options.report.write_text(json.dumps(report(outcomes, rows), indent=1) + "\n")
    return sum(bool(outcome.failure) for outcome in outcomes)


if __name__ == "__main__":
    raise SystemExit(main())
