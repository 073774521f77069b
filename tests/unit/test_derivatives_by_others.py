"""First and second derivatives in float64 against finite differences, and against jax.nn's."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from fa4_jax import attention, xla
from tests import default_paths
from tests.derivative_checks import DERIVATIVES, Point

B, T, S, N, K, H = 2, 7, 10, 4, 2, 8
SHAPES = {"query": (B, T, N, H), "key": (B, S, K, H), "value": (B, S, K, H)}
KEY_LENGTHS = np.array([S, 4], np.int32)


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@pytest.fixture(params=["dense", "blockwise"], autouse=True)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Either implementation of the default path; `blockwise` has several blocks a side."""
    if request.param == "blockwise":
        monkeypatch.setattr(xla, "SETTINGS", dataclasses.replace(xla.SETTINGS, dense_scores=0))
        monkeypatch.setattr(xla.blockwise, "block_sizes", default_paths.blocks_of(8))
    jax.clear_caches()


def point(rng: np.random.Generator, **more: tuple[int, ...]) -> Point:
    shapes = SHAPES | more
    return {name: jnp.asarray(rng.normal(size=shape)) for name, shape in shapes.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "options"),
    [
        ({}, {}),
        ({}, {"is_causal": True, "key_value_seq_lengths": KEY_LENGTHS, "query_offset": 3}),
        ({"bias": (1, N, T, S)}, {"local_window_size": (4, 2)}),
        ({"sinks": (N,)}, {"logits_soft_cap": 2.0}),
    ],
    ids=["dense", "causal, lengths", "bias, window", "sinks, cap"],
)
def test_finite_differences(
    more: dict[str, Any], options: dict[str, Any], rng: np.random.Generator
) -> None:
    """Forward and reverse mode, and both of each other, of output and log-sum-exp."""

    def results(x: Point) -> Any:
        output, lse = attention(**x, **options, return_residual=True)
        return output, jnp.where(lse == -jnp.inf, 0, lse)

    check_grads(results, (point(rng, **more),), order=2, modes=("fwd", "rev"), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("derivative", DERIVATIVES, ids=lambda x: x.__name__)
@pytest.mark.parametrize(
    ("more", "options"),
    [
        ({}, {}),
        ({}, {"is_causal": True}),
        ({"bias": (1, N, T, S)}, {"key_value_seq_lengths": KEY_LENGTHS}),
    ],
    ids=["dense", "causal", "bias, lengths"],
)
def test_jax_nn(
    derivative: Any, more: dict[str, Any], options: dict[str, Any], rng: np.random.Generator
) -> None:
    """jax.nn returns no log-sum-exp here, so a constant stands for both.

    Its scores are float32 whatever the operands are, hence the tolerance.
    """
    x, u, v = (point(rng, **more) for _ in range(3))

    def run(attend: Any, x: Point) -> Any:
        output = attend(**x, **options)
        return output, jnp.ones((B, N, T))

    theirs = functools.partial(jax.nn.dot_product_attention, implementation="xla")
    actual, expected = (
        jax.jit(functools.partial(derivative, functools.partial(run, attend)))(x, u, v)
        for attend in (attention, theirs)
    )
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), actual, expected
    )
