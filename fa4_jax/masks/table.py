"""The tile table: what kernels read of the ranges before they visit a tile of rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array

TILE_ROWS = 128
"""Rows of one entry of the table."""

_INT32 = np.iinfo(np.int32)


def tiles(length: Any, size: int = TILE_ROWS) -> Any:
    """The number of tiles of so many rows."""
    return -(-length // size)


def tiled(x: Array, fill: int, size: int = TILE_ROWS) -> Array:
    """[B, T] -> [B, ceil(T / size), size], the last tile filled up."""
    batch, length = x.shape
    count = tiles(length, size)
    x = jnp.pad(x, ((0, 0), (0, count * size - length)), constant_values=fill)
    return x.reshape(batch, count, size)


def limits(low: Array, high: Array) -> Array:
    """min low, max high, max low, min high of each tile, over its rows that see a key.

    Returns:
      int32 [B, ceil(T / 128), 4] of low, high [B, T]; four zeros where no row sees any. Keys in
      [min low, max high) are visited, those in [max low, min high) are seen by all of these rows.
    """
    low, high = (tiled(x, 0) for x in (low, high))
    seen = low < high

    def least(x: Array) -> Array:
        return jnp.where(seen, x, _INT32.max).min(-1)

    def greatest(x: Array) -> Array:
        return jnp.where(seen, x, _INT32.min).max(-1)

    table = jnp.stack((least(low), greatest(high), greatest(low), least(high)), axis=-1)
    return jnp.where(seen.any(-1)[..., None], table, 0)


def any_of(rows: Array) -> Array:
    """Whether the tile has a row of which it is true: int32 [B, ceil(T / 128)] of bool [B, T]."""
    return tiled(rows.astype(jnp.int32), 0).max(-1)
