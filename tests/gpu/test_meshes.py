"""Kernels on a mesh of two GPUs give, in every mesh mode, the same bits as on one, without
gathering.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fa4_jax
from fa4_jax.target import current_target

BATCH, HEADS = P("x"), P(None, None, "x")
LAYOUTS = {
    # name: specs of query, and of key and value; KV heads; collectives of a gradient
    "batch": (BATCH, BATCH, 2, 0),
    "heads": (HEADS, HEADS, 2, 0),
    "query heads over one KV head": (HEADS, P(), 1, 2),  # sums of dK and dV
}


@pytest.fixture(autouse=True)
def kernels() -> None:
    target = current_target()
    if target.arch is None:
        pytest.skip(target.unavailable)
    if len(jax.devices()) < 2:
        pytest.skip("needs two GPUs")


def gradients(q: Any, k: Any, v: Any, bar: Any) -> Any:
    """Returns output, LSE, dq, dk, dv of a causal, deterministic call on the kernels."""

    def call(*primals: jax.Array) -> Any:
        return fa4_jax.attention(
            *primals,
            is_causal=True,
            deterministic=True,
            return_residual=True,
            implementation="kernel",
        )

    (output, lse), pull_back = jax.vjp(call, q, k, v)
    return output, lse, *pull_back((bar, jnp.zeros_like(lse)))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit, AxisType.Manual], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_gpus_give_the_bits_of_one(layout: str, kind: AxisType, seed: int) -> None:
    rows, keys, kv_heads, sums = LAYOUTS[layout]
    if kind is AxisType.Manual and sums:
        pytest.skip("sums over copies are the caller's where all axes are manual")
    random = jax.random.split(jax.random.key(seed), 4)
    shapes = [(4, 300, n, 64) for n in (8, kv_heads, kv_heads, 8)]
    operands = [
        np.asarray(jax.random.normal(r, shape, jnp.bfloat16))
        for r, shape in zip(random, shapes, strict=True)
    ]
    expected = jax.jit(gradients)(*operands)
    axis = AxisType.Auto if kind is AxisType.Manual else kind
    mesh = jax.make_mesh((2,), ("x",), (axis,), devices=jax.devices()[:2])
    specs = (rows, keys, keys, rows)
    placed = [
        jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(operands, specs, strict=True)
    ]
    function = gradients
    if kind is AxisType.Manual:
        lse = P("x") if rows == BATCH else P(None, "x")
        results = (rows, lse, rows, keys, keys)
        function = jax.shard_map(gradients, mesh=mesh, in_specs=specs, out_specs=results)
    with jax.set_mesh(mesh):
        compiled = jax.jit(function).lower(*placed).compile()
        found = compiled(*placed)
    names = re.findall(
        r" (all-gather|all-reduce|all-to-all|collective-permute)", compiled.as_text() or ""
    )
    names = [name for name in names if not name.startswith("all-reduce-done")]
    assert "all-gather" not in names and "all-to-all" not in names
    assert bool(names) == bool(sums), names
    for ours, theirs in zip(found, expected, strict=True):
        a, b = (np.asarray(x, np.float32) for x in (ours, theirs))
        if sums and a.shape == operands[1].shape:
            # dK and dV are sums of two devices' rounded halves.
            assert np.abs(a - b).max() <= 2**-6 * np.abs(b).max()
        else:
            assert np.array_equal(a, b)
