"""Compares the speed of a few cells with cuDNN's, and with the timing model's estimates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.day_one.outcome import Result, Verdict
from benchmarks.peers import CUDNN, DETERMINISTIC, OURS
from benchmarks.shapes import Case, self_attention

ESTIMATES = Path(__file__).parents[1] / "results" / "day-one-estimates.json"
"""TFLOP/s by architecture, cell, direction and contender. `benchmarks.day_one.estimates` writes it,
since estimates need the kernels' PTX and a GPU's machine has no CuTe-DSL.
"""

CELLS = tuple(
    self_attention("grid", head_dim, 8192, is_causal, "bfloat16")
    for head_dim, is_causal in ((128, True), (128, False), (64, True), (256, True))
)


def estimates(arch: str) -> Mapping[str, Any]:
    """Returns TFLOP/s by cell, direction and contender; empty where nothing was estimated."""
    if not ESTIMATES.exists():
        return {}
    return json.loads(ESTIMATES.read_text()).get(arch, {}).get("cells", {})


def run(case: Case) -> Result:
    """Times a cell: ours, ours deterministic and cuDNN's in turns, medians."""
    from benchmarks.measure import DIRECTIONS, measure
    from benchmarks.timing import Protocol

    record = measure(case, Protocol(loops=5, burst_s=0.03))
    rows: dict[str, Any] = {}
    errors = []
    for direction in DIRECTIONS:
        for name in (OURS, DETERMINISTIC, CUDNN):
            found = record[direction]["results"].get(name)
            if found is None:
                continue
            rows.setdefault(direction, {})[name] = found.get("tflops")
            if "error" in found:
                errors.append(f"{name} {direction}: {found['error']}")
    text = ", ".join(
        f"{direction} {ratio(rows, direction):.2f} of cuDNN"
        for direction in DIRECTIONS
        if ratio(rows, direction) is not None
    )
    ours = [error for error in errors if error.startswith(OURS)]
    verdict = Verdict.ERROR if ours else Verdict.MEASURED
    return Result(verdict, "; ".join(filter(None, [text, *errors])), rows)


def ratio(rows: Mapping[str, Any], direction: str) -> float | None:
    """Returns our speed over cuDNN's."""
    of_direction = rows.get(direction, {})
    ours, theirs = of_direction.get(OURS), of_direction.get(CUDNN)
    return ours / theirs if ours and theirs else None
