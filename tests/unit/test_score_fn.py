"""A user's function of scores, on both ways of the default path."""

from __future__ import annotations

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fa4_jax
from fa4_jax import attention, bias
from tests.derivative_checks import close, loss

B, T, S, N, K, H = 2, 21, 30, 4, 2, 8
OFFSETS = np.array([9, -4])


pytestmark = pytest.mark.usefixtures("float64")


def uneven(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    """Reads all that it is given; not linear in the score."""
    return score + jnp.sin(score + b) / (1 + h) + 0.01 * (q - k) * jnp.tanh(score)


def hiding(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    """A mask, which may hide all keys of a row."""
    del b
    return jnp.where((q + k) % 3 == h % 2, score, -jnp.inf)


def operands(rng: np.random.Generator) -> tuple[jax.Array, ...]:
    """query, key, value and slopes."""
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, H), (N,)
    return tuple(jnp.asarray(rng.normal(size=shape)) for shape in shapes)


def plain(q: Any, k: Any, v: Any, slopes: Any, *, fn: Any, offset: Any, causal: bool) -> Any:
    """Output and log-sum-exp, written out."""
    i = (np.arange(T) + np.broadcast_to(offset, (B,))[:, None])[:, None, :, None]
    j = np.arange(S)[None, None, None]
    k, v = (jnp.repeat(x, N // K, axis=2) for x in (k, v))
    s = jnp.einsum("btnh,bsnh->bnts", q, k) * H**-0.5
    s = 3 * jnp.tanh(s / 3) + slopes[None, :, None, None] * (j - i)
    s = fn(s, np.arange(B)[:, None, None, None], np.arange(N)[None, :, None, None], i, j)
    s = jnp.where(j <= i, s, -jnp.inf) if causal else s
    e = jnp.where(s == -jnp.inf, 0, jnp.exp(jnp.where(s == -jnp.inf, 0, s)))
    total = e.sum(-1)
    safe = jnp.where(total > 0, total, 1)
    output = jnp.einsum("bnts,bsnh->btnh", e / safe[..., None], v)
    return output, jnp.where(total > 0, jnp.log(safe), -jnp.inf)


def both(fn: Any, offset: Any, causal: bool) -> tuple[Any, Any]:
    def ours(q: Any, k: Any, v: Any, slopes: Any) -> Any:
        return attention(
            *(q, k, v, bias.alibi(slopes)),
            score_fn=fn,
            logits_soft_cap=3.0,
            query_offset=offset,
            is_causal=causal,
            return_residual=True,
        )

    return ours, functools.partial(plain, fn=fn, offset=offset, causal=causal)


@pytest.mark.parametrize("fn", [uneven, hiding])
@pytest.mark.parametrize(("offset", "causal"), [(0, False), (9, True), (OFFSETS, True)])
def test_results_and_gradients(
    fn: Any, offset: Any, causal: bool, path: str, rng: np.random.Generator
) -> None:
    args = operands(rng)
    ours, expected = both(fn, offset, causal)
    close(ours(*args), expected(*args))
    every = tuple(range(4))
    close(jax.grad(loss(ours), every)(*args), jax.grad(loss(expected), every)(*args))


def test_forward_mode_and_second_derivatives(path: str, rng: np.random.Generator) -> None:
    args, moved = operands(rng), operands(rng)
    functions = both(uneven, 3, True)
    close(*(jax.jvp(f, args, moved) for f in functions))
    close(*(jax.jvp(jax.grad(loss(f), tuple(range(4))), args, moved) for f in functions))


def test_vmap(path: str, rng: np.random.Generator) -> None:
    q, *others = operands(rng)
    axes = (0, None, None, None)
    many = jnp.stack([q, -q])
    close(*(jax.vmap(jax.grad(loss(f)), axes)(many, *others) for f in both(uneven, 0, True)))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_indices_are_those_of_the_whole_call_on_meshes(
    axis_type: Any, rng: np.random.Generator
) -> None:
    args = operands(rng)
    ours, expected = both(uneven, OFFSETS, True)
    mesh = jax.make_mesh((2, 2), ("x", "y"), (axis_type,) * 2, devices=jax.devices()[:4])
    specs = [*[P("x", None, "y")] * 3, P("y")]
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(x, NamedSharding(mesh, spec))
            for x, spec in zip(args, specs, strict=True)
        ]
        actual = jax.jit(jax.grad(loss(ours), tuple(range(4))))(*placed)
    close(actual, jax.grad(loss(expected), tuple(range(4)))(*args))


def test_the_largest_score_is_that_of_the_function() -> None:
    q = jnp.ones((1, 3, 2, 4))
    found = attention(q, q, q, score_fn=lambda s, b, h, q, k: s + 10 * h, return_max_logit=True)
    np.testing.assert_allclose(found[1], [[2, 12]])


def test_supports_and_kernels() -> None:
    like = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16)
    assert "score_fn" in str(
        fa4_jax.supports(like, like, like, score_fn=uneven, arch="sm_90a").reason
    )
    q = jnp.ones((1, 128, 2, 64), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="score_fn: it runs on the default path alone"):
        attention(q, q, q, score_fn=uneven, implementation="kernel", arch="sm_90a")


def test_wrong() -> None:
    q = jnp.zeros((2, 5, 4, 8))
    cases = (
        (3, "must be a function of .*, got 3"),
        (lambda s, b, h, q, k: s[..., :1], r"of the shape \(2, 4, 5, 5\) that it is given, got"),
        (lambda s, b, h, q, k: (s, s), r"got \(ShapeDtypeStruct"),
        (lambda s, b, h, q, k: s.astype(jnp.bfloat16), "must return float64 .* got bfloat16"),
        (lambda s, b, h, q, k: s if q > k else -s, "score_fn needs the values of what it is given"),
    )
    for fn, message in cases:
        with pytest.raises(ValueError, match=message):
            attention(q, q, q, score_fn=cast(Any, fn))
