"""The adapter for Equinox against Equinox's own layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.integrations.packages import assert_same, normal, package

eqx = package("equinox")

from fa4_jax.integrations import equinox as adapter  # noqa: E402

HEADS, SIZE, T, S = 4, 32, 12, 20


@pytest.fixture(autouse=True)
def equinox_promotes_ranks() -> Iterator[None]:
    with jax.numpy_rank_promotion("allow"):
        yield


def layers(**options: Any) -> tuple[Any, Any]:
    """Equinox's layer and ours, with equal parameters."""
    key = jax.random.key(3)
    theirs = eqx.nn.MultiheadAttention(HEADS, SIZE, key=key, **options)
    return theirs, adapter.MultiheadAttention(HEADS, SIZE, key=key, **options)


def assert_same_layers(
    theirs: Any, inputs: list[jax.Array], their_options: Any, our_options: Any
) -> None:
    """Equal outputs, and equal gradients in inputs and parameters."""
    parameters, static = eqx.partition(theirs, eqx.is_inexact_array)
    leaves, tree = jax.tree.flatten(parameters)

    def call_theirs(*operands: jax.Array) -> jax.Array:
        layer = eqx.combine(jax.tree.unflatten(tree, operands[3:]), static)
        return layer(*operands[:3], **their_options)

    def call_ours(*operands: jax.Array) -> jax.Array:
        layer = eqx.combine(jax.tree.unflatten(tree, operands[3:]), static)
        layer = adapter.replace_attention(layer)
        assert type(layer) is adapter.MultiheadAttention
        return layer(*operands[:3], **our_options)

    assert_same(call_ours, call_theirs, [*inputs, *leaves])


def masks(rng: np.random.Generator) -> dict[str, Any]:
    flat = jnp.asarray(rng.random((T, S)) < 0.6).at[:, 0].set(True)
    heads = jnp.asarray(rng.random((HEADS, T, S)) < 0.6).at[..., 0].set(True)
    return {"none": None, "flat": flat, "by head": heads, "causal": jnp.tri(T, S, dtype=bool)}


@pytest.mark.parametrize("mask", ["none", "flat", "by head", "causal"])
def test_the_layer_equals_equinox(mask: str, rng: np.random.Generator):
    theirs, _ = layers()
    inputs = normal(rng, (T, SIZE), (S, SIZE), (S, SIZE))
    given = {"mask": masks(rng)[mask]}
    assert_same_layers(theirs, inputs, given, given)


def test_options_in_place_of_masks(rng: np.random.Generator):
    theirs, _ = layers()
    inputs = normal(rng, (T, SIZE), (S, SIZE), (S, SIZE))
    i, j = np.arange(T)[:, None], np.arange(S)[None, :]
    for options, mask in (
        ({"is_causal": True, "deterministic_gradients": True}, j <= i),
        ({"is_causal": True, "query_offset": S - T}, j <= i + S - T),
        ({"local_window_size": (3, 0)}, (i - 3 <= j) & (j <= i)),
        ({"key_value_seq_lengths": jnp.asarray([7])}, np.broadcast_to(j < 7, (T, S))),
    ):
        given = {"mask": jnp.asarray(mask)}
        assert_same_layers(theirs, inputs, given, options)


def test_sizes_biases_and_processed_heads(rng: np.random.Generator):
    sizes = {"key_size": 10, "value_size": 6, "output_size": 5, "qk_size": 8, "vo_size": 3}
    biases = {f"use_{x}_bias": True for x in ("query", "key", "value", "output")}
    theirs, ours = layers(**sizes, **biases)

    def rotate(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        return jnp.roll(q, 1, axis=-1), 2 * k, v

    given = {"process_heads": rotate}
    inputs = normal(rng, (T, SIZE), (S, 10), (S, 6))
    assert_same_layers(theirs, inputs, given, given)
    with pytest.raises(ValueError, match="process_heads"):
        ours(*inputs, process_heads=lambda q, k, v: (q[..., :1], k[..., :1], v))


def test_the_constructor_makes_equal_parameters():
    theirs, ours = layers(use_query_bias=True)
    pairs = zip(jax.tree.leaves(theirs), jax.tree.leaves(ours), strict=True)
    for expected, found in pairs:
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_16_bits(dtype: Any, rng: np.random.Generator):
    """Against Equinox in float32 on the same parameters: its own logits have 16 bits."""
    theirs, ours = layers()
    inputs = normal(rng, (T, SIZE), (S, SIZE), (S, SIZE), dtype=dtype)
    ours = jax.tree.map(lambda x: x.astype(dtype) if eqx.is_inexact_array(x) else x, ours)
    found = ours(*inputs, is_causal=True)
    assert found.dtype == dtype
    exact = theirs(*(x.astype(jnp.float32) for x in inputs), mask=jnp.tri(T, S, dtype=bool))
    np.testing.assert_allclose(found.astype(jnp.float32), exact, atol=0.02, rtol=0.02)


def test_a_model_is_converted_and_mapped_over_a_batch(rng: np.random.Generator):
    class Block(eqx.Module):
        norm: Any
        attention: Any

        def __call__(self, x: jax.Array) -> jax.Array:
            y = jax.vmap(self.norm)(x)
            return x + self.attention(y, y, y, mask=jnp.tri(len(x), dtype=bool))

    theirs = [Block(eqx.nn.LayerNorm(SIZE), layers()[0]) for _ in range(2)]
    ours = adapter.replace_attention(theirs)
    assert [type(block.attention) for block in ours] == [adapter.MultiheadAttention] * 2
    (x,) = normal(rng, (3, T, SIZE))

    def run(model: Any, x: jax.Array) -> jax.Array:
        for block in model:
            x = jax.vmap(block)(x)
        return x

    jitted = eqx.filter_jit(run)
    assert_same(lambda x: jitted(ours, x), lambda x: run(theirs, x), [x])


@pytest.mark.parametrize("mask", ["none", "flat", "by head", "causal"])
def test_the_inner_function_in_equinox_own_layer(
    mask: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
):
    theirs, _ = layers()
    calls = []
    inner = package("equinox.nn._attention")
    own = inner.dot_product_attention

    def counted(*args: Any, **kwargs: Any) -> jax.Array:
        calls.append(1)
        return adapter.dot_product_attention(*args, **kwargs)

    def patched(*inputs: jax.Array) -> jax.Array:
        monkeypatch.setattr(inner, "dot_product_attention", counted)
        return theirs(*inputs, mask=seen)

    def unpatched(*inputs: jax.Array) -> jax.Array:
        monkeypatch.setattr(inner, "dot_product_attention", own)
        return theirs(*inputs, mask=seen)

    seen = masks(rng)[mask]
    assert_same(patched, unpatched, normal(rng, (T, SIZE), (S, SIZE), (S, SIZE)))
    assert calls


def test_dropout_is_refused_unless_it_does_nothing(rng: np.random.Generator):
    theirs, ours = layers(dropout_p=0.1)
    (x,) = normal(rng, (T, SIZE))
    with pytest.raises(NotImplementedError, match=r"dropout p=0\.1.*inference=True"):
        ours(x, x, x, key=jax.random.key(0))
    expected = theirs(x, x, x, inference=True)
    for found in (
        ours(x, x, x, inference=True),
        ours(x, x, x, deterministic=True),
        eqx.nn.inference_mode(ours)(x, x, x),
    ):
        np.testing.assert_allclose(found, expected, atol=1e-5)
    with pytest.raises(NotImplementedError, match=r"dropout p=0\.1"):
        adapter.dot_product_attention(x, x, x, dropout=ours.dropout)
    with pytest.raises(ValueError, match="return_residual"):
        layers()[1](x, x, x, return_residual=True)


def test_a_row_that_sees_no_key_is_zero(rng: np.random.Generator):
    """Equinox takes the mean of all values: the difference that the docstring names."""
    q, k, v = normal(rng, (2, 8), (3, 8), (3, 8))
    mask = jnp.asarray([[True, False, True], [False] * 3])
    np.testing.assert_array_equal(adapter.dot_product_attention(q, k, v, mask)[1], 0)
