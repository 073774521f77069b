"""racecheck on the Hopper kernels reports only what is explained; its reports are read right."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
from collections import Counter

import pytest

from fa4_jax import catalogue
from fa4_jax.key import KernelKey, Pass
from fa4_jax.target import current_target
from tests import fakes
from tests.gpu import racecheck
from tests.gpu.racecheck import Access

REPORT = """
========= Error: Race reported between Write access at fa4_bwd_0+0x20
=========     and Read access at fa4_bwd_0+0x40 [384 hazards]
=========     and Read access at fa4_bwd_0+0x50 [384 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
COPY, LOAD, OTHER = (0x3BA, 0), (0x984, 0), (0x123, 0)


def test_reports_are_read():
    write = Access("Write", "fa4_bwd_0", 0x20)
    pairs = racecheck.parse(REPORT)
    assert pairs == [(write, Access("Read", "fa4_bwd_0", at)) for at in (0x40, 0x50)]
    code = {"fa4_bwd_0": [OTHER, OTHER, COPY, OTHER, LOAD, OTHER]}
    explained, other = (racecheck.hazard(pair, code) for pair in pairs)
    assert explained == ("bwd", "UBLKCP", "LDS") and explained in racecheck.EXPLAINED
    assert other == ("bwd", "UBLKCP", "opcode 0x123") and other not in racecheck.EXPLAINED
    first, second = pairs[0]
    assert racecheck.hazard((second, first), code) == explained


def test_a_kernel_that_is_reported_comes_first():
    def names(only: str) -> list[str]:
        return [key.name for key in racecheck.chosen(only)]

    control, one = "sm_90a_bwd_bf16_d64_band", "sm_90a_fwd_bf16_d64"
    assert names(one) == [control, one]
    every = racecheck.keys()
    assert sorted(names("*")) == sorted(key.name for key in every)


def test_a_program_that_ends_early_is_an_error():
    with pytest.raises(ValueError, match="no summary"):
        racecheck.parse("========= Error: Target application terminated\n")


def test_a_message_is_explained_where_dq_is_late_alone():
    stores, copies = ("bwd", "STS", "LDS"), ("bwd", "UBLKCP", "LDS")
    late, wide = (KernelKey("sm_90a", Pass.BACKWARD, "bf16", 192, value_dim=v) for v in (128, 192))
    in_order = dataclasses.replace(late, deterministic=True)
    assert racecheck.of_kernel(late, stores) in racecheck.EXPLAINED
    for key in (wide, in_order):
        assert racecheck.of_kernel(key, stores) not in racecheck.EXPLAINED
        assert racecheck.of_kernel(key, copies) == copies


def test_a_program_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch):
    """The tool has a summary of its own then."""
    done = subprocess.CompletedProcess([], 1, stdout=REPORT, stderr="")
    monkeypatch.setattr(racecheck, "_code", lambda *_: [OTHER, OTHER, COPY, OTHER, LOAD, OTHER])
    monkeypatch.setattr(racecheck, "current_target", fakes.fake_target)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    with pytest.raises(ValueError, match="returned 1"):
        racecheck.check(racecheck.keys()[0])


@pytest.mark.parametrize("fails", [False, True])
def test_one_failure_does_not_end_the_others(
    fails: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    first, second = racecheck.keys()[:2]

    def check(key: KernelKey) -> Counter[tuple[str, ...]]:
        if fails and key == first:
            raise ValueError(f"{key.name} returned 124: [...]")
        return Counter({("bwd", "UBLKCP", "LDS"): 3})

    monkeypatch.setattr(racecheck, "keys", lambda: [first, second])
    monkeypatch.setattr(racecheck, "check", check)
    monkeypatch.setattr(racecheck.shutil, "which", lambda _: "compute-sanitizer")
    monkeypatch.setattr("sys.argv", ["racecheck"])
    assert racecheck.main() == fails
    told = capsys.readouterr().out
    assert f"{second.name}: bwd UBLKCP LDS, 3 pairs, explained" in told
    assert (f"{first.name} returned 124: [...]" in told) == fails


@pytest.mark.parametrize("key", racecheck.keys(), ids=lambda key: key.name)
def test_each_kernel_has_a_case_that_runs_it(key: KernelKey):
    used = racecheck.kernels(key)
    assert key in used and set(used) <= set(catalogue.keys(key.arch))


@pytest.mark.parametrize("key", racecheck.keys(), ids=lambda key: key.name)
def test_every_report_is_explained(key: KernelKey):
    if current_target().arch != key.arch:
        pytest.skip(current_target().unavailable or f"needs {key.arch}")
    if shutil.which("compute-sanitizer") is None:
        pytest.skip("compute-sanitizer is not on the path")
    found = set(racecheck.check(key))
    assert found <= set(racecheck.EXPLAINED)
    if key.kernel is Pass.BACKWARD:
        # racecheck is known to report this of each of them, if it has seen the kernels.
        assert ("bwd", "UBLKCP", "LDS") in found
