"""The arithmetic of online softmax where a thread holds a whole row: lists of values in and out.

Scores are kept unscaled; exponents are in units of log2, so that exp is one exp2.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from kernels.common.softmax import are_near, exp2, fmax, near_coefficients, select, tanh
from kernels.sm100 import ptx

CAPPED_AT_ONCE = 16
"""Scores of a thread that are asked together whether they are far from 0; more of them spill."""


@cute.jit
def capped(scores: list[Float32], before_cap: Float32 | None) -> list[Float32]:
    """Replaces products by their scores in units of the soft cap, if there is one.

    Where none of a warp's scores is far from 0, the special-function unit has nothing to do.

    before_cap: `state.Scales.before_cap`.
    """
    if cutlass.const_expr(before_cap is None):
        return scores
    count = len(scores)
    values = cute.make_rmem_tensor((count,), Float32)
    for i in cutlass.range_constexpr(count):
        values[i] = scores[i]
    if before_cap != 0.0:
        at_once = min(count, CAPPED_AT_ONCE)
        for first in cutlass.range_constexpr(0, count, at_once):
            products = multiply(scores[first : first + at_once], before_cap)
            if are_near(products):
                for i in cutlass.range_constexpr(0, at_once, 2):
                    pair = near_tanh_pair((products[i], products[i + 1]))
                    values[first + i], values[first + i + 1] = pair
            else:
                for i in cutlass.range_constexpr(at_once):
                    values[first + i] = tanh(products[i])
    return [values[i] for i in range(count)]


def near_tanh_pair(y: tuple[Float32, Float32]) -> tuple[Float32, Float32]:
    """Returns `near_tanh` of two values."""
    packed, square = cute.arch, cute.arch.mul_packed_f32x2(y, y)
    factor, *others = [(Float32(c), Float32(c)) for c in near_coefficients()]
    for both in others:
        factor = packed.fma_packed_f32x2(factor, square, both)
    return packed.mul_packed_f32x2(factor, y)


def mask(
    scores: list[Float32],
    first_key: Int32,
    low: Int32,
    high: Int32,
    fill: Float32 = -Float32.inf,
) -> list[Float32]:
    """Scores of keys outside [low, high) become `fill`; scores[i] is key first_key + i."""
    first, last = low - first_key, high - first_key
    return [select((i >= first) & (i < last), score, fill) for i, score in enumerate(scores)]


def mask_bits(scores: list[Float32], bits: list[Uint32]) -> list[Float32]:
    """Scores of keys whose bit, of 32 a word, is 0 become -inf."""
    return [
        select((bits[i // 32] & Uint32(1 << i % 32)) != 0, score, -Float32.inf)
        for i, score in enumerate(scores)
    ]


def maximum(scores: list[Float32], start: Float32) -> Float32:
    """Returns the largest of scores and `start`, by four independent chains; NaN if any is NaN."""
    chains = [start, *scores[:3]]
    rest = scores[3:]
    while len(rest) >= 2:
        for chain in range(4):
            if len(rest) >= 2:
                chains[chain] = ptx.maximum(chains[chain], rest[0], rest[1])
                rest = rest[2:]
    for value in rest:
        chains[0] = fmax(chains[0], value)
    return fmax(ptx.maximum(chains[0], chains[1], chains[2]), chains[3])


def new_reference(
    scores: list[Float32], reference: Float32, lag_limit: Float32
) -> tuple[Float32, Float32]:
    """Returns the row's reference maximum once this block is seen, and the largest score so far.

    The reference stays where it was while the true maximum is at most lag_limit above it, so that
    most blocks need no rescaling; output, row sum and LSE share it, so the result is the same in
    exact arithmetic.
    (FlashAttention-4, conditional rescaling.)
    """
    largest = maximum(scores, reference)
    # (-inf) - (-inf) is NaN and compares false: the reference is then set to the maximum.
    return select(largest - reference <= lag_limit, reference, largest), largest


CUBIC = (0.69511676, 0.227645, 0.07706705)
"""2^f ~ 1 + f (a + f (b + f c)) on [0, 1): relative error at most 8.6e-5.

It is the minimax polynomial of the relative error with value 1 at f = 0, by Lawson's iteration.
"""

_ROUNDER = 12582912.0  # 1.5 * 2^23: adding it leaves the integer part in the low bits
_SMALLEST = -127.0  # 2^-127 comes out as 0, as it must for a masked score's -inf


def exp2_pair(x: tuple[Float32, Float32]) -> tuple[Float32, Float32]:
    """Returns 2^x of two values, x <= 127, by fused multiply-adds.

    The whole part goes to the exponent; the cubic is of the rest.

    (FlashAttention-4, emulated exponential: Cody-Waite reduction with rounding to minus infinity.)
    """
    packed = cute.arch
    low, high = (cute.arch.fmax(value, _SMALLEST) for value in x)
    rounder = (Float32(_ROUNDER), Float32(_ROUNDER))
    shifted = packed.add_packed_f32x2((low, high), rounder, rnd="rm")
    whole = packed.add_packed_f32x2(shifted, (Float32(-_ROUNDER), Float32(-_ROUNDER)))
    rest = packed.sub_packed_f32x2((low, high), whole)
    value = (Float32(CUBIC[2]), Float32(CUBIC[2]))
    for coefficient in (CUBIC[1], CUBIC[0], 1.0):
        value = packed.fma_packed_f32x2(rest, value, (Float32(coefficient), Float32(coefficient)))
    return ptx.add_exponent(value[0], shifted[0]), ptx.add_exponent(value[1], shifted[1])


def exponents(scores: list[Float32], shift: Float32, scale_log2: Float32) -> list[tuple]:
    """Returns score * scale_log2 + shift, by pairs."""
    scales, shifts = (scale_log2, scale_log2), (shift, shift)
    pairs = zip(scores[::2], scores[1::2], strict=True)
    return [cute.arch.fma_packed_f32x2(pair, scales, shifts) for pair in pairs]


def exponentials(exponents: list[tuple], polynomial_pairs: int, first_pair: int) -> list[Float32]:
    """Returns 2^x of pairs of values, the first of which is the first_pair-th of its row.

    polynomial_pairs: of every 16 pairs, how many use the polynomial; they are evenly spread.
    """
    values = []
    for i, pair in enumerate(exponents, first_pair):
        if (i + 1) * polynomial_pairs // 16 > i * polynomial_pairs // 16:
            values += exp2_pair(pair)
        else:
            values += [exp2(x) for x in pair]
    return values


def accumulate(sums: list[tuple], values: list[Float32]) -> list[tuple]:
    """Adds an even number of values of a row to its sums, which are four packed chains."""
    sums = list(sums)
    for i, pair in enumerate(zip(values[::2], values[1::2], strict=True)):
        if len(sums) < 4:
            sums.append(pair)
        else:
            sums[i % 4] = cute.arch.add_packed_f32x2(sums[i % 4], pair)
    return sums


def total(sums: list[tuple]) -> Float32:
    """Returns the sum of four packed chains."""
    halves = [cute.arch.add_packed_f32x2(sums[i], sums[i + 2]) for i in range(2)]
    low, high = cute.arch.add_packed_f32x2(halves[0], halves[1])
    return low + high


def multiply(values: list[Float32], factor: Float32) -> list[Float32]:
    """Multiplies an even number of values by a factor."""
    return products(values, [factor] * len(values))


def products(values: list[Float32], others: list[Float32]) -> list[Float32]:
    """Multiplies an even number of values by as many others, one by one."""
    found = []
    for i in range(0, len(values), 2):
        found += cute.arch.mul_packed_f32x2(tuple(values[i : i + 2]), tuple(others[i : i + 2]))
    return found
