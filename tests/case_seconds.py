"""How long a case of a test takes: of slow tests with many, `make test` runs what fits a budget.

    python -m pytest -n auto --full-cover --junitxml=report.xml
    python -m tests.case_seconds report.xml    # writes case_seconds.json

The table holds tests whose cases take more than their budget together, and seconds of a case. What
stands in it decides what runs, so that every machine runs the same. (The table of 2026-11-27 has
0.62 of what was measured, since other work had a share of the two cores, and the 55 entries of
2026-11-30, from a run of `make test`, 0.76; two tests that became cases that day have their own.)
"""

from __future__ import annotations

import argparse
import collections
import json
import pathlib
import random
import xml.etree.ElementTree
from collections.abc import Iterable, Mapping

import pytest

from fa4_jax.conformance.cases import Case
from tests import sampling

BUDGETS_S = {"tests/emulator/": 3.0, "tests/build/": 120.0, "tests/ffi/": 120.0, "tests/": 1.0}
"""Seconds of a core that the cases of a test may take in `make test`, by where it is (the first
that fits). One case always runs. What looks at each kernel, in build and ffi, runs whole."""

PATH = pathlib.Path(__file__).with_suffix(".json")


def recorded() -> dict[str, float]:
    """Returns seconds of a case by the test's name, `tests/unit/test_x.py::test_y`."""
    return json.loads(PATH.read_text())


def test_of(item: pytest.Item) -> str:
    """Returns the name of the test that an item is a case of."""
    return item.nodeid.split("[")[0]


def budget_s(test: str) -> float:
    """Returns the seconds that the cases of a test may take."""
    return next(seconds for folder, seconds in BUDGETS_S.items() if test.startswith(folder))


def work_of(item: pytest.Item) -> int | None:
    """Returns how much the problem of an item takes, as `sampling.work`, if it has one."""
    callspec = getattr(item, "callspec", None)
    given = () if callspec is None else callspec.params.values()
    return next((sampling.work(x) for x in given if isinstance(x, Case)), None)


def beyond_the_budget(
    names: Iterable[str], seconds: Mapping[str, float], works: Iterable[int | None] = ()
) -> list[bool]:
    """Returns for each case whether it is left out.

    Those that run are drawn by the test's name: cases side by side are often alike. A test that has
    no time for one case runs one of its small problems.

    Args:
      names: of the tests that cases belong to, in the order of collection.
      seconds: of a case, by test; other tests run whole.
      works: how much each case's problem takes, where it is known.
    """
    names = list(names)
    work = list(works) or [None] * len(names)
    cases: dict[str, list[int]] = collections.defaultdict(list)
    for index, name in enumerate(names):
        if name in seconds:
            cases[name].append(index)
    found = [False] * len(names)
    for name, indices in cases.items():
        count = min(len(indices), max(1, int(budget_s(name) / seconds[name])))
        of_case = {index: amount for index in indices if (amount := work[index]) is not None}
        among = indices
        if count == 1 and len(of_case) == len(indices):
            among = sorted(indices, key=of_case.__getitem__)[: max(1, len(indices) // 4)]
        chosen = set(random.Random(name).sample(among, count))
        for index in indices:
            found[index] = index not in chosen
    return found


def of_report(report: xml.etree.ElementTree.Element) -> dict[str, float]:
    """Returns seconds of a case of each test that exceeds the budget, of pytest's report."""
    times: dict[str, list[float]] = collections.defaultdict(list)
    for case in report.iter("testcase"):
        path = case.get("classname", "").replace(".", "/")
        name = case.get("name", "").split("[")[0]
        if case.find("skipped") is None:
            times[f"{path}.py::{name}"].append(float(case.get("time", 0)))
    return {
        name: round(sum(own) / len(own), 2)
        for name, own in sorted(times.items())
        if len(own) > 1 and sum(own) > budget_s(name)
    }


def main() -> None:
    """Writes the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.case_seconds")
    parser.add_argument("report", help="what pytest --junitxml has written of a run of all cases")
    found = of_report(xml.etree.ElementTree.parse(parser.parse_args().report).getroot())
    PATH.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
