"""A timing estimate as pictures: Chrome's trace format (chrome://tracing, Perfetto) and PNG."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from kernels.emulator.timing.replay import Timing

_COLOURS = {"runs": "tab:green", "waits": "lightgrey", "tensor": "tab:red", "TMA": "tab:blue"}
_ROW_INCHES, _WIDTH_INCHES = 0.18, 16


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


def _rows(timing: Timing) -> dict[str, int]:
    names = sorted({interval.row for interval in timing.intervals})
    return {name: number for number, name in enumerate(names)}


def _colour(row: str, name: str) -> str:
    for text in (row, name):
        for start, colour in _COLOURS.items():
            if text.startswith(start):
                return colour
    raise KeyError(name)
