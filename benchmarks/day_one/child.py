"""A part's own process works through items and notes each beginning and end in a record.

    python -m benchmarks.day_one.child PART --arch sm_100f --record FILE ITEM ...

It ends itself after an item that raised, since what is left of the GPU's context cannot be trusted.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from benchmarks.day_one.litmus import Machine, OnGpu, control, emulated, judge
from benchmarks.day_one.outcome import Record, Result, Verdict
from benchmarks.day_one.parts import INJECTED, Target, programs
from benchmarks.day_one.process import RESTART

Run = Callable[[str], Result]


def runner(part: str, target: Target) -> Run:
    """Returns the function that runs a part's item. Items share it, and what is slow to start."""
    if part == "doctor":
        return lambda _: doctor(target)
    if part in ("litmus", "controls"):
        return _litmus(part, target)
    if part.startswith("selftest: "):
        return _selftest(part.removeprefix("selftest: "), target)
    if part == "bitwise":
        from benchmarks.day_one import bitwise

        by_id = {case.id: case for case in bitwise.cases(target.emulated)}
        return lambda item: bitwise.run(by_id[item], target.emulated, target.seed)
    if part == "constants":
        from benchmarks.day_one.constants import Bench

        return Bench(target.arch).run
    if part == "speed":
        from benchmarks.day_one import speed

        cells = {case.id: case for case in speed.CELLS}
        return lambda item: speed.run(cells[item])
    if part == "designs":
        from benchmarks.day_one import both_designs

        both = {case.id: case for case in both_designs.cells(target.arch)}
        return lambda item: both_designs.run(both[item])
    raise ValueError(f"no part is called {part!r}")


def doctor(target: Target) -> Result:
    """Returns what `python -m fa4_jax doctor` says: its problems, why no kernel would run, and
    kernels of the architecture that are missing.
    """
    from fa4_jax import catalogue, runtime
    from fa4_jax.doctor import report

    lines = report()
    bad = [x for x in lines if x.startswith(("PROBLEM", "runs kernels: no"))]
    kernels = next((x for x in lines if x.startswith("kernels:")), "no kernels")
    installed = runtime.manifest()
    there = set() if installed is None else set(installed.cubins)
    if missing := sorted(set(catalogue.keys(target.arch)) - there):
        bad.append(f"{len(missing)} kernels are not there, first {missing[0].name}")
    verdict = Verdict.FALLS if bad else Verdict.HOLDS
    return Result(verdict, "; ".join(bad) or kernels, {"lines": lines})


def _litmus(part: str, target: Target) -> Run:
    known = programs()
    if target.emulated:
        return lambda item: _on_emulator(item, target)
    machine = _machine(target)
    play = judge if part == "litmus" else control
    return lambda item: play(known[item], machine)


def _machine(target: Target) -> Machine:
    from benchmarks.day_one.gpu import Gpu

    machine = OnGpu(Gpu())
    if machine.arch != target.arch:
        raise ValueError(f"this GPU runs {machine.arch}, not {target.arch}")
    return machine


def _on_emulator(item: str, target: Target) -> Result:
    """Runs a litmus program under every policy; returns the worst result."""
    litmus = programs()[item]
    results = []
    for machine in emulated(litmus, target.seed, target.arch):
        try:
            results.append(judge(litmus, machine))
        except Exception as error:
            return Result(Verdict.FALLS, f"{type(error).__name__}: {error}")
    shown = max(results, key=lambda x: (x.verdict == Verdict.FALLS, x.data.get("wrong", 0)))
    if shown.verdict == Verdict.NOT_RUN:
        return shown
    return Result(shown.verdict, f"{shown.text}, under {len(results)} policies", shown.data)


def _selftest(name: str, target: Target) -> Run:
    from benchmarks.day_one import families

    found = families.families(target.arch, target.emulated, target.full)
    family = next(family for family in found if family.name == name)
    cases = {case.id: case for case in family.cases}
    return lambda item: families.run(cases[item], family, target.arch, target.seed)


def inject(deed: str, target: Target) -> Result:
    """Hangs or faults: by a kernel where there is a GPU, otherwise by this process."""
    if not target.emulated:
        from benchmarks.day_one import gpu

        {"hang": gpu.hang, "fault": gpu.fault}[deed](gpu.Gpu())
    elif deed == "fault":
        os.kill(os.getpid(), signal.SIGSEGV)
    while deed == "hang":
        time.sleep(1)
    return Result(Verdict.ERROR, f"the injected {deed} did not happen")


def blame(error: Exception) -> Verdict:
    """Returns what an exception says of the item that raised it."""
    if isinstance(error, TimeoutError):
        return Verdict.HANG
    faults = ("GpuError", "JaxRuntimeError", "XlaRuntimeError")
    at_fault = type(error).__name__ in faults or "CUDA_ERROR" in str(error)
    return Verdict.FAULT if at_fault else Verdict.ERROR


def work(part: str, target: Target, items: list[str], record: Record, deed: str) -> int:
    """Runs the items; returns the exit status."""
    run: Run | None = None
    for item in items:
        record.begin(item)
        start = time.monotonic()
        try:
            if item == INJECTED:
                result = inject(deed, target)
            else:
                run = run or runner(part, target)
                result = run(item)
        except Exception as error:
            traceback.print_exc()
            text = " ".join(f"{type(error).__name__}: {error}".split())
            result = Result(blame(error), text[:600])
            record.end(item, result, time.monotonic() - start)
            return RESTART
        record.end(item, result, time.monotonic() - start)
    return 0


def main() -> None:
    """Works through the items of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part")
    parser.add_argument("items", nargs="+", metavar="ITEM")
    parser.add_argument("--arch", required=True)
    parser.add_argument("--emulated", action="store_true")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--deed", default="", help="what the injected item does")
    parser.add_argument("--record", type=Path, required=True)
    options = parser.parse_args()
    target = Target(options.arch, options.emulated, options.full, options.seed)
    status = work(options.part, target, options.items, Record(options.record), options.deed)
    sys.stdout.flush()
    # A kernel that never ends would block an ordinary exit.
    os._exit(status)


if __name__ == "__main__":
    main()
