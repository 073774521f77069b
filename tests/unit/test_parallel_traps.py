"""Tests meshes, transformations and context parallelism together, where others go wrong."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from fa4_jax import attention, parallel, save_attention_policy
from fa4_jax.parallel import AllGather, Ring, Ulysses
from tests.parallel_cases import make_mesh

SEQ = P(None, "seq")
RING = Ring("seq")


def draw(rng: np.random.Generator, *leading: int, heads: tuple[int, int] = (2, 2)) -> list[Any]:
    n, k = heads
    return [rng.normal(size=(*leading, 16, x, 8)).astype(np.float32) for x in (n, k, k)]


def squares(output: jax.Array) -> jax.Array:
    return (output.astype(jnp.float32) ** 2).sum()


def expected(arrays: list[Any], **options: Any) -> Any:
    """Returns the gradients on one device."""
    return jax.jit(jax.grad(lambda *x: squares(attention(*x, **options)), (0, 1, 2)))(*arrays)


def assert_close(found: Any, truth: Any) -> None:
    for x, y in zip(found, truth, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5 * np.abs(y).max())


def local(scheme: parallel.Scheme = RING, **options: Any) -> Any:
    def loss(*x: jax.Array) -> jax.Array:
        output = parallel.local_attention(*x, scheme=scheme, is_causal=True, **options)
        return squares(output)

    return loss


@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients_inside_shard_map_with_and_without_types(rng, check_vma):
    arrays = draw(rng, 2)
    mapped = jax.shard_map(
        jax.grad(local(), (0, 1, 2)),
        mesh=make_mesh(AxisType.Auto, seq=2),
        in_specs=(SEQ,) * 3,
        out_specs=(SEQ,) * 3,
        check_vma=check_vma,
    )
    assert_close(jax.jit(mapped)(*arrays), expected(arrays, is_causal=True))


def test_data_axis_left_to_the_compiler(rng):
    mesh = make_mesh(AxisType.Auto, data=2, seq=2)
    arrays = draw(rng, 2)
    placed = [jax.device_put(x, NamedSharding(mesh, P("data", "seq"))) for x in arrays]
    mapped = jax.shard_map(
        jax.grad(local(), (0, 1, 2)),
        mesh=mesh,
        in_specs=(SEQ,) * 3,
        out_specs=(SEQ,) * 3,
        axis_names={"seq"},
    )
    assert_close(jax.jit(mapped)(*placed), expected(arrays, is_causal=True))


def test_explicit_axis_beside_a_manual_one_is_refused(rng):
    mesh = make_mesh(AxisType.Explicit, data=2, seq=2)
    placed = [jax.device_put(x, NamedSharding(mesh, P("data", "seq"))) for x in draw(rng, 2)]
    mapped = jax.shard_map(
        local(), mesh=mesh, in_specs=(SEQ,) * 3, out_specs=P(), axis_names={"seq"}
    )
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="make all of its axes manual"):
        mapped(*placed)


def test_replicated_lengths_and_offset_under_sharded_batch(rng):
    mesh = make_mesh(AxisType.Explicit, data=2, seq=2)
    arrays = draw(rng, 2)
    options: dict[str, Any] = {
        "is_causal": True,
        "query_offset": jnp.asarray([3, -2], jnp.int32),
        "key_value_seq_lengths": jnp.asarray([16, 5], jnp.int32),
    }
    placed = [jax.device_put(x, NamedSharding(mesh, P("data", "seq"))) for x in arrays]

    def loss(*x: jax.Array) -> jax.Array:
        output = parallel.attention(*x, scheme=RING, **options)
        assert jax.typeof(output).sharding.spec == P("data", "seq", None, None)
        return squares(output)

    with jax.set_mesh(mesh):
        found = jax.jit(jax.grad(loss, (0, 1, 2)))(*placed)
    assert_close(found, expected(arrays, **options))


def test_vmap_scan_and_remat(rng):
    """A scan of rematerialised layers of vmapped calls computes what one device does."""
    mesh = make_mesh(AxisType.Auto, seq=2)
    q, k, v = draw(rng, 3, 1)

    def stack(attend: Any) -> Any:
        layer = jax.checkpoint(
            lambda x, k, v: x + jax.vmap(attend)(x, k, v), policy=save_attention_policy
        )

        def loss(q: Any, k: Any, v: Any) -> jax.Array:
            return squares(jax.lax.scan(lambda x, _: (layer(x, k, v), None), q, None, 2)[0])

        return jax.jit(jax.grad(loss, (0, 1, 2)))

    def sharded(*x: jax.Array) -> jax.Array:
        return parallel.attention(*x, scheme=AllGather("seq"), mesh=mesh, specs=SEQ, is_causal=True)

    truth = stack(lambda *x: attention(*x, is_causal=True))(q, k, v)
    assert_close(stack(sharded)(q, k, v), truth)


def test_one_sequence_without_a_batch_axis_eagerly(rng):
    mesh = make_mesh(AxisType.Auto, seq=2)
    q, k, v = draw(rng)
    output, lse = parallel.attention(
        q, k, v, scheme=RING, mesh=mesh, specs=P("seq"), is_causal=True, return_residual=True
    )
    truth = attention(q, k, v, is_causal=True, return_residual=True)
    assert_close((output, lse), truth)
    assert output.sharding.is_equivalent_to(NamedSharding(mesh, P("seq")), 3)


def test_empty():
    mesh = make_mesh(AxisType.Auto, seq=2)
    q, k = jnp.ones((2, 16, 2, 8)), jnp.ones((2, 0, 2, 8))
    output, lse = parallel.attention(
        q, k, k, scheme=RING, mesh=mesh, specs=SEQ, return_residual=True
    )
    assert not output.any() and (lse == -jnp.inf).all()


def launches(text: str) -> int:
    return text.count("stablehlo.custom_call @fa4_jax_launch")


def test_launches_and_what_remat_keeps(kernels_present, rng):
    mesh = make_mesh(AxisType.Auto, seq=4)
    args = [jnp.asarray(rng.normal(size=(1, 512, n, 64)), jnp.bfloat16) for n in (4, 2, 2)]

    def loss(*x: jax.Array) -> jax.Array:
        output = parallel.attention(
            *x,
            scheme=Ring("seq", "zigzag"),
            mesh=mesh,
            specs=SEQ,
            is_causal=True,
        )
        return (output.astype(jnp.float32) ** 2).sum()

    def program(function: Any) -> str:
        traced = jax.jit(jax.value_and_grad(function, (0, 1, 2))).trace(*args)
        return traced.lower(lowering_platforms=("cuda",)).as_text()

    # Each of four pairs of shards has one launch forward and three backward.
    plain = program(loss)
    assert launches(plain) == 16
    assert plain.count("stablehlo.collective_permute") == 3 * 2 + 3 * 4
    assert launches(program(jax.checkpoint(loss))) == 20
    assert launches(program(jax.checkpoint(loss, policy=save_attention_policy))) == 16


@pytest.mark.parametrize("scheme", [Ring("seq"), AllGather("seq"), Ulysses("seq")], ids=str)
def test_float64_stays_float64(rng, scheme):
    mesh = make_mesh(AxisType.Auto, seq=2)

    def loss(function: Any) -> Any:
        def run(*x: jax.Array) -> jax.Array:
            output, lse = function(*x, is_causal=True, return_residual=True)
            assert output.dtype == lse.dtype == jnp.float64
            return (output**2).sum() + (lse**2).sum()

        return jax.jit(jax.value_and_grad(run, (0, 1, 2)))

    ours = functools.partial(parallel.attention, scheme=scheme, mesh=mesh, specs=SEQ)
    with jax.enable_x64(True):
        arrays = [jnp.asarray(x, jnp.float64) for x in draw(rng, 2, heads=(4, 2))]
        found, truth = loss(ours)(*arrays), loss(attention)(*arrays)
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(truth), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12)
