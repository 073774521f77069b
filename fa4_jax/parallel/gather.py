"""All-gather attention: each device attends with its own rows to all keys that they see.

Under a window they are those of a few neighbours, which are sent instead. The gathered keys are not
kept for the backward but gathered again. dK and dV are sent to their homes in the storage type in
which the kernel leaves them and summed there in float32, in the order of the devices that sent
them (an all-to-all and a sum, rather than a reduction in float32 with twice the bytes).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fa4_jax import autodiff
from fa4_jax.bands import LIMIT
from fa4_jax.derivatives import Computation
from fa4_jax.dtypes import wide
from fa4_jax.extents import stacked
from fa4_jax.operands import Cotangents, Gradients, Operands, Results
from fa4_jax.parallel import shard_attention
from fa4_jax.parallel.layout import from_zigzag, to_zigzag
from fa4_jax.parallel.row_ranges import Seen, whole_masks
from fa4_jax.parallel.shard_attention import ShardCall
from fa4_jax.parallel.shard_calls import Work, shard_lengths
from fa4_jax.parallel.shard_plan import Pairs, ShardPlan
from fa4_jax.passes import Passes

Array = jax.Array


@functools.lru_cache(maxsize=256)
def neighbours(shards: ShardPlan) -> tuple[int, ...] | None:
    """Distances of the shards whose keys a device's rows may see, in the order of their positions.

    A distance of 1 is the device before. The result is None if all shards are neighbours.
    """
    if shards.layout != "contiguous":
        return None
    n = shards.devices
    found = [d - o for d in range(n) for o in range(n) if shards.meet(d, o)]
    distances = tuple(range(max(found, default=0), min(found, default=0) - 1, -1))
    return distances if len(distances) < n else None


def transfers(shards: ShardPlan, distance: int) -> Pairs:
    """(source, destination) of the shards that go to the devices `distance` after their own."""
    n = shards.devices
    owners = range(max(0, -distance), min(n, n - distance))
    return tuple((o, o + distance) for o in owners if shards.meet(o + distance, o))


def _absent(work: Work, distances: tuple[int, ...]) -> Array:
    """How many of the neighbours would lie before the first device."""
    return jnp.clip(distances[0] - work.device, 0, len(distances))


def _gathered(work: Work, x: Array) -> Array:
    """Shards [B, S / n, K, H] -> all that are needed, in the order of positions, from the first."""
    distances = neighbours(work.shards)
    if distances is None:
        x = lax.all_gather(x, work.axis, axis=1, tiled=True)
        return from_zigzag(x, work.shards.devices) if work.shards.layout == "zigzag" else x
    shards = [
        lax.ppermute(x, work.axis, transfers(work.shards, distance)) if distance else x
        for distance in distances
    ]
    # A length can hide keys at the end only. Before the first device there are no neighbours: their
    # shards are moved from the front to the end.
    length = len(distances) * x.shape[1]
    joined = jnp.concatenate([*shards, *(jnp.zeros_like(y) for y in shards)], axis=1)
    start = _absent(work, distances) * x.shape[1]
    return lax.dynamic_slice_in_dim(joined, start, length, axis=1)


def _returned(work: Work, x: Array) -> Array:
    """Gradients of what was gathered -> the own shard's, summed in float32 or wider."""
    shards = work.shards
    distances = neighbours(shards)
    b, length, *rest = x.shape
    if distances is None:
        x = to_zigzag(x, shards.devices) if shards.layout == "zigzag" else x
        x = x.reshape(b, shards.devices, length // shards.devices, *rest)
        x = lax.all_to_all(x, work.axis, split_axis=1, concat_axis=1, tiled=True)
        return x.astype(wide(x.dtype)).sum(1)
    start = _absent(work, distances) * shards.keys
    joined = lax.dynamic_update_slice_in_dim(
        jnp.concatenate([jnp.zeros_like(x)] * 2, axis=1), x, start, axis=1
    )
    total = jnp.zeros_like(x[:, : shards.keys], wide(x.dtype))
    for i, distance in enumerate(distances):
        shard = lax.slice_in_dim(joined, i * shards.keys, (i + 1) * shards.keys, axis=1)
        if distance:
            home = tuple((d, s) for s, d in transfers(shards, distance))
            shard = lax.ppermute(shard, work.axis, home)
        total += shard.astype(total.dtype)
    return total


class _Rows(NamedTuple):
    """Consecutive rows of the shard, and the call for them."""

    start: int
    stop: int
    call: ShardCall

    def of(self, x: Array, axis: int = 1) -> Array:
        """These rows of an array of the shard."""
        return lax.slice_in_dim(x, self.start, self.stop, axis=axis)


def _rows(work: Work, operands: Operands) -> list[_Rows]:
    """The calls of a device: one, or one a chunk where chunks have different positions."""
    shards, device, whole = work.shards, work.device, operands.extents
    masks, sinks = whole_masks(operands), operands.sinks
    distances = neighbours(shards)
    if not shards.band:
        rows, _ = shard_lengths(work, whole, device)
        own = Seen()
        if masks is not None:
            chunks = [shards.chunk(device, half) for half in range(shards.chunks)]
            own = masks.among(shards, chunks, 0, shards.keys * shards.devices)
        call = ShardCall(work.plan, stacked(rows, whole[:, 1]), seen=own, sinks=sinks)
        return [_Rows(0, shards.rows, call)]
    first_key, held = 0, shards.keys * shards.devices
    if distances is not None:
        first_key = jnp.maximum(device - distances[0], 0) * shards.keys
        held = shards.keys * len(distances)
    keys = jnp.clip(whole[:, 1] - first_key, 0, held)
    size = shards.rows_of_chunk
    found = []
    for half in range(shards.chunks):
        chunk = shards.chunk(device, half)
        first_row = chunk * size
        rows = jnp.clip(whole[:, 0] - first_row, 0, size)
        offset = jnp.clip(whole[:, 2] + first_row - first_key, 1 - LIMIT, LIMIT - 1)
        own = Seen() if masks is None else masks.among(shards, [chunk], first_key, held)
        call = ShardCall(work.plan, stacked(rows, keys, offset), seen=own, sinks=sinks)
        found.append(_Rows(half * size, (half + 1) * size, call))
    return found


def _run_forward(work: Work, passes: Passes, operands: Operands) -> Results:
    key, value = (_gathered(work, x) for x in (operands.key, operands.value))
    results = [
        shard_attention.forward(rows.call, passes, rows.of(operands.query), key, value)
        for rows in _rows(work, operands)
    ]
    outputs, lses, tops = zip(*results, strict=True)
    top = None if tops[0] is None else functools.reduce(jnp.maximum, tops)
    return Results(jnp.concatenate(outputs, axis=1), jnp.concatenate(lses, axis=2), top)


def _sum(arrays: tuple[Array, ...]) -> Array:
    """The sum in float32 or wider, rounded to the arrays' type."""
    first, *rest = arrays
    total = wide(first.dtype)
    return sum((x.astype(total) for x in rest), first.astype(total)).astype(first.dtype)


def _run_backward(work: Work, passes: Passes, operands: Operands, whole: Cotangents) -> Gradients:
    key, value = (_gathered(work, x) for x in (operands.key, operands.value))
    found = []
    for rows in _rows(work, operands):
        own = Cotangents(
            rows.of(whole.output),
            rows.of(whole.lse, axis=2),
            rows.of(whole.output_bar),
            rows.of(whole.lse_bar, axis=2),
        )
        query = rows.of(operands.query)
        found.append(shard_attention.backward(rows.call, passes, query, key, value, own))
    query_bars, *others = zip(*found, strict=True)
    key_bar, value_bar = (_returned(work, _sum(bars)) for bars in others)
    query_bar = jnp.concatenate(query_bars, axis=1)
    return Gradients(query_bar, key_bar.astype(key.dtype), value_bar.astype(value.dtype), None)


def attend(work: Work, operands: Operands) -> Results:
    """The results of this device's rows; extents are those of the whole sequences."""
    own = Computation(work, _run_forward, _run_backward, fence_backward=True)
    return autodiff.run(own, operands)
