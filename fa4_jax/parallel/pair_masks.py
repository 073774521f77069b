"""Masks of pairs of whole sequences; and what a device's rows see of some keys by them.

As ranges (`row_ranges`), they are in the natural order of the sequences. Where a mask names
positions, a device asks for those of its own rows and of the keys that it has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fa4_jax.boxes import BATCH, HEADS, Dimensions, Indices, Positions
from fa4_jax.masks import values
from fa4_jax.masks.pairs import All as Every
from fa4_jax.masks.pairs import Between, Complement, Either, Function, Pairs, Tagged

Array = jax.Array


def check(parts: Sequence[Any]) -> None:
    """Whether all masks are values of positions.

    Raises:
      NotImplementedError: one holds an array of all pairs.
    """
    for part in parts:
        match part:
            case values.Array():
                raise NotImplementedError(
                    "mask: an array of all pairs in fa4_jax.parallel; supported: "
                    "masks.function, intervals, ranges, segments, prefix, chunked, block_causal "
                    "and window, composed with &, | and ~"
                )
            case values.Both(left, right) | values.Union(left, right):
                check((left, right))
            case values.Complement(mask):
                check((mask,))
            case _:
                pass


class Part(NamedTuple):
    """Which rows and keys of whole sequences a call has.

    rows, keys: [B|1, L] of whole sequences -> of these rows or keys.
    clipped: an end of a range of keys -> of the part of the range among these keys.
    lengths: rows and keys of whole sequences, with padding.
    """

    rows: Callable[[Array], Array]
    keys: Callable[[Array], Array]
    clipped: Callable[[Array], Array]
    lengths: tuple[int, int]


def cut(mask: Pairs, part: Part) -> Pairs:
    """What the rows of a part see of its keys."""

    def limit(x: Array) -> Array:
        return part.clipped(x if x.shape[1] == 1 else part.rows(x))

    match mask:
        case Every(parts):
            return Every(tuple(cut(x, part) for x in parts))
        case Either(parts):
            return Either(tuple(cut(x, part) for x in parts))
        case Complement(hidden):
            return Complement(cut(hidden, part))
        case Between(low, high):
            return Between(limit(low), limit(high))
        case Tagged(low, high, tag):
            return Tagged(part.rows(low), part.rows(high), part.keys(tag))
        case Function(at=Indices() as at):
            return dataclasses.replace(mask, at=_positions(at, part))
        case _:
            raise TypeError(f"no part of a {type(mask).__name__} is known")


def _positions(at: Indices, part: Part) -> Positions:
    """Where a part's rows and keys are, none past the lengths."""
    row, key = (jnp.arange(length, dtype=jnp.int32)[None] for length in part.lengths)
    last_row, last_key = (length - 1 for length in at.lengths)
    return Positions(
        at.batch,
        at.head,
        jnp.clip(part.rows(row), 0, last_row) + at.offset[:, None],
        jnp.clip(part.keys(key), 0, last_key),
    )


def folded(halves: Sequence[Pairs], batch: int) -> Pairs:
    """Masks of two chunks beside each other in the batch, as a folded view has them."""
    first, second = halves
    of_second = iter(_arrays(second))

    def both(x: Array, dimensions: Dimensions) -> Array:
        pair = x, next(of_second)
        if BATCH not in dimensions:
            return x
        pair = [jnp.broadcast_to(y, (batch, *y.shape[1:])) for y in pair]
        return jnp.stack(pair, axis=1).reshape(-1, *x.shape[1:])

    return first.mapped(both)


def _arrays(mask: Pairs) -> list[Array]:
    """The arrays of a mask, in the order in which `mapped` meets them."""
    found = list[Array]()

    def note(x: Array, dimensions: Dimensions) -> Array:
        del dimensions
        found.append(x)
        return x

    mask.mapped(note)
    return found


def of_heads(mask: Pairs, start: Any, count: int) -> Pairs:
    """The mask of `count` heads from `start` on."""

    def own(x: Array, dimensions: Dimensions) -> Array:
        if HEADS not in dimensions or x.shape[dimensions.index(HEADS)] == 1:
            return x
        return lax.dynamic_slice_in_dim(x, start, count, dimensions.index(HEADS))

    return mask.mapped(own)
