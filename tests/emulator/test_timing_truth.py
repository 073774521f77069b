"""Estimates of whole launches: grids whose time is known in closed form, and measured kernels."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest

from benchmarks.grid_model.estimates import Estimator
from benchmarks.grid_model.grids import Access, Grid, Work, by_tile, to_and_fro
from benchmarks.grid_model.recording import Code
from benchmarks.timing_truth import estimated, key_of, markdown, measured_rows, summary
from fa4_jax.key import KernelKey, Pass
from kernels.emulator.timing.rates import HOPPER
from kernels.sm90.tiles import BACKWARD_TILES, forward_tile
from tests.emulator.attention import ptx

RATES = dataclasses.replace(
    HOPPER,
    multiprocessors=2,
    tma_load_bytes=32.0,
    dram_bytes=8.0,
    l2_bytes=1 << 20,
    dram_latency=500.0,
    signal_latency=1000.0,
    barrier_latency=0.0,
    global_latency=0.0,
    cta_latency=100.0,
    reduce_alone=16.0,
    reduce_bytes=8.0,
)
SIZE = 1 << 16


def test_ctas_start_where_one_has_ended() -> None:
    ctas = [[Work(1000.0)], [Work(300.0)], [Work(300.0)], [Work(700.0)]]
    # The second place takes the third CTA, then the fourth.
    assert Grid(RATES, 2).run(ctas) == 300 + 100 + 300 + 100 + 700


@pytest.mark.parametrize(
    ("names", "cycles"),
    [
        # From DRAM both times: 65536 bytes at 16 bytes a cycle of both multiprocessors.
        (("a", "b"), 2 * SIZE / 16 + 500),
        # The second time from L2.
        (("a", "a"), SIZE / 16 + 500),
    ],
)
def test_bytes_from_dram_and_l2(names: tuple[str, str], cycles: float) -> None:
    steps = [Work(0.0, reads=(Access(name, SIZE),)) for name in names]
    assert Grid(RATES, 2).run([steps]) == pytest.approx(cycles, rel=0.01)


def test_what_does_not_fit_falls_out_of_l2() -> None:
    def dram_bytes(count: int) -> int:
        grid = Grid(RATES, 1)
        grid.run([[Work(1e6, reads=(Access(i % count, SIZE),)) for i in range(2 * count)]])
        return grid.dram_bytes

    assert dram_bytes(16) == 16 * SIZE
    assert dram_bytes(17) == 2 * 17 * SIZE


def test_additions_share_and_take_turns() -> None:
    add = Access("dq", 1600)
    assert Grid(dataclasses.replace(RATES, l2_bytes=0), 1).run([[Work(500.0, adds=(add,))]]) == 500
    # A chain: each begins a signal after the one before has added.
    chain = [
        [Work(500.0, adds=(add,), turn=i, ordered_after=i - 1 if i else None)] for i in range(2)
    ]
    assert Grid(RATES, 1).run(chain) == 500 + 1000 + 100
    with pytest.raises(ValueError, match="never come"):
        Grid(RATES, 1).run([[Work(500.0, adds=(add,), ordered_after="nobody")]])


def test_dealing() -> None:
    tiles = [[Work(float(i))] for i in range(5)]
    hands = to_and_fro(tiles, 2)
    assert [[work.cycles for work in hand] for hand in hands] == [[0, 3, 4], [1, 2]]
    assert by_tile(3, 2, 2) == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (1, 2)]


def _code(key: KernelKey) -> Code:
    found = ptx(key)
    tile = (
        forward_tile(key)
        if key.kernel == Pass.FORWARD
        else BACKWARD_TILES[key.head_dim, key.value_dim]
    )
    sizes = {"m": tile.m, "n": tile.n}
    return Code(key, found.text, found.symbol, found.launch, registers=168, tile=sizes)


KERNELS = {"sm_90a_fwd_bf16_d256_band": 0.1, "sm_90a_bwd_bf16_d64": 0.14}
"""The largest relative error of each kernel; docs/emulator/model.md has the whole table."""


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is None, reason="the PTX comes from CuTe-DSL"
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_beside_an_h200(kernel: str) -> None:
    measured = [row for row in measured_rows() if row["kernel"] == kernel]
    rows = estimated(measured, _code)
    assert [row.length for row in rows] == [1024, 4096]
    assert all(abs(row.error) <= KERNELS[kernel] for row in rows), rows
    assert summary(rows)["all"]["worst"] == max((row.error for row in rows), key=abs)
    assert f"| {kernel} | 8, 1024," in markdown(rows)
    # A tensor core and a port of half the speed would be noticed.
    halved = {name: getattr(HOPPER, name) / 2 for name in ("mma_flops", "shared_bytes")}
    slow = Estimator(dataclasses.replace(HOPPER, **halved))
    assert all(row.error > KERNELS[kernel] for row in estimated(measured, _code, slow))


def test_names_of_measured_kernels() -> None:
    rows = measured_rows()
    keys = {key_of(row) for row in rows}
    assert {key.name for key in keys} == {row["kernel"] for row in rows}
    assert len(keys) == 90
    with pytest.raises(ValueError, match="sm_80"):
        key_of({"kernel": "sm_80_fwd_bf16_d64"})
