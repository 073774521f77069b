"""Tiles in the order in which kernels take them, against a count of what each visits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4_jax import bands
from fa4_jax.masks import order, table
from fa4_jax.operands import RowRanges
from tests import example_counts

WINDOWS = (bands.EVERYTHING, bands.CAUSAL, (40, 0), (0, 30))
few = settings(max_examples=example_counts.count(40), deadline=None, database=None)


def make_rows(rng: np.random.Generator, batch: int, t: int, s: int) -> RowRanges:
    """Ranges of documents cut anywhere, some of whose rows see nothing."""
    cuts = np.sort(rng.integers(0, s, (batch, 4)), axis=1)
    edges = np.concatenate([np.zeros((batch, 1), int), cuts, np.full((batch, 1), s)], axis=1)
    document = np.sort(rng.integers(0, 5, (batch, t)), axis=1)
    low, high = (np.take_along_axis(edges, document + k, axis=1) for k in (0, 1))
    seen = (low < high) & (rng.random((batch, t)) < 0.9)
    low, high = (jnp.asarray(np.where(seen, x, 0), jnp.int32) for x in (low, high))
    return RowRanges(low, high, table.limits(low, high))


@few
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([(200, 300), (1, 5), (513, 129), (384, 384)]),
    st.sampled_from([64, 128, 192, 256]),
    st.sampled_from(WINDOWS),
    st.booleans(),
)
def test_the_longest_tiles_come_first(
    seed: int, lengths: tuple[int, int], size: int, window: bands.Window, shared: bool
) -> None:
    rng, (t, s), batch = np.random.default_rng(seed), lengths, 2
    rows = make_rows(rng, 1 if shared else batch, t, s)
    offset = rng.integers(-5, s, batch)
    used = rng.integers(0, t + 1, batch), rng.integers(0, s + 1, batch)
    extents = jnp.asarray(np.stack([*used, offset, 0 * offset], axis=1), jnp.int32)
    i, j = np.arange(t)[:, None], np.arange(s)
    queries, keys, distance = (np.asarray(extents)[:, k, None, None] for k in range(3))
    low, high = (np.asarray(x)[..., None] for x in (rows.low, rows.high))
    seen = (low <= j) & (j < high) & (i < queries) & (j < keys)
    seen &= (i + distance - window[0] <= j) & (j <= i + distance + window[1])

    def ordered(found: jax.Array, count: int) -> np.ndarray:
        assert found.shape == (1 if shared else batch, count) and found.dtype == jnp.int32
        np.testing.assert_array_equal(
            np.sort(found, axis=1), np.arange(count)[None].repeat(len(found), axis=0)
        )
        return np.asarray(found)

    hulls = np.zeros((batch, -(-t // size)), int)
    for b, tile in np.ndindex(*hulls.shape):
        (met,) = np.nonzero(seen[b, tile * size : (tile + 1) * size].any(0))
        hulls[b, tile] = met[-1] + 1 - met[0] if len(met) else 0
    hulls = hulls.sum(0, keepdims=True) if shared else hulls
    found = ordered(order.of_queries(rows, window, extents, size), hulls.shape[1])
    assert (np.diff(np.take_along_axis(hulls, found, axis=1)) <= 0).all()
    ordered(order.of_keys(rows, window, extents, order.Tiles(size, s)), -(-s // size))


def test_a_document_s_first_keys_come_first():
    """Of two causal documents the longer one's keys are visited by more rows, its first by most."""
    ids = np.repeat([0, 1], [256, 768])
    low = jnp.asarray(np.where(ids == 0, 0, 256)[None], jnp.int32)
    high = jnp.asarray(np.where(ids == 0, 256, 1024)[None], jnp.int32)
    rows = RowRanges(low, high, table.limits(low, high))
    extents = jnp.array([[1024, 1024, 0, 0]], jnp.int32)
    found = order.of_keys(rows, bands.CAUSAL, extents, order.Tiles(128, 1024))
    np.testing.assert_array_equal(found, [[2, 3, 4, 5, 0, 6, 1, 7]])
    found = order.of_queries(rows, bands.CAUSAL, extents, 128)
    np.testing.assert_array_equal(found, [[7, 6, 5, 4, 1, 3, 0, 2]])
