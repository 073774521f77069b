"""Attention of one shard's rows to one shard's keys, which results are merged or summed from.

A shard of a zig-zag layout has two chunks at different positions. A view presents them to a kernel:

    swapped   the second chunk before the first
    folded    both chunks beside each other in the batch, so that each has an offset of its own
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fa4_jax import api
from fa4_jax.operands import Cotangents, Operands, Results
from fa4_jax.parallel.row_ranges import Seen
from fa4_jax.passes import Passes
from fa4_jax.plan import Plan

Array = jax.Array


def _halves_exchanged(x: Array) -> Array:
    """[B, L, ...] with its second half first."""
    half = x.shape[1] // 2
    parts = (lax.slice_in_dim(x, half, 2 * half, axis=1), lax.slice_in_dim(x, 0, half, axis=1))
    return lax.concatenate(parts, 1)


class View(NamedTuple):
    """How the chunks of one side are presented; the module says what the fields mean."""

    swapped: bool = False
    folded: bool = False

    def of(self, x: Array) -> Array:
        """[B, L, ...] in the shard's order -> as presented."""
        if self.swapped:
            x = _halves_exchanged(x)
        if self.folded:
            x = x.reshape(2 * x.shape[0], x.shape[1] // 2, *x.shape[2:])
        return x

    def undo(self, x: Array) -> Array:
        """The inverse of `of`."""
        if self.folded:
            x = x.reshape(x.shape[0] // 2, 2 * x.shape[1], *x.shape[2:])
        if self.swapped:
            x = _halves_exchanged(x)
        return x

    def of_lse(self, x: Array) -> Array:
        """[B, N, L] in the shard's order -> as presented."""
        return x if self == View() else self.of(x.swapaxes(1, 2)).swapaxes(1, 2)

    def undo_lse(self, x: Array) -> Array:
        """The inverse of `of_lse`."""
        return x if self == View() else self.undo(x.swapaxes(1, 2)).swapaxes(1, 2)

    def undo_top(self, x: Array) -> Array:
        """Largest scores [B, N] ([2 B, N] if folded) -> of both chunks, [B, N]."""
        return x.reshape(-1, 2, x.shape[1]).max(1) if self.folded else x


class ShardCall(NamedTuple):
    """One call: its launches, its extents, masks and sinks, and how rows and keys are presented.

    extents: int32 [B, 4] ([2 B, 4] if folded): query length, key length, query offset, 0.
    partial_rows: rows past the query length may see other parts' keys. (To the backward they are
      rows that see nothing, which have a log-sum-exp of -inf.)
    seen: masks of the rows and keys, as presented.
    sinks: if the rows see all their keys in this call; [N] or None.
    """

    plan: Plan
    extents: Array
    rows: View = View()
    keys: View = View()
    partial_rows: bool = False
    seen: Seen = Seen()
    sinks: Array | None = None

    def operands(self, query: Array, key: Array, value: Array) -> Operands:
        """What the kernels get."""
        query, key, value = self.rows.of(query), self.keys.of(key), self.keys.of(value)
        ranges, pairs = self.seen
        found = Operands(
            *(query, key, value, self.extents), rows=ranges, sinks=self.sinks, pairs=pairs
        )
        return api.for_kernels(self.plan, found)

    def sized_plan(self, operands: Operands) -> Plan:
        """The launches for what the kernels get."""
        b, t, _, _ = operands.query.shape
        return self.plan.resized(batch=b, query_length=t, key_length=operands.key.shape[1])


def forward(call: ShardCall, passes: Passes, query: Array, key: Array, value: Array) -> Results:
    """Output [B, T, N, H], log-sum-exp [B, N, T] and largest scores over this call's keys alone."""
    operands = call.operands(query, key, value)
    output, lse, top = passes.forward(call.sized_plan(operands), operands)
    top = None if top is None else call.rows.undo_top(top)
    return Results(call.rows.undo(output), call.rows.undo_lse(lse), top)


def backward(
    call: ShardCall,
    passes: Passes,
    query: Array,
    key: Array,
    value: Array,
    whole: Cotangents,
) -> tuple[Array, Array, Array]:
    """What this call contributes to dQ, dK and dV, in the storage type.

    Args:
      whole: output and log-sum-exp over all keys (not over this call's alone) and their
        cotangents: the probabilities of every call are exp(score - lse).
    """
    operands = call.operands(query, key, value)._replace(sinks=None)
    plan = call.sized_plan(operands)
    rows = call.rows
    lse = rows.of_lse(whole.lse)
    if call.partial_rows:
        used = jnp.arange(lse.shape[2])[None, :] < call.extents[:, :1]
        lse = jnp.where(used[:, None], lse, -jnp.inf)
    cotangents = Cotangents(
        rows.of(whole.output),
        lse,
        rows.of(whole.output_bar),
        rows.of_lse(whole.lse_bar),
    )
    found = passes.backward(plan, operands, cotangents)
    return rows.undo(found.query), call.keys.undo(found.key), call.keys.undo(found.value)
