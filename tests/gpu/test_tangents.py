"""Tangents on a GPU: conformance of the kernels, repeated calls, a gradient over a tangent."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fa4_jax import attention, explain
from fa4_jax.api import Implementation
from fa4_jax.conformance.cases import CASES, Case
from fa4_jax.conformance.runner import run_hessian, run_tangents
from fa4_jax.key import Pass

LARGE = (
    Case(batch=2, heads=(4, 2), query_length=3000, key_length=3000, is_causal=True),
    Case(head_dim=128, batch=2, heads=(4, 1), query_length=2048, key_length=2500),
    Case(
        dtype="fp16",
        head_dim=96,
        batch=3,
        heads=(2, 2),
        query_length=1500,
        key_length=1700,
        window=(300, 100),
        query_offset=150,
        query_lengths=(1500, 900, 0),
        key_lengths=(1700, 1000, 400),
        poison=True,
    ),
)


@pytest.fixture(autouse=True)
def gpu() -> None:
    if jax.default_backend() != "gpu":
        pytest.skip("no GPU")


@pytest.mark.parametrize(
    "case",
    [case for case in (*CASES, *LARGE) if case.has_kernels("sm_90a", Pass.TANGENT)],
    ids=lambda case: case.id,
)
def test_conforms(case: Case, seed: int):
    found = run_tangents(case, seed, "kernel")
    assert [verdict for verdict in found if verdict.failure] == []


@pytest.mark.parametrize(
    "case",
    [case for case in (*CASES, *LARGE) if case.has_kernels("sm_90a", Pass.HESSIAN_KEY)],
    ids=lambda case: case.id,
)
def test_hessian_products_conform(case: Case, seed: int):
    found = run_hessian(case, seed)
    assert len(found) == 3
    assert [verdict for verdict in found if verdict.failure] == []


def test_repeated_calls_give_the_same_bits():
    case = dataclasses.replace(LARGE[0], query_length=1000, key_length=1000)
    shapes = (case.batch, 1000, case.heads[0], 64), (case.batch, 1000, case.heads[1], 64)
    keys = jax.random.split(jax.random.key(0), 6)
    q, k, v, *moved = (
        jax.random.normal(key, shape, jnp.bfloat16)
        for key, shape in zip(keys, (shapes[0], shapes[1], shapes[1]) * 2, strict=True)
    )
    assert explain(q, k, v, is_causal=True).tangent == ("sm_90a_tangent_bf16_d64_band",)
    run = jax.jit(lambda *x: jax.jvp(lambda *y: attention(*y, is_causal=True), x[:3], x[3:])[1])
    first = np.asarray(run(q, k, v, *moved))
    assert np.isfinite(first.astype(np.float32)).all()
    for _ in range(50):
        assert np.array_equal(np.asarray(run(q, k, v, *moved)), first)


def test_a_gradient_over_a_stopped_tangent():
    """As MeanFlow's: the launches are those of a forward, its tangents and a backward."""
    keys = jax.random.split(jax.random.key(1), 6)
    q, k, v, *moved = (jax.random.normal(key, (2, 700, 4, 64), jnp.bfloat16) for key in keys)

    def gradient(implementation: Implementation) -> np.ndarray:
        attend = functools.partial(attention, implementation=implementation)
        return np.asarray(jax.jit(jax.grad(functools.partial(loss, attend)))(q), np.float32)

    def loss(attend: Callable[..., jax.Array], q: jax.Array) -> jax.Array:
        output, tangent = jax.jvp(attend, (q, k, v), tuple(moved))
        error = output - jax.lax.stop_gradient(tangent)
        return (error.astype(jnp.float32) ** 2).mean()

    found, expected = gradient("kernel"), gradient("xla")
    assert np.abs(found - expected).max() <= 0.03 * np.abs(expected).max()
