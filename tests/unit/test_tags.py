"""Where the keys lie whose tags a row takes: by definition, for any int32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4_jax.masks import tags
from fa4_jax.masks.tags import Ids, Intervals
from tests import example_counts

INT32 = np.iinfo(np.int32)
ENDS = st.sampled_from([INT32.min, INT32.min + 1, -1, 0, 1, 63, 64, 65, INT32.max - 1, INT32.max])
IDS = ENDS | st.integers(0, 6) | st.integers(INT32.min, INT32.max)
RUNS = st.lists(st.tuples(IDS, st.integers(1, 9)), min_size=1, max_size=12)
hull = jax.jit(lambda query, key: tags.hull(tags.intervals([Ids(query, key)], None)))


def unrolled(runs: list[tuple[int, int]], length: int) -> np.ndarray:
    """Ids of runs (id, length), the last one repeated, [1, length]."""
    ids, counts = (np.array(x, np.int64) for x in zip(*runs, strict=True))
    ids = np.repeat(ids, counts)
    ids = np.pad(ids, (0, max(0, length - len(ids))), mode="edge")[:length]
    return ids[None].astype(np.int32)


@settings(max_examples=example_counts.count(200), deadline=None, database=None)
@given(RUNS, RUNS, st.booleans())
def test_the_keys_of_a_row_lie_in_its_hull(
    rows: list[tuple[int, int]], keys: list[tuple[int, int]], same: bool
):
    key = unrolled(keys, 50)
    query = key if same else unrolled(rows + keys, 40)
    low, high, complete = (np.asarray(x)[0] for x in hull(query, key))
    seen = (query[0, :, None] == key[0]) & (key[0] >= 0)
    slots = {slot_of(x) for x in np.unique(key[key >= 0])}
    shared_slots = len(slots) < len(np.unique(key[key >= 0]))
    for row in range(query.shape[1]):
        (found,) = np.nonzero(seen[row])
        hidden = seen[row].copy()
        hidden[low[row] : high[row]] = False
        assert not hidden.any()
        if complete[row]:
            assert seen[row, low[row] : high[row]].all()
        if not shared_slots and len(found):
            runs = np.count_nonzero(np.diff(found) > 1) + 1
            expected = found[0], found[-1] + 1, runs == 1
            assert (low[row], high[row], complete[row]) == expected
        if query[0, row] < 0:
            assert low[row] == high[row] == 0


def slot_of(tag: np.int32) -> int:
    """Slot of a tag among 50 keys."""
    return int(tags._hash(jnp.array([tag]), 6)[0])  # pyright: ignore[reportPrivateUsage]


@settings(max_examples=example_counts.count(100), deadline=None, database=None)
@given(st.lists(IDS, min_size=1, max_size=60, unique=True), st.integers(1, 31))
def test_small_tags_have_slots_of_their_own(ids: list[int], bits: int):
    given_ids = np.array(ids, np.int32)
    slots = np.asarray(tags._hash(jnp.asarray(given_ids), bits))  # pyright: ignore[reportPrivateUsage]
    assert ((slots >= 0) & (slots < 1 << bits)).all()
    small = (given_ids >= 0) & (given_ids < 1 << bits)
    np.testing.assert_array_equal(slots[small], given_ids[small])


def test_tags_that_share_a_slot_are_compared():
    """The hull of each is that of both, and not complete."""
    ids = np.arange(1, 4000, dtype=np.int32) * 64
    slots = np.asarray(tags._hash(jnp.asarray(ids), 6))  # pyright: ignore[reportPrivateUsage]
    first, second = ids[slots == slots[0]][:2]
    key = np.repeat(np.array([first, 5, second], np.int32), [20, 10, 20])[None]
    low, high, complete = (np.asarray(x)[0] for x in hull(key, key))
    np.testing.assert_array_equal(low, np.where(key[0] == 5, 20, 0))
    np.testing.assert_array_equal(high, np.where(key[0] == 5, 30, 50))
    np.testing.assert_array_equal(complete, key[0] == 5)


def test_a_batch_of_one_meets_every_row_of_a_batch():
    key = unrolled([(3, 10), (1, 10)], 20)
    query = np.concatenate([key, unrolled([(1, 5), (7, 15)], 20)])
    rows, keys = jnp.asarray(query), jnp.asarray(key)
    low, high, complete = (np.asarray(x) for x in tags.hull(Intervals(rows, rows, keys, None)))
    np.testing.assert_array_equal(low, np.where(query == 1, 10, 0))
    np.testing.assert_array_equal(high, np.select([query == 3, query == 1], [10, 20], 0))
    assert complete.all()
