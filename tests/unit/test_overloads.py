"""Type checkers know `attention`'s result types; pyright checks these, pytest the values."""

from __future__ import annotations

from typing import assert_type

import jax
import jax.numpy as jnp

import fa4_jax


def test_what_is_returned_decides_the_type() -> None:
    x = jnp.ones((1, 4, 2, 8))
    output = fa4_jax.attention(x, x, x, is_causal=True)
    assert_type(output, jax.Array)
    pair = fa4_jax.attention(x, x, x, return_residual=True)
    assert_type(pair, tuple[jax.Array, jax.Array])
    largest = fa4_jax.attention(x, x, x, return_max_logit=True)
    assert_type(largest, tuple[jax.Array, jax.Array])
    three = fa4_jax.attention(x, x, x, return_residual=True, return_max_logit=True)
    assert_type(three, tuple[jax.Array, jax.Array, jax.Array])
    assert largest[1].shape == three[2].shape == (1, 2)
    assert output.shape == pair[0].shape == x.shape and pair[1].shape == (1, 2, 4)


def test_what_decode_returns_decides_the_type() -> None:
    x, pages = jnp.ones((1, 1, 2, 8)), jnp.ones((3, 4, 2, 8))
    table, lengths = jnp.zeros((1, 3), jnp.int32), jnp.ones(1, jnp.int32)
    output = fa4_jax.decode(x, pages, pages, table, lengths)
    assert_type(output, jax.Array)
    pair = fa4_jax.decode(x, pages, pages, table, lengths, return_residual=True)
    assert_type(pair, tuple[jax.Array, jax.Array])
    assert output.shape == pair[0].shape == x.shape and pair[1].shape == (1, 2, 1)
