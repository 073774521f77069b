"""Masks that are evaluated pair by pair, a box of rows and keys at a time.

What no range of keys says: a dense array, a function of positions, a union, a complement. A value
is a pytree of its arrays. It never holds all pairs, unless the caller gave them.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from fa4_jax.boxes import (
    ANY,
    BATCH,
    HEADS,
    KEYS,
    ROWS,
    Box,
    Boxed,
    Dimensions,
    Indices,
    Positions,
    part,
    positions,
)

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Pairs(Boxed):
    """Which row sees which key."""

    def seen(self, box: Box) -> Array:
        """Whether the rows of a box see its keys, bool [B|1, N|1, rows|1, keys|1].

        What it says of rows and keys past the lengths means nothing.
        """
        raise NotImplementedError


def _of_rows(x: Array, box: Box) -> Array:
    """A box's rows of [B|1, T], as [B|1, 1, rows, 1]."""
    return part(x, 1, box.row, box.rows)[:, None, :, None]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dense(Pairs):
    """An array of all pairs, bool [B|1, N|1, T|1, S|1]."""

    DIMENSIONS: ClassVar = {"array": (BATCH, HEADS, ROWS, KEYS)}
    array: Array

    def seen(self, box: Box) -> Array:
        return part(part(self.array, 2, box.row, box.rows), 3, box.key, box.keys)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Between(Pairs):
    """low <= j < high, int32 [B|1, T] or [B|1, 1]."""

    DIMENSIONS: ClassVar = {"low": (BATCH, ROWS), "high": (BATCH, ROWS)}
    low: Array
    high: Array

    def seen(self, box: Box) -> Array:
        keys = positions(box.key, box.keys)[None, None, None]
        return (_of_rows(self.low, box) <= keys) & (keys < _of_rows(self.high, box))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tagged(Pairs):
    """low <= tag <= high, as `tags.Intervals`: low, high int32 [B|1, T], tag int32 [B|1, S]."""

    DIMENSIONS: ClassVar = {"low": (BATCH, ROWS), "high": (BATCH, ROWS), "tag": (BATCH, KEYS)}
    low: Array
    high: Array
    tag: Array

    def seen(self, box: Box) -> Array:
        tags = part(self.tag, 1, box.key, box.keys)[:, None, None, :]
        return (_of_rows(self.low, box) <= tags) & (tags <= _of_rows(self.high, box))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Function(Pairs):
    """fn(b, h, q, k, *operands), with the indices `at`."""

    fn: Callable[..., Any] = dataclasses.field(metadata={"static": True})
    at: Indices | Positions
    operands: tuple[Any, ...]

    def seen(self, box: Box) -> Array:
        return jnp.asarray(self.fn(*self.at.of(box), *self.operands))

    def mapped(self, change: Callable[[Array, Dimensions], Any]) -> Any:
        operands = jax.tree.map(lambda x: change(x, (ANY,) * x.ndim), self.operands)
        return dataclasses.replace(self, at=self.at.mapped(change), operands=operands)


@dataclasses.dataclass(frozen=True)
class _Several(Pairs):
    parts: tuple[Pairs, ...]

    def mapped(self, change: Callable[[Array, Dimensions], Any]) -> Any:
        return dataclasses.replace(self, parts=tuple(x.mapped(change) for x in self.parts))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class All(_Several):
    """What all parts show."""

    def seen(self, box: Box) -> Array:
        return functools.reduce(operator.and_, (x.seen(box) for x in self.parts))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Either(_Several):
    """What any part shows."""

    def seen(self, box: Box) -> Array:
        return functools.reduce(operator.or_, (x.seen(box) for x in self.parts))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Complement(Pairs):
    """What a part hides."""

    part: Pairs

    def seen(self, box: Box) -> Array:
        return ~self.part.seen(box)

    def mapped(self, change: Callable[[Array, Dimensions], Any]) -> Any:
        return dataclasses.replace(self, part=self.part.mapped(change))


def every(parts: list[Pairs]) -> Pairs | None:
    """What all parts show; None without any."""
    return None if not parts else parts[0] if len(parts) == 1 else All(tuple(parts))
