"""Capped scores in the Hopper backward of one CTA: their P^T, and dS^T with the slope of the cap.

Until dP is there, registers hold values of which polynomials give the exponents of P and the
slopes. Where no score of a warp is above an eighth of a cap of at most 64, and no pair of the
block is hidden, the values are products; elsewhere they are scores in units of the cap.
"""

import itertools

import cutlass.cute as cute
from cutlass import Boolean, Float32

from kernels.common.softmax import (
    MOST_NEAR,
    MOST_NEAR_LOG2,
    NEAR_COEFFICIENTS,
    NEAR_SLOPE,
    exp2,
    factors_of_products,
    fmax,
    has_powers,
    select,
)
from kernels.common.state import Exponents
from kernels.sm90 import softmax
from kernels.sm90.backward_parts import BackwardParts

HIDDEN = -1e18
"""A hidden score in units of the cap: its square is finite, and so its slope times its P of 0."""

LEAST_CAP_LOG2 = 1e-15
"""A smaller cap changes no exponent of a visible score, but P of hidden ones has to be 0."""


class CappedScores(BackwardParts):
    """What a soft cap changes of a step; attributes are those of `BackwardParts`."""

    @cute.jit
    def cap(self, products: cute.Tensor, exponents: Exponents, hides: Boolean) -> Boolean:
        """Replaces products by their scores in units of the soft cap, unless these are near.

        hides: whether a mask is to hide some.

        Returns:
          Whether they are still products, of near scores.
        """
        largest = softmax.largest_magnitude(products, exponents.before_cap)
        may_be = (exponents.scale_log2 <= MOST_NEAR_LOG2) & has_powers(exponents.before_cap)
        limit = select(may_be, Float32(MOST_NEAR), Float32(-1.0))
        near = cute.arch.vote_all_sync(largest <= limit) & ~hides
        if ~near:
            softmax.cap_below(products, exponents.before_cap, largest)
        return near

    @cute.jit
    def hide_finitely(self, scores: cute.Tensor, hides: Boolean):
        """Replaces -inf by HIDDEN."""
        if hides:
            for i in range(cute.size(scores)):
                scores[i] = fmax(scores[i], Float32(HIDDEN))

    def capped_gradient(
        self,
        scores: tuple[cute.Tensor, cute.Tensor],
        statistics: tuple[cute.Tensor, cute.Tensor],
        exponents: Exponents,
        near: Boolean,
    ):
        """Replaces the values that `cap` has left by P^T, and dP^T by dS^T.

        Both at once, after dP is there, so that no registers hold the slopes of the cap.

        Args:
          scores: the values, and dP^T.
          statistics: lse_log2 and delta.
        """
        (values, dp), (lse_log2, delta) = scores, statistics
        before_cap = exponents.before_cap
        cubic, first = factors_of_products(NEAR_COEFFICIENTS, before_cap, exponents.scale_log2)
        first = select(near, first, fmax(exponents.scale_log2, Float32(LEAST_CAP_LOG2)))
        cubic = select(near, cubic, Float32(0.0))
        (of_product,) = factors_of_products([NEAR_SLOPE], before_cap, before_cap)
        minus_square = select(near, of_product, Float32(-1.0))
        for pair in range(cute.size(values.shape[0][2])):
            shifts, deltas = self.of_columns(lse_log2, pair), self.of_columns(delta, pair)
            for row, column in itertools.product(range(softmax.ROWS), range(2)):
                index = softmax.fragment_index(pair, row, column)
                value = values[index]
                square = value * value
                slope = square * minus_square + 1.0
                values[index] = exp2(value * (square * cubic + first) - shifts[column])
                dp[index] = values[index] * slope * (dp[index] - deltas[column])
