"""Masks of the conformance cases: random arrays, the value that users write, and what it means."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping
from typing import Protocol

import jax
import numpy as np

from fa4_jax import masks

Arrays = tuple[np.ndarray, ...]
"""What a mask is made of: int32 [B, T] and [B, S], or less."""

CHUNK = 96
"""Positions of a chunk."""

_KINDS_OF_IDS = 5


class Sizes(Protocol):
    """What a mask depends on of a `Case`."""

    @property
    def batch(self) -> int: ...
    @property
    def heads(self) -> tuple[int, int]: ...
    @property
    def query_length(self) -> int: ...
    @property
    def key_length(self) -> int: ...
    @property
    def query_offset(self) -> int | tuple[int, ...]: ...


@dataclasses.dataclass(frozen=True)
class Kind:
    """One kind of mask.

    Attributes:
      draw: random arrays of it.
      value: the mask value of these arrays.
      seen: which row sees which key by them, pair by pair, broadcasting to bool [B, T, S], or
        [B, N, T, S] if heads see different keys.
      has_tags: ids are compared, since they may come in any order.
      of_pairs: no range of keys a row says it; kernels read its bits.
    """

    draw: Callable[[Sizes, np.random.Generator], Arrays]
    value: Callable[..., masks.Mask]
    seen: Callable[[Sizes, Arrays], np.ndarray]
    has_tags: bool = False
    of_pairs: bool = False


def _positions(case: Sizes) -> tuple[np.ndarray, np.ndarray]:
    """Of rows [B|1, T, 1] and of keys [S]."""
    offset = np.reshape(case.query_offset, (-1, 1, 1))
    return np.arange(case.query_length)[None, :, None] + offset, np.arange(case.key_length)


def _packed(case: Sizes, rng: np.random.Generator) -> Arrays:
    """Documents in the same order on both sides, cut anywhere; some of the end is padding."""

    def ids(length: int) -> np.ndarray:
        found = np.sort(rng.integers(0, _KINDS_OF_IDS, (case.batch, length)), axis=1)
        found[:, length - length // 9 :] = -1
        return found.astype(np.int32)

    query = ids(case.query_length)
    return query, query if case.query_length == case.key_length else ids(case.key_length)


def _scattered(case: Sizes, rng: np.random.Generator) -> Arrays:
    """Ids in runs of any order, which come back; -1 and -2 among them."""

    def ids(length: int) -> np.ndarray:
        runs = rng.integers(-2, _KINDS_OF_IDS, (case.batch, length // 40 + 1))
        return np.repeat(runs, 40, axis=1)[:, :length].astype(np.int32)

    return ids(case.query_length), ids(case.key_length)


def _rising(case: Sizes, rng: np.random.Generator) -> Arrays:
    """Ids that never fall."""
    return tuple(
        np.sort(rng.integers(0, 8, (case.batch, length)), axis=1).astype(np.int32)
        for length in (case.query_length, case.key_length)
    )


def _ends(case: Sizes, rng: np.random.Generator) -> Arrays:
    """Any ranges, a quarter of them empty, some beyond the keys."""
    shape = case.batch, case.query_length
    low = rng.integers(-20, case.key_length + 20, shape)
    high = low + rng.integers(-60, 180, shape)
    return low.astype(np.int32), high.astype(np.int32)


def _prefixes(case: Sizes, rng: np.random.Generator) -> Arrays:
    return (rng.integers(0, case.key_length + 1, case.batch).astype(np.int32),)


def _sides(case: Sizes, rng: np.random.Generator) -> Arrays:
    return tuple(np.asarray(x, np.int32) for x in rng.integers(0, case.key_length // 2 + 1, 2))


def _meet(case: Sizes, ids: Arrays) -> np.ndarray:
    query, key = ids[0][:, :, None], ids[1][:, None, :]
    return (query == key) & (key >= 0)


def _at_most(case: Sizes, ids: Arrays) -> np.ndarray:
    query, key = ids[0][:, :, None], ids[1][:, None, :]
    return (key <= query) & (key >= 0)


def _between(case: Sizes, ends: Arrays) -> np.ndarray:
    j = np.arange(case.key_length)
    return (ends[0][:, :, None] <= j) & (j < ends[1][:, :, None])


def _within_prefix(case: Sizes, lengths: Arrays) -> np.ndarray:
    i, j = _positions(case)
    return (j < lengths[0][:, None, None]) | (j <= i)


def _same_chunk(case: Sizes, arrays: Arrays) -> np.ndarray:
    i, j = _positions(case)
    return i // CHUNK == j // CHUNK


def _within_window(case: Sizes, sides: Arrays) -> np.ndarray:
    i, j = _positions(case)
    return (j >= i - sides[0]) & (j <= i + sides[1])


def _tree(case: Sizes, rng: np.random.Generator) -> Arrays:
    """A table of the keys that a function reads: what it makes is dense, sparse, full and empty."""
    return (rng.integers(0, 9, case.key_length).astype(np.int32),)


def _function(table: np.ndarray) -> masks.Mask:
    return masks.function(_sees, table)


def _sees(b: jax.Array, h: jax.Array, q: jax.Array, k: jax.Array, table: jax.Array) -> jax.Array:
    """Boxes of 80 x 112 pairs, of which some are full, some are empty, some are neither."""
    kind = (q // 80 + 3 * (k // 112) + b) % 4
    return (kind == 0) | ((kind == 1) & ((q + table[k]) % 5 < 3)) | (kind == 2) & (k % 3 == h % 3)


def _function_seen(case: Sizes, arrays: Arrays) -> np.ndarray:
    i, j = _positions(case)
    i = i[:, None]
    b = np.arange(case.batch)[:, None, None, None]
    h = np.arange(case.heads[0])[:, None, None]
    kind = (i // 80 + 3 * (j // 112) + b) % 4
    some = (kind == 1) & ((i + arrays[0][j]) % 5 < 3)
    return (kind == 0) | some | ((kind == 2) & (j % 3 == h % 3))


def _triples(case: Sizes, rng: np.random.Generator) -> Arrays:
    """Three intervals a row, which overlap, are empty or lie beyond the keys."""
    shape = case.batch, case.query_length, 3
    low = rng.integers(-20, case.key_length + 20, shape)
    low[:, : case.query_length // 2] = low[:, :1]  # The upper rows see the same keys.
    high = low + rng.integers(-30, 90, shape)
    return low.astype(np.int32), high.astype(np.int32)


def _in_any(case: Sizes, ends: Arrays) -> np.ndarray:
    j = np.arange(case.key_length)[:, None]
    seen = (ends[0][:, :, None] <= j) & (j < ends[1][:, :, None])
    return np.any(seen, axis=-1)


def _images(case: Sizes, rng: np.random.Generator) -> Arrays:
    """Ids of images among text, which has -1: their tokens see each other both ways."""
    ids = np.full((case.batch, case.query_length), -1, np.int32)
    keys = np.full((case.batch, case.key_length), -1, np.int32)
    for b in range(case.batch):
        for image, start in enumerate(rng.integers(0, case.key_length, 3)):
            ids[b, start : start + 70] = keys[b, start : start + 70] = image
    return ids, keys


def _causal_but_for_images(query: np.ndarray, key: np.ndarray) -> masks.Mask:
    return masks.window(None, 0) | masks.segments(query, key)


def _image_seen(case: Sizes, ids: Arrays) -> np.ndarray:
    i, j = _positions(case)
    return (j <= i) | _meet(case, ids)


def _holes(low: np.ndarray, high: np.ndarray) -> masks.Mask:
    return ~masks.ranges(low, high)


KINDS: dict[str, Kind] = {
    "segments": Kind(_packed, masks.segments, _meet, True),
    "scattered": Kind(_scattered, masks.segments, _meet, True),
    "rising": Kind(_rising, masks.block_causal, _at_most, True),
    "unsorted": Kind(_scattered, masks.block_causal, _at_most, True),
    "ranges": Kind(_ends, masks.ranges, _between),
    "prefix": Kind(_prefixes, masks.prefix, _within_prefix),
    "chunked": Kind(lambda case, rng: (), lambda: masks.chunked(CHUNK), _same_chunk),
    "window": Kind(_sides, masks.window, _within_window),
    "function": Kind(_tree, _function, _function_seen, of_pairs=True),
    "intervals": Kind(_triples, masks.intervals, _in_any, of_pairs=True),
    "images": Kind(_images, _causal_but_for_images, _image_seen, of_pairs=True),
    "holes": Kind(_ends, _holes, lambda case, ends: ~_between(case, ends), of_pairs=True),
}


def value(arrays: Mapping[str, Arrays]) -> masks.Mask | None:
    """The mask value of arrays by the names of their kinds."""
    each = [KINDS[name].value(*x) for name, x in arrays.items()]
    return functools.reduce(operator.and_, each) if each else None
