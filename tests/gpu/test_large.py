"""Tensors of more than 2^31 elements: the far end must give what it gives alone."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fa4_jax
from fa4_jax.target import current_target

LENGTH, HEADS, HEAD_DIM = 66_048, 128, 128  # two batch entries are 2^31 + 16.8 M elements
SHORT = 130


@pytest.fixture(autouse=True)
def kernels() -> None:
    target = current_target()
    if target.arch is None:
        pytest.skip(target.unavailable)
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 0)
    if limit < 60e9:
        pytest.skip(f"needs 60 GB of GPU memory, JAX has {limit / 1e9:.0f} GB")


def normal(seed: int, number: int, *shape: int) -> jax.Array:
    """Makes random bf16 values."""
    return jax.random.normal(jax.random.fold_in(jax.random.key(seed), number), shape, jnp.bfloat16)


@functools.partial(jax.jit, static_argnames=("options",))
def gradients(operands: tuple[jax.Array, ...], output_bar: jax.Array, options: tuple[Any, ...]):
    """Returns (output, dq, dk, dv) of the kernels."""
    call = functools.partial(fa4_jax.attention, implementation="kernel", **dict(options))
    output, pull_back = jax.vjp(call, *operands)
    return output, *pull_back(output_bar)


def assert_same(large: jax.Array, small: jax.Array) -> None:
    """Checks equality up to the order of dQ's additions."""
    found, expected = np.asarray(large, np.float32), np.asarray(small, np.float32)
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found, expected, rtol=2**-7, atol=2**-7 * np.abs(expected).max())


def test_queries_beyond_2_to_31_elements(seed: int):
    q = normal(seed, 0, 2, LENGTH, HEADS, HEAD_DIM)
    k, v = normal(seed, 1, 2, 200, 1, HEAD_DIM), normal(seed, 2, 2, 200, 1, HEAD_DIM)
    end = normal(seed, 3, 1, SHORT, HEADS, HEAD_DIM)
    output_bar = jnp.zeros_like(q).at[1:, -SHORT:].set(end)
    o, dq, dk, dv = gradients((q, k, v), output_bar, ())
    small = gradients((q[1:, -SHORT:], k[1:], v[1:]), end, ())
    for x, expected in zip((o[1:, -SHORT:], dq[1:, -SHORT:], dk[1:], dv[1:]), small, strict=True):
        assert_same(x, expected)
    assert not dq[0].any() and not dq[1, :-SHORT].any() and not dk[0].any()


def test_keys_beyond_2_to_31_elements(seed: int):
    q, output_bar = (normal(seed, i, 2, SHORT, HEADS, HEAD_DIM) for i in range(2))
    k, v = (normal(seed, i, 2, LENGTH, HEADS, HEAD_DIM) for i in (2, 3))
    reach = 300
    options = {"is_causal": True, "local_window_size": (reach, 0), "query_offset": LENGTH - SHORT}
    o, dq, dk, dv = gradients((q, k, v), output_bar, tuple(options.items()))
    tail = SHORT + reach
    options["query_offset"] = reach
    parts = (q[1:], k[1:, -tail:], v[1:, -tail:])
    small = gradients(parts, output_bar[1:], tuple(options.items()))
    for x, expected in zip((o[1:], dq[1:], dk[1:, -tail:], dv[1:, -tail:]), small, strict=True):
        assert_same(x, expected)
    assert not dk[1, :-tail].any() and not dv[1, :-tail].any()
