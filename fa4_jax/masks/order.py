"""The order in which kernels take tiles: those that visit most come first.

A multiprocessor that becomes free takes the next tile; if the last ones are short, all end
together. To a kernel the order is any permutation: it says when a tile runs, not what comes of it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fa4_jax.bands import LIMIT, Window
from fa4_jax.masks import table
from fa4_jax.operands import RowRanges

Array = jax.Array


def ascending(length: Any, size: int) -> Array:
    """Tiles of `size` rows or keys as they lie, [1, ceil(length / size)]."""
    return lax.broadcasted_iota(jnp.int32, (1, table.tiles(length, size)), 1)


def descending(length: Any, size: int) -> Array:
    """The same from the last one to the first: of causal rows the last see most."""
    return table.tiles(length, size) - 1 - ascending(length, size)


def of_queries(
    rows: RowRanges, window: Window, extents: Array, size: int, visited: Array | None = None
) -> Array:
    """Tiles of `size` query rows, by the keys between the first and the last that each visits.

    Args:
      rows: their ranges.
      window: what else hides keys, of the call.
      extents: [B, 4], as in `operands.Operands`.
      size: rows of a tile.
      visited: keys that each tile visits by a mask of pairs (`bits.keys_of_tiles`), or None.

    Returns:
      int32 [B|1, ceil(T / size)], as many as `rows` has batch elements.
    """
    length = rows.low.shape[1]
    row = lax.broadcasted_iota(jnp.int32, (1, length), 1)
    queries, keys, offset = (extents[:, i, None] for i in range(3))
    low = jnp.maximum(rows.low, row + offset - window[0])
    high = jnp.minimum(jnp.minimum(rows.high, keys), row + offset + window[1] + 1)
    seen = (low < high) & (row < queries)
    first = table.tiled(jnp.where(seen, low, LIMIT), LIMIT, size).min(-1)
    last = table.tiled(jnp.where(seen, high, 0), 0, size).max(-1)
    visits = jnp.maximum(last - first, 0)
    return _most_first(rows, visits if visited is None else jnp.minimum(visits, visited))


class Tiles(NamedTuple):
    """Tiles of `size` keys, of key_length; visitors: rows, by a mask of pairs, or None."""

    size: int
    key_length: Any
    visitors: Array | None = None


def of_keys(rows: RowRanges, window: Window, extents: Array, tiles: Tiles) -> Array:
    """Tiles of keys, by the entries of the tile table that see a key of each.

    Returns:
      int32 [B|1, ceil(S / size)], as `of_queries`.
    """
    first_key = ascending(tiles.key_length, tiles.size)[..., None] * tiles.size
    past_key = first_key + tiles.size
    first_row = ascending(rows.low.shape[1], table.TILE_ROWS)[:, None] * table.TILE_ROWS
    queries, keys, offset = (extents[:, i, None, None] for i in range(3))
    last_row = jnp.minimum(first_row + table.TILE_ROWS, queries) - 1
    low = jnp.maximum(rows.table[:, None, :, 0], first_row + offset - window[0])
    high = jnp.minimum(rows.table[:, None, :, 1], last_row + offset + window[1] + 1)
    meets = (low < past_key) & (high > first_key) & (first_row < queries) & (first_key < keys)
    visits = jnp.sum(meets, axis=-1, dtype=jnp.int32)
    if tiles.visitors is not None:
        visits = jnp.minimum(visits * table.TILE_ROWS, tiles.visitors)
    return _most_first(rows, visits)


def _most_first(rows: RowRanges, visits: Array) -> Array:
    """Indices [B|1, tiles] by descending visits [B, tiles]; rows that all share one order sum."""
    if rows.low.shape[0] == 1:
        visits = visits.sum(0, keepdims=True)
    place = lax.broadcasted_iota(jnp.int32, visits.shape, 1)
    return lax.sort((-visits, place), dimension=1, num_keys=1)[1]
