"""How many floating-point operations attention takes: only pairs of a row and a key it sees."""

from __future__ import annotations

import numpy as np

from benchmarks.shapes import Case


def visible_pairs(case: Case) -> int:
    """Pairs (row, key) that enter one head of one batch element."""
    if not case.is_causal:
        return case.query_length * case.key_length
    last = np.arange(case.query_length, dtype=np.int64) + case.query_offset
    return int(np.clip(last + 1, 0, case.key_length).sum())


def flops(case: Case, direction: str) -> int:
    """Multiplications and additions of the matrix products.

    Args:
      direction: "forward" (two products: q k^T, p v) or "backward" (five: q k^T again, do v^T, and
        one for each gradient).
    """
    products = {"forward": 2, "backward": 5}[direction]
    return products * 2 * case.head_dim * case.batch * case.heads[0] * visible_pairs(case)
