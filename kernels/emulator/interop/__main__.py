"""flash-attn-4's forward kernels on the emulator, against the float64 oracle.

    python -m kernels.emulator.interop [errors] [counts] [timing]

Prints Markdown tables. `errors` (the default): relative errors of every kernel and case, and which
rule each kernel would break; `counts`: instructions per warp role and block of keys, beside this
project's; `timing`: cycles by the model of kernels.emulator.timing.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import multiprocessing
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

from kernels.emulator import EmulationError, Policy
from kernels.emulator.interop import flash_attn4, ours, run, tables
from kernels.emulator.interop.flash_attn4 import Variant
from kernels.emulator.interop.host_code import Compiled
from kernels.emulator.interop.run import Problem, Run
from kernels.emulator.rates import BLACKWELL
from kernels.emulator.timing import estimate
from kernels.emulator.trace import Trace

WAIVERS = ("clean_exits", "tensor_fences", "tensor_load_waits", "unordered_commits")
"""Rules that these kernels break and hardware forgives: fields of `Policy`."""

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
POLICIES = (Policy("in_order", "early"), Policy("random", "random"), Policy("starve", "late"))
_KEYS = 128


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m kernels.emulator.interop")
    choices = {"errors": _errors, "counts": _counts, "timing": _timing}
    parser.add_argument("what", nargs="*", default=["errors"], choices=[*choices, []])
    for name in parser.parse_args().what:
        print(", ".join(f"{k} {v}" for k, v in flash_attn4.versions().items()), flush=True)
        choices[name]()


def compiled(variants: tuple[Variant, ...]) -> Iterator[tuple[Variant, Compiled]]:
    """Kernels, compiled one after the other in a process for each architecture."""
    for arch in dict.fromkeys(variant.arch for variant in variants):
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, context, flash_attn4.prepare_process, (arch,)) as pool:
            of_arch = [variant for variant in variants if variant.arch == arch]
            yield from zip(of_arch, pool.map(flash_attn4.compile_forward, of_arch), strict=True)


def waived(policy: Policy, strict: str = "") -> Policy:
    """A policy under which these kernels run; `strict` is a rule that they must keep."""
    return dataclasses.replace(policy, **{name: name == strict for name in WAIVERS})


def _errors() -> None:
    rows = []
    for variant, code in compiled(VARIANTS):
        worst: dict[str, float] = {"output": 0.0, "lse": 0.0}
        failed = ""
        for problem in PROBLEMS:
            inputs = run.make_inputs(problem, variant.head_dim, variant.head_dim_v)
            wanted = run.expected(problem, inputs, variant.is_causal)
            for policy in POLICIES:
                try:
                    got = run.forward(code, inputs, Run(waived(policy)))
                except EmulationError as error:
                    failed = failed or f"{error.rule} ({problem}, {policy})"
                    print(variant, error, file=sys.stderr)
                    continue
                found = {"output": got.output, "lse": got.lse}
                for name, array in found.items():
                    worst[name] = max(worst[name], run.relative_error(array, wanted[name]))
        needs = _needs(code, variant)
        row = (*_named(variant), f"{worst['output']:.2e}", f"{worst['lse']:.1e}", needs, failed)
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
    head = ("kernel", "d, dv", "mask", "CTAs", "output", "LSE", "what it leaves out", "failed")
    print(tables.markdown(head, rows))


def _needs(code: Compiled, variant: Variant) -> str:
    """The rules that the kernel breaks in one of two runs each."""
    broken = []
    for rule in WAIVERS[:1] if variant.arch == "sm_90a" else WAIVERS:
        for problem in PROBLEMS[:2]:
            inputs = run.make_inputs(problem, variant.head_dim, variant.head_dim_v)
            try:
                run.forward(code, inputs, Run(waived(POLICIES[2], strict=rule)))
            except EmulationError:
                broken.append(rule)
                break
    return ", ".join(broken) or "nothing"


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


@dataclasses.dataclass(frozen=True)
class _Timed:
    head_dim: int
    is_causal: bool
    theirs: dict[int, float]
    ours: dict[int, float]


def _timing() -> None:
    """Dense: one CTA of 256 rows and all keys. Causal: the mean over CTAs, linear in their keys."""
    length, rows_of_cta = 8192, 256
    rows = []
    variants = tuple(
        Variant("sm_100a", d, d, causal, False) for d in (64, 128) for causal in (False, True)
    )
    for variant, code in compiled(variants):
        d, causal = variant.head_dim, variant.is_causal
        mine = _ours(d, causal)
        keys = (2048, 4096) if causal else (length,)
        cycles: dict[str, list[tuple[float, float]]] = {"flash-attn-4": [], "ours": []}
        for count in keys:
            inputs = run.make_inputs(Problem(rows_of_cta, count), d, d)
            policy = dataclasses.replace(waived(POLICIES[0]), races=False)
            for who in cycles:
                trace = Trace()
                if who == "ours":
                    ours.forward(mine, inputs, causal, policy, trace)
                else:
                    run.forward(code, inputs, Run(policy, trace=trace))
                cycles[who].append((count / rows_of_cta, estimate(trace, BLACKWELL).cycles))
        flops = 4 * rows_of_cta * length * d / (2 if causal else 1)
        for who, points in cycles.items():
            last = length // rows_of_cta
            mean = tables.mean_of_line((points[0], points[1]), 1, last) if causal else points[0][1]
            rate = tables.tflops(flops, mean, BLACKWELL.clock_ghz, BLACKWELL.multiprocessors)
            seen = ", ".join(f"{int(x * rows_of_cta)} keys {y:,.0f}" for x, y in points)
            rows.append(
                (d, "causal" if causal else "dense", who, seen, f"{mean:,.0f}", f"{rate:.0f}")
            )
            print(rows[-1], file=sys.stderr, flush=True)
    head = ("d", "mask", "kernel", "cycles", "mean of a CTA", "TFLOP/s")
    print(tables.markdown(head, rows))


if __name__ == "__main__":
    main()
