"""Prints a table of the decode cases: microseconds of a call, and how fast K and V are read.

    python -m benchmarks.decode             # a minute on a GPU
    python -m benchmarks.decode --loops 9   # more bursts

It measures as `python -m benchmarks.attention --group decode` does, and writes no file.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax

from benchmarks import shapes
from benchmarks.attention import measure_safely
from benchmarks.peers import CUDNN, OURS, XLA
from benchmarks.shapes import Case
from benchmarks.timing import Protocol

MEMORY_BYTES_PER_S = 4.6e12
"""Of an H200, measured."""


def floor_s(case: Case) -> float:
    """Returns the seconds that reading K and V once takes."""
    elements = case.head_dim + case.output_dim
    return 2 * elements * case.batch * case.key_length * case.heads[1] / MEMORY_BYTES_PER_S


def row(case: Case, record: dict[str, Any]) -> str:
    """Returns a case's line of the table."""
    sizes = f"{case.batch}, {case.query_length}, {case.key_length}, "
    cells = [sizes + "/".join(map(str, case.heads)) + f", {case.head_dim}"]
    for name in (OURS, CUDNN, XLA):
        result = record["forward"]["results"].get(name, {})
        failed = result.get("error", result.get("absent", "none"))[:60]
        cells.append(f"{result['median_s'] * 1e6:.1f}" if "median_s" in result else failed)
    ours = record["forward"]["results"].get(OURS, {})
    cells.append(f"{floor_s(case) * 1e6:.1f}")
    cells.append(f"{floor_s(case) / ours['median_s']:.2f}" if "median_s" in ours else "")
    differences = [
        f"{result['difference']:.1e}"
        for result in record["forward"]["results"].values()
        if "difference" in result
    ]
    return "| " + " | ".join([*cells, " ".join(differences)]) + " |"


def main() -> None:
    """Measures case by case and prints the table as it grows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decode")
    parser.add_argument("--loops", type=int, default=5, help="bursts of each contender (5)")
    options = parser.parse_args()
    head = ("B, T, S, N/K, d", OURS, CUDNN, XLA, "floor", "share", "differences")
    print(jax.devices()[0].device_kind)
    print("| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|", flush=True)
    for case in shapes.DECODE:
        print(row(case, measure_safely(case, Protocol(options.loops, 0.03))), flush=True)
        jax.clear_caches()


if __name__ == "__main__":
    main()
