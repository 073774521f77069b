"""Compares random calls with float64: masks, biases, groups, lengths, soft caps, sinks together.

    python -m tests.gpu.random_cases --count 2000 --processes 14            # on a GPU: the kernels
    python -m tests.gpu.random_cases --pairs --count 2000 --processes 14    # with the next two
    python -m tests.gpu.random_cases --count 20 --implementation xla        # anywhere

With `--pairs` masks of pairs and biases take part, too; some such calls have no kernels, and are
drawn anew unless `--implementation default` says otherwise. The comparison and its tolerances are
those of the conformance cases. It returns 1 if a call is not within them. `--seed` repeats a run,
and with `--first` a part of it.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import functools
import multiprocessing
import os
import secrets
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from fa4_jax.api import Implementation
from fa4_jax.conformance import biases, row_masks
from fa4_jax.conformance.cases import Case
from fa4_jax.conformance.compare import Verdict
from fa4_jax.conformance.runner import run_case
from fa4_jax.key import Pass

HEAD_DIMS = ((64, 64), (128, 128), (256, 256), (96, 96), (192, 192), (192, 128), (80, 48))
"""Of query and key, and of value."""

HEADS = ((1, 1), (2, 2), (2, 1), (4, 2), (3, 1), (4, 1))
MASKS = ((), ("segments",), ("scattered",), ("rising",), ("unsorted",), ("ranges",), ("chunked",))
MORE_MASKS = ((), (), ("window",), ("ranges",), ("chunked",), ("prefix",))
SOFT_CAPS = (None, None, 2.0, 30.0)
PAIR_MASKS = tuple(name for name, kind in row_masks.KINDS.items() if kind.of_pairs)
MOST_KEYS = 1000
"""Of a call with biases: some blocks of keys are then far from all rows of a tile."""


def draw(rng: np.random.Generator) -> Case:
    """Returns a random case; half of them are as long on both sides."""

    def one(options: Any) -> Any:
        return options[rng.integers(len(options))]

    def chance(probability: float) -> bool:
        return bool(rng.random() < probability)

    batch = int(rng.integers(1, 4))
    rows = int(rng.integers(1, 400))
    keys = rows if chance(0.5) else int(rng.integers(1, 400))
    head_dim, value_dim = one(HEAD_DIMS)
    is_causal = chance(0.5)
    masks = {*one(MASKS), *one(MORE_MASKS)}
    if is_causal:
        masks.discard("prefix")  # It contains causality; together they are an error.
    window = None
    if chance(0.3):
        left, right = (int(x) for x in rng.integers(0, 200, 2))
        window = (left, 0 if is_causal else right)

    def lengths(longest: int) -> tuple[int, ...] | None:
        if chance(0.6):
            return None
        return tuple(int(x) for x in rng.integers(0, longest + 1, batch))

    return Case(
        dtype=one(("bf16", "bf16", "fp16")),
        head_dim=head_dim,
        value_dim=None if value_dim == head_dim else value_dim,
        batch=batch,
        heads=one(HEADS),
        query_length=rows,
        key_length=keys,
        is_causal=is_causal,
        window=window,
        query_offset=int(rng.integers(-50, 200)) if chance(0.3) else 0,
        query_lengths=lengths(rows),
        key_lengths=lengths(keys),
        masks=tuple(sorted(masks)),
        soft_cap=one(SOFT_CAPS),
        sinks=chance(0.4),
        max_logit=chance(0.2),
        deterministic=chance(0.4),
        magnitude=one((1.0, 1.0, 3.0)),
    )


def draw_pairs(rng: np.random.Generator) -> Case:
    """Returns a random case with a mask of pairs, a bias or both, and some of what `draw` has."""
    case = draw(rng)
    rows = case.query_length
    keys = rows if rng.random() < 0.3 else int(rng.integers(1, MOST_KEYS))
    sizes = case.batch, case.heads[0], rows, keys

    def shape() -> tuple[int, int, int, int]:
        b, n, t, s = (size if rng.random() < 0.6 else 1 for size in sizes)
        return b, n, t, s

    masks, mask, bias = case.masks, None, None
    kind = rng.random()
    if kind < 0.5:
        forms = (*biases.KINDS, *["dense"] * len(biases.KINDS))
        bias = forms[rng.integers(len(forms))]
        bias = (*shape()[:3], keys) if bias == "dense" else bias
    if kind < 0.25:  # A bias alone has kernels.
        masks, case = (), dataclasses.replace(case, soft_cap=None, sinks=False, max_logit=False)
    elif rng.random() < 0.3:
        mask = shape()
    else:
        masks = tuple({*masks, PAIR_MASKS[rng.integers(len(PAIR_MASKS))]})
    lengths = case.key_lengths
    if lengths is not None:
        lengths = tuple(int(x) for x in rng.integers(0, keys + 1, case.batch))
    return dataclasses.replace(
        case,
        key_length=keys,
        key_lengths=lengths,
        query_offset=int(rng.integers(-50, max(keys, 1))) if rng.random() < 0.5 else 0,
        masks=tuple(sorted(masks)),
        mask=mask,
        bias=bias,
    )


def case_of(seed: int, number: int, implementation: Implementation, pairs: bool = False) -> Case:
    """Returns the case of a number, which does not depend on how many there are."""
    rng = np.random.default_rng([seed, number])
    if not pairs:
        return draw(rng)
    while True:
        case = draw_pairs(rng)
        if implementation != "kernel" or case.has_kernels("sm_90a", Pass.BACKWARD):
            return case


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The verdicts on a case, or why there are none."""

    number: int
    case: Case
    verdicts: list[Verdict]
    error: str | None = None

    @property
    def failures(self) -> list[str]:
        """What is wrong, a line each."""
        found = [f"{v.name}: {v.failure}" for v in self.verdicts if v.failure]
        return found if self.error is None else [self.error]


def judge(number: int, seed: int, implementation: Implementation, pairs: bool = False) -> Outcome:
    """Runs a case, both ways."""
    case = case_of(seed, number, implementation, pairs)
    try:
        return Outcome(number, case, run_case(case, number, implementation))
    except Exception as error:  # A call that raises is a failure of its own, not of the run.
        return Outcome(number, case, [], f"{type(error).__name__}: {error}")


def report(outcomes: list[Outcome], console: Console) -> int:
    """Prints failures and how near the others come; returns the number of failures."""
    shares: dict[str, list[float]] = collections.defaultdict(list)
    for outcome in outcomes:
        for v in outcome.verdicts:
            shares[v.name].append(v.worst / v.worst_allowed if v.worst_allowed else 0.0)
    table = Table("quantity", "cases", "median of error / allowed", "largest")
    for name, values in shares.items():
        table.add_row(name, str(len(values)), f"{np.median(values):.2f}", f"{max(values):.2f}")
    console.print(table)
    failed = [outcome for outcome in outcomes if outcome.failures]
    for outcome in failed:
        console.print(f"case {outcome.number} {outcome.case.id}: {'; '.join(outcome.failures)}")
    fields = (
        "masks",
        "mask",
        "bias",
        "is_causal",
        "window",
        "soft_cap",
        "sinks",
        "max_logit",
        "deterministic",
    )
    counts = {x: sum(bool(getattr(o.case, x)) for o in outcomes) for x in fields}
    counts["groups"] = sum(o.case.heads[0] != o.case.heads[1] for o in outcomes)
    counts["lengths"] = sum(o.case.problem.has_lengths for o in outcomes)
    console.print(f"{len(outcomes)} cases, {len(failed)} failed; with {counts}")
    return len(failed)


def main() -> int:
    """Runs what the command line asks for; returns 1 if a case failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=None, help="of the run; a fresh one by default")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--pairs", action="store_true", help="with masks of pairs and biases")
    names = ("kernel", "xla", "default")
    parser.add_argument("--implementation", choices=names, default="kernel")
    options = parser.parse_args()
    seed = secrets.randbits(32) if options.seed is None else options.seed
    console = Console(width=160)
    console.print(f"--seed {seed}")
    # Several processes share the GPU's memory, and numpy's threads would fight over the cores.
    os.environ |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "OPENBLAS_NUM_THREADS": "1"}
    numbers = range(options.first, options.first + options.count)
    chosen = None if options.implementation == "default" else options.implementation
    one = functools.partial(judge, seed=seed, implementation=chosen, pairs=options.pairs)
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(options.processes, mp_context=context) as pool:
        outcomes = list(track(pool.map(one, numbers), total=len(numbers), console=console))
    return int(report(outcomes, console) > 0)


if __name__ == "__main__":
    raise SystemExit(main())
