"""The adapters inside Flax's own attention layers."""

from __future__ import annotations

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


def test_decoding_equals_the_whole_sequence(x: jax.Array):
    layer = nnx_layer(attention_fn=fa4_jax.flax.attention_fn)
    expected = layer(x, mask=linen.make_causal_mask(x[..., 0]))
    layer.init_cache(x.shape)
    for i in range(x.shape[1]):
        step = layer(x[:, i : i + 1], decode=True)
        np.testing.assert_allclose(step[:, 0], expected[:, i], rtol=1e-4, atol=1e-5)
