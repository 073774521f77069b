"""Tangents and Hessian-vector products by kernels on meshes of four devices: each computes those
of its batch and heads.

What kernels compute is computed by the default path here, which sees each device's part.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fa4_jax import api, attention, launches, xla
from fa4_jax.problem import Problem
from tests.fakes import fake_target

SPEC = P("x", None, "y")
KINDS = [AxisType.Auto, AxisType.Explicit, AxisType.Manual]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Problem]]:
    """The problems of which kernels compute tangents, or how gradients move."""
    problems: list[Problem] = []
    target = dataclasses.replace(fake_target(), platforms=("cuda", "cpu"))

    def tangent(plan: Any, operands: Any, direction: Any) -> Any:
        assert operands.query.shape[::2] == (plan.problem.batch, plan.problem.query_heads)
        assert direction.key.shape == operands.key.shape
        problems.append(plan.problem)
        return xla.tangent(plan.problem, operands, direction)

    jax.clear_caches()
    monkeypatch.setattr(api, "current_target", lambda: target)
    monkeypatch.setattr(
        launches, "forward", lambda plan, operands: xla.forward(plan.problem, operands)
    )
    monkeypatch.setattr(launches, "tangent", tangent)

    def hessian(plan: Any, operands: Any, cotangents: Any, tangents: Any) -> Any:
        assert operands.query.shape[::2] == (plan.problem.batch, plan.problem.query_heads)
        assert tangents.key.shape == operands.key.shape
        assert tangents.lse.shape == cotangents.lse.shape
        problems.append(plan.problem)
        return xla.hessian(plan.problem, operands, cotangents, tangents)

    def backward(plan: Any, operands: Any, cotangents: Any) -> Any:
        return xla.backward(plan.problem, operands, cotangents)

    monkeypatch.setattr(launches, "hessian", hessian)
    monkeypatch.setattr(launches, "backward", backward)
    yield problems
    jax.clear_caches()


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_batch_and_heads(
    kind: AxisType, kv_heads: int, launched: list[Problem], rng: np.random.Generator
):
    """With one KV head every device has it; then its tangent is not sharded, either."""

    def tangent(*x: jax.Array) -> Any:
        def attend(*x: jax.Array) -> Any:
            return attention(*x, is_causal=True, return_residual=True)

        return jax.jvp(attend, x[:3], x[3:])

    compare(tangent, ((SPEC, P("x", "y")),) * 2, kind, kv_heads, launched, rng)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_hessian_products(
    kind: AxisType, kv_heads: int, launched: list[Problem], rng: np.random.Generator
):
    """With one KV head its gradients are sums over the devices that have it."""

    def product(*x: jax.Array) -> Any:
        def gradients(*x: jax.Array) -> Any:
            output, pullback = jax.vjp(functools.partial(attention, is_causal=True), *x)
            return pullback(jnp.cos(output))

        return jax.jvp(gradients, x[:3], x[3:])[1]

    of_keys = SPEC if kv_heads > 1 else P("x")
    compare(product, (SPEC, of_keys, of_keys), kind, kv_heads, launched, rng)


def compare(
    function: Any,
    results: Any,
    kind: AxisType,
    kv_heads: int,
    launched: list[Problem],
    rng: np.random.Generator,
) -> None:
    """Fails unless a function of operands and their tangents is the same on a mesh."""
    kinds = (AxisType.Auto if kind is AxisType.Manual else kind,) * 2
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=kinds)
    heads, keys_spec = 2 * kv_heads, SPEC if kv_heads > 1 else P("x")
    operands = [
        jnp.asarray(rng.normal(size=(4, 40, n, 64)), jnp.bfloat16)
        for n in (heads, kv_heads, kv_heads) * 2
    ]

    expected = jax.jit(function)(*operands)
    specs = (SPEC, keys_spec, keys_spec) * 2
    placed = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(operands, specs, strict=True)
    ]
    run = function
    if kind is AxisType.Manual:
        run = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=results)
    found = run_on(mesh, kind, run, placed)
    for mine, whole in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        scale = np.abs(np.asarray(whole, np.float32)).max()
        np.testing.assert_allclose(
            np.asarray(mine, np.float32), np.asarray(whole, np.float32), atol=0.02 * scale
        )
    problem = launched[-1]
    assert (problem.batch, problem.query_heads, problem.kv_heads) == (2, heads // 2, 1)


def run_on(mesh: Mesh, kind: AxisType, run: Any, operands: list[jax.Array]) -> Any:
    """Runs a function of operands that lie on a mesh; nothing of it gathers them."""
    with jax.set_mesh(mesh) if kind is AxisType.Explicit else contextlib.nullcontext():
        compiled = jax.jit(run).lower(*operands).compile()
        text = compiled.as_text()
        assert text is not None and "all-gather" not in text
        return compiled(*operands)
