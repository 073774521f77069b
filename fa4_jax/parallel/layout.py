"""Orders in which a sequence is shared out among devices.

    contiguous   device i of n holds the i-th of n equal parts
    zigzag       of 2n equal chunks device i holds chunks i and 2n - 1 - i, so that under a causal
                 mask every device has the same work

The order in memory is the order of the devices: sharding the zig-zag array evenly over n devices
gives each its two chunks. Whatever depends on a token's position (rotary embeddings, labels) has
to be brought into the same order, most simply once for the batch of tokens.
"""

from __future__ import annotations

from typing import Literal, get_args

import jax
import jax.numpy as jnp

Layout = Literal["contiguous", "zigzag"]
LAYOUTS: tuple[str, ...] = get_args(Layout)


def to_zigzag(x: jax.Array, shards: int, axis: int = 1) -> jax.Array:
    """x with one axis brought from its natural order into the zig-zag order.

    Args:
      x: any array; natural order along `axis`.
      shards: number of devices n that the axis will be shared out among.
      axis: of the sequence; 1 fits [B, T, ...].

    Raises:
      ValueError: the axis is no multiple of 2 * shards, so that there is no even number of chunks.
    """
    axis %= x.ndim
    chunks = _chunks(x, shards, axis)
    low = jax.lax.slice_in_dim(chunks, 0, shards, axis=axis)
    high = jnp.flip(jax.lax.slice_in_dim(chunks, shards, 2 * shards, axis=axis), axis)
    return jnp.stack((low, high), axis=axis + 1).reshape(x.shape)


def from_zigzag(x: jax.Array, shards: int, axis: int = 1) -> jax.Array:
    """The inverse of `to_zigzag`.

    Raises:
      ValueError: as `to_zigzag`.
    """
    axis %= x.ndim
    chunks = _chunks(x, shards, axis)
    pairs = chunks.reshape(*x.shape[:axis], shards, 2, *chunks.shape[axis + 1 :])
    low, high = (jax.lax.index_in_dim(pairs, i, axis + 1, keepdims=False) for i in (0, 1))
    return jnp.concatenate((low, jnp.flip(high, axis)), axis).reshape(x.shape)


def _chunks(x: jax.Array, shards: int, axis: int) -> jax.Array:
    """The axis as [2 * shards, length / (2 * shards)].

    Raises:
      ValueError: as `to_zigzag`.
    """
    length = x.shape[axis]
    if shards < 1 or length % (2 * shards):
        raise ValueError(
            f"zig-zag over {shards} devices takes {2 * shards} equal chunks, but axis {axis} of "
            f"shape {x.shape} has length {length}: pad it, and give attention the sequence lengths"
        )
    return x.reshape(*x.shape[:axis], 2 * shards, length // (2 * shards), *x.shape[axis + 1 :])
