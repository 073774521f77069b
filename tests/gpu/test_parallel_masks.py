"""Context parallelism with masks in memory on two GPUs equals one GPU, on the kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from fa4_jax import attention, masks, parallel
from fa4_jax.target import current_target
from tests.parallel_cases import make_mesh, schemes

B, T, N, K, H, GPUS = 2, 1024, 8, 2, 64, 2
Results = list[np.ndarray]


@pytest.fixture(autouse=True)
def gpus() -> None:
    target = current_target()
    if target.arch is None:
        pytest.skip(target.unavailable)
    if len(jax.devices()) < GPUS:
        pytest.skip("needs two GPUs")


def _options(seed: int) -> dict[str, dict[str, Any]]:
    """Arguments of attention, by name; arrays of tokens are in natural order."""
    rng = np.random.default_rng(seed)
    documents = np.sort(rng.integers(-1, 6, (B, T))).astype(np.int32)
    scattered = np.repeat(rng.integers(-1, 3, (B, T // 32)), 32, axis=1).astype(np.int32)
    low = rng.integers(-5, T, (B, T)).astype(np.int32)
    return {
        "documents": {"segment_ids": documents, "is_causal": True},
        "scattered": {"segment_ids": scattered, "local_window_size": (300, 100)},
        "prefix": {"mask": masks.prefix(np.array([50, 400])), "sinks": rng.normal(size=N)},
        "ranges": {"mask": masks.ranges(low, low + rng.integers(-3, 300, (B, T), np.int32))},
        "function": {"mask": masks.function(lambda b, h, q, k: (q // 80 + k // 112) % 3 > 0)},
    }


def _results(attend: Callable[..., Any], operands: list[jax.Array], bar: jax.Array) -> Results:
    """Output, log-sum-exp and gradients."""

    def loss(*operands: jax.Array) -> Any:
        output, lse = attend(*operands)
        of_lse = jnp.where(jnp.isfinite(lse), jnp.cos(lse), 0)
        return (output.astype(jnp.float32) * bar).sum() + of_lse.sum(), (output, lse)

    run = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))
    (_, results), gradients = run(*operands)
    return [np.asarray(x, np.float32) for x in (*results, *gradients)]


@pytest.mark.parametrize("name", _options(0))
@pytest.mark.parametrize(
    "scheme", schemes("seq"), ids=lambda scheme: f"{type(scheme).__name__}-{scheme.layout}"
)
def test_two_gpus_equal_one(scheme: Any, name: str, seed: int):
    options, rng = _options(seed)[name], np.random.default_rng(seed)
    common: dict[str, Any] = {"return_residual": True, "implementation": "kernel"}
    q, k, v = (jnp.asarray(rng.normal(size=(B, T, x, H)), jnp.bfloat16) for x in (N, K, K))
    bar = jnp.asarray(rng.normal(size=(B, T, N, H)), jnp.float32)
    alone = _results(lambda *x: attention(*x, **options, **common), [q, k, v], bar)
    mesh = make_mesh(AxisType.Auto, seq=GPUS)
    zigzag = scheme.layout == "zigzag"

    def ordered(x: Any) -> Any:
        is_tokens = zigzag and np.ndim(x) > 1 and np.shape(x)[1] == T
        return parallel.to_zigzag(jnp.asarray(x), GPUS) if is_tokens else x

    shared = jax.tree.map(ordered, options)

    def sharded(*operands: jax.Array) -> Any:
        return parallel.attention(
            *operands, scheme=scheme, mesh=mesh, specs=P(None, scheme.axes), **shared, **common
        )

    found = _results(sharded, [ordered(x) for x in (q, k, v)], ordered(bar))
    for i, (mine, whole) in enumerate(zip(found, alone, strict=True)):
        if zigzag:
            mine = np.asarray(parallel.from_zigzag(jnp.asarray(mine), GPUS, 2 if i == 1 else 1))
        assert np.array_equal(np.isfinite(mine), np.isfinite(whole))
        finite = np.isfinite(whole)
        error = np.abs(mine[finite] - whole[finite]).max()
        assert error <= 0.02 * np.abs(whole[finite]).max(), i
