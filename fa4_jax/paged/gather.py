"""`decode` on the kernels that want keys side by side: the pages that rows see are copied first.

Kernels read pages by themselves for few rows only (`kernel`). A chunk of a prompt has many rows,
each of which reads every key, so that one copy of the keys costs little beside the products.
float8 pages become numbers of the query's type on the way.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fa4_jax import batching, dispatch
from fa4_jax.bands import UNBOUNDED
from fa4_jax.operands import Operands, Results
from fa4_jax.paged.problem import PagedOperands, PagedProblem, not_whole
from fa4_jax.plan import Plan
from fa4_jax.problem import Problem

MOST_BYTES = 2**32
"""Bytes that the copies of keys and values may take together; a call with more takes the default
path, whose memory does not grow with the cache."""


def num_pages(problem: PagedProblem, devices: int = 1) -> int:
    """Pages that hold what the rows of an entry see, at most; on each of `devices` devices over
    which they are dealt out.
    """
    attention, page = problem.attention, problem.page_size
    left, _ = attention.window
    entries = problem.table_entries
    if left < UNBOUNDED:
        # The rows see left + T tokens together, which may begin at the end of a page.
        pages = (left + attention.query_length - 1 + page - 1) // page + 1
        entries = min(entries, -(-pages // devices))
    return entries


def contiguous(problem: PagedProblem) -> Problem:
    """The call as one of `attention` on the copied keys and values."""
    keys = num_pages(problem) * problem.page_size
    return dataclasses.replace(problem.attention, key_length=keys)


def shapes(problem: PagedProblem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the copies of keys and of values, in the query's type."""
    own = contiguous(problem)
    rows = own.batch, own.key_length, own.kv_heads
    return (*rows, own.head_dims[0]), (*rows, own.head_dims[1])


def unsupported(problem: PagedProblem) -> str | None:
    """Why no kernel takes the copies, beside what `plan.unsupported` says, or None."""
    if (reason := not_whole(problem)) is not None:
        return reason
    own = contiguous(problem)
    num_bytes = own.batch * own.key_length * own.kv_heads * sum(own.head_dims) * 2
    if num_bytes > MOST_BYTES:
        return (
            f"{num_bytes} bytes of keys and values side by side, as the kernels take them here: at "
            f"most {MOST_BYTES}; fewer entries or table entries a call need fewer"
        )
    return None


def forward(problem: PagedProblem, plan: Plan, message: str, operands: PagedOperands) -> Results:
    """Output [B, T, N, H] and log-sum-exp [B, N, T].

    Args:
      plan: launches of `contiguous(problem)`.
      message: what the log says where this is lowered.
    """
    page, (left, _) = problem.page_size, problem.attention.window
    query_length, end, offset, rest = jnp.moveaxis(operands.extents, 1, 0)
    low = jnp.zeros_like(end) if left >= UNBOUNDED else jnp.maximum(offset - left, 0)
    first = jnp.minimum(low, end) // page
    before = first * page
    own = jnp.stack([query_length, end - before, offset - before, rest], axis=1)
    key, value = gathered(problem, operands, num_pages(problem), first, end - before)
    own += dispatch.left_out(message)
    arrays = Operands(
        *(operands.query, key, value, own),
        soft_cap=operands.soft_cap,
        sinks=operands.sinks,
    )
    return batching.forward(plan)(arrays)


def gathered(
    problem: PagedProblem,
    operands: PagedOperands,
    pages: int,
    first: jax.Array,
    end: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Key and value [B, pages x page, K, H] of some pages of each entry; values past the end are 0.

    float8 pages come in query's type, to which they are rounded once their scale is in.

    Args:
      first: the page that an entry's begin with, [B].
      end: one past the last token that is read, [B], counted from that page. Table entries past it
        are not read.
    """
    page_size = problem.page_size
    entry = lax.iota(jnp.int32, pages)[None, :]
    is_read = entry * page_size < end[:, None]
    at = jnp.minimum(first[:, None] + entry, problem.table_entries - 1)
    page = jnp.take_along_axis(operands.page_table, at, 1, mode="promise_in_bounds")
    page = jnp.where(is_read, jnp.clip(page, 0, problem.num_pages - 1), 0)
    key, value = (
        x.at[page].get(mode="promise_in_bounds") for x in (operands.key_pages, operands.value_pages)
    )
    # Scores of keys past the end are masked, but 0 times a value would be NaN for NaN.
    token = lax.iota(jnp.int32, pages * page_size)[None, :]
    is_cached = (token < end[:, None]).reshape(*page.shape, page_size, 1, 1)
    value = jnp.where(is_cached, value, jnp.zeros((), value.dtype))
    if problem.is_fp8:
        dtype = operands.query.dtype
        key = _dequantised(problem, key, operands.key_scale, page, dtype)
        value = _dequantised(problem, value, operands.value_scale, page, dtype)
    key, value = (x.reshape(x.shape[0], -1, *x.shape[3:]) for x in (key, value))
    return key, value


def _dequantised(
    problem: PagedProblem, x: jax.Array, scale: jax.Array | None, page: jax.Array, dtype: Any
) -> jax.Array:
    """Gathered float8 pages [B, m, page, K, H] as numbers of a type.

    Args:
      scale: [P | 1, K], or None.
      page: numbers of the pages, [B, m].
    """
    if scale is None:
        return x.astype(dtype)
    x = x.astype(problem.attention.accumulator)
    each = scale if scale.shape[0] == 1 else scale[page]  # [1, K] or [B, m, K]
    each = each.reshape((1,) * (3 - each.ndim) + each.shape)
    return (x * each[:, :, None, :, None].astype(x.dtype)).astype(dtype)
