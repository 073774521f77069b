"""Instructions that CuTe-DSL names not at all or only in part; each function issues one."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32


def mbarrier_wait(barrier: cute.Pointer, parity: Int32, ctas: int = 1):
    """mbarrier.try_wait: waits until a phase is complete.

    ctas: 2 also waits for what the pair's other CTA did before it arrived.
    """
    if ctas == 1:
        cute.arch.mbarrier_wait(barrier, parity)
        return
    cute.arch.inline_ptx(
        "{ .reg .pred over; WAIT:"
        " mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 over, [{$r0}], {$r1};"
        " @!over bra WAIT; }",
        read_only_args=[barrier.toint().to(Int32), Int32(parity)],
    )


def bulk_load(shared: cute.Pointer, source: cute.Pointer, num_bytes: int, barrier: cute.Pointer):
    """cp.async.bulk: copies contiguous global to shared memory and counts the bytes on an mbarrier.

    One thread issues it. Addresses and num_bytes are multiples of 16.
    """
    cute.arch.inline_ptx(
        "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes"
        " [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[
            shared.toint().to(Int32),
            source,
            Int32(num_bytes),
            barrier.toint().to(Int32),
        ],
    )


def reduce_add_v4(target: cute.Pointer, values: list[Float32]):
    """red.global.add.v4.f32: adds four values to 16 aligned bytes, in no order."""
    cute.arch.inline_ptx(
        "red.relaxed.gpu.global.add.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[target, *values],
    )


def reduce_max(target: cute.Pointer, value: Float32):
    """red.global.max, of an fp32 value: NaN is more than any number.

    PTX has it for integers alone. As bits, the larger of two values is the larger signed integer
    unless both are negative, and then it is the smaller unsigned one.
    """
    cute.arch.inline_ptx(
        "{ .reg .pred negative; setp.lt.s32 negative, {$r1}, 0;"
        " @!negative red.relaxed.gpu.global.max.s32 [{$r0}], {$r1};"
        " @negative red.relaxed.gpu.global.min.u32 [{$r0}], {$r1}; }",
        read_only_args=[target, value.bitcast(Int32)],
    )


def bulk_reduce_add(target: cute.Pointer, shared: cute.Pointer, num_bytes: int):
    """cp.reduce.async.bulk: adds contiguous fp32 values of shared memory to global memory.

    One thread issues it and commits it. Addresses and num_bytes are multiples of 16.
    """
    cute.arch.inline_ptx(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{$r0}], [{$r1}], {$r2};",
        read_only_args=[target, shared.toint().to(Int32), Int32(num_bytes)],
    )


def bulk_store(target: cute.Pointer, shared: cute.Pointer, num_bytes: int):
    """cp.async.bulk: copies contiguous bytes of shared memory to global memory; as above."""
    cute.arch.inline_ptx(
        "cp.async.bulk.global.shared::cta.bulk_group [{$r0}], [{$r1}], {$r2};",
        read_only_args=[target, shared.toint().to(Int32), Int32(num_bytes)],
    )


def load_acquire(source: cute.Pointer) -> Int32:
    """ld.acquire.gpu: loads an i32.

    Writes that were released before the value that it reads are visible to what follows it.
    """
    return cute.arch.inline_ptx(
        "ld.acquire.gpu.global.s32 {$w0}, [{$r0}];",
        write_only_types=[Int32],
        read_only_args=[source],
    )


def load_of_even(source: cute.Pointer) -> Int32:
    """ld.shared::cluster: loads 32 bits of the pair's even CTA."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 even; mapa.shared::cluster.u32 even, {$r0}, 0;"
        " ld.shared::cluster.s32 {$w0}, [even]; }",
        write_only_types=[Int32],
        read_only_args=[source.toint().to(Int32)],
    )


def arrive_in(barrier: cute.Pointer, cta: Int32):
    """mbarrier.arrive: arrives at a barrier of a CTA of the cluster.

    It says that reads are complete, and hands no data over: a release at cluster scope would wait
    for all of the thread's additions to global memory.
    """
    cute.arch.inline_ptx(
        "{ .reg .b32 there; mapa.shared::cluster.u32 there, {$r0}, {$r1};"
        " mbarrier.arrive.shared::cluster.b64 _, [there]; }",
        read_only_args=[barrier.toint().to(Int32), cta],
    )


def bulk_send(
    target: cute.Pointer, source: cute.Pointer, num_bytes: int, barrier: cute.Pointer, cta: Int32
):
    """cp.async.bulk: copies shared memory to a CTA of the cluster, where an mbarrier counts it.

    One thread issues it. target, barrier: that CTA's, as addresses of this one; num_bytes and
    addresses are multiples of 16.
    """
    cute.arch.inline_ptx(
        "{ .reg .b32 there, full; mapa.shared::cluster.u32 there, {$r0}, {$r4};"
        " mapa.shared::cluster.u32 full, {$r3}, {$r4};"
        " cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
        " [there], [{$r1}], {$r2}, [full]; }",
        read_only_args=[
            target.toint().to(Int32),
            source.toint().to(Int32),
            Int32(num_bytes),
            barrier.toint().to(Int32),
            cta,
        ],
    )


def take_ticket(counter: cute.Pointer) -> Int32:
    """atom.relaxed.gpu: adds one and returns the value before, which no other thread gets."""
    return cute.arch.inline_ptx(
        "atom.relaxed.gpu.global.add.s32 {$w0}, [{$r0}], {$r1};",
        write_only_types=[Int32],
        read_only_args=[counter, Int32(1)],
    )


def count_release_acquire(counter: cute.Pointer) -> Int32:
    """atom.acq_rel.gpu: adds one and returns the value before.

    The thread sees everything that is ordered before earlier such counts, and later ones see what
    is ordered before it.
    """
    return cute.arch.inline_ptx(
        "atom.acq_rel.gpu.global.add.s32 {$w0}, [{$r0}], {$r1};",
        write_only_types=[Int32],
        read_only_args=[counter, Int32(1)],
    )


def increment_release(target: cute.Pointer):
    """red.release.gpu: adds one.

    A thread that acquires it sees everything that is ordered before it.
    """
    cute.arch.inline_ptx(
        "red.release.gpu.global.add.s32 [{$r0}], {$r1};", read_only_args=[target, Int32(1)]
    )


def load_below(source: cute.Pointer, index: int, count: Int32) -> Float32:
    """ld.global: returns element `index` of an fp32 array of `count` elements; 0 past the last.

    The index is a part of the instruction, so that one address serves many elements.
    """
    return cute.arch.inline_ptx(
        f"{{ .reg .pred below; setp.gt.s32 below, {{$r1}}, {index}; mov.b32 {{$w0}}, 0;"
        f" @below ld.global.f32 {{$w0}}, [{{$r0}} + {4 * index}]; }}",
        write_only_types=[Float32],
        read_only_args=[source, count],
    )


def load_word_below(source: cute.Pointer, index: int, count: Int32) -> Int32:
    """ld.global: returns word `index` of an array of `count` words; 0 past the last."""
    return cute.arch.inline_ptx(
        f"{{ .reg .pred below; setp.gt.s32 below, {{$r1}}, {index}; mov.b32 {{$w0}}, 0;"
        f" @below ld.global.b32 {{$w0}}, [{{$r0}} + {4 * index}]; }}",
        write_only_types=[Int32],
        read_only_args=[source, count],
    )


def load_pair_down(
    source: cute.Pointer, index: int, place: Int32, counts: tuple[Int32, Int32]
) -> tuple[Float32, Float32]:
    """ld.global: returns the fp32 elements `index` and `index + 1` before an address.

    An element is loaded if place + its index is below a count and not negative; otherwise it is 0.

    counts: of elements; and of pairs, by place + index, that are loaded at once, 8-aligned.
    """
    return cute.arch.inline_ptx(
        "{ .reg .pred pair, alone, first, second; .reg .b32 at, next;"
        f" add.s32 at, {{$r1}}, {index}; add.s32 next, {{$r1}}, {index + 1};"
        " setp.lt.u32 pair, at, {$r3}; not.pred alone, pair;"
        " setp.lt.and.u32 first, at, {$r2}, alone; setp.lt.and.u32 second, next, {$r2}, alone;"
        " mov.b32 {$w0}, 0; mov.b32 {$w1}, 0;"
        f" @pair ld.global.v2.f32 {{{{$w1}}, {{$w0}}}}, [{{$r0}} + {-4 * (index + 1)}];"
        f" @first ld.global.f32 {{$w0}}, [{{$r0}} + {-4 * index}];"
        f" @second ld.global.f32 {{$w1}}, [{{$r0}} + {-4 * (index + 1)}]; }}",
        write_only_types=[Float32] * 2,
        read_only_args=[source, place, *counts],
    )


def load_pair(source: cute.Pointer, index: int) -> tuple[Int32, Int32]:
    """ld.global.v2: returns words `index` and `index + 1` of an array; they are 8-aligned."""
    return cute.arch.inline_ptx(
        f"ld.global.v2.b32 {{{{$w0}}, {{$w1}}}}, [{{$r0}} + {4 * index}];",
        write_only_types=[Int32] * 2,
        read_only_args=[source],
    )


def load_pair_or_words(
    sources: list[cute.Pointer], pair: int, word: int, count: Int32
) -> tuple[Int32, Int32]:
    """ld.global: returns two adjacent words of the first array, 8-aligned, or one of each array.

    Predicates choose, not branches, across which the compiler would move registers.

    Args:
      pair: the pair's first index.
      word: the words' index.
      count: of words of each array, and 0 is loaded past the last; negative for a pair.
    """
    return cute.arch.inline_ptx(
        "{ .reg .pred pair, below; setp.lt.s32 pair, {$r2}, 0;"
        f" setp.gt.s32 below, {{$r2}}, {word}; mov.b32 {{$w0}}, 0; mov.b32 {{$w1}}, 0;"
        f" @pair ld.global.v2.b32 {{{{$w0}}, {{$w1}}}}, [{{$r0}} + {4 * pair}];"
        f" @below ld.global.b32 {{$w0}}, [{{$r0}} + {4 * word}];"
        f" @below ld.global.b32 {{$w1}}, [{{$r1}} + {4 * word}]; }}",
        write_only_types=[Int32] * 2,
        read_only_args=[*sources, count],
    )


def load_pair_or_row(
    source: cute.Pointer, pair: int, of_row: tuple[int, Int32, Int32], second: int, count: Int32
) -> tuple[Int32, Int32]:
    """ld.global: returns two adjacent words of an array, 8-aligned, or two words of a row.

    Predicates choose, not branches, across which the compiler would move registers; and an address
    is in registers for its own load only.

    Args:
      pair: the pair's first index.
      of_row: which row after the source, the last one there, and words from row to row; that row
        or the last one is loaded from.
      second: the second word's index in the row; the first one's is 0.
      count: of words of a row from there on, and 0 is loaded past the last; negative for a pair.
    """
    row, last, step = of_row
    return cute.arch.inline_ptx(
        "{ .reg .pred pair, below, also; .reg .b32 row; .reg .b64 at; setp.lt.s32 pair, {$r3}, 0;"
        f" setp.gt.s32 below, {{$r3}}, 0; setp.gt.s32 also, {{$r3}}, {second};"
        f" mov.b32 {{$w0}}, 0; mov.b32 {{$w1}}, 0; min.s32 row, {{$r1}}, {row};"
        " mad.wide.s32 at, row, {$r2}, {$r0};"
        f" @pair ld.global.v2.b32 {{{{$w0}}, {{$w1}}}}, [{{$r0}} + {4 * pair}];"
        f" @below ld.global.b32 {{$w0}}, [at];"
        f" @also ld.global.b32 {{$w1}}, [at + {4 * second}]; }}",
        write_only_types=[Int32] * 2,
        read_only_args=[source, last, step * 4, count],
    )


def transpose_matrix(row_pair: Int32) -> Int32:
    """movmatrix.trans: returns a warp's share of an 8 x 8 matrix of 16-bit elements, transposed.

    Lane 4 g + t has columns 2 t and 2 t + 1 of row g, of the matrix and of what is returned.
    """
    return cute.arch.inline_ptx(
        "movmatrix.sync.aligned.m8n8.trans.b16 {$w0}, {$r0};",
        write_only_types=[Int32],
        read_only_args=[row_pair],
    )


def widen_pair(dtype: type[cutlass.Numeric], pair: Int32) -> tuple[Float32, Float32]:
    """cvt.f32.{bf16,f16}: returns the two values of a word, low half first."""
    if dtype is cutlass.BFloat16:
        return (pair << 16).bitcast(Float32), (pair & -65536).bitcast(Float32)
    return cute.arch.inline_ptx(
        "{ .reg .b16 low, high; mov.b32 {low, high}, {$r0};"
        " cvt.f32.f16 {$w0}, low; cvt.f32.f16 {$w1}, high; }",
        write_only_types=[Float32] * 2,
        read_only_args=[pair],
    )


def round_pair(dtype: type[cutlass.Numeric], low: Float32, high: Float32) -> Int32:
    """cvt.rn.{bf16x2,f16x2}.f32: rounds two values to nearest even, packed low half first."""
    packed = {cutlass.BFloat16: "bf16x2", cutlass.Float16: "f16x2"}[dtype]
    return cute.arch.inline_ptx(
        f"cvt.rn.{packed}.f32 {{$w0}}, {{$r0}}, {{$r1}};",
        write_only_types=[Int32],
        read_only_args=[high, low],
    )


def load_matrices(
    address: Int32, offset: int = 0, transposed: bool = False
) -> tuple[Int32, Int32, Int32, Int32]:
    """ldmatrix.x4: loads four 8 x 8 matrices of 16-bit elements from shared memory.

    Row r of matrix i lies at the address of lane 8 i + r. Of each matrix, lane 4 g + t gets columns
    2 t and 2 t + 1 of row g, or of the transposed matrix.
    """
    trans = ".trans" if transposed else ""
    return cute.arch.inline_ptx(
        f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16"
        f" {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, [{{$r0}} + {offset}];",
        write_only_types=[Int32] * 4,
        read_only_args=[address],
    )


def store_matrices(address: Int32, offset: int, words: list[Int32]):
    """stmatrix.x4: stores four 8 x 8 matrices of 16-bit elements, as `load_matrices` loads them."""
    cute.arch.inline_ptx(
        f"stmatrix.sync.aligned.m8n8.x4.shared.b16 [{{$r0}} + {offset}],"
        " {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[address, *words],
    )


def load_chunk(address: Int32, offset: int) -> tuple[Int32, Int32, Int32, Int32]:
    """ld.shared.v4: loads 16 aligned bytes."""
    return cute.arch.inline_ptx(
        f"ld.shared.v4.b32 {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, [{{$r0}} + {offset}];",
        write_only_types=[Int32] * 4,
        read_only_args=[address],
    )


def store_chunk_below(
    target: cute.Pointer, of_row: tuple[int, Int32], row_bytes: Int32, words: tuple[Int32, ...]
):
    """st.global.v4: stores 16 aligned bytes of a row of global memory, if there is such a row.

    of_row: which row after the target's, and how many there are from that one on.
    """
    row, rows = of_row
    cute.arch.inline_ptx(
        "{ .reg .pred below; .reg .b64 at;"
        f" setp.gt.s32 below, {{$r1}}, {row}; mad.wide.s32 at, {{$r2}}, {row}, {{$r0}};"
        " @below st.global.v4.b32 [at], {{$r3}, {$r4}, {$r5}, {$r6}}; }",
        read_only_args=[target, rows, row_bytes, *words],
    )


def copy_chunk(target: Int32, offset: int, source: cute.Pointer, row: Int32, row_bytes: Int32):
    """cp.async.cg: starts to copy 16 bytes of a row of global memory to shared memory.

    Args:
      target, offset: their sum is the address in shared memory.
      source: of the same bytes of row 0.
    """
    cute.arch.inline_ptx(
        "{ .reg .b64 at; mad.wide.s32 at, {$r2}, {$r3}, {$r1};"
        f" cp.async.cg.shared.global [{{$r0}} + {offset}], [at], 16; }}",
        write_only_types=[],
        read_only_args=[target, source, row, row_bytes],
    )


def multiply_m16n8k16(
    dtype: type[cutlass.Numeric], sums: list[Float32], a: list[Int32], b: list[Int32]
) -> tuple[Float32, Float32, Float32, Float32]:
    """mma.sync: sums + A B of a warp, where A is 16 x 16, B 16 x 8, the sums fp32.

    Lane 4 g + t has, of the sums, columns 2 t and 2 t + 1 of row g, then of row g + 8; of A the
    same columns of rows g and g + 8, then columns 8 + 2 t and 8 + 2 t + 1 of both; of B rows 2 t
    and 2 t + 1, then 8 + 2 t and 8 + 2 t + 1, of column g.
    """
    name = {cutlass.BFloat16: "bf16", cutlass.Float16: "f16"}[dtype]
    return cute.arch.inline_ptx(
        f"mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32"
        " {{$w0}, {$w1}, {$w2}, {$w3}}, {{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}},"
        " {{$r6}, {$r7}, {$r8}, {$r9}};",
        write_only_types=[Float32] * 4,
        read_only_args=[*a, *b, *sums],
    )


def anew(x: Int32) -> Int32:
    """mov: returns x; what is computed from it is not moved out of a loop or a branch.

    So no register holds that outside of this place.
    """
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[x]
    )


def await_launch_before():
    """Waits for the launch before this one, and lets the next one start; all threads call it.

    A programmatic launch does so before it touches global memory: afterwards the launch before it
    is over, and the results of all earlier ones are there. CTAs of the next launch may then start
    on the multiprocessors that CTAs of this one leave.
    """
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
