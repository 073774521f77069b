"""Masks of `fa4_jax.masks` beside what they mean, pair by pair, in NumPy."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from fa4_jax import masks

INT32 = np.iinfo(np.int32)


@dataclasses.dataclass(frozen=True)
class Meant:
    """Arguments of `attention`, and which row sees which key by them, bool [B, T, S]."""

    arguments: dict[str, Any]
    seen: np.ndarray


def equal(query: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Ids that are equal and not negative."""
    return (query[:, :, None] == key[:, None, :]) & (key[:, None, :] >= 0)


def at_most(query: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Key's id <= row's, none negative."""
    return (query[:, :, None] >= key[:, None, :]) & (key[:, None, :] >= 0)


def between(low: np.ndarray, high: np.ndarray, keys: int) -> np.ndarray:
    """low <= j < high."""
    j = np.arange(keys)
    return (low[:, :, None] <= j) & (j < high[:, :, None])


def packed(rng: np.random.Generator, batch: int, length: int) -> np.ndarray:
    """Ids of segments of random lengths, one after the other, with padding at the end."""
    most = max(1, length // 3)
    ids = np.sort(rng.integers(0, rng.integers(1, most + 1), (batch, length)), axis=1)
    ids[:, length - int(rng.integers(0, most)) :] = -1
    return ids.astype(np.int32)


def scattered(rng: np.random.Generator, batch: int, length: int) -> np.ndarray:
    """Few ids in any order, some of them negative."""
    return rng.integers(-2, 5, (batch, length)).astype(np.int32)


def anything(rng: np.random.Generator, batch: int, length: int) -> np.ndarray:
    """Any int32, the ends of the type and neighbours of the lengths among them."""
    few = [INT32.min, INT32.min + 1, -1, 0, 1, length - 1, length, INT32.max - 1, INT32.max]
    random = rng.integers(INT32.min, INT32.max, (batch, length), endpoint=True)
    return np.where(
        rng.random((batch, length)) < 0.8, rng.choice(few, (batch, length)), random
    ).astype(np.int32)


def meanings(rng: np.random.Generator, batch: int, t: int, s: int) -> dict[str, Meant]:
    """One random example of every kind of mask and of their compositions."""
    i, j = np.arange(t)[None, :, None], np.arange(s)[None, None, :]
    offset, size = int(rng.integers(-s, s + 1)), int(rng.integers(1, s + 2))
    own, others = (packed(rng, batch, length) for length in (t, s))
    mixed = scattered(rng, batch, t), scattered(rng, batch, s)
    wild = anything(rng, batch, t), anything(rng, batch, s)
    shared = scattered(rng, 1, t), scattered(rng, 1, s)
    low, high = anything(rng, batch, t), anything(rng, batch, t)
    lengths = rng.integers(-3, s + 3, batch).astype(np.int32)
    left, right = (int(x) for x in rng.integers(0, s + 1, 2))
    positions = rng.integers(-2, 3 * size, (batch, t)), rng.integers(-2, 3 * size, (batch, s))
    chunks = tuple(x // size for x in positions)
    causal = j <= i + offset
    found = {
        "packed": Meant({"segment_ids": (own, others)}, equal(own, others)),
        "packed, causal": Meant(
            {"segment_ids": (own, others), "is_causal": True, "query_offset": offset},
            equal(own, others) & causal,
        ),
        "ids come back": Meant({"segment_ids": mixed}, equal(*mixed)),
        "any ids": Meant({"segment_ids": wild}, equal(*wild)),
        "block causal": Meant({"mask": masks.block_causal(own, others)}, at_most(own, others)),
        "block causal, unsorted": Meant({"mask": masks.block_causal(*wild)}, at_most(*wild)),
        "block causal in segments": Meant(
            {"mask": masks.block_causal(*mixed), "segment_ids": (own, others)},
            at_most(*mixed) & equal(own, others),
        ),
        "three kinds of ids": Meant(
            {"mask": masks.segments(*shared) & masks.block_causal(*mixed), "segment_ids": wild},
            equal(*shared) & at_most(*mixed) & equal(*wild),
        ),
        "ranges": Meant({"mask": masks.ranges(low, high)}, between(low, high, s)),
        "ranges, segments": Meant(
            {"mask": masks.ranges(low, high), "segment_ids": mixed},
            between(low, high, s) & equal(*mixed),
        ),
        "prefix": Meant(
            {"mask": masks.prefix(lengths), "query_offset": offset},
            (j < lengths[:, None, None]) | causal,
        ),
        "chunks": Meant(
            {"mask": masks.chunked(size), "query_offset": offset, "is_causal": True},
            ((i + offset) // size == j // size) & causal,
        ),
        "chunks of positions in segments": Meant(
            {"mask": masks.chunked(size, positions), "segment_ids": (own, others)},
            equal(*chunks) & equal(own, others),
        ),
        "window": Meant(
            {"mask": masks.window(np.asarray(left), np.asarray(right)), "query_offset": offset},
            (j >= i + offset - left) & (j <= i + offset + right),
        ),
        "window of ints": Meant(
            {"mask": masks.window(left, None) & masks.ranges(low, high), "query_offset": offset},
            (j >= i + offset - left) & between(low, high, s),
        ),
    }
    return {
        name: Meant(x.arguments, np.broadcast_to(x.seen, (batch, t, s)))
        for name, x in found.items()
    }
