"""Arrays of a call by groups of heads, their lengths padded to whole tiles, and parts of them.

Letters: as of `tile`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fa4_jax.problem import Problem

Array = jax.Array


class Tile(NamedTuple):
    """Rows [row, row + rows) and keys [key, key + keys). The starts are ints or uint32[]."""

    row: Any
    rows: int
    key: Any
    keys: int


def by_group(x: Array, problem: Problem) -> Array:
    """A dense [B|1, N|1, t, s] with the heads of each KV head apart, [b|1, k|1, g|1, t, s]."""
    heads = (1, 1) if x.shape[1] == 1 else (problem.kv_heads, problem.group)
    return x.reshape(x.shape[0], *heads, *x.shape[2:])


def dense(x: Array, problem: Problem, rows: Any, keys: Any) -> Array:
    """A dense [B|1, N|1, T|1, S|1] as [b|1, k|1, g|1, t|1, s|1], its lengths padded."""
    x = by_group(x, problem)
    x = x if x.shape[3] == 1 else padded(x, 3, rows)
    return x if x.shape[4] == 1 else padded(x, 4, keys)


def padded(x: Array, axis: int, length: Any, fill: float = 0) -> Array:
    """x with a number after it along an axis, up to a length."""
    if x.shape[axis] == length:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, length - x.shape[axis])
    return jnp.pad(x, widths, constant_values=fill)


def part_of(x: Array, tile: Tile) -> Array:
    """A tile's part of a dense [b|1, k|1, g|1, t|1, s|1]."""
    if x.shape[3] != 1:
        x = part(x, 3, tile.row, tile.rows)
    return x if x.shape[4] == 1 else part(x, 4, tile.key, tile.keys)


def part(x: Array, axis: int, start: Any, size: int) -> Array:
    """[start, start + size) of an axis."""
    if isinstance(start, int):
        return x if size == x.shape[axis] else lax.slice_in_dim(x, start, start + size, axis=axis)
    # The start is unsigned, so that it cannot count from the end and nothing is compiled for that.
    return lax.dynamic_slice_in_dim(x, start, size, axis)


def sum_to(x: Array, shape: tuple[int, ...]) -> Array:
    """x, summed over the axes where `shape` has 1."""
    summed = tuple(axis for axis in range(5) if shape[axis] == 1 and x.shape[axis] != 1)
    return x.sum(summed, keepdims=True)
