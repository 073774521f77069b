"""The program of random cases draws what kernels take, repeats itself, and reports failures."""

from __future__ import annotations

import dataclasses
import io

from rich.console import Console

from fa4_jax.conformance.compare import Verdict
from fa4_jax.key import Pass
from tests.gpu.random_cases import Outcome, case_of, judge, report

NUMBERS = range(400)


def test_hopper_has_kernels_for_every_case(seed: int):
    cases = [case_of(seed, number) for number in NUMBERS]
    assert [case.id for case in cases if not case.has_kernels("sm_90a", Pass.BACKWARD)] == []
    assert cases == [case_of(seed, number) for number in NUMBERS]
    for name in ("masks", "window", "soft_cap", "sinks", "deterministic", "key_lengths"):
        assert 0 < sum(bool(getattr(case, name)) for case in cases) < len(cases), name


def test_a_case_of_the_default_path(seed: int):
    outcome = judge(seed % 1000, seed, "xla")
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
