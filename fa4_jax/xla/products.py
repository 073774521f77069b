"""Matrix products of the default path, and what keeps Inf and NaN with the rows that see them.

A weight that is zero because its pair is masked must not meet Inf or NaN: 0 * NaN is NaN. So the
other operand is cleaned, and the scores of pairs that are seen receive the NaN instead (`poison`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from fa4_jax.dtypes import wide

Array = jax.Array


def dot(x: Array, y: Array, x_axis: int, y_axis: int, batch: int = 2) -> Array:
    """Products summed over an axis of x and of y, for each index of the first `batch` axes.

    Returns:
      [first axes, x's other axis, y's other axis], float32 or, for float64, float64.
    """
    each = tuple(range(batch))
    numbers = (((x_axis,), (y_axis,)), (each, each))

    def product(x: Array, y: Array) -> Array:
        return lax.dot_general(x, y, numbers, preferred_element_type=wide(x.dtype))

    if x.dtype.itemsize >= 4:
        return product(x, y)

    # On CPUs products of narrow types take longer, since their operands are rounded on the way (a
    # causal bf16 forward of S = 64: 0.13 ms, 0.09 widened); jaxlib 0.8.0 even refuses some.
    def widened(x: Array, y: Array) -> Array:
        return product(x.astype(jnp.float32), y.astype(jnp.float32))

    return lax.platform_dependent(x, y, cpu=widened, default=product)


def select(condition: Array, x: Array, fill: float) -> Array:
    """x where the condition, which broadcasts to it, holds, and `fill` elsewhere."""
    if condition.shape != x.shape:
        condition = lax.broadcast_in_dim(condition, x.shape, range(x.ndim))
    return lax.select(condition, x, lax.full_like(x, fill))


def clean(x: Array) -> Array:
    """x with 0 for Inf and NaN."""
    return select(lax.is_finite(x), x, 0)


def poison(x: Array) -> Array:
    """NaN for each row of x, [..., rows, h], that holds an Inf or NaN, and 0 for the others.

    Returns:
      [..., rows], in the type of sums.
    """
    x = x.astype(wide(x.dtype))
    return (x - x).sum(-1)
