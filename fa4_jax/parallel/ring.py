"""Ring attention: K/V shards travel, each device merges what its rows see of them.

    forward   o, lse = merge over shards j of attention(q, k_j, v_j)
    backward  dq = sum over j of dq(q, k_j, v_j; o, lse, do, dlse); dk_j and dv_j at j's home

(Liu et al. 2023, Ring Attention.) The transfer of the next shard starts before the kernel on the
present one and does not depend on it: the compiler lets them overlap. dK and dV of a shard go
straight home while the next kernel runs, in the storage type in which the kernel leaves them, and
are summed there in float32. (Sums that travelled along would be float32, twice the bytes, and each
would wait for the one before.)

The forward visits the own shard first, under which the first transfer runs, and the backward visits
it last, under which the last dK and dV go home. Order of accumulation, the same in every run: that
of the visits.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fa4_jax import autodiff, sinks, xla
from fa4_jax import lse as lse_merging
from fa4_jax.derivatives import Computation
from fa4_jax.dtypes import wide
from fa4_jax.operands import Cotangents, Gradients, Operands, Results
from fa4_jax.parallel import shard_attention
from fa4_jax.parallel.row_ranges import whole_masks
from fa4_jax.parallel.shard_calls import Work, keep_rows, rows_used, shard_calls, shard_lengths
from fa4_jax.parallel.shard_plan import Visit, visits
from fa4_jax.passes import Passes

Array = jax.Array
KeyValue = tuple[Array, Array]


def _merged(total: Results | None, part: Results) -> Results:
    """Results over the keys of both, the output float32 or wider."""
    if total is None:
        return part._replace(output=part.output.astype(wide(part.output.dtype)))
    output, lse = lse_merging.merge(total.output, total.lse, part.output, part.lse)
    top = None
    if total.max_logit is not None and part.max_logit is not None:
        top = jnp.maximum(total.max_logit, part.max_logit)
    return Results(output, lse, top)


def _added(total: Array | None, part: Array | None) -> Array | None:
    """The sum in float32, or float64 of float64."""
    if part is None:
        return total
    part = part.astype(wide(part.dtype))
    return part if total is None else total + part


def _sum(arrays: Iterable[Array]) -> Array | None:
    return functools.reduce(_added, arrays, None)


def _moved(work: Work, visit: Visit, held: KeyValue, home: KeyValue) -> KeyValue:
    """K and V of a visit, sent on from where they are now."""
    if visit.shift == 0:
        return home
    source = home if visit.from_home else held
    key, value = (lax.ppermute(x, work.axis, visit.hop) for x in source)
    return key, value


def _paced(state: Any, upcoming: KeyValue | None) -> tuple[Any, Any]:
    """State of a visit and K and V of the next, which begins when the state is complete.

    Otherwise the compiler may start every transfer at once, or merge all results at the end, and
    holds as many shards.
    """
    return (state, None) if upcoming is None else lax.optimization_barrier((state, upcoming))


def _run_forward(work: Work, passes: Passes, operands: Operands) -> Results:
    used = rows_used(work, operands.extents)
    masks = whole_masks(operands)
    query = keep_rows(used, operands.query)
    home = held = (operands.key, operands.value)
    total: Results | None = None
    order = visits(work.shards)
    for step, visit in enumerate(order):
        upcoming = _moved(work, order[step + 1], held, home) if order[step + 1 :] else None
        for call in shard_calls(work, visit.shift, operands.extents, masks):
            total = _merged(total, shard_attention.forward(call, passes, query, *held))
        total, held = _paced(total, upcoming)
    nothing = xla.nothing(work.plan.problem, operands._replace(sinks=None))
    found = nothing if total is None else total
    if operands.sinks is not None:
        found = sinks.included(operands.sinks, found)
        rows, _ = shard_lengths(work, operands.extents, work.device)
        used = jnp.arange(query.shape[1])[None, :] < rows[:, None]
    output, lse = keep_rows(used, found.output), keep_rows(used, found.lse, -jnp.inf)
    return Results(output.astype(query.dtype), lse, found.max_logit)


def _run_backward(work: Work, passes: Passes, operands: Operands, whole: Cotangents) -> Gradients:
    used = rows_used(work, operands.extents)
    masks = whole_masks(operands)
    query = keep_rows(used, operands.query)
    whole = whole._replace(
        output_bar=keep_rows(used, whole.output_bar), lse_bar=keep_rows(used, whole.lse_bar)
    )
    home = (operands.key, operands.value)
    own, *others = visits(work.shards)
    order = (*others, own)
    held = _moved(work, order[0], home, home)
    total: list[Array | None] = [None, None, None]
    arriving: list[Array | None] = [None, None]
    for step, visit in enumerate(order):
        upcoming = _moved(work, order[step + 1], held, home) if order[step + 1 :] else None
        found = [
            shard_attention.backward(call, passes, query, *held, whole)
            for call in shard_calls(work, visit.shift, operands.extents, masks)
        ]
        rows, *keys = (_sum(x) for x in zip(*found, strict=True)) if found else (None,) * 3
        # What the visit before sent home had this visit's kernel to arrive.
        total = [
            _added(total[0], rows),
            *(_added(x, y) for x, y in zip(total[1:], arriving, strict=True)),
        ]
        if visit.shift == 0:
            total[1:] = [_added(x, y) for x, y in zip(total[1:], keys, strict=True)]
            arriving = [None, None]
        else:
            arriving = [
                None if x is None else lax.ppermute(x.astype(y.dtype), work.axis, visit.home)
                for x, y in zip(keys, home, strict=True)
            ]
        total, held = _paced(total, upcoming)
    total[1:] = [_added(x, y) for x, y in zip(total[1:], arriving, strict=True)]
    query_bar, key_bar, value_bar = (
        jnp.zeros_like(y) if x is None else x.astype(y.dtype)
        for x, y in zip(total, operands[:3], strict=True)
    )
    return Gradients(query_bar, key_bar, value_bar, None)


def attend(work: Work, operands: Operands) -> Results:
    """The results of this device's rows; extents are those of the whole sequences."""
    own = Computation(work, _run_forward, _run_backward, fence_backward=True)
    return autodiff.run(own, operands)
