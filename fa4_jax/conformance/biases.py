"""Biases of the conformance cases: random arrays, the value that users write, and what it means."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from fa4_jax import bias
from fa4_jax.conformance.row_masks import Sizes
from fa4_jax.key import NO_BAND

_BUCKETS, _MAX_DISTANCE = 12, 40


@dataclasses.dataclass(frozen=True)
class Kind:
    """One kind of bias by positions.

    Attributes:
      draw: a random array of it, f32.
      value: the bias value of this array.
      spread: what pairs at distances j - (i + query_offset), int [B, T, S], get: [B, N, T, S] or
        broadcast to it.
      of_rows: what each row adds to the array's cotangent, [B, T, *array], of a cotangent of what
        pairs get, [B, N, T, S]; None where each row has elements of its own.
      first: of a banded bias, its first distance.
    """

    draw: Callable[[Sizes, np.random.Generator], np.ndarray]
    value: Callable[[Any], bias.Bias]
    spread: Callable[[np.ndarray, np.ndarray], np.ndarray]
    of_rows: Callable[[np.ndarray, np.ndarray], np.ndarray] | None
    first: int = NO_BAND

    @property
    def form(self) -> str:
        """`Problem.bias`."""
        return "distance" if self.first == NO_BAND else "banded"

    def gradient(
        self, x: np.ndarray, distance: np.ndarray, shape: tuple[int, ...]
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """The array's cotangent and what each row adds to it, if it is a sum over rows.

        Args:
          x: the cotangent of what pairs get, [B, N, T, S].
          distance: as for `spread`.
          shape: of the array.
        """
        if self.of_rows is not None:
            rows = self.of_rows(x, distance)
            return rows.sum((0, 1)), rows
        return _to_band(x, -distance - self.first, shape), None


def _slopes(case: Sizes, rng: np.random.Generator) -> np.ndarray:
    return (rng.random(case.heads[0]) * 0.1).astype(np.float32)


def _steep_slopes(case: Sizes, rng: np.random.Generator) -> np.ndarray:
    """Of both signs: the largest score may be at either end of the keys."""
    return rng.normal(size=case.heads[0]).astype(np.float32)


def _of_slopes(slopes: np.ndarray, distance: np.ndarray) -> np.ndarray:
    return slopes[None, :, None, None] * distance[:, None]


def _to_slopes(x: np.ndarray, distance: np.ndarray) -> np.ndarray:
    return (x * distance[:, None]).sum(3).swapaxes(1, 2)


def _table(case: Sizes, rng: np.random.Generator) -> np.ndarray:
    return rng.normal(size=(_BUCKETS, case.heads[0])).astype(np.float32)


def _buckets(distance: np.ndarray) -> np.ndarray:
    """T5's bucket of each distance; half of them for keys after the row."""
    half, exact = _BUCKETS // 2, _BUCKETS // 4
    away = np.abs(distance)
    with np.errstate(divide="ignore"):
        logarithm = np.log(away / exact) / np.log(_MAX_DISTANCE / exact) * (half - exact)
    shared = np.minimum(exact + np.floor(np.maximum(logarithm, 0) + 1e-9), half - 1)
    return (np.where(away < exact, away, shared) + half * (distance > 0)).astype(int)


def _of_table(table: np.ndarray, distance: np.ndarray) -> np.ndarray:
    return np.moveaxis(table[_buckets(distance)], -1, 1)


def _to_table(x: np.ndarray, distance: np.ndarray) -> np.ndarray:
    """x [B, N, T, S], distance [B, T, S]; returns [B, T, buckets, N]."""
    batch, heads, rows, _ = x.shape
    found = np.zeros((batch, rows, _BUCKETS, heads), x.dtype)
    entry, row, _ = np.ogrid[tuple(slice(size) for size in distance.shape)]
    np.add.at(found, (entry, row, _buckets(distance)), np.moveaxis(x, 1, -1))
    return found


def _of_band(table: np.ndarray, column: np.ndarray) -> np.ndarray:
    """table [B|1, N|1, T, L], column [B, T, S]; returns [B, N|1, T, S]."""
    batch, heads = len(column), table.shape[1]
    inside = (column >= 0) & (column < table.shape[3])
    place = np.where(inside, column, 0)[:, None].repeat(heads, axis=1)
    table = np.broadcast_to(table, (batch, *table.shape[1:]))
    return np.where(inside[:, None], np.take_along_axis(table, place, axis=3), 0)


def _to_band(x: np.ndarray, column: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The transpose of `_of_band`: x [B, N, T, S] to a table of a shape."""
    found = np.zeros((*x.shape[:3], shape[3]), x.dtype)
    entry, row, key = np.nonzero((column >= 0) & (column < shape[3]))
    found[entry, :, row, column[entry, row, key]] = x[entry, :, row, key]
    shared = tuple(axis for axis in range(2) if shape[axis] == 1)
    return found.sum(shared, keepdims=True)


def _banded(first: int, columns: int, *, of_batch: bool, of_heads: bool) -> Kind:
    """A banded bias; of_batch, of_heads: whether all batch entries, or heads, share it."""

    def draw(case: Sizes, rng: np.random.Generator) -> np.ndarray:
        shape = 1 if of_batch else case.batch, 1 if of_heads else case.heads[0]
        return rng.normal(size=(*shape, case.query_length, columns)).astype(np.float32)

    return Kind(
        draw,
        lambda table: bias.banded(table, first),
        lambda table, distance: _of_band(table, -distance - first),
        None,
        first,
    )


KINDS: dict[str, Kind] = {
    "alibi": Kind(
        _slopes,
        bias.alibi,
        _of_slopes,
        _to_slopes,
    ),
    "alibi_steep": Kind(
        _steep_slopes,
        bias.alibi,
        _of_slopes,
        _to_slopes,
    ),
    "relative": Kind(
        _table,
        lambda table: bias.relative(table, max_distance=_MAX_DISTANCE),
        _of_table,
        _to_table,
    ),
    "banded": _banded(0, 70, of_batch=False, of_heads=False),
    "banded_both_sides": _banded(-32, 65, of_batch=True, of_heads=False),
    "banded_far": _banded(190, 9, of_batch=False, of_heads=True),
    "banded_wide": _banded(-400, 700, of_batch=True, of_heads=True),
}
"""By the name that a case has."""


def distances(case: Sizes) -> np.ndarray:
    """j - (i + query_offset) of all pairs, int [B, T, S]."""
    offset = np.broadcast_to(np.asarray(case.query_offset), (case.batch,))[:, None, None]
    row = np.arange(case.query_length)[None, :, None] + offset
    return np.arange(case.key_length)[None, None, :] - row


def form_of(given: tuple[int, ...] | str | None, keys: int) -> str | None:
    """`Problem.bias` of the shape or the name that a case has, and its key length."""
    if isinstance(given, str):
        return KINDS[given].form
    if given is None:
        return None
    return "dense" if given[-1] == keys else "other"


def first_of(given: tuple[int, ...] | str | None) -> int:
    """`Problem.bias_first` of what a case has."""
    return KINDS[given].first if isinstance(given, str) else NO_BAND


def value(kind: str | None, array: Any) -> Any:
    """The argument `bias` of `attention`: a value by positions, or the dense array."""
    return array if kind is None else KINDS[kind].value(array)
