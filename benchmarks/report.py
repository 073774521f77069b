"""Makes a Markdown report and a plot from the JSON file of a run.

python -m benchmarks.report benchmarks/results/nvidia-h200.json
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.measure import DIRECTIONS
from benchmarks.peers import CUDNN, DETERMINISTIC, FA3, JLA, OURS, PALLAS, PEERS, XLA

FLOOR_LENGTH = 4096
"""Cells of the grid at least this long enter the summary."""

COLUMNS = (*PEERS, XLA)

BEST = "the best peer"

DISAGREEMENT = 0.03
"""Contenders whose results differ by more (relative, Euclidean) compute something different."""

COLORS = {
    OURS: "C0",
    DETERMINISTIC: "C2",
    CUDNN: "C1",
    FA3: "C5",
    JLA: "C6",
    PALLAS: "C4",
    XLA: "C3",
}

Record = dict[str, Any]


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


def ratio(case: Record, direction: str, name: str) -> float | None:
    """Returns our speed over a contender's, or over that of the best peer, None without them."""
    ratios: dict[str, float] = case[direction]["ratios"]
    names = PEERS if name == BEST else (name,)
    return min((ratios[x] for x in names if x in ratios), default=None)


def ratio_summary(run: Record, direction: str, name: str) -> Record | None:
    """Returns our speed over a contender's (or BEST's), in the grid's long cells.

    Returns:
      `geometric_mean`, `worst`, `worst_case` and `cells`, or None where there are no such cells.
    """
    ratios = {
        case["id"]: found
        for case in run["cases"]
        if case["group"] == "grid" and case["key_length"] >= FLOOR_LENGTH
        if (found := ratio(case, direction, name)) is not None
    }
    if not ratios:
        return None
    worst = min(ratios, key=lambda x: ratios[x])
    return {
        "geometric_mean": statistics.geometric_mean(ratios.values()),
        "worst": ratios[worst],
        "worst_case": worst,
        "cells": len(ratios),
    }


def summary(run: Record) -> list[str]:
    """Returns lines with the deciding ratios, what failed, and which contenders disagree."""
    lines = []
    for direction, name in itertools.product(DIRECTIONS, (BEST, *PEERS)):
        found = ratio_summary(run, direction, name)
        if found is not None:
            lines.append(
                f"- {direction}, our speed over {name} at S >= {FLOOR_LENGTH}: geometric mean "
                f"{found['geometric_mean']:.3f} over {found['cells']} cells, worst "
                f"{found['worst']:.3f} ({found['worst_case']})"
            )
    slower = slowdown(run)
    if slower is not None:
        lines.append(slower)
    lines += problems(run)
    return lines


def slowdown(run: Record) -> str | None:
    """Returns the deterministic backward's speed over the fast one's: the inverse of our ratio to
    it.
    """
    ratios = {
        case["id"]: 1 / case["backward"]["ratios"][DETERMINISTIC]
        for case in run["cases"]
        if case["group"] == "grid"
        and case["key_length"] >= FLOOR_LENGTH
        and DETERMINISTIC in case["backward"]["ratios"]
    }
    if not ratios:
        return None
    worst = min(ratios, key=lambda x: ratios[x])
    return (
        f"- deterministic backward's speed over the fast one's at S >= {FLOOR_LENGTH}: geometric "
        f"mean {statistics.geometric_mean(ratios.values()):.3f} over {len(ratios)} cells, worst "
        f"{ratios[worst]:.3f} ({worst})"
    )


def problems(run: Record) -> list[str]:
    """Returns lines with the errors, and the results that disagree with ours."""
    lines = []
    for case in run["cases"]:
        for direction in DIRECTIONS:
            for name, result in case[direction]["results"].items():
                where = f"- {case['id']} {direction}, {name}"
                for key in ("error", "difference_error"):
                    if key in result:
                        lines.append(f"{where}: {result[key]}")
                difference = result.get("difference", 0.0)
                if not difference <= DISAGREEMENT:
                    lines.append(f"{where}: differs from {OURS} by {difference:.3g}")
    return lines


def markdown(run: Record, plot_name: str) -> str:
    """Returns the whole report."""
    env = run["environment"]
    parts = [f"# Attention on {env['device']}, {env['date']}"]
    versions = [f"JAX {env['jax']}, jaxlib {env['jaxlib']}", f"Python {env['python']}"]
    versions += [f"driver {env['driver']}"] if env.get("driver") else []
    versions += [f"commit {env['commit'][:12]}"] if env.get("commit") else []
    parts.append(", ".join(versions) + ".")
    parts.append(
        "TFLOP/s of the visible pairs (4 H each forward, 10 H backward); the median of bursts of "
        "back-to-back calls, contenders in turns in one process, random normal inputs. Backward is "
        "the vjp alone. In brackets: our speed over the contender's."
    )
    parts.append("\n".join(summary(run)))
    if any(case["group"] == "grid" for case in run["cases"]):
        parts.append(f"![TFLOP/s over length]({plot_name})")
    titles = {
        "grid": "bfloat16, self-attention",
        "gqa": "Grouped queries, bfloat16",
        "cross": "Different lengths, bfloat16",
        "fp16": "float16, self-attention",
    }
    for group, title in titles.items():
        cases = [case for case in run["cases"] if case["group"] == group and "batch" in case]
        if cases:
            parts += [f"## {title}", table(cases)]
    parts += host(run["host"])
    parts += absences(run)
    return "\n\n".join(part for part in parts if part) + "\n"


def table(cases: list[Record]) -> str:
    """Returns a table with cases as rows, contenders and directions as columns."""
    columns = [
        (direction, name)
        for direction in DIRECTIONS
        for name in (OURS, DETERMINISTIC, *COLUMNS)
        if any("tflops" in case[direction]["results"].get(name, {}) for case in cases)
    ]
    head = ["d", "causal", "B", "T", "S", "heads"]
    head += [f"{name} {direction}" for direction, name in columns]
    rows = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    order = ("head_dim", "is_causal", "key_length", "query_length", "batch")
    for case in sorted(cases, key=lambda x: [x[field] for field in order]):
        causal = "yes" if case["is_causal"] else "no"
        cells = [case["head_dim"], causal, case["batch"], case["query_length"], case["key_length"]]
        cells.append("/".join(map(str, case["heads"])))
        cells += [cell(case[direction], name) for direction, name in columns]
        rows.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(rows)


def cell(part: Record, name: str) -> str:
    """Returns TFLOP/s and ratio, or what there is instead."""
    result = part["results"].get(name, {})
    if "tflops" not in result:
        return "error" if "error" in result else ""
    ratio = part["ratios"].get(name)
    return f"{result['tflops']:.4g}" + ("" if ratio is None else f" ({ratio:.2f})")


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
        ("grid", (OURS, DETERMINISTIC, CUDNN, FA3, JLA, XLA)),
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


if __name__ == "__main__":
    print(write(Path(sys.argv[1])))
