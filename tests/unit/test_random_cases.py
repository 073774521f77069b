"""The program of random cases draws what kernels take, repeats itself, and reports failures."""

from __future__ import annotations

import dataclasses
import io

import pytest
from rich.console import Console

from fa4_jax.conformance.compare import Verdict
from fa4_jax.key import Pass
from tests.gpu.random_cases import Outcome, case_of, judge, report

NUMBERS = range(400)


FIELDS = ("masks", "window", "sinks", "deterministic", "key_lengths")
OF_KIND = ((False, ("soft_cap", *FIELDS)), (True, ("mask", "bias", *FIELDS)))


@pytest.mark.parametrize(("pairs", "fields"), OF_KIND)
def test_hopper_has_kernels_for_every_case(pairs: bool, fields: tuple[str, ...], seed: int):
    cases = [case_of(seed, number, "kernel", pairs) for number in NUMBERS]
    assert [case.id for case in cases if not case.has_kernels("sm_90a", Pass.BACKWARD)] == []
    assert cases == [case_of(seed, number, "kernel", pairs) for number in NUMBERS]
    for name in fields:
        assert 0 < sum(bool(getattr(case, name)) for case in cases) < len(cases), name


@pytest.mark.parametrize("pairs", [False, True])
def test_a_case_of_the_default_path(pairs: bool, seed: int):
    outcome = judge(seed % 1000, seed, "xla", pairs)
    assert outcome.failures == [], outcome.case.id
    assert {"output", "lse", "dq", "dk", "dv"} <= {v.name for v in outcome.verdicts}


def test_failures_are_reported(seed: int):
    right = judge(0, seed, "xla")
    wrong = dataclasses.replace(right, verdicts=[Verdict("dq", "error 3", 3.0, 1.0)])
    raised = Outcome(2, right.case, [], "ValueError: no")
    out = io.StringIO()
    assert report([right, wrong, raised], Console(file=out, width=200)) == 2
    text = out.getvalue()
    assert "dq: error 3" in text and "ValueError: no" in text and "3 cases, 2 failed" in text
