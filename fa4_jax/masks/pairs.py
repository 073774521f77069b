"""Masks that are evaluated pair by pair, a box of rows and keys at a time.

What no range of keys says: a dense array, a function of positions, a union, a complement. A value
is a pytree of its arrays. It never holds all pairs, unless the caller gave them.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array

Dimensions = tuple[str, ...]
"""Names of an array's dimensions: BATCH and HEADS may have size 1, as those of a dense mask may;
any other name is shared by all rows and keys."""

BATCH, HEADS, ROWS, KEYS, ANY = "batch", "heads", "query length", "key length", "any"


class Box(Protocol):
    """Rows [row, row + rows) and keys [key, key + keys). The starts may be traced."""

    @property
    def row(self) -> Any: ...
    @property
    def rows(self) -> int: ...
    @property
    def key(self) -> Any: ...
    @property
    def keys(self) -> int: ...


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Which row sees which key. DIMENSIONS has those of the arrays, by name."""

    DIMENSIONS: ClassVar[dict[str, Dimensions]] = {}

    def seen(self, box: Box) -> Array:
        """Whether the rows of a box see its keys, bool [B|1, N|1, rows|1, keys|1].

        What it says of rows and keys past the lengths means nothing.
        """
        raise NotImplementedError

    def mapped(self, change: Callable[[Array, Dimensions], Any]) -> Any:
        """The same with change(array, its dimensions) for every array."""
        new = {name: change(getattr(self, name), x) for name, x in self.DIMENSIONS.items()}
        return dataclasses.replace(self, **new)

    def padded(self, rows: Any, keys: Any) -> Pairs:
        """The same mask with arrays as long as `rows` and `keys`, within which all boxes lie."""
        lengths = {ROWS: rows, KEYS: keys}

        def longer(x: Array, dimensions: Dimensions) -> Array:
            for axis, name in enumerate(dimensions):
                size = x.shape[axis]
                if name not in lengths or size in (1, lengths[name]):
                    continue
                missing = lengths[name] - size
                if not isinstance(missing, int) or missing > 0:  # A symbolic one is never less.
                    widths = [(0, 0)] * x.ndim
                    widths[axis] = (0, missing)
                    x = jnp.pad(x, widths)
            return x

        return self.mapped(longer)


def _part(x: Array, axis: int, start: Any, size: int) -> Array:
    """[start, start + size) of an axis; all of one of size 1, which stands for every index."""
    return x if x.shape[axis] == 1 else lax.dynamic_slice_in_dim(x, start, size, axis)


def _of_rows(x: Array, box: Box) -> Array:
    """A box's rows of [B|1, T], as [B|1, 1, rows, 1]."""
    return _part(x, 1, box.row, box.rows)[:, None, :, None]


def _positions(start: Any, size: int) -> Array:
    return lax.iota(jnp.int32, size) + jnp.asarray(start).astype(jnp.int32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dense(Pairs):
    """An array of all pairs, bool [B|1, N|1, T|1, S|1]."""

    DIMENSIONS: ClassVar = {"array": (BATCH, HEADS, ROWS, KEYS)}
    array: Array

    def seen(self, box: Box) -> Array:
        return _part(_part(self.array, 2, box.row, box.rows), 3, box.key, box.keys)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Between(Pairs):
    """low <= j < high, int32 [B|1, T] or [B|1, 1]."""

    DIMENSIONS: ClassVar = {"low": (BATCH, ROWS), "high": (BATCH, ROWS)}
    low: Array
    high: Array

    def seen(self, box: Box) -> Array:
        keys = _positions(box.key, box.keys)[None, None, None]
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
        tags = _part(self.tag, 1, box.key, box.keys)[:, None, None, :]
        return (_of_rows(self.low, box) <= tags) & (tags <= _of_rows(self.high, box))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Function(Pairs):
    """fn(b, h, q, k, *operands); indices of batch entries and heads are arrays, as they are shared
    out among devices with them.

    Attributes:
      lengths: T and S; the function is asked about no position past them.
      batch, head: int32 [B] and [N].
      offset: query offset, int32 [B|1].
    """

    DIMENSIONS: ClassVar = {"batch": (BATCH,), "head": (HEADS,), "offset": (BATCH,)}
    fn: Callable[..., Any] = dataclasses.field(metadata={"static": True})
    lengths: tuple[Any, Any] = dataclasses.field(metadata={"static": True})
    batch: Array
    head: Array
    offset: Array
    operands: tuple[Any, ...]

    def seen(self, box: Box) -> Array:
        rows, keys = self.lengths
        row = jnp.minimum(_positions(box.row, box.rows), jnp.asarray(rows, jnp.int32) - 1)
        key = jnp.minimum(_positions(box.key, box.keys), jnp.asarray(keys, jnp.int32) - 1)
        found = self.fn(
            self.batch[:, None, None, None],
            self.head[None, :, None, None],
            row[None, None, :, None] + self.offset[:, None, None, None],
            key[None, None, None, :],
            *self.operands,
        )
        return jnp.asarray(found)

    def mapped(self, change: Callable[[Array, Dimensions], Any]) -> Any:
        operands = jax.tree.map(lambda x: change(x, (ANY,) * x.ndim), self.operands)
        return dataclasses.replace(super().mapped(change), operands=operands)


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
