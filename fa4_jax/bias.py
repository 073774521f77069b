"""Biases that positions decide, passed to `attention` as `bias=`: small values, no [T, S] array.

They are pytrees whose arrays have gradients. A row's position is i + query_offset, a key's is j.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from fa4_jax.bands import LIMIT
from fa4_jax.boxes import ANY, BATCH, HEADS, ROWS, Box, Boxed, part, positions
from fa4_jax.key import NO_BAND

__all__ = ["Bias", "alibi", "banded", "relative"]

Array = jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class Bias(Boxed):
    """What is added to the scores, by positions."""

    IS_BY_DISTANCE: ClassVar = False
    """Whether the distance of row and key alone decides."""

    def at_distances(self, distance: Array) -> Array:
        """What scores get at these distances j - (i + query_offset), int32 [B|1, L]: [B|1, N, L].

        Only of a value that is by distance.
        """
        raise NotImplementedError

    def added(self, box: Box, offset: Array) -> Array:
        """What a box's scores get, [B|1, N|1, rows, keys].

        What it holds for rows and keys past the lengths means nothing.

        Args:
          offset: query offsets, int32 [B|1].
        """
        raise NotImplementedError

    def checked(self, sizes: tuple[int, int, int], rank: int) -> Any:
        """The value with arrays as DIMENSIONS says.

        Args:
          sizes: batch, query heads and query length.
          rank: of query, as the caller gave it.

        Raises:
          ValueError: an array has a wrong shape or type.
        """
        raise NotImplementedError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Alibi(Bias):
    """`alibi`."""

    DIMENSIONS: ClassVar = {"slopes": (HEADS,)}
    IS_BY_DISTANCE: ClassVar = True
    slopes: Array

    def at_distances(self, distance: Array) -> Array:
        return self.slopes[None, :, None] * distance[:, None].astype(self.slopes.dtype)

    def added(self, box: Box, offset: Array) -> Array:
        distance = _distance(box, offset).astype(self.slopes.dtype)
        return self.slopes[None, :, None, None] * distance

    def checked(self, sizes: tuple[int, int, int], rank: int) -> Any:
        del rank
        return Alibi(_floating("alibi's slopes", self.slopes, [sizes[1:2]], "[N]"))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class ByDistance(Bias):
    """values[n, c] where j - (i + query_offset) is c - reach, c clipped to the ends; [N, C]."""

    DIMENSIONS: ClassVar = {"values": (HEADS, ANY)}
    IS_BY_DISTANCE: ClassVar = True
    reach: int = dataclasses.field(metadata={"static": True})
    values: Array

    def at_distances(self, distance: Array) -> Array:
        column = distance + self.reach
        return jnp.take(self.values, column, axis=1, mode="clip").swapaxes(0, 1)

    def added(self, box: Box, offset: Array) -> Array:
        # Each distance within the box is read once.
        distance = positions(box.key, box.rows + box.keys - 1) - positions(box.row, 1)
        found = self.at_distances(distance[None] - offset[:, None] - (box.rows - 1))
        return _along_diagonals(found, box.rows, box.keys)

    def checked(self, sizes: tuple[int, int, int], rank: int) -> Any:
        if self.values.shape[0] != sizes[1]:
            raise ValueError(
                f"relative's table must have shape [buckets, N] with N = {sizes[1]} query heads, "
                f"got {self.values.shape[0]} heads"
            )
        return self


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class AtDistances(Bias):
    """What kernels read of a bias that is by distance: values [B|1, N, T + S - 1], float32.

    Row i and key j get values[b, n, j - i + T - 1]. The values are those of the query offset, so
    that nobody counts it again.

    Attributes:
      rows: T.
      slopes: [1, N], float32, of a linear bias, 0 of others. Values say the same, but far from
        distance 0 not as exactly. It has no gradient: that of the values is the whole.
      is_linear: whether it is `alibi`, a number of the head times the distance.
      reach: from which distance on, on either side, all scores get the same, if there is one.
    """

    DIMENSIONS: ClassVar = {"values": (BATCH, HEADS, ANY), "slopes": (BATCH, HEADS)}
    IS_BY_DISTANCE: ClassVar = True
    rows: Any = dataclasses.field(metadata={"static": True})
    values: Array
    slopes: Array
    is_linear: bool = dataclasses.field(default=False, metadata={"static": True})
    reach: int | None = dataclasses.field(default=None, metadata={"static": True})

    @classmethod
    def of(cls, bias: Bias, lengths: tuple[Any, Any], offset: Array) -> AtDistances:
        """What a bias is for kernels.

        Args:
          lengths: T and S.
          offset: query offsets, int32 [B|1].
        """
        rows, keys = lengths
        distance = positions(0, rows + keys - 1) - (rows - 1)
        # A 16-bit type holds few distances exactly.
        wide = jax.tree.map(lambda x: x.astype(jnp.float32), bias)
        values = wide.at_distances(distance[None] - offset[:, None])
        slopes = wide.slopes[None] if isinstance(wide, Alibi) else jnp.zeros_like(values[:1, :, 0])
        return cls(rows, values, jax.lax.stop_gradient(slopes), *far_of(bias))

    def added(self, box: Box, offset: Array) -> Array:
        del offset
        # Boxes may reach past the last row and key.
        column = positions(box.key, box.rows + box.keys - 1) - positions(box.row, 1)
        column += self.rows - box.rows
        found = jnp.take(self.values, column, axis=2, mode="clip")
        return _along_diagonals(found, box.rows, box.keys)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Banded(Bias):
    """`banded`."""

    DIMENSIONS: ClassVar = {"table": (BATCH, HEADS, ROWS, ANY)}
    first: int = dataclasses.field(metadata={"static": True})
    table: Array

    def added(self, box: Box, offset: Array) -> Array:
        table = part(self.table, 2, box.row, box.rows)
        column = -_distance(box, offset) - self.first
        within = (column >= 0) & (column < table.shape[3])
        shape = (max(table.shape[0], column.shape[0]), *table.shape[1:3], box.keys)
        table = jnp.broadcast_to(table, (shape[0], *table.shape[1:]))
        column = jnp.broadcast_to(jnp.where(within, column, 0), shape)
        return jnp.where(within, jnp.take_along_axis(table, column, axis=3), 0)

    def checked(self, sizes: tuple[int, int, int], rank: int) -> Any:
        b, n, t = sizes
        columns = jnp.shape(self.table)[-1:]
        shapes = [(x, y, t, *columns) for x in {1, b} for y in {1, n}]
        text = "[B|1, N|1, T, L]"
        if rank == 3:
            shapes, text = [shape[1:] for shape in shapes], "[N|1, T, L]"
        table = _floating("banded's table", self.table, shapes, text)
        return Banded(self.first, table if rank == 4 else table[None])


def alibi(slopes: Any) -> Bias:
    """Adds slopes[n] (j - (i + query_offset)): attention with linear biases (ALiBi).

    Args:
      slopes: [N], floating, usually positive where only earlier keys are seen. Differentiable.
    """
    return Alibi(slopes)


def relative(table: Any, *, bidirectional: bool = True, max_distance: int = 128) -> Bias:
    """Adds table[bucket of j - (i + query_offset), n]: T5's relative position biases.

    Small distances have a bucket each, larger ones share them logarithmically; from max_distance
    on all have the last (Raffel et al. 2020, section 2.1).

    Args:
      table: [buckets, N], floating. Differentiable.
      bidirectional: half of the buckets are for keys after the row; otherwise these have that of
        distance 0 (under causal attention no row sees them).
      max_distance: in positions.

    Raises:
      ValueError: the table is not floating of rank 2, or its buckets do not suffice.
    """
    if jnp.ndim(table) != 2 or not jnp.issubdtype(jnp.result_type(table), jnp.floating):
        raise ValueError(
            "relative's table must be floating of shape [buckets, N], got "
            f"{jnp.result_type(table)} {jnp.shape(table)}"
        )
    count = jnp.shape(table)[0]
    exact = count // 4 if bidirectional else count // 2
    if exact < 1 or (bidirectional and count % 2):
        raise ValueError(
            f"relative's table has {count} buckets: it needs "
            + ("an even number, at least 4" if bidirectional else "at least 2")
        )
    if max_distance <= exact:
        raise ValueError(
            f"max_distance must exceed the {exact} distances that have a bucket of their own, "
            f"got {max_distance}"
        )
    distances = np.arange(-max_distance, max_distance + 1)
    buckets = _buckets(distances, count, bidirectional, max_distance)
    return ByDistance(max_distance, jnp.asarray(table)[buckets].swapaxes(0, 1))


def banded(table: Any, first: int = 0) -> Bias:
    """Adds table[b, n, i, c] where i + query_offset - j is first + c, and 0 for other keys.

    Args:
      table: [B|1, N|1, T, L], floating; 3-D calls drop B. Differentiable.
      first: of the L distances that have a column. 0 is for causal attention: the row's own key and
        the L - 1 before it; 1 - W with L = 2 W - 1 for the keys less than W away on either side.
    """
    return Banded(first, table)


def far_of(bias: Bias) -> tuple[bool, int | None]:
    """Returns `AtDistances.is_linear` and `reach` of a bias by distance."""
    return isinstance(bias, Alibi), bias.reach if isinstance(bias, ByDistance) else None


def form(bias: Any, keys: Any) -> str | None:
    """Returns what `Problem.bias` says of a bias that `checked` has returned.

    keys: the key length of the call, S.
    """
    if bias is None:
        return None
    if isinstance(bias, Banded):
        # Kernels add `first` to positions, which are below the limit, too.
        return "banded" if bias.table.shape[3] and abs(bias.first) < LIMIT else "other"
    if isinstance(bias, Bias):
        return "distance" if bias.IS_BY_DISTANCE else "other"
    return "dense" if bias.shape[-1] == keys else "other"


def first_distance(bias: Any, keys: Any) -> int:
    """Returns `Problem.bias_first` of it."""
    return bias.first if form(bias, keys) == "banded" else NO_BAND


def _buckets(
    distances: np.ndarray, count: int, bidirectional: bool, max_distance: int
) -> np.ndarray:
    """T5's bucket of each distance j - i."""
    before = np.maximum(-distances, 0)
    start = np.zeros_like(distances)
    if bidirectional:
        count //= 2
        before = np.abs(distances)
        start = np.where(distances > 0, count, 0)
    exact = count // 2
    ratio = np.log(np.maximum(before, 1) / exact) / np.log(max_distance / exact)
    # What is a whole number must not become less by rounding.
    shared = exact + np.floor(ratio * (count - exact) + 1e-9).astype(int)
    return start + np.where(before < exact, before, np.minimum(shared, count - 1))


def _distance(box: Box, offset: Array) -> Array:
    """j - (i + query_offset), int32 [B|1, 1, rows, keys]."""
    row = positions(box.row, box.rows)[None, None, :, None] + offset[:, None, None, None]
    return positions(box.key, box.keys)[None, None, None, :] - row


def _along_diagonals(x: Array, rows: int, keys: int) -> Array:
    """Element [..., i, j] is x[..., j - i + rows - 1], of x [..., rows + keys - 1].

    x and one more element, again and again, in lines of one element less: each line begins one
    element further, so its transpose is a sum, not a scatter.
    """
    lead, length = x.shape[:-1], x.shape[-1]
    x = jnp.concatenate([x[..., rows - 1 :], x[..., :1], x[..., : rows - 1]], axis=-1)
    x = jnp.broadcast_to(x[..., None, :], (*lead, rows, length + 1))
    x = x.reshape(*lead, rows * (length + 1))[..., : rows * length]
    return x.reshape(*lead, rows, length)[..., :keys]


def _floating(name: str, x: Any, shapes: Sequence[tuple[int, ...]], text: str) -> Array:
    """An array of one of these shapes.

    Raises:
      ValueError: it has another shape or is not floating.
    """
    x = jnp.asarray(x)
    if x.shape not in shapes:
        raise ValueError(f"{name} must have shape {text} = {max(shapes)}, got {x.shape}")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"{name} must be floating point, got dtype {x.dtype}")
    return x
