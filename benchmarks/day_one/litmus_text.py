"""Pieces of the litmus programs' PTX, and the frame around them.

Names that every program has: %data (results, then the program's own data from OWN on), %repeats,
%thread, %warp, %lane, %smem (dynamic shared memory), %rank and %peer (in a cluster of two), %i (the
repetition), %parity (its lowest bit). `check` counts comparisons and those that fail.
"""

from __future__ import annotations

import itertools

ENTRY = "litmus"
OWN = 64
"""The bytes of the results: mismatches, comparisons, a value that was read, its expected value."""

FREE_AT = 1024
"""The place where a program's own data begins in shared memory, after barriers and addresses."""

_FRAME = """\
.version 8.8
.target {target}
.address_size 64
.extern .shared .align 1024 .b8 shared_memory[];
.visible .entry {entry}(.param .u64 data, .param .u64 repeats)
.reqntid {threads}, 1, 1{directives}
{{
.reg .pred %p<8>, %bad, %done, %more, %mine;
.reg .b16 %h<4>;
.reg .b32 %thread, %warp, %lane, %smem, %rank, %peer, %i, %parity, %repeats, %checks, %wrong;
.reg .b32 %got, %want, %t<16>, %v<{values}>;
.reg .b64 %data, %d<16>;
.reg .f32 %f<8>;
ld.param.b64 %data, [data];
ld.param.b64 %d0, [repeats];
cvt.u32.u64 %repeats, %d0;
mov.u32 %thread, %tid.x;
shr.u32 %warp, %thread, 5;
and.b32 %lane, %thread, 31;
mov.b32 %smem, shared_memory;
mov.b32 %checks, 0;
mov.b32 %wrong, 0;
mov.b32 %got, 0;
mov.b32 %want, 0;
mov.u32 %rank, %cluster_ctarank;
xor.b32 %peer, %rank, 1;
{before}
mov.b32 %i, 0;
NEXT:
and.b32 %parity, %i, 1;
{body}
add.s32 %i, %i, 1;
setp.lt.u32 %more, %i, %repeats;
@%more bra NEXT;
{after}
red.relaxed.gpu.global.add.u32 [%data], %wrong;
red.relaxed.gpu.global.add.u32 [%data+4], %checks;
setp.eq.u32 %bad, %wrong, 0;
@%bad bra LEAVE;
atom.relaxed.gpu.global.exch.b32 %t0, [%data+8], %got;
atom.relaxed.gpu.global.exch.b32 %t0, [%data+12], %want;
LEAVE:
ret;
}}
"""

_labels = itertools.count()


def module(
    target: str,
    body: str,
    threads: int,
    *,
    before: str = "",
    after: str = "",
    cluster: int = 1,
    values: int = 64,
    registers: int = 0,
) -> str:
    """Returns a module with one kernel that repeats `body`.

    Args:
      values: registers %v.
      registers: of a thread as it starts; 0 leaves that to ptxas.
    """
    directives = f"\n.maxnreg {registers}" if registers else ""
    if cluster > 1:
        directives += f"\n.explicitcluster\n.reqnctapercluster {cluster}, 1, 1"
    return _FRAME.format(
        target=target,
        entry=ENTRY,
        threads=threads,
        directives=directives,
        values=values,
        before=before,
        body=body,
        after=after,
    )


WARP_MEETS = "bar.warp.sync -1;\n"
MEET = f"{WARP_MEETS}bar.sync 0;\n"
"""A barrier of the CTA. Lanes that leave a loop one by one meet first, as `.aligned` asks for."""

MEET_PAIR = f"{WARP_MEETS}barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n"


def label(name: str) -> str:
    """Returns a label that no other place of a text has."""
    return f"{name}_{next(_labels)}"


def when(condition: str, body: str) -> str:
    """Returns the body for threads with a condition (words of a setp.b32); then the warp meets."""
    end = label("END")
    return f"setp.{condition};\n@!%mine bra {end};\n{body}\n{end}:\nbar.warp.sync -1;\n"


def warps(first: int, count: int, body: str) -> str:
    """Returns the body for some warps; afterwards no thread waits for them."""
    end = label("END")
    return (
        f"sub.u32 %t0, %warp, {first};\nsetp.ge.u32 %p0, %t0, {count};\n@%p0 bra {end};\n"
        f"{body}\n{end}:\n"
    )


def one(thread: int, body: str) -> str:
    """Returns the body for one thread."""
    return when(f"eq.u32 %mine, %thread, {thread}", body)


def barriers(*arrivals: int, cluster: bool = False) -> str:
    """Makes mbarriers at [%smem], [%smem+8], ... by thread 0; then the CTA or the cluster meets."""
    inits = "\n".join(
        f"mbarrier.init.shared::cta.b64 [%smem+{8 * i}], {count};"
        for i, count in enumerate(arrivals)
    )
    inits += "\nfence.mbarrier_init.release.cluster;"
    return one(0, inits) + (MEET_PAIR if cluster else MEET)


def wait(barrier: int, parity: str = "%parity", scope: str = "") -> str:
    """Waits for a phase of the mbarrier at [%smem + barrier]."""
    again = label("WAIT")
    return (
        f"{again}:\nmbarrier.try_wait.parity{scope}.shared::cta.b64 %done, "
        f"[%smem+{barrier}], {parity};\n@!%done bra {again};\n"
    )


CLUSTER = ".acquire.cluster"
"""For `wait`: it also orders what another CTA did before it arrived."""


def arrive(barrier: int) -> str:
    """Arrives once for each warp, ordered after what its lanes did."""
    text = f"mbarrier.arrive.shared::cta.b64 _, [%smem+{barrier}];"
    return WARP_MEETS + when("eq.u32 %mine, %lane, 0", text)


def arrive_at_even(barrier: int, scope: str = ".release.cluster") -> str:
    """Arrives once for each warp at the barrier of the pair's even CTA.

    scope: "" is that of the CTA, which orders tensor memory and copies only as far as hardware goes
      beyond the PTX ISA.
    """
    text = (
        f"add.s32 %t1, %smem, {barrier};\nmapa.shared::cluster.u32 %t1, %t1, 0;\n"
        f"mbarrier.arrive{scope}.shared::cluster.b64 _, [%t1];"
    )
    return WARP_MEETS + when("eq.u32 %mine, %lane, 0", text)


def expect(barrier: int, num_bytes: int) -> str:
    """Arrives and announces bytes."""
    return f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [%smem+{barrier}], {num_bytes};\n"


def bulk_load(at: int, source: str, num_bytes: int, barrier: int) -> str:
    """Issues cp.async.bulk from global memory to [%smem + at], counted on a barrier; one thread."""
    return (
        f"{expect(barrier, num_bytes)}add.s32 %t2, %smem, {at};\nadd.s32 %t3, %smem, {barrier};\n"
        "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes "
        f"[%t2], [{source}], {num_bytes}, [%t3];\n"
    )


def jitter(salt: int) -> str:
    """Sleeps for up to half a microsecond, another time in every repetition, CTA and warp."""
    return (
        f"mad.lo.u32 %t0, %i, 40503, {salt};\nmov.u32 %t1, %ctaid.x;\n"
        "mad.lo.u32 %t1, %t1, 16, %warp;\nmad.lo.u32 %t0, %t1, 9973, %t0;\n"
        "mul.lo.u32 %t0, %t0, 2654435769;\nshr.u32 %t0, %t0, 23;\nnanosleep.u32 %t0;\n"
    )


def check(got: str, want: str) -> str:
    """Counts a comparison of two words."""
    return (
        f"add.s32 %checks, %checks, 1;\nsetp.ne.b32 %bad, {got}, {want};\n"
        f"@%bad add.s32 %wrong, %wrong, 1;\n@%bad mov.b32 %got, {got};\n"
        f"@%bad mov.b32 %want, {want};\n"
    )


def vector(first: int, count: int) -> str:
    """Returns {%v.., ...}."""
    return "{" + ", ".join(f"%v{first + i}" for i in range(count)) + "}"


def row_of(value: str, address: str, space: str = "shared::cta") -> str:
    """Stores 32 bytes at an address: sixteen bf16 of one small integer, whatever the swizzle."""
    words = "{%t4, %t4, %t4, %t4}"
    return (
        f"cvt.rn.f32.u32 %f0, {value};\ncvt.rn.bf16x2.f32 %t4, %f0, %f0;\n"
        f"st.{space}.v4.b32 [{address}], {words};\nst.{space}.v4.b32 [{address}+16], {words};\n"
    )


# The rest is for tensor memory and its products (sm_100f).
COLUMNS_AT = 64
"""The place in shared memory where tcgen05.alloc leaves the address."""


def allocate(ctas: int = 1) -> str:
    """Allocates all columns by warp 0 of each CTA; a barrier and `lane_base` must follow."""
    group = f"cta_group::{ctas}.sync.aligned"
    return warps(
        0,
        1,
        f"add.s32 %t1, %smem, {COLUMNS_AT};\n"
        f"tcgen05.alloc.{group}.shared::cta.b32 [%t1], 512;\n"
        f"tcgen05.relinquish_alloc_permit.{group};",
    )


def lane_base() -> str:
    """Computes %t15, the address of the columns, and %t14, that of the first lane that the warp
    reaches.
    """
    return (
        f"ld.shared::cta.b32 %t15, [%smem+{COLUMNS_AT}];\nand.b32 %t14, %warp, 3;\n"
        "shl.b32 %t14, %t14, 21;\nadd.s32 %t14, %t14, %t15;\n"
    )


def free(ctas: int = 1) -> str:
    """Releases all columns, after the CTA or the pair has met."""
    return (MEET if ctas == 1 else MEET_PAIR) + warps(
        0, 1, f"tcgen05.dealloc.cta_group::{ctas}.sync.aligned.b32 %t15, 512;"
    )


FENCE_BEFORE = "tcgen05.fence::before_thread_sync;\n"
FENCE_AFTER = "tcgen05.fence::after_thread_sync;\n"
WAIT_LD = "tcgen05.wait::ld.sync.aligned;\n"
WAIT_ST = "tcgen05.wait::st.sync.aligned;\n"
_HIGH = 256 >> 4 | 1 << 14 | 6 << 29
"""The layout of rows of 32 bytes, eight of them 256 bytes, swizzled by 32."""


def operand(register: str, at: int) -> str:
    """Writes the descriptor of rows of 32 bytes at [%smem + at] to a 64-bit register."""
    return (
        f"add.s32 %t5, %smem, {at};\nshr.u32 %t5, %t5, 4;\nand.b32 %t5, %t5, 16383;\n"
        f"or.b32 %t5, %t5, 65536;\nmov.b64 {register}, {{%t5, {_HIGH}}};\n"
    )


def mma(rows: int, columns: int, d: int, a: str, b: str, accumulate: bool, ctas: int = 1) -> str:
    """Issues a product of depth 16 into columns from d on; a: a descriptor, or an address in
    brackets.
    """
    descriptor = 1 << 4 | 1 << 7 | 1 << 10 | columns // 8 << 17 | rows // 16 << 24
    return (
        f"add.s32 %t6, %t15, {d};\nsetp.eq.u32 %p1, 0, {int(not accumulate)};\n"
        f"tcgen05.mma.cta_group::{ctas}.kind::f16 [%t6], {a}, {b}, {descriptor}, %p1;\n"
    )


def commit(barrier: int, ctas: int = 1) -> str:
    """Arrives, in both CTAs of a pair, once the thread's products are complete."""
    name = f"tcgen05.commit.cta_group::{ctas}.mbarrier::arrive::one.shared::cluster"
    address = f"add.s32 %t7, %smem, {barrier};\n"
    if ctas == 1:
        return f"{address}{name}.b64 [%t7];\n"
    return f"{address}mov.b16 %h0, 3;\n{name}.multicast::cluster.b64 [%t7], %h0;\n"


def load(first: int, count: int, column: int) -> str:
    """Issues tcgen05.ld of columns of the thread's lane into %v, without the wait for it."""
    return (
        f"{WARP_MEETS}add.s32 %t8, %t14, {column};\n"
        f"tcgen05.ld.sync.aligned.32x32b.x{count}.b32 {vector(first, count)}, [%t8];\n"
    )


def store(first: int, count: int, column: int) -> str:
    """Issues tcgen05.st of %v to columns of the thread's lane, without the wait for it."""
    return (
        f"{WARP_MEETS}add.s32 %t8, %t14, {column};\n"
        f"tcgen05.st.sync.aligned.32x32b.x{count}.b32 [%t8], {vector(first, count)};\n"
    )


def as_float(value: str, target: str) -> str:
    """Returns the bits of a whole number as a float."""
    return f"cvt.rn.f32.u32 %f1, {value};\nmov.b32 {target}, %f1;\n"
