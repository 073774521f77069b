"""What kernels read of a bias, and what they return of its gradient.

A kernel reads float32 numbers: of a dense bias as they are, of one by distance one number a
distance, [B|1, N|1, 1, T + S - 1]. It tells it from a dense bias whose rows are alike by its
length; where T is 1, both are the same.

Most of Hopper's kernels load two numbers at once (`KernelKey.pairwise_bias`). Of a bias by distance
they have two copies side by side, the second one without the first number, so that every number is
at an even place in one of them; and DISTANCE_MARGIN zeros on either side. For the forward a third
row begins with FAR_NUMBERS numbers that say what scores far from the diagonal get. A dense bias of
their own 16-bit type is an array of pairs, [B|1, N|1, T|1, S / 2, 2], where S is made a multiple of
8 with zeros, which nobody uses.
Its fourth dimension is less than S, that of a bias by distance is more.

Of a banded bias Hopper's forwards have the table as it is (`KernelKey.band_as_given`). Others have
it with BAND_GAP zeros before each row and one more row of zeros, so that a row's elements lie
between zeros, and with the columns in reverse: as the keys are then, which makes a row's elements
those of a dense bias at the row's keys of the band. Its first distance, `first_distance`, is a
scalar of the call, and says that a bias is banded.

The gradient of a dense bias of pairs has as many pairs: sums in fp32, which the kernel rounds.

Kernels sum the gradient of a bias by distance along the diagonals of tiles of n x n pairs (n is of
`key.BIAS_GRADIENT_TILES`): a lower half of n diagonals and an upper one of n - 1. The upper half of
a tile and the lower half of the next one have the same distances.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from fa4_jax.bias import AtDistances, Banded, far_of
from fa4_jax.key import BAND_GAP, DISTANCE_MARGIN, FAR_NUMBERS, MOST_REACH, KernelKey, Pass
from fa4_jax.operands import Operands
from fa4_jax.problem import Problem

Array = jax.Array

_COPIED_KEYS = 8
"""What a kernel copies of a row of pairs at once: 16 bytes, at a multiple of 16 bytes."""

_RANK_OF_PAIRS = 5  # of the array of a dense bias

LINEAR_REACH = 32
"""What the reach of a linear bias is to kernels."""


def buffer(bias: Any, key: KernelKey) -> Array:
    """The bias as a kernel reads it.

    Args:
      bias: a dense one, `AtDistances` or `Banded`.
      key: of the kernel.
    """
    by_pairs = key.pairwise_bias
    if isinstance(bias, AtDistances):
        if not by_pairs:
            return bias.values[:, :, None]
        copies = _two_copies(bias.values)
        return _with_far_numbers(copies, bias) if key.kernel is Pass.FORWARD else copies
    if isinstance(bias, Banded):
        table = bias.table.astype(jnp.float32)
        if key.band_as_given:
            return table
        return jnp.pad(table[..., ::-1], ((0, 0), (0, 0), (0, 1), (BAND_GAP, 0)))
    own = {"bf16": jnp.bfloat16, "fp16": jnp.float16}[key.dtype]
    past = -bias.shape[3] % _COPIED_KEYS
    pairs = (bias.shape[3] + past) // 2
    if not by_pairs or bias.dtype != own or pairs >= bias.shape[3]:
        return bias.astype(jnp.float32)
    padded = jnp.pad(bias, ((0, 0), (0, 0), (0, 0), (0, past))) if past else bias
    return padded.reshape(*bias.shape[:3], pairs, 2)


def _two_copies(values: Array) -> Array:
    """[B|1, N|1, L] between zeros, twice: [B|1, N|1, 2, columns], of an even number of columns."""
    count = values.shape[2]
    columns = count + 2 * DISTANCE_MARGIN + count % 2
    copies = [
        jnp.pad(values, ((0, 0), (0, 0), (before, columns - before - count)))
        for before in (DISTANCE_MARGIN, DISTANCE_MARGIN - 1)
    ]
    return jnp.stack(copies, axis=2)


def _with_far_numbers(copies: Array, bias: AtDistances) -> Array:
    """The copies and a row that begins with slope, low, high and reach.

    A score whose distance j - (i + query_offset) is -reach or less gets low, one whose distance is
    reach or more gets high, and slope * distance is added to either.
    """
    values = bias.values
    slope, low, high = jnp.zeros_like(values[:, :, 0]), values[:, :, 0], values[:, :, -1]
    reach = MOST_REACH if bias.reach is None else min(bias.reach, MOST_REACH)
    if bias.is_linear:
        # Near the diagonal, where a causal row's largest scores are, numbers are small and are
        # loaded: slope times a key's number in its block is large there, and rounds more.
        slope, reach = jnp.broadcast_to(bias.slopes, slope.shape), LINEAR_REACH
        low = high = jnp.zeros_like(slope)
    numbers = jnp.stack([slope, low, high, jnp.full_like(low, reach)], axis=-1)
    zeros = ((0, 0), (0, 0), (0, copies.shape[3] - FAR_NUMBERS))
    return jnp.concatenate([copies, jnp.pad(numbers, zeros)[:, :, None]], axis=2)


def abstract(operands: Operands, problem: Problem) -> Any:
    """A call's bias without its numbers, as `buffer` takes it, or None where no kernel reads it."""
    if problem.bias == "dense":
        return jax.ShapeDtypeStruct(operands.bias.shape, operands.bias.dtype)
    if problem.bias == "banded":
        table: Any = jax.ShapeDtypeStruct(operands.bias.table.shape, operands.bias.table.dtype)
        return Banded(operands.bias.first, table)
    if problem.bias != "distance":
        return None
    shape = (
        problem.batch if operands.offset is None else 1,
        problem.query_heads,
        problem.query_length + problem.key_length - 1,
    )
    values: Any = jax.ShapeDtypeStruct(shape, jnp.float32)
    slopes: Any = jax.ShapeDtypeStruct((1, problem.query_heads), jnp.float32)
    return AtDistances(problem.query_length, values, slopes, *far_of(operands.bias))


def gradient_shape(
    shape: tuple[Any, ...], lengths: tuple[Any, Any], tile: int, is_banded: bool = False
) -> tuple[Any, ...]:
    """Shape of the operand that says what shape a gradient has, and how many tiles a head has.

    It has no elements. The 0 comes first: a constant of 2^28 rows without elements, (1024, 1024,
    256, 0), takes XLA 20 s to compile, and that of 4096 queries and keys has 256 times as many.

    Args:
      shape: of `buffer`, for the backward.
      lengths: T and S.
      tile: rows, and keys, of the kernel's tile.
      is_banded: whether it is of a banded bias.
    """
    batch, heads, rows, columns = shape[:4]
    if is_banded:
        columns -= BAND_GAP
        # The rows of a tile have their columns at tile - 1 keys more than one row has.
        tiles = -(-(columns + tile - 1) // tile)
        return 0, batch, heads, rows - 1, columns, -(-lengths[0] // tile) * tiles
    row_tiles, key_tiles = (-(-length // tile) for length in lengths)
    if len(shape) != _RANK_OF_PAIRS and columns != lengths[1]:
        units = row_tiles + key_tiles - 1
        return 0, batch, heads, 2, units * tile, units
    return 0, batch, heads, rows, columns, (row_tiles if rows != 1 else 1) * key_tiles


def gradient(bias: Any, found: Array, lengths: tuple[Any, Any], tile: int) -> Any:
    """The bias's gradient, like the bias, from what the kernel returns.

    Args:
      found: of the shape that `gradient_shape` has after its 0, but for the number of tiles.
      lengths: T and S.
      tile: rows, and keys, of the kernel's tile.
    """
    if isinstance(bias, Banded):
        return Banded(bias.first, found.astype(bias.table.dtype))
    if not isinstance(bias, AtDistances):
        if found.shape[3] == bias.shape[3]:
            return found.astype(bias.dtype)
        pairs = jax.lax.bitcast_convert_type(found, bias.dtype)
        return pairs.reshape(*bias.shape[:3], -1)[..., : bias.shape[3]]
    rows, keys = lengths
    if found.shape[2] == 2:
        widths = [(0, 0), (0, 0)]
        lower, upper = found[:, :, 0], found[:, :, 1]
        found = jnp.pad(lower, [*widths, (0, tile)]) + jnp.pad(upper, [*widths, (tile, 0)])
        first = -rows % tile
        found = found[:, :, first : first + rows + keys - 1]
    else:
        found = found[:, :, 0]
    return dataclasses.replace(bias, values=found, slopes=jnp.zeros_like(bias.slopes))
