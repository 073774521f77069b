"""Memory instructions against numpy: spaces, widths, atomics, copies."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kernels import emulator
from kernels.emulator import EmulationError, Policy, PtxError
from tests.emulator import programs
from tests.emulator.test_instructions import integers
from tests.emulator.test_litmus import POLICIES

LANE = "mul.wide.u32 %rd2, %r1, {bytes}; add.s64 %rd3, %rd1, %rd2;\n"
"""%rd3 is the lane's place in an array with the given bytes for each lane."""


def policies() -> Any:
    """Every policy of the litmus tests."""
    names = [f"{p.schedule}-{p.asynchronous}" for p in POLICIES]
    return pytest.mark.parametrize("policy", POLICIES, ids=names)


@pytest.mark.parametrize(
    ("load", "dtype", "wide"),
    [
        ("ld.global.u8", np.uint8, np.uint32),
        ("ld.global.nc.L1::evict_last.L2::128B.s8", np.int8, np.int32),
        ("ld.global.s16", np.int16, np.int32),
        ("ld.global.lu.s32", np.int32, np.int64),
        ("ld.global.cv.u16", np.uint16, np.uint64),
        ("ld.volatile.global.b32", np.uint32, np.uint32),
        ("ld.relaxed.sys.global.b32", np.uint32, np.uint32),
        ("ld", np.uint64, np.uint64),
    ],
)
def test_loads_extend(load: str, dtype: Any, wide: Any, rng: np.random.Generator) -> None:
    """Narrow elements in wider registers: signed ones keep their sign."""
    values, bits = integers(rng, dtype), 8 * np.dtype(wide).itemsize
    size = values.itemsize
    data = np.zeros(512 + 32 * 8, np.uint8)
    data[: values.nbytes] = values.view(np.uint8)
    target = {32: "%r20", 64: "%rd20"}[bits]
    if load == "ld":
        load = "ld.b64"
    body = LANE.format(bytes=size) + f"{load} {target}, [%rd3];"
    body += LANE.format(bytes=8) + f"st.global.b{bits} [%rd3+512], {target};"
    programs.run(body, data)
    result = data[512:].view(np.uint64).astype(f"u{bits // 8}").view(wide)
    assert result.tolist() == values.astype(wide).tolist()


def test_wide_vectors(rng: np.random.Generator) -> None:
    """256 bits at once, a sink among the results, 128-bit registers and their halves."""
    values = rng.integers(0, 1 << 32, (32, 8), np.uint32)
    data = np.zeros((3, 32, 8), np.uint32)
    data[0] = values
    names = ", ".join(f"%r{20 + i}" for i in range(8))
    body = LANE.format(bytes=32) + (
        f"ld.global.L2::cache_hint.v8.b32 {{{names}}}, [%rd3], %rd9;"
        f"st.global.v8.f32 [%rd3+1024], {{{names}}};"
        "ld.global.v4.b32 {_, %r30, _, %r31}, [%rd3]; st.global.v2.b32 [%rd3+2048], {%r30, %r31};"
        ".reg .b128 %q; ld.global.b128 %q, [%rd3]; mov.b128 {%rd10, %rd11}, %q;"
        "mov.b128 %q, {%rd11, %rd10}; st.global.b128 [%rd3+2064], %q;"
    )
    programs.run(body, data)
    np.testing.assert_array_equal(data[1], values)
    np.testing.assert_array_equal(data[2][:, :2], values[:, [1, 3]])
    np.testing.assert_array_equal(data[2][:, 4:], values[:, [2, 3, 0, 1]])


TEXT_OF_SPACES = """
.version 8.8
.target sm_90a
.address_size 64
.const .align 4 .b32 table[4] = {7, 0x10, -1, 0f3F800000};
.global .align 8 .b8 scratch[256];
.shared .align 16 .b8 own[256];
.visible .entry test(.param .u64 out)
.reqntid 32
{
.local .align 16 .b8 depot[64];
.reg .b64 %SP, %SPL, %rd<20>;
.reg .b32 %r<20>;
.reg .pred %p<4>;
mov.u64 %SPL, depot;
cvta.local.u64 %SP, %SPL;
ld.param.u64 %rd1, [out];
cvta.to.global.u64 %rd1, %rd1;
mov.u32 %r1, %tid.x;
mul.wide.u32 %rd2, %r1, 32;
add.s64 %rd1, %rd1, %rd2;
// Every thread its own local memory, by its own and by generic addresses.
add.u64 %rd3, %SP, 8;
st.b32 [%rd3], %r1;
ld.local.b32 %r2, [depot+8];
st.global.b32 [%rd1], %r2;
// Constants.
and.b32 %r3, %r1, 3;
shl.b32 %r3, %r3, 2;
cvt.u64.u32 %rd4, %r3;
mov.u64 %rd5, table;
add.s64 %rd5, %rd5, %rd4;
ld.const.b32 %r4, [%rd5];
st.global.b32 [%rd1+4], %r4;
// Generic addresses of shared memory.
mov.u32 %r5, own;
shl.b32 %r6, %r1, 2;
add.s32 %r5, %r5, %r6;
cvt.u64.u32 %rd6, %r5;
cvta.shared.u64 %rd7, %rd6;
st.u32 [%rd7], %r6;
ld.shared.b32 %r7, [%r5];
st.global.b32 [%rd1+8], %r7;
isspacep.shared %p1, %rd7;
selp.b32 %r8, 1, 0, %p1;
isspacep.global %p1, %rd7;
selp.b32 %r9, 2, 0, %p1;
or.b32 %r8, %r8, %r9;
isspacep.local %p1, %SP;
selp.b32 %r9, 4, 0, %p1;
or.b32 %r8, %r8, %r9;
st.global.b32 [%rd1+12], %r8;
cvta.to.shared.u64 %rd8, %rd7;
cvt.u32.u64 %r10, %rd8;
sub.s32 %r10, %r10, %r5;
st.global.b32 [%rd1+16], %r10;
// A variable of the module.
mov.u64 %rd9, scratch;
shl.b32 %r6, %r1, 3;
cvt.u64.u32 %rd10, %r6;
add.s64 %rd9, %rd9, %rd10;
st.global.b32 [%rd9], %r1;
ld.b32 %r11, [%rd9];
st.global.b32 [%rd1+20], %r11;
mapa.u64 %rd11, %rd7, 0;
ld.b32 %r12, [%rd11];
st.global.b32 [%rd1+24], %r12;
ret;
}
"""


def test_spaces() -> None:
    data = np.zeros((32, 8), np.int32)
    address = programs.ADDRESS
    arguments: dict[str, Any] = {
        "grid": (1, 1, 1),
        "block": (32, 1, 1),
        "params": [address.to_bytes(8, "little")],
        "memory": {address: data},
    }
    emulator.launch(TEXT_OF_SPACES, "test", **arguments)
    constants = [7, 16, -1, 0x3F800000]
    for lane, row in enumerate(data.tolist()):
        assert row[:7] == [lane, constants[lane % 4], 4 * lane, 5, 0, lane, 4 * lane]
    broken = TEXT_OF_SPACES.replace("[depot+8]", "[depot+80]")
    with pytest.raises(EmulationError, match=r"out-of-bounds.*local memory"):
        emulator.launch(broken, "test", **arguments)
    broken = TEXT_OF_SPACES.replace("st.global.b32 [%rd9], %r1", "st.global.b32 [%rd5], %r1")
    with pytest.raises(EmulationError, match="read-only"):
        emulator.launch(broken, "test", **arguments)


ATOMICS: list[tuple[str, Any, Callable[[int, int], int]]] = [
    ("add.u32", np.uint32, lambda a, b: a + b),
    ("add.u64", np.uint64, lambda a, b: a + b),
    ("min.s32", np.int32, min),
    ("max.u32", np.uint32, max),
    ("max.s64", np.int64, max),
    ("and.b32", np.uint32, lambda a, b: a & b),
    ("or.b64", np.uint64, lambda a, b: a | b),
    ("xor.b32", np.uint32, lambda a, b: a ^ b),
    ("inc.u32", np.uint32, lambda a, b: 0 if a >= b else a + 1),
    ("dec.u32", np.uint32, lambda a, b: b if a == 0 or a > b else a - 1),
    ("exch.b32", np.uint32, lambda a, b: b),
]


@policies()
@pytest.mark.parametrize("space", ["global", "shared::cta", ""])
@pytest.mark.parametrize("entry", ATOMICS, ids=lambda entry: entry[0])
def test_atomics(
    entry: tuple[str, Any, Callable[[int, int], int]],
    space: str,
    policy: Policy,
    rng: np.random.Generator,
) -> None:
    """Four lanes share an address: their results give their order, and it gives the last value."""
    name, dtype, meaning = entry
    values, initial = integers(rng, dtype), integers(rng, dtype)[:8]
    bits = 8 * values.itemsize
    data = np.zeros((3, 32), np.uint64)
    data[0], data[1, :8] = values.view(f"u{values.itemsize}"), initial.view(f"u{values.itemsize}")
    value, old = {32: ("%r20", "%r21"), 64: ("%rd20", "%rd21")}[bits]
    where = {"global": "%rd5", "shared::cta": "%r6", "": "%rd5"}[space]
    body = LANE.format(bytes=8) + (
        f"ld.global.b{bits} {value}, [%rd3];"
        "and.b32 %r5, %r1, 7; shl.b32 %r5, %r5, 3; cvt.u64.u32 %rd4, %r5; add.s64 %rd5, %rd1, %rd4;"
        f"add.s64 %rd5, %rd5, 256; add.s32 %r6, %r2, %r5; ld.global.b{bits} {old}, [%rd5];"
        f"setp.gt.u32 %p1, %r1, 7; @!%p1 st.shared.b{bits} [%r6], {old}; bar.warp.sync -1;"
        f"atom{'.' * bool(space)}{space}.{name} {old}, [{where}], {value};"
        f"st.global.b{bits} [%rd3+512], {old}; bar.warp.sync -1;"
        f"ld.shared.b{bits} {value}, [%r6];"
        + (f"@!%p1 st.global.b{bits} [%rd5], {value};" if space == "shared::cta" else "")
    )
    programs.run(body, data, programs.Launch(policy=policy, seed=int(rng.integers(100))))
    returned = data[2].astype(f"u{values.itemsize}").view(dtype)
    left = data[1, :8].astype(f"u{values.itemsize}").view(dtype)
    for group in range(8):
        orders = itertools.permutations(range(group, 32, 8))
        runs = (_in_turn(meaning, initial[group], values[list(order)]) for order in orders)
        lanes = [list(order) for order in itertools.permutations(range(group, 32, 8))]
        assert any(
            seen == returned[order].tolist() and last == int(left[group])
            for (seen, last), order in zip(runs, lanes, strict=True)
        )


def _in_turn(
    meaning: Callable[[int, int], int], initial: Any, values: np.ndarray
) -> tuple[list[int], int]:
    """What updates one after the other return, and what is left."""
    seen, current, bits = [], int(initial), 8 * values.itemsize
    for value in values.tolist():
        seen.append(current)
        current = meaning(current, value) & (1 << bits) - 1
        current -= (1 << bits) * (values.dtype.kind == "i" and current >> bits - 1)
    return seen, current


def test_compare_and_swap_takes_turns() -> None:
    """A lock: every thread of two warps adds one under it."""
    data = np.zeros(4, np.uint32)
    body = """
    mov.b32 %r20, 0;
    AGAIN:
    atom.acquire.gpu.global.cas.b32 %r21, [%rd1], 0, 1;
    setp.ne.b32 %p1, %r21, 0;
    @%p1 bra SKIP;
    ld.global.b32 %r22, [%rd1+4];
    add.s32 %r22, %r22, 1;
    st.global.b32 [%rd1+4], %r22;
    atom.release.gpu.global.exch.b32 %r21, [%rd1], 0;
    mov.b32 %r20, 1;
    SKIP:
    setp.eq.b32 %p2, %r20, 0;
    @%p2 bra AGAIN;
    """
    policies = [Policy(x.schedule, x.asynchronous, global_races=True) for x in POLICIES]
    for policy in policies:
        data[:] = 0
        programs.run(body, data, programs.Launch(threads=64, grid=2, policy=policy))
        assert data.tolist() == [0, 128, 0, 0]
    with pytest.raises(EmulationError, match="race"):
        broken = body.replace(".acquire", ".relaxed")
        data[:] = 0
        programs.run(broken, data, programs.Launch(threads=64, grid=2, policy=policies[-1]))


@policies()
@pytest.mark.parametrize(
    ("name", "dtype", "count"),
    [
        ("red.global.add.v4.f32", np.float32, 4),
        ("red.relaxed.gpu.global.add.f32", np.float32, 1),
        ("red.global.add.noftz.bf16x2", ml_dtypes.bfloat16, 2),
        ("red.global.max.noftz.v4.f16x2", np.float16, 8),
        ("red.global.add.v2.noftz.f16x2", np.float16, 4),
        ("red.global.add.f64", np.float64, 1),
    ],
)
def test_reductions(
    name: str, dtype: Any, count: int, policy: Policy, rng: np.random.Generator
) -> None:
    """Whole numbers, so that the order of the additions does not matter."""
    values = rng.integers(0, 8, (32, count)).astype(dtype)
    size = values[0].nbytes
    data = np.zeros((2, 32 * count), dtype)
    data[0] = values.reshape(-1)
    words = max(size // 4, 1)
    names = [f"%r{20 + i}" for i in range(words)] if dtype != np.float64 else ["%rd20"]
    kind = "b64" if dtype == np.float64 else "b32"
    text = names[0] if len(names) == 1 else "{" + ", ".join(names) + "}"
    vector = "" if len(names) == 1 else f".v{len(names)}"
    body = LANE.format(bytes=size) + (
        f"ld.global{vector}.{kind} {text}, [%rd3]; {name} [%rd1+{32 * size}], {text};"
    )
    programs.run(body, data.view(np.uint8), programs.Launch(policy=policy))
    whole = values.astype(np.float64)
    expected = whole.max(0) if ".max" in name else whole.sum(0)
    np.testing.assert_array_equal(data[1, :count].astype(np.float64), expected)


def test_reductions_flush_subnormals() -> None:
    data = np.array([1e-40, 1e-39, 0, 0], np.float32)
    body = "setp.ne.u32 %p1, %r1, 0; @%p1 ret; mov.b32 %r5, 0f00000100;"
    programs.run(body + "red.global.add.f32 [%rd1], %r5;", data)
    assert data.tolist() == [0, np.float32(1e-39), 0, 0]


CP_ASYNC = (
    LANE.format(bytes=16)
    + """
shl.b32 %r5, %r1, 4; add.s32 %r5, %r5, %r2;
mov.b32 %r9, {amount};
cp.async.{form} [%r5], [%rd3], {size}{extra};
cp.async.commit_group;
{wait}
ld.shared.v4.b32 {{%r20, %r21, %r22, %r23}}, [%r5];
st.global.v4.b32 [%rd3+512], {{%r20, %r21, %r22, %r23}};
"""
)


@policies()
@pytest.mark.parametrize(
    ("form", "size", "extra", "kept"),
    [
        ("cg.shared.global", 16, "", 16),
        ("ca.shared::cta.global.L2::128B", 8, "", 8),
        ("ca.shared.global", 4, "", 4),
        ("cg.shared.global", 16, ", %r9", 5),
        ("ca.shared.global.L2::cache_hint", 8, ", %r9, %rd9", 5),
    ],
)
def test_small_copies(
    form: str, size: int, extra: str, kept: int, policy: Policy, rng: np.random.Generator
) -> None:
    data = np.zeros((2, 512), np.uint8)
    data[0] = rng.integers(1, 256, 512)
    fields = {"form": form, "size": size, "extra": extra, "amount": 5}
    body = CP_ASYNC.format(wait="cp.async.wait_group 0;", **fields)
    body = body.replace("cp.async.c", "st.shared.v4.b32 [%r5], {%r1, %r1, %r1, %r1}; cp.async.c", 1)
    programs.run(body, data, programs.Launch(policy=policy))
    result = data[1].reshape(32, 16)
    np.testing.assert_array_equal(result[:, :kept], data[0].reshape(32, 16)[:, :kept])
    assert not result[:, kept:size].any()
    untouched = np.repeat(np.arange(32, dtype=np.uint32)[:, None], 4, 1).view(np.uint8)
    np.testing.assert_array_equal(result[:, size:], untouched[:, size:])
    for wait in ("", "cp.async.wait_group 1;"):
        with pytest.raises(EmulationError, match="race"):
            programs.run(CP_ASYNC.format(wait=wait, **fields), data, programs.Launch(policy=policy))


@policies()
@pytest.mark.parametrize(("form", "expected"), [("", 1), (".noinc", 33)])
def test_small_copies_tell_a_barrier(
    form: str, expected: int, policy: Policy, rng: np.random.Generator
) -> None:
    """Without .noinc the arrivals are expected as they are issued."""
    data = np.zeros((2, 512), np.uint8)
    data[0] = rng.integers(1, 256, 512)
    wait = (
        f"cp.async.mbarrier.arrive{form}.shared.b64 [%r2+2048]; bar.sync 0;"
        + """
    @!%p1 mbarrier.arrive.shared.b64 _, [%r2+2048];
    WAITING: mbarrier.try_wait.parity.shared.b64 %p2, [%r2+2048], 0; @!%p2 bra WAITING;
    xor.b32 %r5, %r5, 16;
    """
    )
    body = f"""
    setp.ne.u32 %p1, %r1, 0;
    @!%p1 mbarrier.init.shared.b64 [%r2+2048], {expected};
    bar.sync 0;
    """ + CP_ASYNC.format(form="cg.shared.global", size=16, extra="", amount=0, wait=wait)
    programs.run(body, data, programs.Launch(policy=policy))
    swapped = data[0].reshape(16, 2, 16)[:, ::-1].reshape(-1)
    np.testing.assert_array_equal(data[1], swapped)
    with pytest.raises(EmulationError, match="race"):
        broken = body.replace(
            "WAITING: mbarrier.try_wait", "bra.uni READ; WAITING: mbarrier.try_wait"
        )
        broken = broken.replace("xor.b32", "READ: xor.b32")
        programs.run(broken, data, programs.Launch(policy=policy))


@pytest.mark.parametrize(
    "body",
    [
        "atom.global.add.b32 %r5, [%rd1];",
        "atom.global.max.f32 %r5, [%rd1], %r6;",
        "ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {%r5, %r6}, [%r2];",
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%r5}, {%r6}, {%r7}, {%r8};",
        "cp.async.ca.shared.global [%r2], [%rd1], 12;",
        "cp.async.cg.shared.global [%r2], [%rd1], 8;",
        "st.const.b32 [%rd1], %r5;",
        "cp.async.bulk.tensor.3d.shared::cta.global.im2col.mbarrier::complete_tx::bytes [%r2],"
        " [%rd1, {%r5, %r6, %r7}], [%r2], {%rs1};",
    ],
)
def test_other_forms_are_refused(body: str) -> None:
    with pytest.raises(PtxError, match=r"line \d+"):
        programs.run(body, np.zeros(32, np.uint32))


def test_advice_is_no_access() -> None:
    """Prefetches go anywhere, cache policies are opaque."""
    body = """
    createpolicy.fractional.L2::evict_first.b64 %rd9, 1.0;
    prefetch.global.L2 [%rd1]; prefetch.tensormap [%rd1];
    applypriority.global.L2::evict_normal [%rd1], 128;
    mov.b32 %r5, 64;
    cp.async.bulk.prefetch.L2.global.L2::cache_hint [%rd1], %r5, %rd9;
    cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%rd1, {%r5, %r5}];
    ld.global.L1::no_allocate.L2::cache_hint.b32 %r6, [%rd1], %rd9;
    st.global.L2::cache_hint.b32 [%rd1+64], %r6, %rd9;
    """
    data = np.arange(32, dtype=np.uint32)
    programs.run(body.replace("1.0;", "0f3F800000;"), data)
    assert data.tolist() == [*range(16), 0, *range(17, 32)]
