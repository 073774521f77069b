"""Ulysses: all-to-alls turn shards of the sequence into shards of the heads, and back.

(Jacobs et al. 2023, DeepSpeed-Ulysses.) In between a device attends with whole sequences, or with
the shards of a ring, to some of the heads. Gradients take the same ways back: the transposes.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from fa4_jax.dtypes import wide
from fa4_jax.operands import Operands, Results
from fa4_jax.parallel import pair_masks

Array = jax.Array


def check_heads(query_heads: int, kv_heads: int, axis: str, devices: int) -> None:
    """Whether each device can have whole KV heads, and the query heads of each.

    Raises:
      ValueError: it cannot.
    """
    if query_heads % devices or (kv_heads % devices and devices % kv_heads):
        name, count = ("query", query_heads) if query_heads % devices else ("key", kv_heads)
        raise ValueError(
            f"{name} has {count} heads on a device, which Ulysses cannot share out among the "
            f"{devices} devices of mesh axis {axis!r}: use Ring or AllGather, or RingUlysses with "
            "a smaller Ulysses axis"
        )


def _to_heads(x: Array, axis: str) -> Array:
    """[B, L / n, N, H] of all heads -> [B, L, N / n, H]."""
    return lax.all_to_all(x, axis, split_axis=2, concat_axis=1, tiled=True)


def _copies(x: Array, devices: int) -> Array:
    """KV heads [B, L, K, H], each as often as devices need it; gradients are summed in float32."""
    b, length, heads, h = x.shape
    if heads % devices == 0:
        return x
    copies = x.astype(wide(x.dtype))[:, :, :, None]
    copies = jnp.broadcast_to(copies, (b, length, heads, devices // heads, h))
    return copies.reshape(b, length, devices, h).astype(x.dtype)


def attend(axis: str, inner: Callable[[Operands], Results], operands: Operands) -> Results:
    """Output, log-sum-exp and largest scores of this device's rows.

    Args:
      inner: attention with a share of the heads and all of the axis's shards of the sequence.
    """
    devices = lax.axis_size(axis)
    key, value = (_copies(x, devices) for x in (operands.key, operands.value))
    query, key, value = (_to_heads(x, axis) for x in (operands.query, key, value))
    sinks, pairs, heads = operands.sinks, operands.pairs, query.shape[2]
    start = lax.axis_index(axis) * heads
    if sinks is not None:
        sinks = lax.dynamic_slice_in_dim(sinks, start, heads)
    if pairs is not None:
        pairs = pair_masks.of_heads(pairs, start, heads)
    own = operands._replace(query=query, key=key, value=value, sinks=sinks, pairs=pairs)
    output, lse, top = inner(own)
    output = lax.all_to_all(output, axis, split_axis=1, concat_axis=2, tiled=True)
    lse = lax.all_to_all(lse, axis, split_axis=2, concat_axis=1, tiled=True)
    if top is not None:
        top = lax.all_gather(top, axis, axis=1, tiled=True)
    return Results(output, lse, top)
