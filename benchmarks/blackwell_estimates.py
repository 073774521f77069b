"""Estimates what the Blackwell forward and tangents take, and their roofline.

    python -m kernels.build --only "sm_100f_[ft]*_bf16_*"
    python -m benchmarks.blackwell_estimates    # prints the table; writes timelines

Only documented rates are Blackwell's own; the rest of `rates.BLACKWELL` is assumed to be Hopper's
(`rates.BLACKWELL.assumed`). So the table says which unit binds, rather than how fast it will be.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib

from benchmarks.grid_model.recording import PAGE, Code, Sizes, built, record
from fa4_jax import catalogue
from fa4_jax.key import KernelKey, Pass
from kernels.emulator.timing.rates import BLACKWELL
from kernels.emulator.timing.replay import Timing, estimate
from kernels.emulator.timing.timeline import chrome_trace, plot

HEAD_DIMS = (64, 128, 192, 256)
LENGTH = 8192
_PRODUCTS = {Pass.FORWARD: 2, Pass.TANGENT: 5}
"""Products of a block; the first half of them, rounded up, reads queries from shared memory."""
_FEW, _MANY = 4, 16
_UNITS = ("tensor core", "special", "shared", "issue", "TMA load")


@dataclasses.dataclass(frozen=True)
class Step:
    """What a key block of a CTA's or pair's query tiles costs.

    Attributes:
      cycles: what each block in the middle of a tile takes.
      tile: what a tile takes in addition to its blocks.
      busy: for how many cycles each unit is busy.
    """

    cycles: float
    tile: float
    busy: dict[str, float]


def timing_of(code: Code, tiles: int, blocks: int) -> Timing:
    """Estimates a CTA or pair with `tiles` tiles of query rows, of one head each, and `blocks` key
    blocks.
    """
    m, keys = code.tile["m"], code.tile["n"] * blocks
    problem = Sizes(tiles, m, keys, max(keys - m, 0) if code.key.band else 0)
    return estimate(record(code, problem), BLACKWELL)


def step_of(code: Code) -> Step:
    """Returns the step of CTAs of two and four tiles with 4 and 16 blocks each."""
    few, many, more = (timing_of(code, *x) for x in ((2, _FEW), (2, _MANY), (4, _FEW)))
    blocks = 2 * (_MANY - _FEW)
    cycles = (many.cycles - few.cycles) / blocks
    busy = {unit: (many.busy[unit] - few.busy[unit]) / blocks for unit in _UNITS}
    return Step(cycles, (more.cycles - few.cycles) / 2 - _FEW * cycles, busy)


def teraflops(code: Code, step: Step) -> float:
    """Returns the TFLOP/s of all multiprocessors at LENGTH, each with many tiles."""
    m, n = code.tile["m"], code.tile["n"]
    tiles = LENGTH // m
    blocks = [-(-(tile + 1) * m // n) if code.key.band else LENGTH // n for tile in range(tiles)]
    cycles = sum(step.tile + step.cycles * count for count in blocks)
    products = _PRODUCTS[code.key.kernel]
    flops = 2 * products * LENGTH**2 * code.key.head_dim / (2 if code.key.band else 1)
    takers = BLACKWELL.multiprocessors / code.launch.cluster[0]
    return flops / cycles * takers * BLACKWELL.clock_ghz / 1e3


def row(key: KernelKey) -> str:
    """Returns a row of the table."""
    code = built(key)
    step, m, n, d = step_of(code), code.tile["m"], code.tile["n"], key.head_dim
    ctas = code.launch.cluster[0]
    rows, keys = m // ctas, n // ctas
    count = _PRODUCTS[key.kernel]
    products = 2 * count * rows * n * d / BLACKWELL.mma_flops
    exponentials = rows * n / 16
    loads = -(-count // 2) * 128 + count * keys
    operands = rows // 128 * loads * d * 2 / BLACKWELL.shared_bytes
    mask = "causal" if key.band else "dense"
    design = ", tangents" if key.kernel is Pass.TANGENT else ""
    design += ", polynomial" if key.polynomial_exp2 else ""
    design += ", pair" if ctas == 2 else ""
    design += f", pages of {PAGE}" if key.paged else ""
    roofline = f"{products:.0f}, {exponentials:.0f}, {operands:.0f}"
    shares = " | ".join(f"{100 * step.busy[unit] / step.cycles:.0f} %" for unit in _UNITS)
    return (
        f"| {d} {mask}{design} | {m} x {n} | {roofline} "
        f"| {step.cycles:.0f} | {step.tile:.0f} | {shares} | {teraflops(code, step):.0f} |"
    )


def main() -> None:
    """Prints the table and writes the timeline."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    results = pathlib.Path(__file__).parent / "results"
    parser.add_argument("--output", type=pathlib.Path, default=results, metavar="FOLDER")
    folder: pathlib.Path = parser.parse_args().output
    print("| d, mask | tile x block | T_mma, T_exp, T_smem | cycles | beside | ", end="")
    print(" | ".join(_UNITS) + " | TFLOP/s |\n" + "|---" * (6 + len(_UNITS)) + "|")
    keys = [key for key in catalogue.keys("sm_100f") if key.kernel in _PRODUCTS]
    plain = [key for key in keys if not (key.ranges or key.bias)]
    chosen = [key for key in plain if key.dtype == "bf16" and key.head_dim in HEAD_DIMS]
    order = {kernel: place for place, kernel in enumerate(_PRODUCTS)}
    for key in sorted(
        chosen, key=lambda key: (order[key.kernel], key.head_dim, key.pair, key.polynomial_exp2)
    ):
        print(row(key), flush=True)
    for key in chosen:
        if (
            key.kernel is Pass.FORWARD
            and key.head_dim == 128
            and not key.band
            and key.polynomial_exp2
        ):
            name = "b200-forward-d128-" + ("pair-" if key.pair else "") + "timeline"
            timing = timing_of(built(key), 1, 8)
            plot(timing, folder / f"{name}.png")
            (folder / f"{name}.json").write_text(chrome_trace(timing))


if __name__ == "__main__":
    main()
