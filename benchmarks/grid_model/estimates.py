"""Estimates cycles of one launch: replays recorded CTAs, then composes them to the grid."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from benchmarks.grid_model.grids import Access, Grid, Work, by_tile, resident_ctas, to_and_fro
from benchmarks.grid_model.recording import Code, Sizes, record
from fa4_jax import bands
from fa4_jax.key import KernelKey, Pass
from kernels.emulator.timing.rates import HOPPER, Rates
from kernels.emulator.timing.replay import estimate
from kernels.sm90.tiles import (
    BACKWARD_TILES,
    L2_BUDGET_BYTES,
    forward_tile,
)

_FEW, _MANY = 4, 16
"""The steps of the two CTAs whose difference gives a step's cycles."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of attention with as many key heads as query heads, and as many keys as queries."""

    batch: int
    length: int
    heads: int


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cycles of a CTA: `start`, then `tile` for every tile and `step` for each of its steps."""

    start: float
    tile: float
    step: float


class Estimator:
    """Estimates launches of sm_90a; it finds what a CTA costs once for each kernel."""

    def __init__(self, rates: Rates = HOPPER):
        self.rates = rates
        self.costs: dict[KernelKey, Cost] = {}

    def cycles(self, code: Code, shape: Shape) -> float:
        """Returns the cycles of a launch, from the end of what came before it."""
        run: Callable[[Code, Shape], float] = {
            Pass.FORWARD: self._forward,
            Pass.BACKWARD: self._backward,
        }.get(code.key.kernel, self._stream)
        return self.rates.grid_latency + run(code, shape)

    def cost(self, code: Code) -> Cost:
        """Returns the cost of a forward's or backward's CTA."""
        if code.key not in self.costs:
            find = _persistent_cost if code.launch.persistent else _cost
            self.costs[code.key] = find(code, self.rates.alone())
        return self.costs[code.key]

    def _forward(self, code: Code, shape: Shape) -> float:
        key, cost, length = code.key, self.cost(code), shape.length
        m, n = code.tile["m"], code.tile["n"]
        query_row, output_row = 2 * key.head_dim, 2 * key.value_dim
        kv_row = query_row + output_row
        band = bands.Band(length, length, 0, bands.UNBOUNDED, 0 if key.band else bands.UNBOUNDED)
        heads, count = shape.batch * shape.heads, -(-length // m)
        section = max(L2_BUDGET_BYTES // kv_row // length, 1)
        tiles: list[list[Work]] = []
        for index, head in by_tile(heads, count, section):
            tile = count - 1 - index if key.band else index
            blocks = bands.visited_blocks(band, tile * m, m, n, bands.PYTHON)
            steps = [
                Work(cost.step, reads=(Access(("kv", head, block), n * kv_row),))
                for block in range(blocks.end - 1, blocks.begin - 1, -1)
            ]
            query = Access(("q", head, tile), m * query_row)
            output = Access(("o", head, tile), m * output_row)
            steps[0] = dataclasses.replace(steps[0], reads=(query, *steps[0].reads))
            extra = cost.tile if code.launch.persistent else cost.start
            steps[-1] = dataclasses.replace(steps[-1], cycles=cost.step + extra, writes=(output,))
            tiles.append(steps)
        stages = forward_tile(key).kv_stages
        grid = Grid(self.rates, stages)
        if not code.launch.persistent:
            return grid.run(tiles)
        if any(result.zeroed for result in code.launch.results):  # Tickets deal the tiles.
            return cost.start + grid.run(tiles)
        hands = to_and_fro(tiles, min(self.rates.multiprocessors, len(tiles)))
        return cost.start + grid.run(hands)

    def _backward(self, code: Code, shape: Shape) -> float:
        key, d = code.key, code.key.head_dim
        tile = BACKWARD_TILES[d, key.value_dim]
        row_bytes = d * (2 + 4) + key.value_dim * 2
        rows_in_l2 = tile.l2_bytes(key.band, key.ranges, key.deterministic) // row_bytes
        least = tile.least_heads(key.band, key.deterministic)
        section = max(rows_in_l2 // shape.length, least)
        cost = self.cost(code)
        cycles = Grid(self.rates, tile.stages).run(backward_tiles(code, cost, shape, section))
        # Where CTAs take tile after tile, tickets deal them.
        return cost.start + cycles if code.launch.persistent else cycles

    def _stream(self, code: Code, shape: Shape) -> float:
        """Estimates a kernel around the backward: the bytes that it moves, or what the CTAs of an
        SM compute.
        """
        resident, rates = resident_ctas(code), self.rates
        ctas = shape.batch * shape.heads * -(-shape.length // code.tile["m"])

        def cycles(waves: int) -> float:
            count = waves * resident
            problem = Sizes(count, code.tile["m"], code.tile["m"])
            return estimate(record(code, problem, count), rates.alone(), resident).cycles

        first, second = cycles(1), cycles(2)
        waves = ctas / (resident * rates.multiprocessors)
        elements = shape.batch * shape.heads * shape.length * code.key.head_dim
        # These read O and dO and write dQ's accumulators; or read those and write dQ.
        moved = elements * (2 + 2 + 4 if code.key.kernel == Pass.BACKWARD_PRE else 4 + 2)
        streamed = moved / (rates.dram_bytes * rates.multiprocessors)
        beginning = rates.global_latency + rates.dram_latency
        return max(first + (second - first) * max(waves - 1, 0.0), streamed) + beginning


def backward_tiles(code: Code, cost: Cost, shape: Shape, section: int) -> list[list[Work]]:
    """Lists the steps of every key tile of a backward, in the order of the grid, by sections of
    heads.
    """
    key, length = code.key, shape.length
    m, n, d, dv = code.tile["m"], code.tile["n"], key.head_dim, key.value_dim
    window = 0 if key.band else bands.UNBOUNDED
    band = bands.Band(length, length, 0, bands.UNBOUNDED, window).transposed()
    tiles: list[list[Work]] = []
    for tile, head in by_tile(shape.batch * shape.heads, -(-length // n), section):
        blocks = bands.visited_blocks(band, tile * n, n, m, bands.PYTHON)
        order = range(blocks.begin, blocks.end)
        steps = []
        for block in reversed(order) if key.deterministic else order:
            before = ("turn", head, tile - 1, block) if key.deterministic and tile else None
            steps.append(
                Work(
                    cost.step,
                    reads=(Access(("q, do", head, block), 2 * m * (d + dv)),),
                    adds=(Access(("dq", head, block), m * d * 4),),
                    turn=("turn", head, tile, block) if key.deterministic else None,
                    ordered_after=before,
                )
            )
        own = (Access(("k, v", head, tile), 2 * n * (d + dv)),)
        extra = cost.tile if code.launch.persistent else cost.start
        steps[0] = dataclasses.replace(
            steps[0], cycles=cost.step + extra, reads=(*own, *steps[0].reads)
        )
        grads = (Access(("dk, dv", head, tile), 2 * n * (d + dv)),)
        steps[-1] = dataclasses.replace(steps[-1], writes=grads)
        tiles.append(steps)
    return tiles


def _persistent_cost(code: Code, rates: Rates) -> Cost:
    """Returns the cost from CTAs of two and four tiles, of 4 and 16 blocks each."""
    find = _forward_cycles if code.key.kernel == Pass.FORWARD else _backward_cycles
    few, many, more = (find(code, rates, *x) for x in ((2, _FEW), (2, _MANY), (4, _FEW)))
    step = (many - few) / (2 * (_MANY - _FEW))
    tile = (more - few) / 2 - _FEW * step
    return Cost(few - 2 * (tile + _FEW * step), tile, step)


def _cost(code: Code, rates: Rates) -> Cost:
    """Returns the cost from CTAs of one tile with 4 and 16 steps."""
    find = _forward_cycles if code.key.kernel == Pass.FORWARD else _backward_cycles
    few, many = (find(code, rates, 1, blocks) for blocks in (_FEW, _MANY))
    step = (many - few) / (_MANY - _FEW)
    return Cost(few - _FEW * step, 0.0, step)


def _forward_cycles(code: Code, rates: Rates, tiles: int, blocks: int) -> float:
    m, keys = code.tile["m"], code.tile["n"] * blocks
    problem = Sizes(tiles, m, keys, max(keys - m, 0) if code.key.band else 0)
    return estimate(record(code, problem), rates).cycles


def _backward_cycles(code: Code, rates: Rates, tiles: int, steps: int) -> float:
    problem = Sizes(tiles, code.tile["m"] * steps, code.tile["n"])
    return estimate(record(code, problem), rates).cycles
