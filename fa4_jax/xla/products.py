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


def dot(equation: str, x: Array, y: Array) -> Array:
    """Product whose sums and result are float32, or float64 for float64."""

    def product(x: Array, y: Array) -> Array:
        return jnp.einsum(equation, x, y, preferred_element_type=wide(x.dtype))

    if x.dtype.itemsize >= 4:
        return product(x, y)

    # On CPUs products of narrow types take longer, since their operands are rounded on the way (a
    # causal bf16 forward of S = 64: 0.13 ms, 0.09 widened); jaxlib 0.8.0 even refuses some.
    def widened(x: Array, y: Array) -> Array:
        return product(x.astype(jnp.float32), y.astype(jnp.float32))

    return lax.platform_dependent(x, y, cpu=widened, default=product)


def clean(x: Array) -> Array:
    """x with 0 for Inf and NaN."""
    return jnp.where(jnp.isfinite(x), x, 0)


def poison(x: Array) -> Array:
    """NaN for each row of x, [..., rows, h], that holds an Inf or NaN, and 0 for the others.

    Returns:
      [..., rows], in the type of sums.
    """
    x = x.astype(wide(x.dtype))
    return (x - x).sum(-1)
