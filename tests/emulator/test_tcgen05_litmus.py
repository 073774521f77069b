"""tcgen05 operations and what lies between them: legal, or the error that names the rule.

Each row is a program of 128 threads, by the memory consistency model of tcgen05 in the PTX ISA.
Every row runs under several schedules: whether it is legal must not depend on them.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np
import pytest

from kernels.emulator import EmulationError, Policy
from kernels.emulator.machine.cta import SHARED_BASE
from tests.emulator import sm100_ptx
from tests.emulator.programs import Launch
from tests.emulator.sm100_ptx import (
    AFTER,
    ALLOCATE,
    BEFORE,
    FREE,
    WAIT_LD,
    WAIT_ST,
    commit,
    one,
    wait,
)

POLICIES = (
    Policy("in_order", "late"),
    Policy("random", "early"),
    Policy("starve", "random"),
)
BAR = "bar.sync 0;\n"
FENCED_BAR = BEFORE + BAR + AFTER
P_COLUMN = 256


def operand(at: int) -> int:
    """The descriptor of 128 rows of 32 bytes, swizzled by 32, at [%r2 + at]."""
    return (SHARED_BASE + at) >> 4 | 256 >> 4 << 32 | 1 << 46 | 6 << 61


def mma(
    d: int = 0, a: int | str = operand(2048), columns: int = 64, accumulate: bool = True
) -> str:
    """A product; `a` is a descriptor or a place in tensor memory."""
    descriptor = 1 << 4 | 1 << 7 | 1 << 10 | columns >> 3 << 17 | 8 << 24
    source = f"mov.b64 %rd10, {a};\n" if isinstance(a, int) else ""
    name = "%rd10" if isinstance(a, int) else a
    return (
        f"{source}mov.b64 %rd11, {operand(8192)};\nadd.s32 %r8, %r3, {d};\n"
        f"setp.eq.b32 %p5, 0, {int(not accumulate)};\n"
        f"tcgen05.mma.cta_group::1.kind::f16 [%r8], {name}, %rd11, {descriptor}, %p5;\n"
    )


P = f"[%r3+{P_COLUMN}]"
MMA = one(mma(accumulate=False) + commit())
MMA_P = one(mma(a=P, accumulate=False) + commit())
P_PRODUCT = mma(a=P, accumulate=False) + commit()
WAITED = wait() + AFTER
PLAIN, RELAXED_FORM = "try_wait.parity.shared", "try_wait.parity.relaxed.cluster.shared"
RELAXED = wait().replace(PLAIN, RELAXED_FORM)
RELAXED_8 = wait(8).replace(PLAIN, RELAXED_FORM)
ARRIVE_RELAXED = "mbarrier.arrive.relaxed.cluster.shared.b64 %rd9, [%r2+8], 1;\n"
LD = "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r100, %r101}, [%r4];\n"
ST = "tcgen05.st.sync.aligned.32x32b.x2.b32 [%r4], {%r1, %r1};\n"
LD_P = f"tcgen05.ld.sync.aligned.32x32b.x8.b32 {sm100_ptx.registers(100, 8)}, [%r4+{P_COLUMN}];\n"
ST_P = f"tcgen05.st.sync.aligned.32x32b.x8.b32 [%r4+{P_COLUMN}], {sm100_ptx.registers(110, 8)};\n"
P_READY = ST_P + WAIT_ST + FENCED_BAR
USE = "add.s32 %r90, %r100, 1;\n"
END = wait() + AFTER
"""Waits for the product, so that nothing is outstanding at the end."""
WRITE_A = "shl.b32 %r91, %r1, 5;\nadd.s32 %r91, %r91, %r2;\nst.shared.b32 [%r91+2048], %r1;\n"
CP = (
    f"mov.b64 %rd12, {operand(2048)};\nadd.s32 %r93, %r3, {P_COLUMN};\n"
    "tcgen05.cp.cta_group::1.128x256b [%r93], %rd12;\n"
)
SHIFT = f"add.s32 %r93, %r3, {P_COLUMN};\ntcgen05.shift.cta_group::1.down [%r93];\n"
FENCE = "fence.proxy.async.shared::cta;\n"
NO_BARRIER = FREE.replace("bar.sync 0;", "").replace("FREED", "GONE") + "ret;\n"
COPY_A = one(
    "mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r2+16], 4096;\nadd.s32 %r92, %r2, 2048;\n"
    "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r92], [%rd1], 4096, "
    "[%r2+16];\n"
)


STORE_16 = (
    "add.s32 %r92, %r2, 2048;\ncp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r92], 16;\n"
    "cp.async.bulk.commit_group;\n"
)


def one_lane_arrives(before: str) -> str:
    """Warp 1 stores its lanes of P; its first lane signals thread 0, which multiplies with P."""
    store = f"setp.ne.u32 %p7, %r5, 1;\n@%p7 bra OTHERS;\n{ST_P}{WAIT_ST}{BEFORE}{before}"
    arrive = one("mbarrier.arrive.shared.b64 %rd9, [%r2+8], 128;\n", 32)
    product = one(wait(8) + AFTER + mma(a=P, accumulate=False) + commit())
    return store + arrive + "OTHERS:\n" + product + END


@dataclasses.dataclass(frozen=True)
class Litmus:
    """A program of 128 threads, with tensor memory allocated, and the rule that it breaks."""

    name: str
    rule: str | None
    body: str


ROWS = (
    Litmus("product, commit, wait, fence, load", None, MMA + WAITED + LD + WAIT_LD),
    Litmus("product, commit, wait, load", "tensor-fence", MMA + wait() + LD + WAIT_LD),
    Litmus("product, commit, barrier, load", "race", MMA + FENCED_BAR + LD + WAIT_LD + END),
    Litmus(
        "product, barrier, load",
        "race",
        one(mma(accumulate=False)) + FENCED_BAR + LD + WAIT_LD,
    ),
    Litmus(
        "one thread waits, barrier, fence, load",
        None,
        MMA + one(wait()) + BAR + AFTER + LD + WAIT_LD,
    ),
    Litmus(
        "one thread waits, barrier, load", "tensor-fence", MMA + one(wait()) + BAR + LD + WAIT_LD
    ),
    Litmus("one thread waits, load", "race", MMA + one(wait()) + AFTER + LD + WAIT_LD),
    Litmus("store, wait, fences, product with it", None, ST_P + WAIT_ST + FENCED_BAR + MMA_P + END),
    Litmus("store, fences, product with it", "tensor-wait", ST_P + FENCED_BAR + MMA_P + END),
    Litmus(
        "store, wait, barrier, fence, product with it",
        "tensor-fence",
        ST_P + WAIT_ST + BAR + AFTER + MMA_P + END,
    ),
    Litmus(
        "store, wait, fence, barrier, product with it",
        "tensor-fence",
        ST_P + WAIT_ST + BEFORE + BAR + MMA_P + END,
    ),
    Litmus(
        "store, fence, wait, barrier, fence, product with it",
        "tensor-fence",
        ST_P + BEFORE + WAIT_ST + BAR + AFTER + MMA_P + END,
    ),
    Litmus("store, wait, product with it", "race", ST_P + WAIT_ST + BEFORE + AFTER + MMA_P + END),
    Litmus(
        "store into D, wait, fences, product onto it",
        None,
        ST + WAIT_ST + FENCED_BAR + one(mma() + commit()) + END,
    ),
    Litmus("load, wait, fences, product over it", None, LD + WAIT_LD + FENCED_BAR + MMA + END),
    Litmus("load, fences, product over it", "tensor-wait", LD + FENCED_BAR + MMA + END + WAIT_LD),
    Litmus(
        "load, wait, barrier, fence, product over it",
        "tensor-fence",
        LD + WAIT_LD + BAR + AFTER + MMA + END,
    ),
    Litmus(
        "load, wait, fence, barrier, product over it",
        "tensor-fence",
        LD + WAIT_LD + BEFORE + BAR + MMA + END,
    ),
    Litmus("load, wait, product over it", "race", LD + WAIT_LD + BEFORE + AFTER + MMA + END),
    Litmus("store, wait, load", None, ST + WAIT_ST + LD + WAIT_LD),
    Litmus("store, load", "tensor-wait", ST + LD + WAIT_LD + WAIT_ST),
    Litmus("store, store", "tensor-wait", ST + ST + WAIT_ST),
    Litmus("load, store", "tensor-wait", LD + ST + WAIT_LD + WAIT_ST),
    Litmus("load, wait, store", None, LD + WAIT_LD + ST + WAIT_ST),
    Litmus("load, wait, use", None, LD + WAIT_LD + USE),
    Litmus("load, use", "tensor-wait", LD + USE + WAIT_LD),
    Litmus("load, wait for stores, use", "tensor-wait", LD + WAIT_ST + USE + WAIT_LD),
    Litmus("load, overwrite the register", "tensor-wait", LD + "mov.b32 %r101, 0;\n" + WAIT_LD),
    Litmus(
        "load, move, wait, use",
        None,
        LD + "mov.b64 %rd20, {%r100, %r101};\nmov.b32 %r95, %r101;\n" + WAIT_LD + USE,
    ),
    Litmus(
        "load, move, use of the copy",
        "tensor-wait",
        LD + "mov.b64 %rd20, {%r100, %r101};\nadd.s64 %rd21, %rd20, 1;\n" + WAIT_LD,
    ),
    Litmus("load, load into the same register", "tensor-wait", LD + LD + WAIT_LD),
    Litmus("store, overwrite the source", None, ST_P + "mov.b32 %r110, 0;\n" + WAIT_ST),
    Litmus(
        "products onto one accumulator",
        None,
        one(mma(accumulate=False) + mma() + mma() + commit()) + END,
    ),
    Litmus(
        "products of different shapes onto one accumulator",
        "race",
        one(mma(accumulate=False) + mma(columns=32) + commit()) + END,
    ),
    Litmus(
        "product, product with its result",
        "race",
        one(mma(accumulate=False) + mma(d=128, a="[%r3]") + commit()) + END,
    ),
    Litmus(
        "product, commit, wait, fence, product with its result",
        None,
        one(mma(accumulate=False) + commit() + wait() + AFTER + mma(d=128, a="[%r3]") + commit())
        + wait(parity=1),
    ),
    Litmus(
        "product, commit, wait, product with its result",
        "tensor-fence",
        one(mma(accumulate=False) + commit() + wait() + mma(d=128, a="[%r3]") + commit())
        + wait(parity=1),
    ),
    Litmus(
        "product with P, product over P",
        None,
        ST_P
        + WAIT_ST
        + FENCED_BAR
        + one(mma(a=P, accumulate=False) + mma(d=P_COLUMN, accumulate=False) + commit())
        + END,
    ),
    Litmus(
        "product with P, store over P",
        "race",
        ST_P + WAIT_ST + FENCED_BAR + MMA_P + FENCED_BAR + ST_P + WAIT_ST + END,
    ),
    Litmus(
        "product with P, commit, wait, store over P",
        "tensor-fence",
        ST_P + WAIT_ST + FENCED_BAR + MMA_P + wait() + ST_P + WAIT_ST,
    ),
    Litmus(
        "product with P, commit, wait, fence, store over P",
        None,
        ST_P + WAIT_ST + FENCED_BAR + MMA_P + WAITED + ST_P + WAIT_ST,
    ),
    Litmus(
        "product with P, load of P",
        None,
        ST_P + WAIT_ST + FENCED_BAR + MMA_P + LD_P + WAIT_LD + END,
    ),
    Litmus("product, store over D", "race", MMA + FENCED_BAR + ST + WAIT_ST + END),
    Litmus("operand written, fence, barrier, product", None, WRITE_A + FENCE + BAR + MMA + END),
    Litmus("operand written, barrier, product", "proxy-fence", WRITE_A + BAR + MMA + END),
    Litmus("operand written, fence, product", "race", WRITE_A + FENCE + MMA + END),
    Litmus("operand copied, wait, product", None, COPY_A + wait(16) + MMA + END),
    Litmus("operand copied, product", "race", COPY_A + MMA + END + wait(16)),
    Litmus("product, operand overwritten", "race", MMA + BAR + WRITE_A + END),
    Litmus("product, commit, wait, operand overwritten", None, MMA + wait() + WRITE_A),
    Litmus("product, operand copied over", "race", MMA + BAR + COPY_A + wait(16) + END),
    Litmus("product, commit, wait, operand copied over", None, MMA + wait() + COPY_A + wait(16)),
    Litmus(
        "products of two threads onto one accumulator",
        "race",
        one(mma(accumulate=False) + commit()) + one(mma() + commit(16), 32) + END + wait(16),
    ),
    Litmus(
        "products of two threads, fences and a barrier between, onto one accumulator",
        None,
        one(mma(accumulate=False) + commit())
        + FENCED_BAR
        + one(mma() + commit(16), 32)
        + END
        + wait(16),
    ),
    Litmus(
        "products of two threads, a barrier between, onto one accumulator",
        "race",
        one(mma(accumulate=False) + commit()) + BAR + one(mma() + commit(16), 32) + END + wait(16),
    ),
    Litmus("store of a warp, one lane arrives, product", "race", one_lane_arrives("")),
    Litmus(
        "store of a warp, warp sync, one lane arrives, product",
        None,
        one_lane_arrives("bar.warp.sync -1;\n"),
    ),
    Litmus("product, columns freed", "race", one(mma(accumulate=False))),
    Litmus("product, commit, columns freed", "race", MMA),
    Litmus("commit before the product", "race", one(commit() + mma(accumulate=False)) + END),
    Litmus("load by others, columns freed", "race", "LOAD: " + LD + WAIT_LD + NO_BARRIER),
    Litmus("commit, nobody waits", "outstanding", one(commit(16))),
    Litmus("commit, wait", None, one(commit(16)) + wait(16)),
    Litmus(
        "copy, product with it",
        None,
        one(CP + mma(a=P, accumulate=False) + commit()) + END,
    ),
    Litmus(
        "product, commit, relaxed wait, fence, load", None, MMA + RELAXED + AFTER + LD + WAIT_LD
    ),
    Litmus("product, commit, relaxed wait, load", "race", MMA + RELAXED + LD + WAIT_LD),
    Litmus(
        "store, wait, fence, relaxed arrival and wait, fence, product with it",
        None,
        ST_P + WAIT_ST + BEFORE + ARRIVE_RELAXED + one(RELAXED_8 + AFTER + P_PRODUCT) + END,
    ),
    Litmus(
        "store, wait, relaxed arrival and wait, fence, product with it",
        "race",
        ST_P + WAIT_ST + ARRIVE_RELAXED + one(RELAXED_8 + AFTER + P_PRODUCT) + END,
    ),
    Litmus("shift, product with it", None, P_READY + one(SHIFT + P_PRODUCT) + END),
    Litmus("shift, copy over it", None, P_READY + one(SHIFT + CP + commit()) + END),
    Litmus("copy, shift of it", "race", P_READY + one(CP + SHIFT + commit()) + END),
    Litmus("shift, shift", "race", P_READY + one(SHIFT + SHIFT + commit()) + END),
    Litmus(
        "product, shift of its result",
        None,
        one(mma(P_COLUMN, accumulate=False) + SHIFT + commit()) + END,
    ),
    Litmus("shift, load", "race", P_READY + one(SHIFT + commit()) + FENCED_BAR + LD_P + END),
    Litmus("store, shift", "race", ST_P + WAIT_ST + one(SHIFT + commit()) + END),
    Litmus("copy, copy over it", "race", one(CP + CP + commit()) + END),
    Litmus("copy, load", "race", one(CP + commit()) + FENCED_BAR + LD_P + WAIT_LD + END),
    Litmus("copy, commit, wait, fence, load", None, one(CP + commit()) + WAITED + LD_P + WAIT_LD),
    Litmus("copy, source overwritten", "race", one(CP + commit()) + BAR + WRITE_A + END),
    Litmus(
        "product with P, copy over P",
        None,
        ST_P + WAIT_ST + FENCED_BAR + one(mma(a=P, accumulate=False) + CP + commit()) + END,
    ),
    Litmus(
        "product, copy over D", "race", one(mma(P_COLUMN, accumulate=False) + CP + commit()) + END
    ),
    Litmus("load, copy over it", "race", LD_P + WAIT_LD + one(CP + commit()) + END),
    Litmus(
        "load, fences, copy over it", None, LD_P + WAIT_LD + FENCED_BAR + one(CP + commit()) + END
    ),
    Litmus("commit to no barrier", "phase-misuse", one(commit(24))),
    Litmus("load, exit", "outstanding", LD + "@%p1 ret;\n"),
    Litmus("store, exit", "outstanding", ST + "@%p1 ret;\n"),
)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: f"{p.schedule}-{p.asynchronous}")
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_litmus(row: Litmus, policy: Policy, seed: int) -> None:
    data = np.zeros(8192, np.uint8)
    policy = dataclasses.replace(policy, most_steps=200_000)
    launch = Launch(threads=128, shared_bytes=16_384, policy=policy, seed=seed)
    body = ALLOCATE + row.body + FREE
    if row.rule is None:
        sm100_ptx.run(body, data, launch)
        return
    with pytest.raises(EmulationError) as caught:
        sm100_ptx.run(body, data, launch)
    assert caught.value.rule in row.rule.split("|"), caught.value
    assert "test, CTA (0, 0, 0), warp" in str(caught.value)


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        (mma(accumulate=False), "no commit follows the last 1 operations of thread 0"),
        (mma(accumulate=False) + commit() + mma(), "no commit follows the last 1 operations"),
    ],
)
def test_end_without_commit(operation: str, message: str) -> None:
    """Even where races are not checked."""
    launch = Launch(threads=128, shared_bytes=16_384, policy=Policy("random", "early", races=False))
    with pytest.raises(EmulationError, match=f"outstanding: .*{message}"):
        sm100_ptx.run(ALLOCATE + one(operation) + FREE, np.zeros(64, np.uint8), launch)


def test_fences_may_be_waived() -> None:
    """A policy for kernels that leave tcgen05.fence out; everything else is still asked for."""
    policy = Policy("random", "late", tensor_fences=False)
    launch = Launch(threads=128, shared_bytes=16_384, policy=policy)
    for body in (MMA + wait() + LD + WAIT_LD, ST_P + WAIT_ST + BAR + MMA_P + wait()):
        sm100_ptx.run(ALLOCATE + body + FREE, np.zeros(64, np.uint8), launch)
    for body in (MMA + BAR + LD + WAIT_LD + wait(), ST_P + BAR + MMA_P + wait()):
        with pytest.raises(EmulationError, match=r"race|tensor-wait"):
            sm100_ptx.run(ALLOCATE + body + FREE, np.zeros(64, np.uint8), launch)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: f"{p.schedule}-{p.asynchronous}")
def test_waits_for_loads_may_be_waived(policy: Policy) -> None:
    """Then the first use waits, and what was moved before it is there; exits still ask for it."""
    policy = dataclasses.replace(policy, tensor_load_waits=False)
    launch = Launch(threads=128, shared_bytes=16_384, policy=policy)
    own = "shl.b32 %r94, %r1, 3;\ncvt.u64.u32 %rd2, %r94;\nadd.s64 %rd3, %rd1, %rd2;\n"
    store = f"add.s32 %r98, %r1, 7;\n{ST.replace('%r1', '%r98')}{WAIT_ST}"
    use = "mov.b32 %r95, %r101;\n" + USE + "st.global.v2.b32 [%rd3], {%r90, %r95};\n"
    data = np.zeros((128, 2), np.uint32)
    sm100_ptx.run(ALLOCATE + own + store + LD + use + FREE, data.reshape(-1), launch)
    np.testing.assert_array_equal(data, np.arange(128)[:, None] + [8, 7])
    with pytest.raises(EmulationError, match="outstanding"):
        sm100_ptx.run(ALLOCATE + LD + "@%p1 ret;\n" + FREE, data.reshape(-1), launch)


@pytest.mark.parametrize(
    "body",
    [
        one(commit(16)),
        "bar.arrive 1, 256;\n",
        one("mbarrier.expect_tx.relaxed.cta.b64 [%r2], 64;\n"),
        one("st.shared.b64 [%r2+2048], %rd1;\n" + FENCE + STORE_16),
    ],
    ids=["commit", "arrivals", "bytes", "store"],
)
@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: f"{p.schedule}-{p.asynchronous}")
def test_clean_exits_may_be_waived(body: str, policy: Policy) -> None:
    """What hardware forgives at the end of a CTA, and nothing that is still in flight."""
    data = np.zeros(4096, np.uint8)
    launch = Launch(threads=128, shared_bytes=16_384, policy=policy)
    with pytest.raises(EmulationError, match=r"outstanding|participants"):
        sm100_ptx.run(ALLOCATE + body + FREE, data, launch)
    waived = dataclasses.replace(policy, clean_exits=False)
    launch = dataclasses.replace(launch, policy=waived)
    sm100_ptx.run(ALLOCATE + body + FREE, data, launch)
    assert data.any() == ("cp.async" in body)
    with pytest.raises(EmulationError, match="outstanding"):
        sm100_ptx.run(ALLOCATE + COPY_A + FREE, data, launch)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: f"{p.schedule}-{p.asynchronous}")
def test_lanes_of_a_wait_may_be_one(policy: Policy) -> None:
    """One lane then releases the whole warp's stores once it has waited for them, not before."""
    waived = dataclasses.replace(policy, tensor_lanes=False, tensor_fences=False)
    launch = Launch(threads=128, shared_bytes=16_384, policy=waived)
    body, data = ALLOCATE + one_lane_arrives("") + FREE, np.zeros(8192, np.uint8)
    sm100_ptx.run(body, data, launch)
    apart = dataclasses.replace(launch, policy=dataclasses.replace(waived, tensor_lanes=True))
    with pytest.raises(EmulationError, match="race"):
        sm100_ptx.run(body, data, apart)
    with pytest.raises(EmulationError, match=r"tensor-wait|race"):
        sm100_ptx.run(body.replace(WAIT_ST, ""), data, launch)


@pytest.mark.parametrize("asynchronous", ["late", "random"])
def test_order_of_commits(asynchronous: Literal["late", "random"]) -> None:
    """After a wait for the second commit the first has arrived, or not, as the policy says."""
    ask = "mbarrier.test_wait.parity.shared.b64 %p7, [%r2], 0;\nselp.b32 %r90, 1, 0, %p7;\n"
    product = mma(accumulate=False)
    body = one(
        product + commit() + product + commit(16) + wait(16) + ask + "st.global.b32 [%rd1], %r90;\n"
    )
    found = {}
    for unordered in (True, False):
        policy = Policy("random", asynchronous, unordered_commits=unordered)
        found[unordered] = set()
        for seed in range(12):
            data = np.zeros(1, np.uint32)
            launch = Launch(threads=128, shared_bytes=16_384, policy=policy, seed=seed)
            sm100_ptx.run(ALLOCATE + body + END + FREE, data, launch)
            found[unordered].add(int(data[0]))
    assert found == {True: {0, 1}, False: {1}}


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: f"{p.schedule}-{p.asynchronous}")
def test_moves_before_the_wait(policy: Policy, rng: np.random.Generator) -> None:
    """A register that is moved before the wait holds the loaded values after it."""
    data = rng.integers(0, 1 << 32, (128, 8), np.uint32)
    own = "shl.b32 %r94, %r1, 5;\ncvt.u64.u32 %rd2, %r94;\nadd.s64 %rd3, %rd1, %rd2;\n"
    body = own + "ld.global.v2.b32 {%r110, %r111}, [%rd3];\n"
    body += "tcgen05.st.sync.aligned.32x32b.x2.b32 [%r4], {%r110, %r111};\n" + WAIT_ST + LD
    body += "mov.b64 %rd20, {%r101, %r100};\nmov.b64 {%r95, %r96}, %rd20;\n"
    body += "mov.b32 %r97, %r96;\nmov.b32 {%rs1, %rs2}, %r95;\n" + WAIT_LD
    body += "cvt.u32.u16 %r98, %rs1;\ncvt.u32.u16 %r99, %rs2;\n"
    body += "st.global.b64 [%rd3+8], %rd20;\nst.global.v2.b32 [%rd3+16], {%r97, %r98};\n"
    body += "st.global.b32 [%rd3+24], %r99;\n"
    words = data[:, :2].copy()
    launch = Launch(threads=128, shared_bytes=16_384, policy=policy)
    sm100_ptx.run(ALLOCATE + body + FREE, data.reshape(-1), launch)
    low, high = words[:, 1] & 0xFFFF, words[:, 1] >> 16
    expected = np.stack([words[:, 1], words[:, 0], words[:, 0], low, high], 1)
    np.testing.assert_array_equal(data[:, 2:7], expected)
