"""The program for compute-sanitizer has a call of each kernel, and reads what the tool says."""

from __future__ import annotations

import os
import subprocess
from typing import Any

import pytest

from fa4_jax import catalogue
from fa4_jax.key import Pass
from tests.gpu import sanitize

AROUND = {Pass.FORWARD_JOIN, Pass.BACKWARD_PRE, Pass.BACKWARD_POST}
"""Kernels that every call of another one launches."""

CLEAN = "ended a\nended b\n========= ERROR SUMMARY: 0 errors\n"
DIRTY = "ended a\n========= Invalid __shared__ read\n========= ERROR SUMMARY: 1 error\n"


def test_every_kernel_has_a_call_that_launches_it():
    keys = sanitize.checked_keys()
    calls = [(key, case) for key in keys for case in sanitize.cases(key)]
    found = [sanitize.kernels(*call) for call in calls]
    assert [(k.name, c.id) for (k, c), of in zip(calls, found, strict=True) if k not in of] == []
    others = set(catalogue.keys("sm_90a")) - set(keys)
    assert [key.name for key in others if key.kernel not in AROUND] == []
    launched = {other for of in found for other in of}
    around = {key for key in others if key.kernel in AROUND}
    assert around <= launched


@pytest.mark.parametrize(
    ("text", "ended", "errors"),
    [(CLEAN, {"a", "b"}, 0), (DIRTY, {"a"}, 1), ("ended a\nKilled\n", {"a"}, None)],
)
def test_what_the_tool_says_is_read(text: str, ended: set[str], errors: int | None):
    report = sanitize.parse(text)
    assert report.ended == ended and report.errors == errors


def test_a_report_begins_with_what_the_tool_says_first():
    long = "\n".join(
        ["========= Barrier error", "=========  Host Frame f", *["E1130 failed"] * 999]
    )
    assert sanitize.parse(long).first_lines() == "========= Barrier error"


@pytest.mark.parametrize(
    ("text", "status"), [(CLEAN, 0), (DIRTY, 1), ("ended a\nended b\n", 1), ("", 1)]
)
def test_only_a_clean_run_of_all_is_a_success(
    text: str, status: int, monkeypatch: pytest.MonkeyPatch
):
    names = [key.name for key in sanitize.checked_keys()][:2]
    said = text.replace("ended a", f"ended {names[0]}").replace("ended b", f"ended {names[1]}")

    def tool(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[:2] == ["taskset", "--cpu-list"]
        assert command[3:5] == ["timeout", "--kill-after=5"]
        assert command[6:9] == ["compute-sanitizer", "--tool", "memcheck"]
        assert command[-2:] == names
        return subprocess.CompletedProcess(command, 0, said, "")

    monkeypatch.setattr(sanitize, "checked_keys", lambda only="*": keys_of(names))
    monkeypatch.setattr("sys.argv", ["sanitize", "memcheck", "--processes", "1"])
    monkeypatch.setattr(sanitize.shutil, "which", lambda _: "compute-sanitizer")
    monkeypatch.setattr(sanitize.subprocess, "run", tool)
    assert sanitize.main() == status


def test_a_tool_that_crashes_is_started_again(monkeypatch: pytest.MonkeyPatch):
    said = ["ended a\nSegmentation fault\n", "", CLEAN, DIRTY]

    def tool(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 139, said.pop(0), "")

    monkeypatch.setattr(sanitize.subprocess, "run", tool)
    report = sanitize.check("memcheck", ["a", "b"], "0")
    assert report.errors == 0 and report.ended == {"a", "b"} and said == [DIRTY]
    assert sanitize.check("memcheck", ["a", "b"], "0").errors == 1 and not said


@pytest.mark.parametrize("processes", [1, 2, 1000])
def test_every_process_has_cores(processes: int):
    shares = sanitize.shares_of_cores(processes)
    found = [shares.get() for _ in range(processes)]
    assert shares.empty() and all(found)
    if processes == 1:
        assert len(found[0].split(",")) == len(os.sched_getaffinity(0))


def keys_of(names: list[str]) -> list[Any]:
    """Returns the kernels of some names."""
    return [key for key in catalogue.keys("sm_90a") if key.name in names]
