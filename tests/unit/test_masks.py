"""Masks resolve to the pairs that they mean, and attention sees these."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fa4_jax import attention, masks
from fa4_jax.api import Call, canonicalise
from fa4_jax.masks import table
from fa4_jax.operands import RowRanges
from fa4_jax.xla import blockwise
from tests import example_counts
from tests.default_paths import PATHS, blocks_of, forced
from tests.mask_cases import Meant, meanings

B, N, K, H = 2, 4, 2, 8
SEEDS = st.integers(0, 2**32 - 1)
several = settings(
    max_examples=example_counts.count(12),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    database=None,
)
NAMES = tuple(meanings(np.random.default_rng(0), 1, 3, 3))


def operands(rng: np.random.Generator, t: int, s: int, dtype: Any = jnp.float32) -> list[Any]:
    shapes = ((B, t, N, H), (B, s, K, H), (B, s, K, H))
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def of_ranges(rows: RowRanges, keys: int) -> np.ndarray:
    j = np.arange(keys)
    low, high = (np.asarray(x)[:, :, None] for x in (rows.low, rows.high))
    return (low <= j) & (j < high)


def of_tags(rows: RowRanges) -> np.ndarray:
    assert rows.tags is not None
    low, high = (np.asarray(x)[:, :, None] for x in (rows.tags.query_low, rows.tags.query_high))
    tags = np.asarray(rows.tags.key)[:, None, :]
    return (low <= tags) & (tags <= high)


@several
@given(SEEDS, st.sampled_from([(1, 1), (5, 3), (20, 33), (300, 150)]))
def test_rows_are_what_the_masks_mean(seed: int, sizes: tuple[int, int]):
    """Ranges and tags, with the window of numbers; and a tile without a flag needs no tags."""
    t, s = sizes
    rng = np.random.default_rng(seed)
    q, k, v = operands(rng, t, s)
    for name, meant in meanings(rng, B, t, s).items():
        found, problem = canonicalise(Call(q, k, v, **meant.arguments))
        rows = found.rows
        assert rows is not None and problem.has_ranges
        ranges = of_ranges(rows, s)
        i, j = np.arange(t)[:, None], np.arange(s)
        distance = j - i - np.asarray(found.extents)[:, 2, None, None]
        band = (distance >= -problem.window[0]) & (distance <= problem.window[1])
        seen = ranges if rows.tags is None else ranges & of_tags(rows)
        np.testing.assert_array_equal(np.broadcast_to(seen & band, (B, t, s)), meant.seen, name)
        check_table(rows)
        if rows.tags is not None:
            needs_tags = (ranges != seen).any(2)
            tiles = np.pad(needs_tags, ((0, 0), (0, -t % table.TILE_ROWS)))
            tiles = tiles.reshape(len(tiles), -1, table.TILE_ROWS).any(2)
            np.testing.assert_array_equal(np.asarray(rows.tags.tiles) >= tiles, True, name)


def check_table(rows: RowRanges) -> None:
    low, high = np.asarray(rows.low), np.asarray(rows.high)
    for b in range(len(low)):
        for tile, entry in enumerate(np.asarray(rows.table[b]).tolist()):
            own = slice(tile * table.TILE_ROWS, (tile + 1) * table.TILE_ROWS)
            seen = low[b, own] < high[b, own]
            lows, highs = low[b, own][seen], high[b, own][seen]
            expected = [lows.min(), highs.max(), lows.max(), highs.min()] if len(lows) else [0] * 4
            if 0 < len(lows) < len(seen):  # A row sees nothing, so no key is seen by all.
                expected[2] = highs.max()
            assert entry == expected


def test_runs_of_ids_need_no_tags(rng: np.random.Generator):
    ids = np.repeat([4, 1, -1, 9], [100, 30, 25, 45])[None].astype(np.int32)
    q = jnp.zeros((1, 200, 1, 8))
    found, _ = canonicalise(Call(q, q, q, segment_ids=ids))
    assert found.rows is not None and found.rows.tags is not None
    assert not np.asarray(found.rows.tags.tiles).any()
    np.testing.assert_array_equal(
        of_ranges(found.rows, 200), (ids[:, None] == ids[..., None]) & (ids[:, None] >= 0)
    )
    back = np.where(np.arange(200) < 190, ids, 4)
    found, _ = canonicalise(Call(q, q, q, segment_ids=back))
    assert found.rows is not None and found.rows.tags is not None
    np.testing.assert_array_equal(found.rows.tags.tiles, [[1, 1]])


@pytest.fixture(scope="module", params=PATHS)
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """Makes the default path run one block, or many."""
    with forced(request.param, block=16):
        yield request.param


def everything(q: Any, k: Any, v: Any, bars: Any, **arguments: Any) -> Any:
    """Returns output, log-sum-exp and three gradients."""

    is_causal = arguments.pop("is_causal", False)

    @jax.jit
    def run(arrays: Any, arguments: Any) -> Any:
        def forward(*x: Any) -> Any:
            return attention(*x, return_residual=True, is_causal=is_causal, **arguments)

        results, pull_back = jax.vjp(forward, *arrays)
        return *results, *pull_back(bars)

    return run((q, k, v), arguments)


@pytest.mark.parametrize("name", NAMES)
def test_attention_sees_what_is_meant(name: str, path: str, seed: int):
    """Against the same pairs as a dense mask; masks and ids are traced."""
    rng = np.random.default_rng(seed)
    t, s = 50, 70
    meant: Meant = meanings(rng, B, t, s)[name]
    q, k, v = operands(rng, t, s)
    bars = jnp.asarray(rng.normal(size=q.shape)), jnp.asarray(rng.normal(size=(B, N, t)))
    bars = tuple(x.astype(jnp.float32) for x in bars)
    actual = everything(q, k, v, bars, **meant.arguments)
    expected = everything(q, k, v, bars, mask=jnp.asarray(meant.seen[:, None]))
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=2e-5, err_msg=path)


@several
@given(SEEDS, st.sampled_from([(20, 33), (300, 150)]), st.sampled_from(NAMES))
def test_every_block_that_holds_a_seen_pair_is_visited(
    seed: int, sizes: tuple[int, int], name: str
):
    t, s = sizes
    rng = np.random.default_rng(seed)
    meant = meanings(rng, B, t, s)[name]
    operand = jnp.zeros((B, t, 1, 8)), *(jnp.zeros((B, s, 1, 8)),) * 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blockwise, "block_sizes", blocks_of(16))
        found, problem = canonicalise(Call(*operand, **meant.arguments))
        grid = blockwise.make_grid(problem, found)
    rows, keys = grid.tiling.rows, grid.tiling.keys
    padded = np.zeros((B, rows.size * rows.count, keys.size * keys.count), bool)
    padded[:, :t, :s] = meant.seen
    blocks = padded.reshape(B, rows.count, rows.size, keys.count, keys.size)
    seen: np.ndarray = np.any(blocks, axis=(0, 2, 4))
    for block in range(rows.count):
        met = grid.row_range(jnp.uint32(block))
        lo, hi = int(met.lo), int(met.hi)
        assert not seen[block, :lo].any() and not seen[block, hi:].any()
        if name in ("packed", "prefix") and not seen[block].any():
            assert lo >= hi


@several
@given(SEEDS, st.booleans())
def test_packing_equals_separate_calls(seed: int, is_causal: bool):
    """Documents of one row, each by its own call; gradients, too."""
    rng = np.random.default_rng(seed)
    lengths = [3, 17, 20, 10]
    total = sum(lengths)
    q, k, v = (x[:1] for x in operands(rng, total, total))
    ids = np.repeat(np.arange(len(lengths)), lengths)[None].astype(np.int32)
    bar = jnp.asarray(rng.normal(size=q.shape), jnp.float32)

    def gradients(*x: Any, **options: Any) -> Any:
        bar, *arrays = x
        output, pull_back = jax.vjp(
            lambda *y: attention(*y, is_causal=is_causal, **options), *arrays
        )
        return output, *pull_back(bar)

    whole = gradients(bar, q, k, v, segment_ids=ids)
    ends = np.cumsum(lengths)
    parts = [
        gradients(*(x[:, end - size : end] for x in (bar, q, k, v)))
        for size, end in zip(lengths, ends, strict=True)
    ]
    for x, *separate in zip(whole, *parts, strict=True):
        np.testing.assert_allclose(x, jnp.concatenate(separate, axis=1), rtol=1e-4, atol=2e-5)


def test_a_tile_table_is_the_mask_that_it_was_made_of(path: str, rng: np.random.Generator):
    t, s = 50, 70
    q, k, v = operands(rng, t, s)
    bars = jnp.ones_like(q), jnp.ones((B, N, t))
    for name in ("prefix", "three kinds of ids", "packed, causal"):
        arguments = dict(meanings(rng, B, t, s)[name].arguments)
        kept = {x: arguments[x] for x in ("is_causal", "query_offset") if x in arguments}
        given_mask, ids = arguments.get("mask"), arguments.get("segment_ids")
        made = masks.tile_table(
            given_mask, q, k, segment_ids=ids, query_offset=kept.get("query_offset", 0)
        )
        for x, y in zip(
            everything(q, k, v, bars, **arguments),
            everything(q, k, v, bars, mask=made, **kept),
            strict=True,
        ):
            np.testing.assert_array_equal(x, y, f"{name}, {path}")


def test_one_sequence_drops_the_batch_axis(rng: np.random.Generator):
    q, k, v = (x[0] for x in operands(rng, 50, 70))
    for name, meant in meanings(rng, 1, 50, 70).items():
        if "prefix" in name:
            continue  # one number a batch entry
        alone = jax.tree.map(lambda x: x[0] if np.ndim(x) == 2 else x, meant.arguments)
        expected = attention(q, k, v, mask=jnp.asarray(meant.seen[:, None]))
        np.testing.assert_allclose(attention(q, k, v, **alone), expected, rtol=1e-4, atol=1e-5)
