"""The timing model beside published figures of a B200."""

import dataclasses
import json
import statistics

import pytest

from benchmarks import blackwell_figures
from benchmarks.blackwell_figures import COLD_START, Cost, Figure, Kernel, Row
from kernels.emulator.timing.rates import BLACKWELL, PUBLISHED, numbers


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return blackwell_figures.rows(*blackwell_figures.read())


def test_the_costs_are_of_these_rates() -> None:
    """`python -m tests.emulator.interop costs` has run since the constants changed."""
    kept = json.loads((blackwell_figures.RESULTS / "flash-attn-4-costs.json").read_text())
    assert kept["rates"] == numbers(BLACKWELL)


def test_accuracy(rows: list[Row]) -> None:
    errors = {id(row): abs(row.error(row.now)) for row in rows}
    assert len(rows) == 47
    assert statistics.mean(errors.values()) < 0.054
    assert max(errors.values()) < 0.158
    assert statistics.mean(abs(row.error(row.left_out)) for row in rows) < 0.054
    before = statistics.mean(abs(row.error(row.before)) for row in rows)
    assert before > 0.08


def test_pairs_beside_one_cta(rows: list[Row]) -> None:
    """The backward's pairs win, as published; the forward's draw."""
    found = blackwell_figures.designs(rows)
    assert len(found) == 3
    for pair, single in found:
        ratio, published = pair.now / single.now, pair.figure.tflops / single.figure.tflops
        assert ratio == pytest.approx(published, rel=0.095)
        if published > 1:
            assert ratio > 1
    right, of = blackwell_figures.concordant(rows)
    assert right / of > 0.96


def test_a_row_left_out_has_no_say(rows: list[Row]) -> None:
    figures, costs = blackwell_figures.read()
    index = next(i for i, f in enumerate(figures) if f.counted and f.clock_ghz is None)
    own = figures[index]
    changed = list(figures)
    changed[index] = dataclasses.replace(own, tflops=2 * own.tflops)
    old = next(row for row in rows if row.figure == own)
    new = next(r for r in blackwell_figures.rows(changed, costs) if r.figure == changed[index])
    assert new.left_out == pytest.approx(old.left_out)


def test_seconds() -> None:
    """Two waves of pairs that hold 256 keys; four causal tiles an SM, of 2 to 8 units."""
    kernel = Kernel("backward 128 128 dense 2")
    figure = Figure("", kernel, 1, 37, 1024, 1.0, None, True, "")
    tiles, pairs = 37 * 1024 // 256, BLACKWELL.multiprocessors // 2
    assert tiles == 2 * pairs
    one = COLD_START + (100 + 1000 * 1024 / 128) / 2
    small = 37 * 1024 * 1792 / (BLACKWELL.dram_bytes * BLACKWELL.multiprocessors)
    cycles = 2 * one + small + 3 * BLACKWELL.grid_latency
    assert figure.seconds(Cost(1000, 100), 1.0) == pytest.approx(cycles * 1e-9)
    causal = dataclasses.replace(figure, kernel=Kernel("forward 64 64 causal 1"), heads=148)
    whole = sum(COLD_START + (100 + 1000 * 2 * (tile + 1)) / 2 for tile in range(4))
    assert causal.seconds(Cost(1000, 100), 1.0) == pytest.approx(
        (whole + BLACKWELL.grid_latency) * 1e-9
    )


def test_published_constants_are_not_assumed() -> None:
    assert PUBLISHED.keys() <= numbers(BLACKWELL).keys()
    assert not PUBLISHED.keys() & BLACKWELL.assumed
