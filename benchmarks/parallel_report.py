"""Makes a Markdown report and plots from the JSON file of `benchmarks.parallel`.

python -m benchmarks.parallel_report benchmarks/results/nvidia-h200-x4-parallel.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.parallel import ONE

Record = dict[str, Any]


def write(path: Path) -> str:
    """Writes the Markdown file and the plots beside the JSON file; returns the Markdown."""
    run = json.loads(path.read_text())
    plot(run, path.with_suffix(".png"))
    pictures = [path.with_suffix(".png").name]
    if any("timeline" in x for x in run.get("profile", {}).get("schemes", {}).values()):
        timelines(run, path.with_name(f"{path.stem}-timeline.png"))
        pictures.append(f"{path.stem}-timeline.png")
    text = markdown(run, pictures)
    path.with_suffix(".md").write_text(text)
    return text


def markdown(run: Record, pictures: list[str]) -> str:
    """Returns the report."""
    where = run["environment"]
    lines = [
        f"# Context parallelism on {run['devices']} x {where['device']}",
        "",
        f"{where['date']}, JAX {where['jax']}, driver {where['driver']}, commit {where['commit']}. "
        "Forward and backward of causal self-attention, bf16, one sequence, interleaved medians. "
        f"Efficiency: time of one GPU for all of it / {run['devices']} / time measured. "
        f"Compiler options: {run['options']}.",
        "",
        "| case | scheme | ms | TFLOP/s a GPU | efficiency | GiB a GPU |",
        "|---|---|---|---|---|---|",
    ]
    for case in run["cases"]:
        for name, x in case["results"].items():
            if "median_s" not in x:
                lines.append(f"| {case['id']} | {name} | {x.get('error', '')[:80]} | | | |")
                continue
            lines.append(
                f"| {case['id']} | {name} | {1e3 * x['median_s']:.2f} | {x['tflops_per_gpu']:.0f} "
                f"| {x.get('efficiency', float('nan')):.3f} "
                f"| {x['bytes_per_gpu']['total'] / 2**30:.2f} |"
            )
    schemes = run.get("profile", {}).get("schemes", {})
    if schemes:
        lines += [
            "",
            f"Profile of {run['profile']['case']}, one call, a GPU's mean:",
            "",
            "| scheme | span ms | transfers ms | hidden under kernels | exposed ms |",
            "|---|---|---|---|---|",
        ]
    for name, x in schemes.items():
        if "error" in x:
            lines.append(f"| {name} | {x['error'][:80]} | | | |")
            continue
        share = "" if x["hidden_share"] is None else f"{x['hidden_share']:.1%}"
        lines.append(
            f"| {name} | {x['span_us'] / 1e3:.2f} | {x['transfers_us_per_gpu'] / 1e3:.2f} "
            f"| {share} | {x['exposed_us_per_gpu'] / 1e3:.2f} |"
        )
    lines += ["", *(f"![{name}]({name})" for name in pictures), ""]
    return "\n".join(lines)


def plot(run: Record, path: Path) -> None:
    """Plots efficiency and memory by length, with a line for each scheme."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
    names = dict.fromkeys(name for case in run["cases"] for name in case["results"])
    for name in names:
        points = [
            (case["tokens"], x["efficiency"], x["bytes_per_gpu"]["total"] / 2**30)
            for case in run["cases"]
            if "efficiency" in (x := case["results"].get(name, {}))
        ]
        if not points:
            continue
        tokens, efficiency, memory = zip(*sorted(points), strict=True)
        if name != ONE:
            left.plot(tokens, efficiency, "o-", label=name)
        right.plot(tokens, memory, "x--" if name == ONE else "o-", label=name)
    left.axhline(0.85, color="gray", linewidth=0.8, linestyle=":")
    left.set(xscale="log", xlabel="tokens", ylabel="efficiency", ylim=(0, 1.1))
    right.set(xscale="log", yscale="log", xlabel="tokens", ylabel="GiB per GPU")
    for axis in (left, right):
        axis.set_xticks([case["tokens"] for case in run["cases"]])
        axis.set_xticklabels([case["id"] for case in run["cases"]], fontsize=7)
        axis.minorticks_off()
        axis.legend(fontsize=7)
    figure.suptitle(
        f"{run['devices']} x {run['environment']['device']}: forward + backward, causal"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def timelines(run: Record, path: Path) -> None:
    """Plots kernels and transfers of the first GPU during one call of each scheme."""
    schemes = {k: v for k, v in run["profile"]["schemes"].items() if "timeline" in v}
    figure, axes = plt.subplots(
        len(schemes), 1, figsize=(11, 1.2 + 1.1 * len(schemes)), squeeze=False
    )
    for axis, (name, x) in zip(axes[:, 0], schemes.items(), strict=True):
        for row, (is_transfer, color) in enumerate(((False, "C0"), (True, "C3"))):
            bars = [(e[0] / 1e3, e[1] / 1e3) for e in x["timeline"] if e[2] is is_transfer]
            axis.broken_barh(bars, (row, 0.8), facecolors=color)
        axis.set_yticks([0.4, 1.4], ["kernels", "transfers"], fontsize=7)
        axis.set_title(name, fontsize=8, loc="left")
    axes[-1, 0].set_xlabel("ms")
    figure.suptitle(f"{run['profile']['case']}: first GPU", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    print(write(Path(sys.argv[1])))
