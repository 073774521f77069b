"""What kernels read of a bias, and what they return of its gradient: float32 arrays.

A bias by distance has one number a distance, [B|1, N|1, 1, T + S - 1]. Kernels tell it from a dense
bias whose rows are alike by its length; where T is 1, both are the same. Kernels sum its gradient
along the diagonals of tiles of 64 x 64 pairs: a lower half of 64 diagonals and an upper one of 63.
The upper half of a tile and the lower half of the next one have the same distances.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fa4_jax.bias import AtDistances
from fa4_jax.key import BIAS_GRADIENT_TILE as TILE
from fa4_jax.operands import Operands
from fa4_jax.problem import Problem

Array = jax.Array


def buffer(bias: Any) -> Array:
    """The bias as kernels read it: [B|1, N|1, T|1, S] or, by distance, [B|1, N|1, 1, T + S - 1]."""
    if isinstance(bias, AtDistances):
        return bias.values[:, :, None]
    return bias.astype(jnp.float32)


def shape_of(operands: Operands, problem: Problem) -> tuple[Any, ...] | None:
    """Shape of `buffer` of a call, or None where no kernel reads its bias."""
    if problem.bias == "dense":
        return operands.bias.shape
    if problem.bias != "distance":
        return None
    batch = problem.batch if operands.offset is None else 1
    return batch, problem.query_heads, 1, problem.query_length + problem.key_length - 1


def gradient_shape(shape: tuple[Any, ...], lengths: tuple[Any, Any]) -> tuple[Any, ...]:
    """Shape of the operand that says what shape a gradient has, and how many tiles a head has.

    It has no elements. The 0 comes first: a constant of 2^28 rows without elements, (1024, 1024,
    256, 0), takes XLA 20 s to compile, and that of 4096 queries and keys has 256 times as many.

    Args:
      shape: of `buffer`.
      lengths: T and S.
    """
    batch, heads, rows, columns = shape
    row_tiles, key_tiles = (-(-length // TILE) for length in lengths)
    if columns != lengths[1]:
        units = row_tiles + key_tiles - 1
        return 0, batch, heads, 2, units * TILE, units
    return 0, batch, heads, rows, columns, (row_tiles if rows != 1 else 1) * key_tiles


def gradient(bias: Any, found: Array, lengths: tuple[Any, Any]) -> Any:
    """The bias's gradient, like the bias, from what the kernel returns.

    Args:
      found: of the shape that `gradient_shape` has after its 0, but for the number of tiles.
      lengths: T and S.
    """
    if not isinstance(bias, AtDistances):
        return found.astype(bias.dtype)
    rows, keys = lengths
    if found.shape[2] == 2:
        widths = [(0, 0), (0, 0)]
        lower, upper = found[:, :, 0], found[:, :, 1]
        found = jnp.pad(lower, [*widths, (0, TILE)]) + jnp.pad(upper, [*widths, (TILE, 0)])
        first = -rows % TILE
        found = found[:, :, first : first + rows + keys - 1]
    else:
        found = found[:, :, 0]
    return AtDistances(bias.rows, found)
