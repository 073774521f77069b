"""Compares with brute force which shards meet, which travel where, and the zig-zag order."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from fa4_jax import parallel
from fa4_jax.bands import UNBOUNDED
from fa4_jax.parallel.gather import neighbours, transfers
from fa4_jax.parallel.shard_plan import ShardPlan, visits

WINDOWS = [
    (UNBOUNDED, UNBOUNDED),
    (UNBOUNDED, 0),
    (0, UNBOUNDED),
    (5, 0),
    (0, 0),
    (6, 7),
    (13, 1),
    (2, 20),
]
CUTS = [
    ShardPlan(n, layout, rows, keys, window, offset)
    for n in (1, 2, 3, 5, 8)
    for layout in ("contiguous", "zigzag")
    for rows, keys in ((6, 6), (4, 10))
    for window in WINDOWS
    for offset in (0, 7, -9, 200, None)
]


def positions(cut: ShardPlan, device: int, size: int) -> np.ndarray:
    """Returns the positions of one device's rows or keys, `size` of them."""
    whole = jnp.arange(cut.devices * size)
    if cut.layout == "zigzag":
        whole = parallel.to_zigzag(whole, cut.devices, axis=0)
    return np.asarray(whole).reshape(cut.devices, size)[device]


def sees(cut: ShardPlan, device: int, owner: int) -> bool:
    """Returns whether any row of one device sees any key of another, row by row."""
    if cut.offset is None:
        return True
    rows = positions(cut, device, cut.rows)[:, None] + cut.offset
    distance = positions(cut, owner, cut.keys)[None, :] - rows
    return bool(((distance >= -cut.window[0]) & (distance <= cut.window[1])).any())


@pytest.mark.parametrize("devices", [1, 2, 3, 5, 8])
def test_every_pair_that_meets_is_visited_once_and_no_shard_travels_in_vain(devices):
    for cut in (cut for cut in CUTS if cut.devices == devices):
        n = cut.devices
        pairs = {(d, o) for d in range(n) for o in range(n) if cut.meet(d, o)}
        if n <= 3:
            assert pairs == {(d, o) for d in range(n) for o in range(n) if sees(cut, d, o)}
        held = home = {d: d for d in range(n)}  # the device whose keys each device has
        met: list[tuple[int, int]] = []
        for visit in visits(cut):
            if visit.shift:
                sources, destinations = zip(*visit.hop, strict=True)
                assert len(set(sources)) == len(sources)
                assert len(set(destinations)) == len(destinations)
                before = home if visit.from_home else held
                held = {d: before[s] for s, d in visit.hop if s in before}
            here = {(d, o) for d, o in held.items() if (d - o) % n == visit.shift}
            assert len(here) == len(held), "every shard is where its visit says"
            met += sorted(here & pairs)
            if visit.shift:
                assert set(visit.home) == here & pairs
        assert sorted(met) == sorted(pairs)


def test_directions_and_distances():
    base = ShardPlan(8, "contiguous", 6, 6, (UNBOUNDED, 0), 0)
    assert [visit.shift for visit in visits(base)] == list(range(8))
    assert [len(visit.hop) for visit in visits(base)] == [0, 7, 6, 5, 4, 3, 2, 1]
    later = dataclasses.replace(base, window=(0, UNBOUNDED))
    assert [visit.shift for visit in visits(later)] == [0, 7, 6, 5, 4, 3, 2, 1]
    both = dataclasses.replace(base, window=(6, 6))
    assert [visit.shift for visit in visits(both)] == [0, 1, 7]
    assert [visit.from_home for visit in visits(both)] == [False, True, True]
    assert neighbours(both) == (1, 0, -1)
    assert transfers(both, -1) == tuple((o, o - 1) for o in range(1, 8))
    assert neighbours(base) is None
    assert neighbours(dataclasses.replace(base, window=(7, 0))) == (2, 1, 0)


@pytest.mark.parametrize("shards", [1, 2, 3, 4])
def test_zigzag_gives_each_device_one_early_and_one_late_chunk(shards, rng):
    x = rng.normal(size=(2, 12 * shards, 3)).astype(np.float32)
    ordered = np.asarray(parallel.to_zigzag(jnp.asarray(x), shards))
    chunks = x.reshape(2, 2 * shards, 6, 3)
    for i, share in enumerate(np.split(ordered, shards, axis=1)):
        np.testing.assert_array_equal(share[:, :6], chunks[:, i])
        np.testing.assert_array_equal(share[:, 6:], chunks[:, 2 * shards - 1 - i])
    for axis in (1, -2):
        again = parallel.from_zigzag(parallel.to_zigzag(jnp.asarray(x), shards, axis), shards, axis)
        np.testing.assert_array_equal(again, x)


def test_causal_zigzag_is_balanced():
    """All devices see the same number of pairs of a row and a key, except of their own shards."""
    cut = ShardPlan(4, "zigzag", 8, 8, (UNBOUNDED, 0), 0)
    for shift in range(4):
        seen = [
            (positions(cut, d, 8)[:, None] >= positions(cut, (d - shift) % 4, 8)[None, :]).sum()
            for d in range(4)
        ]
        assert len(set(seen)) == 1
