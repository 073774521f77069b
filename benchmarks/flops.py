"""Counts the floating-point operations of attention: only pairs of a row and a key that it sees."""

from __future__ import annotations

from benchmarks.shapes import Case
from fa4_jax import bands


def visible_pairs(case: Case) -> int:
    """Returns the number of pairs (row, key) that enter one head of one batch element."""
    window = bands.CAUSAL if case.is_causal else bands.EVERYTHING
    band = bands.Band(case.query_length, case.key_length, case.query_offset, *window)
    return bands.visible_pairs(band)


def flops(case: Case, direction: str) -> int:
    """Returns the number of multiplications and additions of the matrix products.

    Args:
      direction: "forward" (two products: q k^T, p v) or "backward" (five: q k^T again, do v^T, and
        one for each gradient).
    """
    products = {"forward": 2, "backward": 5}[direction]
    return products * 2 * case.head_dim * case.batch * case.heads[0] * visible_pairs(case)
