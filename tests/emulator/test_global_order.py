"""Two accesses to global memory and what lies between them: legal, or the rule that is broken.

Every row is a program of two CTAs of 64 threads. CTA 0 writes, signals by a flag after the data,
and CTA 1 waits for the flag and reads. `%p8` holds in CTA 1, `%p9` for all but a CTA's thread 0.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from kernels.emulator import EmulationError, Policy
from kernels.emulator.tensor_map import TensorMap, encode
from tests.emulator import programs
from tests.emulator.test_litmus import POLICIES

FLAG, MAP, TENSOR = 1024, 1152, 2048

START = f"""
mov.u32 %r3, %ctaid.x;
setp.ne.u32 %p8, %r3, 0;
setp.ne.u32 %p9, %r1, 0;
setp.gt.u32 %p7, %r1, 31;
mul.wide.u32 %rd2, %r1, 4;
add.s64 %rd3, %rd1, %rd2;
add.s64 %rd4, %rd1, {FLAG};
add.s64 %rd6, %rd1, {MAP};
add.s64 %rd7, %rd1, {TENSOR};
add.s64 %rd8, %rd7, %rd2;
shl.b32 %r4, %r1, 2; add.s32 %r5, %r4, %r2; mov.b32 %r6, 0; mov.b32 %r7, 0f3F800000;
add.s32 %r9, %r2, 1024;
@%p9 bra INITIALISED;
mbarrier.init.shared.b64 [%r2], 1;
fence.mbarrier_init.release.cluster;
INITIALISED:
bar.sync 0;
@%p8 bra READER;
"""
JOIN = "bra.uni END; READER:\n"
END = "\nEND:\n"
WRITE = "st.global.b32 [%rd8], %r1;\n"
READ = "ld.global.b32 %r10, [%rd8];\n"
SIGNAL = "bar.sync 0; @!%p9 red.release.gpu.global.add.u32 [%rd4], 1;\n"
AWAIT = """
@%p9 bra ARRIVED;
WAITING:
ld.acquire.gpu.global.b32 %r11, [%rd4];
setp.eq.b32 %p1, %r11, 0;
@%p1 bra WAITING;
ARRIVED:
bar.sync 0;
"""
FENCED_SIGNAL = (
    "bar.sync 0; @!%p9 fence.acq_rel.gpu; @!%p9 red.relaxed.gpu.global.add.u32 [%rd4], 1;"
)
RELAXED_AWAIT = AWAIT.replace("acquire", "relaxed")
FENCED_AWAIT = RELAXED_AWAIT.replace("ARRIVED:", "membar.gl; ARRIVED:")
PROXY = "fence.proxy.async.global;"
LOAD_BOX = """
@%p9 bra LOADED;
mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 256;
cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes
  [%r9], [%rd6, {%r6, %r6}], [%r2];
LOADED:
mbarrier.try_wait.parity.shared.b64 %p2, [%r2], 0;
@!%p2 bra LOADED;
"""
FILL = "st.shared.b32 [%r5+1024], %r1; fence.proxy.async.shared::cta; bar.sync 0;"
STORE_BOX = """
@%p9 bra STORED;
cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd6, {%r6, %r6}], [%r9];
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
STORED:
"""
REDUCE_BULK = """
@%p9 bra STORED;
cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%rd7], [%r9], 256;
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
STORED:
"""
REDUCE = "red.relaxed.gpu.global.add.u32 [%rd8], 1;\n"
REDUCED_TWICE = FILL + REDUCE_BULK


@dataclasses.dataclass(frozen=True)
class Litmus:
    """What CTA 0 and CTA 1 do; `rule` is None where the order is proven."""

    name: str
    rule: str | None
    writer: str
    reader: str


ROWS = (
    Litmus("store, release, acquire, load", None, WRITE + SIGNAL, AWAIT + READ),
    Litmus("store, load", "race", WRITE, READ),
    Litmus(
        "store, relaxed flag, load",
        "race",
        WRITE + SIGNAL.replace("release", "relaxed"),
        AWAIT + READ,
    ),
    Litmus("store, release, relaxed wait, load", "race", WRITE + SIGNAL, RELAXED_AWAIT + READ),
    Litmus("store, fence, relaxed flag, acquire, load", None, WRITE + FENCED_SIGNAL, AWAIT + READ),
    Litmus("store, release, relaxed wait, fence, load", None, WRITE + SIGNAL, FENCED_AWAIT + READ),
    Litmus(
        "store, fence, relaxed flag, relaxed wait, fence, load",
        None,
        WRITE + FENCED_SIGNAL,
        FENCED_AWAIT + READ,
    ),
    Litmus(
        "store, flag, fence, load",
        "race",
        WRITE + SIGNAL.replace("release", "relaxed") + "membar.gl;",
        AWAIT + READ,
    ),
    Litmus(
        "store, release by a store, acquire, load",
        None,
        WRITE + "bar.sync 0; @!%p9 st.release.gpu.global.b32 [%rd4], 1;",
        AWAIT + READ,
    ),
    Litmus(
        "store, flag by a weak store, acquire, load",
        "race",
        WRITE + "bar.sync 0; @!%p9 st.global.b32 [%rd4], 1;",
        AWAIT + READ,
    ),
    Litmus(
        "store, release by an exchange, acquire by an addition, load",
        None,
        WRITE + "bar.sync 0; @!%p9 atom.release.gpu.global.exch.b32 %r12, [%rd4], 1;",
        AWAIT.replace(
            "ld.acquire.gpu.global.b32 %r11, [%rd4];",
            "atom.acquire.gpu.global.add.u32 %r11, [%rd4], 0;",
        )
        + READ,
    ),
    Litmus(
        "release, relaxed addition by another thread, acquire, load",
        None,
        WRITE
        + "bar.sync 0; setp.ne.u32 %p3, %r1, 40;"
        + "@!%p3 red.release.gpu.global.add.u32 [%rd4], 1; bar.sync 0;"
        + "@!%p9 red.relaxed.gpu.global.add.u32 [%rd4], 1;",
        AWAIT.replace("setp.eq.b32 %p1, %r11, 0;", "setp.ne.b32 %p1, %r11, 2;") + READ,
    ),
    Litmus(
        "store, no barrier before the release",
        "race",
        WRITE + SIGNAL.replace("bar.sync 0;", ""),
        AWAIT + READ,
    ),
    Litmus(
        "store, release, acquire, no barrier after it",
        "race",
        WRITE + SIGNAL,
        AWAIT.replace("bar.sync 0;", "") + READ,
    ),
    Litmus("load, store", "race", READ, WRITE),
    Litmus("load, release, acquire, store", None, READ + SIGNAL, AWAIT + WRITE),
    Litmus("store, store", "race", WRITE, WRITE),
    Litmus(
        "stores of halves of a word",
        None,
        "st.global.b16 [%rd8], %rs1;",
        "st.global.b16 [%rd8+2], %rs1;",
    ),
    Litmus("additions", None, REDUCE, REDUCE),
    Litmus("additions and a store", "race", REDUCE, WRITE),
    Litmus("additions, release, acquire, load", None, REDUCE + SIGNAL, AWAIT + READ),
    Litmus(
        "additions, relaxed flag, load",
        "race",
        REDUCE + SIGNAL.replace("release", "relaxed"),
        AWAIT + READ,
    ),
    Litmus("additions, TMA's additions", None, REDUCE, REDUCED_TWICE),
    Litmus("store, TMA's additions", "race", WRITE, REDUCED_TWICE),
    Litmus(
        "TMA's additions, release, acquire, load", None, FILL + REDUCE_BULK + SIGNAL, AWAIT + READ
    ),
    Litmus(
        "TMA's additions that only read, release, acquire, load",
        "race",
        FILL + REDUCE_BULK.replace("wait_group", "wait_group.read") + SIGNAL,
        AWAIT + READ,
    ),
    Litmus("store, release, acquire, TMA load", "proxy-fence", WRITE + SIGNAL, AWAIT + LOAD_BOX),
    Litmus(
        "store, proxy fence, release, acquire, TMA load",
        None,
        WRITE + PROXY + SIGNAL,
        AWAIT + LOAD_BOX,
    ),
    Litmus(
        "store, release, acquire, proxy fence of the reader, TMA load",
        "proxy-fence",
        WRITE + SIGNAL,
        AWAIT + "fence.proxy.async;" + LOAD_BOX,
    ),
    Litmus(
        "store, proxy fence of shared memory, release, acquire, TMA load",
        "proxy-fence",
        WRITE + "fence.proxy.async.shared::cta;" + SIGNAL,
        AWAIT + LOAD_BOX,
    ),
    Litmus("store, TMA load", "race", WRITE, LOAD_BOX),
    Litmus("TMA store, release, acquire, load", None, FILL + STORE_BOX + SIGNAL, AWAIT + READ),
    Litmus(
        "TMA store that only reads, release, acquire, load",
        "race",
        FILL + STORE_BOX.replace("wait_group", "wait_group.read") + SIGNAL,
        AWAIT + READ,
    ),
    Litmus(
        "TMA store, release, acquire, TMA load", None, FILL + STORE_BOX + SIGNAL, AWAIT + LOAD_BOX
    ),
    Litmus("TMA store, TMA load", "race", FILL + STORE_BOX, LOAD_BOX),
    Litmus("TMA store, TMA store", "race", FILL + STORE_BOX, FILL + STORE_BOX),
    Litmus("TMA store by all lanes of a warp", None, FILL + STORE_BOX.replace("%p9", "%p7"), ""),
    Litmus("TMA store by two warps", "race", FILL + STORE_BOX.replace("@%p9 bra STORED;", ""), ""),
    Litmus("TMA load, store", "race", LOAD_BOX, WRITE),
    Litmus("TMA load, release, acquire, store", None, LOAD_BOX + SIGNAL, AWAIT + WRITE),
    Litmus(
        "TMA load without its wait, release, acquire, store",
        "race|outstanding",
        LOAD_BOX[: LOAD_BOX.index("mbarrier.try")] + SIGNAL,
        AWAIT + WRITE,
    ),
    Litmus("TMA loads", None, LOAD_BOX, LOAD_BOX),
    Litmus(
        "within a CTA: store, load of a neighbour's",
        "race",
        WRITE + "ld.global.b32 %r10, [%rd8+4];",
        "",
    ),
    Litmus(
        "within a CTA: store, barrier, load of a neighbour's",
        None,
        WRITE + "bar.sync 0; ld.global.b32 %r10, [%rd8+4];",
        "",
    ),
    Litmus(
        "within a warp: load of a neighbour's, store",
        "race",
        "setp.gt.u32 %p3, %r1, 30; @%p3 bra SKIP; ld.global.b32 %r10, [%rd8+4]; SKIP:" + WRITE,
        "",
    ),
    Litmus(
        "within a CTA: store, release, acquire by another warp, load",
        None,
        WRITE + "bar.warp.sync -1; @!%p9 red.release.gpu.global.add.u32 [%rd4], 1;"
        "setp.ne.u32 %p4, %r1, 32; @%p4 bra ARRIVED;"
        "WAITING: ld.acquire.gpu.global.b32 %r11, [%rd4];"
        "setp.eq.b32 %p1, %r11, 0; @%p1 bra WAITING; ld.global.b32 %r10, [%rd7]; ARRIVED:",
        "",
    ),
)


def run(row: Litmus, policy: Policy, seed: int) -> None:
    data = np.zeros(4096, np.uint8)
    tensor = TensorMap(programs.ADDRESS + TENSOR, "u32", (8, 8), (32,), (8, 8))
    data[MAP : MAP + 128] = np.frombuffer(encode(tensor), np.uint8)
    policy = dataclasses.replace(policy, most_steps=200_000)
    writer = row.writer.replace("LOADED", "LOADED_0").replace("STORED", "STORED_0")
    body = START + writer + JOIN + row.reader + END
    programs.run(body, data, programs.Launch(64, grid=2, policy=policy, seed=seed))


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: f"{p.schedule}-{p.asynchronous}")
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_litmus(row: Litmus, policy: Policy, seed: int) -> None:
    strict = dataclasses.replace(policy, global_races=True)
    if row.rule is None:
        run(row, strict, seed)
        return
    with pytest.raises(EmulationError) as caught:
        run(row, strict, seed)
    assert caught.value.rule in row.rule.split("|"), caught.value


def test_only_on_request(seed: int) -> None:
    """Without Policy.global_races nobody looks at global memory."""
    row = next(row for row in ROWS if row.name == "store, load")
    run(row, Policy(), seed)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: f"{p.schedule}-{p.asynchronous}")
def test_bulk_reductions_in_order(policy: Policy, seed: int) -> None:
    """Additions of TMA in turn: their order is proven only if each is complete at its release."""
    policy = dataclasses.replace(policy, ordered_reductions=True)
    good = Litmus("", None, FILL + REDUCE_BULK + SIGNAL, AWAIT + FILL + REDUCE_BULK)
    run(good, policy, seed)
    early = REDUCE_BULK.replace("wait_group", "wait_group.read")
    for bad in (
        dataclasses.replace(good, writer=FILL + early + SIGNAL),
        dataclasses.replace(good, reader=RELAXED_AWAIT + FILL + REDUCE_BULK),
        dataclasses.replace(good, reader=FILL + REDUCE_BULK),
    ):
        with pytest.raises(EmulationError, match="reduction-order"):
            run(bad, policy, seed)


TURNS = """
setp.ne.u32 %p9, %r1, 0; @%p9 bra OVER;
mov.u32 %r3, %ctaid.x;
{ticket}
WAITING: ld.acquire.gpu.global.u32 %r4, [%rd1]; setp.ne.u32 %p1, %r4, %r3; @%p1 bra WAITING;
red.release.gpu.global.add.u32 [%rd1], 1;
OVER:
"""


@pytest.mark.parametrize("start_order", ["index", "reversed", "random"])
@pytest.mark.parametrize("resident_ctas", [1, 3])
def test_start_order(start_order: str, resident_ctas: int, seed: int) -> None:
    """CTAs that wait for those of lower index need these to have started; by tickets they have."""
    order = {"start_order": start_order, "resident_ctas": resident_ctas, "most_steps": 5000}
    launch = programs.Launch(grid=8, policy=Policy(**order), seed=seed)
    counters = np.zeros(2, np.uint32)
    taken = "atom.relaxed.gpu.global.add.u32 %r3, [%rd1+4], 1;"
    programs.run(TURNS.format(ticket=taken), counters.view(np.uint8), launch)
    assert counters.tolist() == [8, 8]

    counters[:] = 0
    by_index = TURNS.format(ticket="")
    if start_order == "index":
        programs.run(by_index, counters.view(np.uint8), launch)
        assert counters[0] == 8
    elif start_order == "reversed":
        with pytest.raises(EmulationError, match="deadlock"):
            programs.run(by_index, counters.view(np.uint8), launch)
