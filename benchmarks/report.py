"""Makes a Markdown report and a plot from the JSON file of a run, or of several partial runs.

    python -m benchmarks.report nvidia-h200.json
    python -m benchmarks.report nvidia-h200.json nvidia-h200-grid.json nvidia-h200-gqa.json

The second form writes the first file out of the others.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.measure import DIRECTIONS
from benchmarks.peers import (
    CUDNN,
    DETERMINISTIC,
    FA3,
    FA4,
    FA4_DETERMINISTIC,
    JLA,
    OTHERS,
    OURS,
    OWN,
    PALLAS,
    XLA,
)
from benchmarks.summary import BEST, Record, ratio, summary

TITLES = {
    "grid": "Self-attention, bfloat16",
    "gqa": "Grouped queries, bfloat16",
    "values": "Value's head dim differs from query's, bfloat16",
    "d96": "Head dim 96, bfloat16",
    "odd": "Lengths that are multiples of no tile, bfloat16",
    "window": "Windows, bfloat16",
    "lengths": "A length for each batch entry, bfloat16",
    "cross": "Different lengths of queries and keys, bfloat16",
    "fp16": "Self-attention, float16",
    "documents": "Documents packed into rows of 8192 tokens, bfloat16",
    "layers": "Soft caps and sinks, bfloat16",
    "decode": "Few query rows, bfloat16; calls in a chain within one program",
    "few-heads": "Few heads, bfloat16; calls in a chain within one program",
}
"""The report's part for each group of cases."""

SAME = ("device", "driver", "jax", "jaxlib", "commit")
"""What partial runs must have in common to be joined."""

COLORS = {
    OURS: "C0",
    DETERMINISTIC: "C2",
    CUDNN: "C1",
    FA3: "C5",
    JLA: "C6",
    FA4: "C8",
    FA4_DETERMINISTIC: "C9",
    PALLAS: "C4",
    XLA: "C3",
}


def save(run: Record, path: Path) -> None:
    """Writes the JSON file so that a reader, or a kill, never finds half of one."""
    temporary = path.with_suffix(".partial")
    temporary.write_text(json.dumps(run, indent=1) + "\n")
    os.replace(temporary, path)


def write(path: Path) -> str:
    """Writes the Markdown file and the plot beside the JSON file; returns the summary's lines."""
    run = json.loads(path.read_text())
    path.with_suffix(".md").write_text(markdown(run, path.with_suffix(".png").name))
    plot(run, path.with_suffix(".png"))
    return "\n".join(["", *summary(run), "", f"written: {path.with_suffix('')}.json, .md, .png"])


def joined(runs: Sequence[Record]) -> Record:
    """Returns one run with the cases of all; a later run's replaces an earlier one's.

    Raises:
      ValueError: the runs were not made on the same device with the same versions.
    """
    first, *others = (run["environment"] for run in runs)
    for other in others:
        for key in SAME:
            if first.get(key) != other.get(key):
                raise ValueError(f"{key} differs: {first.get(key)} and {other.get(key)}")
    environment = dict(first)
    for other in others:
        environment["packages"] = first.get("packages", {}) | other.get("packages", {})
    environment["run_s"] = sum(run["environment"].get("run_s", 0.0) for run in runs)
    cases: dict[str, Record] = {}
    host: Record = {}
    for run in runs:
        cases |= {case["id"]: case for case in run["cases"]}
        host |= run["host"]
    missing = {name for run in runs for name in run.get("not_started", [])} - set(cases)
    return {
        "environment": environment,
        "host": host,
        "cases": list(cases.values()),
        "not_started": sorted(missing),
    }


def markdown(run: Record, plot_name: str) -> str:
    """Returns the whole report."""
    env = run["environment"]
    parts = [f"# Attention on {env['device']}, {env['date']}"]
    versions = [f"JAX {env['jax']}, jaxlib {env['jaxlib']}", f"Python {env['python']}"]
    versions += [f"driver {env['driver']}"] if env.get("driver") else []
    versions += [f"commit {env['commit'][:12]}"] if env.get("commit") else []
    versions += [f"{name} {version}" for name, version in env.get("packages", {}).items()]
    parts.append(", ".join(versions) + ".")
    parts.append(
        "TFLOP/s of the visible pairs (two products forward, five backward); the median of bursts "
        "of back-to-back calls, contenders in turns in one process, random normal inputs. Backward "
        "is the vjp alone. In brackets: our speed over the contender's. *Best*: our speed over the "
        "best peer's, or, where no other contender can do a case, our TFLOP/s over ours of the "
        "same shape without a mask."
    )
    parts.append("\n".join(summary(run)))
    if any(case["group"] == "grid" for case in run["cases"]):
        parts.append(f"![TFLOP/s over length]({plot_name})")
    for group, title in TITLES.items():
        cases = [case for case in run["cases"] if case["group"] == group and "batch" in case]
        if cases:
            parts += [f"## {title} ({group})", table(cases)]
    parts += host(run["host"])
    parts += absences(run)
    return "\n\n".join(part for part in parts if part) + "\n"


def table(cases: list[Record]) -> str:
    """Returns a table with cases as rows, contenders and directions as columns."""
    head = ["d", "mask", "B", "T", "S", "heads"]
    names: dict[str, list[str]] = {}
    for direction in DIRECTIONS:
        names[direction] = [
            name
            for name in (*OWN, *OTHERS)
            if any("tflops" in case[direction]["results"].get(name, {}) for case in cases)
        ]
        head += [*(f"{name} {direction}" for name in names[direction]), f"best {direction}"]
    rows = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    order = ("head_dim", "is_causal", "key_length", "query_length", "batch")
    for case in sorted(cases, key=lambda x: [x[field] for field in order]):
        dims = case["head_dim"]
        if case.get("value_dim") is not None:
            dims = f"{dims}, {case['value_dim']}"
        cells = [dims, mask(case), case["batch"], case["query_length"], case["key_length"]]
        cells.append("/".join(map(str, case["heads"])))
        for direction in DIRECTIONS:
            cells += [cell(case[direction], name) for name in names[direction]]
            cells.append(best(case, direction))
        rows.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(rows)


def mask(case: Record) -> str:
    """Returns what hides keys from rows, in words."""
    words = ["causal" if case["is_causal"] else "dense"]
    if case.get("window") is not None:
        words.append("window {} left, {} right".format(*case["window"]))
    if case.get("lengths") is not None:
        words.append(f"{sum(case['lengths'])} of {case['batch'] * case['key_length']} tokens")
    if case.get("documents") is not None:
        lengths = sorted(itertools.chain(*case["documents"]))
        words.append(f"{len(lengths)} documents of {lengths[0]} to {lengths[-1]} tokens")
    if case.get("soft_cap") is not None:
        words.append(f"soft cap {case['soft_cap']:g}")
    if case.get("deviation", 1) != 1:
        words.append(f"scores with a deviation of {case['deviation']}")
    if case.get("sinks"):
        words.append("sinks")
    return ", ".join(words)


def best(case: Record, direction: str) -> str:
    """Returns our speed over the best peer's, or our share of the rate without a mask."""
    found = ratio(case, direction, BEST)
    if found is not None:
        return f"{found:.2f}"
    share = case[direction].get("share_of_dense")
    return "" if share is None else f"{share:.2f} of dense"


def cell(part: Record, name: str) -> str:
    """Returns TFLOP/s and ratio, or what there is instead."""
    result = part["results"].get(name, {})
    if "tflops" not in result:
        return "error" if "error" in result else ""
    beside = part["ratios"].get(name)
    return f"{result['tflops']:.4g}" + ("" if beside is None else f" ({beside:.2f})")


def host(costs: Record) -> list[str]:
    """Returns the part about first call, dispatch and memory."""
    parts = []
    if "first_call" in costs:
        rows = ["| first call | import | trace | compile | run | together, s |", "|---" * 6 + "|"]
        for name, found in costs["first_call"].items():
            if "error" in found:
                rows.append(f"| {name} | {found['error']} |||||")
                continue
            steps = [f"{found['steps_s'][x]:.3f}" for x in ("import", "trace", "compile", "run")]
            rows.append(f"| {name} | {' | '.join(steps)} | {found['total_s']:.3f} |")
        parts += [
            "## First call in a fresh process",
            "Seconds beyond JAX's own import and start, median of the processes; causal, d = 128 "
            "unless this was a quick run.",
            "\n".join(rows),
        ]
    if "dispatch_s" in costs:
        rows = ["| program | microseconds per call |", "|---|---|"]
        for name, seconds in costs["dispatch_s"].items():
            value = seconds if isinstance(seconds, str) else f"{seconds * 1e6:.1f}"
            rows.append(f"| {name} | {value} |")
        parts += ["## Dispatch of a tiny jitted call", "\n".join(rows)]
    if "memory" in costs:
        head = "| case | program | temporary MB | theory MB | arguments MB | results MB |"
        rows = [head, "|---" * 6 + "|"]
        for found in costs["memory"]:
            for program in ("forward", "gradient"):
                sizes = found[program]
                cells = [
                    f"{sizes[key] / 1e6:.2f}" if key in sizes else sizes.get("error", "")
                    for key in ("temp_bytes", "theory_bytes", "argument_bytes", "output_bytes")
                ]
                rows.append(f"| {found['case']} | {program} | " + " | ".join(cells) + " |")
        parts += [
            "## Memory",
            "Theory: the float32 log-sum-exp; with the gradient also the output and a float32 "
            "workspace of dq's size.",
            "\n".join(rows),
        ]
    return parts


def absences(run: Record) -> list[str]:
    """Returns which contenders did not take part in which cases, by reason."""
    reasons: dict[tuple[str, str, str], int] = {}
    for case in run["cases"]:
        for direction in DIRECTIONS:
            for name, result in case[direction]["results"].items():
                if "absent" in result:
                    key = (name, direction, result["absent"])
                    reasons[key] = reasons.get(key, 0) + 1
    if not reasons:
        return []
    lines = [
        f"- {name}, {direction}, {count} cases: {reason}"
        for (name, direction, reason), count in reasons.items()
    ]
    return ["## Not timed", "\n".join(lines)]


def plot(run: Record, path: Path) -> None:
    """Plots TFLOP/s over length: a column per head dim; rows forward and backward, dense and
    causal.
    """
    grid = [case for case in run["cases"] if case["group"] in ("grid", "fp16") and "batch" in case]
    if not grid:
        return
    dims = sorted({case["head_dim"] for case in grid})
    rows = [(direction, causal) for direction in DIRECTIONS for causal in (False, True)]
    figure, axes = plt.subplots(
        len(rows), len(dims), figsize=(4 * len(dims), 11), squeeze=False, sharex=True, sharey=True
    )
    handles: dict[str, Any] = {}
    for axis_row, (direction, causal) in zip(axes, rows, strict=True):
        for axis, head_dim in zip(axis_row, dims, strict=True):
            cases = [
                case
                for case in grid
                if case["head_dim"] == head_dim and case["is_causal"] == causal
            ]
            for label, line in _lines(axis, cases, direction):
                handles.setdefault(label, line)
            axis.set_title(f"{direction}, {'causal' if causal else 'dense'}, d = {head_dim}")
            axis.set_xscale("log", base=2)
            axis.grid(alpha=0.3)
    axes[0, 0].set_ylim(0, 1.05 * axes[0, 0].get_ylim()[1])
    for axis in axes[:, 0]:
        axis.set_ylabel("TFLOP/s")
    for axis in axes[-1]:
        axis.set_xlabel("length")
    figure.legend(handles.values(), handles.keys(), loc="lower center", ncols=3)
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _lines(axis: Any, cases: list[Record], direction: str) -> list[tuple[str, Any]]:
    """Draws each contender's line in bfloat16; float16 is dashed, for ours and its own peer."""
    drawn = []
    for group, names in (
        ("grid", (OURS, DETERMINISTIC, CUDNN, FA3, FA4, JLA, XLA)),
        ("fp16", (OURS, PALLAS)),
    ):
        for name in names:
            points = sorted(
                (case["key_length"], case[direction]["results"][name]["tflops"])
                for case in cases
                if case["group"] == group and "tflops" in case[direction]["results"].get(name, {})
            )
            if points:
                label = name if group == "grid" else f"{name}, float16"
                style = "o-" if group == "grid" else "x--"
                (line,) = axis.plot(
                    *zip(*points, strict=True), style, color=COLORS[name], label=label
                )
                drawn.append((label, line))
    return drawn


def main(argv: list[str] | None = None) -> None:
    """Writes the report that the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("file", type=Path, help="the run")
    parser.add_argument("parts", type=Path, nargs="*", help="partial runs that make up the run")
    options = parser.parse_args(argv)
    if options.parts:
        save(joined([json.loads(path.read_text()) for path in options.parts]), options.file)
    print(write(options.file))


if __name__ == "__main__":
    main()
