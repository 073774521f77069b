"""Sinks of results that are otherwise complete, and their gradient.

The gradient follows from what the backward of any implementation has.

A sink is a score of its own for each head, of a key whose value is 0: with the probability
p = exp(sink - lse) of a row, dsink = sum over rows of p (0 - delta), delta = do . o - dlse.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fa4_jax.operands import Cotangents, Results

Array = jax.Array


def included(sinks: Array, found: Results) -> Results:
    """Results over all keys of a row, the output in the type of sums, with sinks [N] added.

    A row past the query length gets its sink, too.
    """
    lse = jnp.logaddexp(found.lse, sinks[None, :, None])
    safe = jnp.where(lse == -jnp.inf, 0, lse)
    keep = jnp.exp(found.lse - safe).swapaxes(1, 2)[..., None]
    return found._replace(output=found.output * keep.astype(found.output.dtype), lse=lse)


def gradient(sinks: Array, cotangents: Cotangents) -> Array:
    """Cotangent of sinks [N]; output and log-sum-exp are those with the sinks.

    A row that sees no key gives its dlse to the sink; a row past the query length, which has a
    log-sum-exp of -inf, gives nothing, whatever its cotangents are.
    """
    lse = cotangents.lse
    products = cotangents.output_bar.astype(lse.dtype) * cotangents.output.astype(lse.dtype)
    delta = products.sum(-1).swapaxes(1, 2) - cotangents.lse_bar  # [B, N, T]
    counts = lse != -jnp.inf
    share = jnp.exp(sinks[None, :, None] - jnp.where(counts, lse, 0))
    return -jnp.where(counts, share * delta, 0).sum((0, 2))
