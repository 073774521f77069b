"""Masks of pairs: what they mean, errors, and what becomes of them under JAX's transformations."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fa4_jax
from fa4_jax import api, attention, launches, masks, parallel, target, xla
from tests.default_paths import PATHS, forced
from tests.fakes import fake_target

B, T, N, K, H = 4, 24, 4, 2, 8
Arrays = tuple[jax.Array, ...]


@pytest.fixture(scope="module", params=PATHS)
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """Makes the default path run one block, or many."""
    with forced(request.param, block=8):
        yield request.param


@pytest.fixture
def operands(rng: np.random.Generator) -> Arrays:
    """Query, key, value, and a table of the keys."""
    arrays = [jnp.asarray(rng.normal(size=(B, T, n, H)), jnp.float32) for n in (N, K, K)]
    return (*arrays, jnp.asarray(rng.integers(0, 5, (B, T)), jnp.int32))


def sees(b: Any, h: Any, q: Any, k: Any, table: Any) -> Any:
    """Depends on everything."""
    return ((q * 7 + k * 3 + h) % 5 < 3) | (table[b, k] == b)


def by_function(q: Any, k: Any, v: Any, table: Any) -> Any:
    mask = masks.function(sees, table) & ~masks.window(2, 1) | masks.segments(table, table)
    return attention(q, k, v, mask=mask, return_residual=True)


def by_array(q: Any, k: Any, v: Any, table: Any) -> Any:
    b, h, i, j = np.ogrid[:B, :N, :T, :T]
    x = np.asarray(table)
    seen = ((i * 7 + j * 3 + h) % 5 < 3) | (x[:, None, None, :] == b)
    seen = seen & ((j < i - 2) | (j > i + 1)) | (x[:, None, :, None] == x[:, None, None, :])
    return attention(q, k, v, mask=jnp.asarray(seen), return_residual=True)


def both_ways(function: Any, arrays: Arrays) -> list[Any]:
    """Returns output, log-sum-exp and gradients."""

    def loss(q: Any, k: Any, v: Any, table: Any) -> Any:
        output, lse = function(q, k, v, table)
        seen = jnp.where(lse == -jnp.inf, 0, lse)
        # No term is negative, so that the loss is not the small difference of large numbers.
        return (output**2).sum() + (1 + jnp.cos(seen)).sum(), (output, lse)

    run = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)
    return [np.asarray(x) for x in jax.tree.leaves(jax.jit(run)(*arrays))]


def close(actual: list[Any], expected: list[Any]) -> None:
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-4)


def test_operators_mean_what_they_say(path: str, operands: Arrays):
    expected = both_ways(lambda q, k, v, _: by_array(q, k, v, operands[3]), operands)
    close(both_ways(by_function, operands), expected)


@pytest.mark.parametrize("left", [True, False])
def test_arrays_compose_from_either_side(left: bool, operands: Arrays, rng: np.random.Generator):
    q, k, v, _ = operands
    array, window = rng.random((B, 1, T, T)) < 0.5, masks.window(4, 0)
    j, i = np.arange(T), np.arange(T)[:, None]
    seen = (j <= i) & (j >= i - 4)
    for mask, dense in (
        (array & window if left else window & jnp.asarray(array), array & seen),
        (array | window if left else window | jnp.asarray(array), array | seen),
    ):
        expected = attention(q, k, v, mask=jnp.asarray(dense))
        np.testing.assert_allclose(attention(q, k, v, mask=mask), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_batch_and_heads_are_shared_out(kind: AxisType, operands: Arrays):
    """A function is asked about the entries and heads of the device, by their own numbers."""
    expected = both_ways(by_function, operands)
    mesh = jax.make_mesh((2, 2), ("x", "y"), (kind,) * 2, devices=jax.devices()[:4])
    specs = *(P("x", None, "y"),) * 3, P()
    with jax.set_mesh(mesh):
        own = [
            jax.device_put(x, NamedSharding(mesh, spec))
            for x, spec in zip(operands, specs, strict=True)
        ]
        close(both_ways(by_function, tuple(own)), expected)


@pytest.mark.parametrize(
    "axes", [(0, 0, 0, None), (0, None, None, None), (0, 0, 0, 0), (None, None, None, 0)]
)
def test_vmap(axes: tuple[Any, ...], path: str, operands: Arrays):
    given = tuple(
        x if axis is None else jnp.stack([x, x[::-1]])
        for x, axis in zip(operands, axes, strict=True)
    )

    def one_by_one(*given: Any) -> Any:
        found = [
            by_function(*(x[i] if axis == 0 else x for x, axis in zip(given, axes, strict=True)))
            for i in range(2)
        ]
        return jax.tree.map(lambda *x: jnp.stack(x), *found)

    close(both_ways(jax.vmap(by_function, axes), given), both_ways(one_by_one, given))


def test_remat_and_second_derivatives(operands: Arrays):
    kept = jax.checkpoint(by_function, policy=fa4_jax.save_attention_policy)
    close(both_ways(kept, operands), both_ways(by_function, operands))
    q, *rest = operands

    def first(function: Any) -> Any:
        return jax.grad(lambda q: (function(q, *rest)[0] ** 2).sum())

    found, expected = (
        jax.jvp(first(function), (q,), (q,))[1] for function in (by_function, by_array)
    )
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-4)


def test_export_with_a_symbolic_batch_and_length(operands: Arrays):
    b, t = jax.export.symbolic_shape("b, t")
    structs = [jax.ShapeDtypeStruct((b, t, *x.shape[2:]), x.dtype) for x in operands]
    exported = jax.export.export(jax.jit(by_function))(*structs)
    for x, y in zip(exported.call(*operands), by_function(*operands), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


@pytest.fixture
def given_to_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Makes kernels for everything, on the CPU; shapes of what they take beside q, k, v."""
    fake = dataclasses.replace(fake_target(), platforms=("cuda", "cpu"))
    given: list[dict[str, Any]] = []

    def forward(plan: Any, operands: Any) -> Any:
        buffers = launches.forward_buffers(plan.problem, operands, plan.forward[0])
        given.append({name: x.shape for name, x in buffers.items()})
        return xla.forward(plan.problem, operands)

    def backward(plan: Any, operands: Any, cotangents: Any) -> Any:
        buffers = launches.backward_buffers(plan.problem, operands, plan.backward[1])
        given.append({name: x.shape for name, x in buffers.items()})
        return xla.backward(plan.problem, operands, cotangents)

    jax.clear_caches()
    monkeypatch.setattr(api, "current_target", lambda: fake)
    monkeypatch.setattr(target, "current_target", lambda: fake)
    monkeypatch.setattr(launches, "forward", forward)
    monkeypatch.setattr(launches, "backward", backward)
    yield given
    jax.clear_caches()


def half(operands: Arrays) -> Arrays:
    """The operands with query, key and value as kernels take them."""
    return (*(x.astype(jnp.bfloat16) for x in operands[:3]), *operands[3:])


def near(actual: list[Any], expected: list[Any]) -> None:
    """Fails unless arrays differ by no more than roundings of the storage type."""
    for x, y in zip(actual, expected, strict=True):
        x, y = (np.asarray(z, np.float32) for z in (x, y))
        np.testing.assert_allclose(x, y, rtol=5e-2, atol=5e-2)


def shared_by_heads(q: Any, k: Any, v: Any, table: Any) -> Any:
    mask = masks.function(lambda b, h, q, k, x: (q + x[b, k]) % 3 < 2, table)
    return attention(q, k, v, mask=mask, return_residual=True)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_kernels_get_the_bits_of_their_part(
    kind: AxisType, operands: Arrays, given_to_kernels: list[dict[str, Any]]
):
    """On a mesh each device has the bits of its entries and heads; shared ones stay whole."""
    arrays = half(operands)
    cases = ((shared_by_heads, B, 1, 1), (by_function, B, N, K))
    expected = [both_ways(function, arrays) for function, *_ in cases]
    mesh = jax.make_mesh((2, 2), ("x", "y"), (kind,) * 2, devices=jax.devices()[:4])
    for (function, b, n, k), whole in zip(cases, expected, strict=True):
        with jax.set_mesh(mesh):
            own = [
                jax.device_put(x, NamedSharding(mesh, spec))
                for x, spec in zip(arrays, (*(P("x", None, "y"),) * 3, P()), strict=True)
            ]
            given_to_kernels.clear()
            near(both_ways(function, tuple(own)), whole)
        heads, groups = (max(1, x // 2) for x in (n, k))
        last = [given for given in given_to_kernels if given["mask_bits"][0] == b // 2]
        assert {given["mask_bits"][:2] for given in last} == {(b // 2, heads)}
        states = {("query_order" in given, given["mask_some"][1]) for given in last}
        assert states == {(True, heads), (False, groups)}


@pytest.mark.parametrize("kind", [parallel.Ring, parallel.AllGather, parallel.Ulysses])
def test_kernels_get_the_bits_of_their_shard(
    kind: Any, operands: Arrays, given_to_kernels: list[dict[str, Any]]
):
    """Context parallelism: of a device's rows and the keys that it has, or of its heads."""
    arrays = half(operands)
    expected = both_ways(by_function, arrays)
    mesh = jax.make_mesh((2,), ("seq",), devices=jax.devices()[:2])

    def by_shards(q: Any, k: Any, v: Any, table: Any) -> Any:
        mask = masks.function(sees, table) & ~masks.window(2, 1) | masks.segments(table, table)
        return parallel.attention(
            *(q, k, v),
            scheme=kind("seq"),
            mesh=mesh,
            specs=P(None, "seq"),
            mask=mask,
            return_residual=True,
        )

    given_to_kernels.clear()
    near(both_ways(by_shards, arrays), expected)
    heads = N // 2 if kind is parallel.Ulysses else N
    assert {given["mask_bits"][:2] for given in given_to_kernels} == {(B, heads)}
    ways = {"query_order" in given for given in given_to_kernels}
    assert ways == {True, False}


@pytest.mark.parametrize(
    ("axes", "batches"),
    [((0, 0, 0, None), {2 * B}), ((0, None, None, None), {B}), ((0, 0, 0, 0), {2 * B})],
    ids=["all", "queries", "all and masks"],
)
def test_vmap_of_kernels(
    axes: tuple[Any, ...],
    batches: set[int],
    operands: Arrays,
    given_to_kernels: list[dict[str, Any]],
):
    arrays = half(operands)
    given = [
        x if axis is None else jnp.stack([x, x[::-1]]) for x, axis in zip(arrays, axes, strict=True)
    ]
    found = jax.jit(jax.vmap(shared_by_heads, axes))(*given)
    assert batches <= {shapes["mask_bits"][0] for shapes in given_to_kernels}
    for i in range(2):
        own = [x if axis is None else x[i] for x, axis in zip(given, axes, strict=True)]
        near([x[i] for x in found], jax.tree.leaves(jax.jit(shared_by_heads)(*own)))


def test_a_mask_of_all_entries_is_not_copied_by_vmap(
    operands: Arrays, given_to_kernels: list[dict[str, Any]]
):
    q, k, v, _ = half(operands)
    mask = masks.function(lambda b, h, q, k: q % 3 != k % 3)
    jax.vmap(lambda *x: attention(*x, mask=mask))(*(jnp.stack([x, x]) for x in (q, k, v)))
    assert given_to_kernels[-1]["mask_bits"][:2] == (1, 1)


def test_a_tile_table_holds_the_bits_for_all_layers(
    operands: Arrays, given_to_kernels: list[dict[str, Any]]
):
    q, k, v, table = half(operands)
    mask = masks.function(sees, table) & masks.segments(table // 2, table // 2)
    made = masks.tile_table(mask, q, k)
    leaves = jax.tree.leaves(made)
    assert any(x.ndim == 5 for x in leaves)
    found = attention(q, k, v, mask=made, is_causal=True)
    near([found], [attention(q, k, v, mask=mask, is_causal=True, implementation="xla")])
    with pytest.raises(ValueError, match="batch size 4"):
        attention(q[:2], k[:2], v[:2], mask=made)
    with pytest.raises(ValueError, match="made for 4 heads, but query has 2"):
        attention(q[:, :, :2], k, v, mask=made)


def test_a_tile_table_of_the_default_path_holds_no_bits(operands: Arrays):
    q, k, v, table = operands
    made = masks.tile_table(masks.function(sees, table), q, k)
    assert all(x.size <= B * T for x in jax.tree.leaves(made))
    expected = attention(q, k, v, mask=masks.function(sees, table))
    np.testing.assert_array_equal(attention(q, k, v, mask=made), expected)


def test_explain_names_the_bytes(operands: Arrays, given_to_kernels: list[dict[str, Any]]):
    q, k, v, table = half(operands)
    told = fa4_jax.explain(q, k, v, mask=masks.function(sees, table))
    (found,) = (x for x in told.workspaces if x.name == "mask_bits")
    assert found.shape == (B, N, 1, 4, 64) and found.num_bytes == 4 * B * N * 4 * 64
    assert "mask_bits: i32[4, 4, 1, 4, 64], 0.016 MB" in str(told)
    structs = [jax.ShapeDtypeStruct((1, 2**17, 1, 64), jnp.bfloat16) for _ in range(3)]
    mask = masks.function(lambda b, h, q, k: q >= k)
    with pytest.raises(NotImplementedError, match=r"2147483648 bytes.*is_causal|causality"):
        jax.eval_shape(lambda *x: attention(*x, mask=mask), *structs)
    found = jax.eval_shape(lambda *x: attention(*x, mask=mask, implementation="xla"), *structs)
    assert found.shape == (1, 2**17, 1, 64)


ZEROS = np.zeros((B, T, 3), np.int32)
WRONG: list[tuple[Any, str]] = [
    (masks.function(lambda b, h, q, k: q - k), "must return one boolean array, got .*int32"),
    (masks.function(lambda b, h, q, k: (q >= k, q)), "must return one boolean array"),
    (masks.function(lambda b, h, q, k: (q >= k).all()), r"broadcast to.*got shape \(\)"),
    (masks.function(lambda b, h, q, k: (q >= k)[..., :3]), r"elementwise"),
    (masks.function(lambda b, h, q, k: q >= k if q[0, 0, 0, 0] else q < k), "without Python's if"),
    (masks.function(lambda b, h, q, k: np.asarray(q) >= k), "without Python's if"),
    (masks.intervals(ZEROS[..., :0], ZEROS[..., :0]), r"intervals' low .*n <= 3.*\(4, 24, 0\)"),
    (masks.intervals(np.zeros((B, T, 4), np.int32), ZEROS), r"intervals' low .*\(4, 24, 4\)"),
    (masks.intervals(ZEROS[..., :1], ZEROS), r"as many, got \(4, 24, 1\) and \(4, 24, 3\)"),
    (masks.intervals(ZEROS + 0.5, ZEROS), "intervals' low .*float64"),
    (masks.window(1, 1) & np.ones((3, 1, 1, T), bool), r"mask must broadcast .*\(3, 1, 1, 24\)"),
    (~masks.window(-1, 1), "mask: window .*-1"),
    (~masks.ranges(ZEROS[..., 0], ZEROS), "ranges' high"),
]


@pytest.mark.parametrize(("mask", "message"), WRONG, ids=lambda x: x if type(x) is str else "")
def test_wrong(mask: Any, message: str, operands: Arrays):
    with pytest.raises(ValueError, match=message):
        attention(*operands[:3], mask=mask)


def test_what_masks_do_not_compose_with(operands: Arrays):
    window = masks.window(1, 1)
    with pytest.raises(ValueError, match="an array of int64"):
        _ = window | np.ones((T, T), int)
    with pytest.raises(ValueError, match="masks and boolean arrays, got list"):
        _ = window & [True]
    table = masks.tile_table(window, *operands[:2])
    with pytest.raises(ValueError, match="tile table composes with nothing"):
        attention(*operands[:3], mask=~table)
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    with pytest.raises(NotImplementedError, match="mask: an array of all pairs in fa4_jax"):
        scheme, mask = parallel.Ring("x"), ~(window & np.ones((T, T), bool))
        parallel.attention(*operands[:3], mask=mask, scheme=scheme, mesh=mesh, specs=P(None, "x"))
