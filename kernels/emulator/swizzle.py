"""The swizzle that TMA and the tensor cores share."""

from __future__ import annotations

import numpy as np

CHUNK = 16


def swizzled(chunks: np.ndarray, span: int) -> np.ndarray:
    """Where 16-byte chunks go: their place in the span is XORed with the number of its row."""
    return chunks ^ (chunks >> 3 & (max(span // CHUNK, 1) - 1))
