"""Decides what the findings of a first day say of assumptions and constants, and what to change
first.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from benchmarks.day_one import both_designs
from benchmarks.day_one.assumptions import ASSUMPTIONS, Assumption
from benchmarks.day_one.constants import (
    TOLERANCE,
    Constant,
    Shape,
    constants,
    shapes,
    table,
)
from benchmarks.day_one.outcome import BAD, Finding, Verdict
from benchmarks.day_one.parts import INJECTED


@dataclasses.dataclass(frozen=True)
class Judgement:
    """The verdict on one assumption.

    Attributes:
      verdict: HOLDS, PARTLY, FALLS, ERROR, MEASURED (where nothing of ours rests on it) or
        NOT_RUN.
      why: the reason in one line.
    """

    assumption: Assumption
    verdict: Verdict
    why: str


def own(findings: Iterable[Finding]) -> list[Finding]:
    """Returns the findings except those that were injected on purpose."""
    return [finding for finding in findings if finding.item != INJECTED]


def of_part(findings: Iterable[Finding], part: str) -> list[Finding]:
    """Returns the findings of the parts that begin with a word."""
    return [finding for finding in own(findings) if finding.part.split(":")[0] == part]


def judgements(findings: Sequence[Finding]) -> list[Judgement]:
    """Returns one judgement for each assumption."""
    return [_judge(assumption, findings) for assumption in ASSUMPTIONS]


def _judge(assumption: Assumption, findings: Sequence[Finding]) -> Judgement:
    about = [x for x in of_part(findings, "litmus") if x.item in assumption.litmus]
    for part in assumption.parts:
        about += of_part(findings, part)
    if not about:
        return Judgement(assumption, Verdict.NOT_RUN, "nothing that tests it was chosen")
    bad = [x for x in about if x.verdict in BAD]
    ran = [x for x in about if x.verdict in (Verdict.HOLDS, Verdict.MEASURED)]
    names = {x.item for x in ran} | {x.part.split(":")[0] for x in ran}
    why = ", ".join(x.item for x in ran) if assumption.litmus else f"{len(ran)} findings"
    if bad:
        only_errors = all(x.verdict == Verdict.ERROR for x in bad)
        verdict = Verdict.ERROR if only_errors else Verdict.FALLS
        return Judgement(assumption, verdict, _list(bad) + (f"; right: {why}" if ran else ""))
    if not ran:
        return Judgement(assumption, Verdict.NOT_RUN, _list(about))
    if all(x.verdict == Verdict.MEASURED for x in ran):
        measured = "measured" if assumption.parts else ran[0].text
        return Judgement(assumption, Verdict.MEASURED, measured)
    missing = [x for x in (*assumption.litmus, *assumption.parts) if x not in names]
    if missing:
        return Judgement(assumption, Verdict.PARTLY, f"{why}; not run: {', '.join(missing)}")
    return Judgement(assumption, Verdict.HOLDS, why)


def _list(findings: Sequence[Finding]) -> str:
    first = f"{findings[0].item}: {findings[0].text}"
    return first if len(findings) == 1 else f"{first} (and {len(findings) - 1} more)"


def measurements(findings: Sequence[Finding]) -> dict[str, float]:
    """Returns the values of the microbenchmarks by name."""
    return {
        x.item: float(x.data["value"])
        for x in of_part(findings, "constants")
        if x.verdict == Verdict.MEASURED and "value" in x.data
    }


def measured_constants(arch: str, findings: Sequence[Finding]) -> list[Constant]:
    """Returns the constants, as far as they were measured."""
    return constants(arch, measurements(findings))


def slow_shapes(arch: str, findings: Sequence[Finding]) -> list[Shape]:
    """Returns the shapes of products that take longer than the model says."""
    found = shapes(arch, measurements(findings))
    return [x for x in found if x.measured > (1 + TOLERANCE) * x.model]


def is_off(constant: Constant) -> bool:
    """Returns whether the measured value is further from the table's than it should be."""
    ratio = constant.ratio
    return ratio is not None and abs(ratio - 1) > TOLERANCE


def changes(arch: str, findings: Sequence[Finding]) -> list[str]:
    """Returns what to change first: what breaks results before what breaks estimates."""
    lines = [
        f"{x.part}, {x.item} ({x.verdict}): {x.text}"
        for x in own(findings)
        if x.verdict in (Verdict.HANG, Verdict.FAULT)
    ]
    for judgement in judgements(findings):
        if judgement.verdict == Verdict.FALLS and not judgement.assumption.parts:
            lines.append(
                f"assumption {judgement.assumption.id} falls ({judgement.why}): "
                f"{judgement.assumption.change}"
            )
    for part in ("doctor", "selftest", "bitwise", "constants", "speed", "designs"):
        for x in of_part(findings, part):
            if x.verdict in (Verdict.FALLS, Verdict.ERROR):
                lines.append(f"{x.part}, {x.item} ({x.verdict}): {x.text}")
    lines += both_designs.changes(of_part(findings, "designs"), arch)
    off = [x for x in measured_constants(arch, findings) if is_off(x)]
    off.sort(key=lambda x: -abs(math.log(x.ratio or 1)))
    name = {"sm_90a": "HOPPER", "sm_100f": "BLACKWELL"}[arch]
    lines += [
        f"kernels/emulator/timing/rates.py: {name}.{x.field} {x.value:g} -> {x.measured:.4g}"
        for x in off
    ]
    if slow := slow_shapes(arch, findings):
        worst = max(slow, key=lambda x: x.measured / x.model)
        lines.append(
            f"kernels/emulator/timing/replay.py: {len(slow)} shapes of products take longer than "
            f"the model says, {worst.name} {worst.measured:.0f} cycles instead of "
            f"{worst.model:.0f}: it needs a time by shape, and "
            "kernels/sm100/tiles.py perhaps other tiles"
        )
    return lines


def clock_line(arch: str, findings: Sequence[Finding]) -> str:
    """Returns the clock beside the table's, or nothing."""
    for x in of_part(findings, "constants"):
        if "mhz" in x.data:
            return f"Clock {x.data['mhz']:.0f} MHz; the table has {table(arch).clock_ghz} GHz."
    return ""
