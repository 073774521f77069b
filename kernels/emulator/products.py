"""Products of matrices, as tensor cores compute them."""

from __future__ import annotations

import numpy as np


def matrix_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """A B^T in float32, of A [rows, depth] and B [columns, depth] in float32.

    An element is the same wherever its row lies, as in hardware: with float32 sums a BLAS adds in
    an order that depends on the row's place. Of 16-bit elements and tf32 the products are exact in
    float64, and so are the sums unless their terms differ by more than 2^25.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        return (a.astype(np.float64) @ b.astype(np.float64).T).astype(np.float32)
