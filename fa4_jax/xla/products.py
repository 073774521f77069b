"""Matrix products of the default path, and weights that keep Inf and NaN where they belong.

A weight that is zero because its pair is masked must not meet Inf or NaN: 0 * NaN is NaN. The other
operand is cleaned, and a pair that is seen gets NaN for its weight where it was cleaned. So a row
that sees Inf or NaN is NaN, and no other row is.
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

    # The CPU of jaxlib 0.8.0 refuses some of these products of narrow types when it runs them.
    if jax.__version_info__ > (0, 8, 0) or x.dtype.itemsize >= 4:
        return product(x, y)

    def widened(x: Array, y: Array) -> Array:
        return product(x.astype(jnp.float32), y.astype(jnp.float32))

    return lax.platform_dependent(x, y, cpu=widened, default=product)


def clean(x: Array) -> Array:
    """x with 0 for Inf and NaN."""
    return jnp.where(jnp.isfinite(x), x, 0)


def is_bad(x: Array) -> Array:
    """Rows of x, [..., rows, h], that hold an Inf or NaN; bool [..., rows]."""
    # One sum of floats: XLA's CPU compiles it to less than a reduction of booleans.
    return jnp.isnan(jnp.where(jnp.isfinite(x), 0.0, jnp.nan).astype(wide(x.dtype)).sum(-1))


def poisoned(weights: Array, scores: Array, bad: Array) -> Array:
    """NaN for the weights of pairs that are seen (by their scores) and `bad`, which broadcasts."""
    return jnp.where(bad & (scores > -jnp.inf), jnp.nan, weights)
