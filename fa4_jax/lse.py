"""Merging attention over disjoint sets of keys, by log-sum-exp."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fa4_jax.dtypes import wide


def merge(
    output_a: jax.Array, lse_a: jax.Array, output_b: jax.Array, lse_b: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Attention over two disjoint sets of keys from the attention over each.

        lse = log(exp(lse_a) + exp(lse_b)),  output = sum_x exp(lse_x - lse) output_x

    (FlashAttention-2, Dao 2023, section 2.2.) Differentiable, also through the log-sum-exps.

    Args:
      output_a, output_b: [B, T, N, H] (or [T, N, H]), of one dtype.
      lse_a, lse_b: float32 (float64 of float64) [B, N, T] (or [N, T]), natural logarithm; -inf
        where no key was seen.

    Returns:
      (output, lse) of the same shapes and dtypes; 0 and -inf where neither saw a key.
    """
    # The derivative of logaddexp(-inf, -inf) would be NaN.
    empty = (lse_a == -jnp.inf) & (lse_b == -jnp.inf)
    safe = jnp.logaddexp(*(jnp.where(empty, 0, part) for part in (lse_a, lse_b)))
    lse = jnp.where(empty, -jnp.inf, safe)

    def weighted(output: jax.Array, part: jax.Array) -> jax.Array:
        weight = jnp.exp(part - safe)  # [B, N, T]
        return jnp.swapaxes(weight, -1, -2)[..., None] * output.astype(wide(output.dtype))

    output = weighted(output_a, lse_a) + weighted(output_b, lse_b)
    return output.astype(output_a.dtype), lse
