"""Tests the adapters inside Flax's own attention layers."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import fa4_jax.flax
from fa4_jax.flax import attention_fn, make_attention_fn

FEATURES = 32


@pytest.fixture(autouse=True)
def flax_promotes_ranks():
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def x(rng: np.random.Generator) -> jax.Array:
    return jnp.asarray(rng.normal(size=(2, 10, FEATURES)), jnp.float32)


def nnx_layer(**options: Any) -> nnx.MultiHeadAttention:
    return nnx.MultiHeadAttention(
        num_heads=4, in_features=FEATURES, decode=False, rngs=nnx.Rngs(0), **options
    )


def linen_layer(**options: Any) -> linen.MultiHeadDotProductAttention:
    return linen.MultiHeadDotProductAttention(num_heads=4, **options)


@pytest.mark.parametrize("masked", [False, True])
def test_nnx(x: jax.Array, masked: bool):
    mask = linen.make_causal_mask(x[..., 0]) if masked else None  # float32 zeros and ones
    expected = nnx_layer()(x, mask=mask)
    np.testing.assert_allclose(
        nnx_layer(attention_fn=attention_fn)(x, mask=mask), expected, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("masked", [False, True])
def test_linen(x: jax.Array, masked: bool):
    mask = linen.make_causal_mask(x[..., 0]) if masked else None
    plain, ours = linen_layer(), linen_layer(attention_fn=attention_fn)
    variables = plain.init(jax.random.key(0), x)
    actual, expected = (np.asarray(m.apply(variables, x, mask=mask)) for m in (ours, plain))
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


def test_options(x: jax.Array):
    windowed = make_attention_fn(local_window_size=(3, 0), deterministic_gradients=True)
    i = jnp.arange(10)
    mask = (i[None, :] <= i[:, None]) & (i[None, :] >= i[:, None] - 3)
    np.testing.assert_allclose(
        nnx_layer(attention_fn=windowed)(x),
        nnx_layer()(x, mask=mask[None, None]),
        rtol=1e-4,
        atol=1e-5,
    )


def test_options_that_flax_passes_cannot_be_fixed():
    for name in ("is_causal", "deterministic", "return_residual"):
        with pytest.raises(ValueError, match=f"{name}=True"):
            make_attention_fn(**{name: True})


def test_dtype(x: jax.Array):
    layer = nnx_layer(attention_fn=attention_fn, dtype=jnp.bfloat16)
    assert layer(x).dtype == jnp.bfloat16


def test_dropout_is_refused_while_training_only(x: jax.Array):
    layer = nnx_layer(attention_fn=attention_fn, dropout_rate=0.1)
    with pytest.raises(NotImplementedError, match=r"dropout_rate 0\.1"):
        layer(x, deterministic=False, rngs=nnx.Rngs(dropout=1))
    assert layer(x, deterministic=True).shape == x.shape


def test_what_needs_the_weights_is_refused(x: jax.Array):
    with pytest.raises(NotImplementedError, match="module"):
        nnx_layer(attention_fn=attention_fn)(x, sow_weights=True)
    layer = linen_layer(attention_fn=attention_fn, qk_attn_weights_einsum_cls=lambda: jnp.einsum)
    with pytest.raises(NotImplementedError, match="qk_attn_weights_einsum"):
        layer.init(jax.random.key(0), x)
    with pytest.raises(NotImplementedError, match="precision"):
        nnx_layer(attention_fn=attention_fn, precision=jax.lax.Precision.HIGHEST)(x)


@pytest.mark.parametrize("make", [nnx_layer, linen_layer])
def test_messages_are_one_short_line(x: jax.Array, make: Any):
    """One argument is the module, whose description has a hundred lines."""
    layer = make(attention_fn=attention_fn)
    with pytest.raises(NotImplementedError, match="sow_weights") as error:
        if make is nnx_layer:
            layer(x, sow_weights=True)
        else:
            layer.init(jax.random.key(0), x, sow_weights=True)
    assert "\n" not in str(error.value) and len(str(error.value)) < 120


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        ("highest", jnp.bfloat16),
        (jax.lax.Precision.HIGH, jnp.float16),
        ("default", jnp.float32),
        ((jax.lax.Precision.DEFAULT,) * 2, jnp.float32),
    ],
    ids=str,
)
def test_a_precision_that_changes_nothing(x: jax.Array, precision: Any, dtype: Any):
    heads = x.reshape(2, 10, 4, 8).astype(dtype)
    found = attention_fn(heads, heads, heads, precision=precision)
    np.testing.assert_array_equal(found, attention_fn(heads, heads, heads))


@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 1, 3), (0, 2)], ids=str)
def test_any_number_of_leading_axes(leading: tuple[int, ...], rng: np.random.Generator):
    q, k, v = (jnp.asarray(rng.normal(size=(*leading, n, 4, 8)), jnp.float32) for n in (6, 9, 9))
    seen = [(*leading, 1, 6, 9), (*leading, 4, 1, 9), (6, 9)]
    seen += [(*(1,) * len(leading), 1, 6, 9), (*leading[:-1], *(1,) * len(leading[-1:]), 4, 6, 9)]
    for shape in seen:
        mask = jnp.asarray(rng.random(shape) < 0.7).at[..., 0].set(True)
        bias = jnp.asarray(rng.normal(size=shape), jnp.float32)
        expected = linen.dot_product_attention(q, k, v, bias, mask)
        found = attention_fn(q, k, v, bias, mask)
        assert found.shape == q.shape
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    causal = linen.dot_product_attention(q, k, v, mask=jnp.tri(6, 9, dtype=bool))
    found = attention_fn(q, k, v, is_causal=True)
    np.testing.assert_allclose(found, causal, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [nnx_layer, linen_layer])
def test_layers_with_two_batch_axes(rng: np.random.Generator, make: Any):
    x = jnp.asarray(rng.normal(size=(2, 3, 10, FEATURES)), jnp.float32)
    mask = linen.make_causal_mask(x[..., 0])
    plain, ours = make(), make(attention_fn=attention_fn)
    if make is linen_layer:
        variables = plain.init(jax.random.key(0), x)
        plain, ours = (functools.partial(m.apply, variables) for m in (plain, ours))
    np.testing.assert_allclose(ours(x, mask=mask), plain(x, mask=mask), rtol=1e-4, atol=1e-5)


def test_decoding_equals_the_whole_sequence(x: jax.Array):
    layer = nnx_layer(attention_fn=fa4_jax.flax.attention_fn)
    expected = layer(x, mask=linen.make_causal_mask(x[..., 0]))
    layer.init_cache(x.shape)
    for i in range(x.shape[1]):
        step = layer(x[:, i : i + 1], decode=True)
        np.testing.assert_allclose(step[:, 0], expected[:, i], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batch", [1, 2])
def test_any_mask_of_one_row(rng: np.random.Generator, batch: int):
    q, k, v = (
        jnp.asarray(rng.normal(size=(2, length, heads, 16)), jnp.float32)
        for length, heads in ((1, 4), (30, 2), (30, 2))
    )
    mask = rng.random((batch, 1, 1, 30)) < 0.4
    expected = jax.nn.dot_product_attention(q, k, v, mask=jnp.asarray(mask))
    found = jax.jit(attention_fn)(q, k, v, mask=mask)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_decoding_runs_on_the_kernels_of_short_queries(kernels_present: None):
    """A step's mask, a prefix of the cache, is no dense mask to them."""
    layer = nnx_layer(attention_fn=attention_fn, dtype=jnp.bfloat16)
    layer.init_cache((2, 300, FEATURES), jnp.bfloat16)
    graph, state = nnx.split(layer)

    def step(state: Any, x: jax.Array) -> Any:
        layer = nnx.merge(graph, state)
        return layer(x, decode=True), nnx.state(layer)

    x = jnp.zeros((2, 1, FEATURES), jnp.bfloat16)
    text = jax.jit(step).trace(state, x).lower(lowering_platforms=("cuda",)).as_text()
    assert "sm_90a_fwd_split_bf16_d64" in text and "sm_90a_fwd_join_bf16_d64" in text


def test_a_dense_mask_of_a_layer_reaches_the_kernels(kernels_present: None):
    layer = nnx_layer(attention_fn=attention_fn, dtype=jnp.bfloat16)
    graph, state = nnx.split(layer)
    seen = jnp.arange(300)[:, None] % 7 != jnp.arange(300)[None] % 5

    def loss(state: Any, x: jax.Array) -> jax.Array:
        return nnx.merge(graph, state)(x, mask=seen[None, None]).sum()

    x = jnp.zeros((2, 300, FEATURES), jnp.bfloat16)
    text = jax.jit(jax.grad(loss)).trace(state, x).lower(lowering_platforms=("cuda",)).as_text()
    assert "sm_90a_fwd_bf16_d64_band_ranges_short" in text
    assert "sm_90a_bwd_bf16_d64_band_ranges" in text


@pytest.mark.parametrize("make", [nnx_layer, linen_layer])
def test_segments_are_given_at_each_call(x: jax.Array, make: Any):
    ids = jnp.array([[0] * 4 + [1] * 6, [7] * 3 + [2] * 5 + [-1] * 2])
    pairs = (ids[:, :, None] == ids[:, None, :]) & (ids[:, None, :] >= 0)
    pairs = linen.combine_masks(pairs[:, None], linen.make_causal_mask(x[..., 0]))
    ours = make(attention_fn=make_attention_fn(local_window_size=(None, 0)))
    plain, packed = make(), fa4_jax.masks.segments(ids)
    if make is linen_layer:
        variables = plain.init(jax.random.key(0), x)
        actual = jax.jit(lambda ids: ours.apply(variables, x, mask=ids))(packed)
        expected = plain.apply(variables, x, mask=pairs)
    else:
        actual, expected = ours(x, mask=packed), plain(x, mask=pairs)
    seen = np.asarray(ids) >= 0  # Flax takes the mean of all values in rows that see no key
    actual, expected = np.asarray(actual), np.asarray(expected)
    np.testing.assert_allclose(actual[seen], expected[seen], rtol=1e-4, atol=1e-5)
