"""What kernels of Hessian-vector products read of each query row, beside the operands.

NumPy and jax.numpy compute it alike: the library and the emulator's tests share it.
"""

from __future__ import annotations

import math
from typing import Any

from fa4_jax.key import STATISTICS_ROWS


def row_statistics(
    numpy: Any, results: tuple[Any, Any], bars: tuple[Any, Any], moved: tuple[Any, Any]
) -> Any:
    """f32 [B, N, rows, 4]: LSE in units of log2, LSE', delta and delta' of each query row.

    The rows are T, padded to a multiple of STATISTICS_ROWS.

    delta is rowsum(dO * O) - dLSE, delta' is rowsum(dO * O'). A row that sees no key and a row of
    padding have inf and zeros: their P is 0.

    Args:
      numpy: the module that computes.
      results, bars, moved: output [B, T, N, H] and log-sum-exp [B, N, T], their cotangents, and
        their tangents.
    """
    (output, lse), (output_bar, lse_bar), (output_moved, lse_moved) = results, bars, moved
    bar = output_bar.astype(numpy.float32)

    def of_rows(x: Any) -> Any:
        return (bar * x.astype(numpy.float32)).sum(-1).swapaxes(1, 2)

    sees = lse != -numpy.inf
    others = (lse_moved, of_rows(output) - lse_bar, of_rows(output_moved))
    columns = [numpy.where(sees, lse * numpy.float32(math.log2(math.e)), numpy.inf)]
    columns += [numpy.where(sees, x, 0.0) for x in others]
    found = numpy.stack(columns, -1).astype(numpy.float32)
    shape = (*lse.shape[:2], -lse.shape[2] % STATISTICS_ROWS)
    rest = [numpy.full(shape, x, numpy.float32) for x in (numpy.inf, 0, 0, 0)]
    return numpy.concatenate([found, numpy.stack(rest, -1)], 2)
