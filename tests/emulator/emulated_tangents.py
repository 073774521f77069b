"""What test_tangents and test_hessian run in the process whose GPU is emulated."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fa4_jax import attention
from fa4_jax.conformance.cases import Case
from fa4_jax.conformance.compare import Verdict
from fa4_jax.conformance.oracle import make_inputs, with_tangents
from fa4_jax.conformance.runner import run_hessian, run_tangents
from tests.emulator.emulated_gpu import settings
from tests.programs import launched_kernels

Arrays = list[np.ndarray]

CASES = (
    Case(batch=2, heads=(2, 1), query_length=130, key_length=200),
    Case(
        dtype="fp16",
        head_dim=72,
        batch=2,
        heads=(2, 2),
        query_length=100,
        key_length=190,
        is_causal=True,
        query_offset=(40, 90),
        key_lengths=(150, 0),
        poison=True,
    ),
    Case(head_dim=128, batch=1, heads=(2, 1), query_length=150, key_length=90, window=(60, 10)),
)
"""Calls from end to end: grouped queries, a narrower head with padding, a window."""


def verdicts(case: Case, seed: int, how: str) -> list[Verdict]:
    """Conformance of a case's tangents, by kernels alone."""
    with settings(how):
        return run_tangents(case, seed, "kernel")


def hessian(case: Case, seed: int, how: str) -> tuple[list[Verdict], list[str]]:
    """Conformance of a case's Hessian-vector products, and the passes that run."""
    with settings(how):
        found = run_hessian(case, seed, "kernel")
    operands, moved = _operands(case, seed)
    attend = functools.partial(attention, implementation="kernel")
    gradient = jax.grad(lambda *x: attend(*x).astype(jnp.float32).sum(), (0, 1, 2))
    product = jax.jit(lambda *x: jax.jvp(gradient, x, moved)[1])
    text = product.lower(*operands).compile().as_text()
    assert text is not None
    return found, re.findall(r'kernel = "sm_90a_(\w+)_(?:bf16|fp16)_', text)


def hessians_by_vmap(case: Case, seed: int) -> tuple[Arrays, Arrays]:
    """Those of two queries by vmap, of which keys are shared, and one by one in reverse mode."""
    attend = functools.partial(attention, implementation="kernel")
    (query, *keys), moved = _operands(case, seed)
    queries = np.stack([query, query[::-1]])

    def gradients(query: jax.Array) -> Any:
        loss = lambda *x: attend(*x).astype(jnp.float32).sum()  # noqa: E731
        return jax.grad(loss, (0, 1, 2))(query, *keys)

    def inner(query: jax.Array) -> jax.Array:
        terms = zip(gradients(query), moved, strict=True)
        return sum(((g.astype(jnp.float32) * m).sum() for g, m in terms), jnp.zeros(()))

    together = jax.jit(jax.vmap(jax.grad(inner)))(queries)
    apart = np.stack([np.asarray(jax.grad(inner)(x)) for x in queries])
    return [np.asarray(together)], [apart]


def _operands(case: Case, seed: int) -> tuple[Any, Any]:
    """Query, key and value, and tangents of them."""
    inputs = with_tangents(case, make_inputs(case, seed), seed)
    return (inputs.query, inputs.key, inputs.value), inputs.tangents


def vmapped_and_looped(case: Case, seed: int) -> tuple[Arrays, Arrays]:
    """Tangents of two calls by vmap, of which keys are shared, and one by one by linearize."""
    attend = functools.partial(attention, implementation="kernel", return_residual=True)
    (query, *keys), moved = _operands(case, seed)
    queries = np.stack([query, query[::-1]])

    def tangent(query: jax.Array) -> Any:
        return jax.jvp(attend, (query, *keys), moved)[1]

    together = jax.jit(jax.vmap(tangent))(queries)
    apart = [jax.linearize(attend, x, *keys)[1](*moved) for x in queries]
    stacked = [np.stack(x) for x in zip(*apart, strict=True)]
    return [np.asarray(x) for x in together], stacked


def meanflow(case: Case, seed: int) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Gradients of the query by kernels and by the default path, and the kernels of the former."""
    (query, *keys), moved = _operands(case, seed)

    def loss(query: jax.Array, implementation: Any) -> jax.Array:
        attend = functools.partial(attention, implementation=implementation)
        output, tangent = jax.jvp(attend, (query, *keys), moved)
        error = output - jax.lax.stop_gradient(tangent)
        return (error.astype(jnp.float32) ** 2).mean()

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    found, expected = (np.asarray(gradient(query, way), np.float32) for way in ("kernel", "xla"))
    text = gradient.lower(query, "kernel").compile().as_text()
    assert text is not None
    return found, expected, launched_kernels(text)
