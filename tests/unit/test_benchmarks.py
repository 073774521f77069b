"""Tests the benchmarks' arithmetic, their protocol, and one tiny case from shapes to report."""

from __future__ import annotations

import itertools
import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import attention, cpu, measure, paged_cache, peers, report, shapes, summary
from benchmarks.flops import flops, visible_pairs
from benchmarks.shapes import Case
from benchmarks.timing import Protocol, Timing, interleave

TINY = Case("grid", 1, 16, 16, (2, 1), 8, is_causal=True, dtype="float32")


@pytest.mark.parametrize("offset", [-20, -3, 0, 4, 30])
@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (7, 12), (12, 7)])
def test_pairs_are_those_of_the_mask(rows, keys, offset):
    case = Case("grid", 1, rows, keys, (1, 1), 8, is_causal=True, query_offset=offset)
    seen = np.arange(keys) <= np.arange(rows)[:, None] + offset
    assert visible_pairs(case) == seen.sum()


def test_flops_of_known_cases():
    seen = {"dense": 3 * 5, "window": 1 + 2 + 3 + 3, "lengths": 1 + 2 + 3 + 1}
    dense = Case("grid", 2, 3, 5, (4, 2), 8)
    window = Case("window", 2, 4, 4, (4, 4), 8, is_causal=True, window=(2, 0))
    lengths = Case("lengths", 2, 4, 4, (1, 1), 8, is_causal=True, value_dim=16, lengths=(3, 1))
    assert flops(window, "forward") == 4 * 2 * 4 * seen["window"] * 8
    assert flops(lengths, "forward") == 2 * seen["lengths"] * (8 + 16)
    assert flops(lengths, "backward") == 2 * seen["lengths"] * (3 * 8 + 2 * 16)
    assert flops(dense, "forward") == 4 * 2 * 4 * seen["dense"] * 8
    assert flops(dense, "backward") == 10 * 2 * 4 * 3 * 5 * 8
    causal = shapes.self_attention("grid", 128, 4096, True, "bfloat16")
    assert flops(causal, "forward") == 4 * 8 * 16 * (4096 * 4097 // 2) * 128


def test_cases_are_told_apart_by_their_names():
    for cases in (shapes.ALL, shapes.QUICK):
        assert len({case.id for case in cases}) == len(cases)
    assert len(shapes.GRID) == 36
    assert {case.batch * case.query_length for case in shapes.GRID} == {shapes.TOKENS}


def test_contenders_take_turns_and_a_failing_one_stays_alone():
    order = []

    def contender(name, failing=False):
        def call():
            order.append(name)
            if failing and len(order) > 20:
                raise RuntimeError("broken")
            return jnp.zeros(())

        return call

    calls = {
        "a": contender("a"),
        "b": contender("b", failing=True),
        "c": contender("c"),
    }
    outcomes = interleave(calls, Protocol(loops=4, burst_s=1e-9))
    assert str(outcomes["b"]) == "broken"
    for name in "ac":
        timing = outcomes[name]
        assert isinstance(timing, Timing)
        assert len(timing.seconds) == 4
        assert timing.median > 0


def test_slow_first_calls_do_not_decide_how_many_a_burst_has():
    seconds = iter([0.02] * 5)
    timing = interleave(
        {"a": lambda: time.sleep(next(seconds, 1e-5))}, Protocol(loops=1, burst_s=0.02)
    )["a"]
    assert isinstance(timing, Timing)
    assert timing.calls > 20


def test_contenders_run_in_every_order():
    """What ran just before changes a GPU's clocks; orders that only rotate are three of the six."""
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    loops = 120  # By 40, one of 250 generators has not drawn all orders yet.
    interleave(calls, Protocol(loops=loops, burst_s=1e-9, max_calls=1))
    bursts = order[-2 * 3 * loops :: 2]  # A burst of one call makes another one before.
    orders = {tuple(bursts[i : i + 3]) for i in range(0, len(bursts), 3)}
    assert orders == set(itertools.permutations("abc"))


def test_the_orders_of_two_cases_differ():
    """Three loops have three orders; in the same ones everywhere each would follow the same."""
    order: list[str] = []
    calls = {name: lambda name=name: order.append(name) for name in "abcdefg"}
    found = []
    for _ in range(2):
        order.clear()
        interleave(calls, Protocol(loops=3, burst_s=1e-9, max_calls=1))
        found.append(order[-2 * 7 * 3 :: 2])
    assert found[0] != found[1]


def test_our_speed_is_compared_with_the_best_peer_of_each_case():
    ratios = {peers.CUDNN: 1.2, peers.FA3: 0.9, peers.DETERMINISTIC: 0.5}
    case = {"forward": {"ratios": ratios}, "backward": {"ratios": {}}}
    cudnn = summary.Comparison(peers.OURS, peers.CUDNN, (peers.CUDNN,))
    assert summary.ratio(case, "forward", summary.BEST) == 0.9
    assert summary.ratio(case, "forward", cudnn) == 1.2
    assert summary.ratio(case, "backward", summary.BEST) is None


def test_a_case_goes_from_measurement_to_report(tmp_path):
    record = measure.measure(TINY, Protocol(loops=2, burst_s=1e-4))
    for direction in measure.DIRECTIONS:
        for name, result in record[direction]["results"].items():
            assert len(result["seconds"]) == 2
            assert name == peers.OURS or result["difference"] < 1e-5
    path = tmp_path / "run.json"
    environment = {"device": "d", "date": "2000-01-01", "jax": "1", "jaxlib": "2", "python": "3"}
    broken = attention.measure_safely(Case("gqa", 1, 8, 8, (3, 2), 8), Protocol(1, 1e-9))
    report.save({"environment": environment, "host": {}, "cases": [record, broken]}, path)
    shown = report.write(path)
    text = path.with_suffix(".md").read_text()
    assert "gqa-d8-dense-b1-h3:2-s8 forward, fa4_jax: ValueError" in shown
    assert "| 8 | causal | 1 | 16 | 16 | 2/1 |" in text
    assert path.with_suffix(".png").stat().st_size > 1000


def test_summary_has_geometric_mean_and_worst_cell_of_each_group():
    def case(length, group, ratio):
        part = {
            "results": {},
            "ratios": {
                peers.FA3: ratio,
                peers.CUDNN: 9.0,
                peers.DETERMINISTIC: 2.0,
                peers.FA4_DETERMINISTIC: 3.0,
            },
        }
        return {
            "id": f"{group}{length}",
            "group": group,
            "key_length": length,
            "forward": part,
            "backward": part,
        }

    cases = [case(4096, "gqa", 0.1), case(1024, "grid", 0.8), case(8192, "grid", 1.25)]
    lines = summary.summary({"cases": cases})
    assert "| grid | forward | fa4_jax | the best peer | 1.000 | 0.800 | grid1024 | 2 |" in lines
    assert "| gqa | forward | fa4_jax | the best peer | 0.100 | 0.100 | gqa4096 | 1 |" in lines
    assert "| grid | backward | fa4_jax | jax.nn cudnn | 9.000 | 9.000 | grid1024 | 2 |" in lines
    deterministic = "| grid | backward | fa4_jax deterministic |"
    assert f"{deterministic} flash-attn-4 deterministic | 1.500 | 1.500 | grid1024 | 2 |" in lines
    assert f"{deterministic} fa4_jax | 0.500 | 0.500 | grid1024 | 2 |" in lines


def test_problems_are_reported():
    part = {"results": {"x": {"difference": float("nan")}}, "ratios": {}, "share_error": "broken"}
    run = {"cases": [{"id": "c", "group": "grid", "forward": part, "backward": part}]}
    assert len(summary.problems(run)) == 4
    assert "not started" in summary.problems(run | {"not_started": ["c"]})[-1]


def test_every_group_has_a_title():
    assert set(report.TITLES) == set(shapes.GROUPS) == {case.group for case in shapes.QUICK}


def test_partial_runs_are_joined():
    def run(ids, commit="c", **more):
        environment = {"device": "d", "jax": "1", "commit": commit, "run_s": 2.0}
        return {"environment": environment, "host": {}, "cases": [{"id": x} for x in ids]} | more

    joined = report.joined([run(["a"], not_started=["b", "c"]), run(["b"])])
    assert [case["id"] for case in joined["cases"]] == ["a", "b"]
    assert joined["not_started"] == ["c"]
    assert joined["environment"]["run_s"] == 4.0
    with pytest.raises(ValueError, match="commit differs: c and e"):
        report.joined([run(["a"]), run(["b"], commit="e")])


def test_a_lesser_run_does_not_replace_a_whole_one():
    names = {
        attention.file_name("NVIDIA H200", attention.arguments(argv))
        for argv in (
            [],
            ["--quick"],
            ["--only", "d64"],
            ["--quick", "--only", "d64"],
            ["--group", "grid"],
            ["--group", "grid", "gqa"],
        )
    }
    assert len(names) == 6
    assert {"nvidia-h200.json", "nvidia-h200-grid-gqa.json"} <= names


def test_the_command_line_runs_a_group(tmp_path, capsys):
    path = attention.main(["--quick", "--group", "window", "--output", str(tmp_path)])
    run = json.loads(path.read_text())
    assert [case["group"] for case in run["cases"]] == ["window"]
    assert "tflops" in run["cases"][0]["backward"]["results"][peers.OURS]
    assert run["host"] == {}
    path = attention.main(
        ["--quick", "--group", "grid", "--budget", "0", "--output", str(tmp_path)]
    )
    run = json.loads(path.read_text())
    assert run["cases"] == []
    assert run["not_started"] == [case.id for case in shapes.QUICK if case.group == "grid"]
    assert "not started" in capsys.readouterr().out


def test_a_failed_compilation_is_a_value():
    def fail() -> jax.stages.Lowered:
        raise ValueError("no")

    good = jax.jit(lambda x: x + 1)
    outcomes = measure.compile_all({"good": lambda: good.lower(1.0), "bad": fail})
    assert isinstance(outcomes["bad"], ValueError)
    assert isinstance(outcomes["good"], jax.stages.Compiled)


@pytest.mark.parametrize("kind", ["self", "decode-lengths", "mask", "offset"])
def test_cpu_contenders_compute_the_same(kind):
    case = cpu.Case(kind, 8, 24, (4, 2), 8, "float32", kind == "offset")
    record = cpu.measure(case, Protocol(loops=2, burst_s=1e-4), 1)
    assert set(record["ratios"]) == set(cpu.BOUNDS)
    assert all(ratio > 0 for ratio in record["ratios"].values())
    assert all(record[direction]["difference"] < 1e-5 for direction in cpu.PASSES)


def test_cpu_table_marks_what_is_beyond_its_bound():
    def run(forward):
        ratios = dict.fromkeys(cpu.BOUNDS, 1.0) | {"forward": forward}
        timed = {name: {"median_s": 0.002} for name in (cpu.OURS, cpu.PEER)}
        case = {"id": "c", "heads": [1, 1], "ratios": ratios, "forward": timed, "gradient": timed}
        environment = {"date": "2000-01-01", "jax": "1"}
        return {"environment": environment, "processor": "p", "cores": 2, "cases": [case]}

    text = cpu.markdown(run(2.5), run(1.2))
    assert "| c | 1.00 -> 1.00 | 1.00 -> 1.00 | 2.50 -> **1.20** | 1.00 -> 1.00 | 2, 2 |" in text
    assert "forward 1 of 1" in text and "gradient 0 of 1" in text
    assert len({case.id for case in cpu.CASES}) == len(cpu.CASES)


@pytest.mark.parametrize("rows", [1, 4])
def test_decoding_contenders_compute_the_same(rows):
    found = paged_cache.calls(paged_cache.Case(2, 128, (4, 2), 16, 16, "float32", rows))
    results = {name: call() for name, call in found.items()}
    for x in results.values():
        np.testing.assert_allclose(x, results["decode"], rtol=1e-4, atol=1e-5)


def test_decoding_is_a_row_of_a_table(capsys):
    paged_cache.main(["--only", "f32-b1-t1-s512", "--loops", "1"])
    row = capsys.readouterr().out.splitlines()[-1]
    assert row.startswith("| f32-b1-t1-s512-h8over2-d128-page64 | ") and row.count("|") == 7
