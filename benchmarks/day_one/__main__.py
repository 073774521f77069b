"""The first day on a new GPU.

    python -m benchmarks.day_one --output DIR        # on a Blackwell or Hopper GPU
    python -m benchmarks.day_one --arch-emulated sm_100f --output DIR  # on the emulator
    python -m benchmarks.day_one --list
    python -m benchmarks.day_one --note              # benchmarks/results/assumptions.md
    python -m benchmarks.day_one --note summary      # its table in docs/emulator/rules.md

The parts are, in this order: doctor; one litmus program for each assumption of
benchmarks/results/assumptions.md; the selftest by kernel family; bitwise runs; the timing model's
constants; speed beside cuDNN; the litmus programs as they are broken on purpose. Each part runs in
processes of its own and may hang or fault. DIR receives report.md, report.json and the parts' logs.
The exit status is 1 if anything falls, hangs, faults or fails.

A machine with a GPU needs JAX, numpy, cuda-bindings, rich, `fa4_jax/_cubins` and `libfa4_jax.so`,
but no CuTe-DSL. A run on the emulator needs `make emulated` first.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.day_one import report
from benchmarks.day_one.note import note, summary
from benchmarks.day_one.outcome import Finding
from benchmarks.day_one.parts import (
    ROOT,
    STAND_IN,
    Target,
    injections,
    parts,
    selected,
    with_injected,
)
from benchmarks.day_one.process import Part, Runner
from benchmarks.environment import answer

_PROBE_S = 60.0


def look(environment: Mapping[str, str]) -> tuple[dict[str, Any] | None, str]:
    """Describes the GPU, from a fresh process, or says what is wrong with it."""
    command = [sys.executable, "-m", "benchmarks.day_one.probe"]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=_PROBE_S
        )
    except subprocess.TimeoutExpired:
        return None, f"a tiny kernel did not end in {_PROBE_S:.0f} s"
    if done.returncode != 0:
        return None, (done.stderr.strip().splitlines() or ["it gives wrong words"])[-1]
    return json.loads(done.stdout.splitlines()[-1]), ""


def find_target(emulated: str | None, full: bool, seed: int) -> tuple[Target, str]:
    """Returns the target of the run and its name.

    Raises:
      ValueError: there is no such GPU, or no emulator.
    """
    if emulated is not None:
        library = STAND_IN / "libemulated_cuda.so"
        if not library.exists():
            raise ValueError(f"{library.relative_to(ROOT)} is missing: run make emulated first")
        return Target(emulated, True, full, seed), f"the emulator, {emulated}"
    found, why = look(Target("sm_90a").environment())
    if found is None:
        raise ValueError(f"no GPU that works: {why}; --arch-emulated sm_100f needs none")
    major, minor = found["capability"]
    arch = {9: "sm_90a", 10: "sm_100f"}.get(major)
    if arch is None or (major, minor) == (9, 1):
        raise ValueError(f"compute capability {major}.{minor}: 9.0 or 10.x is needed")
    return Target(arch, False, full, seed), f"{found['device']}, compute capability {major}.{minor}"


def command(target: Target, deed: Mapping[str, str], part: Part) -> list[str]:
    """Returns the command line of a part's process, without its record and items."""
    words = [sys.executable, "-m", "benchmarks.day_one.child", part.name, "--arch", target.arch]
    words += ["--emulated"] * target.emulated + ["--full"] * target.full
    words += ["--seed", str(target.seed)]
    return words + (["--deed", deed[part.name]] if part.name in deed else [])


def run(
    target: Target, name: str, chosen: list[Part], deed: Mapping[str, str], folder: Path
) -> int:
    """Runs the parts and writes the report, anew after each part; returns the exit status."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = target.environment()

    def line(part: Part, items: Sequence[str], record: Path) -> list[str]:
        return [*command(target, deed, part), "--record", str(record), *items]

    def probe() -> str | None:
        return None if target.emulated else look(environment)[1] or None

    runner = Runner(line, probe, folder, environment=environment)
    start, found = time.monotonic(), list[Finding]()
    commit = answer("git", "rev-parse", "--short", "HEAD") or "unknown"
    for part in chosen:
        found += runner.run(with_injected(part, deed.get(part.name)))
        lines = [dataclasses.asdict(finding) for finding in found]
        (folder / "findings.json").write_text(json.dumps(lines, indent=1) + "\n")
        day = report.Day(
            arch=target.arch,
            emulated=target.emulated,
            device=name,
            date=datetime.date.today().isoformat(),
            commit=commit,
            seconds=time.monotonic() - start,
            findings=tuple(found),
            unusable=runner.unusable,
            seed=target.seed,
        )
        (folder / "report.md").write_text(report.markdown(day))
        (folder / "report.json").write_text(json.dumps(report.to_json(day), indent=1) + "\n")
    print(f"{folder / 'report.md'}: {time.monotonic() - start:.0f} s")
    return 1 if report.bad(found) or runner.unusable else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line and runs what it asks for; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.day_one",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--arch-emulated", choices=("sm_90a", "sm_100f"))
    parser.add_argument("--output", type=Path, default=Path("day_one_output"), metavar="DIR")
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="parts named so")
    parser.add_argument("--full", action="store_true", help="all conformance cases, not a few")
    parser.add_argument("--seed", type=int, help="of inputs; a fresh one by default")
    parser.add_argument(
        "--inject", default="", metavar="hang:PART,fault:PART", help="goes wrong on purpose"
    )
    parser.add_argument("--list", action="store_true", help="the parts, without running them")
    parser.add_argument(
        "--note", nargs="?", const="list", choices=("list", "summary"), help="the assumptions"
    )
    options = parser.parse_args(argv)
    if options.note:
        print(summary() if options.note == "summary" else note().rstrip("\n"))
        return 0
    seed = secrets.randbits(31) if options.seed is None else options.seed
    try:
        if options.list:
            arch, emulated = options.arch_emulated or "sm_100f", options.arch_emulated is not None
            target, name = Target(arch, emulated, options.full), ""
        else:
            target, name = find_target(options.arch_emulated, options.full, seed)
        chosen = selected(parts(target), options.only)
        deed = injections(options.inject, chosen)
    except ValueError as error:
        parser.error(str(error))
    if options.list:
        for part in chosen:
            print(f"{part.name}: {len(part.items)} items")
        return 0
    # A part's process is a session of its own: it must not outlive this one.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    return run(target, name, chosen, deed, options.output)


if __name__ == "__main__":
    sys.exit(main())
