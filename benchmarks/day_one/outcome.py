"""What a part of the first day finds: one finding per item, sent between processes as lines of
JSON.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from pathlib import Path
from typing import Any


class Verdict(enum.StrEnum):
    """The outcome of an item; an assumption has PARTLY if some of its programs did not run."""

    HOLDS = "holds"
    PARTLY = "holds in part"
    FALLS = "falls"
    MEASURED = "measured"
    HANG = "hang"
    FAULT = "fault"
    ERROR = "error"
    NOT_RUN = "not run"


BAD = (Verdict.FALLS, Verdict.HANG, Verdict.FAULT, Verdict.ERROR)
"""The verdicts at which a person has to look."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """The outcome of one item of a part.

    Attributes:
      text: one line for a reader.
      seconds: wall time of the item.
      data: figures for the JSON report.
    """

    part: str
    item: str
    verdict: Verdict
    text: str = ""
    seconds: float = 0.0
    data: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Result:
    """What a part's function returns for an item."""

    verdict: Verdict
    text: str = ""
    data: dict[str, Any] = dataclasses.field(default_factory=dict)


class Record:
    """The file in which a part's process notes its progress, for the process that watches it."""

    def __init__(self, path: Path):
        self._path = path

    def begin(self, item: str) -> None:
        """Notes that work on an item begins."""
        self._write({"event": "begin", "item": item})

    def end(self, item: str, result: Result, seconds: float) -> None:
        """Notes an item's result."""
        values = {"verdict": result.verdict, "text": result.text, "data": result.data}
        self._write({"event": "end", "item": item, "seconds": seconds, **values})

    def _write(self, line: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


@dataclasses.dataclass(frozen=True)
class Progress:
    """What a record says so far.

    Attributes:
      findings: the findings of the items that have ended.
      running: the item that has begun and not ended, or None.
      garbage: lines that belong to no record.
    """

    findings: tuple[Finding, ...]
    running: str | None
    garbage: tuple[str, ...]


def read(path: Path, part: str, items: tuple[str, ...]) -> Progress:
    """Reads a record of a part; it skips a last line that has no end yet."""
    text = path.read_text(errors="replace") if path.exists() else ""
    findings: list[Finding] = []
    running: str | None = None
    garbage: list[str] = []
    for line in text.split("\n")[:-1]:
        try:
            entry = json.loads(line)
            item, event = entry["item"], entry["event"]
            if item not in items or event not in ("begin", "end"):
                raise ValueError(line)
            if event == "begin":
                running = item
                continue
            verdict, seconds = Verdict(entry["verdict"]), float(entry["seconds"])
            findings.append(
                Finding(part, item, verdict, str(entry["text"]), seconds, dict(entry["data"]))
            )
            running = None
        except (ValueError, KeyError, TypeError):
            garbage.append(line[:200])
    return Progress(tuple(findings), running, tuple(garbage))
