"""Which tile of query rows a forward takes: what an H200 measured, and bounds of a launch's end."""

from __future__ import annotations

import dataclasses
import heapq
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa4_jax import designs, tile_choice
from fa4_jax.bands import EVERYTHING, UNBOUNDED, Window
from fa4_jax.plan import kernel_keys
from fa4_jax.problem import Problem

CAUSAL = (UNBOUNDED, 0)
TALL, SHORT = designs.TALL, designs.SHORT


def problem(head_dim: int, window: Window, heads: int, length: int, **changes: Any) -> Problem:
    square = Problem(1, length, length, heads, heads, head_dim, "bf16", 0.1, window=window)
    return dataclasses.replace(square, **changes)


def tile(of: Problem, design: str | None = None) -> str:
    (forward,), _ = kernel_keys(of, "sm_90a", design=design)
    return designs.design_of(forward)


@pytest.mark.parametrize(
    ("head_dim", "window", "heads", "length", "faster"),
    [
        (128, EVERYTHING, 8, 1024, SHORT),  # 1.25 times as fast
        (128, EVERYTHING, 8, 4096, SHORT),  # 1.45
        (128, EVERYTHING, 16, 1536, TALL),  # 1.29
        (128, EVERYTHING, 16, 2048, SHORT),  # 1.39
        (128, EVERYTHING, 24, 1024, SHORT),  # 1.35
        (128, EVERYTHING, 24, 4096, TALL),  # 1.07
        (128, EVERYTHING, 416, 1280, SHORT),  # 1.06
        (128, EVERYTHING, 512, 1024, TALL),  # 1.035
        (128, EVERYTHING, 64, 8192, TALL),  # 1.09
        (96, EVERYTHING, 32, 1024, SHORT),  # 1.35
        (96, EVERYTHING, 16, 1536, TALL),  # 1.40
        (96, CAUSAL, 8, 4096, SHORT),  # 1.28
        (96, CAUSAL, 32, 8192, TALL),  # 1.08
        (64, EVERYTHING, 8, 4096, SHORT),  # 1.27
        (64, EVERYTHING, 16, 1536, TALL),  # 1.50
        (64, CAUSAL, 8, 4096, SHORT),  # 1.22
        (64, CAUSAL, 16, 8192, TALL),  # 1.17
        (64, CAUSAL, 512, 1024, SHORT),  # 1.07
        (64, CAUSAL, 512, 2048, TALL),  # 1.06
        (64, (1023, 0), 8, 4096, SHORT),  # 1.16
        (64, (1023, 0), 512, 2048, TALL),  # 1.04
    ],
)
def test_the_tile_that_an_h200_found_faster(
    head_dim: int, window: Window, heads: int, length: int, faster: str
):
    """Measured in turns on 2026-11-30 (benchmarks/results/nvidia-h200-few-heads.md).

    The two of 416 and 512 heads of d = 128 had batches of 16 heads (docs/hopper-power.md).
    """
    assert tile(problem(head_dim, window, heads, length)) == faster


@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("design", designs.TILES)
def test_a_tile_that_is_asked_for_runs(head_dim: int, design: str):
    for heads, length in ((8, 4096), (512, 2048), (1, 100)):
        assert tile(problem(head_dim, EVERYTHING, heads, length), design) == design
    if head_dim < 128:
        assert tile(problem(head_dim, (99, 0), 8, 4096), design) == design


def test_what_no_tall_tile_takes_has_a_short_one():
    for changes in ({"has_soft_cap": True}, {"has_mask": True}, {"bias": "dense"}):
        assert tile(problem(64, CAUSAL, 512, 4096, **changes), TALL) == SHORT


@pytest.mark.parametrize("size", ["batch", "query_length", "key_length"])
def test_of_unknown_sizes_the_tall_tile_takes_care(size: str):
    for head_dim in (64, 128):
        of = dataclasses.replace(problem(head_dim, EVERYTHING, 8, 1024), **{size: _Symbol()})
        assert tile(of) == TALL


class _Symbol:
    """A size that is known when the program runs."""


@given(
    st.lists(st.integers(1, 64), min_size=1, max_size=20),
    st.integers(1, 20),
    st.integers(1, 40),
)
def test_no_launch_ends_before_the_bound(tiles: list[int], heads: int, multiprocessors: int):
    bound = tile_choice.last_end(tiles, heads, multiprocessors)
    free = [0] * multiprocessors
    for keys in sorted(tiles * heads, reverse=True):
        heapq.heappush(free, heapq.heappop(free) + keys)
    assert bound <= max(free) + 1e-9


@given(st.integers(1, 64), st.integers(1, 20), st.integers(1, 20), st.integers(1, 40))
def test_equal_tiles_end_in_whole_rounds(keys: int, tiles: int, heads: int, multiprocessors: int):
    rounds = -(-tiles * heads // multiprocessors)
    assert tile_choice.last_end([keys] * tiles, heads, multiprocessors) == rounds * keys
