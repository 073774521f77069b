"""Packed bits and their states say what a mask says, pair by pair."""

from __future__ import annotations

from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4_jax import masks
from fa4_jax.api import Call, canonicalise
from fa4_jax.masks import bits
from fa4_jax.operands import MaskBits
from tests import example_counts

SEEDS = st.integers(0, 2**32 - 1)


def bools(found: MaskBits, t: int, s: int) -> np.ndarray:
    """The pairs that the words say, bool [B, N, T, S]."""
    words = np.asarray(found.words).view(np.uint32)
    b, n, tiles, width, rows = words.shape
    each = (words[..., None] >> np.arange(32, dtype=np.uint32)) & 1
    each = each.transpose(0, 1, 2, 4, 3, 5).reshape(b, n, tiles * rows, width * 32)
    assert not each[:, :, t:].any() and not each[..., s:].any()
    return each[:, :, :t, :s] != 0


def boxes(seen: np.ndarray, fill: bool) -> np.ndarray:
    """The pairs in boxes of 64 rows and 16 keys, keys past the end unseen."""
    b, n, t, s = seen.shape
    rows = ((0, 0), (0, 0), (0, -t % 64), (0, 0))
    seen = np.pad(seen, rows, constant_values=fill)
    seen = np.pad(seen, ((0, 0), (0, 0), (0, 0), (0, -s % 512)))
    return seen.reshape(b, n, -(-t // 64), 64, -(-s // 512) * 32, 16)


@settings(max_examples=example_counts.count(8), deadline=None, database=None)
@given(
    SEEDS,
    st.sampled_from([(1, 1), (64, 512), (65, 513), (128, 384), (130, 40), (200, 700)]),
    st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 3)]),
    st.sampled_from([0.0, 0.02, 0.98, 1.0]),
)
def test_bits_are_the_mask(seed: int, sizes: tuple[int, int], lead: tuple[int, int], share: float):
    rng = np.random.default_rng(seed)
    coarse = rng.random((*lead, -(-sizes[0] // 50), -(-sizes[1] // 30))) < share
    seen = np.repeat(np.repeat(coarse, 50, 2), 30, 3)[:, :, : sizes[0], : sizes[1]]
    found = bits.pack(bits.Dense(jnp.asarray(seen)), *sizes)
    np.testing.assert_array_equal(bools(found, *sizes), seen)
    some, every = (np.asarray(bits.split_states(x)) for x in (found.some, found.every))
    np.testing.assert_array_equal(some, boxes(seen, False).any((3, 5)))
    np.testing.assert_array_equal(every, boxes(seen, True).all((3, 5)))


@pytest.mark.parametrize("shape", [(64, 128), (63, 128), (64, 127), (1, 128), (64, 1)])
def test_only_an_array_of_whole_boxes_is_read_eight_at_a_time(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
):
    """One that is padded or broadcasts does not lie in memory as it is packed."""
    seen = np.random.default_rng(0).random((1, 2, *shape)) < 0.5
    sizes = [full if size == 1 else size for size, full in zip(shape, (64, 128), strict=True)]
    joined = mock.Mock(side_effect=bits._joined_in_memory)
    monkeypatch.setattr(bits, "_joined_in_memory", joined)
    found = bits.pack(bits.Dense(jnp.asarray(seen)), *sizes)
    np.testing.assert_array_equal(bools(found, *sizes), np.broadcast_to(seen, (1, 2, *sizes)))
    assert joined.called == (shape == (64, 128))


def test_blocks_of_rows_are_made_one_after_the_other(monkeypatch: pytest.MonkeyPatch):
    """A function's bits, in blocks of one tile and of all; and no array of all pairs is made."""
    q, k = jnp.zeros((2, 200, 2, 8)), jnp.zeros((2, 300, 2, 8))
    table = jnp.arange(300) % 7
    mask = masks.function(lambda b, h, q, k, x: (q + h * 3 - k + b) % 5 < x[k] // 2, table)
    operands, problem = canonicalise(Call(q, k, k, mask=mask, query_offset=3))
    assert problem.has_mask and operands.pairs is not None

    def pack(pairs: Any) -> MaskBits:
        return bits.pack(pairs, 200, 300)

    whole = jax.jit(pack)(operands.pairs)
    b, h, i, j = np.ogrid[:2, :2, 3:203, :300]
    np.testing.assert_array_equal(bools(whole, 200, 300), (i + h * 3 - j + b) % 5 < (j % 7) // 2)
    monkeypatch.setattr(bits, "PAIRS_AT_ONCE", 1)
    jax.clear_caches()
    jax.tree.map(np.testing.assert_array_equal, jax.jit(pack)(operands.pairs), whole)
    temporary = jax.jit(pack).lower(operands.pairs).compile().memory_analysis()
    assert temporary is not None and temporary.temp_size_in_bytes < 2 * 2 * 200 * 300


def test_a_mask_that_heads_share_is_held_once():
    q, k = jnp.zeros((2, 100, 4, 8)), jnp.zeros((2, 130, 4, 8))
    for fn, lead in (
        (lambda b, h, q, k: q >= k, (1, 1)),
        (lambda b, h, q, k: q >= k + h, (1, 4)),
        (lambda b, h, q, k: q >= k + b, (2, 1)),
    ):
        operands, _ = canonicalise(Call(q, k, k, mask=masks.function(fn)))
        found = bits.of_operands(operands)
        assert found is not None and found.words.shape == (*lead, 2, 8, 64)
        assert found.some.shape == found.every.shape == (*lead, 2, 1)


def test_states_of_a_group_are_those_of_its_heads(rng: np.random.Generator):
    seen = rng.random((1, 4, 64, 512)) < np.array([0.0, 0.01, 1.0, 0.9])[:, None, None]
    found = bits.pack(bits.Dense(jnp.asarray(seen)), 64, 512)
    grouped = bits.of_groups(found, 2)
    some, every = (np.asarray(bits.split_states(x)) for x in (grouped.some, grouped.every))
    expected = boxes(seen, False).reshape(1, 2, 2, 1, 64, 32, 16)
    np.testing.assert_array_equal(some, expected.any((2, 4, 6)))
    np.testing.assert_array_equal(every, expected.all((2, 4, 6)))
    assert bits.of_groups(found, 4) is found


def test_tables_and_orders_follow_the_bits():
    """A function's window: the table's visits lie within it, and the tiles of most visits lead."""
    t, s = 700, 900
    q, k = jnp.zeros((2, t, 2, 8)), jnp.zeros((2, s, 2, 8))
    mask = masks.function(lambda b, h, q, k: (k <= q + 40 * b) & (k >= q - 200) & (q >= 128))
    operands, _ = canonicalise(Call(q, k, k, mask=mask, query_offset=100))
    found = bits.of_operands(operands)
    assert found is not None
    whole = jnp.tile(jnp.array([0, s, 0, s], jnp.int32), (1, 6, 1))
    b, i, j = np.ogrid[:2, :t, :s]
    seen = (j <= i + 100 + 40 * b) & (j >= i - 100) & (i >= 28)
    for batch, entries in enumerate(np.asarray(bits.narrowed(whole, found)).tolist()):
        for tile, (low, high, most_low, least_high) in enumerate(entries):
            keys = np.flatnonzero(seen[batch, tile * 128 : (tile + 1) * 128].any(0))
            assert low == keys.min() // 16 * 16 and high == min(keys.max() // 16 * 16 + 16, s)
            assert (most_low, least_high) == (0, s)
    none = np.asarray(bits.narrowed(whole.at[:, :, 0].set(500), found))
    assert not none[0, 0].any() and none[0, 5].any()

    padded = np.pad(seen, ((0, 0), (0, -t % 192), (0, -s % 128)))
    split = padded.reshape(2, -1, 64, padded.shape[2] // 16, 16)
    boxes: np.ndarray = np.asarray(split.any((2, 4)))
    of_rows = boxes.reshape(2, -1, 3, boxes.shape[2]).sum((2, 3))
    np.testing.assert_array_equal(bits.keys_of_tiles(found, 192), of_rows * 16 // 3)
    of_keys = boxes.reshape(2, boxes.shape[1], -1, 8).sum((1, 3))
    np.testing.assert_array_equal(bits.rows_of_tiles(found, 128, 8), of_keys * 64 // 8)


def test_too_many_bits_are_refused():
    length = 2**17
    q = jax.ShapeDtypeStruct((1, length, 2, 8), jnp.bfloat16)

    def pack(q: Any, fn: Any) -> Any:
        operands, _ = canonicalise(Call(q, q, q, mask=masks.function(fn)))
        return bits.of_operands(operands)

    with pytest.raises(NotImplementedError, match=r"2147483648 bytes.*segment_ids.*ranges"):
        jax.eval_shape(lambda q: pack(q, lambda b, h, q, k: q >= k), q)
    half = jax.ShapeDtypeStruct((1, length // 2, 2, 8), jnp.bfloat16)
    found = jax.eval_shape(lambda q: pack(q, lambda b, h, q, k: q >= k), half)
    assert found.words.shape == (1, 1, 1024, 2048, 64)
