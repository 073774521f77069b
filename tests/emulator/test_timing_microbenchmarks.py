"""The timing model on the microbenchmarks' own programs, beside what an H200 measured.

Single constants come from these measurements, so that alone proves little; mixtures do not: units
that share the issue slot, products and stores that share shared memory's port, warps in a barrier.
"""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest

from benchmarks import microbenchmarks
from benchmarks.micro.program import ENTRY, FIELDS, PASSES, Measurement, Program
from kernels import emulator
from kernels.emulator import Policy
from kernels.emulator.machine.trace import Trace
from kernels.emulator.timing.rates import HOPPER
from kernels.emulator.timing.replay import estimate

RESULTS, DATA = 0x1000_0000, 0x4000_0000
_PATH = pathlib.Path("benchmarks/results/nvidia-h200-microbenchmarks.json")
MEASURED = {m["name"]: m["value"] for m in json.loads(_PATH.read_text())["measurements"]}
PROGRAMS = {m.name: m for m in microbenchmarks.measurements()}

# Largest relative error, by name.
BOUNDS = {
    "fma+lop3/throughput/8 warps": 0.05,
    "ex2+3 fma/throughput/8 warps": 0.05,
    "ex2+7 fma/throughput/16 warps": 0.05,
    "cvt+3 fma/throughput/8 warps": 0.12,
    "st.shared.v4.b32/throughput/8 warps": 0.05,
    "bar.sync/128 threads": 0.1,
    "bar.sync/256 threads": 0.1,
    "mbarrier/arrive to wait": 0.05,
    "mbarrier/try_wait that succeeds": 0.05,
    "wgmma/m64n32k16/ss/throughput/2 warpgroups": 0.05,
    "wgmma/m64n128k16/rs/throughput/2 warpgroups": 0.05,
    "wgmma/m64n64k16/ss/latency": 0.05,
    "wgmma/m64n128k16/ss/latency": 0.05,
    "wgmma/m64n64k16/ss + 2 st.shared.v4/throughput/1 warpgroups": 0.05,
    "wgmma/m64n128k16/ss + 4 st.shared.v4/throughput/1 warpgroups": 0.05,
    "wgmma/m64n128k16/rs + 2 st.shared.v4/throughput/1 warpgroups": 0.07,
}


def _cycles(measurement: Measurement, repeats: int) -> float:
    launch, text = measurement.launch, measurement.program.ptx()
    for number in range(4):  # the emulator has neither a clock nor multiprocessors
        text = text.replace(f"mov.u64 %clock{number}, %clock64;", f"mov.b64 %clock{number}, 0;")
    text = text.replace("mov.u32 %word, %smid;", "mov.b32 %word, 0;")
    trace = Trace()
    emulator.launch(
        text,
        ENTRY,
        grid=(1, 1, 1),
        block=(launch.threads, 1, 1),
        dynamic_smem=launch.shared_bytes,
        params=[
            bytes(128),
            RESULTS.to_bytes(8, "little"),
            DATA.to_bytes(8, "little"),
            repeats.to_bytes(4, "little"),
        ],
        memory={RESULTS: np.zeros(1 << 17, np.uint8), DATA: np.zeros(1 << 16, np.uint8)},
        policy=Policy(races=False),
        trace=trace,
    )
    return estimate(trace, HOPPER).cycles


@pytest.mark.parametrize("name", BOUNDS)
def test_the_model_gives_what_was_measured(name: str) -> None:
    measurement = PROGRAMS[name]
    program, launch = measurement.program, measurement.launch
    assert isinstance(program, Program)
    # Both loops, as many as there are passes: three times the copies of the first.
    copies = program.copies * 3 * PASSES
    cycles_of_copy = (_cycles(measurement, 4) - _cycles(measurement, 2)) / (2 * copies)
    words = np.zeros((1, 1, launch.threads // 32, FIELDS), np.int64)
    words[..., 3] = round(cycles_of_copy * launch.repeats * program.copies)
    found = measurement.constant(words, launch)
    assert found == pytest.approx(MEASURED[name], rel=BOUNDS[name])
