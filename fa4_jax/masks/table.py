"""The tile table: what kernels read of the ranges before they visit a tile of rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

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
      [min low, max high) are visited, those in [max low, min high) are seen by all rows of the
      tile. Where some of its rows see nothing, max low is max high: no key is seen by all. So a
      tile in which min and max are equal has rows of one range.
    """
    return limits_and_any(low, high, jnp.zeros_like(low, bool))[0]


def limits_and_any(low: Array, high: Array, rows: Array) -> tuple[Array, Array]:
    """`limits`, and of bool [B, T] whether a tile has such a row, int32 [B, ceil(T / 128)].

    All arrays should be in memory. One reduction of all numbers is one kernel of a GPU.
    """
    seen = low < high

    def of_seen(x: Array, otherwise: int) -> Array:
        return tiled(jnp.where(seen, x, otherwise), otherwise)

    columns = (
        (of_seen(low, _INT32.max), lax.min),
        (of_seen(high, _INT32.min), lax.max),
        (of_seen(low, _INT32.min), lax.max),
        (of_seen(high, _INT32.max), lax.min),
        (tiled(seen.astype(jnp.int32), 1), lax.min),
        (tiled(rows.astype(jnp.int32), 0), lax.max),
    )
    begin = [np.int32(_INT32.max if choose is lax.min else _INT32.min) for _, choose in columns]

    def chosen(x: tuple[Array, ...], y: tuple[Array, ...]) -> tuple[Array, ...]:
        return tuple(choose(*each) for (_, choose), *each in zip(columns, x, y, strict=True))

    least_low, most_high, most_low, least_high, every, any_row = lax.reduce(
        tuple(x for x, _ in columns), tuple(begin), chosen, (2,)
    )
    most_low = jnp.where(every > 0, most_low, most_high)
    table = jnp.stack((least_low, most_high, most_low, least_high), axis=-1)
    return jnp.where((most_high > _INT32.min)[..., None], table, 0), any_row
