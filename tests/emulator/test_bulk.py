"""Bulk copies and reductions in every direction, and asynchronous stores within a cluster."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kernels.emulator import EmulationError, Policy
from kernels.emulator.tensor_map import DTYPES, TensorMap, encode
from tests.emulator import programs
from tests.emulator.test_clusters import READY, SYNC, WAIT, WAITED
from tests.emulator.test_litmus import POLICIES
from tests.emulator.test_memory import policies

FILL = """
shl.b32 %r5, %r1, 4; add.s32 %r6, %r5, %r2; cvt.u64.u32 %rd2, %r5; add.s64 %rd3, %rd1, %rd2;
ld.global.v4.b32 {%r20, %r21, %r22, %r23}, [%rd3];
st.shared.v4.b32 [%r6+1024], {%r20, %r21, %r22, %r23};
fence.proxy.async.shared::cta;
bar.sync 0;
setp.ne.u32 %p1, %r1, 0;
"""
"""512 bytes of global memory at shared + 1024."""
OUT = """
@%p1 bra DONE;
add.s32 %r7, %r2, 1024;
add.s64 %rd4, %rd1, 512;
{operation} [{target}], [%r7]{size};
cp.async.bulk.commit_group;
cp.async.bulk.wait_group{read} 0;
DONE:
"""
REDUCTIONS: list[tuple[str, Any]] = [
    ("add.u32", np.uint32),
    ("add.u64", np.uint64),
    ("min.s32", np.int32),
    ("max.s64", np.int64),
    ("and.b32", np.uint32),
    ("or.b64", np.uint64),
    ("xor.b32", np.uint32),
    ("inc.u32", np.uint32),
    ("add.f32", np.float32),
    ("add.f64", np.float64),
    ("add.noftz.bf16", ml_dtypes.bfloat16),
    ("add.noftz.f16", np.float16),
    ("max.f16", np.float16),
    ("min.bf16", ml_dtypes.bfloat16),
]
_MEANINGS = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "inc": lambda old, new: np.where(old >= new, 0, old + 1),
}


def random_values(dtype: Any, count: int, rng: np.random.Generator) -> np.ndarray:
    """Values of which sums are exact."""
    return rng.integers(0, 100, count).astype(dtype)


@policies()
@pytest.mark.parametrize("read", ["", ".read"])
def test_stores(policy: Policy, read: str, rng: np.random.Generator) -> None:
    data = np.zeros(1024, np.uint8)
    data[:512] = rng.integers(0, 256, 512)
    operation = "cp.async.bulk.global.shared::cta.bulk_group"
    body = FILL + OUT.format(operation=operation, target="%rd4", size=", 512", read=read)
    programs.run(body, data, programs.Launch(policy=policy))
    np.testing.assert_array_equal(data[512:], data[:512])


@pytest.mark.parametrize(("operation", "dtype"), REDUCTIONS)
def test_reductions(operation: str, dtype: Any, rng: np.random.Generator) -> None:
    size = np.dtype(dtype).itemsize
    data = np.zeros(1024, np.uint8)
    new, old = (random_values(dtype, 512 // size, rng) for _ in range(2))
    data[:512], data[512:] = new.view(np.uint8), old.view(np.uint8)
    name = f"cp.reduce.async.bulk.global.shared::cta.bulk_group.{operation}"
    programs.run(FILL + OUT.format(operation=name, target="%rd4", size=", 512", read=""), data)
    expected = _MEANINGS[operation.split(".")[0]](old, new).astype(dtype)
    np.testing.assert_array_equal(data[512:].view(dtype), expected)


@pytest.mark.parametrize("operation", ["add", "max", "xor"])
@pytest.mark.parametrize("kind", ["u32", "i32", "u64", "fp16", "bf16", "f32"])
@pytest.mark.parametrize("span", [0, 64, 128])
def test_tensor_reductions(operation: str, kind: str, span: int, rng: np.random.Generator) -> None:
    """A box of eight rows that sticks out of the tensor on its far sides."""
    dtype = DTYPES[kind]
    if operation == "xor" and np.dtype(dtype).kind not in "iu":
        return
    size = np.dtype(dtype).itemsize
    columns = 64 // size
    new, old = (random_values(dtype, 512 // size, rng).reshape(8, columns) for _ in range(2))
    data = np.zeros(1280, np.uint8)
    data[:512], data[512:1024] = new.reshape(-1).view(np.uint8), old.reshape(-1).view(np.uint8)
    tensor = TensorMap(
        programs.ADDRESS + 512, kind, (columns, 8), (64,), (columns, 8), swizzle_bytes=span
    )
    data[1024:1152] = np.frombuffer(encode(tensor), np.uint8)
    body = FILL.replace("%r6, %r5, %r2", "%r6, %r8, %r2").replace(
        "shl.b32 %r5, %r1, 4;",
        f"shl.b32 %r5, %r1, 4; shr.u32 %r8, %r5, 7; and.b32 %r8, %r8, {max(span // 16, 1) - 1};"
        "shl.b32 %r8, %r8, 4; xor.b32 %r8, %r8, %r5;",
    )
    first = 16 // size
    body += f"mov.b32 %r10, {first}; mov.b32 %r11, 3; add.s64 %rd4, %rd1, 1024;"
    name = f"cp.reduce.async.bulk.tensor.2d.global.shared::cta.{operation}.tile.bulk_group"
    body += OUT.replace("add.s64 %rd4, %rd1, 512;", "").format(
        operation=name, target="%rd4, {%r10, %r11}", size="", read=""
    )
    programs.run(body, data)
    expected = old.copy()
    inside = expected[3:, first:]
    expected[3:, first:] = _MEANINGS[operation](inside, new[:5, :-first]).astype(dtype)
    np.testing.assert_array_equal(data[512:1024].view(dtype).reshape(8, columns), expected)


def test_sources_may_change_once_they_are_read(seed: int) -> None:
    """wait_group.read allows to overwrite the source, but says nothing of the target."""
    operation = "cp.async.bulk.global.shared::cta.bulk_group"
    out = OUT.format(operation=operation, target="%rd4", size=", 512", read=".read")
    overwrite = "bar.sync 0; st.shared.v4.b32 [%r6+1024], {%r1, %r1, %r1, %r1};"
    load = "ld.global.b32 %r20, [%rd3+512];"
    for policy in POLICIES:
        data = np.arange(1024, dtype=np.uint8)
        launch = programs.Launch(policy=dataclasses.replace(policy, global_races=True), seed=seed)
        programs.run(FILL + out + overwrite, data, launch)
        np.testing.assert_array_equal(data[512:], data[:512])
        with pytest.raises(EmulationError, match="race: writes shared"):
            programs.run(FILL + out.replace(".read 0", ".read 1") + overwrite, data, launch)
        with pytest.raises(EmulationError, match="race: reads global"):
            programs.run(FILL + out + "bar.sync 0;" + load, data, launch)
        programs.run(FILL + out.replace(".read", "") + "bar.sync 0;" + load, data, launch)


CARRY = """
@%p1 bra ISSUED;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 256;
mapa.shared::cluster.u32 %r11, %r2, %r4;
add.s32 %r12, %r2, 1024;
add.s32 %r13, %r5, 2048;
{operation} [%r13], [%r12], 256, [%r11];
ISSUED:
"""
OWN = "shl.b32 %r6, %r1, 2; add.s32 %r8, %r2, %r6; st.shared.b32 [%r8+{at}], {value};\n"
FENCED = "fence.proxy.async.shared::cluster;" + SYNC
STORE_OUT = """
ld.shared.b32 %r9, [%r8+2048];
mul.wide.u32 %rd2, %r3, 256; add.s64 %rd3, %rd1, %rd2;
cvt.u64.u32 %rd4, %r6; add.s64 %rd3, %rd3, %rd4;
st.global.b32 [%rd3], %r9;
"""
CLUSTER = programs.Launch(threads=64, grid=2, cluster=2)


@policies()
@pytest.mark.parametrize("operation", ["", "add.u32", "xor.b32", "max.s32"])
def test_copies_between_ctas(operation: str, policy: Policy, seed: int) -> None:
    """Each CTA sends 256 bytes to the other, whose barrier says when they have come."""
    name = "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
    if operation:
        name = name.replace("cp.async", "cp.reduce.async") + f".{operation}"
    values = "mad.lo.s32 %r14, %r3, 1000, %r1;"
    body = READY + values + OWN.format(at=1024, value="%r14") + OWN.format(at=2048, value="%r1")
    body += FENCED + CARRY.format(operation=name)
    launch = dataclasses.replace(CLUSTER, policy=policy, seed=seed)
    data = np.zeros((2, 64), np.int32)
    programs.run(body + WAITED + STORE_OUT + SYNC, data, launch)
    old = np.arange(64)
    for rank in range(2):
        new = old + 1000 * (1 - rank)
        expected = {"": new, "add.u32": old + new, "xor.b32": old ^ new, "max.s32": new}
        np.testing.assert_array_equal(data[rank], expected[operation])
    with pytest.raises(EmulationError, match=r"race|does not know of the end"):
        programs.run(body + STORE_OUT + SYNC, data, launch)
    overwrite = OWN.format(at=1024, value="%r14")
    with pytest.raises(EmulationError, match="race"):
        programs.run(body + WAITED + overwrite + SYNC, data, launch)
    programs.run(body + WAITED + SYNC + overwrite, data, launch)
    with pytest.raises(EmulationError, match=r"does not know of the end|has exited"):
        programs.run(body + WAITED + STORE_OUT, data, launch)
    with pytest.raises(EmulationError, match=r"proxy-fence"):
        programs.run(body.replace(FENCED, SYNC) + WAITED, data, launch)


REMOTE = """
@!%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], {bytes};
mapa.shared::cluster.u32 %r11, %r2, %r4;
shl.b32 %r6, %r1, 2; and.b32 %r6, %r6, {mask}; add.s32 %r13, %r5, %r6;
{store} [%r13+2048], {value}, [%r11];
shl.b32 %r6, %r1, 2; add.s32 %r8, %r2, %r6;
"""


@policies()
def test_asynchronous_stores(policy: Policy, seed: int) -> None:
    values = "mad.lo.s32 %r14, %r3, 1000, %r1;"
    store = "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32"
    remote = REMOTE.format(bytes=256, mask=-1, store=store, value="%r14")
    body = READY + values + remote
    launch = dataclasses.replace(CLUSTER, policy=policy, seed=seed)
    data = np.zeros((2, 64), np.int32)
    programs.run(body + WAITED + STORE_OUT, data, launch)
    np.testing.assert_array_equal(data, [np.arange(64) + 1000, np.arange(64)])
    wide = body.replace(".b32 [%r13", ".v2.b32 [%r13").replace("], %r14,", "], {%r14, %r1},")
    wide = wide.replace("shl.b32 %r6, %r1, 2; and", "shl.b32 %r6, %r1, 3; and")
    wide = wide.replace("], 256", "], 512")
    programs.run(wide + WAITED + STORE_OUT.replace("%r8+2048", "%r8+2304"), data, launch)
    lanes = np.arange(32, 64)
    expected = np.stack([lanes + 1000, lanes], 1).reshape(-1)
    np.testing.assert_array_equal(data[0], expected)
    for broken, rule in (
        (body + STORE_OUT, "race|outstanding|exit"),
        (body.replace("], 256", "], 128") + WAITED, "deadlock|misuse|outstanding|exit"),
        (body.replace("[%r11]", "[%r2]") + WAITED, "descriptor|exit"),
        (body.replace(READY, READY[: READY.index("barrier.cluster")]) + WAITED, "start|misuse"),
        (
            body + body[len(READY) :].replace("], 256", "], 0") + WAITED,
            "race|dead|overflow|exit",
        ),
    ):
        with pytest.raises(EmulationError) as caught:
            programs.run(broken, data, launch)
        assert any(word in caught.value.rule for word in rule.split("|")), caught.value


@policies()
@pytest.mark.parametrize(
    ("operation", "expected"),
    [("add.u32", 16 + 8 * 56 + 0), ("max.u32", 56), ("inc.u32", 24), ("or.b32", 56 | 16)],
)
def test_asynchronous_updates(operation: str, expected: int, policy: Policy, seed: int) -> None:
    """All threads of a CTA update the first of eight words of the other, or every eighth does."""
    name = f"red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.{operation}"
    body = READY + "mov.b32 %r14, 16; mov.b32 %r15, 1000; and.b32 %r16, %r1, 56;"
    body += OWN.format(at=2048, value="%r14") + SYNC
    value = "%r15" if operation == "inc.u32" else "%r16"
    body += REMOTE.format(bytes=256, mask=28, store=name, value=value)
    launch = dataclasses.replace(CLUSTER, policy=policy, seed=seed)
    data = np.zeros((2, 64), np.int32)
    programs.run(body + WAITED + STORE_OUT, data, launch)
    result = int(data[0, 0])
    assert result == (16 + sum(range(0, 64, 8)) if operation == "add.u32" else expected)
    with pytest.raises(EmulationError, match="race"):
        programs.run(body.replace(SYNC, "") + WAITED + STORE_OUT, data, launch)


def test_signal_for_a_cta_that_has_exited(seed: int) -> None:
    """A multicast comes for a CTA that did not wait for it."""
    body = (
        READY
        + """
    @%p1 bra ISSUED;
    setp.ne.u32 %p2, %r3, 0; @%p2 bra ISSUED;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 256;
    mov.b16 %rs1, 3; add.s32 %r20, %r2, 1024;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
      [%r20], [%rd1], 256, [%r2], %rs1;
    ISSUED:
    setp.ne.u32 %p2, %r3, 0; @%p2 ret;
    """
    )
    for policy in POLICIES:
        launch = dataclasses.replace(CLUSTER, policy=policy, seed=seed)
        with pytest.raises(EmulationError) as caught:
            wait = WAIT.format(name="WAITED", order="", parity=0)
            programs.run(body + wait, np.zeros(256, np.uint8), launch)
        assert caught.value.rule in ("outstanding", "cluster-exit")


@pytest.mark.parametrize(("kind", "flushes"), [("f32", False), ("f32_ftz", True), (None, False)])
def test_subnormal_sums(kind: str | None, flushes: bool) -> None:
    """Only maps of the flushing type flush operands and sums, as on an H200."""
    values = np.array([1e-40, 2e-39, 1, -1e-40, 0, 1e-38, 3e-38, -2] * 16, np.float32)
    data = np.zeros(1280, np.uint8)
    data[:512] = data[512:1024] = values.view(np.uint8)
    tensor = TensorMap(programs.ADDRESS + 512, kind or "f32", (32, 4), (128,), (32, 4))
    data[1024:1152] = np.frombuffer(encode(tensor), np.uint8)
    if kind is None:
        name = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32"
        out = OUT.format(operation=name, target="%rd4", size=", 512", read="")
    else:
        name = "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group"
        out = "mov.b32 %r10, 0;" + OUT.replace("%rd1, 512", "%rd1, 1024").format(
            operation=name, target="%rd4, {%r10, %r10}", size="", read=""
        )
    programs.run(FILL + out, data)
    expected = np.where(np.abs(values) < 2.0**-126, 0, 2 * values) if flushes else 2 * values
    np.testing.assert_array_equal(data[512:1024].view(np.float32), expected)
