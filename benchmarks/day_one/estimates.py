"""Estimates the cells that a first day times, by the timing model.

    python -m kernels.build
    python -m benchmarks.day_one.estimates    # writes benchmarks/results/day-one-estimates.json

For Hopper these are a forward's launch and a backward's three, on `benchmarks.grid_model`.
For Blackwell they are the forward's tiles on all multiprocessors (`benchmarks.blackwell_estimates`)
and the backward's main kernel alone (`benchmarks.blackwell_backward`).
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from benchmarks import blackwell_backward, blackwell_estimates
from benchmarks.day_one.litmus import BLACKWELL, BOTH, HOPPER
from benchmarks.day_one.speed import CELLS, ESTIMATES
from benchmarks.environment import answer
from benchmarks.flops import flops
from benchmarks.grid_model.estimates import Estimator, Shape, backward_tiles
from benchmarks.grid_model.grids import Grid
from benchmarks.grid_model.recording import built
from benchmarks.peers import DETERMINISTIC, OURS
from benchmarks.shapes import Case
from fa4_jax.key import POLYNOMIAL_EXP2_TILES, KernelKey, Pass
from kernels.emulator.timing.rates import BLACKWELL as B200
from kernels.emulator.timing.rates import RATES


def _key(arch: str, case: Case, kernel: Pass, deterministic: bool = False) -> KernelKey:
    main = kernel in (Pass.FORWARD, Pass.BACKWARD)
    polynomial = kernel == Pass.FORWARD and (arch, case.head_dim) in POLYNOMIAL_EXP2_TILES
    return KernelKey(
        *(arch, kernel, "bf16", case.head_dim),
        band=case.is_causal and main,
        deterministic=deterministic and kernel != Pass.BACKWARD_POST,
        polynomial_exp2=polynomial,
    )


def _rate(arch: str, case: Case, direction: str, cycles: float) -> float:
    return flops(case, direction) / cycles * RATES[arch].clock_ghz / 1e3


def _of_hopper(estimator: Estimator, case: Case) -> dict[str, dict[str, float]]:
    shape = Shape(case.batch, case.query_length, case.heads[0])

    def cycles(*keys: KernelKey) -> float:
        return sum(estimator.cycles(built(key), shape) for key in keys)

    found = {"forward": {OURS: cycles(_key(HOPPER, case, Pass.FORWARD))}, "backward": {}}
    for name, deterministic in ((OURS, False), (DETERMINISTIC, True)):
        kernels = (Pass.BACKWARD_PRE, Pass.BACKWARD, Pass.BACKWARD_POST)
        keys = [_key(HOPPER, case, kernel, deterministic) for kernel in kernels]
        found["backward"][name] = cycles(*keys)
    return {
        direction: {name: _rate(HOPPER, case, direction, x) for name, x in of_direction.items()}
        for direction, of_direction in found.items()
    }


def _of_blackwell(case: Case) -> dict[str, dict[str, float]]:
    code = built(_key(BLACKWELL, case, Pass.FORWARD))
    step = blackwell_estimates.step_of(code)
    found = {"forward": {OURS: blackwell_estimates.teraflops(code, step)}, "backward": {}}
    shape = Shape(case.batch, case.query_length, case.heads[0])
    for name, deterministic in ((OURS, False), (DETERMINISTIC, True)):
        code = built(_key(BLACKWELL, case, Pass.BACKWARD, deterministic))
        cost = blackwell_backward.cost_of(code)
        rates = blackwell_backward.of_takers(code.launch.cluster[0])
        tiles = backward_tiles(code, cost, shape, blackwell_backward.section_of(code))
        cycles = Grid(rates, 2).run(tiles)
        found["backward"][name] = flops(case, "backward") / cycles * B200.clock_ghz / 1e3
    return found


def main() -> None:
    """Writes the estimates."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=BOTH, help="keep the file's figures of the other one")
    only = parser.parse_args().only
    document: dict[str, Any] = json.loads(ESTIMATES.read_text()) if ESTIMATES.exists() else {}
    estimator = Estimator()
    for arch in BOTH if only is None else (only,):
        cells = {}
        for case in CELLS:
            cells[case.id] = _of_hopper(estimator, case) if arch == HOPPER else _of_blackwell(case)
            print(arch, case.id, cells[case.id], flush=True)
        document[arch] = {"commit": answer("git", "rev-parse", "HEAD"), "cells": cells}
        ESTIMATES.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
