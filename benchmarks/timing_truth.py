"""Compares estimated with measured cycles of every kernel of the project on an H200.

    python -m kernels.build                # once; nothing here needs a GPU
    python -m benchmarks.timing_truth      # JSON, Markdown and a chart in benchmarks/results

`benchmarks/kernel_cycles.py` measures, `benchmarks.grid_model` estimates. The estimates rest on
`kernels.emulator.timing.rates`, whose numbers are microbenchmarks' or documented; none of them is
fitted to these kernels. A kernel of fp16 runs the same instructions as the one of bf16, whose
recording serves both.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.grid_model.estimates import Estimator, Shape
from benchmarks.grid_model.recording import Code, built
from fa4_jax.key import KernelKey, Pass

RESULTS = pathlib.Path(__file__).parent / "results"
MEASURED = RESULTS / "nvidia-h200-kernel-cycles.json"
NAME = "nvidia-h200-timing-truth"


@dataclasses.dataclass(frozen=True)
class Row:
    """One kernel at one shape; cycles."""

    kernel: str
    family: str
    batch: int
    length: int
    heads: int
    is_causal: bool
    estimated: float
    measured: float

    @property
    def error(self) -> float:
        """Returns the relative error: -0.1 is an estimate that is 10 % low."""
        return self.estimated / self.measured - 1


def key_of(row: dict[str, Any]) -> KernelKey:
    """Returns the kernel of a measured row."""
    match = re.fullmatch(r"sm_90a_(fwd|bwd_pre|bwd_post|bwd)_(bf16|fp16)_d(\d+)(.*)", row["kernel"])
    if match is None:
        raise ValueError(f"no kernel of sm_90a: {row['kernel']}")
    flags = match[4].split("_")[1:]
    return KernelKey(
        "sm_90a",
        Pass(match[1]),
        match[2],
        int(match[3]),
        band="band" in flags,
        deterministic="deterministic" in flags,
    )


def measured_rows() -> list[dict[str, Any]]:
    """Reads the rows of the file of measured cycles; those of one kernel and shape are averaged."""
    same: defaultdict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in json.loads(MEASURED.read_text()):
        same[row["kernel"], row["batch"], row["length"], row["is_causal"]].append(row)
    return [
        rows[0] | {"cycles": sum(row["cycles"] for row in rows) / len(rows)}
        for rows in same.values()
    ]


def estimated(
    rows: Iterable[dict[str, Any]],
    code_of: Callable[[KernelKey], Code] = built,
    estimator: Estimator | None = None,
) -> list[Row]:
    """Estimates the measured rows."""
    estimator = estimator or Estimator()
    found: dict[tuple[KernelKey, Shape], float] = {}
    results = []
    for row in rows:
        key = key_of(row)
        shape = Shape(row["batch"], row["length"], row["heads"])
        like = dataclasses.replace(key, dtype="bf16")
        if (like, shape) not in found:
            found[like, shape] = estimator.cycles(code_of(like), shape)
        results.append(
            Row(
                row["kernel"],
                f"{key.kernel}{' deterministic' if key.deterministic else ''}",
                *(row["batch"], row["length"], row["heads"], row["is_causal"]),
                estimated=found[like, shape],
                measured=row["cycles"],
            )
        )
    return results


def summary(rows: list[Row]) -> dict[str, dict[str, float]]:
    """Returns number of rows, mean of the absolute errors, mean error and the worst, by family."""
    families: defaultdict[str, list[float]] = defaultdict(list)
    for row in rows:
        families[row.family].append(row.error)
        families["all"].append(row.error)
    return {
        name: {
            "rows": len(errors),
            "mean_absolute": sum(map(abs, errors)) / len(errors),
            "mean": sum(errors) / len(errors),
            "worst": max(errors, key=abs),
        }
        for name, errors in families.items()
    }


def markdown(rows: list[Row]) -> str:
    """Returns summary and table."""
    lines = [
        "# Estimated and measured cycles, NVIDIA H200",
        "",
        "`python -m benchmarks.timing_truth`; an error is negative where the estimate is low.",
        "",
        "| kernels | rows | mean absolute error | mean error | worst |",
        "|---|---|---|---|---|",
    ]
    for name, errors in summary(rows).items():
        percent = (f"{100 * errors[x]:.1f} %" for x in ("mean_absolute", "mean", "worst"))
        lines.append(f"| {name} | {errors['rows']} | {' | '.join(percent)} |")
    lines += [
        "",
        "| kernel | batch, length, heads | causal | estimated | measured | error |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row.kernel} | {row.batch}, {row.length}, {row.heads} "
            f"| {'yes' if row.is_causal else 'no'} | {row.estimated:,.0f} | {row.measured:,.0f} "
            f"| {100 * row.error:+.1f} % |"
        )
    return "\n".join(lines) + "\n"


def plot(rows: list[Row], path: pathlib.Path) -> None:
    """Writes a PNG of estimated over measured cycles, both logarithmic."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for family in Counter(row.family for row in rows):
        here = [row for row in rows if row.family == family]
        axes.loglog(
            [row.measured for row in here], [row.estimated for row in here], ".", label=family
        )
    ends = [min(row.measured for row in rows), max(row.measured for row in rows)]
    for factor, style in ((1.0, "k-"), (0.8, "k:"), (1.25, "k:")):
        axes.loglog(ends, [factor * end for end in ends], style, linewidth=0.8)
    axes.set_xlabel("measured cycles (H200)")
    axes.set_ylabel("estimated cycles")
    axes.set_title("Every sm_90a kernel and shape; dotted: 20 % low, 25 % high", fontsize=10)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=130)


def main() -> None:
    """Estimates all rows and writes JSON, Markdown and chart."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS, metavar="FOLDER")
    folder: pathlib.Path = parser.parse_args().output
    rows = estimated(measured_rows())
    document = {
        "summary": summary(rows),
        "rows": [dataclasses.asdict(row) | {"error": row.error} for row in rows],
    }
    (folder / f"{NAME}.json").write_text(json.dumps(document, indent=1) + "\n")
    (folder / f"{NAME}.md").write_text(markdown(rows))
    plot(rows, folder / f"{NAME}.png")
    print(markdown(rows).split("| kernel |")[0])


if __name__ == "__main__":
    main()
