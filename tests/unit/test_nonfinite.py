"""NaN and Inf stay with the rows that see them, also on the default path's masked blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fa4_jax import attention
from fa4_jax.conformance.cases import Case
from fa4_jax.conformance.oracle import visible
from fa4_jax.conformance.runner import arguments
from tests.default_paths import PATHS, forced

T, S, N, H = 70, 90, 2, 8


@pytest.fixture(autouse=True, scope="module", params=PATHS)
def small_blocks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Makes the default path run one block, or many, at small sizes."""
    with forced(request.param, block=16):
        yield


def operands(rng: np.random.Generator) -> list[jax.Array]:
    shapes = ((1, T, N, H), (1, S, N, H), (1, S, N, H))
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


@pytest.mark.parametrize(
    "case",
    [
        Case(batch=1, query_length=T, key_length=S),
        Case(batch=1, query_length=T, key_length=S, is_causal=True, query_offset=5),
        Case(batch=1, query_length=T, key_length=S, window=(9, 4)),
    ],
    ids=["dense", "causal", "window"],
)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("operand", [0, 1, 2], ids=["query", "key", "value"])
def test_confined(operand: int, value: float, case: Case, rng: np.random.Generator):
    options = arguments(case)
    arrays = operands(rng)
    clean, clean_gradients = outputs(arrays, options)
    at = 33
    arrays[operand] = arrays[operand].at[0, at].set(value)
    output, gradients = outputs(arrays, options)
    seen = visible(case, None)[0, 0]
    rows = np.arange(T) == at if operand == 0 else seen[:, at]
    assert not np.isfinite(output[0, rows]).any() or operand == 1
    np.testing.assert_allclose(output[0, ~rows], clean[0, ~rows], rtol=1e-4, atol=1e-5)
    keys = seen[rows].any(0)  # their gradients come from a row that is not finite
    untouched = (~rows, ~keys, ~keys)
    for gradient, expected, kept in zip(gradients, clean_gradients, untouched, strict=True):
        np.testing.assert_allclose(gradient[0, kept], expected[0, kept], rtol=1e-3, atol=1e-4)


def outputs(arrays: list[jax.Array], options: dict[str, Any]) -> tuple[Any, Any]:
    """Returns output and gradients of query, key and value."""
    output, pull_back = jax.vjp(lambda *x: attention(*x, **options), *arrays)
    bar = jnp.sin(jnp.arange(output.size, dtype=jnp.float32)).reshape(output.shape)
    return np.asarray(output), [np.asarray(x) for x in pull_back(bar)]


def test_a_row_whose_bias_hides_every_key_is_zero(rng: np.random.Generator):
    q, k, v = operands(rng)
    bias = jnp.zeros((1, 1, T, S)).at[0, 0, 7].set(-jnp.inf)

    def run(q, k, v, bias):
        return attention(q, k, v, bias, return_residual=True)

    output, lse = run(q, k, v, bias)
    np.testing.assert_array_equal(output[0, 7], 0)
    np.testing.assert_array_equal(lse[0, :, 7], -np.inf)
    gradients = jax.grad(lambda *x: run(*x)[0].sum(), (0, 1, 2, 3))(q, k, v, bias)
    assert all(np.isfinite(g).all() for g in gradients)
    np.testing.assert_array_equal(gradients[0][0, 7], 0)
    np.testing.assert_array_equal(gradients[3][0, 0, 7], 0)
