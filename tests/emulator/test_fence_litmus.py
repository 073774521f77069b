"""Every kind of fence after the access that it must follow, and before it.

A fence orders what comes before it in its thread. Each row is a program with an access, a fence and
what relies on both. With the fence after the access the program is legal; with the fence moved over
the access, or left out, it breaks a rule. The order of the two is the only difference.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from kernels.emulator import EmulationError, Policy
from kernels.emulator.tensor_map import TensorMap, encode
from tests.emulator import programs, sm100_ptx, test_clusters, test_tcgen05_litmus
from tests.emulator.sm100_ptx import ALLOCATE, FREE, WAIT_LD, WAIT_ST
from tests.emulator.test_litmus import COPY_256, INIT_FENCED, POLICIES, WAIT_0, WRITE_COPY
from tests.emulator.test_tcgen05_litmus import BAR, END, LD, MMA, MMA_P, ST_P

BOX, MAP, MAP_SOURCE = 1024, 2048, 2304
"""Places in global memory: a tensor, where its map is expected, and a copy of that map."""

Run = Callable[[str, Policy, int], None]


def one_cta(body: str, policy: Policy, seed: int) -> None:
    """Runs a program of 64 threads; %rd3 is the thread's own word of the tensor."""
    data = np.zeros(4096, np.uint8)
    tensor = TensorMap(programs.ADDRESS + BOX, "u32", (8, 8), (32,), (8, 8))
    data[MAP_SOURCE : MAP_SOURCE + 128] = np.frombuffer(encode(tensor), np.uint8)
    own = f"mul.wide.u32 %rd2, %r1, 4;\nadd.s64 %rd3, %rd1, %rd2;\nadd.s64 %rd3, %rd3, {BOX};\n"
    programs.run(own + body, data, programs.Launch(64, policy=policy, seed=seed))


def two_ctas(body: str, policy: Policy, seed: int) -> None:
    """Runs a program of a cluster of two CTAs of 64 threads."""
    launch = programs.Launch(64, grid=2, cluster=2, policy=policy, seed=seed)
    programs.run(body, np.zeros(4096, np.uint8), launch)


def tensor_memory(body: str, policy: Policy, seed: int) -> None:
    """Runs a program of 128 threads of sm_100 with tensor memory allocated."""
    launch = programs.Launch(128, shared_bytes=16_384, policy=policy, seed=seed)
    sm100_ptx.run(ALLOCATE + body + FREE, np.zeros(4096, np.uint8), launch)


STORE_BULK = """
setp.ne.u32 %p3, %r1, 0;
@%p3 bra STORED;
add.s32 %r9, %r2, 1024;
cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r9], 256;
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
STORED:
"""
LOAD_BULK = INIT_FENCED + COPY_256.replace("[%rd1]", f"[%rd1+{BOX}]") + WAIT_0
STORE_GLOBAL = "st.global.b32 [%rd3], %r1;\n"
INIT_ALONE = """
setp.ne.u32 %p1, %r1, 0;
@%p1 bra INITIALISED;
{}
INITIALISED:
bar.sync 0;
"""
INIT_BARRIER = "mbarrier.init.shared.b64 [%r2], 1;\n"
PAIR = test_clusters.RANK + test_clusters.SYNC
STORE_OWN = "mul.wide.u32 %rd2, %r3, 256;\nadd.s64 %rd1, %rd1, %rd2;\n" + STORE_BULK
"""Each CTA of a cluster copies to its own part of global memory."""
READY_CLUSTER = "".join(
    (
        *(test_clusters.RANK, "setp.ne.u32 %p1, %r1, 0;\n@%p1 bra INITIALISED;\n{}"),
        *("INITIALISED:\n", test_clusters.RELAXED, test_clusters.ARRIVED),
        *(test_clusters.WAITED, test_clusters.SYNC),
    )
)
WRITE_MAP = f"""
setp.gt.u32 %p4, %r1, 15;
mul.wide.u32 %rd4, %r1, 8;
add.s64 %rd5, %rd1, %rd4;
@!%p4 ld.global.b64 %rd6, [%rd5+{MAP_SOURCE}];
@!%p4 st.global.b64 [%rd5+{MAP}], %rd6;
"""
RELEASE_MAP = "fence.proxy.tensormap::generic.release.gpu;\n"
ACQUIRE_MAP = f"""
add.s64 %rd7, %rd1, {MAP};
fence.proxy.tensormap::generic.acquire.gpu [%rd7], 128;
"""
LOAD_BY_MAP = f"""
@%p1 bra LOADED;
mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 256;
add.s32 %r9, %r2, 1024;
mov.b32 %r6, 0;
add.s64 %rd8, %rd1, {MAP};
cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes
  [%r9], [%rd8, {{%r6, %r6}}], [%r2];
LOADED:
"""


@dataclasses.dataclass(frozen=True)
class Litmus:
    """An access and a fence, in the hole of a program.

    Attributes:
      rule: what is broken with the fence before the access, or without it.
    """

    name: str
    run: Run
    program: str
    access: str
    fence: str
    rule: str


def _asynchronous(fence: str) -> list[Litmus]:
    """A fence of the CTA's own shared memory: TMA reads and overwrites what the CTA stored."""
    return [
        Litmus(f"{fence}, {name}", one_cta, program, WRITE_COPY, f"{fence};\n", "proxy-fence")
        for name, program in (
            ("bulk copy from it", "{}bar.sync 0;" + STORE_BULK),
            ("bulk copy over it", "{}" + INIT_FENCED + COPY_256 + WAIT_0),
        )
    ]


ROWS = (
    *_asynchronous("fence.proxy.async"),
    *_asynchronous("fence.proxy.async.shared::cta"),
    *_asynchronous("fence.proxy.async.shared::cluster"),
    Litmus(
        "fence.proxy.async.shared::cluster, the other CTA copies from it",
        two_ctas,
        PAIR + "{}" + test_clusters.SYNC + STORE_OWN,
        test_clusters.WRITE_PEER,
        "fence.proxy.async.shared::cluster;\n",
        "proxy-fence",
    ),
    Litmus(
        "fence.proxy.async.global, bulk load of it",
        one_cta,
        "{}" + LOAD_BULK,
        STORE_GLOBAL,
        "fence.proxy.async.global;\n",
        "proxy-fence",
    ),
    Litmus(
        "fence.proxy.async, bulk load of global memory",
        one_cta,
        "{}" + LOAD_BULK,
        STORE_GLOBAL,
        "fence.proxy.async;\n",
        "proxy-fence",
    ),
    Litmus(
        "fence.mbarrier_init, bulk copy",
        one_cta,
        INIT_ALONE + COPY_256 + WAIT_0,
        INIT_BARRIER,
        "fence.mbarrier_init.release.cluster;\n",
        "proxy-fence",
    ),
    Litmus(
        "fence.mbarrier_init, arrival of the other CTA",
        two_ctas,
        READY_CLUSTER,
        INIT_BARRIER,
        "fence.mbarrier_init.release.cluster;\n",
        "race|phase-misuse",
    ),
    Litmus(
        "fence.proxy.tensormap release, load by the map",
        one_cta,
        INIT_FENCED + "{}" + BAR + ACQUIRE_MAP + LOAD_BY_MAP + WAIT_0,
        WRITE_MAP,
        RELEASE_MAP,
        "proxy-fence",
    ),
    Litmus(
        "fence.proxy.tensormap acquire, load by the map",
        one_cta,
        INIT_FENCED + WRITE_MAP + RELEASE_MAP + "{}" + LOAD_BY_MAP + WAIT_0,
        BAR,
        ACQUIRE_MAP,
        "proxy-fence",
    ),
    Litmus(
        "fence.acq_rel, relaxed arrival",
        two_ctas,
        PAIR + "{}" + test_clusters.RELAXED + test_clusters.READ_OWN + test_clusters.SYNC,
        test_clusters.WRITE_PEER,
        "fence.acq_rel.cluster;\n",
        "race",
    ),
    Litmus(
        "tcgen05.fence::before_thread_sync after a store",
        tensor_memory,
        "{}" + BAR + sm100_ptx.AFTER + MMA_P + END,
        ST_P + WAIT_ST,
        sm100_ptx.BEFORE,
        "tensor-fence",
    ),
    Litmus(
        "tcgen05.fence::before_thread_sync after a load",
        tensor_memory,
        "{}" + BAR + sm100_ptx.AFTER + MMA + END,
        LD + WAIT_LD,
        sm100_ptx.BEFORE,
        "tensor-fence",
    ),
    Litmus(
        "tcgen05.fence::after_thread_sync after a wait for a product",
        tensor_memory,
        MMA + "{}" + LD + WAIT_LD,
        sm100_ptx.wait(),
        sm100_ptx.AFTER,
        "tensor-fence",
    ),
    Litmus(
        "tcgen05.fence::after_thread_sync after a barrier",
        tensor_memory,
        ST_P + WAIT_ST + sm100_ptx.BEFORE + "{}" + MMA_P + END,
        BAR,
        sm100_ptx.AFTER,
        "tensor-fence",
    ),
    Litmus(
        "fence.proxy.async, operand of tcgen05.mma",
        tensor_memory,
        "{}" + BAR + MMA + END,
        test_tcgen05_litmus.WRITE_A,
        "fence.proxy.async.shared::cta;\n",
        "proxy-fence",
    ),
)


def _judge(row: Litmus, between: str, rule: str | None, policy: Policy, seed: int) -> None:
    strict = dataclasses.replace(policy, global_races=True, most_steps=200_000)
    body = row.program.replace("{}", between)
    if rule is None:
        row.run(body, strict, seed)
        return
    with pytest.raises(EmulationError) as caught:
        row.run(body, strict, seed)
    assert caught.value.rule in rule.split("|"), caught.value


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: f"{p.schedule}-{p.asynchronous}")
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_fence_after_the_access(row: Litmus, policy: Policy, seed: int) -> None:
    _judge(row, row.access + row.fence, None, policy, seed)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: f"{p.schedule}-{p.asynchronous}")
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_fence_before_the_access(row: Litmus, policy: Policy, seed: int) -> None:
    _judge(row, row.fence + row.access, row.rule, policy, seed)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: f"{p.schedule}-{p.asynchronous}")
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_no_fence(row: Litmus, policy: Policy, seed: int) -> None:
    _judge(row, row.access, row.rule, policy, seed)
