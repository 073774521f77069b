"""`python -m fa4_jax selftest`: the conformance cases on whatever is present, case by case."""

from __future__ import annotations

import argparse
import secrets
import time

import jax

from fa4_jax.conformance.cases import CASES, Case
from fa4_jax.conformance.paged import PAGED_CASES, PagedCase, run_paged_case
from fa4_jax.conformance.runner import run_case


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's options."""
    parser.add_argument(
        "--implementation",
        choices=("kernel", "xla"),
        help="insist on one; by default the kernels where they fit, else the default path",
    )
    parser.add_argument("--filter", default="", help="only cases whose name contains this text")
    parser.add_argument("--no-gradients", action="store_true", help="forward only")
    parser.add_argument("--seed", type=int, help="of the random inputs; a fresh one by default")
    parser.add_argument("--list", action="store_true", help="print the names of the cases and stop")
    parser.add_argument("--verbose", action="store_true", help="print errors and bounds of each")


def _judge(case: Case | PagedCase, args: argparse.Namespace, seed: int) -> list[str]:
    """Failures of one case, as text; prints the numbers if wanted."""
    try:
        if isinstance(case, PagedCase):
            verdicts = run_paged_case(case, seed, args.implementation)
        else:
            verdicts = run_case(case, seed, args.implementation, not args.no_gradients)
    except Exception as error:  # one broken case must not hide the others
        return [f"{type(error).__name__}: {error}"]
    if args.verbose:
        for v in verdicts:
            print(
                f"    {v.name:7} error {v.worst:9.2e} of {v.worst_allowed:9.2e}"
                f"  rms {v.rms:9.2e} of {v.rms_allowed:9.2e}"
            )
    return [f"{v.name}: {v.failure}" for v in verdicts if v.failure]


def main(args: argparse.Namespace) -> int:
    """Runs the cases; returns the exit status, 1 if any failed."""
    cases = [case for case in (*CASES, *PAGED_CASES) if args.filter in case.id]
    if args.implementation == "kernel":
        cases = [case for case in cases if case.has_kernel]
    if args.list:
        print("\n".join(case.id for case in cases))
        return 0
    if not cases:
        print(f"no case contains {args.filter!r}")
        return 1
    seed = secrets.randbits(32) if args.seed is None else args.seed
    print(f"{len(cases)} cases on {jax.devices()[0].device_kind}, --seed {seed}")
    failed = 0
    for number, case in enumerate(cases, 1):
        start = time.perf_counter()
        failures = _judge(case, args, seed)
        failed += bool(failures)
        state = "FAILED" if failures else "ok"
        seconds = time.perf_counter() - start
        print(f"[{number}/{len(cases)}] {state:6} {seconds:5.1f} s  {case.id}", flush=True)
        for failure in failures:
            print(f"    {failure}")
    print(f"{len(cases) - failed} of {len(cases)} passed")
    return 1 if failed else 0
