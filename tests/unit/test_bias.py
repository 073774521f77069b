"""Biases that positions decide: against a dense bias, and against definitions written out here."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from fa4_jax import attention, bias
from tests.derivative_checks import close, loss

B, T, S, N, K, H = 2, 21, 30, 4, 2, 8
ROWS, KEYS = np.arange(T)[:, None], np.arange(S)[None]
OFFSETS = np.array([9, -4])


pytestmark = pytest.mark.usefixtures("float64")


def distances(offset: Any) -> np.ndarray:
    """j - (i + query_offset), [B, T, S]."""
    rows = ROWS + np.broadcast_to(offset, (B,))[:, None, None]
    return KEYS - rows


def t5_bucket(distance: int, count: int, bidirectional: bool, max_distance: int) -> int:
    """As in the paper's own code, one number at a time."""
    start, n = 0, -distance
    if bidirectional:
        count //= 2
        start = count if n < 0 else 0
        n = abs(n)
    else:
        n = max(n, 0)
    exact = count // 2
    if n < exact:
        return start + n
    share = math.log(n / exact) / math.log(max_distance / exact)
    return start + min(exact + int(share * (count - exact) + 1e-9), count - 1)


def dense_alibi(slopes: jax.Array, offset: Any) -> jax.Array:
    return slopes[None, :, None, None] * distances(offset)[:, None]


def dense_relative(table: jax.Array, offset: Any, *, bidirectional: bool) -> jax.Array:
    bucket = np.vectorize(lambda d: t5_bucket(d, len(table), bidirectional, 20))
    return table[bucket(distances(offset))].transpose(0, 3, 1, 2)


def dense_banded(table: jax.Array, offset: Any, *, first: int) -> jax.Array:
    table = jnp.broadcast_to(table, (B, N, T, table.shape[-1]))
    column = -distances(offset)[:, None] - first
    within = (column >= 0) & (column < table.shape[-1])
    column = jnp.broadcast_to(jnp.where(within, column, 0), (B, N, T, S))
    return jnp.where(within, jnp.take_along_axis(table, column, -1), 0)


KINDS = {
    "alibi": ((N,), bias.alibi, dense_alibi),
    "relative": (
        (16, N),
        functools.partial(bias.relative, max_distance=20),
        functools.partial(dense_relative, bidirectional=True),
    ),
    "relative, one way": (
        (12, N),
        functools.partial(bias.relative, bidirectional=False, max_distance=20),
        functools.partial(dense_relative, bidirectional=False),
    ),
    "banded": ((B, N, T, 5), bias.banded, functools.partial(dense_banded, first=0)),
    "banded, both sides": (
        (1, 1, T, 7),
        functools.partial(bias.banded, first=-3),
        functools.partial(dense_banded, first=-3),
    ),
}
every_kind = pytest.mark.parametrize("kind", KINDS)
main_kinds = pytest.mark.parametrize("kind", ["alibi", "relative", "banded"])
blockwise = pytest.mark.parametrize("path", ["blockwise"], indirect=True)


def operands(rng: np.random.Generator, kind: str) -> tuple[jax.Array, ...]:
    """query, key, value and the array of the bias."""
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, H), KINDS[kind][0]
    return tuple(jnp.asarray(rng.normal(size=shape)) for shape in shapes)


def both(kind: str, offset: Any = 0, **options: Any) -> tuple[Any, Any]:
    """Attention of q, k, v, array with the value of positions, and with the dense bias."""
    _, value, dense = KINDS[kind]
    run = functools.partial(attention, query_offset=offset, return_residual=True, **options)
    return (
        lambda q, k, v, x: run(q, k, v, value(x)),
        lambda q, k, v, x: run(q, k, v, dense(x, offset)),
    )


OPTIONS = (
    {},
    {"is_causal": True, "offset": 9},
    {"offset": OFFSETS, "local_window_size": (7, 5), "logits_soft_cap": 2.0},
    {"key_value_seq_lengths": np.array([30, 11]), "sinks": np.zeros(N)},
)


@every_kind
@pytest.mark.parametrize("options", OPTIONS, ids=lambda x: "-".join(x) or "plain")
def test_equals_a_dense_bias(
    kind: str, options: dict[str, Any], path: str, rng: np.random.Generator
) -> None:
    ours, dense = both(kind, **options)
    args = operands(rng, kind)
    close(ours(*args), dense(*args))
    every = tuple(range(4))
    close(jax.grad(loss(ours), every)(*args), jax.grad(loss(dense), every)(*args))


@blockwise
@main_kinds
def test_forward_mode_and_second_derivatives(
    kind: str, path: str, rng: np.random.Generator
) -> None:
    args, moved = operands(rng, kind), operands(rng, kind)
    functions = both(kind, 3, is_causal=True)
    close(*(jax.jvp(f, args, moved) for f in functions))
    gradients = [jax.grad(loss(f), tuple(range(4))) for f in functions]
    close(*(jax.jvp(g, args, moved) for g in gradients))


@blockwise
@main_kinds
@pytest.mark.parametrize("own", [True, False])
def test_vmap(kind: str, own: bool, path: str, rng: np.random.Generator) -> None:
    """Over queries, with a bias of each instance's own or one for all."""
    args = operands(rng, kind)
    many = [jnp.stack([args[0], -args[0]]), *args[1:3], jnp.stack([args[3], 2 * args[3]])]
    many[3] = many[3] if own else args[3]
    axes = (0, None, None, 0 if own else None)
    ours, dense = (jax.vmap(jax.grad(loss(f), (0, 3)), axes) for f in both(kind, is_causal=True))
    close(ours(*many), dense(*many))


@main_kinds
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_meshes(kind: str, axis_type: Any, rng: np.random.Generator) -> None:
    """Heads are shared out with the arrays that have them."""
    args = operands(rng, kind)
    ours, dense = both(kind, OFFSETS, is_causal=True)
    expected = jax.grad(loss(dense), tuple(range(4)))(*args)
    mesh = jax.make_mesh((2, 2), ("x", "y"), (axis_type,) * 2, devices=jax.devices()[:4])
    heads = {"alibi": P("y"), "banded": P("x", "y")}.get(kind, P(None, "y"))
    specs = [*[P("x", None, "y")] * 3, heads]
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(x, NamedSharding(mesh, spec))
            for x, spec in zip(args, specs, strict=True)
        ]
        actual = jax.jit(jax.grad(loss(ours), tuple(range(4))))(*placed)
    close(actual, expected)


def test_without_a_batch_axis(rng: np.random.Generator) -> None:
    for kind, (_, value, _) in KINDS.items():
        q, k, v, x = operands(rng, kind)
        own = x[-1] if kind.startswith("banded") else x
        actual = attention(q[1], k[1], v[1], value(own))
        np.testing.assert_allclose(actual, attention(q, k, v, value(x))[1], rtol=1e-12)


def test_bfloat16_slopes_times_large_distances(rng: np.random.Generator) -> None:
    """A distance is not rounded to the array's type: 399 is no bfloat16, and decides the result."""
    q, k = (jnp.zeros((1, size, 1, 8), jnp.bfloat16) for size in (1, 400))
    value = jnp.asarray(np.arange(400.0)[None, :, None, None], jnp.bfloat16)
    slopes = jnp.full(1, 0.5, jnp.bfloat16)
    _, lse = attention(q, k, value, bias.alibi(slopes), return_residual=True)
    np.testing.assert_allclose(lse, 0.5 * 399 - np.log1p(-np.exp(-0.5)), rtol=1e-6)


def test_memory_does_not_grow_with_the_scores() -> None:
    """The gradients of 4096 and 8192 rows and keys with a table of T5."""

    def num_bytes(length: int) -> int:
        like = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32)
        table = jax.ShapeDtypeStruct((32, 2), jnp.float32)
        run = jax.grad(lambda q, x: attention(q, q, q, bias.relative(x)).sum(), (0, 1))
        analysis = jax.jit(run).lower(like, table).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    assert num_bytes(8192) <= 2.2 * num_bytes(4096) < 4096**2 * 4


def test_wrong() -> None:
    q = jnp.zeros((2, 5, 4, 8))

    def call(value: Any) -> Any:
        return attention(q, q, q, value)

    cases = (
        (lambda: call(bias.alibi(jnp.zeros(3))), r"slopes must have shape \[N\] = \(4,\), got \(3"),
        (lambda: call(bias.alibi(jnp.zeros(4, int))), "slopes must be floating point, got .*int64"),
        (lambda: call(bias.relative(jnp.zeros((32, 3)))), r"N = 4 query heads, got 3 heads"),
        (lambda: bias.relative(jnp.zeros(32)), r"shape \[buckets, N\], got float64 \(32,\)"),
        (lambda: bias.relative(jnp.zeros((7, 4))), "7 buckets: it needs an even number"),
        (lambda: bias.relative(jnp.zeros((1, 4)), bidirectional=False), "1 buckets.* at least 2"),
        (lambda: bias.relative(jnp.zeros((32, 4)), max_distance=8), "must exceed the 8 .* got 8"),
        (lambda: call(bias.banded(jnp.zeros((2, 4, 6, 3)))), r"\(2, 4, 5, 3\), got \(2, 4, 6, 3\)"),
        (lambda: call(bias.banded(jnp.zeros(3))), r"\[B\|1, N\|1, T, L\] = .*, got \(3,\)"),
    )
    for run, message in cases:
        with pytest.raises(ValueError, match=message):
            run()
