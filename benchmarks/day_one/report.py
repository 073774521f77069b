"""Makes the report of a first day, as Markdown and as JSON, from its findings."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.day_one import speed, verdicts
from benchmarks.day_one.constants import shapes
from benchmarks.day_one.outcome import BAD, Finding, Verdict
from benchmarks.day_one.parts import INJECTED
from benchmarks.peers import CUDNN, DETERMINISTIC, OURS


@dataclasses.dataclass(frozen=True)
class Day:
    """The runs of a day, their device, and what they found.

    Attributes:
      device: the GPU's name, or the emulator's.
      unusable: the moment from which the GPU could not be used any more, or None.
    """

    arch: str
    emulated: bool
    device: str
    date: str
    commit: str
    seconds: float
    findings: tuple[Finding, ...]
    unusable: str | None = None
    seed: int = 0


def to_json(day: Day) -> dict[str, Any]:
    """Returns everything, for programs."""
    return {
        **{name: getattr(day, name) for name in ("arch", "emulated", "device", "date", "commit")},
        "seed": day.seed,
        "seconds": round(day.seconds, 1),
        "unusable": day.unusable,
        "change_first": verdicts.changes(day.arch, day.findings),
        "assumptions": [
            {
                "id": x.assumption.id,
                "claim": x.assumption.claim,
                "verdict": x.verdict,
                "why": x.why,
                "falls": x.assumption.falls,
                "change": x.assumption.change,
            }
            for x in verdicts.judgements(day.findings)
        ],
        "constants": [
            dataclasses.asdict(x) | {"ratio": x.ratio}
            for x in verdicts.measured_constants(day.arch, day.findings)
        ],
        "products": [
            dataclasses.asdict(x) for x in shapes(day.arch, verdicts.measurements(day.findings))
        ],
        "findings": [dataclasses.asdict(x) for x in day.findings],
    }


def markdown(day: Day) -> str:
    """Returns everything, for a person."""
    sections = [
        _head(day),
        _first(day),
        _injected(day),
        _assumptions(day),
        _items(day, "selftest", "Selftest by kernel family"),
        _items(day, "bitwise", "Bitwise runs"),
        _constants(day),
        _shapes(day),
        _speed(day),
        _items(day, "designs", "Both designs: TFLOP/s of one CTA and of pairs"),
        _not_run(day),
        _parts(day),
    ]
    return "\n\n".join(filter(None, sections)) + "\n"


def _head(day: Day) -> str:
    lines = [
        f"# First day: {day.device}",
        "",
        f"{day.date}, commit {day.commit}, kernels for {day.arch}, --seed {day.seed}, "
        f"{day.seconds:.0f} s.",
    ]
    if day.emulated:
        lines.append(
            "This is the emulator: a claim that holds here says that its program is right, and "
            "nothing of hardware."
        )
    counts = Counter(x.verdict for x in verdicts.own(day.findings))
    lines.append(", ".join(f"{counts[v]} {v}" for v in Verdict if counts[v]) + ".")
    if day.unusable:
        lines.append(f"**{day.unusable}.** What came after it was not run.")
    return "\n".join(lines)


def _first(day: Day) -> str:
    found = verdicts.changes(day.arch, day.findings)
    lines = [f"{number}. {line}" for number, line in enumerate(found, 1)]
    return "\n".join(["## What to change first", "", *(lines or ["Nothing."])])


def _injected(day: Day) -> str:
    found = [x for x in day.findings if x.item == INJECTED]
    if not found:
        return ""
    rows = [f"- {x.part}: {x.verdict}, {x.text} ({x.seconds:.0f} s)" for x in found]
    return "\n".join(["## Made to go wrong on purpose", "", *rows])


def _assumptions(day: Day) -> str:
    lines = [
        "## Assumptions",
        "",
        "`benchmarks/results/assumptions.md` has claims and evidence. *Broken*: whether the "
        "same program without what it tests goes wrong on this machine, so that a "
        "violation would show.",
        "",
        *_table("assumption", "verdict", "what decided", "broken"),
    ]
    controls = {x.item: x for x in verdicts.of_part(day.findings, "controls")}
    for x in verdicts.judgements(day.findings):
        seen = [
            f"{name}: {'seen' if controls[name].data['seen'] else 'not seen'}"
            for name in x.assumption.litmus
            if name in controls and "seen" in controls[name].data
        ]
        lines.append(_row(x.assumption.id, _bold(x.verdict), x.why, ", ".join(seen)))
    return "\n".join(lines)


def _items(day: Day, part: str, title: str) -> str:
    found = verdicts.of_part(day.findings, part)
    if not found:
        return ""
    lines = [f"## {title}", "", *_table("part", "item", "verdict", "seconds", "")]
    for x in found:
        lines.append(_row(x.part, x.item, _bold(x.verdict), f"{x.seconds:.1f}", x.text))
    return "\n".join(lines)


def _constants(day: Day) -> str:
    found = verdicts.measured_constants(day.arch, day.findings)
    if not any(x.measured is not None for x in found):
        return ""
    lines = [
        "## Constants of the timing model",
        "",
        verdicts.clock_line(day.arch, day.findings),
        "",
        *_table("field", "table", "measured", "ratio", "source of the table's"),
    ]
    for x in found:
        measured = x.why if x.measured is None else f"{x.measured:.4g}"
        ratio = "" if x.ratio is None else f"{x.ratio:.2f}"
        source = "assumed" if x.assumed else "measured or documented"
        lines.append(
            _row(x.field, f"{x.value:g}", measured, _bold(ratio, verdicts.is_off(x)), source)
        )
    return "\n".join(lines)


def _shapes(day: Day) -> str:
    found = shapes(day.arch, verdicts.measurements(day.findings))
    if not found:
        return ""
    slow = verdicts.slow_shapes(day.arch, day.findings)
    lines = ["## Products by shape", "", *_table("product", "model, cycles", "measured", "ratio")]
    for x in found:
        ratio = _bold(f"{x.measured / x.model:.2f}", x in slow)
        lines.append(_row(x.name, f"{x.model:.0f}", f"{x.measured:.1f}", ratio))
    return "\n".join(lines)


def _speed(day: Day) -> str:
    found = [x for x in verdicts.of_part(day.findings, "speed") if x.data]
    if not found:
        return ""
    known = speed.estimates(day.arch)
    lines = [
        "## Speed beside cuDNN",
        "",
        "TFLOP/s; *model*: the timing model's estimate for the same cell.",
        "",
        *_table("cell", "pass", "ours", "model", "ours / model", "deterministic", "model", "cuDNN"),
    ]
    lines[-1] = lines[-1] + "---|"
    lines[-2] = lines[-2] + " ours / cuDNN |"
    for x in found:
        for direction, rows in x.data.items():
            if isinstance(rows, Mapping):
                estimated = known.get(x.item, {}).get(direction, {})
                lines.append(_speed_row(x.item, direction, rows, estimated, x.data))
    return "\n".join(lines)


def _speed_row(
    cell: str,
    direction: str,
    rows: Mapping[str, float | None],
    estimated: Mapping[str, float],
    data: Mapping[str, Any],
) -> str:
    ours, model = rows.get(OURS), estimated.get(OURS)
    share = f"{ours / model:.2f}" if ours and model else ""
    over = speed.ratio(data, direction)
    return _row(
        cell,
        direction,
        _number(ours),
        _number(model),
        share,
        _number(rows.get(DETERMINISTIC)),
        _number(estimated.get(DETERMINISTIC)),
        _number(rows.get(CUDNN)),
        "" if over is None else f"{over:.2f}",
    )


def _not_run(day: Day) -> str:
    reasons: dict[tuple[str, str], int] = Counter(
        (x.part, x.text) for x in day.findings if x.verdict == Verdict.NOT_RUN
    )
    if not reasons:
        return ""
    rows = [f"- {part}, {count} items: {why}" for (part, why), count in reasons.items()]
    return "\n".join(["## Not run", "", *rows])


def _parts(day: Day) -> str:
    lines = ["## Parts", "", *_table("part", "items", "seconds", "verdicts")]
    by_part: dict[str, list[Finding]] = {}
    for x in day.findings:
        by_part.setdefault(x.part, []).append(x)
    for part, found in by_part.items():
        counts = Counter(x.verdict for x in found)
        summary = ", ".join(f"{counts[v]} {v}" for v in Verdict if counts[v])
        lines.append(_row(part, len(found), f"{sum(x.seconds for x in found):.0f}", summary))
    return "\n".join(lines)


def _table(*columns: str) -> list[str]:
    return ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]


def _row(*cells: object) -> str:
    texts = [" ".join(str(cell).split()).replace("|", "\\|") for cell in cells]
    return "| " + " | ".join(texts) + " |"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


def _bold(text: str, bold: bool | None = None) -> str:
    strong = text in BAD if bold is None else bold
    return f"**{text}**" if strong else text


def bad(findings: Sequence[Finding]) -> list[Finding]:
    """Returns what a person has to look at, except what was injected on purpose."""
    return [x for x in verdicts.own(findings) if x.verdict in BAD]
