"""Compares the timing model with published figures of flash-attn-4 on a B200.

    python -m benchmarks.blackwell_figures    # prints Markdown tables; seconds, no GPU

`results/b200-published-figures.json` has the figures and their sources, and
`results/flash-attn-4-costs.json` what the kernels cost in the model (`python -m
tests.emulator.interop costs`), `before` with the constants of 2026-11-22. A kernel is named by its
pass, head dims of keys and values, mask, and CTAs of a cluster.

No constant was chosen by these figures. The clock of a source that states none is 1.85 GHz
(`rates.PUBLISHED`); `left out` takes instead the clock that fits all other such rows best, so that
the row itself has no say.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import json
import math
import pathlib
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kernels.emulator.timing.rates import BLACKWELL

RESULTS = pathlib.Path(__file__).parent / "results"
_COLD_TILE_LOAD = 3590
"""Cycles of a load of 16 KB from DRAM while all SMs load. Source: SemiAnalysisAI/
microbench-blackwell, tma2d_latency."""
COLD_START = _COLD_TILE_LOAD - (
    BLACKWELL.tma_latency + BLACKWELL.barrier_latency + 16384 / BLACKWELL.tma_load_bytes
)
"""What a tile waits longer for its first operands, which come from DRAM and not, as in a replay,
from L2: benchmarks empty L2 before each call."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One of flash-attn-4's kernels, or the main kernels of a backward together."""

    name: str

    @property
    def backward(self) -> bool:
        return self.name.startswith("backward")

    @property
    def dims(self) -> tuple[int, int]:
        """Head dims of keys and of values."""
        d, dv = self.name.split()[-4:-2]
        return int(d), int(dv)

    @property
    def is_causal(self) -> bool:
        return self.name.split()[-2] == "causal"

    @property
    def ctas(self) -> int:
        """CTAs of a cluster."""
        return int(self.name.split()[-1])

    @property
    def design(self) -> str:
        """What kernels of one CTA and of pairs have in common."""
        return self.name.rsplit(maxsplit=1)[0]

    @property
    def held(self) -> int:
        """Queries (backward: keys) of a cluster's tile."""
        if self.dims[0] == 256:
            return 128 if self.backward else 256
        return (128 if self.backward else 256) * self.ctas


@dataclasses.dataclass(frozen=True)
class Cost:
    """SM cycles of tests.emulator.interop.timing: of a unit, and of its tile beside its units."""

    unit: float
    tile: float


@dataclasses.dataclass(frozen=True)
class Figure:
    """A published figure.

    Attributes:
      clock_ghz: None if the source does not state it.
      counted: whether the kernel can be compiled here, without what `note` says.
    """

    source: str
    kernel: Kernel
    batch: int
    heads: int
    length: int
    tflops: float
    clock_ghz: float | None
    counted: bool
    note: str

    def seconds(self, cost: Cost, clock_ghz: float, is_cold: bool = True) -> float:
        """The model's time: main kernels in waves, what comes before and after by its bytes."""
        kernel, rates, count = self.kernel, BLACKWELL, self.batch * self.heads
        whole, along = (256, 128) if kernel.backward else (512, 128)
        share = kernel.held / whole / kernel.ctas
        tiles = []
        for tile in range(self.length // kernel.held):
            seen = self.length
            if kernel.is_causal:
                first = tile * kernel.held
                seen = seen - first if kernel.backward else first + kernel.held
            start = COLD_START if is_cold else 0.0
            tiles.append(start + share * (cost.tile + cost.unit * math.ceil(seen / along)))
        cycles = _makespan(tiles * count, rates.multiprocessors // kernel.ctas) + rates.grid_latency
        if kernel.backward:
            d, dv = kernel.dims
            # O and dO, zeros of dQ in fp32, that sum again, and dQ.
            bytes_of_row = 2 * (dv + dv) + 4 * d + 4 * d + 2 * d
            moved = self.length * count * bytes_of_row
            cycles += moved / (rates.dram_bytes * rates.multiprocessors) + 2 * rates.grid_latency
        return cycles / clock_ghz * 1e-9

    def modelled(self, cost: Cost, clock_ghz: float, is_cold: bool = True) -> float:
        """TFLOP/s."""
        d, dv = self.kernel.dims
        flops = 2 * (3 * d + 2 * dv if self.kernel.backward else d + dv)
        pairs = self.batch * self.heads * self.length**2 / (2 if self.kernel.is_causal else 1)
        return flops * pairs / self.seconds(cost, clock_ghz, is_cold) / 1e12


def _makespan(jobs: Sequence[float], workers: int) -> float:
    """When the last of these jobs ends, the longest first, each as soon as a worker is free."""
    free = [0.0] * workers
    for job in sorted(jobs, reverse=True):
        heapq.heapreplace(free, free[0] + job)
    return max(free)


@dataclasses.dataclass(frozen=True)
class Row:
    """A figure beside the model, as TFLOP/s.

    Attributes:
      left_out: with the clock that fits the other rows.
    """

    figure: Figure
    before: float
    now: float
    left_out: float

    def error(self, value: float) -> float:
        """The relative error of one of these."""
        return value / self.figure.tflops - 1


def read() -> tuple[list[Figure], dict[str, dict[str, Cost]]]:
    """All figures, and the costs by model and kernel."""
    document: dict[str, Any] = json.loads((RESULTS / "b200-published-figures.json").read_text())
    figures = [
        Figure(
            source=row["source"],
            kernel=Kernel(row["kernel"]),
            batch=row["batch"],
            heads=row["heads"],
            length=row["length"],
            tflops=row["tflops"],
            clock_ghz=document["sources"][row["source"]]["clock_ghz"],
            counted=row["counted"],
            note=row.get("note", ""),
        )
        for row in document["rows"]
    ]
    kept = json.loads((RESULTS / "flash-attn-4-costs.json").read_text())
    costs = {
        model: {name: Cost(**cost) for name, cost in kept[model].items()}
        for model in ("before", "now")
    }
    return figures, costs


def rows(figures: Iterable[Figure], costs: Mapping[str, Mapping[str, Cost]]) -> list[Row]:
    """The counted figures beside the model."""
    plain = []
    for figure in figures:
        if figure.counted:
            name, clock = figure.kernel.name, figure.clock_ghz or BLACKWELL.clock_ghz
            before = figure.modelled(costs["before"][name], BLACKWELL.clock_ghz, is_cold=False)
            now = figure.modelled(costs["now"][name], clock)
            plain.append(Row(figure, before, now, now))
    open_ended = [row for row in plain if row.figure.clock_ghz is None]
    logs = [math.log(row.figure.tflops / row.now) for row in open_ended]
    found = []
    for row in plain:
        if row.figure.clock_ghz is None:
            own = math.log(row.figure.tflops / row.now)
            fitted = math.exp((sum(logs) - own) / (len(logs) - 1))
            row = dataclasses.replace(row, left_out=row.now * fitted)
        found.append(row)
    return found


def spreads(found: Iterable[Row]) -> list[tuple[str, list[float]]]:
    """Figures of the same kernel and length by several sources, and all of them."""
    cells: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for row in found:
        name = f"{row.figure.kernel.name}, S = {row.figure.length}"
        cells[name][row.figure.source] = row.figure.tflops
    return [(name, sorted(cell.values())) for name, cell in cells.items() if len(cell) > 1]


def designs(found: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Pairs of CTAs and single ones, of one source and shape."""
    return [
        (pair, single)
        for pair, single in itertools.permutations(found, 2)
        if (pair.figure.kernel.ctas, single.figure.kernel.ctas) == (2, 1)
        and pair.figure.kernel.design == single.figure.kernel.design
        and (pair.figure.source, pair.figure.length) == (single.figure.source, single.figure.length)
    ]


def concordant(found: Sequence[Row]) -> tuple[int, int]:
    """How many pairs of figures of one source the model ranks as measured, and of how many."""
    pairs = [
        (a, b)
        for a, b in itertools.combinations(found, 2)
        if a.figure.source == b.figure.source and a.figure.tflops != b.figure.tflops
    ]
    right = sum((a.now > b.now) == (a.figure.tflops > b.figure.tflops) for a, b in pairs)
    return right, len(pairs)


def _percent(value: float) -> str:
    return f"{100 * value:+.0f} %"


def _print_sources(figures: Iterable[Figure]) -> None:
    """Where the figures come from, and those that the model has no kernel for."""
    document = json.loads((RESULTS / "b200-published-figures.json").read_text())
    print("| source | where | date | kernels | clock, GHz | load |\n" + "|---" * 6 + "|")
    for name, source in document["sources"].items():
        clock = source["clock_ghz"] or "not stated"
        texts = source["where"], source["date"], source["kernel"], clock, source["load"]
        print(f"| {name} | " + " | ".join(map(str, texts)) + " |")
    print("\n| not compared | kernel | batch, heads, S | published | why |\n|---|---|---|---|---|")
    for f in figures:
        if not f.counted:
            shape = f"{f.batch}, {f.heads}, {f.length}"
            print(f"| {f.source} | {f.kernel.name} | {shape} | {f.tflops:.0f} | {f.note} |")


def main() -> None:
    """Prints the tables."""
    figures, costs = read()
    found = rows(figures, costs)
    print("| source | kernel | batch, heads, S | published | before | | now | | left out |")
    print("|---" * 9 + "|")
    for row in found:
        f = row.figure
        print(
            f"| {f.source} | {f.kernel.name} | {f.batch}, {f.heads}, {f.length} | {f.tflops:.0f} "
            f"| {row.before:.0f} | {_percent(row.error(row.before))} | {row.now:.0f} "
            f"| {_percent(row.error(row.now))} | {_percent(row.error(row.left_out))} |"
        )
    print("\n| model | rows | mean absolute | worst |\n|---|---|---|---|")
    for name in ("before", "now", "left_out"):
        errors = [abs(row.error(getattr(row, name))) for row in found]
        mean, worst = statistics.mean(errors), max(errors)
        print(f"| {name.replace('_', ' ')} | {len(errors)} | {mean:.1%} | {worst:.1%} |")
    print("\n| published by several | TFLOP/s | no model errs less than |\n|---|---|---|")
    for name, values in spreads(found):
        least = (values[-1] - values[0]) / (values[-1] + values[0])
        print(f"| {name} | {', '.join(f'{v:.0f}' for v in values)} | {least:.1%} |")
    print("\n| pair beside one CTA | source | published | before | now |\n|---|---|---|---|---|")
    for pair, single in designs(found):
        f = pair.figure
        ratios = (f.tflops / single.figure.tflops, pair.before / single.before)
        print(
            f"| {f.kernel.design}, S = {f.length} | {f.source} | {ratios[0]:.2f} "
            f"| {ratios[1]:.2f} | {pair.now / single.now:.2f} |"
        )
    right, of = concordant(found)
    print(f"\nOf {of} pairs of figures of one source {right} are ranked as published.\n")
    _print_sources(figures)


if __name__ == "__main__":
    main()
