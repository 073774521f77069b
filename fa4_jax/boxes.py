"""Values that say something of every row and key, a box of them at a time: masks and biases.

A value is a pytree of its arrays, and knows what their dimensions are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array

Dimensions = tuple[str, ...]
"""Names of an array's dimensions: BATCH and HEADS may have size 1, as those of a dense mask may;
any other name is shared by all rows and keys."""

BATCH, HEADS, ROWS, KEYS, ANY = "batch", "heads", "query length", "key length", "any"


_VALUES_NEEDED = (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError)
"""Errors of a traced function that needs the values of its arguments."""


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


class Whole(NamedTuple):
    """The box of all rows and keys."""

    rows: Any
    keys: Any
    row: int = 0
    key: int = 0


@dataclasses.dataclass(frozen=True)
class Boxed:
    """A value with an element for every row and key. DIMENSIONS names those of its arrays."""

    DIMENSIONS: ClassVar[dict[str, Dimensions]] = {}

    def mapped(self, change: Callable[[Array, Dimensions], Any]) -> Any:
        """The same with change(array, its dimensions) for every array."""
        new = {name: change(getattr(self, name), x) for name, x in self.DIMENSIONS.items()}
        return dataclasses.replace(self, **new)

    def padded(self, rows: Any, keys: Any) -> Self:
        """The same value with arrays as long as `rows` and `keys`, within which all boxes lie."""
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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Indices(Boxed):
    """The numbers that a user's function of pairs is given. They are arrays, as batch entries and
    heads are shared out among devices with them.

    Attributes:
      lengths: T and S; a function is asked about no position past them.
      batch, head: int32 [B] and [N].
      offset: query offset, int32 [B|1].
    """

    DIMENSIONS: ClassVar = {"batch": (BATCH,), "head": (HEADS,), "offset": (BATCH,)}
    lengths: tuple[Any, Any] = dataclasses.field(metadata={"static": True})
    batch: Array
    head: Array
    offset: Array

    @classmethod
    def of_call(cls, sizes: tuple[int, int, int, int], offset: Any) -> Self:
        """Those of a call.

        Args:
          sizes: batch, query heads, query and key length.
          offset: integers [] or [B|1].
        """
        batch, heads, *_ = sizes
        return cls(
            sizes[2:],
            jnp.arange(batch, dtype=jnp.int32),
            jnp.arange(heads, dtype=jnp.int32),
            jnp.asarray(offset, jnp.int32).reshape(-1),
        )

    def of(self, box: Box) -> tuple[Array, Array, Array, Array]:
        """b, h, q and k of a box, int32, broadcasting to [B, N, rows, keys]."""
        last_row, last_key = (jnp.asarray(length, jnp.int32) - 1 for length in self.lengths)
        row = jnp.minimum(positions(box.row, box.rows), last_row)
        key = jnp.minimum(positions(box.key, box.keys), last_key)
        return (
            self.batch[:, None, None, None],
            self.head[None, :, None, None],
            row[None, None, :, None] + self.offset[:, None, None, None],
            key[None, None, None, :],
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Positions(Boxed):
    """The same numbers where rows and keys are some of a longer sequence, in any order.

    Attributes:
      batch, head: as of `Indices`.
      row: positions of the rows with the query offset, int32 [B|1, T].
      key: positions of the keys, int32 [1, S].
    """

    DIMENSIONS: ClassVar = {
        "batch": (BATCH,),
        "head": (HEADS,),
        "row": (BATCH, ROWS),
        "key": (BATCH, KEYS),
    }
    batch: Array
    head: Array
    row: Array
    key: Array

    def of(self, box: Box) -> tuple[Array, Array, Array, Array]:
        """As of `Indices`."""
        return (
            self.batch[:, None, None, None],
            self.head[None, :, None, None],
            part(self.row, 1, box.row, box.rows)[:, None, :, None],
            part(self.key, 1, box.key, box.keys)[:, None, None, :],
        )


def part(x: Array, axis: int, start: Any, size: int) -> Array:
    """[start, start + size) of an axis; all of one of size 1, which stands for every index."""
    return x if x.shape[axis] == 1 else lax.dynamic_slice_in_dim(x, start, size, axis)


def positions(start: Any, size: int) -> Array:
    """start ... start + size - 1, [size] int32."""
    return lax.iota(jnp.int32, size) + jnp.asarray(start).astype(jnp.int32)


def traced(name: str, function: Callable[..., Any], *args: Any) -> Any:
    """Shapes and types of what a user's function returns.

    Args:
      name: of the function, as messages have it.

    Raises:
      ValueError: it cannot be traced.
    """
    try:
        return jax.eval_shape(function, *args)
    except (*_VALUES_NEEDED, ValueError) as error:
        # Of an array with several elements JAX says so in a plain ValueError.
        if not isinstance(error, _VALUES_NEEDED) and "truth value" not in str(error):
            raise
        raise ValueError(
            f"{name} needs the values of what it is given: write it in jax.numpy without Python's "
            "if, int or bool of arrays (jnp.where, & and | take their places)"
        ) from error
