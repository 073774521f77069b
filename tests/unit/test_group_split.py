"""Tests which backwards split a group of query heads, and that the parts sum to the whole."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from fa4_jax import bands
from fa4_jax.group_split import GroupSplit, group_split
from fa4_jax.operands import Operands
from fa4_jax.plan import Plan, make_plan
from fa4_jax.problem import Problem
from tests.fakes import fake_target


def make(batch: int, heads: tuple[int, int], length: int, head_dim: int = 128, **own: Any) -> Plan:
    """The plan of a causal call on Hopper."""
    fields = {"dtype": "bf16", "scale": 1.0, "window": bands.CAUSAL} | own
    problem = Problem(batch, length, length, *heads, head_dim, **fields)
    return make_plan(problem, fake_target(), None)


@pytest.mark.parametrize(
    ("plan", "parts"),
    [
        # Calls whose splits were timed: docs/hopper.md.
        (make(4, (16, 1), 8192), 16),
        (make(2, (32, 8), 8192), 4),
        (make(8, (32, 8), 2048), 1),
        (make(1, (32, 8), 32768), 2),
        (make(2, (64, 8), 8192, 64), 4),
        (make(2, (16, 2), 8192, 256), 4),
        (make(1, (64, 8), 4096), 8),
        (make(8, (32, 8), 2048, deterministic=True), 4),
        # A device's rows and all or half of another's keys, in a ring of four.
        (make(1, (16, 2), 8192, window=bands.EVERYTHING, has_lengths=True), 2),
        (make(1, (16, 16), 8192, window=bands.EVERYTHING, has_lengths=True), 1),
        (make(1, (16, 4), 8192, window=bands.EVERYTHING, has_lengths=True), 1),
        (make(1, (16, 2), 8192, window=bands.EVERYTHING, has_lengths=True, deterministic=True), 1),
        # Thread blocks are equally long.
        (make(4, (16, 1), 8192, window=bands.EVERYTHING), 1),
        (make(4, (16, 1), 8192, window=(128, 0)), 1),
        # Nothing to split.
        (make(1, (2, 2), 1024), 1),
    ],
    ids=str,
)
def test_parts(plan: Plan, parts: int) -> None:
    split = group_split(plan)
    assert split.parts == parts
    assert split.plan.problem.kv_heads == plan.problem.kv_heads * parts
    assert split.plan.backward == plan.backward


def test_only_hopper_splits() -> None:
    plan = make(4, (16, 1), 8192)
    assert group_split(dataclasses.replace(plan, arch="sm_100f")).parts == 1
    assert group_split(dataclasses.replace(plan, backward=())).parts == 1


def test_symbolic_sizes() -> None:
    """A deterministic program gives the bits of the call with these sizes, so it splits alike."""
    batch, length = jax.export.symbolic_shape("b, t")
    plan = make(8, (32, 8), 2048)
    sizes = {"batch": batch, "query_length": length}
    problem = dataclasses.replace(plan.problem, **sizes, deterministic=True)
    assert group_split(dataclasses.replace(plan, problem=problem)).parts == 4
    problem = dataclasses.replace(problem, deterministic=False)
    assert group_split(dataclasses.replace(plan, problem=problem)).parts == 1


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_parts_sum_to_the_whole(parts: int, rng: np.random.Generator) -> None:
    """Gradients of attention to repeated heads, joined, are those of the heads."""
    b, t, s, n, k, h = 2, 5, 7, 8, 2, 4
    query, do = (jnp.asarray(rng.normal(size=(b, t, n, h)), jnp.float32) for _ in range(2))
    key, value = (jnp.asarray(rng.normal(size=(b, s, k, h)), jnp.float32) for _ in range(2))
    split = GroupSplit(parts, make(b, (n, k), 128))
    divided = split.divide(Operands(query, key, value, jnp.zeros((b, 4), jnp.int32)))

    def gradients(key: jax.Array, value: jax.Array) -> Any:
        attend = jax.nn.dot_product_attention
        return jax.vjp(lambda *x: attend(query, *x), key, value)[1](do)

    assert divided.key.shape == (b, s, k * parts, h)
    found = [split.join(x) for x in gradients(divided.key, divided.value)]
    for x, y in zip(found, gradients(key, value), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def test_parts_are_summed_in_float32() -> None:
    parts = jnp.asarray([256, 1, 1, 1], jnp.bfloat16).reshape(1, 1, 4, 1)
    joined = GroupSplit(4, make(1, (4, 1), 128)).join(parts)
    assert joined.dtype == jnp.bfloat16 and joined.shape == (1, 1, 1, 1)
    assert joined.item() == 260  # 259 rounded; 256 if each sum were rounded
