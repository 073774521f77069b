"""A timing estimate as pictures: Chrome's trace format (chrome://tracing, Perfetto), PNG, SVG."""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kernels.emulator.timing.replay import Timing
from kernels.emulator.timing.resources import Interval, row_of_warp

_COLOURS = {"runs": "tab:green", "waits": "lightgrey", "tensor": "tab:red", "TMA": "tab:blue"}
_ROW_INCHES, _WIDTH_INCHES = 0.18, 16
_FILLS = {"runs": "#4caf50", "waits": "#d0d0d0", "tensor": "#d62728", "TMA": "#1f77b4"}
_LEFT, _TOP, _ROW, _BAR, _WIDTH = 130, 34, 20, 14, 1400  # pixels of an SVG
_LETTER = 5.2  # pixels of a letter of a label, at most
_TICKS = 10  # that an SVG's axis has at most
_LEGEND = (
    "green: the role's first warp runs; grey: it waits, for an mbarrier where it names one; "
    "red: products; blue: copies"
)


def chrome_trace(timing: Timing) -> str:
    """JSON with a track per row; a microsecond there is a thousand cycles."""
    rows = _rows(timing)
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": number, "args": {"name": row}}
        for row, number in rows.items()
    ]
    events += [
        {
            "ph": "X",
            "name": interval.name,
            "pid": 0,
            "tid": rows[interval.row],
            "ts": interval.start / 1000,
            "dur": (interval.end - interval.start) / 1000,
        }
        for interval in timing.intervals
    ]
    return json.dumps({"traceEvents": events})


def plot(timing: Timing, path: pathlib.Path, cycles: tuple[float, float] | None = None) -> None:
    """Writes a PNG of the timeline, or of the cycles that are given."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = _rows(timing)
    figure = Figure(figsize=(_WIDTH_INCHES, 1 + _ROW_INCHES * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for row, number in rows.items():
        for colour in _COLOURS.values():
            spans = [
                (interval.start, interval.end - interval.start)
                for interval in timing.intervals
                if interval.row == row and _colour(interval.row, interval.name) == colour
            ]
            axes.broken_barh(spans, (number - 0.4, 0.8), facecolors=colour)
    axes.set_yticks(list(rows.values()), list(rows), fontsize=6)
    axes.invert_yaxis()
    axes.set_xlim(cycles or (0, timing.cycles))
    axes.set_xlabel(f"cycles of an SM ({timing.rates.name}, estimated)")
    figure.savefig(path, dpi=150)


def svg(timing: Timing, title: str, roles: Mapping[str, Sequence[int]]) -> str:
    """The timeline as SVG: a row for the first warp of every role of each CTA, then the units.

    Waits that are wide enough name what they wait for. The same estimate gives the same text.

    Args:
      roles: warp indices by name; "idle" ones are left out.
    """
    rows = _rows_of_roles(timing, roles)
    scale = (_WIDTH - _LEFT - 20) / timing.cycles
    bottom = _TOP + _ROW * len(rows)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{bottom + 40}"'
        ' font-family="sans-serif" font-size="9">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_LEFT}" y="18" font-size="13">{title}; estimated cycles of an SM'
        f" ({timing.rates.name})</text>",
        *_axis(timing.cycles, scale, bottom),
    ]
    for number, (label, row) in enumerate(rows):
        top = _TOP + _ROW * number
        lines.append(f'<text x="{_LEFT - 6}" y="{top + 11}" text-anchor="end">{label}</text>')
        lines += _bars([i for i in timing.intervals if i.row == row], top, scale)
    lines.append(f'<text x="{_LEFT}" y="{bottom + 32}">{_LEGEND}</text>')
    return "\n".join((*lines, "</svg>", ""))


def _rows_of_roles(timing: Timing, roles: Mapping[str, Sequence[int]]) -> list[tuple[str, str]]:
    """Labels and the rows of the timeline that they show."""
    names = sorted({interval.row for interval in timing.intervals})
    ctas = sorted({int(found[1]) for name in names if (found := re.match(r"CTA (\d+) ", name))})
    rows = [
        (f"CTA {cta} {role}" if len(ctas) > 1 else role, row_of_warp(cta, warps[0]))
        for cta in ctas
        for role, warps in roles.items()
        if role != "idle"
    ]
    # The sub-partitions share each warpgroup's products, so the first one stands for all.
    units = [name for name in names if not re.match(r"CTA|tensor core [1-9]", name)]
    return [*rows, *((name.removesuffix(" 0"), name) for name in units)]


def _axis(cycles: float, scale: float, bottom: int) -> Iterable[str]:
    """Lines and numbers of round cycles."""
    steps = (unit * power for power in (100, 1000, 10000, 100000) for unit in (1, 2, 5))
    step = next(step for step in steps if cycles / step <= _TICKS)
    for cycle in range(0, int(cycles) + 1, step):
        x = f"{_LEFT + cycle * scale:.1f}"
        yield f'<path d="M{x} {_TOP - 4}V{bottom}" stroke="#eee"/>'
        yield f'<text x="{x}" y="{bottom + 14}" text-anchor="middle">{cycle}</text>'


def _bars(intervals: Sequence[Interval], top: int, scale: float) -> Iterable[str]:
    """A row's bars, one path for each colour, and the names that fit into waits."""
    shapes: dict[str, list[str]] = {}
    labels = []
    for interval in intervals:
        x, width = _LEFT + interval.start * scale, (interval.end - interval.start) * scale
        kind = _kind(interval.row, interval.name)
        shapes.setdefault(kind, []).append(f"M{x:.1f} {top}h{width:.1f}v{_BAR}h-{width:.1f}z")
        name = interval.name.removeprefix("waits: ")
        if kind == "waits" and _LETTER * len(name) < width:
            middle = x + width / 2
            labels.append(
                f'<text x="{middle:.1f}" y="{top + 10}" text-anchor="middle">{name}</text>'
            )
    for kind, paths in shapes.items():
        yield f'<path d="{"".join(paths)}" fill="{_FILLS[kind]}"/>'
    yield from labels


def _rows(timing: Timing) -> dict[str, int]:
    names = sorted({interval.row for interval in timing.intervals})
    return {name: number for number, name in enumerate(names)}


def _colour(row: str, name: str) -> str:
    return _COLOURS[_kind(row, name)]


def _kind(row: str, name: str) -> str:
    for text in (row, name):
        for kind in _COLOURS:
            if text.startswith(kind):
                return kind
    raise KeyError(name)
