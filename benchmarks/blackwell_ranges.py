"""Estimates what ranges in memory cost Blackwell's kernels, block by block.

    python -m kernels.build --arch sm_100f
    python -m benchmarks.blackwell_ranges

Of a key block (forward) or a step (backward) of the kernel with a band, and of the one with ranges:
where they hide nothing, where they hide a key by limits, where tags have to be compared, and where
they hide nothing but scores are capped. In the forward a limit is an edge of a tile's blocks, as in
a band, so only tags are listed there.
"""

from __future__ import annotations

import argparse
import dataclasses

from benchmarks.grid_model.recording import Hidden, Sizes, built, record
from fa4_jax import catalogue
from fa4_jax.key import KernelKey, Pass
from kernels.emulator.timing.rates import BLACKWELL
from kernels.emulator.timing.replay import estimate

_FEW, _MANY = 4, 16


def cycles(
    key: KernelKey, hidden: Hidden = "nothing", soft_cap: float = 0.0
) -> tuple[float, float]:
    """Returns the cycles of a block or step, and those that a tile has besides.

    No pair is hidden by causality.
    """
    code = built(key)
    m, n = code.tile["m"], code.tile["n"]
    rates = BLACKWELL.alone() if key.kernel is Pass.BACKWARD else BLACKWELL

    def of(tiles: int, blocks: int) -> float:
        rows, keys = (m * blocks, n) if key.kernel is Pass.BACKWARD else (m, n * blocks)
        sizes = Sizes(tiles, rows, keys, keys, hidden, soft_cap)
        return estimate(record(code, sizes), rates).cycles

    if key.kernel is Pass.BACKWARD:
        few = of(1, _FEW)
        step = (of(1, _MANY) - few) / (_MANY - _FEW)
        return step, few - _FEW * step
    few = of(2, _FEW)
    block = (of(2, _MANY) - few) / (2 * (_MANY - _FEW))
    return block, (of(4, _FEW) - few) / 2 - _FEW * block


def row(key: KernelKey) -> str:
    """Returns a row of the table; key: of a kernel with ranges."""
    plain, plain_beside = cycles(dataclasses.replace(key, ranges=False))
    nothing, beside = cycles(key)
    forward = key.kernel is Pass.FORWARD
    costs = [cycles(key, hidden)[0] for hidden in ("limits", "tags")]
    costs.append(cycles(key, soft_cap=50.0)[0])
    limits, tags, capped = (f"{x:.0f} ({x / nothing:.2f})" for x in costs)
    return (
        f"| {key.name.removeprefix('sm_100f_')} | {plain:.0f} | {nothing:.0f} "
        f"({nothing / plain:.3f}) | {'' if forward else limits} | {tags} "
        f"| {capped} "
        f"| {plain_beside:.0f} | {beside:.0f} |"
    )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    print("| kernel | band | nothing hidden | limits | tags | soft cap | beside: band | ranges |")
    print("|---" * 8 + "|")
    for key in catalogue.keys("sm_100f"):
        if key.ranges and key.dtype == "bf16" and not key.deterministic:
            print(row(key), flush=True)


if __name__ == "__main__":
    main()
