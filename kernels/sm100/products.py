"""tcgen05 products of operands that descriptors name; a statement issues all steps of 16 along K.

The PTX ISA gives the bit fields of both descriptors: tcgen05, "Shared memory descriptor" and
"Instruction descriptor".
"""

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

K_STEP = 16  # elements of a 16-bit operand along K, of one instruction

_SWIZZLE = {128: 2, 64: 4, 32: 6}  # by span in bytes
_VERSION = 1 << 14
_FORMAT = {cutlass.Float16: 0, cutlass.BFloat16: 1}


@dataclasses.dataclass(frozen=True)
class Operand:
    """A 16-bit operand in shared memory, in the swizzled layout that TMA writes.

    Attributes:
      low, high: words of the descriptor of its first step; addresses and distances in 16 bytes.
      steps: what each step along K adds to `low`.
      mn_major: contiguous along M or N rather than along K.
    """

    low: Int32
    high: int
    steps: tuple[int, ...]
    mn_major: bool

    def moved(self, num_bytes: Any) -> "Operand":
        """Returns the operand `num_bytes` further on, a multiple of 1024."""
        return dataclasses.replace(self, low=self.low + num_bytes // 16)


def k_major(start: cute.Pointer, rows: int, columns: int, span_bytes: int) -> Operand:
    """Describes (rows, columns) with K along columns; spans of columns lie one after another."""
    per_span = span_bytes // (2 * K_STEP)
    steps = [
        (step // per_span * rows * span_bytes + step % per_span * 2 * K_STEP) // 16
        for step in range(columns // K_STEP)
    ]
    return _operand(start, span_bytes, 1, tuple(steps), False)


def mn_major(start: cute.Pointer, rows: int, span_bytes: int) -> Operand:
    """Describes the same memory, (rows, columns), with K along rows."""
    steps = tuple(step * span_bytes for step in range(rows // K_STEP))
    return _operand(start, span_bytes, rows * span_bytes // 16, steps, True)


def _operand(
    start: cute.Pointer, span_bytes: int, leading: int, steps: tuple[int, ...], mn: bool
) -> Operand:
    low = (start.toint().to(Int32) >> 4) + (leading << 16)
    eight_rows = 8 * span_bytes // 16
    return Operand(low, eight_rows | _VERSION | _SWIZZLE[span_bytes] << 29, steps, mn)


@dataclasses.dataclass(frozen=True)
class Product:
    """m x n accumulators in tensor memory, fp32, from 16-bit operands.

    A pair of CTAs has half of the rows of the accumulators and of A each, and half of B's columns
    (its extent along N), at the same addresses; one thread of the even CTA issues.
    """

    dtype: Any
    m: int
    n: int
    ctas: int = 1

    def issue(
        self,
        acc: Int32,
        a: Operand | Int32,
        b: Operand,
        accumulate: Any,
        steps: tuple[int, int],
    ):
        """Issues acc (+)= a b over K steps [first, end); the whole warp calls, one thread issues.

        acc: first column in tensor memory; a: operand, or first column of an operand in tensor
        memory that holds row r in lane r, two elements a column.
        accumulate: of the first step, a constant or a runtime Boolean.
        """
        shared_a = isinstance(a, Operand)
        arguments = [Int32(acc), a.low if shared_a else Int32(a), b.low, Int32(accumulate)]
        lines = [
            "{ .reg .pred leader, before, always; .reg .b64 a, b; .reg .b32 d, x, y, high;",
            "elect.sync _|leader, -1; setp.ne.b32 before, {$r3}, 0; mov.pred always, -1;",
            "mov.b32 d, {$r0};",
        ]
        for step in range(*steps):
            if shared_a:
                lines += _descriptor("a", "{$r1}", a, step)
                a_text = "a"
            else:
                lines.append(f"add.s32 x, {{$r1}}, {step * K_STEP // 2};")
                a_text = "[x]"
            lines += _descriptor("b", "{$r2}", b, step, "y")
            before = "before" if step == steps[0] else "always"
            lines.append(
                f"@leader tcgen05.mma.cta_group::{self.ctas}.kind::f16"
                f" [d], {a_text}, b, {self._instruction(a, b)}, {before};"
            )
        cute.arch.inline_ptx(" ".join([*lines, "}"]), read_only_args=arguments)

    def _instruction(self, a: Operand | Int32, b: Operand) -> int:
        """Returns the instruction descriptor: fp32 results, types, majors, sizes."""
        kind = _FORMAT[self.dtype]
        a_mn_major = isinstance(a, Operand) and a.mn_major
        majors = a_mn_major << 15 | b.mn_major << 16
        return 1 << 4 | kind << 7 | kind << 10 | majors | self.n // 8 << 17 | self.m // 16 << 24


def _descriptor(name: str, low: str, operand: Operand, step: int, word: str = "x") -> list[str]:
    """Lists the statements that put the descriptor of a step into register `name`."""
    return [
        f"add.s32 {word}, {low}, {operand.steps[step]}; mov.b32 high, {operand.high};",
        f"mov.b64 {name}, {{{word}, high}};",
    ]


def commit(barrier: cute.Pointer, ctas: int = 1):
    """Arrives, in both CTAs of a pair, once all products that this warp has issued are complete."""
    instruction = f"tcgen05.commit.cta_group::{ctas}.mbarrier::arrive::one.shared::cluster"
    registers = ".reg .pred leader;"
    if ctas == 1:
        instruction += ".b64 [{$r0}];"
    else:
        registers += " .reg .b16 both; mov.b16 both, 3;"
        instruction += ".multicast::cluster.b64 [{$r0}], both;"
    cute.arch.inline_ptx(
        f"{{ {registers} elect.sync _|leader, -1; @leader {instruction} }}",
        read_only_args=[barrier.toint().to(Int32)],
    )


def lane_base() -> Int32:
    """Returns the address of column 0 in the first of the lanes that the calling warp reaches.

    The columns of a CTA that has allocated all of them begin at 0.
    """
    return (cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4) << 21


def arrive(*barriers: cute.Pointer, ctas: int = 1, stores: bool = True):
    """Arrives, once per warp, at each barrier; the arrival is ordered after what its lanes did.

    In a pair the barriers are the even CTA's.

    Args:
      stores: in a pair, whether the lanes' stores to shared memory are handed over, too. That asks
        for a release at cluster scope, for which ptxas stops the warp with a memory barrier of the
        whole GPU. Tensor memory, which its own fences order, and finished copies need none.
    """
    cute.arch.sync_warp()
    signal(*barriers, ctas=ctas, stores=stores)


def signal(*barriers: cute.Pointer, ctas: int = 1, stores: bool = True):
    """Arrives like `arrive`, without a synchronisation of the warp's lanes.

    It is ordered after what the lanes did before they last synchronised.
    """
    registers = ".reg .pred leader;"
    if ctas == 1:
        arrival = "@leader mbarrier.arrive.shared::cta.b64 _, [{{$r{}}}];"
    else:
        registers += " .reg .b32 even;"
        arrival = (
            "mapa.shared::cluster.u32 even, {{$r{}}}, 0;"
            f" @leader mbarrier.arrive{'.release.cluster' if stores else ''}.shared::cluster.b64"
            " _, [even];"
        )
    arrivals = " ".join(arrival.format(i) for i in range(len(barriers)))
    cute.arch.inline_ptx(
        f"{{ {registers} elect.sync _|leader, -1; {arrivals} }}",
        read_only_args=[barrier.toint().to(Int32) for barrier in barriers],
    )
