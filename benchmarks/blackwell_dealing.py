"""Estimates what it is worth to deal a Blackwell forward's tiles to whoever is free.

    python -m kernels.build --only "sm_100f_fwd_bf16_d128_band_*polynomial_exp2"
    python -m benchmarks.blackwell_dealing    # prints a Markdown table; a minute, no GPU

As built, tile i of a round goes to multiprocessor i, every other round in reverse
(`Schedule.tile`). `by row` is what kernels with ranges in memory do: within a row of the batch the
tiles that visit most come first (`fa4_jax.masks.order`). Launch control
(clusterlaunchcontrol.try_cancel) would let a CTA that is done take the next tile of the grid, asked
for one tile ahead; nothing is charged for that. `sorted` deals tiles as built, but in the order of
the blocks that they visit, the longest of the whole call first. L2 and DRAM are shared
(`grid_model`); a multiprocessor's speed does not vary, which on a GPU is one more reason to deal by
demand.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from benchmarks.blackwell_estimates import Step, step_of
from benchmarks.grid_model.grids import Access, Grid, Work, by_tile, to_and_fro
from benchmarks.grid_model.recording import Code, built
from fa4_jax import catalogue
from kernels.emulator.timing.rates import BLACKWELL
from kernels.sm100.tiles import L2_BUDGET_BYTES

HEADS, HEAD_DIM, TOKENS = 16, 128, 32768
DOCUMENT, ROW = 1024, 8192


@dataclasses.dataclass(frozen=True)
class Case:
    """A batch of causal rows; `starts` [batch, length]: the first key that each position sees."""

    name: str
    starts: np.ndarray


def causal(length: int) -> Case:
    """Returns rows without documents."""
    return Case(f"causal, S = {length}", np.zeros((TOKENS // length, length), int))


def documents(length: int, mean: int) -> Case:
    """Returns rows of documents whose lengths are drawn around a mean, cut anywhere."""
    rng, rows = np.random.default_rng(0), list[np.ndarray]()
    for _ in range(TOKENS // length):
        cuts = np.sort(rng.choice(np.arange(1, length), length // mean - 1, replace=False))
        lengths = np.diff(cuts, prepend=0, append=length)
        rows.append(np.repeat(np.cumsum(lengths) - lengths, lengths))
    return Case(f"documents of {mean} in rows of {length}", np.stack(rows))


def window(length: int, size: int) -> Case:
    """Returns rows that see so many keys."""
    start = np.maximum(np.arange(length) - size + 1, 0)
    return Case(f"window of {size}, S = {length}", np.tile(start, (TOKENS // length, 1)))


CASES = (
    *(causal(length) for length in (1024, 2048, 4096, 8192, 16384, 32768)),
    *(documents(length, DOCUMENT) for length in (ROW, 4 * ROW)),
    documents(ROW, ROW // 2),
    window(16384, 1024),
)


def tiles_of(case: Case, code: Code, step: Step, by_row: bool) -> list[list[Work]]:
    """Returns the tiles in the order of a kernel: by `nth_tile`, the last rows first.

    by_row: those that visit most first, within each row of the batch.
    """
    m, n, row_bytes = code.tile["m"], code.tile["n"], 2 * HEAD_DIM
    batch, length = case.starts.shape
    heads, count = batch * HEADS, -(-length // m)
    section = max(L2_BUDGET_BYTES // (2 * row_bytes) // length, 1)

    def blocks(batch_row: int, tile: int) -> tuple[int, int]:
        first = tile * m
        rows = case.starts[batch_row, first : first + m]
        return int(rows.min()) // n, -(-min(first + m, length) // n)

    def visits(batch_row: int, tile: int) -> int:
        begin, end = blocks(batch_row, tile)
        return end - begin

    last_first = list(reversed(range(count)))
    orders = [
        sorted(last_first, key=lambda tile: -visits(x, tile)) if by_row else last_first
        for x in range(batch)
    ]
    tiles: list[list[Work]] = []
    for place, head in by_tile(heads, count, section):
        index = orders[head // HEADS][place]
        begin, end = blocks(head // HEADS, index)
        steps = [
            Work(step.cycles, reads=(Access(("kv", head, block), 2 * n * row_bytes),))
            for block in range(end - 1, begin - 1, -1)
        ]
        query = Access(("q", head, index), m * row_bytes)
        steps[0] = dataclasses.replace(steps[0], reads=(query, *steps[0].reads))
        output = Access(("o", head, index), m * row_bytes)
        cycles = step.cycles + step.tile
        steps[-1] = dataclasses.replace(steps[-1], cycles=cycles, writes=(output,))
        tiles.append(steps)
    return tiles


def row(case: Case, code: Code, step: Step) -> str:
    """Returns a row of the table: cycles of each way to deal, over an even share."""
    tiles = tiles_of(case, code, step, by_row=False)
    in_rows = tiles_of(case, code, step, by_row=True)
    even = sum(work.cycles for tile in tiles for work in tile) / BLACKWELL.multiprocessors
    longest = sorted(tiles, key=len, reverse=True)
    stages = code.tile["kv_stages"]
    takers = min(BLACKWELL.multiprocessors, len(tiles))
    found = [
        Grid(BLACKWELL, stages).run(dealt) / even
        for dealt in (
            to_and_fro(tiles, takers),
            to_and_fro(in_rows, takers),
            tiles,
            to_and_fro(longest, takers),
            longest,
        )
    ]
    ratios = " | ".join(f"{value:.3f}" for value in found)
    return f"| {case.name} | {ratios} |"


def main() -> None:
    """Prints the table."""
    (key,) = (
        key
        for key in catalogue.all_keys()
        if key.name == f"sm_100f_fwd_bf16_d{HEAD_DIM}_band_polynomial_exp2"
    )
    code = built(key)
    step = step_of(code)
    print("| rows | as built | by row | launch control | sorted | sorted, launch control |")
    print("|---|---|---|---|---|---|")
    for case in CASES:
        print(row(case, code, step), flush=True)


if __name__ == "__main__":
    main()
