"""Times `fa4_jax.attention` beside its peers and writes JSON, Markdown and a plot.

    python -m benchmarks.attention                     # everything; minutes on a GPU
    python -m benchmarks.attention --group grid gqa    # the cases of these groups
    python -m benchmarks.attention --only d128-causal  # the cases with this in their names
    python -m benchmarks.attention --quick             # does it all run? seconds, also on a CPU

The JSON file is brought up to date after every case: a run that is cut short keeps what it has, and
`python -m benchmarks.report FILE.json` writes the rest from it. It also joins the files of several
groups. FlashAttention-3 (`dew_flash_attn`), jax-linear-attention (`jla`) and flash-attn-4 with
PyTorch take part where Python finds them; PyTorch needs a part of the GPU's memory
(XLA_PYTHON_CLIENT_MEM_FRACTION=.6).
"""

from __future__ import annotations

import argparse
import math
import re
import time
from pathlib import Path
from typing import Any

import jax

from benchmarks import host_cost, shapes, torch_peer
from benchmarks.environment import clocks, environment, packages
from benchmarks.measure import DIRECTIONS, describe, measure
from benchmarks.peers import PACKAGES
from benchmarks.report import save, write
from benchmarks.shapes import Case
from benchmarks.timing import Protocol

HOST = "host"
FIRST_CALLERS = {"gpu": ("fa4_jax", "cudnn"), "cpu": ("fa4_jax", "xla")}


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--quick", action="store_true", help="tiny cases, one short burst each")
    parser.add_argument(
        "--only",
        action="append",
        metavar="TEXT",
        help=f"cases with TEXT in their names; {HOST!r}: host-side cost (repeatable)",
    )
    parser.add_argument(
        "--group",
        nargs="+",
        choices=(*shapes.GROUPS, HOST),
        metavar="GROUP",
        help=f"the cases of these groups, {', '.join(shapes.GROUPS)}; {HOST!r}: as above",
    )
    parser.add_argument(
        "--budget", type=float, default=math.inf, help="start no case after so many seconds"
    )
    parser.add_argument("--loops", type=int, default=5, help="bursts of each contender (5)")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    return parser.parse_args(argv)


def wanted(name: str, group: str, options: argparse.Namespace) -> bool:
    """Returns whether the command line asks for a part of the run."""
    if options.group is not None and group not in options.group:
        return False
    return not options.only or any(text in name for text in options.only)


def has_gpu() -> bool:
    """Returns whether the driver finds a GPU; JAX does not start for this."""
    return clocks() is not None


def first_calls(quick: bool) -> dict[str, Any]:
    """Measures first calls in fresh processes, by implementation."""
    case = shapes.FIRST_CALL_QUICK if quick else shapes.FIRST_CALL
    callers = FIRST_CALLERS["gpu" if has_gpu() else "cpu"]
    return {name: host_cost.first_call(name, case, 1 if quick else 3) for name in callers}


def host_costs(quick: bool) -> dict[str, Any]:
    """Measures dispatch and memory."""
    cases = shapes.MEMORY_QUICK if quick else shapes.MEMORY
    return {
        "dispatch_s": host_cost.dispatch(20 if quick else 2000),
        "memory": [host_cost.memory(case) for case in cases],
    }


def line(record: dict[str, Any]) -> str:
    """Returns a line for the terminal: TFLOP/s of each contender, with our speed over a peer's."""
    cells = []
    for direction in DIRECTIONS:
        part = record[direction]
        for name, result in part["results"].items():
            if "tflops" in result:
                ratio = part["ratios"].get(name)
                beside = "" if ratio is None else f" ({ratio:.2f})"
                cells.append(f"{direction[:3]} {name} {result['tflops']:.4g}{beside}")
            elif "error" in result:
                cells.append(f"{direction[:3]} {name} ERROR {result['error'][:100]}")
    return f"{record['id']}: " + ", ".join(cells)


def file_name(device: str, options: argparse.Namespace) -> str:
    """Returns the device's name, with a suffix so that a partial run does not overwrite a whole
    one.
    """
    stem = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    parts = [stem, *(["quick"] if options.quick else []), *(options.group or [])]
    return "-".join([*parts, *(["partial"] if options.only else [])]) + ".json"


def measure_safely(case: Case, protocol: Protocol) -> dict[str, Any]:
    """Returns what `measure` returns, or a record of why the whole case failed."""
    try:
        return measure(case, protocol)
    except Exception as error:
        nothing = {"flops": 0, "results": {"case": {"error": describe(error)}}, "ratios": {}}
        return {"id": case.id, "group": case.group} | dict.fromkeys(DIRECTIONS, nothing)


def main(argv: list[str] | None = None) -> Path:
    """Runs what the command line asks for and returns the JSON file."""
    options = arguments(argv)
    start = time.perf_counter()
    host: dict[str, Any] = {}
    if wanted(HOST, HOST, options):
        host["first_call"] = first_calls(options.quick)
        print(f"first calls: {host['first_call']}", flush=True)
    if has_gpu():
        torch_peer.load()
    run: dict[str, Any] = {"environment": environment(), "host": host, "cases": []}
    run["environment"] |= {"packages": packages(PACKAGES), "clocks_before": clocks()}
    path = options.output / file_name(run["environment"]["device"], options)
    options.output.mkdir(parents=True, exist_ok=True)
    protocol = Protocol(1, 0.002) if options.quick else Protocol(options.loops)
    chosen = [
        case
        for case in (shapes.QUICK if options.quick else shapes.ALL)
        if wanted(case.id, case.group, options)
    ]
    for number, case in enumerate(chosen, 1):
        elapsed = time.perf_counter() - start
        if elapsed > options.budget:
            run["not_started"] = [x.id for x in chosen[number - 1 :]]
            break
        record = measure_safely(case, protocol)
        run["cases"].append(record)
        save(run, path)
        elapsed = time.perf_counter() - start
        print(f"[{number}/{len(chosen)} {elapsed:.0f} s] {line(record)}", flush=True)
        # Every case has shapes of its own: its programs would only fill memory.
        jax.clear_caches()
    if wanted(HOST, HOST, options):
        host |= host_costs(options.quick)
    run["environment"]["clocks_after"] = clocks()
    run["environment"]["run_s"] = time.perf_counter() - start
    save(run, path)
    print(write(path))
    return path


if __name__ == "__main__":
    main()
