"""flash-attn-4's kernels on the emulator, against the float64 oracle.

    python -m tests.emulator.interop [errors] [gradients] [counts] [timing] [costs] [timelines]

Prints Markdown tables. `errors` (the default): relative errors of every forward kernel, and which
rules it breaks; `gradients`: the same of the Blackwell backward; `counts`: instructions per warp
role and block of keys, beside this project's; `timing`: cycles by the model of
kernels.emulator.timing; `costs`: the same of every kernel, for benchmarks.blackwell_figures;
`timelines`: pictures of the forward of head dim 128, of one CTA and of a pair.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import math
import multiprocessing
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np

from fa4_jax.conformance.oracle import Inputs
from fa4_jax.key import KernelKey
from kernels.emulator import EmulationError, Policy
from kernels.emulator.machine.trace import Trace
from kernels.emulator.timing.rates import BLACKWELL, numbers
from kernels.emulator.timing.replay import estimate
from kernels.emulator.timing.timeline import svg
from tests.emulator.interop import flash_attn4, ours, run, tables, timing
from tests.emulator.interop.flash_attn4 import Step, Variant
from tests.emulator.interop.host_code import Compiled
from tests.emulator.interop.run import Problem, Run

HOPPER_WAIVERS = ("clean_exits", "one_place")
WAIVERS = (
    *HOPPER_WAIVERS,
    *("tensor_fences", "tensor_load_waits", "unordered_commits", "tensor_lanes"),
)
"""Rules that these kernels break, or may break, and hardware forgives: fields of `Policy`."""

_BLACKWELL = (
    (64, 64, False, None),
    (64, 64, True, None),
    (128, 128, False, False),
    (128, 128, False, True),
    (128, 128, True, None),
    (192, 128, False, False),
    (192, 128, False, True),
    (192, 128, True, None),
    (256, 256, False, True),
    (256, 256, True, None),
)
_HOPPER = (64, 96, 128, 192, 256)
VARIANTS = (
    *(Variant("sm_100a", *row) for row in _BLACKWELL),
    *(Variant("sm_90a", d, d, causal) for d in _HOPPER for causal in (False, True)),
)
PROBLEMS = (
    Problem(512, 384, heads=2),
    Problem(300, 700, growing=True),
    Problem(700, 300),
)
_BACKWARD = (
    (64, 64, False, False),
    (64, 64, True, False),
    (128, 128, False, False),
    (128, 128, False, True),
    (128, 128, True, False),
    (128, 128, True, True),
    (192, 128, False, True),
    (192, 128, True, True),
    (256, 256, False, True),
    (256, 256, True, True),
)
_CTA_KEYS = {256: 64}
"""That a CTA of a backward holds, by head dim, if they are not 128."""
BACKWARD_VARIANTS = tuple(Variant("sm_100a", *row) for row in _BACKWARD)
BACKWARD_PROBLEMS = (Problem(256, 256), Problem(300, 420))
POLICIES = (Policy("in_order", "early"), Policy("random", "random"), Policy("starve", "late"))
_KEYS = 128
TIMED = tuple(
    Variant("sm_100a", *row, multiprocessors=2 if row[3] or row[0] == 256 else 1)
    for row in _BLACKWELL
)
_OURS_BACKWARD = (
    # head_dim, value_dim, KernelKey.pair
    *((64, 64, False), (128, 128, False), (128, 128, True)),
    *((192, 128, False), (192, 128, True), (256, 256, False)),
)
BACKWARD_TIMED = tuple(Variant("sm_100a", *row) for row in _BACKWARD)
_RESULTS = pathlib.Path("benchmarks/results")
_SHOWN_BLOCKS = 8
_SHOWN = {
    **{"softmax of tile 0": (0,), "softmax of tile 1": (4,)},
    **{"correction": (8,), "mma": (12,), "load": (14,)},
}
"""Warps of flash-attn-4's Blackwell forward that a picture shows."""


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.emulator.interop")
    choices = {
        "errors": _errors,
        "gradients": _gradients,
        "counts": _counts,
        "timing": _timing,
        "costs": _costs,
        "timelines": _timelines,
    }
    parser.add_argument("what", nargs="*", choices=choices)
    for name in parser.parse_args().what or ["errors"]:
        print(", ".join(f"{k} {v}" for k, v in flash_attn4.versions().items()), flush=True)
        choices[name]()


def compiled(
    variants: tuple[Variant, ...], how: Callable[[Variant], Any] = flash_attn4.compile_forward
) -> Iterator[tuple[Variant, Any]]:
    """Kernels, compiled one after the other in a process for each architecture."""
    for arch in dict.fromkeys(variant.arch for variant in variants):
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, context, flash_attn4.prepare_process, (arch,)) as pool:
            of_arch = [variant for variant in variants if variant.arch == arch]
            yield from zip(of_arch, pool.map(how, of_arch), strict=True)


def waived(policy: Policy, strict: str = "") -> Policy:
    """A policy under which these kernels run; `strict` is a rule that they must keep."""
    return dataclasses.replace(policy, **{name: name == strict for name in WAIVERS})


Results = dict[str, np.ndarray]
Launcher = Callable[[Inputs, Results, Policy], Results]
"""Inputs, the oracle's results and a policy -> results by the oracle's names."""


def _forward(code: Compiled) -> Launcher:
    def launch(inputs: Inputs, wanted: Results, policy: Policy) -> Results:
        got = run.forward(code, inputs, Run(policy))
        return {"output": got.output, "lse": got.lse}

    return launch


def _backward(steps: Sequence[Step]) -> Launcher:
    def launch(inputs: Inputs, wanted: Results, policy: Policy) -> Results:
        return run.backward(steps, inputs, wanted["output"], wanted["lse"], policy)

    return launch


def _errors() -> None:
    found = ((variant, _forward(code)) for variant, code in compiled(VARIANTS))
    _compare(found, PROBLEMS, ("output", "lse"))


def _gradients() -> None:
    pairs = compiled(BACKWARD_VARIANTS, flash_attn4.compile_backward)
    found = ((variant, _backward(steps)) for variant, steps in pairs)
    _compare(found, BACKWARD_PROBLEMS, ("dq", "dk", "dv"))


def _compare(
    kernels: Iterable[tuple[Variant, Launcher]], problems: Sequence[Problem], names: Sequence[str]
) -> None:
    """Prints a row for every kernel: worst errors, rules that it breaks, what failed."""
    rows = []
    for variant, launch in kernels:
        worst, failed = dict.fromkeys(names, 0.0), "nothing"
        for problem, policy in itertools.product(problems, POLICIES):
            inputs, wanted = _case(problem, variant)
            try:
                got = launch(inputs, wanted, waived(policy))
            except EmulationError as error:
                failed = error.rule
                print(variant, problem, policy, error, file=sys.stderr)
                continue
            for name in names:
                worst[name] = max(worst[name], run.relative_error(got[name], wanted[name]))
        errors = [f"{worst[name]:.2e}" for name in names]
        rows.append((*_named(variant), *errors, _broken(launch, variant, problems[:2]), failed))
        print(rows[-1], file=sys.stderr, flush=True)
    head = ("kernel", "d, dv", "mask", "CTAs", *names, "rules that it breaks", "failed")
    print(tables.markdown(head, rows))


def _broken(launch: Launcher, variant: Variant, problems: Sequence[Problem]) -> str:
    """The rules that the kernel breaks in one of the problems."""
    broken = []
    for rule in HOPPER_WAIVERS if variant.arch == "sm_90a" else WAIVERS:
        for problem in problems:
            try:
                launch(*_case(problem, variant), waived(POLICIES[2], strict=rule))
            except EmulationError:
                broken.append(rule)
                break
    return ", ".join(broken) or "none"


def _case(problem: Problem, variant: Variant) -> tuple[Inputs, Results]:
    inputs = run.make_inputs(problem, variant.head_dim, variant.head_dim_v)
    return inputs, run.expected(problem, inputs, variant.is_causal)


def _named(variant: Variant) -> tuple[str, str, str, str]:
    dims = f"{variant.head_dim}, {variant.head_dim_v}"
    ctas = {True: "pair", False: "one", None: "its choice"}[variant.two_ctas]
    return variant.arch, dims, "causal" if variant.is_causal else "dense", ctas


@functools.cache
def _our_compiler() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


def _ours(head_dim: int, is_causal: bool) -> ours.Ours:
    return _our_compiler().submit(ours.compile_forward, head_dim, is_causal).result()


def _counts() -> None:
    few, many = 4, 12
    policy = waived(POLICIES[0])
    variants = tuple(Variant("sm_100a", d, d, False, False) for d in (64, 128))
    for variant, code in compiled(variants):
        mine = _ours(variant.head_dim, False)
        reports, our_reports = [], []
        for blocks in (few, many):
            inputs = run.make_inputs(
                Problem(256, blocks * _KEYS), variant.head_dim, variant.head_dim_v
            )
            reports.append(run.forward(code, inputs, Run(policy, roles=tables.ROLES)).report)
            our_reports.append(ours.forward(mine, inputs, False, POLICIES[0])[1])
        short, long = reports
        theirs = tables.per_block(short, long, many - few, tables.ROLES)
        short, long = our_reports
        own = tables.per_block(short, long, many - few, mine.roles)
        rows = [
            (who, c.role, f"{c.total:.1f}", ", ".join(f"{k} {v:g}" for k, v in c.classes.items()))
            for who, counts in (("flash-attn-4", theirs), ("ours", own))
            for c in counts
            if c.total
        ]
        print(f"\nd = {variant.head_dim}, instructions of one warp per block of {_KEYS} keys:")
        print(tables.markdown(("kernel", "role", "all", "by class"), rows), flush=True)


def _timing() -> None:
    """Forward and backward, each beside this project's kernel where there is one."""
    policy = dataclasses.replace(waived(POLICIES[0]), races=False)
    head = ("d, dv", "mask", "kernel", "unit", "beside", *timing.UNITS, "shared bytes", "TFLOP/s")
    rows = []
    for variant, code in compiled(TIMED):
        ctas = _ctas(code)
        cost = timing.forward(_theirs(code, variant, policy), ctas)
        rows.append(_timed(variant, f"flash-attn-4, {ctas} CTA", cost, False))
        d, causal = variant.head_dim, variant.is_causal
        if variant.head_dim == variant.head_dim_v and variant.two_ctas in (None, d == 256):
            mine = _ours(d, causal)

            def run_ours(problem: Problem, trace: Trace, mine=mine, causal=causal, d=d) -> None:
                ours.forward(mine, run.make_inputs(problem, d, d), causal, policy, trace)

            cost = timing.forward(run_ours, math.prod(mine.ptx.launch.cluster))
            rows.append(_timed(variant, "ours", cost, False))
    print(f"\nforward, unit {timing.ROWS} x {timing.KEYS}")
    print(tables.markdown(head, rows), flush=True)
    rows = []
    for variant, steps in compiled(BACKWARD_TIMED, flash_attn4.compile_backward):
        costs = [_their_backward(step, variant, policy) for step in steps if step.stationary]
        kernels = ", two kernels" if len(costs) == 2 else ""
        name = f"flash-attn-4, {_ctas(steps[1].code)} CTA{kernels}"
        rows.append(_timed(variant, name, sum(costs[1:], costs[0]), True))
    for (*dims, pair), causal, deterministic in itertools.product(
        _OURS_BACKWARD, (False, True), (False, True)
    ):
        key = ours.backward_key(*dims, band=causal, deterministic=deterministic, pair=pair)
        rows.append(_our_backward(key, policy))
    print(f"\nbackward, unit {timing.BACKWARD_ROWS} x {timing.BACKWARD_KEYS}")
    print(tables.markdown(head, rows))


def _costs() -> None:
    """Replaces `now` of the costs that benchmarks.blackwell_figures reads."""
    policy = dataclasses.replace(waived(POLICIES[0]), races=False)
    found: dict[str, timing.Cost] = {}

    def add(variant: Variant, direction: str, ctas: int, cost: timing.Cost) -> None:
        mask = "causal" if variant.is_causal else "dense"
        name = f"{direction} {variant.head_dim} {variant.head_dim_v} {mask} {ctas}"
        found[name] = cost
        print(f"{name}: {cost.unit:.0f} and {cost.tile:.0f}", file=sys.stderr, flush=True)

    for variant, code in compiled(TIMED):
        ctas = _ctas(code)
        add(variant, "forward", ctas, timing.forward(_theirs(code, variant, policy), ctas))
    for variant, steps in compiled(BACKWARD_TIMED, flash_attn4.compile_backward):
        costs = [_their_backward(step, variant, policy) for step in steps if step.stationary]
        add(variant, "backward", _ctas(steps[1].code), sum(costs[1:], costs[0]))
    path = _RESULTS / "flash-attn-4-costs.json"
    document = json.loads(path.read_text())
    document["rates"] = numbers(BLACKWELL)
    document["now"] = {
        name: {"unit": round(found[name].unit, 1), "tile": round(found[name].tile, 1)}
        for name in sorted(found)
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


def _timelines() -> None:
    """Draws the dense forward of head dim 128: one CTA, and a pair."""
    policy = dataclasses.replace(waived(POLICIES[0]), races=False)
    shown = [v for v in TIMED if (v.head_dim, v.is_causal) == (128, False)]
    for variant, code in compiled(tuple(shown)):
        ctas = _ctas(code)
        trace = Trace(frozenset(range(ctas)))
        _theirs(code, variant, policy)(Problem(256 * ctas, _SHOWN_BLOCKS * _KEYS), trace)
        kind = "pair" if ctas > 1 else "one"
        title = f"flash-attn-4, forward d = 128, CTAs: {kind}, {_SHOWN_BLOCKS} blocks of keys"
        picture = svg(estimate(trace, BLACKWELL), title, _SHOWN)
        (_RESULTS / f"flash-attn-4-forward-d128-{kind}.svg").write_text(picture)


def _their_backward(step: Step, variant: Variant, policy: Policy) -> timing.Cost:
    """The cost of one main kernel."""
    assert step.stationary

    def launch(problem: Problem, trace: Trace) -> None:
        inputs = run.make_inputs(problem, variant.head_dim, variant.head_dim_v)
        run.backward_main(step, inputs, Run(policy, trace=trace))

    held = 128 if step.stationary == "queries" else _CTA_KEYS.get(variant.head_dim, 128)
    needed = timing.BACKWARD_KEYS // held
    ctas = _ctas(step.code)
    return timing.backward(launch, ctas, (needed, needed), variant.is_causal, step.stationary)


def _our_backward(key: KernelKey, policy: Policy) -> tuple[str, ...]:
    mine = _our_compiler().submit(ours.compile_key, key).result()
    dims, causal, deterministic = (key.head_dim, key.value_dim), key.band, key.deterministic

    def launch(problem: Problem, trace: Trace) -> None:
        ours.backward(mine, run.make_inputs(problem, *dims), causal, policy, trace)

    ctas = math.prod(mine.ptx.launch.cluster)
    of_unit = timing.BACKWARD_KEYS // mine.ptx.tile["n"] * ctas
    # In order the first CTA waits for no other; the others' trace would hold the emulator's spins.
    seen = ctas if deterministic else of_unit
    cost = timing.backward(launch, ctas, (of_unit, seen), causal)
    name = "ours" + ", pair" * key.pair + ", deterministic" * deterministic
    return _timed(Variant("sm_100a", *dims, causal), name, cost, True)


def _ctas(code: Compiled) -> int:
    """CTAs of a cluster."""
    return 2 if "cta_group::2" in code.ptx else 1


def _theirs(code: Compiled, variant: Variant, policy: Policy) -> timing.Runner:
    def launch(problem: Problem, trace: Trace) -> None:
        inputs = run.make_inputs(problem, variant.head_dim, variant.head_dim_v)
        run.forward(code, inputs, Run(policy, trace=trace))

    return launch


def _timed(variant: Variant, kernel: str, cost: timing.Cost, backward: bool) -> tuple[str, ...]:
    """A row: cycles of a unit and of a tile beside its units, shares of units, TFLOP/s."""
    d, dv, causal = variant.head_dim, variant.head_dim_v, variant.is_causal
    flops = 2 * (3 * d + 2 * dv) if backward else 2 * (d + dv)
    rate = timing.teraflops(cost, flops, causal, backward)
    shares = [f"{100 * cost.busy.get(name, 0) / cost.unit:.0f} %" for name in timing.UNITS]
    mask = "causal" if causal else "dense"
    cycles = f"{cost.unit:.0f}", f"{cost.tile:.0f}"
    shared = f"{cost.busy['shared'] * BLACKWELL.shared_bytes:,.0f}"
    row = f"{d}, {dv}", mask, kernel, *cycles, *shares, shared, f"{rate:.0f}"
    print(row, file=sys.stderr, flush=True)
    return row


if __name__ == "__main__":
    main()
