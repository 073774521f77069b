"""What a report counts, against closed forms."""

from __future__ import annotations

import importlib.util
import io
import json
import math

import numpy as np
import pytest
from rich.console import Console

from fa4_jax.conformance.cases import Case
from fa4_jax.conformance.oracle import make_inputs
from fa4_jax.key import Pass
from kernels import emulator
from kernels.descriptions import describe, warps_of_roles
from kernels.emulator import Names, Policy, Report
from kernels.emulator.driver import arguments
from kernels.emulator.errors import PtxError
from kernels.emulator.instructions.binding import kind_of
from kernels.emulator.ptx.costs import QUANTITIES
from kernels.emulator.ptx.parser import parse
from kernels.emulator.ptx.syntax import Immediate, Instruction
from kernels.sm90.forward_description import WORK_WORDS
from kernels.sm90.tiles import FORWARD_TILES
from tests.emulator import programs, sm100_programs
from tests.emulator.attention import Attention, attention, ptx
from tests.emulator.sm100_programs import GEMM

WORDS = 16384


OWN_WORDS = """
mov.u32 %r4, %ctaid.x;
mad.lo.s32 %r4, %r4, 64, %r1;
mul.wide.u32 %rd3, %r4, 16;
add.s64 %rd1, %rd1, %rd3;
shl.b32 %r3, %r1, 2;
add.s32 %r3, %r3, %r2;
"""
"""%rd1 and %r3: four words of global and one of shared memory for every thread."""


def run(body: str, grid: int = 1) -> Report:
    """Runs a body with 64 threads."""
    launch = programs.Launch(threads=64, grid=grid)
    return programs.run(OWN_WORDS + body, np.zeros(WORDS, np.uint32), launch)


@pytest.mark.parametrize(
    ("body", "quantity", "amount"),
    [
        ("ld.global.b32 %r5, [%rd1];", "global_read_bytes", 64 * 4),
        ("ld.global.v4.b32 {%r5, %r6, %r7, %r8}, [%rd1];", "global_read_bytes", 64 * 16),
        ("st.global.b16 [%rd1], 0;", "global_written_bytes", 64 * 2),
        ("red.relaxed.gpu.global.add.f32 [%rd1], %r5;", "global_reduced_bytes", 64 * 4),
        ("st.shared.b32 [%r3], %r1;", "shared_written_bytes", 64 * 4),
        ("st.shared.b32 [%r3], %r1;\nld.shared.b32 %r5, [%r3];", "shared_read_bytes", 64 * 4),
        ("bar.sync 0;", "named_barrier_waits", 2),
        ("ex2.approx.ftz.f32 %r5, %r6;", "special_function_ops", 64),
        ("rcp.rn.f32 %r5, %r6;", "special_function_ops", 64),
        # Half of the lanes by a guard, by a branch, and both.
        (
            "setp.lt.u32 %p1, %r1, 32;\n@%p1 ld.global.b64 %rd4, [%rd1];",
            "global_read_bytes",
            32 * 8,
        ),
        (
            "and.b32 %r5, %r1, 3;\nsetp.ne.b32 %p1, %r5, 0;\n@%p1 bra SKIP;\n"
            "ex2.approx.ftz.f32 %r5, %r6;\nmul.f32 %r5, %r5, %r5;\nSKIP:",
            "special_function_ops",
            16,
        ),
        (
            "and.b32 %r5, %r1, 3;\nsetp.ne.b32 %p1, %r5, 0;\nsetp.lt.u32 %p2, %r1, 32;\n"
            "@%p1 bra SKIP;\n@%p2 ld.global.b32 %r5, [%rd1];\nSKIP:",
            "global_read_bytes",
            8 * 4,
        ),
    ],
)
def test_quantity(body: str, quantity: str, amount: int) -> None:
    assert run(body).of(quantity) == amount


def test_ctas_add_up() -> None:
    one, three = (run("ld.global.b32 %r5, [%rd1];", grid=n) for n in (1, 3))
    assert three.total == 3 * one.total
    assert three.of("global_read_bytes") == 3 * one.of("global_read_bytes")


def forward(key_length: int, query_length: int = 256) -> Report:
    """The report of one bf16 forward with head dim 128."""
    case = Case(
        batch=1, heads=(1, 1), query_length=query_length, key_length=key_length, head_dim=128
    )
    return launch(attention(case, make_inputs(case, 0), gradients=False))


def launch(launches: Attention) -> Report:
    """The report of the only launch."""
    (key,) = launches.keys
    code = ptx(key)
    packed = arguments.pack(code.launch, launches.arrays, launches.attributes, 2)
    return emulator.launch(
        code.text,
        code.symbol,
        **packed.keywords,
        policy=Policy(races=False),
        names=Names(warps_of_roles(describe(key))),
    )


needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is None, reason="the PTX comes from CuTe-DSL"
)


@needs_compiler
@pytest.mark.parametrize("key_length", [128, 384])
def test_forward(key_length: int) -> None:
    t, s, d, tile_m, tile_n = 256, key_length, 128, 128, 128
    report = forward(s)
    tiles, blocks = t // tile_m, s // tile_n
    roles = report.by_role()
    everything, load = roles["all"].quantities, roles["load"].quantities
    assert everything["mma_flops"] == 4 * t * s * d
    assert roles["mma0"].quantities["mma_flops"] == roles["mma1"].quantities["mma_flops"]
    assert "mma_flops" not in load
    # Every tile loads its Q and all of K and V; the load warp alone does.
    assert load["tma_loaded_bytes"] == 2 * d * (t + tiles * 2 * s)
    assert everything["tma_loaded_bytes"] == load["tma_loaded_bytes"]
    # A warpgroup reads all of K and its 64 rows of Q, but for what registers hold of them, for S,
    # and all of V for O; P is in registers.
    groups, q_columns = t // 64, d - 16 * FORWARD_TILES[d, d, False].q_slices
    products_bytes = 2 * groups * blocks * (64 * q_columns + 2 * tile_n * d)
    assert everything["shared_mma_bytes"] == products_bytes
    # O goes through shared memory once; so does what a tile's work is, and that none follows.
    assert everything["shared_written_bytes"] == 2 * t * d + tiles * 4 * (WORK_WORDS + 1)
    # A row's statistics are kept by the four lanes that share it: a rescale factor each per block.
    exponentials = sum(c["ex2.approx.ftz.f32"] for c in report.instructions)
    assert 32 * exponentials == t * s + 4 * t * blocks
    others = ("lg2.approx.ftz.f32", "rcp.rn.f32", "div.rn.f32")
    rest = sum(c[name] for c in report.instructions for name in others)
    assert everything["special_function_ops"] == 32 * (exponentials + rest)
    # The load warp waits for empty slots, every MMA warp for Q, K and V, and for the end of tiles.
    mma_warps = 8
    assert roles["mma0"].quantities["mbarrier_waits"] * 2 == mma_warps * tiles * (2 + 2 * blocks)


@needs_compiler
def test_backward_flops() -> None:
    """Five products, of which the scores' tiles are whole."""
    case = Case(batch=1, heads=(1, 1), query_length=128, key_length=256)
    launches = attention(case, make_inputs(case, 0)).only(Pass.BACKWARD)
    assert launch(launches).of("mma_flops") == 5 * 2 * 128 * 256 * 64


@needs_compiler
def test_blackwell_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """C (128 x n) = A (128 x k) B^T: everything once through TMA, C once out of tensor memory."""
    n, k = 128, 192
    a, b = np.zeros((128, k), sm100_programs.BF16), np.zeros((n, k), sm100_programs.BF16)
    reports: list[Report] = []
    plain = emulator.launch
    monkeypatch.setattr(
        emulator, "launch", lambda *args, **named: reports.append(plain(*args, **named))
    )
    sm100_programs.launch(GEMM, [a, b], Policy(), 0)
    (report,) = reports
    assert report.of("mma_flops") == 2 * 128 * n * k
    assert report.of("tma_loaded_bytes") == 2 * (128 + n) * k
    assert report.of("shared_mma_bytes") == 2 * k * (128 + n)
    assert report.of("tensor_read_bytes") == 4 * 128 * n
    assert report.of("global_written_bytes") == 4 * 128 * n
    assert report.tensor_columns >= n


@needs_compiler
def test_every_instruction_of_the_kernels_has_a_class() -> None:
    case = Case(batch=1, heads=(1, 1), query_length=64, key_length=64, deterministic=True)
    for key in attention(case, make_inputs(case, 0)).keys:
        assert not [
            instruction.mnemonic
            for kernel in parse(ptx(key).text).kernels.values()
            for instruction in kernel.instructions
            if kind_of(instruction) == "other"
        ]


@pytest.mark.parametrize(
    ("mnemonic", "name"),
    [
        ("add.rn.f32x2", "floating point"),
        ("fma.rn.bf16x2", "floating point"),
        ("min.relu.s32", "integer"),
        ("div.s32", "integer"),
        ("div.rn.f32", "special function"),
        ("cvt.rn.bf16x2.f32", "conversion"),
        ("ld.acquire.gpu.global.s32", "global memory"),
        ("st.shared::cluster.b32", "shared memory"),
        ("tcgen05.mma.cta_group::1.kind::f16", "matrix product"),
        ("tcgen05.ld.sync.aligned.32x32b.x32.b32", "tensor memory"),
        ("tcgen05.wait::ld.sync.aligned", "synchronisation"),
        ("cp.async.bulk.commit_group", "TMA"),
    ],
)
def test_class(mnemonic: str, name: str) -> None:
    operands = (Immediate(0), Immediate(0))
    assert kind_of(Instruction(mnemonic, operands, None, 1, mnemonic)) == name


def test_an_unknown_instruction_has_no_class() -> None:
    with pytest.raises(PtxError, match=r"line 7: not implemented: frobnicate"):
        kind_of(Instruction("frobnicate.b32", (), None, 7, "frobnicate.b32 %r1;"))


def test_roles_and_json() -> None:
    data = np.zeros(WORDS, np.uint32)
    text = programs.HEAD.format(threads=96) + "st.global.b32 [%rd1], %r1;" + programs.TAIL
    fixed = {
        "grid": (2, 1, 1),
        "block": (96, 1, 1),
        "dynamic_smem": 2048,
        "params": [programs.ADDRESS.to_bytes(8, "little")],
        "memory": {programs.ADDRESS: data},
    }
    report = emulator.launch(text, "test", **fixed, names=Names({"first": (0,), "last": [2]}))
    assert report.roles == {"first": (0,), "last": (2,), "warp 1": (1,)}
    document = json.loads(report.to_json())
    assert document["shared_bytes"] == 2048
    assert document["grid"] == [2, 1, 1]
    sums = {name: role["quantities"] for name, role in document["roles"].items()}
    assert sums["first"] == sums["warp 1"] == {"global_written_bytes": 2 * 32 * 4}
    assert sums["all"] == {"global_written_bytes": 2 * 96 * 4}
    assert set(sums["all"]) <= QUANTITIES.keys()
    total = sum(document["roles"]["all"]["classes"].values())
    assert total == report.total == math.prod(report.grid) * 3 * 5
    console = Console(width=120, file=io.StringIO())
    with console.capture() as capture:
        console.print(report.table())
    lines = capture.get().splitlines()
    assert "test: 2 CTAs, 2.0 KiB shared" in lines[0]
    written = next(line.split() for line in lines if "global written bytes" in line)
    assert written[-4:] == ["256", "256", "256", "768"]
    for wrong in ({"a": (0,), "b": (0,)}, {"a": (3,)}, {"all": (0,)}):
        with pytest.raises(ValueError, match="roles"):
            emulator.launch(text, "test", **fixed, names=Names(wrong))
