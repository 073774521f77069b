"""Litmus programs of a pair of CTAs whose even one issues products for both (sm_100f).

Row r of A holds r + 1 in all places along K, row n of B another whole number: D is 16 a b, exactly.
CTA c has half of A's rows and half of B's. After products with M = 256 a CTA has its 128 rows in
its lanes; after those with M = 128 it has its 64 rows in lanes 0 to 63 for the first half of the
columns and in lanes 64 to 127 for the second.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from benchmarks.day_one import litmus_text as ptx
from benchmarks.day_one.litmus import Kernel, Litmus
from benchmarks.day_one.litmus_tensor import statistics

_A_AT, _B_AT, _STATISTICS_AT = 2048, 8192, 1024
_FULL, _DONE, _LOADED = 0, 8, 16
_A_COLUMN = 256


def _setup(*arrivals: int, rows: int = 64) -> str:
    """Makes tensor memory, barriers, and the CTA's rows of A: row r of the pair's A holds r + 1.

    %t13: the thread's row of the pair's A in a product with M = 128 (rows = 64), or M = 256.
    """
    text = ptx.allocate(2) + ptx.barriers(*arrivals, cluster=True) + ptx.lane_base()
    text += f"and.b32 %t9, %thread, {rows - 1};\nmad.lo.u32 %t13, %rank, {rows}, %t9;\n"
    text += "add.s32 %t10, %t13, 1;\nshl.b32 %t9, %t9, 5;\nadd.s32 %t9, %t9, %smem;\n"
    text += f"add.s32 %t9, %t9, {_A_AT};\n"
    in_rows = ptx.when(f"lt.u32 %mine, %thread, {rows}", ptx.row_of("%t10", "%t9"))
    return text + in_rows + "fence.proxy.async.shared::cta;\n"


def _product(rows: int, columns: int, a: str = "%d4") -> str:
    """The even CTA's product and its commit, which arrives in both."""
    text = ptx.operand("%d4", _A_AT) + ptx.operand("%d5", _B_AT)
    text += f"add.s32 %t11, %t15, {_A_COLUMN};\n"
    return text + ptx.mma(rows, columns, 0, a, "%d5", False, 2) + ptx.commit(_DONE, 2)


def _of_even(body: str) -> str:
    """Returns the body for thread 0 of the even CTA."""
    inside = "mad.lo.u32 %t0, %rank, 1024, %thread;\n"
    return inside + ptx.when("eq.u32 %mine, %t0, 0", body)


_READER_FENCE = "fence.proxy.async.shared::cluster;\n"
"""The fence that the issuing thread could add after its wait, if the claims without it fall."""


def _fenced(text: Callable[..., str]) -> Callable[[str, bool], str]:
    """Makes the program in which the issuing thread fences, too; broken: no thread fences."""
    return lambda target, broken: text(target, broken, "" if broken else _READER_FENCE)


def _remote_operand(target: str, broken: bool, reader_fence: str = "") -> str:
    """The other CTA stores each CTA's B; broken: without the writer's proxy fence.

    Row n of B holds (i * 7 + n) % 64 + 1.
    """
    # Each thread of warp 0 writes the row of the peer's B with its number.
    body = ptx.jitter(1)
    write = "mad.lo.u32 %t9, %peer, 32, %lane;\nmad.lo.u32 %t9, %i, 7, %t9;\n"
    write += "and.b32 %t9, %t9, 63;\nadd.s32 %t9, %t9, 1;\nshl.b32 %t10, %lane, 5;\n"
    write += f"add.s32 %t10, %t10, %smem;\nadd.s32 %t10, %t10, {_B_AT};\n"
    write += "mapa.shared::cluster.u32 %t10, %t10, %peer;\n"
    write += ptx.row_of("%t9", "%t10", "shared::cluster")
    body += ptx.warps(0, 1, write)
    body += "" if broken else "fence.proxy.async.shared::cluster;\n"
    body += ptx.FENCE_BEFORE + ptx.arrive_at_even(_FULL)
    issue = ptx.wait(_FULL, scope=ptx.CLUSTER) + reader_fence + ptx.FENCE_AFTER
    body += _of_even(issue + _product(128, 64)) + ptx.wait(_DONE) + ptx.FENCE_AFTER
    body += ptx.load(0, 32, 0) + ptx.WAIT_LD
    body += "shr.u32 %t9, %thread, 6;\nshl.b32 %t9, %t9, 5;\nmad.lo.u32 %t9, %i, 7, %t9;\n"
    body += _compare(32, 63)
    return ptx.module(target, body, 128, before=_setup(8, 1), after=ptx.free(2), cluster=2)


def _compare(columns: int, mask: int) -> str:
    """Compares %v0 .. with 16 * (row + 1) * (((%t9 + j) & mask) + 1)."""
    body = "add.s32 %t10, %t13, 1;\nshl.b32 %t10, %t10, 4;\n"
    for j in range(columns):
        body += f"add.s32 %t11, %t9, {j};\nand.b32 %t11, %t11, {mask};\nadd.s32 %t11, %t11, 1;\n"
        body += "mul.lo.u32 %t11, %t11, %t10;\n" + ptx.as_float("%t11", "%t11")
        body += ptx.check(f"%v{j}", "%t11")
    return body


def _layout(rows: int, columns: int, a_in_tensor: bool):
    """Checks where D lies; broken: the CTAs' halves of B exchanged. Row n of B holds n + 1."""

    def text(target: str, broken: bool) -> str:
        before = _setup(8, 1, rows=rows // 2)
        before += f"mov.b32 %t12, {'%peer' if broken else '%rank'};\n"
        before += f"mad.lo.u32 %t10, %t12, {columns // 2}, %thread;\nadd.s32 %t10, %t10, 1;\n"
        before += (
            f"shl.b32 %t9, %thread, 5;\nadd.s32 %t9, %t9, %smem;\nadd.s32 %t9, %t9, {_B_AT};\n"
        )
        own = ptx.row_of("%t10", "%t9")
        before += ptx.when(f"lt.u32 %mine, %thread, {columns // 2}", own)
        before += "fence.proxy.async.shared::cta;\n"
        if a_in_tensor:
            before += "add.s32 %t10, %t13, 1;\ncvt.rn.f32.u32 %f0, %t10;\n"
            before += "cvt.rn.bf16x2.f32 %t10, %f0, %f0;\n"
            before += "".join(f"mov.b32 %v{i}, %t10;\n" for i in range(8))
            before += ptx.store(0, 8, _A_COLUMN) + ptx.WAIT_ST
        body = ptx.FENCE_BEFORE + ptx.arrive_at_even(_FULL)
        issue = ptx.wait(_FULL, scope=ptx.CLUSTER) + ptx.FENCE_AFTER
        issue += _product(rows, columns, "[%t11]" if a_in_tensor else "%d4")
        body += _of_even(issue) + ptx.wait(_DONE) + ptx.FENCE_AFTER
        in_lane = columns if rows == 256 else columns // 2
        for first in range(0, in_lane, 32):
            body += ptx.load(0, 32, first) + ptx.WAIT_LD
            half = 0 if rows == 256 else columns // 2
            body += f"shr.u32 %t9, %thread, 6;\nmad.lo.u32 %t9, %t9, {half}, {first};\n"
            body += _compare(32, 255)
        return ptx.module(target, body, 128, before=before, after=ptx.free(2), cluster=2)

    return text


def _relayed_load(
    target: str, broken: bool, reader_fence: str = "", of_cluster: bool = True
) -> str:
    """Each CTA's B arrives by bulk copy on the CTA's own barrier; a warp that waits for it relays
    the arrival to the even CTA. Broken: it does not wait. Row n of B holds ((i & 7) * 8 + n) % 64 +
    1.
    """
    load = "and.b32 %t9, %i, 7;\nmul.lo.u32 %t9, %t9, 64;\nmad.lo.u32 %t9, %rank, 32, %t9;\n"
    load += f"mul.wide.u32 %d1, %t9, 32;\nadd.s64 %d1, %d1, %data;\nadd.s64 %d1, %d1, {ptx.OWN};\n"
    body = ptx.jitter(5) + ptx.one(0, load + ptx.bulk_load(_B_AT, "%d1", 1024, _LOADED))
    release, acquire = (".release.cluster", ptx.CLUSTER) if of_cluster else ("", "")
    relay = "" if broken else ptx.wait(_LOADED, scope=acquire)
    body += ptx.FENCE_BEFORE + ptx.warps(1, 1, relay) + ptx.arrive_at_even(_FULL, release)
    issue = ptx.wait(_FULL, scope=acquire) + reader_fence + ptx.FENCE_AFTER
    body += _of_even(issue + _product(128, 64)) + ptx.wait(_DONE) + ptx.FENCE_AFTER
    body += ptx.load(0, 32, 0) + ptx.WAIT_LD
    body += "shr.u32 %t9, %thread, 6;\nshl.b32 %t9, %t9, 5;\nand.b32 %t10, %i, 7;\n"
    body += "mad.lo.u32 %t9, %t10, 8, %t9;\n" + _compare(32, 63)
    # The broken variant's copies are complete before the next ones start, too.
    body += ptx.one(0, ptx.wait(_LOADED))
    return ptx.module(target, body, 128, before=_setup(8, 1, 1), after=ptx.free(2), cluster=2)


def _tensor_arrival(target: str, broken: bool) -> str:
    """Each CTA stores its rows of A to its tensor memory and arrives at the even CTA at the CTA's
    scope; broken: without the wait for the store. Row r of A holds (i * 7 + r) % 128 + 1, row n of
    B holds n + 1.
    """
    before = _setup(8, 1, rows=128) + "mad.lo.u32 %t10, %rank, 32, %lane;\n"
    before += "add.s32 %t10, %t10, 1;\nshl.b32 %t9, %lane, 5;\nadd.s32 %t9, %t9, %smem;\n"
    before += f"add.s32 %t9, %t9, {_B_AT};\n" + ptx.warps(0, 1, ptx.row_of("%t10", "%t9"))
    before += "fence.proxy.async.shared::cta;\n"
    body = ptx.jitter(3) + "mad.lo.u32 %t13, %rank, 128, %thread;\n"
    body += "mad.lo.u32 %t13, %i, 7, %t13;\nand.b32 %t13, %t13, 127;\n"
    body += "add.s32 %t10, %t13, 1;\ncvt.rn.f32.u32 %f0, %t10;\n"
    body += "cvt.rn.bf16x2.f32 %t10, %f0, %f0;\n"
    body += "".join(f"mov.b32 %v{i}, %t10;\n" for i in range(8)) + ptx.store(0, 8, _A_COLUMN)
    body += ("" if broken else ptx.WAIT_ST) + ptx.FENCE_BEFORE + ptx.arrive_at_even(_FULL, "")
    issue = ptx.wait(_FULL) + ptx.FENCE_AFTER + _product(256, 64, "[%t11]")
    body += _of_even(issue) + ptx.wait(_DONE) + ptx.FENCE_AFTER
    for first in (0, 32):
        body += ptx.load(0, 32, first) + ptx.WAIT_LD + f"mov.b32 %t9, {first};\n"
        body += _compare(32, 63)
    return ptx.module(target, body, 128, before=before, after=ptx.free(2), cluster=2)


def _sources() -> np.ndarray:
    """Returns B's rows of eight repetitions: sixteen bf16 each."""
    variant, row = np.arange(8)[:, None], np.arange(64)
    value = ((variant * 8 + row) % 64 + 1).astype(np.float32).view(np.uint32) >> 16
    words = (value | value << 16).astype(np.uint32)
    return np.repeat(words[:, :, None], 8, 2).reshape(-1)


_Q_FULL, _S_FULL, _DS_FULL, _Q_EMPTY, _RELAYED = 0, 8, 16, 24, 32


def _commit_carries_pair(target: str, broken: bool) -> str:
    """Row statistics arrive by bulk copy in each CTA. The odd CTA's are relayed to the even one's
    MMA warp, whose commit arrives in both; only a wait of the CTA's own scope comes between it and
    the reads. Broken: a relaying warp waits for the copy before.
    """
    load = ptx.wait(_Q_EMPTY, "%t13") + (
        "and.b32 %t9, %i, 7;\nmul.wide.u32 %d1, %t9, 512;\n"
        f"add.s64 %d1, %data, %d1;\nadd.s64 %d1, %d1, {ptx.OWN};\n"
    )
    load += ptx.bulk_load(_STATISTICS_AT, "%d1", 512, _Q_FULL)
    body = "xor.b32 %t13, %parity, 1;\n" + ptx.warps(0, 1, ptx.jitter(1) + ptx.one(0, load))
    # Warp 1 of both CTAs waits for its own CTA's copy and relays its arrival.
    relay = ptx.wait(_Q_FULL, "%t13" if broken else "%parity", ptx.CLUSTER)
    body += ptx.warps(1, 1, relay + ptx.arrive_at_even(_RELAYED))
    multiply = ptx.wait(_RELAYED, scope=ptx.CLUSTER) + ptx.operand("%d4", _A_AT)
    multiply += ptx.operand("%d5", _B_AT) + ptx.mma(128, 64, 0, "%d4", "%d5", False, 2)
    multiply += ptx.commit(_S_FULL, 2) + ptx.wait(_DS_FULL, scope=ptx.CLUSTER) + ptx.FENCE_AFTER
    multiply += ptx.mma(128, 64, 64, "%d4", "%d5", False, 2) + ptx.commit(_Q_EMPTY, 2)
    odd = ptx.label("ODD")
    body += f"setp.ne.u32 %p3, %rank, 0;\n@%p3 bra {odd};\n"
    body += ptx.warps(2, 1, ptx.when("eq.u32 %mine, %lane, 0", multiply)) + f"{odd}:\n"
    compute = ptx.wait(_S_FULL) + (
        "sub.s32 %t12, %thread, 128;\nshl.b32 %t9, %t12, 2;\nadd.s32 %t9, %t9, %smem;\n"
        "and.b32 %t10, %i, 7;\nmad.lo.u32 %t10, %t10, 1000, %t12;\n"
        f"ld.shared::cta.b32 %t11, [%t9+{_STATISTICS_AT}];\n"
    )
    compute += ptx.check("%t11", "%t10") + ptx.FENCE_AFTER + ptx.load(0, 32, 0) + ptx.WAIT_LD
    compute += ptx.jitter(3) + ptx.FENCE_BEFORE + ptx.arrive_at_even(_DS_FULL)
    body += ptx.warps(4, 4, compute)
    last = "sub.s32 %t13, %repeats, 1;\nand.b32 %t13, %t13, 1;\n"
    after = last + ptx.wait(_Q_FULL, "%t13") + ptx.wait(_Q_EMPTY, "%t13") + ptx.FENCE_AFTER
    before = _setup(1, 1, 8, 1, 2) + f"shl.b32 %t9, %lane, 5;\nadd.s32 %t9, %t9, {_B_AT};\n"
    before += "add.s32 %t9, %t9, %smem;\nmov.b32 %t10, 1;\n"
    before += ptx.warps(0, 1, ptx.row_of("%t10", "%t9")) + "fence.proxy.async.shared::cta;\n"
    return ptx.module(
        target, body, 256, before=before + ptx.MEET_PAIR, after=after + ptx.free(2), cluster=2
    )


def _pairs(
    text: Callable[..., str],
    checks: int,
    repeats: tuple[int, int],
    threads: int = 128,
    data: np.ndarray | None = None,
) -> Kernel:
    words = np.zeros(0, np.uint32) if data is None else data
    return Kernel(text, threads, checks, repeats, ctas=(148, 2), cluster=2, data=words)


PROGRAMS = (
    Litmus(
        "remote-operand",
        _pairs(_remote_operand, 128 * 32, (100_000, 6)),
        refuted="D of another B than the one that was stored last",
        broken="without the writer's fence.proxy.async.shared::cluster",
        noticed="proxy-fence",
    ),
    Litmus(
        "relayed-load",
        _pairs(_relayed_load, 128 * 32, (100_000, 10), data=_sources()),
        refuted="D of another B than the one that was copied last",
        broken="without the relaying warp's wait for the copy",
        noticed="race|wrong",
    ),
    Litmus(
        "relayed-load-of-cta",
        _pairs(
            functools.partial(_relayed_load, of_cluster=False),
            *(128 * 32, (100_000, 10)),
            data=_sources(),
        ),
        refuted="the same as in relayed-load, with arrivals and waits at the scope of the CTA",
        broken="without the relaying warp's wait for the copy",
        noticed="race|wrong",
    ),
    Litmus(
        "tensor-arrival-of-cta",
        _pairs(_tensor_arrival, 128 * 64, (100_000, 6)),
        refuted="D of another A than the one that was stored last",
        broken="without tcgen05.wait::st",
        noticed="tensor-wait",
    ),
    Litmus(
        "remote-operand-fenced",
        _pairs(_fenced(_remote_operand), 128 * 32, (100_000, 6)),
        refuted="the same as in remote-operand, although the issuing thread fences, too",
        broken="without both fences",
        noticed="proxy-fence",
    ),
    Litmus(
        "relayed-load-fenced",
        _pairs(_fenced(_relayed_load), 128 * 32, (100_000, 10), data=_sources()),
        refuted="the same as in relayed-load, although the issuing thread fences",
        broken="without the relaying warp's wait for the copy",
        noticed="race|wrong",
    ),
    Litmus(
        "pair-layout-128",
        _pairs(_layout(128, 256, False), 128 * 128, (40, 1)),
        refuted="a value in another lane or column",
        broken="with the CTAs' halves of B exchanged",
        noticed="wrong",
    ),
    Litmus(
        "pair-layout-256",
        _pairs(_layout(256, 256, True), 128 * 256, (40, 1)),
        refuted="a value in another lane or column",
        broken="with the CTAs' halves of B exchanged",
        noticed="wrong",
    ),
    Litmus(
        "commit-carries-pair",
        _pairs(_commit_carries_pair, 128, (100_000, 6), threads=256, data=statistics()),
        refuted="a statistic of another repetition than the product's",
        broken="with a relaying warp that waits for the copy before",
        noticed="race|wrong|deadlock|phase-misuse",
        hangs=True,
    ),
)
