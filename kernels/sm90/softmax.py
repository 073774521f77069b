"""The arithmetic of online softmax on wgmma's accumulator fragments: values in, values out.

A wgmma accumulator of 64 x n gives a thread two rows (index 1 of its first mode) and, in each,
pairs of adjacent columns every 8 columns:
    acc[(column % 2, row, column // 8)], thread = 4 * (row % 8) + (column % 8) // 2 of its warp.
Scores are kept unscaled; exponents are in units of log2, so that exp is one exp2.
"""

import functools
import itertools

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from kernels.common.row_ranges import Tags, bits_below
from kernels.common.softmax import (
    TANH_UNIT,
    are_near,
    exp2,
    factors_of_products,
    finite_reference,
    fmax,
    has_powers,
    near_coefficients,
    near_tanh,
    odd_polynomial,
    select,
    tanh,
)

CHAINS = 4  # instructions of a maximum at a time, each of which waits for the one before it

ROWS = 2  # rows of an accumulator fragment per thread


def fragment_index(
    column_pair: int, row: int, column: int
) -> tuple[tuple[int, int, int], int, int]:
    """Returns a coordinate in an accumulator fragment ((2, 2, n / 8), 1, 1)."""
    return ((column, row, column_pair), 0, 0)


def fragment_columns(acc: cute.Tensor) -> list[tuple[int, int]]:
    """Lists all (column_pair, column) of a row of the fragment."""
    pairs = cute.size(acc.shape[0][2])
    return [(pair, column) for pair in range(pairs) for column in range(2)]


def quad_reduce(value: Float32, op) -> Float32:
    """Reduces over the four threads that share a row."""
    value = op(value, cute.arch.shuffle_sync_bfly(value, offset=1))
    return op(value, cute.arch.shuffle_sync_bfly(value, offset=2))


def largest_magnitude(products: cute.Tensor, before_cap: Float32) -> Float32:
    """Returns the largest |product| of a thread's fragment, times |before_cap|; NaN if one is."""
    largest = [Float32(0.0)] * CHAINS
    for i in range(cute.size(products)):
        largest[i % CHAINS] = fmax(largest[i % CHAINS], cute.math.absf(products[i]))
    return functools.reduce(fmax, largest) * cute.math.absf(before_cap)


@cute.jit
def cap_below(products: cute.Tensor, before_cap: Float32, largest: Float32):
    """Replaces products by their scores in units of the soft cap.

    largest: `largest_magnitude` of the products. Where none of the warp is above half a cap, a
      polynomial of the products themselves is enough.
    """
    if cute.arch.vote_all_sync(largest <= TANH_UNIT / 2) & has_powers(before_cap):
        factors = factors_of_products(near_coefficients(), before_cap)
        for i in cutlass.range_constexpr(cute.size(products)):
            products[i] = odd_polynomial(products[i], factors)
    else:
        for i in cutlass.range_constexpr(cute.size(products)):
            products[i] = tanh(products[i] * before_cap)


@cute.jit
def cap(acc: cute.Tensor, before_cap: Float32, at_once: cutlass.Constexpr[int]):
    """Replaces products by their scores in units of the soft cap; `state.Scales.before_cap`.

    Where all scores of a warp are at most half a cap, a polynomial alone is enough.
    at_once: how many scores of a thread are asked for that together; it divides them.
    """
    for first in cutlass.range_constexpr(0, cute.size(acc), at_once):
        for i in cutlass.range_constexpr(first, first + at_once):
            acc[i] = acc[i] * before_cap
        if are_near([acc[i] for i in range(first, first + at_once)]):
            for i in cutlass.range_constexpr(first, first + at_once):
                acc[i] = near_tanh(acc[i])
        else:
            for i in cutlass.range_constexpr(first, first + at_once):
                acc[i] = tanh(acc[i])


def mask_band(acc: cute.Tensor, first_column: Int32, low: cute.Tensor, high: cute.Tensor):
    """Sets scores of keys outside [low[row], high[row]) to -inf.

    Args:
      acc: score fragment.
      first_column: key index of this thread's first column in the block.
      low, high: i32 key bounds of the thread's two rows.
    """
    for row in range(ROWS):
        inside = _columns_below(high[row] - first_column)
        inside = inside & ~_columns_below(low[row] - first_column)
        for bit, (pair, column) in enumerate(fragment_columns(acc)):
            index = fragment_index(pair, row, column)
            acc[index] = select((inside & (1 << bit)) != 0, acc[index], -Float32.inf)


def _columns_below(limit: Int32) -> Uint32:
    """Returns a bit for each of a thread's columns, at most 32: whether it is below the limit.

    The compiler moves bits of a word to predicates, seven at once; comparisons cost it three
    instructions a score.
    """
    limit = cutlass.max(limit, 0)
    return bits_below((limit // 8) * 2 + cutlass.min(limit % 8, 2))


def mask_tags(acc: cute.Tensor, first_column: Int32, tags: Tags):
    """Sets scores of keys whose tags a row does not match to -inf; arguments as `mask_band`'s."""
    last = cute.size(tags.keys) - 1
    for pair, column in fragment_columns(acc):
        key = cutlass.min(first_column + pair * 8 + column, last)
        tag = tags.keys[key]
        for row in range(ROWS):
            index = fragment_index(pair, row, column)
            matches = (tag >= tags.low[row]) & (tag <= tags.high[row])
            acc[index] = select(matches, acc[index], -Float32.inf)


def new_reference(
    scores: cute.Tensor, row: int, reference: Float32, lag_limit: Float32
) -> tuple[Float32, Float32]:
    """Returns a row's reference maximum once this block is seen, and the true one of both.

    The reference stays where it was while the true maximum is at most lag_limit above it, so that
    most blocks need no rescaling; output, row sum and LSE share it, so the result is the same in
    exact arithmetic.
    (FlashAttention-4, conditional rescaling.)
    """
    maximum = reference
    for pair, column in fragment_columns(scores):
        maximum = fmax(maximum, scores[fragment_index(pair, row, column)])
    maximum = quad_reduce(maximum, fmax)
    # (-inf) - (-inf) is NaN and compares false: the reference is then set to the maximum.
    return select(maximum - reference <= lag_limit, reference, maximum), maximum


def new_references(
    scores: cute.Tensor, references: list[Float32], lag_limit: Float32
) -> tuple[list[Float32], list[Float32]]:
    """Returns what `new_reference` does for both rows, computed side by side.

    Each row has two chains of maxima, so that none waits for the one before.
    """
    chains = [[reference, -Float32.inf] for reference in references]
    for pair, column in fragment_columns(scores):
        for row in range(ROWS):
            score = scores[fragment_index(pair, row, column)]
            chains[row][column] = fmax(chains[row][column], score)
    maxima = [quad_reduce(fmax(*chain), fmax) for chain in chains]
    moved = [
        select(maximum - reference <= lag_limit, reference, maximum)
        for maximum, reference in zip(maxima, references, strict=True)
    ]
    return moved, maxima


def exponentiate_row(
    scores: cute.Tensor, row: int, reference: Float32, scale_log2: Float32
) -> Float32:
    """Replaces a row's scores by exp2((scores - reference) * scale_log2).

    Returns the thread's sum.
    """
    shift = finite_reference(reference) * scale_log2
    total = [Float32(0.0), Float32(0.0)]
    for pair, column in fragment_columns(scores):
        index = fragment_index(pair, row, column)
        scores[index] = exp2(scores[index] * scale_log2 - shift)
        total[column] = total[column] + scores[index]
    return total[0] + total[1]


def exponentiate_rows(
    scores: cute.Tensor, references: list[Float32], scale_log2: Float32, sums: cute.Tensor
):
    """Does what `exponentiate_row` does for both rows, side by side; adds to the thread's sums."""
    shifts = [finite_reference(reference) * scale_log2 for reference in references]
    totals = [[sums[row], Float32(0.0)] for row in range(ROWS)]
    for pair in range(cute.size(scores.shape[0][2])):
        indices = [[fragment_index(pair, row, x) for x in range(2)] for row in range(ROWS)]
        for row, column in itertools.product(range(ROWS), range(2)):
            index = indices[row][column]
            scores[index] = exp2(scores[index] * scale_log2 - shifts[row])
        for row, column in itertools.product(range(ROWS), range(2)):
            totals[row][column] = totals[row][column] + scores[indices[row][column]]
    for row in range(ROWS):
        sums[row] = totals[row][0] + totals[row][1]


def scale_rows(acc: cute.Tensor, factors: list[Float32]):
    """Multiplies each row of an accumulator fragment by its factor."""
    for row in range(ROWS):
        for pair, column in fragment_columns(acc):
            index = fragment_index(pair, row, column)
            acc[index] = acc[index] * factors[row]


def exponentiate_products(
    products: cute.Tensor, row: int, factors: list[Float32], shift: Float32
) -> Float32:
    """Does what `exponentiate_row` does, of products of which a polynomial gives the exponents."""
    total = [Float32(0.0), Float32(0.0)]
    for pair, column in fragment_columns(products):
        index = fragment_index(pair, row, column)
        products[index] = exp2(odd_polynomial(products[index], factors) - shift)
        total[column] = total[column] + products[index]
    return total[0] + total[1]
