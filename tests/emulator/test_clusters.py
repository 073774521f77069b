"""Clusters: ranks and addresses, distributed shared memory, remote barriers, multicast."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from kernels.emulator import EmulationError, Policy
from kernels.emulator.tensor_map import TensorMap, encode
from tests.emulator import programs
from tests.emulator.test_litmus import POLICIES

TENSOR, DUMP = 1024, 8192

SYNC = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;\n"
RANK = "mov.u32 %r3, %cluster_ctarank; xor.b32 %r4, %r3, 1; mapa.shared::cluster.u32 %r5, %r2, %r4;"
"""%r3 is the CTA's rank, %r4 the other's, %r5 the other's shared memory."""
INIT = """
setp.ne.u32 %p1, %r1, 0;
@%p1 bra INITIALISED;
mbarrier.init.shared::cta.b64 [%r2], {count};
fence.mbarrier_init.release.cluster;
INITIALISED:
"""
RELAXED = "barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned;\n"
READY = RANK + INIT.format(count=1) + RELAXED
WAIT = """
{name}:
mbarrier.try_wait.parity{order}.shared::cta.b64 %p9, [%r2], {parity}, 1000;
@!%p9 bra {name};
"""
WAITED = WAIT.format(name="WAITED", order=".acquire.cluster", parity=0)
WRITE_PEER = "shl.b32 %r6, %r1, 2; add.s32 %r7, %r5, %r6; st.shared::cluster.b32 [%r7+1024], %r1;\n"
READ_OWN = "shl.b32 %r6, %r1, 2; add.s32 %r8, %r2, %r6; ld.shared.b32 %r9, [%r8+1024];\n"
WRITE_OWN = "shl.b32 %r6, %r1, 2; add.s32 %r8, %r2, %r6; st.shared.b32 [%r8+1024], %r1;\n"
READ_PEER = "shl.b32 %r6, %r1, 2; add.s32 %r7, %r5, %r6; ld.shared::cluster.b32 %r9, [%r7+1024];\n"
ARRIVE_PEER = """
bar.sync 1;
@%p1 bra ARRIVED;
mbarrier.arrive{order}.shared::cluster.b64 _, [%r5], 1;
ARRIVED:
"""
ARRIVED = ARRIVE_PEER.format(order=".release.cluster")
LEADER = "and.b32 %r10, %r2, 0xFEFFFFFF;\n"

COPY = """
@%p1 bra ISSUED;
{expect}
add.s32 %r20, %r2, 1024;
setp.ne.u32 %p2, %r3, 0;
@%p2 bra ISSUED;
mov.b16 %rs1, {mask};
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
  [%r20], [%rd1], 256, [%r2], %rs1;
ISSUED:
"""
EXPECT = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 256;"


@dataclasses.dataclass(frozen=True)
class Litmus:
    """A program of a cluster of two CTAs of 64 threads."""

    name: str
    rule: str | None
    body: str


ROWS = (
    Litmus("write peer, cluster barrier, read", None, RANK + SYNC + WRITE_PEER + SYNC + READ_OWN),
    Litmus("write peer, read", "race|cluster-exit", RANK + SYNC + WRITE_PEER + READ_OWN),
    Litmus(
        "write peer before it has started",
        "cluster-start",
        RANK + WRITE_PEER + SYNC + READ_OWN,
    ),
    Litmus(
        "write peer, relaxed arrival, read",
        "race",
        RANK + SYNC + WRITE_PEER + RELAXED + READ_OWN + SYNC,
    ),
    Litmus(
        "write peer, fence, relaxed arrival, read",
        None,
        RANK + SYNC + WRITE_PEER + "fence.acq_rel.cluster;" + RELAXED + READ_OWN + SYNC,
    ),
    Litmus("write, cluster barrier, peer reads", None, RANK + WRITE_OWN + SYNC + READ_PEER + SYNC),
    Litmus(
        "write, cluster barrier, peer reads, exit",
        "cluster-exit",
        RANK + WRITE_OWN + SYNC + READ_PEER,
    ),
    Litmus(
        "peer reads, write",
        "race",
        RANK + WRITE_OWN + SYNC + READ_PEER + WRITE_OWN + SYNC,
    ),
    Litmus(
        "peer reads, cluster barrier, write",
        None,
        RANK + WRITE_OWN + SYNC + READ_PEER + SYNC + WRITE_OWN,
    ),
    Litmus(
        "write peer, CTA barrier, read",
        "race|cluster-exit",
        RANK + SYNC + WRITE_PEER + "bar.sync 0;" + READ_OWN,
    ),
    Litmus(
        "rank past the cluster's end",
        "out-of-bounds",
        SYNC + "mapa.shared::cluster.u32 %r5, %r2, 2;",
    ),
    Litmus(
        "the peer's address as an own one",
        "out-of-bounds",
        RANK + SYNC + WRITE_PEER.replace("shared::cluster", "shared") + SYNC,
    ),
    Litmus("arrival twice", "participants", "barrier.cluster.arrive; barrier.cluster.arrive;"),
    Litmus("wait without arrival", "participants", "barrier.cluster.wait;"),
    Litmus(
        "cluster barrier that one CTA does not reach",
        "deadlock",
        RANK + "setp.ne.u32 %p3, %r3, 0; @%p3 bra OTHER;" + SYNC + "bra.uni END; OTHER: bar.sync 0;"
        "setp.ne.u32 %p4, %r3, 1; FOREVER: @%p4 bra END; bar.sync 1, 96; END:",
    ),
    Litmus(
        "cluster barrier that one CTA skips by exiting",
        None,
        RANK + "setp.ne.u32 %p3, %r3, 0; @%p3 ret;" + SYNC,
    ),
    Litmus("remote arrival, wait, read", None, READY + WRITE_PEER + ARRIVED + WAITED + READ_OWN),
    Litmus(
        "relaxed remote arrival, wait, read",
        "race",
        READY + WRITE_PEER + ARRIVE_PEER.format(order=".relaxed.cluster") + WAITED + READ_OWN,
    ),
    Litmus(
        "fence, relaxed remote arrival, wait, read",
        None,
        READY
        + WRITE_PEER
        + ARRIVE_PEER.format(order=".relaxed.cluster").replace(
            "mbarrier", "fence.acq_rel.cluster; mbarrier"
        )
        + WAITED
        + READ_OWN,
    ),
    Litmus(
        "remote arrival, relaxed wait, read",
        "race|cluster-exit",
        READY
        + WRITE_PEER
        + ARRIVED
        + WAIT.format(name="WAITED", order=".relaxed.cluster", parity=0)
        + READ_OWN,
    ),
    Litmus(
        "remote arrival, relaxed wait, fence, read",
        None,
        READY
        + WRITE_PEER
        + ARRIVED
        + WAIT.format(name="WAITED", order=".relaxed.cluster", parity=0)
        + "fence.acq_rel.cluster;"
        + READ_OWN,
    ),
    Litmus(
        "remote arrival without CTA barrier before it",
        "race|cluster-exit",
        READY + WRITE_PEER + ARRIVED.replace("bar.sync 1;", "") + WAITED + READ_OWN,
    ),
    Litmus(
        "remote arrival that nobody waits for",
        "cluster-exit",
        READY + ARRIVED,
    ),
    Litmus(
        "remote arrival that a cluster barrier orders before the exit",
        None,
        READY + ARRIVED + SYNC,
    ),
    Litmus(
        "remote arrival, initialisation unfenced",
        "race|phase-misuse",
        (READY + ARRIVED + WAITED).replace("fence.mbarrier_init.release.cluster;", ""),
    ),
    Litmus(
        "remote arrival, initialisation without cluster barrier",
        "race|phase-misuse|cluster-start",
        (READY + ARRIVED + WAITED).replace(RELAXED, ""),
    ),
    Litmus(
        "wait for the peer's barrier",
        "phase-misuse",
        READY + WAITED.replace("[%r2]", "[%r5]") + SYNC,
    ),
    Litmus(
        "leader's barrier by masking",
        None,
        RANK
        + INIT.format(count=2)
        + RELAXED
        + LEADER
        + "@%p1 bra ARRIVED; mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r10], 1;"
        "ARRIVED: setp.ne.u32 %p2, %r3, 0; @%p2 bra DONE;" + WAITED + "DONE:",
    ),
    Litmus(
        "multicast, wait, read",
        None,
        READY + COPY.format(mask=3, expect=EXPECT) + WAITED + READ_OWN,
    ),
    Litmus(
        "multicast, read",
        "race|outstanding",
        READY + COPY.format(mask=3, expect=EXPECT) + READ_OWN,
    ),
    Litmus(
        "multicast to an absent CTA",
        "out-of-bounds",
        READY + COPY.format(mask=5, expect=EXPECT) + WAITED,
    ),
    Litmus(
        "multicast to one CTA of two",
        "deadlock",
        READY + COPY.format(mask=1, expect=EXPECT) + WAITED,
    ),
    Litmus(
        "multicast before the peer has started",
        "cluster-start|phase-misuse",
        (READY + COPY.format(mask=3, expect=EXPECT) + WAITED).replace(RELAXED, "bar.sync 0;"),
    ),
    Litmus(
        "multicast over what the peer reads",
        "race",
        READY + READ_OWN + COPY.format(mask=3, expect=EXPECT) + WAITED + SYNC,
    ),
    Litmus(
        "multicast over what the peer has read",
        None,
        READY + READ_OWN + SYNC + COPY.format(mask=3, expect=EXPECT) + WAITED,
    ),
    Litmus(
        "multicast over what the peer has written, unfenced",
        "proxy-fence",
        READY + WRITE_OWN + SYNC + COPY.format(mask=3, expect=EXPECT) + WAITED,
    ),
    Litmus(
        "multicast over what the peer has written and fenced",
        None,
        READY
        + WRITE_OWN
        + "fence.proxy.async.shared::cluster;"
        + SYNC
        + COPY.format(mask=3, expect=EXPECT)
        + WAITED,
    ),
)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: f"{p.schedule}-{p.asynchronous}")
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_litmus(row: Litmus, policy: Policy, seed: int) -> None:
    launch = programs.Launch(threads=64, grid=4, cluster=2, policy=policy, seed=seed)
    data = np.zeros(2048, np.uint8)
    if row.rule is None:
        programs.run(row.body, data, launch)
        return
    with pytest.raises(EmulationError) as caught:
        programs.run(row.body, data, launch)
    assert caught.value.rule in row.rule.split("|"), caught.value


REGISTERS = (
    *(f"%{name}.{axis}" for name in ("clusterid", "nclusterid", "ctaid") for axis in "xyz"),
    *(f"%{name}.{axis}" for name in ("cluster_ctaid", "cluster_nctaid") for axis in "xyz"),
    "%cluster_ctarank",
    "%cluster_nctarank",
)


def test_special_registers(seed: int) -> None:
    """Clusters of (2, 1, 2) in a grid of (4, 3, 2), and where their shared memory lies."""
    stores = "".join(
        f"mov.u32 %r{20 + i}, {name}; st.global.b32 [%rd3+{4 * i}], %r{20 + i};\n"
        for i, name in enumerate(REGISTERS)
    )
    body = f"""
    mov.u32 %r5, %ctaid.x; mov.u32 %r6, %ctaid.y; mov.u32 %r7, %ctaid.z;
    mad.lo.s32 %r8, %r7, 3, %r6; mad.lo.s32 %r8, %r8, 4, %r5; mul.wide.u32 %rd2, %r8, 128;
    add.s64 %rd3, %rd1, %rd2;
    {stores}
    st.global.b32 [%rd3+96], %r2;
    getctarank.shared::cluster.u32 %r9, %r2; st.global.b32 [%rd3+100], %r9;
    mov.pred %p1, %is_explicit_cluster; selp.b32 %r10, 1, 0, %p1; st.global.b32 [%rd3+104], %r10;
    mapa.shared::cluster.u32 %r11, %r2, 3; st.global.b32 [%rd3+108], %r11;
    """
    data = np.zeros((24, 32), np.uint32)
    launch = programs.Launch(seed=seed)
    programs.run(body, data, launch, grid=(4, 3, 2), cluster=(2, 1, 2))
    for number, row in enumerate(data.tolist()):
        x, y, z = number % 4, number // 4 % 3, number // 12
        rank = x % 2 + 2 * z
        expected = [x // 2, y, 0, 2, 3, 1, x, y, z, x % 2, 0, z, 2, 1, 2, rank, 4]
        assert row[: len(expected)] == expected
        assert row[24:28] == [rank << 24 | 1024, rank, 1, 3 << 24 | 1024]


MULTICAST = """
mov.u32 %r3, %cluster_ctarank;
setp.ne.u32 %p1, %r1, 0;
@%p1 bra INITIALISED;
mbarrier.init.shared::cta.b64 [%r2], 1;
fence.mbarrier_init.release.cluster;
INITIALISED:
barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned;
@%p1 bra ISSUED;
{expect}
add.s32 %r20, %r2, 1024;
shl.b32 %r21, %r3, 2;
add.s32 %r22, %r2, {signals};
add.s32 %r20, %r20, {at};
mov.b16 %rs1, {mask};
mov.b32 %r23, 0;
cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes{modifiers}
  [%r20], [%rd1, {{%r23, %r21}}], [{barrier}]{operand};
ISSUED:
{wait}
"""
DUMPED = """
shl.b32 %r30, %r1, 2;
add.s32 %r31, %r2, %r30;
mul.wide.u32 %rd2, %r3, {size};
add.s64 %rd3, %rd1, %rd2;
cvt.u64.u32 %rd4, %r30;
add.s64 %rd3, %rd3, %rd4;
{stores}
"""


def dumped(size: int) -> str:
    """Stores `size` bytes of every CTA's buffer after DUMP, one CTA after the other."""
    stores = "".join(
        f"ld.shared.b32 %r32, [%r31+{1024 + i}]; st.global.b32 [%rd3+{DUMP + i}], %r32;\n"
        for i in range(0, size, 256)
    )
    return DUMPED.format(size=size, stores=stores)


def tensor_of_rows(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Memory with a map of a (16, 32) f32 tensor whose box has four rows, and the tensor."""
    data = np.zeros(DUMP + 8192, np.uint8)
    values = rng.normal(size=(16, 32)).astype(np.float32)
    tensor = TensorMap(programs.ADDRESS + TENSOR, "f32", (32, 16), (128,), (32, 4))
    data[:128] = np.frombuffer(encode(tensor), np.uint8)
    data[TENSOR : TENSOR + values.nbytes] = values.reshape(-1).view(np.uint8)
    return data, values


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: f"{p.schedule}-{p.asynchronous}")
def test_multicast_of_tiles(policy: Policy, rng: np.random.Generator, seed: int) -> None:
    """Each of four CTAs loads four rows into all of them; data and signals come everywhere."""
    data, values = tensor_of_rows(rng)
    body = MULTICAST.format(
        expect="mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 2048;",
        signals=0,
        at="%r24",
        mask=15,
        modifiers=".multicast::cluster",
        barrier="%r2",
        operand=", %rs1",
        wait=WAITED,
    ).replace("add.s32 %r20, %r20, %r24;", "shl.b32 %r24, %r3, 9; add.s32 %r20, %r20, %r24;")
    launch = programs.Launch(64, grid=4, cluster=4, policy=policy, seed=seed)
    programs.run(body + dumped(2048), data, launch)
    for rank in range(4):
        copy = data[DUMP + 2048 * rank :][:2048].view(np.float32).reshape(16, 32)
        np.testing.assert_array_equal(copy, values)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: f"{p.schedule}-{p.asynchronous}")
def test_pair_signals_its_leader(policy: Policy, rng: np.random.Generator, seed: int) -> None:
    """Both CTAs of a pair load for themselves with .cta_group::2 and signal the even one."""
    data, values = tensor_of_rows(rng)
    leads = "setp.ne.u32 %p4, %r25, 0; @%p4 bra EXPECTED;"
    expect = (
        "and.b32 %r25, %r3, 1;"
        + leads
        + "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 1024; EXPECTED:"
    )
    body = MULTICAST.format(
        expect=expect,
        signals=0,
        at=0,
        mask=0,
        modifiers=".cta_group::2",
        barrier="%r10",
        operand="",
        wait="and.b32 %r25, %r3, 1; setp.ne.u32 %p4, %r25, 0; @%p4 bra DONE;" + WAITED + "DONE:",
    )
    body = LEADER + body + SYNC + dumped(512)
    launch = programs.Launch(64, grid=4, cluster=4, policy=policy, seed=seed)
    programs.run(body, data, launch)
    for rank in range(4):
        copy = data[DUMP + 512 * rank :][:512].view(np.float32).reshape(4, 32)
        np.testing.assert_array_equal(copy, values[4 * rank : 4 * rank + 4])
    with pytest.raises(EmulationError, match="signals mbarrier"):
        programs.run(body.replace(".cta_group::2", ".cta_group::1"), data, launch)
    with pytest.raises(EmulationError, match=r"race|does not know of the end of a copy"):
        programs.run(body.replace(SYNC, ""), data, launch)
