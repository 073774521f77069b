"""Tests programs that are exported with symbolic dimensions."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import fa4_jax
from fa4_jax import attention, explain, parallel, supports
from tests.parallel_cases import make_mesh

SIZES = [{"b": 2, "t": 5, "s": 7}, {"b": 1, "t": 200, "s": 131}, {"b": 3, "t": 64, "s": 1}]


def both_ways(q: Any, k: Any, v: Any, lengths: Any, bias: Any = None) -> Any:
    """Returns output, log-sum-exp, and gradients."""

    def loss(q: Any, k: Any, v: Any) -> Any:
        options = {"is_causal": True, "query_offset": 3, "key_value_seq_lengths": lengths}
        output, lse = attention(q, k, v, bias, return_residual=True, **options)
        finite = jnp.where(jnp.isfinite(lse), lse, 0)
        return (output.astype(jnp.float32) ** 2).sum() + finite.sum(), (output, lse)

    return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(q, k, v)


def shapes(b: Any, t: Any, s: Any, dense: bool) -> list[tuple[Any, ...]]:
    found = [(b, t, 4, 8), (b, s, 2, 8), (b, s, 2, 8), (b,)]
    return [*found, (1, 4, t, s)] if dense else found


def symbolic(names: str, dense: bool, dtype: Any = jnp.float32) -> list[jax.ShapeDtypeStruct]:
    """Returns operands whose dimensions of those names are symbols, the others as in the first of
    SIZES.
    """
    symbols = dict(zip(names, jax.export.symbolic_shape(",".join(names)), strict=True))
    types = [dtype] * 3 + [jnp.int32, dtype]
    each = zip(shapes(**(SIZES[0] | symbols), dense=dense), types, strict=False)
    return [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in each]


@pytest.mark.parametrize("dense", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("names", ["b", "ts", "bts"])
def test_the_default_path(names: str, dense: bool, rng: np.random.Generator):
    exported = jax.export.export(jax.jit(both_ways))(*symbolic(names, dense))
    exported = jax.export.deserialize(exported.serialize())
    for sizes in SIZES:
        sizes = SIZES[0] | {name: sizes[name] for name in names}
        drawn = [rng.normal(size=x).astype(np.float32) for x in shapes(**sizes, dense=dense)]
        args: list[Any] = [*drawn]
        args[3] = rng.integers(0, sizes["s"] + 1, sizes["b"]).astype(np.int32)
        found, expected = exported.call(*args), jax.jit(both_ways)(*args)
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("names", ["b", "bts"])
def test_the_kernel_path(names: str, kernels_present: None, rng: np.random.Generator):
    operands = symbolic(names, False, jnp.bfloat16)
    assert supports(*operands[:3], is_causal=True)
    exported = jax.export.export(
        jax.jit(both_ways), platforms=("cuda", "cpu"), disabled_checks=fa4_jax.export_checks()
    )(*operands)
    exported = jax.export.deserialize(exported.serialize())
    launches = [x for x in exported.mlir_module().splitlines() if "fa4_jax_launch" in x]
    assert len(launches) == 4 and all("tensor<?x" in launch for launch in launches)
    assert all(re.search(r"indices_of_shape_operands|output_operand_alias", x) for x in launches)
    args: list[Any] = [rng.normal(size=x) for x in shapes(**SIZES[0], dense=False)]
    args = [jnp.asarray(x, jnp.bfloat16) for x in args[:3]] + [np.array([7, 2], np.int32)]
    found, expected = exported.call(*args), jax.jit(both_ways)(*args)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        x, y = (np.asarray(z, np.float32) for z in (x, y))
        np.testing.assert_allclose(x, y, rtol=2e-2, atol=2e-2)


def test_what_cannot_be_symbolic():
    n, b = jax.export.symbolic_shape("n, b")

    def struct(*shape: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    with pytest.raises(NotImplementedError, match="query has symbolic heads, n:"):
        jax.export.export(jax.jit(attention))(*[struct(2, 5, n, 8)] * 3)
    with pytest.raises(NotImplementedError, match="query has symbolic head_dim, 2"):
        jax.export.export(jax.jit(attention))(*[struct(2, 5, 2, 2 * n)] * 3)
    with pytest.raises(NotImplementedError, match="explain takes no symbolic batch, got b"):
        explain(*[struct(b, 5, 2, 8)] * 3)
    mesh = make_mesh(AxisType.Auto, seq=2)

    def sharded(x: Any) -> Any:
        scheme = parallel.Ring("seq")
        return parallel.attention(x, x, x, scheme=scheme, mesh=mesh, specs=P(None, "seq"))

    message = "fa4_jax.parallel takes no symbolic query length, got n"
    with pytest.raises(NotImplementedError, match=message):
        jax.export.export(jax.jit(sharded))(struct(2, n, 2, 8))
