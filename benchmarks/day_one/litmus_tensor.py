"""Litmus programs of one CTA with tensor memory (sm_100f)."""

from __future__ import annotations

import numpy as np

from benchmarks.day_one import litmus_text as ptx
from benchmarks.day_one.litmus import Kernel, Litmus

_THREADS = 128
_A_AT, _B_AT, _B2_AT, _STATISTICS_AT = 2048, 8192, 20480, 1024
_VARIANTS = 8


def _tensor_base(target: str, broken: bool) -> str:
    """Checks that all 512 columns begin at 0; broken: it checks the second of two halves."""
    half = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%t1], 256;\n"
    text = ptx.allocate()
    release = ptx.free()
    if broken:
        # It makes two allocations of half of the columns: the second has another address.
        text = text.replace("[%t1], 512;\n", "[%t1], 256;\n" + half)
        free = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %t15, 256;"
        other = f"sub.s32 %t2, %t15, 256;\n{free.replace('%t15', '%t2')}"
        release = ptx.MEET + ptx.warps(0, 1, f"{free}\n{other}")
    return ptx.module(
        target,
        ptx.check("%t15", "%v0"),
        _THREADS,
        before=text + ptx.MEET + ptx.lane_base() + "mov.b32 %v0, 0;",
        after=release,
    )


def _load_wait(target: str, broken: bool) -> str:
    """Stores columns, loads them by two instructions, uses them after one wait, as kernels do."""
    value = (
        "mad.lo.u32 %t9, %i, 2654435769, %thread;\n"  # each repetition and lane has another word
    )
    stored = "".join(f"add.s32 %v{i}, %t9, {i * 4096};\n" for i in range(32))
    again = "".join(f"add.s32 %v{i}, %t9, {(32 + i) * 4096};\n" for i in range(32))
    body = value + stored + ptx.store(0, 32, 0) + ptx.WAIT_ST
    body += again + ptx.store(0, 32, 32) + ptx.WAIT_ST
    body += ptx.load(0, 32, 0) + ptx.load(32, 32, 32)
    body += "" if broken else ptx.WAIT_LD
    for i in range(64):
        body += f"add.s32 %t10, %t9, {i * 4096};\n" + ptx.check(f"%v{i}", "%t10")
    body += ptx.WAIT_LD if broken else ""
    before = ptx.allocate() + ptx.MEET + ptx.lane_base()
    return ptx.module(target, body, _THREADS, before=before, after=ptx.free(), values=64)


def _products_setup() -> str:
    """Makes tensor memory, a barrier for commits, A's and B's rows: row r of A holds r + 1, of B 2
    r + 1; B2 has 32 rows, all 3.
    """
    text = ptx.allocate() + ptx.barriers(1, 1) + ptx.lane_base()
    text += f"shl.b32 %t9, %thread, 5;\nadd.s32 %t9, %t9, %smem;\nadd.s32 %t10, %t9, {_A_AT};\n"
    text += "add.s32 %t11, %thread, 1;\n" + ptx.row_of("%t11", "%t10")
    text += f"add.s32 %t10, %t9, {_B_AT};\nmad.lo.u32 %t11, %thread, 2, 1;\n"
    text += ptx.row_of("%t11", "%t10") + f"add.s32 %t10, %t9, {_B_AT + 128 * 32};\n"
    text += "mov.b32 %t11, 1;\n" + ptx.row_of("%t11", "%t10")
    text += f"add.s32 %t10, %t9, {_B2_AT};\nmov.b32 %t11, 3;\n" + ptx.row_of("%t11", "%t10")
    return text + "fence.proxy.async.shared::cta;\n" + ptx.MEET


_STEPS, _P_COLUMN = 8, 256


def _product_order(target: str, broken: bool) -> str:
    """Computes D (columns 0 to 255) = P B with P in columns 256 to 319, then at once another
    product of another shape over P's columns, as S over P; broken: that product comes first.

    P's lane l holds (i & 3) + 1 in all 128 places along K, so D is 128 p b.
    """
    body = "and.b32 %t9, %i, 3;\nadd.s32 %t9, %t9, 1;\n"
    body += "cvt.rn.f32.u32 %f0, %t9;\ncvt.rn.bf16x2.f32 %t10, %f0, %f0;\n"
    body += "".join(f"mov.b32 %v{i}, %t10;\n" for i in range(32))
    body += ptx.store(0, 32, _P_COLUMN) + ptx.store(0, 32, _P_COLUMN + 32) + ptx.WAIT_ST
    body += ptx.FENCE_BEFORE + ptx.MEET + ptx.FENCE_AFTER
    first = "".join(
        f"add.s32 %t11, %t15, {_P_COLUMN + 8 * step};\n"
        + ptx.mma(128, 256, 0, "[%t11]", "%d5", step > 0)
        for step in range(_STEPS)
    )
    second = ptx.mma(128, 64, _P_COLUMN, "%d4", "%d6", False)
    products = second + first if broken else first + second
    operands = ptx.operand("%d4", _A_AT) + ptx.operand("%d5", _B_AT) + ptx.operand("%d6", _B2_AT)
    body += ptx.one(0, operands + products + ptx.commit(0)) + ptx.wait(0) + ptx.FENCE_AFTER
    for column in (0, 224):
        body += ptx.load(0, 32, column) + ptx.WAIT_LD
        for j in range(32):
            value = 2 * (column + j) + 1 if column + j < 128 else 1
            body += f"mul.lo.u32 %t12, %t9, {128 * value};\n"
            body += ptx.as_float("%t12", "%t12") + ptx.check(f"%v{j}", "%t12")
    body += ptx.load(0, 32, _P_COLUMN) + ptx.WAIT_LD
    body += "add.s32 %t12, %thread, 1;\nmul.lo.u32 %t12, %t12, 48;\n" + ptx.as_float("%t12", "%t12")
    body += "".join(ptx.check(f"%v{j}", "%t12") for j in range(32))
    body += ptx.FENCE_BEFORE + ptx.MEET + ptx.FENCE_AFTER
    return ptx.module(target, body, _THREADS, before=_products_setup(), after=ptx.free())


def _commit_order(target: str, broken: bool) -> str:
    """Issues a long product and its commit, then a short one and its commit: when the second has
    arrived, has the first? Broken: the other way round, so that the answer may be no.
    """
    long = "".join(ptx.mma(128, 256, 0, "%d4", "%d5", step > 0) for step in range(_STEPS))
    short = ptx.mma(128, 64, _P_COLUMN, "%d4", "%d6", False)
    operands = ptx.operand("%d4", _A_AT) + ptx.operand("%d5", _B_AT) + ptx.operand("%d6", _B2_AT)
    looked, later = (8, 0) if broken else (0, 8)
    issued = operands + long + ptx.commit(0) + short + ptx.commit(8)
    body = ptx.one(0, issued) + ptx.wait(later)
    body += (
        f"mbarrier.test_wait.parity.shared::cta.b64 %done, [%smem+{looked}], %parity;\n"
        "selp.b32 %t9, 1, 0, %done;\nmov.b32 %t10, 1;\n" + ptx.check("%t9", "%t10")
    )
    body += ptx.wait(looked) + ptx.FENCE_AFTER + ptx.FENCE_BEFORE + ptx.MEET
    return ptx.module(
        target, body + ptx.FENCE_AFTER, _THREADS, before=_products_setup(), after=ptx.free()
    )


_MMA, _LOAD = 4, 5
_Q_FULL, _Q_EMPTY, _S_FULL, _DS_FULL = 0, 8, 16, 24


def _commit_carries(target: str, broken: bool) -> str:
    """Row statistics arrive by bulk copy. The MMA warp alone waits for them, and the compute warps
    wait for its commit's arrival alone. The readers arrive at the MMA warp, and the copy over the
    statistics waits for its next commit alone. Broken: the MMA warp does not wait for the copy.
    """
    load = ptx.wait(_Q_EMPTY, "%t13") + (
        f"and.b32 %t9, %i, {_VARIANTS - 1};\nmul.wide.u32 %d1, %t9, 512;\n"
        f"add.s64 %d1, %data, %d1;\nadd.s64 %d1, %d1, {ptx.OWN};\n"
    )
    load += ptx.bulk_load(_STATISTICS_AT, "%d1", 512, _Q_FULL)
    product = ptx.mma(128, 64, 0, "%d4", "%d5", False) + ptx.commit(_S_FULL)
    other = ptx.mma(128, 64, 64, "%d4", "%d5", False) + ptx.commit(_Q_EMPTY)
    multiply = "" if broken else ptx.wait(_Q_FULL)
    multiply += ptx.operand("%d4", _A_AT) + ptx.operand("%d5", _B_AT) + product
    multiply += ptx.wait(_DS_FULL) + ptx.FENCE_AFTER + other
    compute = ptx.wait(_S_FULL) + (
        f"shl.b32 %t9, %thread, 2;\nadd.s32 %t9, %t9, %smem;\nand.b32 %t10, %i, {_VARIANTS - 1};\n"
        "mad.lo.u32 %t10, %t10, 1000, %thread;\n"
        f"ld.shared::cta.b32 %t11, [%t9+{_STATISTICS_AT}];\n"
    )
    compute += ptx.check("%t11", "%t10") + ptx.FENCE_AFTER + ptx.load(0, 32, 0) + ptx.WAIT_LD
    compute += ptx.jitter(3) + ptx.FENCE_BEFORE + ptx.arrive(_DS_FULL)
    body = "xor.b32 %t13, %parity, 1;\n"
    lane = "eq.u32 %mine, %lane, 0"
    body += ptx.warps(_LOAD, 1, ptx.jitter(1) + ptx.when(lane, load))
    body += ptx.warps(_MMA, 1, ptx.when(lane, multiply))
    body += ptx.warps(0, 4, compute)
    # It waits for the last copy, product and commit, so that nothing is in flight at the end.
    last = "sub.s32 %t13, %repeats, 1;\nand.b32 %t13, %t13, 1;\n"
    after = last + ptx.wait(_Q_FULL, "%t13") + ptx.wait(_Q_EMPTY, "%t13") + ptx.FENCE_AFTER
    before = ptx.allocate() + ptx.barriers(1, 1, 1, 4) + ptx.lane_base()
    before += ptx.warps(0, 4, _rows()) + "fence.proxy.async.shared::cta;\n" + ptx.MEET
    return ptx.module(target, body, 192, before=before, after=after + ptx.free())


def _rows() -> str:
    """Returns A's and B's rows, all ones."""
    text = "mov.b32 %t11, 1;\nshl.b32 %t9, %thread, 5;\nadd.s32 %t9, %t9, %smem;\n"
    for at in (_A_AT, _B_AT):
        text += f"add.s32 %t10, %t9, {at};\n" + ptx.row_of("%t11", "%t10")
    return text


def statistics() -> np.ndarray:
    """Returns the copies' sources: word t of variant v is 1000 v + t."""
    return (1000 * np.arange(_VARIANTS)[:, None] + np.arange(128)).astype(np.uint32).reshape(-1)


PROGRAMS = (
    Litmus(
        "tensor-base",
        Kernel(_tensor_base, _THREADS, checks=128, repeats=(4, 1), ctas=(1184, 3)),
        refuted="an address other than 0",
        broken="with two allocations of half of the columns",
        noticed="wrong",
    ),
    Litmus(
        "load-wait",
        Kernel(_load_wait, _THREADS, checks=128 * 64, repeats=(20_000, 1), ctas=(296, 1)),
        refuted="a register with another value than the column that it was loaded from",
        broken="with the wait after the uses",
        noticed="tensor-wait",
    ),
    Litmus(
        "product-order",
        Kernel(_product_order, _THREADS, checks=128 * 96, repeats=(20_000, 2), ctas=(148, 1)),
        refuted="sums of the first product with what the second wrote over its operand",
        broken="with the second product first",
        noticed="wrong|race|tensor-wait|uninitialised",
    ),
    Litmus(
        "commit-order",
        Kernel(_commit_order, _THREADS, checks=128, repeats=(20_000, 4), ctas=(148, 1)),
        refuted="nothing that our kernels rely on: a later commit may arrive first",
        broken="with the two commits exchanged",
        noticed="wrong",
        informs="a later commit has arrived before an earlier one",
    ),
    Litmus(
        "commit-carries",
        Kernel(_commit_carries, 192, 128, repeats=(100_000, 6), ctas=(148, 1), data=statistics()),
        refuted="a statistic of another repetition than the product's",
        broken="without the MMA warp's wait for the copy",
        noticed="race|wrong|deadlock|phase-misuse",
        hangs=True,
    ),
)
