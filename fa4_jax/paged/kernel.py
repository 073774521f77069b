"""`decode` on the kernels that read pages by themselves."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from fa4_jax import mesh_types, splits
from fa4_jax.batching import one_by_one
from fa4_jax.key import SPLIT_ROWS, Pass
from fa4_jax.operands import Results
from fa4_jax.paged import auto
from fa4_jax.paged.problem import PagedOperands, PagedProblem, not_whole
from fa4_jax.plan import Plan, in_memory
from fa4_jax.problem import Problem


def unsupported(problem: PagedProblem) -> str | None:
    """Why no kernel takes pages as these, beside what `plan.unsupported` says, or None."""
    attention = problem.attention
    if problem.is_fp8:
        return "float8_e4m3fn pages: the kernels take pages of query's dtype"
    if (reason := not_whole(problem)) is not None:
        return reason
    if splits.has_few_rows(attention):
        return None
    if asked := in_memory(attention, Pass.FORWARD):
        rows = attention.query_length * attention.group
        most = f"with those the kernels with pages take at most {SPLIT_ROWS}"
        return f"{', '.join(asked)} and T * N / K = {rows} rows: {most}"
    return None


def of_pages(problem: PagedProblem) -> Problem:
    """The problem that the kernels' plan is made of."""
    return dataclasses.replace(problem.attention, page_length=problem.page_size)


def forward(plan: Plan, operands: PagedOperands) -> Results:
    """Output [B, T, N, H] and log-sum-exp [B, N, T]; under vmap one call with a larger batch."""
    own = _of_entries(operands)
    pooled = _with(operands, jax.tree.map(lambda x: x[None], own))
    found = _forward(plan, pooled)
    return Results(found.output[0], found.lse[0], None)


def _of_entries(operands: PagedOperands) -> PagedOperands:
    """The operands without sinks and soft cap, which all entries and pools share."""
    return operands._replace(soft_cap=None, sinks=None)


def _with(operands: PagedOperands, own: PagedOperands) -> PagedOperands:
    """The operands `own`, and sinks and soft cap of `operands`."""
    return own._replace(soft_cap=operands.soft_cap, sinks=operands.sinks)


def _forward(plan: Plan, operands: PagedOperands) -> Results:
    """`auto.forward`, batched by JAX: in a loop over sinks or caps, otherwise as one launch."""

    @jax.custom_batching.custom_vmap
    def call(operands: PagedOperands) -> tuple[jax.Array, jax.Array]:
        axes = mesh_types.union_varying(operands)
        own = jax.tree.map(lambda x: mesh_types.cast_varying(x, axes), operands)
        found = auto.forward(plan, own)
        return found.output, found.lse

    @call.def_vmap
    def _(size: int, batched: list[Any], operands: PagedOperands) -> tuple[Any, Any]:
        has_axis = batched[0]
        if has_axis.soft_cap or has_axis.sinks:
            found = one_by_one(functools.partial(_forward, plan), batched, (operands,))
            return (found.output, found.lse), (True, True)
        whole = jax.tree.map(
            lambda x, flag: x if flag else jnp.broadcast_to(x, (size, *x.shape)),
            *(_of_entries(operands), _of_entries(has_axis)),
        )
        if has_axis.key_pages or has_axis.value_pages:
            own = jax.tree.map(_as_one_axis, whole)
            found = _forward(plan, _with(operands, own))
            split = (_as_two_axes(x, size) for x in (found.output, found.lse))
            return tuple(split), (True, True)
        # Pages that all share: each pool has more batch entries.
        own = jax.tree.map(lambda x: _as_one_axis(jnp.moveaxis(x, 0, 1), 1), whole)
        own = own._replace(key_pages=operands.key_pages, value_pages=operands.value_pages)
        found = _forward(plan, _with(operands, own))
        split = (jnp.moveaxis(_as_two_axes(x, size, 1), 1, 0) for x in (found.output, found.lse))
        return tuple(split), (True, True)

    output, lse = call(operands)
    return Results(output, lse, None)


def _as_one_axis(x: jax.Array, axis: int = 0) -> jax.Array:
    """Axes `axis` and the next one as one."""
    shape = x.shape
    return x.reshape(*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])


def _as_two_axes(x: jax.Array, size: int, axis: int = 0) -> jax.Array:
    """An axis as two, of which the first has `size`."""
    shape = x.shape
    return x.reshape(*shape[:axis], size, shape[axis] // size, *shape[axis + 1 :])
