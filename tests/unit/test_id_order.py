"""Which keys have ids at most a row's: by definition, for any int32."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4_jax.masks import id_order
from tests import example_counts

INT32 = np.iinfo(np.int32)
ENDS = st.sampled_from([INT32.min, INT32.min + 1, -1, 0, 1, INT32.max - 1, INT32.max])
IDS = ENDS | st.integers(0, 6) | st.integers(INT32.min, INT32.max)
hull = jax.jit(id_order.hull)


@st.composite
def ids(draw: st.DrawFn, length: int) -> np.ndarray:
    """Ids [1, length] in runs; of some calls in order, as most are, with padding at the end."""
    runs = draw(st.lists(st.tuples(IDS, st.integers(1, 9)), min_size=1, max_size=12))
    each, counts = (np.array(x, np.int64) for x in zip(*runs, strict=True))
    found = np.repeat(each, counts)
    found = np.pad(found, (0, max(0, length - len(found))), mode="edge")[:length]
    if draw(st.booleans()):
        found = np.sort(found)
        found = np.concatenate([found[found >= 0], found[found < 0]])
    return found[None].astype(np.int32)


@settings(max_examples=example_counts.count(300), deadline=None, database=None)
@given(ids(40), ids(50), st.booleans())
def test_a_row_sees_the_keys_between_the_ends_of_its_hull(
    rows: np.ndarray, keys: np.ndarray, same: bool
):
    check(keys if same else rows, keys)


@pytest.mark.parametrize("length", [1, 16, 17, 255, 256, 4097])
@pytest.mark.parametrize("kind", ["in order", "valley", "any order"])
def test_keys_of_several_levels(length: int, kind: str):
    random = np.random.default_rng(length)
    keys = np.sort(random.integers(-3, 40, length))
    if kind == "valley":
        keys = np.concatenate([keys[::-2], keys[length % 2 :: 2]])
    if kind == "any order":
        random.shuffle(keys[length // 3 : length // 2 + 2])
    check(random.integers(-1, 41, (1, 99)).astype(np.int32), keys[None].astype(np.int32))


def check(query: np.ndarray, keys: np.ndarray) -> None:
    """Compares the hull of rows and keys, [1, T] and [1, S], with all pairs."""
    low, high, complete = (np.asarray(x)[0] for x in hull(query, keys))
    seen = (keys[0] >= 0) & (keys[0] <= query[0, :, None])
    for row, sees in enumerate(seen):
        (found,) = np.nonzero(sees)
        expected = (found[0], found[-1] + 1) if len(found) else (0, 0)
        assert (low[row], high[row]) == expected
        assert complete[row] == sees[low[row] : high[row]].all()


def test_a_batch_of_one_meets_every_row_of_a_batch():
    key = np.array([[2, 0, 1, -1, 3]], np.int32)
    query = np.array([[0, 1, 2, 3], [-1, 4, 0, 1]], np.int32)
    low, high, complete = (np.asarray(x) for x in hull(query, key))
    np.testing.assert_array_equal(low, [[1, 1, 0, 0], [0, 0, 1, 1]])
    np.testing.assert_array_equal(high, [[2, 3, 3, 5], [0, 5, 2, 3]])
    np.testing.assert_array_equal(complete, [[True, True, True, False], [True, False, True, True]])
