"""`attention_fn` for flax.nnx.MultiHeadAttention and flax.linen.MultiHeadDotProductAttention.

    nnx.MultiHeadAttention(..., attention_fn=fa4_jax.flax.attention_fn)
    nnx.MultiHeadAttention(..., attention_fn=fa4_jax.flax.make_attention_fn(local_window_size=128))

Packed sequences are given to the layer at each call: layer(x, mask=fa4_jax.masks.segments(ids)).

Flax itself is not imported.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fa4_jax.api import attention
from fa4_jax.masks import Mask, segments

_OWN_MEANING = ("is_causal", "deterministic", "return_residual", "return_max_logit")


def _is_default(precision: Any) -> bool:
    """Whether a precision, or each of a pair, is JAX's own choice."""
    each = precision if isinstance(precision, tuple | list) else (precision,)
    return all(x in (None, "default", jax.lax.Precision.DEFAULT) for x in each)


def _one_leading_axis(x: jax.Array) -> jax.Array:
    """[..., T, N, H] -> [B, T, N, H], or [T, N, H] as it is."""
    *leading, _, _, _ = x.shape
    return x if len(leading) < 2 else x.reshape(math.prod(leading), *x.shape[-3:])


def _dense(x: jax.Array | None, leading: list[int]) -> jax.Array | None:
    """What broadcasts to [..., N, T, S] as what broadcasts to [B, N, T, S]."""
    if x is None or len(leading) < 2 or x.ndim <= 3:
        return x
    own = x.shape[:-3]
    if math.prod(own) != 1:
        own = tuple(leading)
        x = jnp.broadcast_to(x, (*own, *x.shape[-3:]))
    return x.reshape(math.prod(own), *x.shape[-3:])


def _boolean(mask: jax.Array | None) -> jax.Array | None:
    return None if mask is None else mask.astype(jnp.bool_)


def _of_one_row(mask: jax.Array | None, query: jax.Array, key: jax.Array) -> Any:
    """The mask [B or 1, 1, 1, S] of a call with one row, as one that kernels take: ids of keys.

    Flax's layers have such a mask when they decode.
    """
    if mask is None or query.ndim != 4 or mask.ndim != 4 or query.shape[1] != 1:
        return mask
    if mask.shape[1:] != (1, 1, key.shape[1]):
        return mask
    shown = jnp.broadcast_to(mask[:, 0, 0], key.shape[:2])
    return segments(jnp.zeros(query.shape[:2], jnp.int32), jnp.where(shown, 0, -1))


def make_attention_fn(**options: Any) -> Callable[..., jax.Array]:
    """An `attention_fn` with options of `fa4_jax.attention` fixed.

    Args:
      **options: keyword arguments of `attention`, but those that Flax passes or that change what is
        returned. `deterministic_gradients` stands for `deterministic`, which to Flax means that
        there is no dropout.

    Raises:
      ValueError: an option that cannot be fixed.
    """
    for name in _OWN_MEANING:
        if name in options:
            raise ValueError(f"{name}={options[name]!r} cannot be fixed here: Flax passes its own")
    deterministic_gradients = options.pop("deterministic_gradients", False)

    # Linen passes the arguments that the signature names; NNX passes all of its own.
    def attention_fn(
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        bias: jax.Array | None = None,
        mask: jax.Array | Mask | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: Any = None,
        dropout_rate: float = 0.0,
        deterministic: bool | None = False,
        dtype: Any = None,
        precision: Any = None,
        module: Any = None,
        is_causal: bool = False,
        force_fp32_for_softmax: bool = False,
        qk_attn_weights_einsum: Any = None,
        attn_weights_value_einsum: Any = None,
    ) -> jax.Array:
        """Attention of query [..., T, N, H] and key, value [..., S, K, H], as Flax calls it.

        bias and mask broadcast to [..., N, T, S]. mask is any array that is non-zero where a query
        may see a key, or a value of `fa4_jax.masks`, for whose arrays the axes [...] are one batch:
        Flax's layers hand it on as it is. The kernels hold bits of an array, or ids of keys where
        it is one row for all heads, as when a layer decodes. The softmax is in float32. Masks like
        causal ones are better given as is_causal or as options: they need no array. precision is
        accepted where it changes nothing: if it is the default, or the operands have 16 bits, whose
        products are exact in float32.

        Raises:
          NotImplementedError: dropout, sown weights, an einsum of the caller's, or another
            precision.
        """
        del broadcast_dropout, dropout_rng, force_fp32_for_softmax
        if dropout_rate > 0 and not deterministic:
            raise NotImplementedError(f"dropout_rate {dropout_rate}: no dropout of the weights")
        needs_weights = {
            "module, for sow_weights": module,
            "qk_attn_weights_einsum": qk_attn_weights_einsum,
            "attn_weights_value_einsum": attn_weights_value_einsum,
        }
        for name, x in needs_weights.items():
            if x is not None:
                raise NotImplementedError(f"{name}: the attention weights are never held")
        dtype = jnp.dtype(jnp.result_type(query, key, value) if dtype is None else dtype)
        if dtype.itemsize > 2 and not _is_default(precision):
            raise NotImplementedError(f"precision {precision} of {dtype}: supported: DEFAULT")
        *leading, _, _, _ = query.shape
        q, k, v = (_one_leading_axis(x.astype(dtype)) for x in (query, key, value))
        if not isinstance(mask, Mask):
            mask = _of_one_row(_dense(_boolean(mask), leading), q, k)
        output = attention(
            q,
            k,
            v,
            _dense(bias, leading),
            mask,
            is_causal=is_causal,
            deterministic=deterministic_gradients,
            **options,
        )
        return output.reshape(*leading, *output.shape[-3:])

    return attention_fn


attention_fn = make_attention_fn()
"""The adapter without options."""
