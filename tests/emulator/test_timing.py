"""Timing estimates of programs whose time is known in closed form, and of a forward."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import pathlib

import numpy as np
import pytest

from fa4_jax.conformance.cases import Case
from fa4_jax.conformance.oracle import make_inputs
from kernels import emulator
from kernels.emulator import Policy
from kernels.emulator.driver import arguments
from kernels.emulator.machine.trace import Trace
from kernels.emulator.timing.rates import BLACKWELL, HOPPER, measured
from kernels.emulator.timing.replay import Timing, estimate
from kernels.emulator.timing.resources import TensorCore
from kernels.emulator.timing.timeline import chrome_trace, plot
from tests.emulator import programs, sm100_programs, sm100_ptx
from tests.emulator.attention import attention, ptx
from tests.emulator.sm100_programs import GEMM, PAIR
from tests.emulator.sm100_ptx import registers

RATES = dataclasses.replace(
    HOPPER,
    **dict.fromkeys(("barrier_latency", "wait_latency", "cta_latency"), 0.0),
    **dict.fromkeys(("named_barrier_latency", "named_barrier_warp"), 0.0),
)


def timed(
    body: str,
    threads: int = 32,
    resident: int = 1,
    grid: int = 1,
    cluster: int = 1,
    recorded: int | None = None,
) -> Timing:
    """The estimate of a body between the usual head and tail."""
    trace = Trace(frozenset(range(recorded or grid)))
    emulator.launch(
        programs.HEAD.format(threads=threads) + body + programs.TAIL,
        "test",
        grid=(grid, 1, 1),
        block=(threads, 1, 1),
        cluster=(cluster, 1, 1),
        dynamic_smem=8192,
        params=[programs.ADDRESS.to_bytes(8, "little")],
        memory={programs.ADDRESS: np.zeros(4096, np.uint32)},
        trace=trace,
    )
    return estimate(trace, RATES, resident)


def cost(body: str, threads: int = 32) -> float:
    """Cycles that a body adds to one like it."""
    return timed(body + body, threads).cycles - timed(body, threads).cycles


N = 64
CHAIN = "fma.rn.f32 %r5, %r5, %r5, %r5;\n" * N
INDEPENDENT = "".join(f"fma.rn.f32 %r{i + 10}, %r5, %r6, %r7;\n" for i in range(N))
SPECIAL = "".join(f"ex2.approx.ftz.f32 %r{i + 10}, %r5;\n" for i in range(N))
LOGIC = "".join(f"xor.b32 %r{i + 10}, %r5, %r6;\n" for i in range(N))
SHIFT_AND_ADD = "".join(
    f"{{ .reg .b32 n; shl.b32 n, %r5, 23; add.s32 %r{i + 10}, n, %r6; }}\n" for i in range(N)
)
SHIFT_AND_TWICE = SHIFT_AND_ADD.replace("n, %r6; }", "n, n; }")


@pytest.mark.parametrize(
    ("body", "threads", "cycles"),
    [
        (CHAIN, 32, N * RATES.arithmetic_latency),
        (CHAIN, 4 * 32, N * RATES.arithmetic_latency),
        # Four warps of a sub-partition hide each other's latency.
        (CHAIN, 16 * 32, N * RATES.arithmetic_latency),
        (INDEPENDENT, 32, N),
        (INDEPENDENT, 4 * 32, N),
        (INDEPENDENT, 8 * 32, 2 * N),
        (LOGIC, 32, N * 32 / RATES.alu_lanes),
        (SPECIAL, 32, N * 32 / RATES.special_lanes),
        (SPECIAL, 8 * 32, 2 * N * 32 / RATES.special_lanes),
        # The special function unit works while the others do.
        (SPECIAL + INDEPENDENT.replace("%r5, %r6", "%r8, %r9"), 32, N * 32 / RATES.special_lanes),
        ("mov.b32 %r5, %r6;\n" * N, 32, 0),
        # ptxas makes one IMAD of both, unless something else reads what was shifted.
        (SHIFT_AND_ADD, 32, N * 32 / RATES.multiply_lanes),
        (SHIFT_AND_TWICE, 32, 2 * N * 32 / RATES.alu_lanes),
    ],
)
def test_arithmetic(body: str, threads: int, cycles: float) -> None:
    assert cost(body, threads) == pytest.approx(cycles, abs=2)


def test_issue_slots_limit() -> None:
    """Eight chains of a sub-partition want twice the slots there are; some end after the others."""
    least = 2 * N * RATES.arithmetic_latency
    assert least <= cost(CHAIN, 32 * 32) <= 1.2 * least


def test_compiler_hides_latency() -> None:
    """Four chains, one after the other in the text, run side by side."""
    chains = "".join(f"fma.rn.f32 %r{i}, %r{i}, %r{i}, %r{i};\n" * 16 for i in range(10, 14))
    assert cost(chains) == pytest.approx(4 * 16, abs=2)


def test_barrier_waits_for_the_slowest() -> None:
    body = "setp.lt.u32 %p1, %r1, 32;\n@%p1 bra MEET;\n" + CHAIN + "MEET:\nbar.sync 0;"
    timing = timed(body, 64)
    assert timing.waits[0] == pytest.approx(N * RATES.arithmetic_latency, abs=16)
    assert 1 not in timing.waits
    names = {(interval.row, interval.name) for interval in timing.intervals}
    assert ("CTA 0 warp  0", "waits: barrier") in names


def test_bulk_load_takes_latency_and_bandwidth() -> None:
    load = """
    mbarrier.init.shared.b64 [%r2], 1;
    fence.mbarrier_init.release.cluster;
    add.s32 %r3, %r2, 1024;
    mbarrier.arrive.expect_tx.shared.b64 %rd5, [%r2], 2048;
    cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r3], [%rd1], 2048, [%r2];
    WAIT:
    mbarrier.try_wait.parity.shared.b64 %p3, [%r2], 0;
    @!%p3 bra WAIT;
    """
    lane = "setp.ne.b32 %p1, %r1, 0;\n@%p1 bra END;\n" + load + "END:"
    timing = timed(lane)
    taken = RATES.tma_latency + 2048 / RATES.tma_load_bytes
    assert taken <= timing.cycles <= taken + 120
    assert timing.busy["TMA load"] == 2048 / RATES.tma_load_bytes


def test_instructions_and_copies_share_the_port_between_products() -> None:
    """Copies that need 100 cycles of the port have 20 left if instructions take 20 of 100."""
    tensor_core = TensorCore()
    tensor_core.copies = 100.0
    tensor_core.interrupt(time=10.0, taken=20.0)
    tensor_core.idle(100.0)
    assert tensor_core.copies == 20.0


def test_copies_of_threads_arrive_after_the_latency_of_a_load() -> None:
    body = """
    setp.ne.b32 %p1, %r1, 0;
    @%p1 bra COPY;
    mbarrier.init.shared.b64 [%r2], 32;
    COPY:
    bar.sync 0;
    shl.b32 %r3, %r1, 2;
    add.s32 %r3, %r2, %r3;
    cp.async.ca.shared.global [%r3+1024], [%rd1], 4, 4;
    {more}
    cp.async.mbarrier.arrive.noinc.shared.b64 [%r2];
    WAIT:
    mbarrier.try_wait.parity.shared.b64 %p3, [%r2], 0;
    @!%p3 bra WAIT;
    """
    timing = timed(body.format(more=""))
    assert RATES.global_latency <= timing.cycles <= RATES.global_latency + 120
    more = "cp.async.ca.shared.global [%r3+2048], [%rd1], 4, 4;"
    second = timed(body.format(more=more))
    assert second.busy["shared"] - timing.busy["shared"] == 32 * 4 / RATES.shared_bytes
    assert second.cycles - timing.cycles <= 8


def test_loads_of_one_address() -> None:
    """They take the port for two cycles, where lanes with addresses of their own take four."""
    loads = "".join(
        f"ld.shared.v4.b32 {{%r{i}, %r{i + 1}, %r{i + 2}, %r{i + 3}}}, [%r3];\n"
        for i in range(20, 20 + 4 * 32, 4)
    )
    fill = "shl.b32 %r3, %r1, 4;\nadd.s32 %r3, %r2, %r3;\n"
    fill += "st.shared.v4.b32 [%r3], {%r1, %r1, %r1, %r1};\nbar.sync 0;\n"
    same, other = (
        timed(fill + where + loads, threads=512).busy["shared"]
        - timed(fill + where, threads=512).busy["shared"]
        for where in ("mov.b32 %r3, %r2;\n", "")
    )
    assert other == 16 * 32 * 4
    assert same == pytest.approx(other * 128 / RATES.one_address_bytes, rel=0.01)


@pytest.mark.parametrize(("resident", "factor"), [(1, 4), (2, 2), (4, 1)])
def test_ctas_follow_each_other(resident: int, factor: int) -> None:
    one, four = timed(CHAIN), timed(CHAIN, grid=4, resident=resident)
    assert four.cycles == pytest.approx(factor * one.cycles, rel=0.1)


def test_rates_are_what_was_measured() -> None:
    """Every number of `HOPPER` that a microbenchmark measures is the recorded one, rounded."""
    path = pathlib.Path("benchmarks/results/nvidia-h200-microbenchmarks.json")
    values = {m["name"]: m["value"] for m in json.loads(path.read_text())["measurements"]}
    blank = dict.fromkeys(
        (field.name for field in dataclasses.fields(HOPPER) if field.type == "float"), -1.0
    )
    found = measured(dataclasses.replace(HOPPER, **blank), values)
    names = {name for name in blank if getattr(found, name) != -1.0}
    assert len(names) > 30
    for name in names:
        assert getattr(HOPPER, name) == pytest.approx(getattr(found, name), rel=1e-3), name
    documented = {"clock_ghz", "multiply_lanes", "memory_lanes", "cluster_latency"}
    absent = {"tensor_memory_bytes", "tensor_memory_latency", "pair_latency"}
    assert blank.keys() - names == documented | absent
    assert not HOPPER.assumed
    assert "barrier_latency" in BLACKWELL.assumed
    assert measured(BLACKWELL, values).assumed == BLACKWELL.assumed - names


def test_what_is_not_modelled_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"cp\.async\.commit_group"):
        timed("cp.async.commit_group;")
    with pytest.raises(ValueError, match="nothing was recorded"):
        estimate(Trace(), RATES)


needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is None, reason="the PTX comes from CuTe-DSL"
)


PAIR_HEAD = """
.reg .b32 %rank, %peer, %theirs, %send;
mov.u32 %rank, %cluster_ctarank;
xor.b32 %peer, %rank, 1;
mapa.shared::cluster.u32 %theirs, %r2, %peer;
setp.eq.u32 %p1, %r1, 0;
@%p1 mbarrier.init.shared.b64 [%r2], 1;
fence.mbarrier_init.release.cluster;
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
"""


def waiting(parity: int, label: str) -> str:
    """Waits for a phase of the own mbarrier."""
    wait = f"mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [%r2], {parity};"
    return f"{label}:\n{wait}\n@!%p2 bra {label};\n"


MEET = "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n"


@pytest.mark.parametrize("release", ["", ".release.cluster"])
def test_a_token_between_two_sms(release: str) -> None:
    """CTA 0 begins; a round is there and back again. Only a release to the cluster is fenced."""
    rounds = 16
    arrive = f"@%p1 mbarrier.arrive{release}.shared::cluster.b64 _, [%theirs];\n"
    body = f"{PAIR_HEAD}setp.eq.and.u32 %p3, %rank, 0, %p1;\n"
    body += "@%p3 mbarrier.arrive.shared.b64 _, [%r2];\n"
    body += "".join(waiting(i % 2, f"WAIT{i}") + arrive for i in range(rounds)) + MEET
    timing = timed(body, grid=2, cluster=2)
    handover = RATES.cluster_latency + (RATES.release_latency if release else 0)
    assert timing.cycles == pytest.approx(2 * rounds * handover, rel=0.06)
    with pytest.raises(ValueError, match="2 CTAs of a cluster are to be recorded"):
        timed(body, grid=2, cluster=2, recorded=1)


def test_bytes_from_sm_to_sm() -> None:
    """Both send at a time."""
    size, count = 1024, 4
    copy = "@%p1 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
    body = f"{PAIR_HEAD}@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r2], {size * count};\n"
    for i in range(count):
        body += f"{copy}[%theirs+{(2 + i) * size}], [%r2+{size}], {size}, [%theirs];\n"
    timing = timed(body + waiting(0, "WAIT") + MEET, grid=2, cluster=2)
    assert timing.busy["SM to SM"] == pytest.approx(size * count / RATES.cluster_bytes)
    least = timing.busy["SM to SM"] + RATES.cluster_latency
    assert least < timing.cycles < least + 50


def test_stores_to_the_other_sm_pass_a_port() -> None:
    """Each CTA's 32 lanes store 16 bytes, which pass the other one's port of shared memory."""
    body = PAIR_HEAD + "shl.b32 %send, %r1, 4;\nadd.u32 %send, %send, %theirs;\n"
    body += "st.shared::cluster.v4.b32 [%send+1024], {%r1, %r1, %r1, %r1};\n" + MEET
    assert timed(body, grid=2, cluster=2).busy["shared"] == 32 * 16 / RATES.shared_bytes


@pytest.mark.parametrize("columns", [8, 32])
def test_a_load_of_tensor_memory(columns: int) -> None:
    """It takes its latency and a cycle a column; each load's address comes from the one before."""
    load = (
        f"tcgen05.ld.sync.aligned.32x32b.x{columns}.b32 {registers(200, columns)}, [%r4];\n"
        + sm100_ptx.WAIT_LD
        + f"xor.b32 %r7, %r{199 + columns}, %r{199 + columns};\nadd.s32 %r4, %r4, %r7;\n"
    )
    zeros = "".join(f"mov.b32 %r{200 + i}, 0;\n" for i in range(columns))
    stores = f"tcgen05.st.sync.aligned.32x32b.x{columns}.b32 [%r4], {registers(200, columns)};\n"

    def cycles(loads: int) -> float:
        trace, body = Trace(frozenset({0})), zeros + stores + sm100_ptx.WAIT_ST + load * loads
        data = np.zeros(4096, np.uint32)
        sm100_ptx.run(sm100_ptx.ALLOCATE + body + sm100_ptx.FREE, data, trace=trace)
        return estimate(trace, BLACKWELL).cycles

    arithmetic = 2 * BLACKWELL.arithmetic_latency
    expected = BLACKWELL.tensor_memory_latency + columns - 1 + arithmetic
    assert (cycles(12) - cycles(4)) / 8 == pytest.approx(expected, abs=3)


@needs_compiler
def test_blackwell_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """C (128 x n) = A (128 x k) B^T by tcgen05: A and B come by TMA, C goes through registers."""
    n, k = 128, 192
    a, b = np.zeros((128, k), sm100_programs.BF16), np.zeros((n, k), sm100_programs.BF16)
    trace, plain = Trace(), emulator.launch
    monkeypatch.setattr(
        emulator, "launch", lambda *args, **named: plain(*args, **named, trace=trace)
    )
    sm100_programs.launch(GEMM, [a, b], Policy(), 0)
    timing = estimate(trace, dataclasses.replace(BLACKWELL, wait_latency=0.0))
    assert timing.busy["tensor core"] == 2 * 128 * n * k / BLACKWELL.mma_flops
    assert timing.busy["tensor memory"] == 4 * 128 * n / BLACKWELL.tensor_memory_bytes
    # The last block's load, its products, and reading C come one after the other.
    least = timing.busy["TMA load"] + BLACKWELL.tma_latency + timing.busy["tensor memory"]
    assert least + timing.busy["tensor core"] / 3 < timing.cycles < least + 2750
    with pytest.raises(NotImplementedError, match="tcgen05"):
        estimate(trace, HOPPER)


@needs_compiler
def test_blackwell_product_of_a_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both tensor cores work on the whole of it, each for half of its operations."""
    n, k = 128, 192
    a, b = np.zeros((256, k), sm100_programs.BF16), np.zeros((n, k), sm100_programs.BF16)
    trace, plain = Trace(frozenset({0, 1})), emulator.launch
    monkeypatch.setattr(
        emulator, "launch", lambda *args, **named: plain(*args, **named, trace=trace)
    )
    sm100_programs.launch(PAIR, [a, b], Policy(), 0)
    timing = estimate(trace, BLACKWELL)
    assert timing.busy["tensor core"] == 2 * 128 * n * k / BLACKWELL.mma_flops
    spans = [i for i in timing.intervals if i.row.startswith("tensor core of SM")]
    assert {i.row for i in spans} == {"tensor core of SM 0", "tensor core of SM 1"}
    assert len({(i.start, i.end) for i in spans}) == len(spans) / 2
    busy = sum(i.end - i.start for i in spans) / 2
    assert busy == pytest.approx(timing.busy["tensor core"])
    loaded = 2 * (128 + n // 2) * k
    assert timing.busy["TMA load"] == pytest.approx(loaded / BLACKWELL.tma_load_bytes)
    later = dataclasses.replace(BLACKWELL, pair_latency=BLACKWELL.pair_latency + 100)
    assert estimate(trace, later).cycles >= timing.cycles + 100


@needs_compiler
def test_forward(tmp_path: pathlib.Path) -> None:
    t, s, d = 256, 512, 128
    case = Case(batch=1, heads=(1, 1), query_length=t, key_length=s, head_dim=d)
    launches = attention(case, make_inputs(case, 0), gradients=False)
    code = ptx(launches.keys[0])
    packed = arguments.pack(code.launch, launches.arrays, launches.attributes, 1)
    trace = Trace()
    emulator.launch(
        code.text,
        code.symbol,
        **packed.keywords,
        policy=Policy(races=False),
        trace=trace,
    )
    timing = estimate(trace, HOPPER)
    assert timing.busy["tensor core"] == pytest.approx(4 * t * s * d / HOPPER.mma_flops)
    assert timing.busy["TMA store"] == pytest.approx(2 * t * d / HOPPER.tma_store_bytes)
    assert max(timing.busy.values()) <= timing.cycles
    # Two tiles one after the other: the model may neither hide nor double their work.
    assert 0.4 < timing.utilisation["tensor core"] < 0.9
    document = json.loads(chrome_trace(timing))
    tracks = {e["args"]["name"] for e in document["traceEvents"] if e["ph"] == "M"}
    assert {"tensor core 0", "TMA load", "CTA 0 warp  0", "CTA 0 warp 11"} <= tracks
    spans = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert max(e["ts"] + e["dur"] for e in spans) == pytest.approx(timing.cycles / 1000, rel=0.05)
    plot(timing, tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
