"""The default path chooses between one dense block and many, and both compute the same."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fa4_jax import attention, xla
from fa4_jax.api import Call, canonicalise
from fa4_jax.operands import Cotangents
from tests.default_paths import PATHS, forced

T, S, B, N, K, H = 23, 37, 3, 4, 2, 8

CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one row": {"rows": 1},
    "causal, offsets": {"is_causal": True, "query_offset": jnp.array([0, 14, -9])},
    "window, lengths": {
        "local_window_size": (6, 3),
        "query_offset": 5,
        "query_seq_lengths": jnp.array([23, 0, 11]),
        "key_value_seq_lengths": jnp.array([37, 20, 0]),
    },
    "bias, mask": {"dense": True},
    "bias, mask, causal, lengths": {
        "dense": True,
        "is_causal": True,
        "key_value_seq_lengths": jnp.array([30, 1, 37]),
    },
}


def gradient_text(length: int, **options: Any) -> str:
    """Returns the program of a gradient of [1, length, 4, 8]."""
    operand = jax.ShapeDtypeStruct((1, length, 4, 8), jnp.float32)

    def loss(*x: jax.Array) -> jax.Array:
        return attention(*x, **options).sum()

    return jax.jit(jax.grad(loss, (0, 1, 2))).lower(*[operand] * 3).as_text()


def test_few_scores_need_no_loop():
    few = int((xla.SETTINGS.dense_scores / 4) ** 0.5)
    for options in ({}, {"is_causal": True}, {"is_causal": True, "query_offset": jnp.int32(3)}):
        assert "stablehlo.while" not in gradient_text(few, **options)
        assert "stablehlo.while" in gradient_text(few + 1, **options)


def test_a_dense_block_holds_no_more_scores_than_blocks_do():
    few = int((xla.SETTINGS.dense_scores / 4) ** 0.5)

    def temporary_bytes(length: int) -> int:
        operand = jax.ShapeDtypeStruct((1, length, 4, 8), jnp.float32)

        def gradient(*x: jax.Array) -> Any:
            return jax.vjp(lambda *x: attention(*x, is_causal=True), *x)[1](x[0])

        analysis = jax.jit(gradient).lower(*[operand] * 3).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    # A gradient has several arrays of the scores' size at a time, on either path.
    assert temporary_bytes(few) <= 1.25 * temporary_bytes(2 * few)


def results(path: str, call: dict[str, Any], rng: np.random.Generator, dtype: Any) -> list[Any]:
    """Returns output, log-sum-exp, and gradients of query, key, value, scale, and a bias if any."""
    options = dict(call)
    rows, dense = options.pop("rows", T), options.pop("dense", False)
    q, k, v = (
        jnp.asarray(rng.normal(size=(B, length, heads, width)), dtype)
        for length, heads, width in ((rows, N, H), (S, K, H), (S, K, 2 * H))
    )
    bias = jnp.asarray(rng.normal(size=(1, N, rows, 1)), dtype) if dense else None
    options["mask"] = jnp.asarray(rng.random((B, 1, rows, S)) < 0.6) if dense else None
    bars = rng.normal(size=(B, rows, N, 2 * H)), rng.normal(size=(B, N, rows))

    @jax.jit
    def run(primals: list[Any], bars: Any) -> Any:
        def forward(q: Any, k: Any, v: Any, scale: Any, *bias: Any) -> Any:
            return attention(q, k, v, *bias, scale=scale, return_residual=True, **options)

        both, pull_back = jax.vjp(forward, *primals)
        return *both, *pull_back(bars)

    primals = [q, k, v, jnp.asarray(0.4, dtype), *([] if bias is None else [bias])]
    with forced(path, block=8):
        return [np.asarray(x) for x in run(primals, tuple(jnp.asarray(x, dtype) for x in bars))]


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_both_ways_agree_in_float64(call: dict[str, Any], seed: int):
    with jax.enable_x64(True):
        dense, blockwise = (
            results(path, call, np.random.default_rng(seed), jnp.float64) for path in PATHS
        )
    for x, y in zip(dense, blockwise, strict=True):
        assert x.dtype == np.float64
        np.testing.assert_allclose(x, y, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_a_backward_over_some_keys_takes_the_log_sum_exp_of_all(path: str, is_causal: bool, seed):
    """Context parallelism sums gradients over shards of keys: their weights are exp(s - lse)."""
    rng = np.random.default_rng(seed)
    q, bar = (jnp.asarray(rng.normal(size=(B, T, N, H)), jnp.float32) for _ in range(2))
    k, v = (jnp.asarray(rng.normal(size=(B, S, K, H)), jnp.float32) for _ in range(2))

    def gradients(first: int, last: int, of_all: Cotangents) -> Any:
        part = slice(first, last)
        call = Call(q, k[:, part], v[:, part], is_causal=is_causal, query_offset=9 - first)
        operands, problem = canonicalise(call)
        return xla.backward(problem, operands, of_all)

    with forced(path, block=8):
        operands, problem = canonicalise(Call(q, k, v, is_causal=is_causal, query_offset=9))
        output, lse, _ = xla.forward(problem, operands)
        cotangents = Cotangents(output, lse, bar, jnp.zeros_like(lse))
        whole = gradients(0, S, cotangents)
        left, right = gradients(0, 20, cotangents), gradients(20, S, cotangents)
    np.testing.assert_allclose(left.query + right.query, whole.query, rtol=1e-4, atol=1e-5)
    for name in ("key", "value"):
        joined = jnp.concatenate([getattr(left, name), getattr(right, name)], 1)
        np.testing.assert_allclose(joined, getattr(whole, name), rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(jax.__version_info__[:2] != (0, 10), reason="kernels counted on JAX 0.10")
@pytest.mark.parametrize("heads", [1, 4])
def test_the_loop_compiles_few_kernels(heads: int):
    """XLA's CPU compiles each kernel that is not its library's for 15 to 40 ms."""
    operand = jax.ShapeDtypeStruct((1, 2048, heads, 64), jnp.float32)

    def forward(*x: jax.Array) -> jax.Array:
        return attention(*x, is_causal=True)

    gradient = jax.grad(lambda *x: forward(*x).sum(), (0, 1, 2))
    for function, most in ((forward, 11), (gradient, 26)):
        text = jax.jit(function).lower(*[operand] * 3).compile().as_text()
        assert text is not None and text.count("kind=kLoop") <= most
