"""What is added to scores, and its gradient: a dense bias, or one that positions decide.

A call holds the former as [b|1, k|1, g|1, t|1, s|1], the latter as a `bias.Bias` whose arrays have
the type of the sums. Letters: as of `tile`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fa4_jax.bias import Bias
from fa4_jax.problem import Problem
from fa4_jax.xla.grouped import Tile, by_group, dense, part_of, sum_to

Array = jax.Array


def made(bias: Any, problem: Problem, rows: Any, keys: Any) -> Any:
    """What a call holds of its operand, the lengths padded to `rows` and `keys`."""
    if not isinstance(bias, Bias):
        return dense(bias, problem, rows, keys)
    return jax.tree.map(lambda x: x.astype(problem.accumulator), bias.padded(rows, keys))


def of_tile(bias: Any, tile: Tile, problem: Problem, offset: Array) -> Array:
    """What a tile's scores get, [b|1, k|1, g|1, t|1, s|1]."""
    if not isinstance(bias, Bias):
        return part_of(bias, tile)
    return by_group(bias.added(tile, offset), problem)


def gradient(bias: Any, ds: Array, tile: Tile, problem: Problem, offset: Array) -> Any:
    """The gradient that a tile's ds [b, k, g, t, s] gives: of a dense bias the tile's part."""
    if not isinstance(bias, Bias):
        return sum_to(ds, part_of(bias, tile).shape)
    found, transpose = jax.vjp(lambda x: of_tile(x, tile, problem, offset), bias)
    return transpose(sum_to(ds, found.shape))[0]


def add(total: Any, new: Any, tile: Tile) -> Any:
    """Adds a tile's gradient to that of all tiles."""
    if isinstance(total, Bias):
        return jax.tree.map(jnp.add, total, new)
    starts = [jnp.uint32(0)] * 5
    for axis, start in ((3, tile.row), (4, tile.key)):
        starts[axis] = starts[0] if total.shape[axis] == 1 else start
    return lax.dynamic_update_slice(total, part_of(total, tile) + new, starts)


def of_operand(total: Any, bias: Any) -> Any:
    """The gradient of the operand, without its padding, in its type."""

    def own(found: Array, x: Array) -> Array:
        if not isinstance(bias, Bias):
            found = found.reshape(*x.shape[:2], *found.shape[3:])
        return found[tuple(slice(size) for size in x.shape)].astype(x.dtype)

    return jax.tree.map(own, total, bias)
