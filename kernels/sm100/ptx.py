"""Tensor memory by its instructions: one function, one instruction.

An address names a lane in its upper and a column in its lower 16 bits. A warp reaches the 32 lanes
that start at 32 times its place in its warpgroup; thread t of it, lane t of those. All functions
are called by whole, converged warps.
"""

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32


def _list(prefix: str, count: int, first: int = 0) -> str:
    return "{" + ", ".join(f"{{${prefix}{first + i}}}" for i in range(count)) + "}"


def tmem_load(address: Int32, columns: int) -> list[Float32]:
    """tcgen05.ld of consecutive columns of the thread's lane, and the wait for it.

    One statement, so that no use of a value can move before the wait. 32 columns an instruction:
    the next wider ones ask for more registers than a thread has before setmaxnreg.
    """
    step = min(columns, 32)
    loads = [
        f"tcgen05.ld.sync.aligned.32x32b.x{step}.b32 {_list('w', step, first)},"
        f" [{{$r0}} + {first}];"
        for first in range(0, columns, step)
    ]
    values = cute.arch.inline_ptx(
        " ".join([*loads, "tcgen05.wait::ld.sync.aligned;"]),
        write_only_types=[Float32] * columns,
        read_only_args=[address],
    )
    return list(values)


def tmem_store(address: Int32, values: list[Float32] | list[Int32]):
    """tcgen05.st of one 32-bit value a column; `tmem_store_wait` completes it."""
    cute.arch.inline_ptx(
        f"tcgen05.st.sync.aligned.32x32b.x{len(values)}.b32"
        f" [{{$r0}}], {_list('r', len(values), 1)};",
        read_only_args=[address, *values],
    )


def tmem_store_wait():
    """tcgen05.wait::st: the warp's stores have been made."""
    cute.arch.inline_ptx("tcgen05.wait::st.sync.aligned;")


def fence_before_sync():
    """Orders the thread's tensor-memory accesses before what it signals next."""
    cute.arch.inline_ptx("tcgen05.fence::before_thread_sync;")


def fence_after_sync():
    """Orders the thread's tensor-memory accesses after what it has just waited for."""
    cute.arch.inline_ptx("tcgen05.fence::after_thread_sync;")


def maximum(a: Float32, b: Float32, c: Float32) -> Float32:
    """max.NaN.f32 of three values: one instruction on Blackwell; keeps NaN."""
    return cute.arch.inline_ptx(
        "max.NaN.f32 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[Float32],
        read_only_args=[a, b, c],
    )


def add_exponent(value: Float32, whole: Float32) -> Float32:
    """value * 2^n for n in the low bits of `whole`: its bits shifted to the exponent and added."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 n; shl.b32 n, {$r1}, 23; add.s32 {$w0}, n, {$r0}; }",
        write_only_types=[Float32],
        read_only_args=[value, whole],
    )


def arrive_unless(skip: Boolean, barrier: Int32, threads: int):
    """bar.arrive on a named barrier unless `skip`; by a predicate, so that no branch divides the
    instructions around it."""
    cute.arch.inline_ptx(
        f"{{ .reg .pred arrives; setp.eq.b32 arrives, {{$r0}}, 0;"
        f" @arrives bar.arrive {{$r1}}, {threads}; }}",
        read_only_args=[Int32(skip), barrier],
    )


def set_registers(count: int):
    """setmaxnreg: more or fewer registers than the 128 that 512 threads are launched with."""
    if count >= 128:
        cute.arch.setmaxregister_increase(count)
    else:
        cute.arch.setmaxregister_decrease(count)


def store_swizzled_row(row: Int32, index: Int32, words: list[Int32], cta: Int32):
    """st.shared::cluster of a 64-byte row of a tile with 64-byte swizzling, in a CTA of the pair.

    row: shared-memory address of the row in this CTA; index: of the row in the tile.
    """
    lines = ["{ .reg .b32 first, address; mapa.shared::cluster.u32 first, {$r0}, {$r1};"]
    for vector in range(len(words) // 4):
        values = ", ".join(f"{{$r{4 * vector + i + 3}}}" for i in range(4))
        lines.append(
            f"xor.b32 address, {{$r2}}, {vector * 16}; add.s32 address, address, first;"
            f" st.shared::cluster.v4.b32 [address], {{{values}}};"
        )
    swizzle = (index // 2 & 3) * 16
    cute.arch.inline_ptx(" ".join([*lines, "}"]), read_only_args=[row, cta, swizzle, *words])


def load_of_even(source: cute.Pointer) -> Int32:
    """ld.shared::cluster of 32 bits of the pair's even CTA."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 even; mapa.shared::cluster.u32 even, {$r0}, 0;"
        " ld.shared::cluster.s32 {$w0}, [even]; }",
        write_only_types=[Int32],
        read_only_args=[source.toint().to(Int32)],
    )


def fence_proxy_of_cluster():
    """fence.proxy.async of shared memory, that of other CTAs, too."""
    cute.arch.inline_ptx("fence.proxy.async.shared::cluster;")
