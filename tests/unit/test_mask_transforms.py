"""Masks, soft caps, sinks and largest scores under vmap, meshes, remat and export."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fa4_jax
from fa4_jax import api, attention, launches, masks, support, xla
from fa4_jax.conformance.cases import Case
from fa4_jax.conformance.oracle import make_inputs, visible
from fa4_jax.conformance.runner import arguments, masking
from tests.default_paths import PATHS, forced
from tests.fakes import fake_target

B, T, N, K, H = 4, 24, 4, 2, 8
Operands = tuple[jax.Array, ...]
DIFFERENTIABLE = (0, 1, 2, 5, 6)


@pytest.fixture(scope="module", params=PATHS)
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """Makes the default path run one block, or many."""
    with forced(request.param, block=8):
        yield request.param


@pytest.fixture
def operands(rng: np.random.Generator) -> Operands:
    """Query, key, value, ids in order, ids in any order, sinks and the cap."""
    q, k, v = (rng.normal(size=(B, T, n, H)) for n in (N, K, K))
    ids, mixed = np.sort(rng.integers(-1, 4, (B, T))), rng.integers(-1, 4, (B, T))
    sinks, cap = rng.normal(size=N), np.asarray(2.0)
    return (
        *(jnp.asarray(x, jnp.float32) for x in (q, k, v)),
        *(jnp.asarray(x, jnp.int32) for x in (ids, mixed)),
        *(jnp.asarray(x, jnp.float32) for x in (sinks, cap)),
    )


def forward(q: Any, k: Any, v: Any, ids: Any, mixed: Any, sinks: Any, cap: Any) -> Any:
    """Returns output, log-sum-exp and largest scores."""
    mask = masks.block_causal(mixed) & masks.window(jnp.int32(9), None) & masks.chunked(16)
    return attention(
        *(q, k, v),
        mask=mask,
        segment_ids=ids,
        sinks=sinks,
        logits_soft_cap=cap,
        return_residual=True,
        return_max_logit=True,
    )


def both_ways(function: Any, operands: Operands) -> list[Any]:
    """Returns the results of the forward and the gradients of all floating operands."""

    def loss(*operands: Any) -> Any:
        output, lse, top = function(*operands)
        return (output**2).sum() + (lse * jnp.cos(lse)).sum(), (output, lse, top)

    run = jax.value_and_grad(loss, DIFFERENTIABLE, has_aux=True)
    return [np.asarray(x) for x in jax.tree.leaves(jax.jit(run)(*operands))]


def close(actual: list[Any], expected: list[Any]) -> None:
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_batch_and_heads_are_shared_out(kind: AxisType, operands: Operands):
    expected = both_ways(forward, operands)
    mesh = jax.make_mesh((2, 2), ("x", "y"), (kind,) * 2, devices=jax.devices()[:4])
    specs = *(P("x", None, "y"),) * 3, P("x"), P("x"), P("y"), P()
    with jax.set_mesh(mesh):
        own = [
            jax.device_put(x, NamedSharding(mesh, spec))
            for x, spec in zip(operands, specs, strict=True)
        ]
        close(both_ways(forward, tuple(own)), expected)


def test_inside_a_shard_map(operands: Operands):
    mesh = jax.make_mesh((2, 2), ("x", "y"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])
    specs = *(P("x", None, "y"),) * 3, P("x"), P("x"), P("y"), P()
    results = P("x", None, "y"), P("x", "y"), P("x", "y")
    mapped = jax.shard_map(forward, mesh=mesh, in_specs=specs, out_specs=results)
    close(both_ways(mapped, operands), both_ways(forward, operands))


def test_ids_that_are_sharded_along_their_length_are_refused(operands: Operands):
    q, k, v, ids, *_ = operands
    mesh = jax.make_mesh((2,), ("x",), (AxisType.Explicit,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"segment_ids .*\(4, 24\).*'x'"):
        attention(q, k, v, segment_ids=jax.device_put(ids, NamedSharding(mesh, P(None, "x"))))


@pytest.mark.parametrize(
    "axes",
    [
        (0, 0, 0, 0, 0, None, None),
        (0, None, None, None, None, None, None),  # more heads of the same keys
        (0, 0, 0, None, None, None, None),
        (0, None, None, 0, None, None, None),
        (0, 0, 0, None, 0, 0, None),
        (None, None, None, None, None, None, 0),
    ],
    ids=["all", "queries", "one mask", "ids", "sinks", "cap"],
)
def test_vmap(axes: tuple[Any, ...], path: str, operands: Operands):
    """Against calls one by one; a batched operand has instances with a batch of 2 each."""
    each = [
        x.reshape(2, -1, *x.shape[1:]) if i < 5 else jnp.stack([x, x + 0.5])
        for i, x in enumerate(operands)
    ]
    given = tuple(x if axis == 0 else x[0] for x, axis in zip(each, axes, strict=True))

    def one_by_one(*given: Any) -> Any:
        found = [
            forward(*(x[i] if axis == 0 else x for x, axis in zip(given, axes, strict=True)))
            for i in range(2)
        ]
        return jax.tree.map(lambda *x: jnp.stack(x), *found)

    close(both_ways(jax.vmap(forward, axes), given), both_ways(one_by_one, given))


def test_a_vmap_of_an_unbatched_sequence(path: str, operands: Operands):
    """Each instance drops the batch axis, of its ids, too."""
    axes = *(0,) * 5, None, None
    close(both_ways(jax.vmap(forward, axes), operands), both_ways(forward, operands))


def test_remat(path: str, operands: Operands):
    kept = jax.checkpoint(forward, policy=fa4_jax.save_attention_policy)
    close(both_ways(kept, operands), both_ways(forward, operands))


@pytest.mark.parametrize("names", ["b", "bt"])
def test_export_with_symbolic_sizes(names: str, operands: Operands):
    symbols = dict(zip(names, jax.export.symbolic_shape(",".join(names)), strict=True))
    b, t = symbols["b"], symbols.get("t", T)
    shapes = *((b, t, n, H) for n in (N, K, K)), (b, t), (b, t), (N,), ()
    structs = [
        jax.ShapeDtypeStruct(shape, x.dtype) for shape, x in zip(shapes, operands, strict=True)
    ]
    exported = jax.export.export(jax.jit(forward))(*structs)
    for x, y in zip(exported.call(*operands), forward(*operands), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def test_a_window_that_alternates_in_a_scan(rng: np.random.Generator):
    q = jnp.asarray(rng.normal(size=(1, 40, 2, 8)), jnp.float32)

    def layer(x: Any, left: Any) -> Any:
        return attention(x, x, x, mask=masks.window(left, None), is_causal=True), None

    found, _ = jax.lax.scan(layer, q, jnp.array([5, 40], jnp.int32))
    expected = attention(q, q, q, is_causal=True, local_window_size=(5, None))
    expected = attention(expected, expected, expected, is_causal=True)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_sinks_and_cap_of_an_empty_call(operands: Operands):
    q, k, v, *_, sinks, _ = operands

    def run(sinks: Any) -> Any:
        empty = k[:, :0], v[:, :0]
        return attention(q, *empty, sinks=sinks, return_residual=True, return_max_logit=True)

    output, lse, top = run(sinks)
    assert not output.any() and (np.asarray(top) == -np.inf).all()
    np.testing.assert_array_equal(lse, np.broadcast_to(sinks[None, :, None], (B, N, T)))
    np.testing.assert_allclose(jax.grad(lambda x: run(x)[1].sum())(sinks), [B * T] * N)


def test_sinks_keep_their_type(operands: Operands):
    q, k, v, *_, sinks, _ = operands
    gradient = jax.grad(lambda x: attention(q, k, v, sinks=x).sum())(sinks.astype(jnp.bfloat16))
    assert gradient.dtype == jnp.bfloat16 and gradient.shape == (N,)


def test_largest_scores_are_not_differentiated(operands: Operands):
    q, k, v, *_ = operands

    def largest(q: Any) -> Any:
        return attention(q, k, v, return_max_logit=True)[1].sum()

    assert not jax.grad(largest)(q).any()


@pytest.mark.parametrize(
    "case",
    [
        Case(query_length=90, key_length=90, masks=("segments",), is_causal=True),
        Case(query_length=30, key_length=50, masks=("ranges",), query_lengths=(30, 8)),
        Case(query_length=30, key_length=50, masks=("prefix",), window=(9, 4), query_offset=(0, 7)),
    ],
    ids=lambda case: case.id,
)
def test_explain_counts_what_is_seen(case: Case):
    inputs = make_inputs(case, 0)
    options = arguments(case) | masking(inputs)
    told = fa4_jax.explain(inputs.query, inputs.key, inputs.value, **options)
    seen = visible(case, None, inputs.masks).sum()
    assert told.forward_flops == 4 * case.head_dim * seen


@pytest.mark.parametrize("batch", [1, B])
def test_kernels_get_the_ranges_of_their_part(batch: int, monkeypatch: pytest.MonkeyPatch):
    """On Auto axes ranges and tags go where their entries go; one entry's for all stay whole."""
    target = dataclasses.replace(fake_target(), platforms=("cuda", "cpu"))
    launched: set[tuple[str, int, int]] = set()

    def launch(way: str, default: Any, plan: Any, *args: Any) -> Any:
        launched.add((way, plan.problem.batch, args[0].rows.low.shape[0]))
        return default(plan.problem, *args)

    jax.clear_caches()
    monkeypatch.setattr(api, "current_target", lambda: target)
    for way, default in (("forward", xla.forward), ("backward", xla.backward)):
        monkeypatch.setattr(launches, way, functools.partial(launch, way, default))
    rng = np.random.default_rng(batch)
    ids = jnp.asarray(rng.integers(-1, 3, (batch, T)), jnp.int32)
    args = [jnp.asarray(rng.normal(size=(B, T, n, H)), jnp.bfloat16) for n in (N, K, K)]

    def loss(q: Any, k: Any, v: Any, ids: Any) -> Any:
        output, lse = attention(q, k, v, segment_ids=ids, return_residual=True)
        return (output.astype(jnp.float32) ** 2).sum(), (output, lse)

    run = jax.jit(lambda *args: jax.tree.leaves(jax.grad(loss, (0, 1, 2), has_aux=True)(*args)))
    expected = run(*args, ids)
    mesh = jax.make_mesh((2, 2), ("x", "y"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])
    placed = [jax.device_put(x, NamedSharding(mesh, P("x", None, "y"))) for x in args]
    of_ids = jax.device_put(ids, NamedSharding(mesh, P("x") if batch > 1 else P()))
    results = run(*placed, of_ids)
    parts = ((B, batch), (B // 2, max(batch // 2, 1)))
    assert launched == {(way, *sizes) for way in ("forward", "backward") for sizes in parts}
    for result, value in zip(results, expected, strict=True):
        np.testing.assert_allclose(
            *(np.asarray(x, np.float32) for x in (result, value)), rtol=2e-2, atol=2e-2
        )
    jax.clear_caches()


@pytest.fixture
def given_to_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Makes kernels for everything, on the CPU; shapes of what forwards take beside q, k, v."""
    target = dataclasses.replace(fake_target(), platforms=("cuda", "cpu"))
    given: list[dict[str, Any]] = []

    def launch(plan: Any, operands: Any) -> Any:
        buffers = launches.forward_buffers(plan.problem, operands, plan.forward[0])
        given.append({name: x.shape for name, x in buffers.items()})
        return xla.forward(plan.problem, operands)

    jax.clear_caches()
    monkeypatch.setattr(api, "current_target", lambda: target)
    monkeypatch.setattr(launches, "forward", launch)
    monkeypatch.setattr(launches, "backward", lambda plan, *args: xla.backward(plan.problem, *args))
    yield given
    jax.clear_caches()


def half(operands: Operands) -> Operands:
    """The operands with query, key and value as kernels take them."""
    return (*(x.astype(jnp.bfloat16) for x in operands[:3]), *operands[3:])


def near(actual: Any, expected: Any) -> None:
    """Fails unless two arrays differ by no more than roundings of the storage type."""
    actual, expected = (np.asarray(x, np.float32) for x in (actual, expected))
    np.testing.assert_allclose(actual, expected, rtol=1e-7, atol=2e-2)


def plain(q: Any, k: Any, v: Any, sinks: Any, cap: Any) -> Any:
    """Returns output, log-sum-exp and largest scores of a call without row masks."""
    options = {"sinks": sinks, "logits_soft_cap": cap, "return_max_logit": True}
    return attention(q, k, v, is_causal=True, return_residual=True, **options)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_kernels_get_the_sinks_of_their_heads(
    kind: AxisType, operands: Operands, given_to_kernels: list[dict[str, Any]]
):
    """On a mesh each device has its part of sinks and largest scores, and the whole cap."""
    expected = jax.jit(forward)(*half(operands))
    assert given_to_kernels[-1]["max_logit"] == (B, N)
    mesh = jax.make_mesh((2, 2), ("x", "y"), (kind,) * 2, devices=jax.devices()[:4])
    specs = *(P("x", None, "y"),) * 3, P("x"), P("x"), P("y"), P()
    with jax.set_mesh(mesh):
        own = [
            jax.device_put(x, NamedSharding(mesh, spec))
            for x, spec in zip(half(operands), specs, strict=True)
        ]
        found = jax.jit(forward)(*own)
    part = {name: given_to_kernels[-1][name] for name in ("sinks", "max_logit", "soft_cap")}
    assert part == {"sinks": (N // 2,), "max_logit": (B // 2, N // 2), "soft_cap": (1,)}
    for x, y in zip(found, expected, strict=True):
        near(x, y)


@pytest.mark.parametrize(
    ("axes", "batches"),
    [
        ((0, 0, 0, None, None), {2 * B}),  # one launch for all
        ((0, None, None, None, None), {B}),  # more heads of the same keys
        ((0, 0, 0, 0, None), {B}),  # one launch each
        ((None, None, None, None, 0), {B}),
    ],
    ids=["all", "queries", "sinks", "caps"],
)
def test_vmap_of_kernels(
    axes: tuple[Any, ...],
    batches: set[int],
    operands: Operands,
    given_to_kernels: list[dict[str, Any]],
):
    q, k, v, *_, sinks, cap = half(operands)
    given = [
        x if axis is None else jnp.stack([x, 0.5 * x])
        for x, axis in zip((q, k, v, sinks, cap), axes, strict=True)
    ]
    found = jax.jit(jax.vmap(plain, axes))(*given)
    assert batches <= {shapes["max_logit"][0] for shapes in given_to_kernels}
    for i in range(2):
        own = [x if axis is None else x[i] for x, axis in zip(given, axes, strict=True)]
        for x, y in zip(found, jax.jit(plain)(*own), strict=True):
            near(x[i], y)


def test_gradients_beside_a_kernels_forward(
    operands: Operands, given_to_kernels: list[dict[str, Any]]
):
    """The kernels compute no gradient of a traced cap: all gradients are the default path's."""
    q, k, v, *_, sinks, cap = half(operands)

    def gradients(implementation: Any, sinks: Any, cap: Any) -> Any:
        def loss(q: Any, sinks: Any, cap: Any) -> Any:
            options = {"sinks": sinks, "implementation": implementation, "logits_soft_cap": cap}
            output = attention(q, k, v, **options)
            return (output.astype(jnp.float32) ** 2).sum()

        return jax.jit(jax.grad(loss, (0, 1, 2) if cap is not None else (0, 1)))(q, sinks, cap)

    for own in (cap, None):
        found, expected = (gradients(name, sinks, own) for name in (None, "xla"))
        for x, y in zip(found, expected, strict=True):
            near(x, y)
    # Sinks alone have a kernel of their own.
    assert {shapes.get("soft_cap") for shapes in given_to_kernels} == {(1,), None}
    with pytest.raises(NotImplementedError, match="backward: logits_soft_cap: it is traced"):
        gradients("kernel", sinks, cap)


def test_both_architectures_take_every_capability(operands: Operands):
    q, k, v, ids, *_, sinks, _ = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands)
    half = [jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in (q, k, v)]
    asked: dict[str, dict[str, Any]] = {
        "segment_ids or mask": {"segment_ids": ids},
        "logits_soft_cap": {"logits_soft_cap": 30.0},
        "sinks": {"sinks": sinks},
        "return_max_logit": {"return_max_logit": True},
    }
    for name, options in asked.items():
        for arch in ("sm_90a", "sm_100f"):
            assert fa4_jax.supports(*half, arch=arch, **options), (name, arch)
    assert fa4_jax.supports(*half, arch="sm_90a", mask=masks.window(127, 0))
    assert fa4_jax.supports(*half, arch="sm_90a", mask=masks.segments(ids))
    assert support.explain(*half, segment_ids=ids).forward_flops == 4 * H * B * N * T * T
