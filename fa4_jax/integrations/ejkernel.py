"""Flash attention for ejkernel (EasyDeL): registered for its platform "cuda" on GPUs.

    fa4_jax.integrations.ejkernel.register(priority=100)
    out = ejkernel.modules.flash_attention(q, k, v, causal=True, platform="cuda")

The implementation with the highest priority is the one that ejkernel calls; its own have 0.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from ejkernel.kernels import _registry as registry
from ejkernel.kernels._xla.flash_attention import flash_attention as their_flash_attention

from fa4_jax.api import Implementation, Numerics, attention

ALGORITHM = "flash_attention"
PRIORITY = 100

# ejkernel compares the signatures of all implementations, and passes every argument by its name.
_SIGNATURE = inspect.signature(their_flash_attention)


def _refuse(features: dict[str, Any]) -> None:
    """Raises NotImplementedError for what `attention` lacks among ejkernel's arguments."""
    choices = {
        "dropout_prob": (0.0, "0.0"),
        "cum_seqlens_q": (None, "[batch, length, heads, head_dim] with q_segment_ids"),
        "cum_seqlens_k": (None, "[batch, length, heads, head_dim] with kv_segment_ids"),
        "normalize_output": (True, "True"),
        "block_tables": (None, "keys and values [batch, length, heads, head_dim]"),
    }
    for name, (supported, choice) in choices.items():
        found = features[name]
        if isinstance(found, jax.Array) or found != supported:
            what = f" of shape {found.shape}" if isinstance(found, jax.Array) else f"={found!r}"
            # ejkernel raises its own error for messages that say "not supported".
            raise NotImplementedError(f"{name}{what} is not supported; supported: {choice}")
    if features["logits_soft_cap"] is not None and features["bias"] is not None:
        raise NotImplementedError(
            "logits_soft_cap with a bias, which ejkernel adds before the cap and fa4_jax after it, "
            "is not supported; supported: one of the two"
        )
    if jnp.dtype(features["logits_dtype"]) != jnp.float32:
        raise NotImplementedError(
            f"logits_dtype={features['logits_dtype']} is not supported; supported: float32"
        )


def _check_precision(precision: Any, dtype: Any) -> None:
    default = (None, jax.lax.Precision.DEFAULT, 0)
    if dtype.itemsize > 2 and precision not in default:
        raise NotImplementedError(
            f"precision={precision} of {dtype} is not supported; supported: DEFAULT"
        )


def _segments(
    q_segment_ids: jax.Array | None, kv_segment_ids: jax.Array | None
) -> tuple[jax.Array, jax.Array] | None:
    """Segment ids [B, T] and [B, S]; a negative one meets nothing."""
    if q_segment_ids is None:
        if kv_segment_ids is not None:
            raise ValueError("kv_segment_ids are given without q_segment_ids")
        return None
    return q_segment_ids, q_segment_ids if kv_segment_ids is None else kv_segment_ids


def _sinks(softmax_aux: jax.Array | None, heads: int) -> jax.Array | None:
    """One sink [N] of each head for its several, [sinks] or [N, sinks]: their log-sum-exp."""
    if softmax_aux is None:
        return None
    together = jax.nn.logsumexp(softmax_aux.astype(jnp.float32), axis=-1)
    return jnp.broadcast_to(together, (heads,))


def _flash_attention(options: dict[str, Any], *args: Any, **kwargs: Any) -> jax.Array:
    """Attention with the arguments of ejkernel's flash_attention, and options of our own."""
    given = _SIGNATURE.bind(*args, **kwargs)
    given.apply_defaults()
    call = given.arguments
    _refuse(call)
    query, key, value = call["query"], call["key"], call["value"]
    mask = call["attention_mask"]
    _check_precision(call["precision"], query.dtype)
    return attention(
        query,
        key,
        value,
        call["bias"],
        None if mask is None else mask.astype(jnp.bool_),
        scale=call["softmax_scale"],
        segment_ids=_segments(call["q_segment_ids"], call["kv_segment_ids"]),
        logits_soft_cap=call["logits_soft_cap"],
        sinks=_sinks(call["softmax_aux"], query.shape[-2]),
        is_causal=call["causal"],
        local_window_size=call["sliding_window"],
        **options,
    )


def make_flash_attention(
    *,
    deterministic: bool = False,
    numerics: Numerics = "fast",
    implementation: Implementation = None,
) -> Callable[..., jax.Array]:
    """ejkernel's `flash_attention` on `fa4_jax.attention`; options as for that.

    query is [batch, T, N, H], key and value are [batch, S, K, H], of one dtype. causal and
    sliding_window (keys to the left and right beside the query's own), segment ids, a soft cap and
    sinks (softmax_aux) run on the kernels; a bias or an attention_mask is dense, on the default
    path. A row that sees no key is 0; ejkernel's XLA implementation takes a mean of values there.

    Raises (when called):
      ValueError: an argument is wrong.
      NotImplementedError: dropout, a soft cap of a bias, cumulative lengths, pages, an output that
        is not normalised, logits that are not float32, a precision of float32 products. ejkernel
        turns it into its own EjkernelRuntimeError, with the same message.
    """
    options = {
        "deterministic": deterministic,
        "numerics": numerics,
        "implementation": implementation,
    }

    def flash_attention(*args: Any, **kwargs: Any) -> jax.Array:
        return _flash_attention(options, *args, **kwargs)

    flash_attention.__signature__ = _SIGNATURE
    return flash_attention


def register(
    priority: int = PRIORITY, *, backend: str = "gpu", **options: Any
) -> Callable[..., jax.Array]:
    """Registers `make_flash_attention(**options)` as ejkernel's flash attention for CUDA.

    Args:
      priority: the highest wins; ejkernel's own implementations have 0.
      backend: "gpu", or "any" to be found with platform="cuda" on machines without a GPU too, where
        the default path runs.

    Returns:
      The registered function, as ejkernel wraps it. A second call registers another one.
    """
    place = ALGORITHM, registry.Platform.CUDA, registry.Backend(backend)
    return registry.kernel_registry.register(*place, priority)(make_flash_attention(**options))
