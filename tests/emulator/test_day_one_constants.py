"""Microbenchmarks of what only Blackwell has: their machine code, and that the timing model, asked
about these programs, gives the constants that it was given."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from benchmarks.day_one import constants
from benchmarks.micro import tensor_memory
from benchmarks.micro.program import BLACKWELL, ENTRY, FIELDS, PASSES, Measurement, Program
from kernels import emulator
from kernels.build import cubin_info
from kernels.emulator import Policy
from kernels.emulator.machine.trace import Trace
from kernels.emulator.timing.rates import BLACKWELL as B200
from kernels.emulator.timing.replay import estimate

RESULTS, DATA = 0x1000_0000, 0x4000_0000
PROGRAMS = {m.name: m for m in tensor_memory.measurements()}
PTXAS = shutil.which("ptxas")
OPCODES = {"tcgen05.ld": (0x9EE,), "tcgen05.mma": (0x5EA, 0x9EA)}
CLOCK = (0x805, 0x50)  # CS2R of SR_CLOCKLO


@pytest.mark.parametrize("name", PROGRAMS)
def test_machine_code_has_what_is_counted(name: str, tmp_path: Path):
    """The second loop has exactly as many more instructions as the constant is divided by."""
    if PTXAS is None:
        pytest.skip("no ptxas on the PATH")
    program = PROGRAMS[name].program
    assert isinstance(program, Program)
    (tmp_path / "text.ptx").write_text(program.ptx(BLACKWELL))
    command = [PTXAS, f"-arch={BLACKWELL}", "text.ptx", "-o", "text.cubin"]
    subprocess.run(command, cwd=tmp_path, check=True)
    cubin = (tmp_path / "text.cubin").read_bytes()
    assert cubin_info.read(cubin)[ENTRY].stack_bytes == 0
    code = cubin_info.instructions(cubin, ENTRY)
    reads = [i for i, x in enumerate(code) if (cubin_info.opcode(x), x[1] >> 8 & 0xFF) == CLOCK]
    assert len(reads) == 4
    ((mnemonic, count),) = program.counts.items()
    short, long = (
        sum(cubin_info.opcode(x) in OPCODES[mnemonic] for x in code[begin:end])
        for begin, end in ((reads[0], reads[1]), (reads[2], reads[3]))
    )
    assert (short, long - short) == (count * program.copies, count * program.copies)


def cycles(measurement: Measurement, program: Program, repeats: int) -> float:
    """What the timing model says of a program."""
    launch, text = measurement.launch, program.ptx(BLACKWELL)
    for number in range(4):  # the emulator's clock is a seed's
        text = text.replace(f"mov.u64 %clock{number}, %clock64;", f"mov.b64 %clock{number}, 0;")
    text = text.replace("mov.u32 %word, %smid;", "mov.b32 %word, 0;")
    trace = Trace(frozenset(range(launch.ctas)))
    emulator.launch(
        text,
        ENTRY,
        grid=(launch.ctas, 1, 1),
        block=(launch.threads, 1, 1),
        cluster=(program.cluster, 1, 1),
        dynamic_smem=launch.shared_bytes,
        params=[
            bytes(128),
            RESULTS.to_bytes(8, "little"),
            DATA.to_bytes(8, "little"),
            repeats.to_bytes(4, "little"),
        ],
        memory={RESULTS: np.zeros(1 << 17, np.uint8), DATA: np.zeros(1 << 16, np.uint8)},
        policy=Policy("in_order", "early"),
        trace=trace,
    )
    return estimate(trace, B200).cycles


def value(name: str) -> float:
    """What a microbenchmark would give if the timing model were right."""
    measurement = PROGRAMS[name]
    program, launch = measurement.program, measurement.launch
    assert isinstance(program, Program)
    # The model has no clock: programs with as many copies and twice as many take the loops' place.
    few = dataclasses.replace(program, copies=4)
    twice = dataclasses.replace(program, copies=8)
    short, long = (cycles(measurement, x, 4) - cycles(measurement, x, 2) for x in (few, twice))
    of_copy = (long - short) / (2 * 3 * PASSES * 4)
    words = np.zeros((1, 1, launch.threads // 32, FIELDS), np.int64)
    words[..., 3] = round(of_copy * launch.repeats * program.copies)
    return measurement.constant(words, launch)


@pytest.mark.parametrize(
    "field", ["mma_flops", "mma_latency", "tensor_memory_bytes", "tensor_memory_latency"]
)
def test_the_model_gives_its_own_constants_back(field: str):
    names, convert = constants.sources(BLACKWELL)[field]
    barrier = {"mbarrier/arrive": 0.0, "mbarrier/arrive to wait": B200.barrier_latency}
    values = [barrier[name] if name in barrier else value(name) for name in names]
    assert convert(*values) == pytest.approx(getattr(B200, field), rel=0.02), values


@pytest.mark.parametrize("product", tensor_memory.products(), ids=lambda x: x.name)
def test_the_models_time_of_a_shape_is_what_the_report_says(product: tensor_memory.Product):
    """The programs of pairs, too, run without breaking a rule of the emulator."""
    name = f"{product.name}/throughput"
    (shape,) = constants.shapes(BLACKWELL, {name: 1.0})
    assert value(name) == pytest.approx(shape.model, rel=0.02)
