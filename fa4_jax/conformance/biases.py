"""Biases of the conformance cases: random arrays, the value that users write, and what it means."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from fa4_jax import bias
from fa4_jax.conformance.row_masks import Sizes

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
        pairs get, [B, N, T, S].
    """

    draw: Callable[[Sizes, np.random.Generator], np.ndarray]
    value: Callable[[Any], bias.Bias]
    spread: Callable[[np.ndarray, np.ndarray], np.ndarray]
    of_rows: Callable[[np.ndarray, np.ndarray], np.ndarray]


def _slopes(case: Sizes, rng: np.random.Generator) -> np.ndarray:
    return (rng.random(case.heads[0]) * 0.1).astype(np.float32)


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


KINDS: dict[str, Kind] = {
    "alibi": Kind(
        _slopes,
        bias.alibi,
        lambda slopes, distance: slopes[None, :, None, None] * distance[:, None],
        lambda x, distance: (x * distance[:, None]).sum(3).swapaxes(1, 2),
    ),
    "relative": Kind(
        _table,
        lambda table: bias.relative(table, max_distance=_MAX_DISTANCE),
        _of_table,
        _to_table,
    ),
}
"""By the name that a case has."""


def distances(case: Sizes) -> np.ndarray:
    """j - (i + query_offset) of all pairs, int [B, T, S]."""
    offset = np.broadcast_to(np.asarray(case.query_offset), (case.batch,))[:, None, None]
    row = np.arange(case.query_length)[None, :, None] + offset
    return np.arange(case.key_length)[None, None, :] - row


def value(kind: str | None, array: Any) -> Any:
    """The argument `bias` of `attention`: a value by positions, or the dense array."""
    return array if kind is None else KINDS[kind].value(array)
