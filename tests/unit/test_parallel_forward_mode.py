"""Forward mode and second derivatives of context parallelism, in float64, on virtual devices."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from fa4_jax import autodiff, masks, parallel
from tests.derivative_checks import (
    DERIVATIVES,
    Call,
    Function,
    Point,
    by_custom_vjp,
    close,
    grad_of_grad,
    jvp,
    loss,
    mean_flow,
    opcodes,
)
from tests.parallel_cases import make_mesh, schemes

B, L, N, K, H = 2, 16, 4, 2, 4
SHAPES = {"query": (B, L, N, H), "key": (B, L, K, H), "value": (B, L, K, H)}
ROWS, KEYS = np.arange(L)[:, None], np.arange(L)[None]
CAUSAL = (KEYS <= ROWS)[None, None]
LENGTHS = np.array([16, 5])
SEGMENTS = np.arange(L) // 6

CALLS = (
    Call("dense, sinks", ("sinks",), {}, np.ones((1, 1, L, L), bool)),
    Call("causal", (), {"is_causal": True}, CAUSAL),
    Call(
        "window, lengths, empty rows",
        (),
        {"local_window_size": (3, 0), "key_value_seq_lengths": jnp.asarray(LENGTHS, jnp.int32)},
        CAUSAL & (KEYS >= ROWS - 3) & (KEYS[None, None] < LENGTHS[:, None, None, None]),
    ),
    Call(
        "causal, segments, function, cap",
        (),
        {
            "is_causal": True,
            "segment_ids": SEGMENTS,
            "logits_soft_cap": 2.0,
            "mask": masks.function(lambda b, h, q, k: (q + k) % 4 > 0),
        },
        CAUSAL & (SEGMENTS[:, None] == SEGMENTS)[None, None] & ((ROWS + KEYS) % 4 > 0),
    ),
)
SCHEMES = [*schemes("seq"), *schemes("ring", "ulysses")]


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        yield


def make(call: Call, rng: np.random.Generator) -> Point:
    shapes = SHAPES | ({"sinks": (N,)} if "sinks" in call.more else {})
    return {name: jnp.asarray(rng.normal(size=shape)) for name, shape in shapes.items()}


def mesh_of(kind: AxisType, scheme: parallel.Scheme) -> Mesh:
    """Two devices an axis, or four for the one that there is."""
    axes = dict.fromkeys(scheme.axes, 2 if len(scheme.axes) == 2 else 4)
    return make_mesh(kind, **axes)


def ordered(scheme: parallel.Scheme, mesh: Mesh, x: jax.Array, back: bool = False) -> jax.Array:
    """Rows or keys [B, L, ...] in the scheme's order, or back from it."""
    if scheme.layout == "contiguous":
        return x
    reorder = parallel.from_zigzag if back else parallel.to_zigzag
    return reorder(x, mesh.shape[scheme.axes[0]])


def ours(call: Call, scheme: parallel.Scheme, mesh: Mesh) -> Function:
    """Output and log-sum-exp of the whole sequences in their natural order."""
    spec, whole = P(None, scheme.axes), call.options
    segments = whole.get("segment_ids")

    def local(point: Point, ids: Any) -> Any:
        options = whole if ids is None else whole | {"segment_ids": ids}
        return parallel.local_attention(**point, **options, scheme=scheme, return_residual=True)

    def run(point: Point) -> Any:
        placed = {
            name: x if name == "sinks" else ordered(scheme, mesh, x) for name, x in point.items()
        }
        ids = None
        if segments is not None:
            ids = ordered(scheme, mesh, jnp.broadcast_to(jnp.asarray(segments, jnp.int32), (B, L)))
        specs = {name: P() if name == "sinks" else spec for name in point}
        output, lse = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(specs, spec),
            out_specs=(spec, P(None, None, scheme.axes)),
        )(placed, ids)
        back = functools.partial(ordered, scheme, mesh, back=True)
        return back(output), back(lse.swapaxes(1, 2)).swapaxes(1, 2)

    return run


def check(call: Call, scheme: parallel.Scheme, derivative: Any, rng: np.random.Generator) -> None:
    """Compares a derivative inside a shard_map with that of a dense function."""
    x, u, v = (make(call, rng) for _ in range(3))
    run = ours(call, scheme, mesh_of(AxisType.Auto, scheme))
    actual = jax.jit(functools.partial(derivative, run))(x, u, v)
    close(actual, jax.jit(functools.partial(derivative, call.plain))(x, u, v))


@pytest.mark.parametrize(
    ("scheme", "derivative"),
    [
        pytest.param(
            *(scheme, derivative),
            id=f"{type(scheme).__name__}-{scheme.layout}-{derivative.__name__}",
            marks=() if (i + j) % 4 == 0 else pytest.mark.every_case,
        )
        for i, scheme in enumerate(SCHEMES)
        for j, derivative in enumerate(DERIVATIVES)
    ],
)
def test_inside_shard_map(scheme: Any, derivative: Any, rng: np.random.Generator) -> None:
    """One call by the seed. Each scheme and each derivative runs, with --every-case all pairs."""
    check(CALLS[rng.integers(len(CALLS))], scheme, derivative, rng)


@pytest.mark.parametrize("derivative", [jvp, grad_of_grad], ids=lambda x: x.__name__)
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
@pytest.mark.parametrize("scheme", [parallel.Ring("seq"), parallel.AllGather("seq")], ids=str)
def test_every_call(scheme: Any, call: Call, derivative: Any, rng: np.random.Generator) -> None:
    check(call, scheme, derivative, rng)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES[::2], ids=lambda x: type(x).__name__)
def test_meshes(scheme: Any, kind: Any, rng: np.random.Generator) -> None:
    call = CALLS[1]
    x, u, v = (make(call, rng) for _ in range(3))
    mesh, spec = mesh_of(kind, scheme), P(None, scheme.axes)

    def run(point: Point) -> Any:
        return parallel.attention(
            **point, **call.options, scheme=scheme, specs=spec, return_residual=True
        )

    expected = jax.jit(functools.partial(mean_flow, call.plain))(x, u, v)
    sharding = jax.sharding.NamedSharding(mesh, spec)
    with jax.set_mesh(mesh):
        placed = jax.tree.map(lambda a: jax.device_put(a, sharding), (x, u, v))
        actual = jax.jit(functools.partial(mean_flow, run))(*placed)
    close(actual, expected)


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda x: f"{type(x).__name__}-{x.layout}")
def test_a_training_step_is_what_a_custom_vjp_makes_of_it(
    scheme: Any, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    call = CALLS[1]
    x = make(call, rng)
    run = ours(call, scheme, mesh_of(AxisType.Auto, scheme))

    def compiled() -> Any:
        jax.clear_caches()
        step = jax.jit(jax.value_and_grad(lambda x: loss(run)(x)))
        return step.lower(x).compile()

    new = compiled()
    monkeypatch.setattr(autodiff, "run", by_custom_vjp)
    old = compiled()
    assert opcodes(new.as_text()) == opcodes(old.as_text())
