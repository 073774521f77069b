"""An attention op for tokamax: `tokamax.dot_product_attention(..., implementation=[attention_op])`.

    from fa4_jax.integrations.tokamax import DotProductAttention, attention_op

    out = tokamax.dot_product_attention(q, k, v, is_causal=True, implementation=[attention_op])

tokamax gives an op its windows as arrays of limits, which only a dense mask can carry. The field
`local_window_size` of DotProductAttention keeps them on the kernels.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from tokamax._src import precision as tokamax_precision
from tokamax._src import quantization
from tokamax._src.ops import op
from tokamax._src.ops.attention import base

from fa4_jax.api import Implementation, Numerics, Window, attention


def _check_precision(precision: Any, dtype: Any) -> None:
    """Raises NotImplementedError unless our products are as precise as those that are asked for.

    Args:
      precision: that of each product: presets, or pairs of jax.lax.Precision in newer tokamax.
    """

    def preset(x: Any) -> jax.lax.DotAlgorithmPreset:
        return tokamax_precision.to_dot_algorithm_preset(dtype, dtype, x)

    default = preset(jax.lax.Precision.DEFAULT)
    for found in map(preset, precision):
        exact = dtype.itemsize == 2 and found.accumulation_type == jnp.float32
        if not exact and found != default:
            raise NotImplementedError(f"precision={found} of {dtype}; supported: {default}")


def _check(q: jax.Array, features: dict[str, Any]) -> None:
    """Raises NotImplementedError for what `attention` lacks among the arguments of an op."""
    if (dropped := features["dropout_mask"]) is not None:
        raise NotImplementedError(f"dropout_mask of shape {dropped.shape}; supported: no dropout")
    if (pages := features["paging_info"]) is not None:
        raise NotImplementedError(
            f"paging_info of {pages.active_page_indices.shape} pages; "
            "supported: keys and values [*B, S, K, H]"
        )
    supported = {"dropout_rate": 0.0, "normalize_output": True}
    supported["logits_dtype"] = jnp.dtype(jnp.float32)
    for name, choice in supported.items():
        if features[name] != choice:
            raise NotImplementedError(f"{name}={features[name]!r}; supported: {choice!r}")
    _check_precision(features["precision"], q.dtype)


def _check_cap(logits_soft_cap: float | None, bias: jax.Array | None) -> None:
    """Raises NotImplementedError for a capped bias."""
    if logits_soft_cap is not None and bias is not None:
        raise NotImplementedError(
            "logits_soft_cap with a bias, which tokamax adds before the cap and fa4_jax after it; "
            "supported: one of the two"
        )


def _flat(x: jax.Array | None, leading: tuple[int, ...]) -> jax.Array | None:
    """What broadcasts to [*leading, N, T, S] as what broadcasts to [B, N, T, S]."""
    if x is None or x.ndim <= 3:
        return x
    own, rest = x.shape[:-3], x.shape[-3:]
    if math.prod(own) == 1:
        return x.reshape(1, *rest)
    return jnp.broadcast_to(x, (*leading, *rest)).reshape(math.prod(leading), *rest)


def _lengths(limits: jax.Array | None, leading: tuple[int, ...]) -> jax.Array | None:
    """Lengths [B] from limits [*leading, heads, rows] that are the same for all heads and rows."""
    if limits is None or any(size != 1 for size in limits.shape[-2:]):
        return None
    own = limits.reshape(limits.shape[:-2])
    return jnp.broadcast_to(own, leading).reshape(math.prod(leading))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DotProductAttention(base.DotProductAttention[op.NullConfig, None]):
    """`fa4_jax.attention` as an op of tokamax.

    The call is that of tokamax's op: query [*B, T, N, H], key and value [*B, S, K, H]. Causal
    masks, lengths and soft caps run on the kernels, which hold bits of boolean masks, index arrays
    and windows given in the call; biases run on the default path. A row that sees no key is 0;
    tokamax's own op takes the mean of all values there. Residuals are (log-sum-exp, 1), in place of
    (maximum, denominator): both pairs have the same m + log l, which is what merging needs; ours
    has a gradient.

    Attributes:
      local_window_size, deterministic, numerics, implementation: as for `fa4_jax.attention`.

    Raises:
      NotImplementedError: when called with a soft cap of a bias, dropout, pages, outputs that are
        not normalised, logits that are not float32, or a precision of float32 products that is not
        the default.
    """

    local_window_size: Window = None
    deterministic: bool = False
    numerics: Numerics = "fast"
    implementation: Implementation = None
    # `attention` has rules for vmap and gradients of its own, and no configuration to look up.
    supports_batched_args_capture: ClassVar[bool] = False

    def _fwd(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        mask: base.Mask,
        bias: jax.Array | None,
        q_indices: jax.Array | None,
        k_indices: jax.Array | None,
        logits_scale: float,
        logits_soft_cap: float | None,
        return_residuals: bool,
        **features: Any,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
        q, k, v = map(quantization.as_array, (q, k, v))
        _check(q, features)
        _check_cap(logits_soft_cap, bias)
        *leading, _, _, _ = q.shape
        leading = tuple(leading)
        is_causal, query_lengths, key_lengths = False, None, None
        if q_indices is None and k_indices is None:
            mask, is_causal = mask.take("is_causal")
            if (query_lengths := _lengths(mask.q_end, leading)) is not None:
                mask, _ = mask.take("q_end")
            if (key_lengths := _lengths(mask.k_end, leading)) is not None:
                mask, _ = mask.take("k_end")
        elif self.local_window_size is not None:
            raise NotImplementedError(
                f"local_window_size={self.local_window_size} with q_indices or k_indices; "
                "supported: a boolean mask"
            )
        dense = mask.as_array(
            q.shape[-3] if q_indices is None else q_indices,
            k.shape[-3] if k_indices is None else k_indices,
        )
        q, k, v = (x.reshape(math.prod(leading), *x.shape[-3:]) for x in (q, k, v))
        output, lse = attention(
            q,
            k,
            v,
            _flat(bias, leading),
            _flat(dense, leading),
            scale=logits_scale,
            logits_soft_cap=logits_soft_cap,
            is_causal=is_causal,
            query_seq_lengths=query_lengths,
            key_value_seq_lengths=key_lengths,
            local_window_size=self.local_window_size,
            deterministic=self.deterministic,
            numerics=self.numerics,
            implementation=self.implementation,
            return_residual=True,
        )
        output = output.reshape(*leading, *output.shape[1:])
        if not return_residuals:
            return output, None
        # tokamax's merging subtracts maxima: -inf less -inf would be NaN where no key is seen.
        lse = jnp.maximum(lse, jnp.finfo(lse.dtype).min).reshape(*leading, *lse.shape[1:])
        return output, (lse, jnp.ones_like(lse))

    # tokamax derives the arguments of an op, and how to write them down, from this signature.
    _fwd.__signature__ = inspect.signature(base.DotProductAttention._fwd)


attention_op = DotProductAttention()
"""The op without options."""
