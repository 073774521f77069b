"""Cycles of flash-attn-4's Blackwell kernels and of this project's, by the model of
kernels.emulator.timing.

Everything is measured in units that both divide into whole tiles: 512 query rows and 128 keys of a
forward, 256 keys and 128 queries of a backward. A launch with few units and one with more of them
tell what a unit costs in the middle of a tile and what a tile costs beside its units. CTAs of a
launch run one after the other on one SM, those of a pair on two; cycles are of an SM.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Literal

from kernels.emulator.machine.trace import Multiplied, Trace
from kernels.emulator.timing.rates import BLACKWELL
from kernels.emulator.timing.replay import Timing, estimate
from tests.emulator.interop.run import Problem

ROWS, KEYS = 512, 128
"""The queries and keys of a unit of the forward."""
BACKWARD_ROWS, BACKWARD_KEYS = 128, 256
LENGTH = 8192
UNITS = ("tensor core", "special", "shared", "issue", "TMA load", "tensor memory")
_FEW, _MANY = 4, 16
_FEW_OF_BACKWARD, _MANY_OF_BACKWARD = 12, 20
"""Copies of d = 256 need some ten units until the prefetch is as deep as it gets."""
_STEADY = 1.01
"""If a resource is busy for more than this share of a unit, the launches were too short."""

Runner = Callable[[Problem, Trace], object]
"""Launches a kernel with a trace."""


@dataclasses.dataclass(frozen=True)
class Cost:
    """SM cycles.

    Attributes:
      unit: cycles of a unit in the middle of a tile, at least those of its busiest resource.
      tile: cycles of ROWS queries, or BACKWARD_KEYS keys, beside their units.
      busy: cycles of each resource in a unit.
    """

    unit: float
    tile: float
    busy: dict[str, float]

    def __add__(self, other: Cost) -> Cost:
        """The cost of two kernels, one after the other, that do parts of the same work."""
        names = dict.fromkeys((*self.busy, *other.busy))
        busy = {name: self.busy.get(name, 0.0) + other.busy.get(name, 0.0) for name in names}
        return Cost(self.unit + other.unit, self.tile + other.tile, busy)

    def of(self, units: float) -> float:
        """Cycles of a tile with this number of units."""
        return self.tile + self.unit * units


def forward(run: Runner, ctas: int) -> Cost:
    """The cost of a forward, from two and four heads of ROWS queries with 4 and 16 units each.

    `ctas` is the number of CTAs in a cluster.
    """

    def total(heads: int, units: int) -> Timing:
        trace = Trace(frozenset(range(64)))
        run(Problem(ROWS, units * KEYS, heads=heads), trace)
        return estimate(trace, BLACKWELL)

    few, many, more = total(2, _FEW), total(2, _MANY), total(4, _FEW)
    unit, busy = _unit(few, many, ctas / (2 * (_MANY - _FEW)))
    tile = ctas * (more.cycles - few.cycles) / 2 - _FEW * unit
    return Cost(unit, tile, busy)


def backward(
    run: Runner,
    ctas: int,
    ctas_of_unit: tuple[int, int],
    is_causal: bool,
    stationary: Literal["queries", "keys"] = "keys",
) -> Cost:
    """The cost of a backward, from 12 and 20 units of the first keys.

    The CTAs of the first keys have most to do under a causal mask.

    A kernel that holds queries (dQ's of two main kernels) is measured the other way round, along
    its own inner loop: the last BACKWARD_KEYS queries, past which BACKWARD_ROWS keys go with every
    unit. Its units have the same area, and a square of LENGTH has as many of them and of tiles, so
    that its cost can be added to the cost of the kernel that holds keys.

    Args:
      ctas: the number of CTAs in a cluster.
      ctas_of_unit: the CTAs that BACKWARD_KEYS keys (or queries) need, and how many are measured.
    """
    needed, seen = ctas_of_unit

    def total(units: int) -> Timing:
        trace, rows = Trace(frozenset(range(256))), units * BACKWARD_ROWS
        if stationary == "queries":
            run(Problem(BACKWARD_KEYS, rows), trace)
        else:
            run(Problem(rows, rows if is_causal else BACKWARD_KEYS), trace)
        return estimate(busiest(trace, seen), BLACKWELL)

    few, many = total(_FEW_OF_BACKWARD), total(_MANY_OF_BACKWARD)
    factor = ctas * needed / seen
    unit, busy = _unit(few, many, factor / (_MANY_OF_BACKWARD - _FEW_OF_BACKWARD))
    # A CTA starts when the one before it has ended; estimate counts that between its own.
    tile = factor * (few.cycles + BLACKWELL.cta_latency) - _FEW_OF_BACKWARD * unit
    return Cost(unit, tile, busy)


def _unit(few: Timing, many: Timing, factor: float) -> tuple[float, dict[str, float]]:
    """Cycles of a unit, and of each resource in it, from two launches.

    Raises:
      ValueError: a resource is busier than a unit is long: the launches have no steady state.
    """
    cycles = factor * (many.cycles - few.cycles)
    busy = {name: factor * (many.busy[name] - few.busy.get(name, 0.0)) for name in many.busy}
    busiest = max(busy, key=busy.__getitem__)
    if busy[busiest] > _STEADY * cycles:
        message = f"{busiest}: {busy[busiest]:.0f} cycles in a unit of {cycles:.0f}"
        raise ValueError(f"{message}; more units are needed for a steady state")
    return max(cycles, busy[busiest]), busy


def busiest(trace: Trace, count: int) -> Trace:
    """The CTAs, whole clusters, that make most products."""
    products: Counter[int] = Counter()
    for cta, warps in trace.warps.items():
        cluster, _ = trace.places[cta]
        products[cluster] += sum(
            event.flops for warp in warps for event in warp if isinstance(event, Multiplied)
        )
    clusters = {cluster for cluster, _ in products.most_common(count // trace.cluster_size)}
    chosen = [cta for cta in trace.warps if trace.places[cta][0] in clusters]
    return dataclasses.replace(
        trace,
        warps={cta: trace.warps[cta] for cta in chosen},
        places={cta: trace.places[cta] for cta in chosen},
    )


def teraflops(cost: Cost, flops: float, is_causal: bool, backward: bool) -> float:
    """TFLOP/s of all multiprocessors at LENGTH, each with many tiles.

    Args:
      flops: the operations that a pair of a query and a key takes.
    """
    rows, keys = (BACKWARD_KEYS, BACKWARD_ROWS) if backward else (ROWS, KEYS)
    tiles, units = LENGTH // rows, LENGTH // keys
    cycles = [cost.of(units * (i + 1) / tiles if is_causal else units) for i in range(tiles)]
    pairs = LENGTH**2 / (2 if is_causal else 1)
    rate = flops * pairs / sum(cycles)
    return rate * BLACKWELL.multiprocessors * BLACKWELL.clock_ghz / 1e3
