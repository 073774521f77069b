"""Compares the cost model with what was measured, with counting, and with common sense."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from fa4_jax.bands import UNBOUNDED
from fa4_jax.parallel import AllGather, Choice, Estimate, Rates, Ring, RingUlysses, Ulysses, choose
from fa4_jax.parallel.cost import Workload

ROOT = Path(__file__).parents[2]


def measured(name: str) -> dict[str, Any]:
    """Returns what was measured of each case, by its name."""
    run = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())
    return {case["id"]: case for case in run["cases"]}


CASES = measured("nvidia-h200-x4-parallel")

# Before groups of query heads were split, and with the compiler's usual overlap of collectives.
BYTES = measured("nvidia-h200-x4-parallel-older")
SCHEMES = ("ring", "all-gather", "Ulysses")


def chosen(**changes: Any) -> Choice:
    """Returns the choice for SIZES except for the changes."""
    return choose(**(SIZES | changes))


def estimates(**changes: Any) -> dict[str, Estimate]:
    """Returns estimates by the first word of their names; for SIZES except for the changes."""
    found = chosen(**changes)
    return {x.name.split(" ")[0] + (" 2-D" if " x " in x.name else ""): x for x in found.estimates}


SIZES: dict[str, Any] = {
    "tokens": 128 * 1024,
    "query_heads": 16,
    "kv_heads": 2,
    "head_dim": 128,
    "devices": 4,
    "is_causal": True,
}


def of_case(case: dict[str, Any]) -> Choice:
    n, k = case["heads"]
    sizes = {"tokens": case["tokens"], "head_dim": case["head_dim"]}
    return chosen(query_heads=n, kv_heads=k, **sizes)


@pytest.mark.parametrize("name", CASES)
def test_times_and_bytes_are_close_to_those_measured(name):
    times, sizes = CASES[name]["results"], BYTES[name]["results"]
    for x in of_case(CASES[name]).estimates:
        if x.name in SCHEMES:
            assert x.total_s == pytest.approx(times[x.name]["median_s"], rel=0.03)
            total = sizes[x.name]["bytes_per_gpu"]["total"]
            assert x.memory_bytes == pytest.approx(total, rel=0.01)


def test_ranking_at_128k_is_the_measured_one():
    case = CASES["128k-h16over2-d128"]
    found = [x.name for x in of_case(case).estimates if x.name in SCHEMES]
    assert found == sorted(SCHEMES, key=lambda name: case["results"][name]["median_s"])
    assert of_case(case).best == Ulysses("seq")


@pytest.mark.parametrize("left", [0, 3, 40, UNBOUNDED])
@pytest.mark.parametrize("right", [0, 5, 40, UNBOUNDED])
def test_pairs_are_counted(left, right):
    work = Workload(23, 1, 1, 8, 1, (left, right), 4, 4, 2, True)
    for rows in range(24):
        seen = sum(-left <= j - i <= right for i in range(rows) for j in range(23))
        assert work.pairs(rows) == seen


@pytest.mark.parametrize(
    ("change", "value"),
    [("tokens", 256 * 1024), ("batch", 2), ("query_heads", 32), ("is_causal", False)],
)
def test_more_work_takes_longer(change, value):
    more, usual = estimates(**{change: value}), estimates()
    for name in usual:
        assert more[name].compute_s > usual[name].compute_s
        assert more[name].total_s > usual[name].total_s


@pytest.mark.parametrize("name", ["ring", "all-gather", "Ulysses", "ring 2-D"])
def test_slower_machines_take_longer(name):
    sizes = {"devices": 16, "devices_per_host": 8, "kv_heads": 16}
    usual = estimates(**sizes)[name]
    effects = set()
    for field, value in dataclasses.asdict(Rates()).items():
        latency = field in ("permute_s", "collective_s", "network_s")
        slower = dataclasses.replace(Rates(), **{field: value * (2 if latency else 0.5)})
        total = estimates(**sizes, rates=slower)[name].total_s
        assert total >= usual.total_s, field
        effects |= {field} if total > usual.total_s else set()
    assert {"forward_flops", "backward_flops", "network_bytes_per_s", "network_s"} <= effects


def test_crossing_hosts_takes_longer_and_2d_helps_most_there():
    far = estimates(devices=64, devices_per_host=8, query_heads=64, kv_heads=8, tokens=1 << 20)
    near = estimates(devices=64, query_heads=64, kv_heads=8, tokens=1 << 20)
    for name in SCHEMES:
        assert far[name].exposed_s > near[name].exposed_s
    assert far["ring 2-D"].scheme == RingUlysses("seq_ring", "seq_ulysses", "zigzag")
    assert far["ring 2-D"].total_s < far["ring"].total_s


def test_windows_are_given_as_to_attention():
    assert chosen(local_window_size=[4096, 0]) == chosen(local_window_size=(4096, 0))


def test_windows_need_neighbours_only():
    few = estimates(local_window_size=4096, devices=8)
    all_of_them = estimates(is_causal=False, devices=8)
    assert few["ring"].scheme == Ring("seq", "contiguous")
    assert few["all-gather"].scheme == AllGather("seq", "contiguous")
    assert few["all-gather"].memory_bytes < all_of_them["all-gather"].memory_bytes
    assert few["ring"].exposed_s < all_of_them["ring"].exposed_s / 3
    assert few["ring"].compute_s > few["Ulysses"].compute_s, "the first shard has less than others"


def test_the_forward_alone_takes_less():
    forward, both = estimates(backward=False), estimates()
    for name in both:
        assert forward[name].total_s < both[name].total_s / 2
        assert forward[name].memory_bytes < both[name].memory_bytes


def test_what_does_not_apply_says_why():
    found = chosen(query_heads=12, kv_heads=3, devices=8)
    reasons = {x.name: x.reason for x in found.estimates if x.scheme is None}
    assert "12 query and 3 KV heads cannot be shared out among 8 devices" in reasons["Ulysses"]
    assert "12 query and 3 KV heads fit no divisor" in reasons["ring x Ulysses"]
    assert reasons["Ulysses"] in str(found)
    odd = estimates(tokens=1001)
    assert "multiple of 8 tokens, not 1001" in odd["ring"].reason
    assert odd["Ulysses"].scheme == Ulysses("seq")
    nothing = chosen(tokens=1001, query_heads=3, kv_heads=3)
    with pytest.raises(ValueError, match="no scheme applies"):
        _ = nothing.best


def test_the_table_shows_every_number():
    found = chosen()
    lines = str(found).splitlines()
    assert len(lines) == 1 + len(found.estimates)
    first = found.estimates[0]
    shown = re.findall(r"\d+\.\d+", lines[1])
    total, efficiency = float(shown[-3]), float(shown[-2])
    assert total == pytest.approx(1e3 * first.total_s, abs=1e-3)
    assert efficiency == pytest.approx(first.efficiency, abs=1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": 0}, "tokens must be at least 1"),
        ({"kv_heads": 3}, "no multiple of 3 KV heads"),
        ({"devices_per_host": 3}, "do not fill hosts of 3"),
        ({"local_window_size": -1}, "must not be negative"),
    ],
)
def test_wrong_sizes(change, message):
    with pytest.raises(ValueError, match=message):
        chosen(**change)


def test_wrong_rates():
    with pytest.raises(ValueError, match="network_bytes_per_s must be positive"):
        Rates(network_bytes_per_s=0)
    with pytest.raises(ValueError, match="hidden is a share"):
        Rates(hidden=1.5)
