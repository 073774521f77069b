"""Counts the floating-point operations of attention: only pairs of a row and a key that it sees."""

from __future__ import annotations

import itertools

from benchmarks.shapes import Case
from fa4_jax import bands


def visible_pairs(case: Case) -> int:
    """Returns the number of pairs (row, key) that enter one head of all batch entries together."""
    left, right = case.window or (None, None)
    window = bands.limits(left, right, case.is_causal)
    if case.pieces is None:
        band = bands.Band(case.query_length, case.key_length, case.query_offset, *window)
        return case.batch * bands.visible_pairs(band)
    return sum(
        bands.visible_pairs(bands.Band(length, length, case.query_offset, *window))
        for length in itertools.chain(*case.pieces)
    )


def flops(case: Case, direction: str) -> int:
    """Returns the number of multiplications and additions of the matrix products.

    Args:
      direction: "forward" (q k^T over the head dim, p v over value's) or "backward" (q k^T again
        and the gradients of query and key over the head dim; do v^T and value's gradient over
        value's).
    """
    of_keys, of_values = {"forward": (1, 1), "backward": (3, 2)}[direction]
    columns = of_keys * case.head_dim + of_values * case.output_dim
    return 2 * columns * case.heads[0] * visible_pairs(case)
