"""What the implementations promise, in a few dense lines of JAX: a stand-in that compiles quickly.

Like the kernels it reads its extents only, so that what they have to say is tested too.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from fa4_jax.operands import Cotangents, Gradients, Operands, Results, RowRanges
from fa4_jax.problem import Problem

Array = jax.Array


def _visible(problem: Problem, operands: Operands) -> Array:
    """Bool [B, 1, T, S]."""
    rows, keys, offset, _ = (x[:, None, None] for x in operands.extents.T)
    i = jnp.arange(operands.query.shape[1])[None, :, None]
    j = jnp.arange(operands.key.shape[1])[None, None, :]
    left, right = problem.window
    seen = (i < rows) & (j < keys)
    if problem.band:
        seen &= (j - i - offset >= -left) & (j - i - offset <= right)
    if operands.rows is not None:
        seen &= _in_ranges(operands.rows, j)
    return seen[:, None]


def _in_ranges(rows: RowRanges, j: Array) -> Array:
    """Bool [B|1, T, S] of keys j [1, 1, S]."""
    seen = (rows.low[..., None] <= j) & (j < rows.high[..., None])
    if (tags := rows.tags) is not None:
        key = tags.key[:, None]
        seen &= (tags.query_low[..., None] <= key) & (key <= tags.query_high[..., None])
    return seen


def _heads_first(x: Array, heads: int, used: Array) -> Array:
    """[B, L, K, H] -> float32 [B, N, L, H] with the rows that nobody uses zeroed."""
    x = jnp.repeat(x.astype(jnp.float32), heads // x.shape[2], axis=2).transpose(0, 2, 1, 3)
    return jnp.where(used[..., None], x, 0)


def _scores(problem: Problem, operands: Operands) -> tuple[Array, Array, Array, Array]:
    """Masked scores and query, key and value by query heads."""
    assert problem.scale is not None, "kernels take no traced scale"
    seen, heads = _visible(problem, operands), operands.query.shape[2]
    q = _heads_first(operands.query, heads, seen.any(3))
    k, v = (_heads_first(x, heads, seen.any(2)) for x in (operands.key, operands.value))
    return jnp.where(seen, q @ k.swapaxes(2, 3) * problem.scale, -jnp.inf), q, k, v


@functools.partial(jax.jit, static_argnums=0)
def forward(problem: Problem, operands: Operands) -> Results:
    """As `xla.forward`."""
    s, _, _, v = _scores(problem, operands)
    lse = jax.nn.logsumexp(s, axis=-1)
    p = jnp.exp(s - jnp.where(lse == -jnp.inf, 0, lse)[..., None])
    return Results((p @ v).transpose(0, 2, 1, 3).astype(operands.query.dtype), lse)


@functools.partial(jax.jit, static_argnums=0)
def backward(problem: Problem, operands: Operands, cotangents: Cotangents) -> Gradients:
    """As `xla.backward`: rows with a log-sum-exp of -inf see nothing."""
    assert problem.scale is not None, "kernels take no traced scale"
    s, q, k, v = _scores(problem, operands)
    heads, kv_heads = operands.query.shape[2], operands.key.shape[2]
    empty = cotangents.lse == -jnp.inf
    p = jnp.where(empty[..., None], 0, jnp.exp(s - cotangents.lse[..., None]))
    do = _heads_first(cotangents.output_bar, heads, ~empty)
    o = _heads_first(cotangents.output, heads, ~empty)
    delta = (do * o).sum(-1) - cotangents.lse_bar
    ds = p * (do @ v.swapaxes(2, 3) - jnp.where(empty, 0, delta)[..., None]) * problem.scale

    def by_key_head(x: Array) -> Array:
        b, _, length, h = x.shape
        return x.reshape(b, kv_heads, -1, length, h).sum(2)

    bars = (ds @ k, by_key_head(ds.swapaxes(2, 3) @ q), by_key_head(p.swapaxes(2, 3) @ do))
    dq, dk, dv = (x.transpose(0, 2, 1, 3).astype(operands.query.dtype) for x in bars)
    return Gradients(dq, dk, dv, None)
