"""The kernels on the emulator: each of both architectures, conformance cases, many seeded policies.

    python -m tests.emulator.kernel_conformance --seeds 20 [--only "sm_100f_bwd_*"]

The command runs the conformance cases of at most 700 query rows and keys as they are, forward and
backward. A kernel that fewer than --least of them reach gets smaller cases, with its storage type,
head dim, numerics and order of summation. --covering runs the small problems of mutation_score
instead, one a seed, which reach every synchronising instruction of a kernel. A backward runs after
one ordinary forward, which has runs of its own. A process runs up to four seeds of one problem one
after another, which share that forward and the oracle. The order is by their first seed, so that
--minutes cuts off the last seeds of every case. Outcomes are added to --record at once, and a
second run goes on from there: it counts runs of the same kernel text under the same emulator.
--note prints what a record says and runs nothing. With --ptx the texts are those of a folder that
`kernels.build --ptx` wrote, so that the many cores of a machine without the compiler can help.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import functools
import hashlib
import itertools
import json
import multiprocessing
import pathlib
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait

import numpy as np
from rich.console import Console
from rich.progress import Progress

from fa4_jax import catalogue, designs
from fa4_jax.conformance.cases import CASES, Case
from fa4_jax.conformance.compare import Verdict, compare
from fa4_jax.conformance.oracle import (
    REFERENCE_SHIFTS,
    Inputs,
    judges,
    make_inputs,
    oracle,
    ordinary,
    with_tangents,
)
from fa4_jax.key import HESSIAN_PASSES, KernelKey, Pass
from fa4_jax.plan import hessian_keys, kernel_keys, tangent_key
from kernels import emulator
from kernels.emulator import EmulationError, Policy
from tests.emulator import attention, mutation_cases
from tests.emulator.mutation_score import FORWARDS, OF_DERIVATIVES
from tests.emulator.split_launches import in_parts, launch_in_pages

MOST_ROWS = 700
MOST_SCORES = 200_000  # of all heads, of a case for a kernel that few cases reach
PROCESSES = 2
_TOGETHER = 4  # runs of a problem that a process does, so that --minutes is met in time
QUANTITIES = {
    Pass.FORWARD: ("output", "lse"),
    Pass.FORWARD_SPLIT: ("output", "lse"),
    Pass.TANGENT: ("output_tangent", "lse_tangent"),
    Pass.HESSIAN_QUERY: ("dq_tangent",),
    Pass.HESSIAN_KEY: ("dk_tangent", "dv_tangent"),
    Pass.BACKWARD: ("dq", "dk", "dv"),
    Pass.BIAS_GRADIENT: ("dbias",),
}
"""What comes of a kernel, and of those that it needs before and after it."""

OF_BACKWARD = (Pass.BACKWARD, Pass.BIAS_GRADIENT)

ADVERSARIES = (
    Policy("random", "late", start_order="random", global_races=True),
    Policy("starve", "random", start_order="reversed", global_races=True),
    Policy("in_order", "early", resident_ctas=1),
)
"""Three policies that differ as much as possible, for tests that run a case under one of them."""

POLICIES = tuple(
    Policy(schedule, asynchronous, resident_ctas, global_races=True, most_steps=2_000_000)
    for schedule, asynchronous, resident_ctas in itertools.product(
        ("random", "starve", "in_order"), ("late", "random", "early"), (4, 1)
    )
)

START_ORDERS = ("index", "reversed", "random")


@dataclasses.dataclass(frozen=True)
class Problem:
    """A forward, tangents, or a backward, of a case with the inputs of a seed."""

    case: Case
    kernel: Pass
    arch: str
    inputs_seed: int
    design: str | None = None
    paged: bool = False


@dataclasses.dataclass(frozen=True)
class Run:
    """One case under one policy; for a backward's key, all its kernels except the forward run."""

    case: Case
    key: KernelKey
    seed: int

    @property
    def name(self) -> str:
        """What --only is matched with."""
        return f"{self.key.name}/{self.case.id}"

    @property
    def policy(self) -> Policy:
        """All of POLICIES in turn, with each start order; neighbours differ as much as possible."""
        return dataclasses.replace(
            POLICIES[7 * self.seed % len(POLICIES)],
            ordered_reductions=self.key.deterministic,
            start_order=START_ORDERS[(self.seed + self.seed // 3) % len(START_ORDERS)],
        )

    @property
    def problem(self) -> Problem:
        """The inputs are one of two."""
        design = designs.design_of(self.key)
        kernel, paged = self.key.kernel, self.key.paged
        return Problem(self.case, kernel, self.key.arch, self.seed // 2 % 2, design, paged)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of a run: a line of a record.

    Attributes:
      run: Run.name.
      text: digest of the kernel's PTX.
      emulator: digest of the emulator's sources.
      failure: a broken rule, a wrong result, or "".
      worst: the largest error relative to what is allowed.
      bits: digest of a deterministic kernel's results, which the inputs alone decide.
      seconds: of the processor.
    """

    run: str
    seed: int
    text: str
    emulator: str
    commit: str
    failure: str
    worst: float
    bits: str
    seconds: float


@functools.cache
def key_of(case: Case, kernel: Pass, arch: str, design: str | None = None) -> KernelKey:
    """The main kernel that a case runs: of a backward, of tangents, or the first of a forward."""
    forward, backward = kernel_keys(case.problem, arch, design=design)
    if kernel is Pass.TANGENT:
        return tangent_key(case.problem, arch)
    if kernel in HESSIAN_PASSES:
        return next(key for key in hessian_keys(case.problem, arch) if key.kernel is kernel)
    if kernel in OF_BACKWARD:
        return next(key for key in backward if key.kernel is kernel)
    return forward[0]


def quantities(case: Case, kernel: Pass) -> tuple[str, ...]:
    """What a kernel returns of a case."""
    largest = ("max_logit",) if case.max_logit and kernel in FORWARDS else ()
    return QUANTITIES[kernel] + largest


@functools.cache
def targets(least: int) -> tuple[tuple[Case, KernelKey], ...]:
    """Cases and the kernels that they reach, every kernel at least `least` times."""
    fitting = [case for case in CASES if max(case.query_length, case.key_length) <= MOST_ROWS]
    found = [
        (case, key)
        for arch in catalogue.ARCHITECTURES
        for kernel in (Pass.FORWARD, *OF_DERIVATIVES, *OF_BACKWARD)
        for case in fitting
        if case.has_kernels(arch, kernel)
        for key in {key_of(case, kernel, arch, design): None for design in designs.DESIGNS}
    ]
    for key in itertools.chain.from_iterable(map(catalogue.keys, catalogue.ARCHITECTURES)):
        if key.kernel not in QUANTITIES:
            continue
        reached = sum(used == key for _, used in found)
        # The cases of masks, heads and numerics come last and ask for most.
        small = (case for case in reversed(fitting) if _scores(case) <= MOST_SCORES)
        others = (pair for pair in _retyped(small, key) if pair not in found)
        found += itertools.islice(others, max(0, least - reached))
    return tuple(found)


def covering(seed: int) -> list[tuple[Case, KernelKey]]:
    """Every kernel with one of its mutations' problems, which together reach all that synchronises.

    Seeds take the problems of a kernel in turn.
    """
    found = []
    for key in catalogue.all_keys():
        if key.kernel in QUANTITIES:
            cases = mutation_cases.cases(key)
            case = cases[seed % len(cases)]
            if key.polynomial_exp2:
                case = dataclasses.replace(case, numerics="fast")
            found.append((case, key))
    return found


def _scores(case: Case) -> int:
    return case.batch * case.heads[0] * case.query_length * case.key_length


def _retyped(cases: Iterable[Case], key: KernelKey) -> Iterator[tuple[Case, KernelKey]]:
    for case, numerics in itertools.product(cases, ("fast", "exact")):
        other = dataclasses.replace(
            case,
            dtype=key.dtype,
            head_dim=key.head_dim,
            value_dim=key.value_dim if key.value_dim != key.head_dim else None,
            numerics=numerics,
            deterministic=key.deterministic,
        )
        taken = other.has_kernels(key.arch, key.kernel)
        if taken and key_of(other, key.kernel, key.arch, designs.design_of(key)) == key:
            yield other, key


# Each is up to 70 MB, in every process.
@functools.lru_cache(maxsize=16)
def _expected(case: Case, seed: int, kernel: Pass) -> list[dict[str, np.ndarray]]:
    """The oracle's results, then those of ordinary computations."""
    inputs = inputs_of(case, seed, kernel)
    with np.errstate(all="ignore"):
        return [
            oracle(case, inputs),
            *(ordinary(case, inputs, shift) for shift in REFERENCE_SHIFTS),
        ]


def inputs_of(case: Case, seed: int, kernel: Pass) -> Inputs:
    """Inputs; of growing cases, odd seeds have the largest scores where the kernel comes last."""
    inputs = make_inputs(case, seed)
    if kernel in OF_DERIVATIVES:
        inputs = with_tangents(case, inputs, seed)
    return attention.reversed_keys(case, inputs) if case.growing and seed % 2 else inputs


def verdicts(problem: Problem, policy: Policy, seed: int) -> list[Verdict]:
    """How the results of the forward, or of the backward, compare with the oracle.

    Raises:
      EmulationError: a kernel broke a rule.
    """
    return judged(problem, launches_of(problem).run(policy, seed))


@functools.lru_cache(maxsize=64)
def launches_of(problem: Problem) -> attention.Attention:
    """The launches of the forward, or those of the backward on what a forward has left."""
    gradients = problem.kernel in (*OF_BACKWARD, *HESSIAN_PASSES)
    inputs = inputs_of(problem.case, problem.inputs_seed, problem.kernel)
    launches = attention.attention(problem.case, inputs, gradients, problem.arch, problem.design)
    if problem.kernel is Pass.FORWARD_SPLIT and problem.inputs_seed:
        launches = in_parts(launches, problem.case, 1)  # whose result is not joined
    if problem.paged:
        launches = launch_in_pages(launches, problem.case)
    if problem.kernel in HESSIAN_PASSES:
        own = [
            key for key in launches.keys if key.kernel not in {*HESSIAN_PASSES} - {problem.kernel}
        ]
        return dataclasses.replace(launches, keys=tuple(own)).only(problem.kernel)
    if problem.kernel is Pass.BIAS_GRADIENT:
        return launches.only(problem.kernel)
    last = next(key for key in reversed(launches.keys) if key.kernel in FORWARDS)
    return launches if problem.kernel in FORWARDS else launches.after(last.kernel)


def judged(problem: Problem, results: dict[str, np.ndarray]) -> list[Verdict]:
    """How results compare with the oracle's."""
    case = problem.case
    polynomial = key_of(case, Pass.FORWARD, problem.arch).polynomial_exp2
    expected, *usual = _expected(case, problem.inputs_seed, problem.kernel)
    return [
        compare(
            name,
            case.dtype,
            results[name],
            expected[name],
            judges(name, expected, usual),
            polynomial,
        )
        for name in quantities(case, problem.kernel)
    ]


def perform(run: Run) -> Outcome:
    """Runs one case and returns the outcome, whatever it is."""
    start = time.process_time()
    failure, worst, bits = "", 0.0, ""
    try:
        results = launches_of(run.problem).run(run.policy, run.seed)
    except EmulationError as error:
        failure = str(error)
    else:
        found = judged(run.problem, results)
        failure = "; ".join(f"{v.name}: {v.failure}" for v in found if v.failure)
        worst = max((v.worst / v.worst_allowed for v in found if v.worst_allowed), default=0.0)
        if run.key.deterministic:
            judged_names = quantities(run.case, run.key.kernel)
            data = b"".join(results[name].tobytes() for name in judged_names)
            bits = hashlib.sha256(data).hexdigest()[:12]
    seconds = round(time.process_time() - start, 2)
    return Outcome(
        run=run.name,
        seed=run.seed,
        text=_digest(run.key),
        emulator=_emulator(),
        commit=_commit(),
        failure=failure,
        worst=round(worst, 3),
        bits=bits,
        seconds=seconds,
    )


def perform_all(runs: Sequence[Run]) -> list[Outcome]:
    """Runs some cases one after another."""
    return [perform(run) for run in runs]


def by_problem(runs: Iterable[Run]) -> list[tuple[Run, ...]]:
    """Runs of the same problem together, at most _TOGETHER, in the order of their first ones."""
    groups = defaultdict(list)
    for run in runs:
        groups[run.problem].append(run)
    parts = [
        tuple(group[first : first + _TOGETHER])
        for group in groups.values()
        for first in range(0, len(group), _TOGETHER)
    ]
    return sorted(parts, key=lambda part: part[0].seed)


def load_texts(runs: Iterable[Run]) -> None:
    """Has this process compile what the runs need: the others inherit the texts."""
    for case, main_key in {(run.case, run.key) for run in runs}:
        gradients = main_key.kernel in (Pass.BACKWARD, *HESSIAN_PASSES)
        design = designs.design_of(main_key)
        inputs = inputs_of(case, 0, main_key.kernel)
        for key in attention.attention(case, inputs, gradients, main_key.arch, design).keys:
            attention.ptx(key)
    attention.close()


@functools.cache
def _digest(key: KernelKey) -> str:
    return hashlib.sha256(attention.ptx(key).text.encode()).hexdigest()[:12]


@functools.cache
def _emulator() -> str:
    sources = sorted(pathlib.Path(emulator.__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(map(pathlib.Path.read_bytes, sources))).hexdigest()[:12]


@functools.cache
def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def recorded(record: pathlib.Path) -> list[Outcome]:
    """The lines of a record."""
    lines = record.read_text().splitlines() if record.exists() else []
    return [Outcome(**json.loads(line)) for line in lines]


def note(outcomes: list[Outcome]) -> str:
    """A Markdown table of the kernels, then every failure."""
    by_kernel = defaultdict(list)
    for outcome in outcomes:
        by_kernel[outcome.run.split("/")[0], outcome.text].append(outcome)
    head = ("kernel", "text", "commit", "cases", "runs", "fewest seeds", "failures", "worst error")
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for (kernel, text), some in sorted(by_kernel.items()):
        seeds, bits = defaultdict(int), defaultdict(set)
        for outcome in some:
            seeds[outcome.run] += 1
            if not outcome.failure:
                bits[outcome.run, outcome.seed // 2 % 2].add(outcome.bits)
        failures = sum(bool(outcome.failure) for outcome in some)
        differing = sum(len(found) > 1 for found in bits.values())
        cells = (
            *(kernel, text, ", ".join(sorted({outcome.commit for outcome in some}))),
            *(len(seeds), len(some), min(seeds.values())),
            f"{failures}, {differing} with other bits" if differing else failures,
            f"{max(outcome.worst for outcome in some):.2f}",
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    failed = [f"- {o.run} seed {o.seed}: {o.failure}" for o in outcomes if o.failure]
    return "\n".join([*lines, *(["", *failed] if failed else [])])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20, help="policies that each case meets")
    parser.add_argument(
        "--first-seed", type=int, default=0, help="where another record has the seeds below it"
    )
    parser.add_argument("--least", type=int, default=2, help="cases that reach each kernel")
    parser.add_argument(
        "--covering", action="store_true", help="the problems of mutation_score, not the cases"
    )
    parser.add_argument("--only", nargs="+", default=["*"], metavar="GLOB", help="kernel/case")
    parser.add_argument("--minutes", type=float, default=1e9, help="no run starts after these")
    parser.add_argument("--processes", type=int, default=PROCESSES)
    parser.add_argument("--ptx", type=pathlib.Path, metavar="FOLDER", help="of the kernels' texts")
    default = pathlib.Path("build/conformance.jsonl")
    parser.add_argument("--record", type=pathlib.Path, default=default, metavar="FILE.jsonl")
    parser.add_argument("--note", action="store_true")
    return parser.parse_args()


def main() -> int:
    """Returns how many runs failed."""
    options, console = _options(), Console()
    if options.note:
        print(note(recorded(options.record)))
        return 0
    listed = [] if options.covering else targets(options.least)
    chosen = [
        run
        for seed in range(options.first_seed, options.seeds)
        for run in (Run(case, key, seed) for case, key in listed or covering(seed))
        if any(fnmatch.fnmatchcase(run.name, glob) for glob in options.only)
    ]
    if options.ptx:
        attention.read_ptx(options.ptx)
    else:
        load_texts(chosen)
    known = {(o.run, o.seed, o.text, o.emulator) for o in recorded(options.record)}
    digest = _emulator()
    left = [run for run in chosen if (run.name, run.seed, _digest(run.key), digest) not in known]
    options.record.parent.mkdir(parents=True, exist_ok=True)
    failures, end = 0, time.monotonic() + 60 * options.minutes
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(options.processes, context) as pool, options.record.open("a") as file:
        waiting = {pool.submit(perform_all, runs) for runs in by_problem(left)}
        with Progress(console=console) as progress:
            task = progress.add_task("runs", total=len(left))
            while waiting:
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                for outcome in itertools.chain.from_iterable(x.result() for x in done):
                    print(json.dumps(dataclasses.asdict(outcome)), file=file, flush=True)
                    progress.advance(task)
                    failures += bool(outcome.failure)
                    if outcome.failure:
                        console.print(f"{outcome.run}: {outcome.failure}")
                if time.monotonic() > end:  # What runs already is waited for.
                    waiting = {x for x in waiting if not x.cancel()}
    print(note(recorded(options.record)))
    return failures


if __name__ == "__main__":
    raise SystemExit(main())
