"""What `make test` runs of tests with many cases."""

from __future__ import annotations

import re
import xml.etree.ElementTree
from pathlib import Path

import pytest

from tests import case_seconds, example_counts
from tests.case_seconds import beyond_the_budget

ROOT = Path(__file__).parents[2]
SLOW, SLOWER, FAST = (f"tests/unit/test_{name}.py::test_it" for name in ("a", "b", "c"))
SECONDS = {SLOW: case_seconds.budget_s(SLOW) / 4, SLOWER: 10.0}


def test_cases_run_for_as_long_as_the_budget_allows() -> None:
    names = [SLOW, SLOWER, FAST] * 20
    left_out = beyond_the_budget(names, SECONDS)
    assert left_out == beyond_the_budget(names, SECONDS)
    kept = [name for name, out in zip(names, left_out, strict=True) if not out]
    assert [kept.count(name) for name in (SLOW, SLOWER, FAST)] == [4, 1, 20]


def test_few_cases_all_run() -> None:
    assert beyond_the_budget([SLOW] * 3, SECONDS) == [False] * 3


def test_a_test_without_time_for_a_case_runs_a_small_problem() -> None:
    works = [80, 10, 70, 20, 60, 50, 40, 30]
    (kept,) = kept_works(SLOWER, works)
    assert kept in (10, 20)
    assert set(kept_works(SLOW, works)) - {10, 20}, "what has time for several draws from all"


def test_make_test_tries_a_share_of_the_examples(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = any(map(request.config.getoption, ("--full-cover", "--every-case")))
    assert example_counts.share == (1 if everything else example_counts.SHARE)
    monkeypatch.setattr(example_counts, "share", 0.3)
    assert [example_counts.count(most) for most in (1, 2, 10)] == [1, 1, 3]


def kept_works(name: str, works: list[int]) -> list[int]:
    left_out = beyond_the_budget([name] * len(works), SECONDS, works)
    return [work for work, out in zip(works, left_out, strict=True) if not out]


def test_the_emulator_has_more_time() -> None:
    assert case_seconds.budget_s("tests/emulator/test_x.py::test_y") > case_seconds.budget_s(SLOW)


@pytest.mark.parametrize("name", case_seconds.recorded())
def test_the_table_names_tests_that_exist(name: str) -> None:
    path, test = name.split("::")
    assert re.search(rf"^def {test}\(", (ROOT / path).read_text(), re.MULTILINE), name


def test_a_report_tells_which_tests_are_slow() -> None:
    report = xml.etree.ElementTree.fromstring(
        "<testsuites><testsuite>"
        '<testcase classname="tests.unit.test_a" name="test_it[x]" time="3"/>'
        '<testcase classname="tests.unit.test_a" name="test_it[y]" time="2"/>'
        '<testcase classname="tests.unit.test_b" name="test_alone" time="9"/>'
        '<testcase classname="tests.unit.test_c" name="test_fast[x]" time="0.1"/>'
        '<testcase classname="tests.unit.test_c" name="test_fast[y]" time="0.1"/>'
        '<testcase classname="tests.unit.test_a" name="test_it[z]" time="0"><skipped/></testcase>'
        "</testsuite></testsuites>"
    )
    assert case_seconds.of_report(report) == {"tests/unit/test_a.py::test_it": 2.5}
