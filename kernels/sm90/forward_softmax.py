"""Softmax of a block in the Hopper forward: scores in, P and factors of the output before out."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from kernels.common.softmax import (
    factors_of_products,
    fmax,
    near_coefficients,
    rescale_factor,
)
from kernels.common.state import Scales
from kernels.sm90 import softmax
from kernels.sm90.forward_bias import lacking, move_reference
from kernels.sm90.forward_data import Rows
from kernels.sm90.tiles import ForwardTile


class RowSoftmax:
    """The softmax of a warpgroup's rows; attributes are those of `Forward`."""

    tile: ForwardTile

    @cute.jit
    def capped_softmax(self, scores: cute.Tensor, rows: Rows, scales: Scales) -> list[Float32]:
        """Does what `softmax_block` does, of products whose scores are capped and none hidden.

        Where a polynomial of the products gives the exponents of all scores of a warp, they need no
        maximum.
        """
        first, second = Float32(1.0), Float32(1.0)
        largest = softmax.largest_magnitude(scores, scales.before_cap)
        if cute.arch.vote_all_sync(largest <= scales.near_limit):
            first, second = self.softmax_of_products(scores, rows, scales)
        else:
            softmax.cap_below(scores, scales.before_cap, largest)
            first, second = self.softmax_block(scores, rows, scales)
        return [first, second]

    def softmax_of_products(
        self, products: cute.Tensor, rows: Rows, scales: Scales
    ) -> list[Float32]:
        """Does what `softmax_block` does, of products whose exponents are near 0, the reference."""
        factors = []
        of_products = factors_of_products(near_coefficients(), scales.before_cap, scales.scale_log2)
        for row in range(softmax.ROWS):
            old = rows.reference[row]
            new = fmax(old, Float32(0.0))
            factor = rescale_factor(old, new, scales.scale_log2)
            shift = new * scales.scale_log2
            total = softmax.exponentiate_products(products, row, of_products, shift)
            rows.reference[row] = new
            rows.row_sum[row] = rows.row_sum[row] * factor + total
            factors.append(factor)
        return factors

    def softmax_block(
        self,
        scores: cute.Tensor,
        rows: Rows,
        scales: Scales,
        bases: list[Float32] | None = None,
    ) -> list[Float32]:
        """Replaces scores by P, updates row references and sums, returns rescale factors.

        bases: what the scores lack of each row, or None; forward_bias.
        """
        if not self.tile.skips_rescaling:
            return self.softmax_side_by_side(scores, rows, scales, bases)
        factors = []
        for row in range(softmax.ROWS):
            old = lacking(rows.reference, bases, row)
            new, maximum = softmax.new_reference(scores, row, old, scales.lag_limit)
            if rows.maximum is not None:
                rows.maximum[row] = fmax(rows.maximum[row], maximum)
            factor = rescale_factor(old, new, scales.scale_log2)
            total = softmax.exponentiate_row(scores, row, new, scales.scale_log2)
            move_reference(rows.reference, bases, row, (old, new))
            rows.row_sum[row] = rows.row_sum[row] * factor + total
            factors.append(factor)
        return factors

    def softmax_side_by_side(
        self,
        scores: cute.Tensor,
        rows: Rows,
        scales: Scales,
        bases: list[Float32] | None,
    ) -> list[Float32]:
        """Does what `softmax_block` does, with both rows side by side.

        The compiler then issues the multiplications of `rescale` among the exponentials, which the
        special-function unit takes eight cycles each for. Row by row, or with the factors after
        the exponentials, they come after all of them.
        """
        old = [lacking(rows.reference, bases, row) for row in range(softmax.ROWS)]
        new, maxima = softmax.new_references(scores, old, scales.lag_limit)
        factors = []
        for row in range(softmax.ROWS):
            if rows.maximum is not None:
                rows.maximum[row] = fmax(rows.maximum[row], maxima[row])
            move_reference(rows.reference, bases, row, (old[row], new[row]))
            factors.append(rescale_factor(old[row], new[row], scales.scale_log2))
            rows.row_sum[row] = rows.row_sum[row] * factors[row]
        softmax.exponentiate_rows(scores, new, scales.scale_log2, rows.row_sum)
        return factors

    @cute.jit
    def rescale(self, acc: cute.Tensor, factors: list[Float32]):
        """Multiplies acc by each row's factor; ForwardTile.skips_rescaling."""
        if cutlass.const_expr(self.tile.skips_rescaling):
            moved = (factors[0] != 1.0) | (factors[1] != 1.0)
            if cute.arch.vote_any_sync(moved):
                softmax.scale_rows(acc, factors)
        else:
            softmax.scale_rows(acc, factors)
