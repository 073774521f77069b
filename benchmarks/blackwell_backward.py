"""Estimates what the Blackwell backward's main kernel takes, fast and deterministic.

    python -m kernels.build --only "sm_100f_bwd_bf16_*"
    python -m benchmarks.blackwell_backward

A step costs the difference of CTAs (or pairs) with 12 and 20 of them on one multiprocessor. The
grid's CTAs then run on all multiprocessors as in `benchmarks.grid_model`: they share L2 and DRAM
and, where dQ is added in order, wait for the key tile before. In that grid a CTA stands still until
its additions are done; this kernel goes on, so the price of the order is an upper bound.
"""

from __future__ import annotations

import argparse
import dataclasses

from benchmarks.grid_model.estimates import Cost, Shape, backward_tiles
from benchmarks.grid_model.grids import Grid
from benchmarks.grid_model.recording import Code, Sizes, built, record
from fa4_jax.key import KernelKey, Pass
from kernels.emulator.timing.rates import BLACKWELL, Rates
from kernels.emulator.timing.replay import estimate
from kernels.sm100.tiles import DETERMINISTIC_BAND_HEADS, L2_BUDGET_BYTES

TILES = (
    # head_dim, value_dim, KernelKey.pair
    (64, 64, False),
    (128, 128, False),
    (128, 128, True),
    (192, 128, False),
    (192, 128, True),
    (256, 256, False),
)
SHAPE = Shape(batch=2, length=8192, heads=16)
_FEW, _MANY = 12, 20
_AHEAD = 2


def cost_of(code: Code) -> Cost:
    """Returns the cycles of a CTA or pair that no other one delays."""

    def cycles(steps: int) -> float:
        rows, keys = code.tile["m"] * steps, code.tile["n"]
        problem = Sizes(1, rows, keys, max(keys - rows, 0) if code.key.band else 0)
        return estimate(record(code, problem), BLACKWELL.alone()).cycles

    few, many = cycles(_FEW), cycles(_MANY)
    step = (many - few) / (_MANY - _FEW)
    return Cost(few - _FEW * step, 0.0, step)


def of_takers(ctas: int) -> Rates:
    """Returns the rates of what runs a CTA, or of the multiprocessors that a pair occupies."""
    return dataclasses.replace(
        BLACKWELL,
        multiprocessors=BLACKWELL.multiprocessors // ctas,
        tma_load_bytes=BLACKWELL.tma_load_bytes * ctas,
        reduce_bytes=BLACKWELL.reduce_bytes * ctas,
        reduce_alone=BLACKWELL.reduce_alone * ctas,
        dram_bytes=BLACKWELL.dram_bytes * ctas,
    )


def section_of(code: Code) -> int:
    """Returns how many KV heads' key tiles are interleaved, as in the kernel's `assign`."""
    key = code.key
    ordered_band = key.deterministic and key.band
    least = DETERMINISTIC_BAND_HEADS // code.launch.cluster[0] if ordered_band else 1
    return max(L2_BUDGET_BYTES // (6 * key.head_dim + 2 * key.value_dim) // SHAPE.length, least)


def teraflops(code: Code, cycles: float) -> float:
    """Returns the TFLOP/s of a launch of `cycles`."""
    pairs = SHAPE.heads * SHAPE.batch * SHAPE.length**2 / (2 if code.key.band else 1)
    flops = 2 * (3 * code.key.head_dim + 2 * code.key.value_dim) * pairs
    return flops / cycles * BLACKWELL.clock_ghz / 1e3


def row(tile: tuple[int, int, bool], is_causal: bool) -> str:
    """Returns a row of the table."""
    figures, cells = [], []
    head_dim, value_dim, pair = tile
    for deterministic in (False, True):
        code = built(
            KernelKey(
                *("sm_100f", Pass.BACKWARD, "bf16", head_dim),
                band=is_causal,
                deterministic=deterministic,
                value_dim=value_dim,
                pair=pair,
            )
        )
        cost = cost_of(code)
        rates = of_takers(code.launch.cluster[0])
        tiles = backward_tiles(code, cost, SHAPE, section_of(code))
        figures.append(teraflops(code, Grid(rates, _AHEAD).run(tiles)))
        cells += [f"{cost.step:.0f}", f"{cost.start:.0f}", f"{figures[-1]:.0f}"]
    mask = "causal" if is_causal else "dense"
    price = 100 * (figures[0] / figures[1] - 1)
    design = ", pair" if pair else ""
    return f"| {head_dim}, {value_dim} {mask}{design} | {' | '.join(cells)} | {price:.0f} % |"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    print(f"{SHAPE}; cycles of a step, beside, TFLOP/s:")
    print(
        "| d, dv | fast: step | beside | TFLOP/s | deterministic: step | beside | TFLOP/s | price |"
    )
    print("|---" * 8 + "|")
    for tile in TILES:
        for is_causal in (False, True):
            print(row(tile, is_causal), flush=True)


if __name__ == "__main__":
    main()
