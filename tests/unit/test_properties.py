"""Tests what attention is, whatever computes it (the default path here)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fa4_jax import attention, lse
from tests import example_counts

# Shapes come from a short list, so that most examples reuse a compiled program.
SIZES = st.sampled_from([(1, 1), (3, 8), (17, 5), (40, 70)])
HEADS = st.sampled_from([(2, 2), (4, 1)])
SEEDS = st.integers(0, 2**32 - 1)
MASKS = st.sampled_from([{}, {"is_causal": True, "query_offset": 3}, {"local_window_size": (4, 6)}])
several = settings(
    max_examples=example_counts.count(25),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    database=None,
)


def operands(seed: int, sizes: tuple[int, int], heads: tuple[int, int]) -> list[jax.Array]:
    rng = np.random.default_rng(seed)
    rows, keys = (2, sizes[0], heads[0], 8), (2, sizes[1], heads[1], 8)
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in (rows, keys, keys)]


def close(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-5)


@several
@given(SEEDS, SIZES, HEADS, MASKS)
def test_rows_sum_to_one_or_see_nothing(seed, sizes, heads, mask):
    q, k, v = operands(seed, sizes, heads)
    output, total = attention(q, k, jnp.ones_like(v), return_residual=True, **mask)
    sums = jnp.broadcast_to(jnp.isfinite(total).transpose(0, 2, 1)[..., None], output.shape)
    close(output, sums)


@several
@given(SEEDS, SIZES, HEADS)
def test_keys_may_come_in_any_order(seed, sizes, heads):
    q, k, v = operands(seed, sizes, heads)
    order = np.random.default_rng(seed).permutation(sizes[1])
    for a, b in zip(
        attention(q, k, v, return_residual=True),
        attention(q, k[:, order], v[:, order], return_residual=True),
        strict=True,
    ):
        close(b, a)


@several
@given(SEEDS, SIZES, HEADS, MASKS)
def test_heads_do_not_meet(seed, sizes, heads, mask):
    q, k, v = operands(seed, sizes, heads)
    output = attention(q, k, v, **mask)
    group = heads[0] // heads[1]
    for head in range(heads[0]):
        own = slice(head // group, head // group + 1)
        alone = attention(q[:, :, head : head + 1], k[:, :, own], v[:, :, own], **mask)
        close(output[:, :, head : head + 1], alone)


@several
@given(SEEDS, SIZES, HEADS, MASKS, st.floats(0, 1))
def test_split_keys_merge_to_the_whole(seed, sizes, heads, mask, fraction):
    q, k, v = operands(seed, sizes, heads)
    cut = int(fraction * sizes[1])
    left = attention(q, k[:, :cut], v[:, :cut], return_residual=True, **mask)
    rest = dict(mask) | {"query_offset": mask.get("query_offset", 0) - cut}
    right = attention(q, k[:, cut:], v[:, cut:], return_residual=True, **rest)
    whole = attention(q, k, v, return_residual=True, **mask)
    for merged, expected in zip(lse.merge(*left, *right), whole, strict=True):
        close(merged, expected)


def test_gradients_flow_through_a_merge(rng: np.random.Generator):
    q, k, v = operands(int(rng.integers(2**32)), (17, 40), (4, 2))

    def halves(q, k, v):
        parts = [
            attention(q, x, y, return_residual=True)
            for x, y in zip(jnp.split(k, 2, 1), jnp.split(v, 2, 1), strict=True)
        ]
        return lse.merge(*parts[0], *parts[1])

    def whole(q, k, v):
        return attention(q, k, v, return_residual=True)

    def loss(function):
        return lambda *x: sum((y**2).sum() for y in function(*x))

    expected = jax.grad(loss(whole), (0, 1, 2))(q, k, v)
    for actual, gradient in zip(jax.grad(loss(halves), (0, 1, 2))(q, k, v), expected, strict=True):
        np.testing.assert_allclose(actual, gradient, rtol=1e-3, atol=1e-4)


def test_rows_without_keys_have_no_gradient_through_a_merge():
    output, empty = jnp.zeros((1, 2, 1, 4)), jnp.full((1, 1, 2), -jnp.inf)
    seen = empty.at[0, 0, 1].set(0.5)

    def loss(first, second):
        return sum(jnp.where(x == -jnp.inf, 0, x).sum() for x in lse.merge(output, first, *second))

    found = jax.grad(loss, (0, 1))(empty, (output, seen))
    np.testing.assert_array_equal(found[0], 0)
    np.testing.assert_array_equal(found[1][0][0, :, 0, 0], [0, 1])
    np.testing.assert_array_equal(found[1][1], [[[0, 1]]])


def test_the_scale_shifts_nothing_else(rng: np.random.Generator):
    q, k, v = operands(int(rng.integers(2**32)), (17, 40), (4, 2))
    close(attention(q * 2, k, v, scale=0.25), attention(q, k, v, scale=0.5))


def test_equals_jax_nn(rng: np.random.Generator):
    q, k, v = operands(int(rng.integers(2**32)), (33, 50), (4, 2))
    lengths = {
        "query_seq_lengths": jnp.array([33, 20], jnp.int32),
        "key_value_seq_lengths": jnp.array([45, 50], jnp.int32),
    }
    options: list[dict[str, Any]] = [
        {},
        {"is_causal": True},
        {"local_window_size": 6} | lengths,  # JAX 0.8 ignores a window that comes alone
        {"is_causal": True, "local_window_size": (9, 2)},
        lengths,
        {"scale": 0.7, "is_causal": True} | lengths,
    ]
    with jax.numpy_rank_promotion("allow"):
        for option in options:
            expected = jax.nn.dot_product_attention(q, k, v, **option)
            close(attention(q, k, v, **option), expected)
