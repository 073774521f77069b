"""tcgen05 with cta_group::2: pairs of CTAs that allocate, multiply and are notified together."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from kernels.emulator import EmulationError, Policy, PtxError
from tests.emulator import sm100_ptx
from tests.emulator.programs import Launch
from tests.emulator.sm100_ptx import (
    AFTER,
    ALLOCATE,
    BEFORE,
    FREE,
    WAIT_LD,
    WAIT_ST,
    registers,
    wait,
)
from tests.emulator.test_tcgen05_products import (
    A_AT,
    A_COLUMN,
    B_AT,
    IMAGE,
    LOAD_IMAGE,
    OWN_ROW,
    ROW_BYTES,
    TYPES,
    Layout,
    Product,
)

SYNC = "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n"
BYTES = IMAGE + 128 * ROW_BYTES
BIG = Launch(threads=128, shared_bytes=65_536, grid=2, cluster=2)
POLICIES = (Policy("random", "late"), Policy("random", "early"), Policy("starve", "random"))
COMMIT = "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster"
LEADER = "setp.ne.u32 %p8, %r1, 0;\nsetp.ne.or.u32 %p8, %r40, 0, %p8;\n@%p8 bra ISSUED;\n"


def paired(text: str) -> str:
    """The same for a pair."""
    return text.replace("cta_group::1", "cta_group::2")


START = (
    paired(ALLOCATE)
    + SYNC
    + f"mov.u32 %r40, %cluster_ctarank;\nmul.wide.u32 %rd2, %r40, {BYTES};\n"
    + "add.s64 %rd1, %rd1, %rd2;\n"
)
END = paired(FREE)


@dataclasses.dataclass(frozen=True)
class Pair(Product):
    """A product of a pair: `rows` and `columns` are those of both together."""

    rows: int = 256

    def instruction(self) -> str:
        words = [sum(1 << i % 32 for i in self.masked if i // 32 == word) for word in range(8)]
        single = super().instruction()
        if self.masked:
            start, end = single.index("{"), single.index("}")
            single = f"{single[:start]}{{{', '.join(map(str, words))}}}{single[end + 1 :]}"
        return paired(single)


def program(pair: Pair, told: str) -> str:
    """Both CTAs prepare, the even one multiplies, both take their part of D."""
    body = START + LOAD_IMAGE + OWN_ROW
    body += "".join(f"ld.global.b32 %r{100 + i}, [%rd3+{4 * i}];\n" for i in range(9))
    body += f"add.s32 %r10, %r4, {A_COLUMN};\n"
    body += f"tcgen05.st.sync.aligned.32x32b.x8.b32 [%r10], {registers(100, 8)};\n"
    of_d = pair.columns if pair.rows == 256 else pair.columns // 2
    for first in range(0, of_d if pair.accumulate else 0, 8):
        body += f"add.s32 %r11, %r4, {first};\n"
        body += f"tcgen05.st.sync.aligned.32x32b.x8.b32 [%r11], {{{', '.join(['%r108'] * 8)}}};\n"
    body += WAIT_ST + BEFORE + SYNC + AFTER + LEADER
    a = 0 if pair.a is None else pair.a.descriptor(A_AT, 2)
    body += (
        f"mov.b32 %r8, %r3;\nadd.s32 %r7, %r3, {A_COLUMN};\n"
        f"mov.b64 %rd10, {a};\nmov.b64 %rd11, {pair.b.descriptor(B_AT, 2)};\n"
        f"setp.eq.b32 %p5, 0, {int(not pair.accumulate)};\n{pair.instruction()}{told}\nISSUED:\n"
    )
    body += wait() + AFTER
    for first in range(0, of_d, 8):
        body += f"add.s32 %r12, %r4, {first};\n"
        body += f"tcgen05.ld.sync.aligned.32x32b.x8.b32 {registers(200 + first, 8)}, [%r12];\n"
    body += WAIT_LD
    for i in range(of_d):
        body += f"st.global.b32 [%rd3+{4 * i}], %r{200 + i};\n"
    return body + END


BOTH = f"mov.b16 %rs1, 3;\n{COMMIT}.multicast::cluster.b64 [%r2], %rs1;"


@pytest.mark.parametrize(
    "pair",
    [
        Pair(),
        Pair(columns=256),
        Pair(columns=32, b=Layout(32)),
        Pair(a=Layout(64, mn_major=True), b=Layout(0)),
        Pair(a=None, b=Layout(64, mn_major=True), columns=128),
        Pair(rows=128),
        Pair(rows=128, columns=256, b=Layout(128, mn_major=True)),
        Pair(accumulate=True),
        Pair(rows=128, accumulate=True, scale=2),
        Pair(masked=(0, 130, 255)),
    ],
    ids=str,
)
def test_product(pair: Pair, rng: np.random.Generator, seed: int) -> None:
    """M = 256 is layout A, M = 128 layout B: columns in two halves, one above the other."""
    dtype = TYPES[pair.a_type][2]
    a = rng.normal(size=(pair.rows, pair.depth)).astype(dtype)
    b = rng.normal(size=(pair.columns, pair.depth)).astype(dtype)
    data = np.zeros((2, BYTES), np.uint8)
    rows, columns = pair.rows // 2, pair.columns // 2
    words = data[:, IMAGE:].view(np.uint32).reshape(2, 128, -1)
    for rank in range(2):
        if pair.a is not None:
            own = pair.a.image(a[rank * rows : (rank + 1) * rows])
            data[rank, A_AT:B_AT] = own[: B_AT - A_AT]
        data[rank, B_AT:IMAGE] = pair.b.image(b[rank * columns : (rank + 1) * columns])
        own = np.ascontiguousarray(a[rank * rows : (rank + 1) * rows])
        words[rank, :rows, :8] = own.view(np.uint32)
    words[:, :, 8] = np.array([3.0], np.float32).view(np.uint32)
    launch = dataclasses.replace(BIG, policy=POLICIES[seed % 3], seed=seed)
    sm100_ptx.run(program(pair, BOTH), data.reshape(-1), launch)
    expected = a.astype(np.float64) @ b.astype(np.float64).T
    start = 3.0 if pair.accumulate else np.nan
    expected += 3.0 * 2.0**-pair.scale if pair.accumulate else 0
    found = words.view(np.float32)
    if pair.rows == 256:
        result = np.concatenate([found[0, :, : pair.columns], found[1, :, : pair.columns]])
    else:
        halves = found[:, :, :columns].reshape(2, 2, 64, columns)
        result = halves.transpose(0, 2, 1, 3).reshape(128, pair.columns)
    expected[list(pair.masked)] = start
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-4)


ONE = f"{COMMIT}.b64 [%r2];"


@pytest.mark.parametrize(
    ("body", "rule"),
    [
        # The other CTA is never notified.
        (program(Pair(), ONE), "deadlock"),
        # Nobody is notified.
        (program(Pair(), ""), "deadlock"),
        # The peer's operands are not waited for.
        (program(Pair(), BOTH).replace(SYNC + AFTER, "bar.sync 0;\n" + AFTER), "race"),
        # Nothing says that the peer runs.
        (
            program(Pair(), BOTH).replace(SYNC, "bar.sync 0;\n"),
            "cluster-start|race|phase-misuse",
        ),
        # The peer's part of A was stored without a fence.
        (program(Pair(a=None), BOTH).replace(BEFORE + SYNC, SYNC), "tensor-fence"),
        # The peer does not wait before it frees its columns.
        (
            program(Pair(), BOTH)
            .replace("ISSUED:\n", "ISSUED:\nsetp.ne.u32 %p6, %r40, 0;\n@%p6 bra FREEING;\n")
            .replace("bar.sync 0;\n@%p1 bra FREED", "FREEING:\nbar.sync 0;\n@%p1 bra FREED"),
            "race|outstanding|allocation",
        ),
        (START + END.replace("512", "256"), "allocation"),
    ],
)
def test_broken(body: str, rule: str, seed: int) -> None:
    for policy in POLICIES:
        launch = dataclasses.replace(BIG, policy=policy, seed=seed)
        with pytest.raises(EmulationError) as caught:
            sm100_ptx.run(body, np.zeros(2 * BYTES, np.uint8), launch)
        assert caught.value.rule in rule.split("|"), caught.value


def test_late_commits_may_be_waived() -> None:
    """A second commit arrives in both CTAs; nobody waits for it, and the other may have ended."""
    late = f"\nadd.s32 %r9, %r2, 16;\n{COMMIT}.multicast::cluster.b64 [%r9], %rs1;"
    body, data = program(Pair(), BOTH + late), np.zeros(2 * BYTES, np.uint8)
    for policy in POLICIES:
        launch = dataclasses.replace(BIG, policy=policy)
        with pytest.raises(EmulationError, match=r"outstanding|cluster-exit"):
            sm100_ptx.run(body, data, launch)
        waived = dataclasses.replace(policy, clean_exits=False)
        for seed in range(3):
            sm100_ptx.run(body, data, dataclasses.replace(launch, policy=waived, seed=seed))


def test_allocation_is_collective() -> None:
    sm100_ptx.run(START + END, np.zeros(64, np.uint8), BIG)
    alone = "mov.u32 %r40, %cluster_ctarank;\nsetp.ne.u32 %p8, %r40, 0;\n@%p8 ret;\n"
    with pytest.raises(EmulationError, match=r"deadlock|CTA 1 of the cluster has exited"):
        sm100_ptx.run(alone + START + END, np.zeros(64, np.uint8), BIG)
    other = "selp.b32 %r41, 512, 256, %p8;\n"
    text = alone.replace("@%p8 ret;", other) + START.replace("[%r2+32], 512", "[%r2+32], %r41")
    with pytest.raises(EmulationError, match="cta-pair"):
        sm100_ptx.run(text + END, np.zeros(64, np.uint8), BIG)
    with pytest.raises(EmulationError, match="cta-pair"):
        launch = dataclasses.replace(BIG, grid=1, cluster=1)
        sm100_ptx.run(START + END, np.zeros(64, np.uint8), launch)


def test_groups_do_not_mix() -> None:
    with pytest.raises(PtxError, match="another cta_group than in line"):
        sm100_ptx.run(paired(ALLOCATE) + FREE, np.zeros(64, np.uint8), BIG)
