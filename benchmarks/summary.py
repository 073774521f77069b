"""What a run says in a few lines: speed ratios by group, errors, results that disagree."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from typing import Any

from benchmarks.measure import DIRECTIONS
from benchmarks.peers import DETERMINISTIC, FA4_DETERMINISTIC, OURS, PEERS, PLAIN, TABLE
from benchmarks.shapes import GROUPS

DISAGREEMENT = 0.03
"""Contenders whose results differ by more (relative, Euclidean) compute something different."""

Record = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A contender's speed over the best of others, case by case."""

    name: str
    others_name: str
    others: tuple[str, ...]


BEST = Comparison(OURS, "the best peer", PEERS)

COMPARISONS = (
    BEST,
    *(Comparison(OURS, name, (name,)) for name in PEERS),
    Comparison(DETERMINISTIC, FA4_DETERMINISTIC, (FA4_DETERMINISTIC,)),
    Comparison(DETERMINISTIC, OURS, (OURS,)),
    Comparison(OURS, TABLE, (TABLE,)),
    Comparison(OURS, PLAIN, (PLAIN,)),
)


@dataclasses.dataclass(frozen=True)
class Ratios:
    """The ratios of a comparison in the cells where both sides were timed."""

    geometric_mean: float
    worst: float
    worst_case: str
    cells: int


def ratio(case: Record, direction: str, comparison: Comparison) -> float | None:
    """Returns the ratio of the speeds in one case, None where one of the sides has no time."""
    # The ratios of a record are our speed over the contender's.
    ratios: dict[str, float] = {OURS: 1.0} | case[direction]["ratios"]
    if comparison.name not in ratios:
        return None
    others = [ratios[x] for x in comparison.others if x in ratios]
    return min(others) / ratios[comparison.name] if others else None


def ratios_of(run: Record, group: str, direction: str, comparison: Comparison) -> Ratios | None:
    """Returns the ratios of a group's cases, None where no case has one."""
    found = {
        case["id"]: value
        for case in run["cases"]
        if case["group"] == group
        if (value := ratio(case, direction, comparison)) is not None
    }
    if not found:
        return None
    worst = min(found, key=lambda x: found[x])
    mean = statistics.geometric_mean(found.values())
    return Ratios(mean, found[worst], worst, len(found))


def summary(run: Record) -> list[str]:
    """Returns Markdown lines: a table of the ratios, what failed, which results disagree."""
    rows: list[str] = []
    for group, comparison, direction in itertools.product(GROUPS, COMPARISONS, DIRECTIONS):
        found = ratios_of(run, group, direction, comparison)
        if found is not None:
            cells = [group, direction, comparison.name, comparison.others_name]
            cells += [f"{found.geometric_mean:.3f}", f"{found.worst:.3f}", found.worst_case]
            rows.append("| " + " | ".join([*cells, str(found.cells)]) + " |")
    if rows:
        head = "| group | direction | speed of | over | geometric mean | worst | in | cells |"
        rows = [head, "|---" * 8 + "|", *rows, ""]
    return rows + problems(run)


def problems(run: Record) -> list[str]:
    """Returns lines with the errors, the results that disagree with ours, and what is missing."""
    lines: list[str] = []
    for case, direction in itertools.product(run["cases"], DIRECTIONS):
        for name, result in case[direction]["results"].items():
            where = f"- {case['id']} {direction}, {name}"
            for key in ("error", "difference_error"):
                if key in result:
                    lines.append(f"{where}: {result[key]}")
            difference = result.get("difference", 0.0)
            if not difference <= DISAGREEMENT:
                lines.append(f"{where}: differs from {OURS} by {difference:.3g}")
        if "share_error" in case[direction]:
            error = case[direction]["share_error"]
            lines.append(f"- {case['id']} {direction}, {OURS} without a mask: {error}")
    not_started = run.get("not_started", [])
    if not_started:
        lines.append(f"- not started, since the time was over: {', '.join(not_started)}")
    return lines
