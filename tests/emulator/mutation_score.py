"""Every change of the kernels' synchronisation, and which of them are noticed.

    python -m tests.emulator.mutation_score [--only "sm_100f_bwd*_d64*"] [--kind moved] [--every 3]

takes all mutations of the kernels in survivors.SURVIVORS, a second or two each; test_mutations.py
some of them. Scores grow from the last key, where the forward begins, to the first, and numerics
are exact, so that every block rescales; one CTA works on every tile of a persistent forward, two on
those of a backward. A record keeps what has been tried, so that a second run goes on from there.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import hashlib
import itertools
import json
import multiprocessing
import pathlib
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

import numpy as np
from rich.console import Console
from rich.progress import track

from fa4_jax import catalogue, designs, splits
from fa4_jax.conformance.case import Case
from fa4_jax.conformance.oracle import make_inputs, with_tangents
from fa4_jax.key import (
    HESSIAN_PASSES,
    KernelKey,
    Pass,
)
from kernels.emulator import Policy
from tests.emulator import attention, mutation_cases
from tests.emulator.attention import Attention
from tests.emulator.mutations import Mutation, Trial, moved, mutations, notices
from tests.emulator.split_launches import launch_in_pages
from tests.emulator.survivors import MOVED_SURVIVORS, SURVIVORS, write_moved

FORWARDS = (Pass.FORWARD, Pass.FORWARD_SPLIT, Pass.FORWARD_JOIN)
OF_DERIVATIVES = (Pass.TANGENT, *HESSIAN_PASSES)


@dataclasses.dataclass(frozen=True)
class Result:
    """What came of a mutation; `rule` is "" if nothing noticed it in `trials` trials."""

    kernel: str
    digest: str
    line: int
    change: str
    rule: str
    trials: int
    seconds: float
    commit: str

    @property
    def kind(self) -> str:
        """See Mutation.kind."""
        return Mutation(self.line, self.change, "").kind


def policies(key: KernelKey) -> tuple[Policy, ...]:
    """The policies under which every case is tried, in this order."""
    return (
        Policy(
            "random",
            "late",
            global_races=key.kernel not in (*FORWARDS, *OF_DERIVATIVES),
            ordered_reductions=key.deterministic,
            most_steps=100_000,
        ),
        Policy("starve", "random", global_races=True, most_steps=100_000),
        Policy("in_order", "early", most_steps=100_000),
    )


_SEEDS = (5, 6)
"""Two seeds, which starve different warps; in Hopper's banded forward, two of warpgroup 0."""


def problem(key: KernelKey, case: Case) -> Attention:
    """The launch of a kernel with one of `mutation_cases.cases`, on what those before it left."""
    inputs = attention.reversed_keys(case, make_inputs(case, 0))
    if key.kernel in OF_DERIVATIVES:
        inputs = with_tangents(case, inputs, 0)
    backward = key.kernel not in (*FORWARDS, Pass.TANGENT)
    launch = attention.attention(case, inputs, backward, key.arch, designs.design_of(key))
    launch = launch_in_pages(launch, case) if key.paged else launch
    launch = launch.only(key.kernel)
    assert launch.keys == (key,), launch.keys
    if key.kernel is Pass.FORWARD_SPLIT:
        # One part, whose results are compared; two have the same synchronisation.
        parts = splits.shape(1, *launch.arrays["parts"].shape[1:3])
        arrays = launch.arrays | {"parts": np.zeros(parts, np.int32)}
        launch = dataclasses.replace(launch, arrays=arrays)
    # CTAs of a backward wait for each other's additions to dQ; those of a forward do not meet.
    ctas = 2 if key.kernel is Pass.BACKWARD else 1
    return dataclasses.replace(launch, multiprocessors=ctas)


def problems(key: KernelKey) -> list[Attention]:
    """The launches of a kernel that its mutations are put through."""
    return [problem(key, case) for case in mutation_cases.cases(key)]


class Trials:
    """What every mutation of a kernel is put through, in this order.

    A problem's launches and results are made when a mutation first comes to it, which most do not.
    """

    def __init__(self, key: KernelKey) -> None:
        self._made: list[Trial] = []
        self._others = _trials(key)

    def __iter__(self) -> Iterator[Trial]:
        for place in itertools.count():
            if place == len(self._made):
                self._made += itertools.islice(self._others, 1)
            if place == len(self._made):
                return
            yield self._made[place]


def _trials(key: KernelKey) -> Iterator[Trial]:
    """A run starves one warp, by its seed; at last others starve in the problem of most tiles."""
    several, trial = policies(key), None
    (starving,) = (policy for policy in several if policy.schedule == "starve")
    for case in mutation_cases.cases(key):
        launch = problem(key, case)
        expected = launch.run(Policy())
        for seed, policy in enumerate(several):
            trial = Trial(launch, expected, policy, seed)
            yield trial
    assert trial is not None
    for seed in _SEEDS:
        yield dataclasses.replace(trial, policy=starving, seed=seed)


def trials(key: KernelKey) -> list[Trial]:
    """All of them."""
    return list(Trials(key))


_TRIALS: list[Trial] = []
"""What the processes of a pool inherit."""


def _notices(mutation: Mutation) -> tuple[str, int, float]:
    start = time.process_time()
    return *notices(_TRIALS, mutation), round(time.process_time() - start, 2)


def try_all(
    key: KernelKey, chosen: Sequence[Mutation], record: pathlib.Path, processes: int
) -> list[Result]:
    """Results of the chosen mutations: those of a record, and those that it lacks.

    The record then has these, too.
    """
    text = attention.ptx(key).text
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    known = {}
    if record.exists():
        found = (Result(**json.loads(line)) for line in record.read_text().splitlines())
        of_text = (some for some in found if (some.kernel, some.digest) == (key.name, digest))
        known = {(result.line, result.change): result for result in of_text}
    left = [change for change in chosen if (change.line, change.change) not in known]
    if left:
        _TRIALS[:] = trials(key)
        attention.close()
        context, commit = multiprocessing.get_context("fork"), _commit()
        with ProcessPoolExecutor(processes, context) as pool, record.open("a") as file:
            for change, (rule, count, seconds) in zip(
                left, track(pool.map(_notices, left), key.name, len(left)), strict=True
            ):
                found = (change.line, change.change, rule, count, seconds)
                result = Result(key.name, digest, *found, commit)
                print(json.dumps(dataclasses.asdict(result)), file=file, flush=True)
                known[change.line, change.change] = result
    return [known[change.line, change.change] for change in chosen]


def _commit() -> str:
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return found.stdout.strip()


def surviving(results: Sequence[Result]) -> Counter[str]:
    """Kinds of the mutations that nothing noticed."""
    return Counter(result.kind for result in results if not result.rule)


def show(console: Console, results: list[Result], of: int) -> None:
    """A Markdown row of a kernel, and its survivors; `of` is how many mutations it has."""
    noticed = [result for result in results if result.rule]
    rules = Counter(result.rule for result in noticed).most_common()
    console.print(
        f"| {results[0].kernel} | {of} | {len(results)} | {len(noticed)} |"
        f" {100 * len(noticed) / len(results):.1f} % |"
        f" {', '.join(f'{rule} {count}' for rule, count in rules)} |",
        soft_wrap=True,
    )
    for result in results:
        if not result.rule:
            text = f"  survives: line {result.line}, {result.change}"
            console.print(text, markup=False, soft_wrap=True)


KINDS = {"changed": (mutations, SURVIVORS), "moved": (moved, MOVED_SURVIVORS)}
"""What is done to an instruction (it is dropped, weakened or counts otherwise; or it moves), and
what survives."""


def main() -> int:
    """Prints which mutations are noticed; returns 1 if others survive than SURVIVORS says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="*", help="pattern of the kernels' names")
    parser.add_argument("--kind", choices=KINDS, help="one kind of mutations, not both")
    parser.add_argument("--every", type=int, default=1, help="try every nth of a kind alone")
    default = pathlib.Path("build/mutations.jsonl")
    parser.add_argument("--record", type=pathlib.Path, default=default, metavar="FILE.jsonl")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--write", action="store_true", help="keep what survives of the moves as expected"
    )
    options, console, others = parser.parse_args(), Console(), False
    options.record.parent.mkdir(parents=True, exist_ok=True)
    keys = {key.name: key for key in catalogue.all_keys()}
    for name in fnmatch.filter(SURVIVORS, options.only):
        for kind in [options.kind] if options.kind else KINDS:
            make, survivors = KINDS[kind]
            every = list(make(attention.ptx(keys[name]).text))
            some = every[:: options.every]
            results = try_all(keys[name], some, options.record, options.processes)
            show(console, results, len(every))
            left, known = surviving(results), survivors.get(name, Counter())
            if options.write and kind == "moved" and len(some) == len(every):
                survivors[name] = known = left
            others |= left != known if len(some) == len(every) else not left <= known
    if options.write:
        write_moved(MOVED_SURVIVORS)
    return int(others)


if __name__ == "__main__":
    raise SystemExit(main())
