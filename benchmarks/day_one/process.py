"""Runs parts, each in processes of its own, and survives whatever happens to them.

A part is a list of items. Its process works through them and notes in a record when each begins and
ends. When it hangs, faults or dies, the item that was running is to blame; the GPU is probed from a
fresh process, and another process goes on with the items after it. When the GPU is not usable any
more, nothing else that needs it is run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.day_one.outcome import Finding, Progress, Verdict, read

RESTART = 3
"""The exit status of a process that has recorded its last item; the next needs a fresh process."""

_POLL_S = 0.05
_REAP_S = 20.0
_TAIL = 600


@dataclasses.dataclass(frozen=True)
class Part:
    """A step of the first day.

    Attributes:
      items: the names of what it finds out, in this order.
      limit_s: seconds without progress after which an item hangs; a process's start counts to its
        first item.
      total_s: seconds after which no further item begins.
      reason: why the part does not run at all, or empty.
    """

    name: str
    items: tuple[str, ...]
    limit_s: float = 60.0
    total_s: float = 600.0
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Ending:
    """How a process of a part ended.

    Attributes:
      status: its exit status; None if it was killed because an item took too long.
      late: whether the part's own time was over.
      tail: the end of what it printed.
    """

    status: int | None
    late: bool
    tail: str


class Runner:
    """Runs parts one after the other.

    Args:
      command: the command line for some items of a part, given the record to write.
      probe: looks at the GPU from a fresh process; returns what is wrong with it, or None.
      folder: where records and logs go.
      say: receives one line for each item; it prints them by default.
      environment: of the processes; this one's by default.
    """

    def __init__(
        self,
        command: Callable[[Part, Sequence[str], Path], list[str]],
        probe: Callable[[], str | None],
        folder: Path,
        say: Callable[[str], None] | None = None,
        environment: Mapping[str, str] | None = None,
    ):
        self._command, self._probe = command, probe
        self._folder, self._say, self._environment = folder, say or _print, environment
        self.unusable: str | None = None
        self._processes = 0

    def run(self, part: Part) -> list[Finding]:
        """Returns a part's findings: exactly one for each item, in order, and one for garbage."""
        found: dict[str, Finding] = {}
        strange: list[Finding] = []
        end = time.monotonic() + part.total_s
        while left := [item for item in part.items if item not in found]:
            if why := self._why_not(part, end):
                for item in left:
                    self._note(found, Finding(part.name, item, Verdict.NOT_RUN, why))
                break
            progress, ending = self._process(part, left, end, found)
            strange += _strange(part, progress, ending)
            if blamed := self._blame(part, progress, ending, left, found):
                self._note(found, blamed)
                self.look(f"{part.name}: {blamed.item}")
        if not part.reason:
            self.look(part.name)
        return [found[item] for item in part.items] + strange

    def look(self, after: str) -> None:
        """Notes whether the GPU is still usable."""
        if self.unusable is None and (why := self._probe()) is not None:
            self.unusable = f"the GPU was not usable after {after}: {why}"
            self._say(self.unusable)

    def _why_not(self, part: Part, end: float) -> str:
        if part.reason:
            return part.reason
        if self.unusable:
            return self.unusable
        if time.monotonic() > end:
            return f"the part's {part.total_s:.0f} s were over"
        return ""

    def _note(self, found: dict[str, Finding], finding: Finding) -> None:
        found[finding.item] = finding
        self._say(f"{finding.part:12} {finding.verdict:8} {finding.item}: {finding.text}"[:200])

    def _process(
        self, part: Part, items: list[str], end: float, found: dict[str, Finding]
    ) -> tuple[Progress, Ending]:
        """Runs a process and watches it; what it finds is added to `found`."""
        self._processes += 1
        stem = f"{self._processes:02}-{re.sub('[^a-z0-9]+', '-', part.name)}"
        record, log = self._folder / f"{stem}.jsonl", self._folder / f"{stem}.log"
        record.unlink(missing_ok=True)
        with log.open("w") as file:
            process = subprocess.Popen(
                self._command(part, items, record),
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=self._environment,
                start_new_session=True,
            )
            try:
                status, late = self._watch(process, part, record, end, found)
            finally:
                stop(process)
        progress = read(record, part.name, part.items)
        self._take(progress, found)
        return progress, Ending(status, late, log.read_text(errors="replace")[-_TAIL:].strip())

    def _watch(
        self,
        process: subprocess.Popen[bytes],
        part: Part,
        record: Path,
        end: float,
        found: dict[str, Finding],
    ) -> tuple[int | None, bool]:
        """Waits until the process ends by itself or an item's or the part's time is over."""
        seen, moved = 0, time.monotonic()
        while process.poll() is None:
            now = time.monotonic()
            size = record.stat().st_size if record.exists() else 0
            if size != seen:
                seen, moved = size, now
                self._take(read(record, part.name, part.items), found)
            if now - moved > part.limit_s:
                return None, False
            if now > end:
                return None, True
            time.sleep(_POLL_S)
        return process.returncode, False

    def _take(self, progress: Progress, found: dict[str, Finding]) -> None:
        for finding in progress.findings:
            if finding.item not in found:
                self._note(found, finding)

    def _blame(
        self,
        part: Part,
        progress: Progress,
        ending: Ending,
        items: list[str],
        found: dict[str, Finding],
    ) -> Finding | None:
        """Returns the finding of the item that ended the process, if it has none yet."""
        item = progress.running
        if item is None:
            item = next((x for x in items if x not in found), None)
            if item is None or (progress.findings and ending.status != 0):
                return None
        data = {"status": ending.status, "tail": ending.tail}
        last = ending.tail.splitlines()[-1] if ending.tail else "it printed nothing"
        if ending.status is None and ending.late:
            text = f"cut off: the part's {part.total_s:.0f} s were over"
            return Finding(part.name, item, Verdict.NOT_RUN, text, 0.0, data)
        if ending.status is None:
            text = f"no progress in {part.limit_s:.0f} s; its process was killed"
            return Finding(part.name, item, Verdict.HANG, text, part.limit_s, data)
        if ending.status == 0:
            text = f"its process ended without a result: {last}"
            return Finding(part.name, item, Verdict.ERROR, text, 0.0, data)
        text = f"its process ended with {_status(ending.status)}: {last}"
        verdict = Verdict.FAULT if progress.running else Verdict.ERROR
        return Finding(part.name, item, verdict, text, 0.0, data)


def _print(text: str) -> None:
    print(text, flush=True)


def _strange(part: Part, progress: Progress, ending: Ending) -> list[Finding]:
    """Returns what is wrong besides the items: garbage in the record, a death after them."""
    found = []
    if progress.garbage:
        text = f"its record has {len(progress.garbage)} lines of garbage: {progress.garbage[0]}"
        found.append(Finding(part.name, "record", Verdict.ERROR, text))
    if progress.running is None and progress.findings and ending.status not in (0, RESTART):
        text = f"after {progress.findings[-1].item} its process ended with {_status(ending.status)}"
        found.append(Finding(part.name, "exit", Verdict.ERROR, text, 0.0, {"tail": ending.tail}))
    return found


def _status(status: int | None) -> str:
    if status is None:
        return "a kill, since it did not end"
    if status >= 0:
        return f"status {status}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-status).name
    return f"signal {-status}"


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and all that it has started, which are a session of their own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    # A process that a broken driver blocks cannot be waited for: it stays.
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=_REAP_S)
