"""The attention of few scores: one block, all of whose scores are held at once.

The same equations as `blockwise`'s, written down plainly: no loops, so that it compiles in a
fraction of the time. The backward computes the weights from the log-sum-exp again. In a program
that holds both passes the compiler finds the forward's scores and does not compute them twice.

Letters: b batch, k KV head, g query head of its group, t query row, s key, h head dim, r (g, t).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fa4_jax.bands import UNBOUNDED
from fa4_jax.operands import Cotangents, Gradients, Operands
from fa4_jax.problem import Problem
from fa4_jax.xla.products import clean, dot, is_bad, poisoned

Array = jax.Array


def _is_masked(problem: Problem) -> bool:
    """Whether a pair may be masked that is not padding."""
    return problem.band or problem.has_mask


def _rows(x: Array, problem: Problem) -> Array:
    """[B, T, N, H] -> [b, k, r, h]: the rows of a group side by side, one matrix a KV head."""
    b, t, _, h = x.shape
    x = x.reshape(b, t, problem.kv_heads, problem.group, h).transpose(0, 2, 3, 1, 4)
    return x.reshape(b, problem.kv_heads, problem.group * t, h)


def _from_rows(x: Array, problem: Problem) -> Array:
    """[b, k, r, h] -> [B, T, N, H]."""
    b, k, _, h = x.shape
    x = x.reshape(b, k, problem.group, problem.query_length, h).transpose(0, 3, 1, 2, 4)
    return x.reshape(b, problem.query_length, problem.query_heads, h)


def _keys(x: Array, problem: Problem, operands: Operands) -> Array:
    """[B, S, K, H] -> [b, k, s, h], 0 past the key length."""
    if problem.has_lengths:
        x = jnp.where(_key_padding(problem, operands)[:, :, None, None], x, 0)
    return x.transpose(0, 2, 1, 3)


def _key_padding(problem: Problem, operands: Operands) -> Array:
    """Whether keys lie below the key length, bool [b, s]."""
    return jnp.arange(problem.key_length)[None, :] < operands.extents[:, 1:2]


def _row_padding(problem: Problem, operands: Operands) -> Array:
    """Whether rows lie below the query length, bool [b, t]."""
    return jnp.arange(problem.query_length)[None, :] < operands.extents[:, 0:1]


def _grouped(x: Array, problem: Problem) -> Array:
    """[B|1, N|1, T|1, S|1] -> [b|1, k|1, g|1, t|1, s|1]."""
    b, n, t, s = x.shape
    heads = (1, 1) if n == 1 else (problem.kv_heads, problem.group)
    return x.reshape(b, *heads, t, s)


def _by_group(x: Array, problem: Problem) -> Array:
    """[B, N, T] -> [b, k, g, t, 1]."""
    return x.reshape(x.shape[0], problem.kv_heads, problem.group, problem.query_length, 1)


def _visible(problem: Problem, operands: Operands) -> Array | None:
    """Pairs that band, mask and key length allow, broadcasting to bool [b, k, g, t, s]."""
    parts = []
    if problem.band:
        offset = operands.extents[:, 2] if operands.offset is None else operands.offset[None]
        rows = jnp.arange(problem.query_length)[None, :, None] + offset[:, None, None]
        distance = jnp.arange(problem.key_length)[None, None, :] - rows
        left, right = problem.window
        parts += [distance <= right] if right < UNBOUNDED else []
        parts += [distance >= -left] if left < UNBOUNDED else []
        parts = [x[:, None, None] for x in parts]
    if operands.mask is not None:
        parts.append(_grouped(operands.mask, problem))
    if problem.has_lengths:
        parts.append(_key_padding(problem, operands)[:, None, None, None, :])
    allowed = None
    for part in parts:
        allowed = part if allowed is None else allowed & part
    return allowed


def _scale(problem: Problem, operands: Operands) -> Array:
    """Softmax scale, [], in the type of the sums."""
    if operands.scale is not None:
        return operands.scale
    return jnp.asarray(problem.scale, problem.accumulator)


def _scores(problem: Problem, operands: Operands, q: Array, k: Array) -> Array:
    """Scores [b, k, g, t, s] of q [b, k, r, h] and k [b, k, s, h], -inf where masked."""
    s = dot("bkrh,bksh->bkrs", q, k) * _scale(problem, operands)
    s = s.reshape(*s.shape[:2], problem.group, problem.query_length, problem.key_length)
    if operands.bias is not None:
        s += _grouped(operands.bias, problem).astype(s.dtype)
    visible = _visible(problem, operands)
    return s if visible is None else jnp.where(visible, s, -jnp.inf)


def _merged(x: Array) -> Array:
    """[b, k, g, t, s] -> [b, k, r, s]."""
    b, k, g, t, s = x.shape
    return x.reshape(b, k, g * t, s)


def forward(problem: Problem, operands: Operands) -> tuple[Array, Array]:
    """Attention output and log-sum-exp, as `xla.forward`."""
    q = _rows(operands.query, problem)
    k, v = (_keys(x, problem, operands) for x in (operands.key, operands.value))
    s = _scores(problem, operands, q, k)
    top = s.max(-1, keepdims=True)
    top = jnp.where(top == -jnp.inf, 0, top)
    p = jnp.exp(s - top)
    total = p.sum(-1, keepdims=True)
    weights = p
    if _is_masked(problem):
        weights, v = poisoned(p, s, is_bad(v)[:, :, None, None, :]), clean(v)
    acc = dot("bkrs,bksh->bkrh", _merged(weights.astype(v.dtype)), v)
    empty = total == 0
    if problem.has_lengths:
        empty |= ~_row_padding(problem, operands)[:, None, None, :, None]
    total = jnp.where(empty, 1, total)
    o = jnp.where(_merged(empty), 0, acc / _merged(total)).astype(operands.query.dtype)
    lse = jnp.where(empty, -jnp.inf, top + jnp.log(total))
    return _from_rows(o, problem), lse.reshape(lse.shape[0], problem.query_heads, -1)


def backward(problem: Problem, operands: Operands, cotangents: Cotangents) -> Gradients:
    """Gradients of the operands, as `xla.backward`."""
    query, output_bar = operands.query, cotangents.output_bar
    if problem.has_lengths:
        rows = _row_padding(problem, operands)[:, :, None, None]
        query, output_bar = (jnp.where(rows, x, 0) for x in (query, output_bar))
    delta = dot("btnh,btnh->bnt", output_bar, cotangents.output) - cotangents.lse_bar
    empty = cotangents.lse == -jnp.inf
    # Rows that see nothing have weights exp(s - inf) = 0.
    lse = _by_group(jnp.where(empty, jnp.inf, cotangents.lse), problem)
    delta = _by_group(jnp.where(empty, 0, delta), problem)
    q, do = _rows(query, problem), _rows(output_bar, problem)
    k, v = (_keys(x, problem, operands) for x in (operands.key, operands.value))
    s = _scores(problem, operands, q, k)
    hidden = s == -jnp.inf
    p = jnp.where(hidden, 0, jnp.exp(s - lse))
    dp = dot("bkrh,bksh->bkrs", do, v).reshape(p.shape)
    ds = jnp.where(hidden | (lse == jnp.inf), 0, p * (dp - delta))
    weights = p
    if _is_masked(problem):
        # A query or key that is cleaned has NaN in the ds of every pair that is seen.
        bad = is_bad(do).reshape(*p.shape[:-1], 1)
        weights, do, q, k = poisoned(p, s, bad), clean(do), clean(q), clean(k)
    dv = dot("bkrs,bkrh->bksh", _merged(weights.astype(do.dtype)), do)
    narrow = _merged(ds.astype(q.dtype))
    scale = _scale(problem, operands)
    dk = dot("bkrs,bkrh->bksh", narrow, q) * scale
    dq = dot("bkrs,bksh->bkrh", narrow, k)
    dscale = None
    if operands.scale is not None:
        # The query of a row that sees nothing may hold anything.
        seen = (lse < jnp.inf).reshape(*dq.shape[:-1], 1)
        dscale = jnp.where(seen, dq * q.astype(dq.dtype), 0).sum()
    return Gradients(
        _from_rows((dq * scale).astype(operands.query.dtype), problem),
        dk.astype(operands.key.dtype).transpose(0, 2, 1, 3),
        dv.astype(operands.value.dtype).transpose(0, 2, 1, 3),
        _bias_gradient(problem, operands, ds),
        dscale,
    )


def _bias_gradient(problem: Problem, operands: Operands, ds: Array) -> Array | None:
    """ds [b, k, g, t, s], summed over the axes that the bias is broadcast along."""
    if operands.bias is None:
        return None
    shape = operands.bias.shape
    ds = ds.reshape(ds.shape[0], problem.query_heads, *ds.shape[3:])
    summed = tuple(axis for axis in range(4) if shape[axis] == 1)
    return ds.sum(summed, keepdims=True).astype(operands.bias.dtype)
