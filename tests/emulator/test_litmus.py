"""Two accesses and what lies between them: legal, or the error that names the rule.

Each row is a small program; `rule` is None where the order is proven, else what is broken: one rule
or, where it depends on who comes first, two. Every row runs under several
schedules: whether a row is legal must not depend on them.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from kernels.emulator import EmulationError, Policy
from kernels.emulator.tensor_map import TensorMap, encode
from tests.emulator import programs

POLICIES = (
    Policy("in_order", "late"),
    Policy("random", "early"),
    Policy("starve", "random"),
)

INIT = """
setp.ne.u32 %p1, %r1, 0;
@%p1 bra INITIALISED;
mbarrier.init.shared.b64 [%r2], 1;
{fence}
INITIALISED:
bar.sync 0;
"""
INIT_BY_WARP = """
setp.ge.u32 %p1, %r1, 32;
@%p1 bra INITIALISED;
mbarrier.init.shared.b64 [%r2], {count};
fence.mbarrier_init.release.cluster;
INITIALISED:
bar.sync 0;
"""
INIT_FENCED = INIT.format(fence="fence.mbarrier_init.release.cluster;")

WAIT = """
{{
.reg .pred done;
AGAIN:
mbarrier.try_wait.parity.shared.b64 done, [%r2], {parity}, 1000;
@done bra.uni PASSED;
bra.uni AGAIN;
PASSED:
}}
"""
WAIT_0 = WAIT.format(parity=0)

COPY = """
setp.ne.u32 %p2, %r1, 0;
@%p2 bra COPIED;
mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r2], {expected};
add.s32 %r9, %r2, 1024;
cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r9], [%rd1], 256, [%r2];
COPIED:
"""
COPY_256 = COPY.format(expected=256)
READ_COPY = "shl.b32 %r10, %r1, 2; add.s32 %r11, %r2, %r10; ld.shared.b32 %r12, [%r11+1024];\n"
WRITE_COPY = "shl.b32 %r10, %r1, 2; add.s32 %r11, %r2, %r10; st.shared.b32 [%r11+1024], %r1;\n"
"""Every thread's own word, so that a neighbour's is another thread's."""
READ_NEXT = """
add.s32 %r20, %r1, 1; and.b32 %r20, %r20, 63; shl.b32 %r20, %r20, 2; add.s32 %r20, %r2, %r20;
ld.shared.b32 %r21, [%r20+1024];
"""
STORE = """
setp.ne.u32 %p3, %r1, 0;
@%p3 bra STORED;
add.s32 %r9, %r2, 1024;
mov.b64 %rd20, test_param_0;
add.s64 %rd21, %rd1, 1024;
mov.b32 %r30, 0;
cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd21, {{%r30, %r30}}], [%r9];
{end}
STORED:
"""
STORE_WAITED = STORE.format(end="cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;")


NEIGHBOUR = """
and.b32 %r5, %r1, 31; setp.eq.u32 %p5, %r5, 31; shl.b32 %r10, %r1, 2; add.s32 %r11, %r2, %r10;
@!%p5 ld.shared.b32 %r21, [%r11+1028];
{between}
st.shared.b32 [%r11+1024], %r1;
"""
LOADS_OF_TWO = """
and.b32 %r5, %r1, 31; setp.eq.u32 %p5, %r5, 7; setp.eq.u32 %p6, %r1, 40;
@%p5 ld.shared.b32 %r21, [%r2+1024];
{between}
@%p6 st.shared.b32 [%r2+1024], %r1;
"""
LOADS_IN_TURN = """
setp.ne.u32 %p1, %r1, 0; setp.eq.u32 %p4, %r1, 3; setp.eq.u32 %p5, %r1, 5; setp.eq.u32 %p6, %r1, 40;
@!%p1 mbarrier.init.shared.b64 [%r2], 9;
@!%p1 mbarrier.init.shared.b64 [%r2+8], {count};
bar.sync 0;
@%p4 ld.shared.b32 %r21, [%r2+1024];
{first}
@!%p1 mbarrier.arrive.shared.b64 _, [%r2];
@%p5 ld.shared.b32 %r21, [%r2+1024];
@%p5 mbarrier.arrive.shared.b64 _, [%r2+8];
@!%p6 bra END;
AGAIN:
mbarrier.try_wait.parity.shared.b64 %p7, [%r2+8], 0;
@!%p7 bra AGAIN;
st.shared.b32 [%r2+1024], %r1;
END:
"""
ONE_ARRIVES_FOR_ALL = """
setp.ne.u32 %p1, %r1, 0; and.b32 %r5, %r1, 31; setp.ne.u32 %p5, %r5, 0;
@!%p1 mbarrier.init.shared.b64 [%r2], 1;
@!%p1 mbarrier.init.shared.b64 [%r2+8], 2;
@!%p1 fence.mbarrier_init.release.cluster;
bar.sync 0;
shl.b32 %r10, %r1, 2; add.s32 %r11, %r2, %r10; ld.shared.b32 %r12, [%r11+1024];
{between}
@!%p5 mbarrier.arrive.shared.b64 _, [%r2+8];
@%p1 bra COPIED;
AGAIN:
mbarrier.try_wait.parity.shared.b64 %p7, [%r2+8], 0;
@!%p7 bra AGAIN;
add.s32 %r9, %r2, 1024;
mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 256;
cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r9], [%rd1], 256, [%r2];
COPIED:
"""
STORED_OVER = (
    ONE_ARRIVES_FOR_ALL.partition("mbarrier.arrive.expect_tx")[0]
    + """
st.shared.b32 [%r9+4], %r1;
COPIED:
"""
)
EVERYBODY = INIT.format(fence="").replace("], 1;", "], 64;")
STATE = (
    WRITE_COPY
    + EVERYBODY.replace("bar.sync 0;", "bar.sync 0; shl.b32 %r10, %r1, 2; add.s32 %r11, %r2, %r10;")
    + """
st.shared.b32 [%r11+1024], %r1;
mbarrier.arrive{order}.shared.b64 %rd9, [%r2];
STATE: mbarrier.test_wait.shared.b64 %p7, [%r2], %rd9; @!%p7 bra STATE;
"""
)
FLAG = """
setp.eq.u32 %p1, %r1, 0; setp.eq.u32 %p2, %r1, 32;
@%p1 st.shared.b32 [%r2+2048], 0;
bar.sync 0;
@%p1 st.shared.b32 [%r2+1024], %r1;
@%p1 st.{st}.cta.shared.b32 [%r2+2048], 1;
@!%p2 bra END;
AGAIN:
ld.{ld}.cta.shared.b32 %r5, [%r2+2048]; setp.eq.u32 %p3, %r5, 0; @%p3 bra AGAIN;
ld.shared.b32 %r6, [%r2+1024];
END:
"""


@dataclasses.dataclass(frozen=True)
class Litmus:
    """A program of 64 threads."""

    name: str
    rule: str | None
    body: str


ROWS = (
    Litmus("store, barrier, load", None, WRITE_COPY + "bar.sync 0;" + READ_NEXT),
    Litmus("store, load", "race", WRITE_COPY + READ_NEXT),
    Litmus(
        "store, barrier of the wrong half, load",
        "race",
        WRITE_COPY + "shr.u32 %r5, %r1, 5; add.s32 %r5, %r5, 1; bar.sync %r5, 32;" + READ_NEXT,
    ),
    Litmus(
        "load, store of another thread",
        "race",
        WRITE_COPY + "bar.sync 0;" + READ_NEXT + WRITE_COPY,
    ),
    Litmus(
        "load, barrier, store of another thread",
        None,
        WRITE_COPY + "bar.sync 0;" + READ_NEXT + "bar.sync 0;" + WRITE_COPY,
    ),
    Litmus("load of a neighbour's, store", "race", NEIGHBOUR.format(between="")),
    Litmus(
        "load of a neighbour's, warp's barrier, store",
        None,
        NEIGHBOUR.format(between="bar.warp.sync -1;"),
    ),
    Litmus(
        "loads by lanes of two warps, store that knows of one",
        "race",
        LOADS_OF_TWO.format(between="bar.warp.sync -1;"),
    ),
    Litmus(
        "loads by lanes of two warps, store that knows of both",
        None,
        LOADS_OF_TWO.format(between="bar.sync 0;"),
    ),
    Litmus(
        "loads by two lanes of a warp, store that knows of the later one",
        "race",
        LOADS_IN_TURN.format(count=1, first=""),
    ),
    Litmus(
        "loads by two lanes of a warp, store that knows of both",
        None,
        LOADS_IN_TURN.format(count=2, first="@%p4 mbarrier.arrive.shared.b64 _, [%r2+8];"),
    ),
    Litmus(
        "load by all lanes of one word, store of one of them",
        "race",
        "ld.shared.b32 %r5, [%r2+1024]; setp.eq.u32 %p4, %r1, 40; bar.warp.sync -1;"
        "@%p4 st.shared.b32 [%r2+1024], %r1;",
    ),
    Litmus(
        "copy, test_wait, load",
        None,
        INIT_FENCED + COPY_256 + WAIT_0.replace("try", "test").replace(", 1000", "") + READ_COPY,
    ),
    Litmus("arrival, wait by its state, load", None, STATE.format(order="") + READ_NEXT),
    Litmus(
        "relaxed arrival, wait by its state, load",
        "race",
        STATE.format(order=".relaxed.cta") + READ_NEXT,
    ),
    Litmus(
        "an arrival that is dropped",
        None,
        EVERYBODY
        + "setp.eq.u32 %p6, %r1, 5; @%p6 mbarrier.arrive_drop.shared.b64 _, [%r2];"
        + "@!%p6 mbarrier.arrive.shared.b64 _, [%r2];"
        + WAIT_0
        + "@!%p6 mbarrier.arrive.shared.b64 _, [%r2];"
        + WAIT.format(parity=1),
    ),
    Litmus(
        "an arrival that is not dropped",
        "deadlock",
        EVERYBODY
        + "setp.eq.u32 %p6, %r1, 5; mbarrier.arrive.shared.b64 _, [%r2];"
        + WAIT_0
        + "@!%p6 mbarrier.arrive.shared.b64 _, [%r2];"
        + WAIT.format(parity=1),
    ),
    Litmus(
        "mbarrier.inval, ordinary store",
        None,
        EVERYBODY + "@%p1 bra END; mbarrier.inval.shared.b64 [%r2]; st.shared.b64 [%r2], 5; END:",
    ),
    Litmus(
        "mbarrier.inval in mid-phase",
        "phase-misuse",
        EVERYBODY
        + "@%p1 bra END; mbarrier.arrive.shared.b64 _, [%r2];"
        + "mbarrier.inval.shared.b64 [%r2]; END:",
    ),
    Litmus(
        "store, fence of global memory alone, copy over it",
        "proxy-fence",
        WRITE_COPY + "fence.proxy.async.global;" + INIT_FENCED + COPY_256 + WAIT_0,
    ),
    Litmus(
        "flag in shared memory: release, acquire, load",
        None,
        FLAG.format(st="release", ld="acquire"),
    ),
    Litmus("flag in shared memory: relaxed store", "race", FLAG.format(st="relaxed", ld="acquire")),
    Litmus("flag in shared memory: relaxed load", "race", FLAG.format(st="release", ld="relaxed")),
    Litmus("additions to a shared word", None, "atom.shared.add.u32 %r5, [%r2+1024], 1;"),
    Litmus(
        "additions to a shared word, load",
        "race",
        "red.shared.add.u32 [%r2+1024], 1; ld.shared.b32 %r5, [%r2+1024];",
    ),
    Litmus(
        "additions to a shared word, barrier, load",
        None,
        "red.shared.add.u32 [%r2+1024], 1; bar.sync 0; ld.shared.b32 %r5, [%r2+1024];",
    ),
    Litmus("copy, wait, load", None, INIT_FENCED + COPY_256 + WAIT_0 + READ_COPY),
    Litmus("copy, load", "race", INIT_FENCED + COPY_256 + READ_COPY),
    Litmus("copy, barrier, load", "race", INIT_FENCED + COPY_256 + "bar.sync 0;" + READ_COPY),
    Litmus(
        "copy, wait of one warp, barrier, load",
        None,
        INIT_FENCED
        + COPY_256
        + "setp.gt.u32 %p4, %r1, 31; @%p4 bra BEHIND;"
        + WAIT_0
        + "BEHIND: bar.sync 0;"
        + READ_COPY,
    ),
    Litmus(
        "initialisation without fence, copy",
        "proxy-fence",
        INIT.format(fence="") + COPY_256 + WAIT_0,
    ),
    Litmus(
        "initialisation, no barrier, arrival",
        "race|phase-misuse",
        INIT_FENCED.replace("bar.sync 0;", "") + "mbarrier.arrive.shared.b64 %rd9, [%r2], 1;",
    ),
    Litmus(
        "store, barrier, copy over it",
        "proxy-fence",
        WRITE_COPY + INIT_FENCED + COPY_256 + WAIT_0,
    ),
    Litmus(
        "store, fence, barrier, copy over it",
        None,
        WRITE_COPY + "fence.proxy.async.shared::cta;" + INIT_FENCED + COPY_256 + WAIT_0,
    ),
    Litmus(
        "store, barrier, fence of the copying thread, copy over it",
        "proxy-fence",
        WRITE_COPY + INIT_FENCED + "fence.proxy.async.shared::cta;" + COPY_256 + WAIT_0,
    ),
    Litmus(
        "copy, wait, load, copy over it",
        "race",
        INIT_FENCED
        + COPY_256
        + WAIT_0
        + READ_COPY
        + COPY_256.replace("COPIED", "TWICE")
        + WAIT.format(parity=1),
    ),
    Litmus(
        "copy, wait, load, barrier, copy over it",
        None,
        INIT_FENCED
        + COPY_256
        + WAIT_0
        + READ_COPY
        + "bar.sync 0;"
        + COPY_256.replace("COPIED", "TWICE")
        + WAIT.format(parity=1),
    ),
    Litmus(
        "loads by all lanes, barrier, arrival of one, copy over it",
        None,
        ONE_ARRIVES_FOR_ALL.format(between="bar.sync 1, 64;") + WAIT_0,
    ),
    Litmus(
        "loads by all lanes, arrival of one, copy over it",
        "race",
        ONE_ARRIVES_FOR_ALL.format(between="") + WAIT_0,
    ),
    Litmus(
        "loads by all lanes, barrier of the warp, arrival of one, store over it",
        None,
        STORED_OVER.format(between="bar.warp.sync 0xffffffff;"),
    ),
    Litmus(
        "loads by all lanes, arrival of one, store over it",
        "race",
        STORED_OVER.format(between=""),
    ),
    Litmus("copy, nobody waits", "outstanding", INIT_FENCED + COPY_256),
    Litmus(
        "too few bytes expected",
        "deadlock",
        INIT_FENCED + COPY.format(expected=128) + WAIT_0,
    ),
    Litmus("too many bytes expected", "deadlock", INIT_FENCED + COPY.format(expected=512) + WAIT_0),
    Litmus("wait for a phase that never comes", "deadlock", INIT_FENCED + WAIT_0),
    Litmus(
        "an arrival too many",
        "arrival-overflow",
        INIT_FENCED.replace("], 1;", "], 3;") + "mbarrier.arrive.shared.b64 %rd9, [%r2], 1;",
    ),
    Litmus("arrival without initialisation", "phase-misuse", COPY_256),
    Litmus(
        "a warp initialises an mbarrier", None, INIT_BY_WARP.format(count=1) + COPY_256 + WAIT_0
    ),
    Litmus(
        "lanes initialise an mbarrier differently",
        "phase-misuse",
        "add.s32 %r8, %r1, 1;" + INIT_BY_WARP.format(count="%r8"),
    ),
    Litmus(
        "warps initialise an mbarrier",
        "phase-misuse|race",
        INIT_BY_WARP.format(count=1).replace(", 32;", ", 64;"),
    ),
    Litmus(
        "ordinary store to an mbarrier", "phase-misuse", INIT_FENCED + "st.shared.b32 [%r2], %r1;"
    ),
    Litmus(
        "store, fence, barrier, TMA store, wait",
        None,
        WRITE_COPY + "fence.proxy.async.shared::cta; bar.sync 0;" + STORE_WAITED,
    ),
    Litmus(
        "store, barrier, TMA store, wait",
        "proxy-fence",
        WRITE_COPY + "bar.sync 0;" + STORE_WAITED,
    ),
    Litmus(
        "TMA store, exit",
        "outstanding",
        WRITE_COPY
        + "fence.proxy.async.shared::cta; bar.sync 0;"
        + STORE.format(end="cp.async.bulk.commit_group;"),
    ),
    Litmus(
        "TMA store, overwrite",
        "race",
        WRITE_COPY
        + "fence.proxy.async.shared::cta; bar.sync 0;"
        + STORE.format(
            end="cp.async.bulk.commit_group; st.shared.b32 [%r9], %r1;cp.async.bulk.wait_group 0;"
        ),
    ),
    Litmus(
        "barrier that half of the threads reach",
        "deadlock",
        "setp.gt.u32 %p1, %r1, 31; @%p1 ret; bar.sync 0;",
    ),
    Litmus(
        "barrier in a divergent warp",
        "convergence",
        "setp.eq.u32 %p1, %r1, 7; @%p1 bra SKIP; bar.sync 0; SKIP:",
    ),
    Litmus(
        "barrier for different counts",
        "participants",
        "shr.u32 %r5, %r1, 5; shl.b32 %r5, %r5, 5; add.s32 %r5, %r5, 96; bar.sync 1, %r5;",
    ),
    Litmus("arrivals that nobody waits for", "participants", "bar.arrive 1, 96;"),
    Litmus(
        "warps arrive, then wait: two arrivals each",
        None,
        "shr.u32 %r5, %r1, 5; add.s32 %r5, %r5, 1; bar.arrive %r5, 64; bar.sync %r5, 64;",
    ),
    Litmus("warps arrive twice", "participants", "bar.arrive 1, 192; bar.arrive 1, 192;"),
    Litmus(
        "warps meet at two places",
        "participants",
        """
        setp.gt.u32 %p1, %r1, 31;
        @%p1 bra SECOND;
        bar.sync 1;
        bra DONE;
        SECOND:
        bar.sync 1;
        DONE:
        """,
    ),
    Litmus(
        "some warps arrive at one place, the others wait at another",
        None,
        """
        setp.gt.u32 %p1, %r1, 31;
        @%p1 bra SECOND;
        bar.arrive 1, 64;
        bra DONE;
        SECOND:
        bar.sync 1, 64;
        DONE:
        """,
    ),
    Litmus(
        "shuffle in a divergent warp",
        "convergence",
        "setp.eq.u32 %p1, %r1, 7; @%p1 bra SKIP; shfl.sync.idx.b32 %r5, %r1, 0, 31, -1; SKIP:",
    ),
    Litmus("store past shared memory", "out-of-bounds", "st.shared.b32 [%r2+4096], %r1;"),
    Litmus("misaligned store", "misaligned", "st.shared.b32 [%r2+2], %r1;"),
    Litmus("load before global memory", "out-of-bounds", "ld.global.b32 %r5, [%rd1+-4];"),
    Litmus("loop without end", "livelock", "FOREVER: add.s32 %r5, %r5, 1; bra FOREVER;"),
)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: f"{p.schedule}-{p.asynchronous}")
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_litmus(row: Litmus, policy: Policy, seed: int) -> None:
    data = np.zeros(2048, np.uint8)
    tensor = TensorMap(programs.ADDRESS, "f32", (4, 4), (16,), (4, 4))
    data[1024:1152] = np.frombuffer(encode(tensor), np.uint8)
    policy = dataclasses.replace(policy, most_steps=200_000)
    launch = programs.Launch(threads=64, policy=policy, seed=seed)
    if row.rule is None:
        programs.run(row.body, data, launch)
        return
    with pytest.raises(EmulationError) as caught:
        programs.run(row.body, data, launch)
    assert caught.value.rule in row.rule.split("|"), caught.value
    assert "test, CTA (0, 0, 0), warp" in str(caught.value)
