"""Forward mode and second derivatives, in float64, against those of a dense function of JAX's."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from fa4_jax import attention, autodiff, log, xla
from tests import default_paths
from tests.derivative_checks import (
    DERIVATIVES,
    Call,
    Function,
    Point,
    by_custom_vjp,
    close,
    grad_of_grad,
    grad_of_jvp,
    jvp,
    jvp_of_grad,
    jvp_of_jvp,
    loss,
    mean_flow,
    opcodes,
)

B, T, S, N, K, H = 2, 9, 12, 4, 2, 8
SHAPES = {"query": (B, T, N, H), "key": (B, S, K, H), "value": (B, S, K, H)}
MORE = {"bias": (1, N, T, S), "sinks": (N,), "scale": (), "logits_soft_cap": ()}


ROWS, KEYS = np.arange(T)[:, None], np.arange(S)[None]
EVERY = np.ones((1, 1, T, S), bool)
KEY_LENGTHS = np.array([12, 3])
QUERY_IDS, KEY_IDS = np.arange(T) // 4, np.arange(S) % 3
SEGMENTS = (jnp.asarray(QUERY_IDS, jnp.int32)[None], jnp.asarray(KEY_IDS, jnp.int32)[None])

CALLS = (
    Call("dense", (), {}, EVERY),
    Call("causal", (), {"is_causal": True}, (KEYS <= ROWS)[None, None]),
    Call(
        "window, lengths, empty rows",
        (),
        {
            "local_window_size": (2, 0),
            "key_value_seq_lengths": jnp.asarray(KEY_LENGTHS, jnp.int32),
        },
        ((KEYS <= ROWS) & (KEYS >= ROWS - 2))[None, None]
        & (KEYS[None, None] < KEY_LENGTHS[:, None, None, None]),
    ),
    Call("bias, traced scale", ("bias", "scale"), {}, EVERY),
    Call("sinks, traced cap", ("sinks", "logits_soft_cap"), {}, EVERY),
    Call(
        "segments, sinks",
        ("sinks",),
        {"segment_ids": SEGMENTS},
        (QUERY_IDS[:, None] == KEY_IDS[None])[None, None],
    ),
)


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(params=["dense", "blockwise"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Either implementation of the default path; `blockwise` has several blocks a side."""
    if request.param == "blockwise":
        monkeypatch.setattr(xla, "SETTINGS", dataclasses.replace(xla.SETTINGS, dense_scores=0))
        monkeypatch.setattr(xla.blockwise, "block_sizes", default_paths.blocks_of(8))
    jax.clear_caches()
    return request.param


def make(call: Call, rng: np.random.Generator) -> Point:
    """Operands; a scale and a cap are positive."""
    shapes = SHAPES | {name: MORE[name] for name in call.more}
    point = {name: jnp.asarray(rng.normal(size=shape)) for name, shape in shapes.items()}
    return point | {name: 1 + jnp.abs(point[name]) for name in call.more if MORE[name] == ()}


@pytest.mark.parametrize("derivative", DERIVATIVES, ids=lambda x: x.__name__)
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_derivatives(call: Call, derivative: Any, path: str, rng: np.random.Generator) -> None:
    x, u, v = (make(call, rng) for _ in range(3))
    actual = jax.jit(functools.partial(derivative, call.ours))(x, u, v)
    close(actual, jax.jit(functools.partial(derivative, call.plain))(x, u, v))


@pytest.mark.parametrize("derivative", DERIVATIVES, ids=lambda x: x.__name__)
@pytest.mark.parametrize("shared", [(), ("key", "value"), ("query",)], ids=str)
def test_vmap(derivative: Any, shared: tuple[str, ...], rng: np.random.Generator) -> None:
    call = CALLS[4]
    x, u, v = (make(call, rng) for _ in range(3))
    many = {
        name: value if name in shared else jnp.stack([value, 0.5 * value, -value])
        for name, value in x.items()
    }
    many["logits_soft_cap"] = x["logits_soft_cap"]
    axes = {name: None if many[name].ndim == x[name].ndim else 0 for name in x}
    run = functools.partial(derivative, call.ours)
    actual = jax.jit(jax.vmap(run, (axes, None, None)))(many, u, v)
    each = jax.jit(functools.partial(derivative, call.plain))
    expected = [
        each({name: y if axes[name] is None else y[i] for name, y in many.items()}, u, v)
        for i in range(3)
    ]
    close(actual, jax.tree.map(lambda *some: jnp.stack(some), *expected))


@pytest.mark.slow
def test_jacobians_and_hessian(rng: np.random.Generator) -> None:
    call = CALLS[1]
    x = make(call, rng)

    def of_query(function: Function) -> Callable[[jax.Array], Any]:
        return lambda q: function(x | {"query": q})[0][:, :3]

    for derivative in (jax.jacfwd, jax.jacrev):
        close(*(derivative(of_query(f))(x["query"]) for f in (call.ours, call.plain)))
    scalar = [lambda q, f=f: jnp.sin(of_query(f)(q)).sum() for f in (call.ours, call.plain)]
    close(*(jax.hessian(f)(x["query"]) for f in scalar))


@pytest.mark.parametrize("policy", [None, autodiff.save_attention_policy], ids=["all", "names"])
def test_remat_and_scan(policy: Any, path: str, rng: np.random.Generator) -> None:
    call = CALLS[1]
    x, u, _ = (make(call, rng) for _ in range(3))

    def layers(function: Function) -> Function:
        def layer(carry: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
            output, lse = function(x | {"query": carry})
            return carry + output, lse

        def run(point: Point) -> Any:
            return jax.lax.scan(jax.checkpoint(layer, policy=policy), point["query"], None, 3)

        return run

    one = {"query": x["query"]}
    for derivative in (jvp, jvp_of_grad, grad_of_grad):
        run = functools.partial(derivative, v=one)
        close(*(run(layers(f), x=one, u={"query": u["query"]}) for f in (call.ours, call.plain)))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("derivative", DERIVATIVES, ids=lambda x: x.__name__)
def test_meshes(kind: Any, derivative: Any, rng: np.random.Generator) -> None:
    call = CALLS[1]
    x, u, v = (make(call, rng) for _ in range(3))
    expected = jax.jit(functools.partial(derivative, call.plain))(x, u, v)
    mesh = jax.make_mesh((2, 2), ("x", "y"), (kind,) * 2, devices=jax.devices()[:4])
    sharding = NamedSharding(mesh, P("x", None, "y"))
    with jax.set_mesh(mesh):
        placed = [{name: jax.device_put(a, sharding) for name, a in p.items()} for p in (x, u, v)]
        actual = jax.jit(functools.partial(derivative, call.ours))(*placed)
    close(actual, expected)


@pytest.mark.parametrize("derivative", [jvp, jvp_of_grad, mean_flow], ids=lambda x: x.__name__)
def test_inside_shard_map(derivative: Any, rng: np.random.Generator) -> None:
    """Keys and values are the same on all devices of an axis, so their gradients are sums."""
    call = CALLS[1]
    x, u, v = (make(call, rng) for _ in range(3))
    kinds = (AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("x", "y"), kinds, devices=jax.devices()[:4])
    specs = dict.fromkeys(SHAPES, P("x", None, "y"))

    def local(function: Function) -> Function:
        return jax.shard_map(
            function,
            mesh=mesh,
            in_specs=(specs,),
            out_specs=(P("x", None, "y"), P("x", "y")),
        )

    actual = jax.jit(functools.partial(derivative, local(call.ours)))(x, u, v)
    close(actual, jax.jit(functools.partial(derivative, call.plain))(x, u, v))


@pytest.mark.parametrize("policy", [None, autodiff.save_attention_policy], ids=["all", "names"])
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_a_training_step_is_what_a_custom_vjp_makes_of_it(
    call: Call, policy: Any, path: str, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    x = make(call, rng)

    def compiled() -> Any:
        jax.clear_caches()
        layer = jax.checkpoint(loss(call.ours), policy=policy)
        return jax.jit(jax.value_and_grad(lambda x: layer(x))).lower(x).compile()

    new = compiled()
    monkeypatch.setattr(autodiff, "run", by_custom_vjp)
    old = compiled()
    assert opcodes(new.as_text()) == opcodes(old.as_text())
    sizes = [program.memory_analysis().temp_size_in_bytes for program in (new, old)]
    assert sizes[0] <= sizes[1]


def lowered(function: Callable[..., Any], *args: Any) -> str:
    """A program for CUDA."""
    return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def self_attention(implementation: Any, **options: Any) -> Callable[[jax.Array], jax.Array]:
    run = functools.partial(attention, implementation=implementation, **options)
    return lambda q: run(q, q, q)


@pytest.mark.parametrize("implementation", [None, "kernel"])
def test_tangents_are_one_launch_more(
    implementation: Any, kernels_present: None, caplog: pytest.LogCaptureFixture
) -> None:
    log.warn_once.cache_clear()
    x = jnp.ones((1, 64, 2, 64), jnp.bfloat16)
    run = self_attention(implementation)
    assert lowered(lambda x: jax.jvp(run, (x,), (x,)), x).count("fa4_jax_launch") == 2
    several = lowered(lambda x: jax.vmap(jax.linearize(run, x)[1])(jnp.stack([x, x])), x)
    assert several.count("fa4_jax_launch") == 2
    gradient = jax.grad(lambda q: run(q).astype(jnp.float32).sum())
    assert lowered(gradient, x).count("fa4_jax_launch") == 4
    assert not caplog.text


@pytest.mark.parametrize(
    ("head_dim", "options", "reason"),
    [
        (256, {"logits_soft_cap": 3.0}, "logits_soft_cap: no kernel computes tangents with them"),
        (64, {"sinks": np.zeros(2, np.float32)}, "sinks: no kernel computes tangents with them"),
    ],
)
def test_no_kernel_computes_these_tangents(
    head_dim: int,
    options: dict[str, Any],
    reason: str,
    kernels_present: None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The log says so where a program is lowered for a GPU; who insists on kernels is refused."""
    x = jnp.ones((1, 64, 2, head_dim), jnp.bfloat16)

    def tangent(implementation: Any) -> str:
        run = self_attention(implementation, **options)
        return lowered(lambda x: jax.jvp(run, (x,), (x,)), x)

    assert tangent(None).count("fa4_jax_launch") == 1
    assert f"tangents and second derivatives: {reason}" in caplog.text
    with pytest.raises(NotImplementedError, match=re.escape(reason)):
        tangent("kernel")


def gradient_of(run: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    return jax.grad(lambda q: run(q).astype(jnp.float32).sum())


def second_along(run: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """The second derivative of a function's value along x, forward over forward."""
    return jax.jvp(lambda at: jax.jvp(run, (at,), (x,))[1], (x,), (x,))[1]


def test_no_kernel_computes_other_second_derivatives(
    kernels_present: None, caplog: pytest.LogCaptureFixture
) -> None:
    x = jnp.ones((1, 64, 2, 64), jnp.bfloat16)

    def along(implementation: Any) -> str:
        return lowered(functools.partial(second_along, self_attention(implementation)), x)

    along(None)
    message = "second derivatives: no kernel computes these second derivatives"
    assert f"default path for its {message}" in caplog.text
    with pytest.raises(NotImplementedError, match="no kernel computes these second derivatives"):
        along("kernel")


@pytest.mark.parametrize("implementation", [None, "kernel"])
def test_hessian_products_are_two_launches_more(
    implementation: Any, kernels_present: None, caplog: pytest.LogCaptureFixture
) -> None:
    """A Hessian-vector product takes the results' tangents from a kernel."""
    log.warn_once.cache_clear()
    x = jnp.ones((1, 64, 2, 64), jnp.bfloat16)
    gradient = gradient_of(self_attention(implementation))
    program = lowered(lambda x: jax.jvp(gradient, (x,), (x,))[1], x)
    launches = re.findall(r"sm_90a_(\w+)_bf16_d64", program)
    assert launches == ["fwd", "tangent", "hessian_q", "hessian_kv"]
    assert not caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("call", CALLS[:3], ids=lambda call: call.name)
def test_third_derivatives_in_forward_mode(
    call: Call, jitted: bool, rng: np.random.Generator
) -> None:
    """Of a gradient and of a result: results at the point move, too."""
    x, u, v = (make(call, rng) for _ in range(3))

    def third(run: Function) -> Any:
        seconds = (jvp_of_grad, grad_of_jvp, jvp_of_jvp)
        return [jax.jvp(lambda x, of=of: of(run, x, u, v), (x,), (v,))[1] for of in seconds]

    actual = jax.jit(lambda: third(call.ours))() if jitted else third(call.ours)
    close(actual, third(call.plain))


def test_a_vjp_is_applied_in_a_program_of_its_own(kernels_present: None) -> None:
    """The backward alone, without the forward that made its residuals."""
    x = jnp.ones((1, 64, 2, 64), jnp.bfloat16)
    run = functools.partial(attention, implementation="kernel")
    made = jax.eval_shape(lambda x: jax.vjp(run, x, x, x)[1], x)
    leaves, structure = jax.tree.flatten(made)
    backward = jax.jit(lambda leaves, bar: jax.tree.unflatten(structure, leaves)(bar))
    program = backward.trace(leaves, x).lower(lowering_platforms=("cuda",)).as_text()
    assert program.count("fa4_jax_launch") == 3


@pytest.mark.parametrize("derivative", [jvp, jvp_of_grad, grad_of_grad, grad_of_jvp])
def test_memory_does_not_grow_with_the_scores(derivative: Any) -> None:
    """What a derivative needs beside its arguments and results, twice as long: at most double."""

    def num_bytes(length: int) -> int:
        like = jax.ShapeDtypeStruct((1, length, 1, 16), jnp.float32)
        x = dict.fromkeys(("query", "key", "value"), like)
        run = functools.partial(derivative, CALLS[1].ours)
        analysis = jax.jit(run).lower(x, x, x).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    long = num_bytes(8192)
    assert long <= 2.2 * num_bytes(4096)
    assert long < 8192**2 * 4 / 4
