"""Instructions on tensor memory, and others of Blackwell; each function issues one.

An address names a lane in its upper and a column in its lower 16 bits. A warp reaches the 32 lanes
that start at 32 times its place in its warpgroup, and its thread t reaches lane t of those. Whole,
converged warps call all functions.
"""

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32


def _list(prefix: str, count: int, first: int = 0) -> str:
    return "{" + ", ".join(f"{{${prefix}{first + i}}}" for i in range(count)) + "}"


def tmem_load(address: Int32, columns: int) -> list[Float32]:
    """tcgen05.ld: loads consecutive columns of the thread's lane, and waits for them.

    Both are one statement, so that no use of a value can move before the wait. An instruction loads
    32 columns: the next wider one needs more registers than a thread has before setmaxnreg.
    """
    step = min(columns, 32)
    return tmem_load_runs(address, columns // step, step, step)


def tmem_load_runs(address: Int32, runs: int, columns: int, stride: int) -> list[Float32]:
    """tcgen05.ld: loads several runs of columns, whose first ones are `stride` apart, and waits."""
    loads = [
        f"tcgen05.ld.sync.aligned.32x32b.x{columns}.b32 {_list('w', columns, run * columns)},"
        f" [{{$r0}} + {run * stride}];"
        for run in range(runs)
    ]
    values = cute.arch.inline_ptx(
        " ".join([*loads, "tcgen05.wait::ld.sync.aligned;"]),
        write_only_types=[Float32] * (runs * columns),
        read_only_args=[address],
    )
    return list(values)


def tmem_store(address: Int32, values: list[Float32] | list[Int32]):
    """tcgen05.st: stores one 32-bit value a column; `tmem_store_wait` completes it."""
    cute.arch.inline_ptx(
        f"tcgen05.st.sync.aligned.32x32b.x{len(values)}.b32"
        f" [{{$r0}}], {_list('r', len(values), 1)};",
        read_only_args=[address, *values],
    )


def tmem_store_wait():
    """tcgen05.wait::st: waits until the warp's stores are complete."""
    cute.arch.inline_ptx("tcgen05.wait::st.sync.aligned;")


def fence_before_sync():
    """Orders the thread's tensor-memory accesses before what it signals next."""
    cute.arch.inline_ptx("tcgen05.fence::before_thread_sync;")


def fence_after_sync():
    """Orders the thread's tensor-memory accesses after what it has just waited for."""
    cute.arch.inline_ptx("tcgen05.fence::after_thread_sync;")


def maximum(a: Float32, b: Float32, c: Float32) -> Float32:
    """max.NaN.f32: returns the largest of three values, or NaN if any is.

    It is one instruction on Blackwell.
    """
    return cute.arch.inline_ptx(
        "max.NaN.f32 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[Float32],
        read_only_args=[a, b, c],
    )


def add_exponent(value: Float32, whole: Float32) -> Float32:
    """Returns value * 2^n for n in the low bits of `whole`, which it adds to the exponent."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 n; shl.b32 n, {$r1}, 23; add.s32 {$w0}, n, {$r0}; }",
        write_only_types=[Float32],
        read_only_args=[value, whole],
    )


def arrive_unless(skip: Boolean, barrier: Int32, threads: int):
    """bar.arrive: arrives at a named barrier unless `skip`.

    A predicate decides, so that no branch divides the instructions around it.
    """
    cute.arch.inline_ptx(
        f"{{ .reg .pred arrives; setp.eq.b32 arrives, {{$r0}}, 0;"
        f" @arrives bar.arrive {{$r1}}, {threads}; }}",
        read_only_args=[Int32(skip), barrier],
    )


def set_registers(count: int):
    """setmaxnreg: sets a thread's registers, of which 512 threads are launched with 128 each."""
    if count >= 128:
        cute.arch.setmaxregister_increase(count)
    else:
        cute.arch.setmaxregister_decrease(count)


def store_swizzled_row(row: Int32, swizzle: Int32, words: list[Int32], cta: Int32, start: int = 0):
    """st.shared::cluster: stores words of a row of a swizzled tile of a CTA of the pair.

    row: shared-memory address of the row in this CTA; swizzle: what is exclusive-ored with the
    bytes of every place in the row; start: byte of the first word, a multiple of 16.
    """
    lines = ["{ .reg .b32 first, address; mapa.shared::cluster.u32 first, {$r0}, {$r1};"]
    for vector in range(len(words) // 4):
        values = ", ".join(f"{{$r{4 * vector + i + 3}}}" for i in range(4))
        lines.append(
            f"xor.b32 address, {{$r2}}, {start + vector * 16}; add.s32 address, address, first;"
            f" st.shared::cluster.v4.b32 [address], {{{values}}};"
        )
    cute.arch.inline_ptx(" ".join([*lines, "}"]), read_only_args=[row, cta, swizzle, *words])


def fence_proxy_of_cluster():
    """fence.proxy.async: orders accesses to shared memory, that of other CTAs, too."""
    cute.arch.inline_ptx("fence.proxy.async.shared::cluster;")
