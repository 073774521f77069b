"""`decode` on the kernels for short queries, which read pages by themselves."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from fa4_jax import launches, mesh_types
from fa4_jax.key import SPLIT_ROWS
from fa4_jax.operands import Operands, Results
from fa4_jax.paged.problem import PagedOperands, PagedProblem
from fa4_jax.plan import Plan
from fa4_jax.problem import Problem


def unsupported(problem: PagedProblem) -> str | None:
    """Why no kernel takes pages as these, beside what `plan.unsupported` says, or None."""
    attention = problem.attention
    if problem.is_fp8:
        return "float8_e4m3fn pages: the kernels take pages of query's dtype"
    if problem.axis is not None:
        return f"pages dealt out over mesh axis {problem.axis!r}: the kernels take whole sequences"
    if not problem.num_pages:
        return "0 pages: the kernels take at least 1"
    rows = attention.query_length * attention.group
    if rows > SPLIT_ROWS:
        return f"T * N / K = {rows} rows: the kernels with pages take at most {SPLIT_ROWS}"
    return None


SEVERAL_DEVICES = (
    "there are several devices, and the kernels with pages have no partitioning rule for Auto mesh "
    "axes; inside shard_map or on Explicit axes each device runs them, or implementation='kernel'"
)


def is_on_one_device(operands: PagedOperands) -> bool:
    """Whether the compiler cannot share the call out over devices."""
    return jax.device_count() == 1 or bool(mesh_types.union_varying(operands))


def of_pages(problem: PagedProblem) -> Problem:
    """The problem that the kernels' plan is made of."""
    return dataclasses.replace(problem.attention, page_length=problem.page_size)


def forward(plan: Plan, operands: PagedOperands) -> Results:
    """Output [B, T, N, H] and log-sum-exp [B, N, T]; under vmap one call with a larger batch."""

    @jax.custom_batching.custom_vmap
    def call(operands: PagedOperands) -> tuple[jax.Array, jax.Array]:
        axes = mesh_types.union_varying(operands)
        own = jax.tree.map(lambda x: mesh_types.cast_varying(x, axes), operands)
        arrays = Operands(own.query, own.key_pages, own.value_pages, own.extents)
        found = launches.forward(plan, arrays, own.page_table)
        return found.output, found.lse

    @call.def_vmap
    def _(size: int, batched: list[Any], operands: PagedOperands) -> tuple[Any, Any]:
        own = _one_batch(size, batched[0], operands)
        found = forward(plan.resized(batch=size * plan.problem.batch), own)
        output, lse = (x.reshape(size, -1, *x.shape[1:]) for x in (found.output, found.lse))
        return (output, lse), (True, True)

    output, lse = call(operands)
    return Results(output, lse, None)


def _one_batch(size: int, batched: Any, operands: PagedOperands) -> PagedOperands:
    """Operands of `size` calls as those of one; pools of their own are laid one after another."""

    def joined(x: jax.Array, has_axis: bool) -> jax.Array:
        x = x if has_axis else jnp.broadcast_to(x, (size, *x.shape))
        return x.reshape(-1, *x.shape[2:])

    keys, values, table = operands.key_pages, operands.value_pages, operands.page_table
    own_pools = batched.key_pages or batched.value_pages
    if own_pools:
        pages = keys.shape[1 if batched.key_pages else 0]
        first = jnp.arange(size, dtype=jnp.int32)[:, None, None] * pages
        table = jnp.clip(table if batched.page_table else table[None], 0, pages - 1) + first
        keys, values = joined(keys, batched.key_pages), joined(values, batched.value_pages)
    return operands._replace(
        query=joined(operands.query, batched.query),
        key_pages=keys,
        value_pages=values,
        page_table=joined(table, own_pools or batched.page_table),
        extents=joined(operands.extents, batched.extents),
    )
