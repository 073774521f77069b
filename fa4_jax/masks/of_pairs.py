"""From the masks of a call to one mask of pairs: of what no range of keys a row says."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fa4_jax import validate
from fa4_jax.boxes import Indices, Whole, traced
from fa4_jax.extents import to_int32
from fa4_jax.masks import pairs, resolve, tags, values
from fa4_jax.masks.pairs import Between, Dense, Function, Pairs, Tagged
from fa4_jax.masks.resolve import Call, Ids

Array = jax.Array

KINDS = values.Array | values.Function | values.Intervals | values.Union | values.Complement
"""Masks that ranges and tags do not say."""


def divided(parts: list[Any]) -> tuple[list[Any], list[Any]]:
    """The masks that are ranges and tags, and those that are evaluated pair by pair."""
    of_pairs = [part for part in parts if isinstance(part, KINDS)]
    return [part for part in parts if not isinstance(part, KINDS)], of_pairs


def found(parts: list[Any], call: Call, heads: int) -> Pairs | None:
    """One mask of pairs that shows what all parts show; None without any.

    Raises:
      ValueError: an array has a wrong shape or type, or a function does not return what it should.
    """
    if not parts or validate.nothing((call.batch, call.query_length, call.key_length)):
        return None
    return pairs.every([_one(part, call, heads) for part in parts])


def _one(part: Any, call: Call, heads: int) -> Pairs:
    match part:
        case values.Both(left, right):
            return pairs.All((_one(left, call, heads), _one(right, call, heads)))
        case values.Union(left, right):
            return pairs.Either((_one(left, call, heads), _one(right, call, heads)))
        case values.Complement(mask):
            return pairs.Complement(_one(mask, call, heads))
        case values.Array(array):
            return Dense(_array(array, call, heads))
        case values.Function(fn, operands):
            return _function(fn, operands, call, heads)
        case values.Intervals(low, high):
            return _intervals(low, high, call)
        case values.Prepared():
            raise ValueError("mask: a tile table composes with nothing: give tile_table all masks")
        case _:
            return _of_ranges(part, call)


def _of_ranges(part: Any, call: Call) -> Pairs:
    """A mask that would be ranges and tags, if it stood alone."""
    if isinstance(part, values.Window):
        resolve.static_window([part])  # Raises if a side is wrong.
    given = resolve.given([part], call)
    found: list[Pairs] = [Between(*map(_of_rows, limits)) for limits in given.limits]
    ids: list[tuple[list[Ids], Ids | None]] = [([equal], None) for equal in given.equal]
    ids += [([], at_most) for at_most in given.at_most]
    for equal, at_most in ids:
        compared = tags.intervals(equal, at_most)
        found.append(Tagged(compared.low, compared.high, compared.tag))
    return pairs.All(tuple(found))


def _of_rows(x: Array) -> Array:
    """An end of every row's range as [B|1, T|1]."""
    return x if x.ndim else x[None, None]


def _array(array: Any, call: Call, heads: int) -> Array:
    x = jnp.asarray(array)
    x = x.reshape((1,) * (4 - x.ndim) + x.shape)
    validate.dense("mask", x, (call.batch, heads, call.query_length, call.key_length))
    return x


def _intervals(low: Any, high: Any, call: Call) -> Pairs:
    ends = [
        validate.intervals(f"intervals' {name}", x, call.batch, call.rows_given, call.rank)
        for name, x in (("low", low), ("high", high))
    ]
    if ends[0].shape[-1] != ends[1].shape[-1]:
        raise ValueError(
            f"intervals' low and high must be as many, got {ends[0].shape} and {ends[1].shape}"
        )
    ends = [x[None] if call.rank == 3 else x for x in ends]
    ends = [jnp.unstack(jnp.asarray(to_int32(x, *resolve.INT32)), axis=-1) for x in ends]
    ends = [[call.tokens.whole(x) for x in of_all] for of_all in ends]
    return pairs.Either(tuple(Between(*limits) for limits in zip(*ends, strict=True)))


def _function(fn: Any, operands: tuple[Any, ...], call: Call, heads: int) -> Pairs:
    """A function, which is traced once to check what it returns."""
    shape = call.batch, heads, call.query_length, call.key_length
    at = Indices.of_call(shape, call.offset)
    found = Function(fn, at, jax.tree.map(jnp.asarray, operands))
    box = Whole(*shape[2:])
    result: Any = traced("mask: function's fn", lambda x: x.fn(*x.at.of(box), *x.operands), found)
    if not isinstance(result, jax.ShapeDtypeStruct) or result.dtype != jnp.bool_:
        raise ValueError(f"mask: function's fn must return one boolean array, got {result}")
    if len(result.shape) != 4 or any(
        size not in (1, full) for size, full in zip(result.shape, shape, strict=True)
    ):
        raise ValueError(
            f"mask: function's fn must return what b, h, q and k broadcast to, {shape} or with "
            f"sizes 1, got shape {result.shape}: it has to be elementwise"
        )
    return found
