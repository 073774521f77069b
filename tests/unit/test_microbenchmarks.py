"""Tests the microbenchmarks' programs: machine code, work, the constants from clocks."""

from __future__ import annotations

import functools
import itertools
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import microbenchmarks
from benchmarks.micro import grids
from benchmarks.micro.program import (
    ENTRY,
    FIELDS,
    PASSES,
    Chase,
    Launch,
    Measurement,
    Program,
    cycles_of_copy,
    latency,
    rate,
)
from kernels import emulator
from kernels.build import cubin_info
from kernels.emulator.tensor_map import TensorMap, encode

PTXAS = shutil.which("ptxas")
_ALL = {measurement.name: measurement for measurement in microbenchmarks.measurements()}
_CLOCK = (0x805, 0x50)  # CS2R of SR_CLOCKLO
_BARRIER = 0xB1D

OPCODES = {
    "fma.rn.f32": {0x223},
    "add.f32": {0x221},
    "mul.f32": {0x220},
    "max.f32": {0x209},
    "max.NaN.f32": {0x209},
    "add.s32": {0x210, 0x824},  # IADD3, IMAD.IADD
    "lop3.b32": {0x212},
    "selp.b32": {0x207},
    "setp.lt.f32": {0x20B},
    "setp.lt.and.f32": {0x20B},
    "ex2.approx.ftz.f32": {0x308},
    "rcp.approx.ftz.f32": {0x308},
    "lg2.approx.ftz.f32": {0x308},
    "cvt.rn.bf16x2.f32": {0x23E},
    "shfl.sync.bfly.b32": {0xF89},
    "mov.b32": {0x202, 0x224},  # MOV, IMAD.MOV
    "ld.shared": {0x984},
    "ld.volatile.shared": {0x984},
    "st.shared": {0x388, 0x988},
    "st.volatile.shared": {0x388, 0x988},
    "stmatrix": {0x844},
    "fence.proxy.async": {0x3C6},
    "bar.sync": {_BARRIER},
    "mbarrier.arrive": {0x9A7},
    "mbarrier.arrive.release.cluster": {0x9A7},
    "cp.async.bulk.shared::cluster": {0x3BA},
    "mbarrier.try_wait": {0x5A7},
    "wgmma.mma_async": {0x9F0, 0xDF0},
    "cp.async.bulk.tensor.2d.shared": {0x5B4},
    "cp.async.bulk.tensor.4d.shared": {0x5B4},
    "cp.async.bulk.tensor.2d.global": {0x3B5},
    "cp.async.bulk.tensor.4d.global": {0x3B5},
    "cp.async.bulk.shared": {0x3BA},
    "ld.global": {0x981},
    "ld.acquire": {0x981},
    "red.relaxed": {0x9A6, 0x98E},
    "red.release": {0x98E},
    "st.release": {0x986},
    "st.global": {0x986},
}
"""The machine instructions that a counted PTX instruction, by its longest prefix here, becomes."""


def _opcodes(mnemonic: str) -> set[int]:
    return OPCODES[max((name for name in OPCODES if mnemonic.startswith(name)), key=len)]


@functools.cache
def _programs() -> dict[str, Measurement]:
    """Returns one measurement for each text."""
    return {m.program.ptx(): m for m in reversed(_ALL.values())}


def _assemble(text: str, folder: Path) -> tuple[bytes, str]:
    if PTXAS is None:
        pytest.skip("no ptxas on the PATH")
    (folder / "text.ptx").write_text(text)
    command = [PTXAS, "-arch=sm_90a", "-v", "text.ptx", "-o", "text.cubin"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return (folder / "text.cubin").read_bytes(), done.stderr


def _timed_opcodes(cubin: bytes) -> list[list[int]]:
    """Returns the opcodes between the clock reads of the two loops."""
    code = cubin_info.instructions(cubin, ENTRY)
    reads = [
        i for i, word in enumerate(code) if (cubin_info.opcode(word), word[1] >> 8 & 0xFF) == _CLOCK
    ]
    assert len(reads) == 4
    return [
        [cubin_info.opcode(word) for word in code[begin:end]]
        for begin, end in ((reads[0], reads[1]), (reads[2], reads[3]))
    ]


@pytest.mark.parametrize("group", microbenchmarks.GROUPS, ids=lambda g: g.__name__.split(".")[-1])
def test_machine_code_has_what_is_counted(group, tmp_path):
    names = {m.name for m in group.measurements()}
    for text, measurement in _programs().items():
        if measurement.name not in names:
            continue
        cubin, said = _assemble(text, tmp_path)
        assert "serialized" not in said, measurement.name
        assert cubin_info.read(cubin)[ENTRY].stack_bytes == 0, measurement.name
        program = measurement.program
        if not isinstance(program, Program):
            continue
        short, long = _timed_opcodes(cubin)
        expected: dict[frozenset[int], int] = {}
        for mnemonic, count in program.counts.items():
            key = frozenset(_opcodes(mnemonic))
            expected[key] = expected.get(key, 0) + count
        for opcodes, count in expected.items():
            more = sum(o in opcodes for o in long) - sum(o in opcodes for o in short)
            assert more == program.copies * count, (measurement.name, program.counts)


def test_a_shortened_chain_is_noticed(tmp_path):
    """ptxas leaves out a reciprocal's reciprocal, and would leave out what is measured."""
    program = Program(
        body=lambda copies: "rcp.approx.ftz.f32 %a0, %a0;\n" * copies,
        copies=8,
        counts={"rcp.approx.ftz.f32": 1},
        registers=".reg .b32 %a<1>;",
        setup="mov.b32 %a0, %thread;",
        sinks=("%a0",),
    )
    short, long = _timed_opcodes(_assemble(program.ptx(), tmp_path)[0])
    assert sum(o == 0x308 for o in long) - sum(o == 0x308 for o in short) < 8


RESULTS, DATA = 0x1000_0000, 0x4000_0000
EMULATED = [
    *(f"{name}/latency" for name in ("fma.rn.f32", "add.s32", "setp+selp")),
    *(f"{name}/throughput/4 warps" for name in ("ex2+3 fma", "mov.b32", "shfl.sync.bfly.b32")),
    *(f"ld.shared.v{n}.b32/throughput/4 warps" for n in (2, 4)),
    "ld.shared.b32 of 8-way conflicts/throughput/4 warps",
    "ld.shared.v4.b32/latency",
    "st.shared.v4.b32/throughput/4 warps",
    "stmatrix.x4/throughput/4 warps",
    "st.shared.v4+fence.proxy.async/latency/8 warps",
    "bar.sync/128 threads",
    "mbarrier/arrive to wait",
    "mbarrier/try_wait that succeeds",
    "mbarrier/arrive",
    "cluster/arrive to wait",
    "wgmma/m64n64k16/ss/throughput/2 warpgroups",
    "wgmma/m64n80k16/rs/throughput/1 warpgroups",
    "wgmma/m64n128k16/ss n-major b/throughput/1 warpgroups",
    "wgmma/m64n64k16/rs/latency",
    *(f"tma load/{rank}d/8 KB/latency/{place}/1 SM" for rank in (2, 4) for place in ("L2", "DRAM")),
    "tma load/2d/16 KB x 4/bandwidth/L2/all SMs",
    "tma load/4d/16 KB x 8/bandwidth/DRAM/all SMs",
    "tma load/2d/32 KB x 4/bandwidth/DRAM/1 SM",
    "tma store/2d/8 KB/latency until written",
    "tma store/4d/16 KB x 4/bandwidth/L2/all SMs",
    "bulk load/512 bytes/latency/L2/1 SM",
    "red.global.add.v4.f32/throughput/128 threads/all SMs",
    *(f"ld.global/latency/{place}" for place in ("L1", "L2", "DRAM")),
    "stream/4 ld.global + 2 st.global/bandwidth/DRAM/all SMs",
    "ld.global.cg.v4/bandwidth/16 MB, 4 SMs to a part/all SMs",
    "ld.acquire.gpu/latency",
    *(f"signal/{send} to ld.acquire" for send in ("red.release", "st.release")),
]


@pytest.mark.parametrize("name", EMULATED)
def test_programs_run_and_do_what_is_counted(name):
    measurement = _ALL[name]
    program, launch = measurement.program, measurement.launch
    assert isinstance(program, Program)
    repeats, ctas, warps = 2, launch.ctas or 2, launch.threads // 32
    results, report = _emulate(measurement, repeats, ctas)
    executed = sum(report.instructions, start=type(report.instructions[0])())
    copies = PASSES * repeats * 3 * program.copies * warps * ctas
    for mnemonic, count in program.counts.items():
        extra = executed[mnemonic] - copies * count
        # Warps that wait try again; streams fetch their first tiles before the loops.
        assert extra >= 0, mnemonic
        if not mnemonic.startswith(("mbarrier", "bar.", "cp.async", "mov", "fence", "st.shared")):
            assert extra < 100 * warps * ctas, mnemonic
    if name.startswith("wgmma") and "rs" not in name.split("/")[2]:
        # It multiplies ones by ones: every product adds 16 to every element.
        sinks = results[ctas * warps * 8 * FIELDS :].view(np.float32)[: launch.threads]
        np.testing.assert_array_equal(sinks, 16 * PASSES * repeats * 3 * program.copies)


def _emulate(
    measurement: Measurement, repeats: int, ctas: int
) -> tuple[np.ndarray, emulator.Report]:
    launch, text = measurement.launch, measurement.program.ptx()
    for number in range(4):  # the emulator has no clock and no multiprocessors
        text = text.replace(f"mov.u64 %clock{number}, %clock64;", f"mov.b64 %clock{number}, 0;")
    text = text.replace("mov.u32 %word, %smid;", "mov.b32 %word, 0;")
    results, data = np.zeros(1 << 16, np.uint8), np.zeros(1 << 30, np.uint8)
    if launch.chase is not None:
        ring = launch.chase.words(DATA).view(np.uint8)
        data[: ring.size] = ring
    descriptor = bytes(128)
    if launch.tensor is not None:
        tensor = launch.tensor
        descriptor = encode(
            TensorMap(DATA, "bf16", tensor.sizes, tensor.byte_strides, tensor.box, 0, 128)
        )
    report = emulator.launch(
        text,
        ENTRY,
        grid=(ctas, 1, 1),
        block=(launch.threads, 1, 1),
        cluster=(getattr(measurement.program, "cluster", 1), 1, 1),
        dynamic_smem=launch.shared_bytes,
        params=[
            descriptor,
            RESULTS.to_bytes(8, "little"),
            DATA.to_bytes(8, "little"),
            repeats.to_bytes(4, "little"),
        ],
        memory={RESULTS: results, DATA: data},
    )
    return results, report


@pytest.mark.parametrize("stride", [128, 8320])
def test_pointers_make_one_ring(stride):
    address, region = 1 << 20, 1 << 16
    words = Chase(stride, region).words(address)
    at, seen = address, set()
    while at not in seen:
        seen.add(at)
        at = int(words[(at - address) // 8])
    assert at == address
    assert seen == {address + i * stride for i in range(region // stride)}


def _clocks(short: list[int], long: list[int], start: int = 1000) -> np.ndarray:
    """Returns the words of one CTA whose warps take this long for the loops."""
    words = np.zeros((1, 1, len(short), FIELDS), np.int64)
    words[0, 0, :, 0], words[0, 0, :, 1] = start, start + np.array(short)
    words[0, 0, :, 2], words[0, 0, :, 3] = 2 * start, 2 * start + np.array(long)
    return words


def test_constants_from_clocks():
    program = Program(lambda copies: "", copies=4, counts={"a": 2, "b": 1})
    launch = Launch(threads=64, repeats=10)
    words = _clocks([100, 130], [400, 530])
    assert cycles_of_copy(words, launch, 4) == (530 - 130) / 40
    # Of several CTAs the slowest counts.
    both = np.concatenate([words, _clocks([90], [190]).repeat(2, axis=2)], axis=1)
    assert cycles_of_copy(both, launch, 4) == (530 - 130) / 40
    assert latency("x", program, launch, events=2).constant(words, launch) == 5
    lanes = rate("x", "lanes", program, launch, per_instruction=32)
    assert lanes.constant(words, launch) == 3 * 32 * 2 / 10


def test_gaps_between_grids_and_ctas():
    words = np.zeros((3, 2, 1, FIELDS), np.int64)
    for number, cta in itertools.product(range(3), range(2)):
        # The second launch puts its CTAs on the multiprocessors the other way round.
        sm = (cta + number) % 2
        start = 1000 * number + 50_000 * sm
        words[number, cta, 0, [0, 1, 4]] = (start, start + 400, sm)
    launch = Launch(threads=32, repeats=1, ctas=2, in_a_row=3)
    assert grids.between_grids(words, launch) == 600
    ctas = np.zeros((1, 4, 1, FIELDS), np.int64)
    ctas[0, :, 0, 0], ctas[0, :, 0, 1] = [900, 0, 70, 600], [1000, 500, 570, 650]
    ctas[0, :, 0, 4] = [0, 0, 1, 1]
    assert grids.between_ctas(ctas, launch) == np.median([400, 30])


def test_names_are_unique_and_the_table_has_every_row(tmp_path):
    assert len(_ALL) == len(microbenchmarks.measurements())
    document = {
        "environment": {"device": "none", "sm_clock_mhz": 1.0},
        "measurements": [
            {"name": "a", "unit": "cycles", "value": 1.0, "low": 0.5, "high": 2.0},
            {"name": "b", "unit": "cycles", "error": "RuntimeError: broken"},
        ],
    }
    assert microbenchmarks.table(document).row_count == 2
    json.dumps(document)


class _FakeDriver:
    """The driver's API without a device: every launch leaves the clocks that it is given."""

    def __init__(self, words: np.ndarray, failing: str = ""):
        self._real = pytest.importorskip("cuda.bindings.driver")
        self._words, self._failing, self.launched = words, failing, []

    def __getattr__(self, name: str):
        if not name.startswith("cu") or name.startswith("cuuint"):
            return getattr(self._real, name)
        status = self._real.CUresult
        if name == self._failing:
            return lambda *_: (status.CUDA_ERROR_ILLEGAL_ADDRESS,)
        return lambda *arguments: (status.CUDA_SUCCESS, *self._answer(name, arguments))

    def _answer(self, name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        if name == "cuMemcpyDtoH":
            arguments[0].reshape(-1)[: self._words.size] = self._words.reshape(-1)
        elif name == "cuLaunchKernel":
            self.launched.append(arguments)
        elif name == "cuDeviceGetName":
            return (b"fake\0\0",)
        elif name == "cuEventElapsedTime":
            return (10.0,)
        silent = ("cuMemset", "cuMemcpy", "cuLaunch", "cuStreamQuery", "cuFuncSet", "cuEventRecord")
        silent += ("cuInit", "cuCtx")
        return () if name.startswith(silent) else (132,)


def _run_with(monkeypatch: pytest.MonkeyPatch, fake: _FakeDriver, path: Path) -> dict[str, Any]:
    from benchmarks.micro import device

    monkeypatch.setattr(device, "driver", fake)
    monkeypatch.setattr(microbenchmarks, "_WARM_UP", 1)
    chosen = [_ALL[name] for name in ("fma.rn.f32/latency", "tma load/4d/8 KB/latency/L2/1 SM")]
    microbenchmarks.run(chosen, 3, path)
    return json.loads(path.read_text())


def test_a_run_writes_what_was_measured(monkeypatch, tmp_path):
    fake = _FakeDriver(_clocks([1000], [1000 + 64 * 32 * 4]))
    document = _run_with(monkeypatch, fake, tmp_path / "out.json")
    first, second = document["measurements"]
    assert first["name"] == "fma.rn.f32/latency"
    assert first["value"] == first["low"] == first["high"] == 4
    assert second["value"] == 64 * 32 * 4 / (16 * 4)
    assert document["environment"]["multiprocessors"] == 132
    assert document["environment"]["sm_clock_mhz"] == 2000
    # The arguments of every launch: function, grid, block, shared memory, stream, parameters.
    assert {call[1:7] for call in fake.launched[-6:-2]} == {(1, 1, 1, 32, 1, 1)}


def test_a_run_that_fails_keeps_what_it_has(monkeypatch, tmp_path):
    fake = _FakeDriver(_clocks([1], [2]), failing="cuMemcpyDtoH")
    monkeypatch.setattr("benchmarks.micro.device.Device.clock_mhz", lambda _: 1.0)
    document = _run_with(monkeypatch, fake, tmp_path / "out.json")
    (record,) = document["measurements"]
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in record["error"] and "value" not in record
