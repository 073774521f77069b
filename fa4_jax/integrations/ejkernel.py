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
        "logits_soft_cap": (None, "None"),
        "softmax_aux": (None, "None"),
        "normalize_output": (True, "True"),
        "block_tables": (None, "keys and values [batch, length, heads, head_dim]"),
    }
    for name, (supported, choice) in choices.items():
        found = features[name]
        if isinstance(found, jax.Array) or found != supported:
            what = f" of shape {found.shape}" if isinstance(found, jax.Array) else f"={found!r}"
            # ejkernel raises its own error for messages that say "not supported".
            raise NotImplementedError(f"{name}{what} is not supported; supported: {choice}")
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


def _mask(
    attention_mask: jax.Array | None,
    q_segment_ids: jax.Array | None,
    kv_segment_ids: jax.Array | None,
) -> jax.Array | None:
    """What broadcasts to [B, N, T, S]: the mask, within segments; a negative id sees nothing."""
    mask = None if attention_mask is None else attention_mask.astype(jnp.bool_)
    if q_segment_ids is None:
        if kv_segment_ids is not None:
            raise ValueError("kv_segment_ids are given without q_segment_ids")
        return mask
    keys = q_segment_ids if kv_segment_ids is None else kv_segment_ids
    queries = q_segment_ids[:, None, :, None]
    same = (queries == keys[:, None, None, :]) & (queries >= 0)
    return same if mask is None else mask & same


def _flash_attention(options: dict[str, Any], *args: Any, **kwargs: Any) -> jax.Array:
    """Attention with the arguments of ejkernel's flash_attention, and options of our own."""
    given = _SIGNATURE.bind(*args, **kwargs)
    given.apply_defaults()
    call = given.arguments
    _refuse(call)
    query, key, value = call["query"], call["key"], call["value"]
    _check_precision(call["precision"], query.dtype)
    return attention(
        query,
        key,
        value,
        call["bias"],
        _mask(call["attention_mask"], call["q_segment_ids"], call["kv_segment_ids"]),
        scale=call["softmax_scale"],
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
    sliding_window (keys to the left and right beside the query's own) run on the kernels; a bias,
    an attention_mask or segment ids are dense, on the default path. A row that sees no key is 0;
    ejkernel's XLA implementation takes a mean of values there.

    Raises (when called):
      ValueError: an argument is wrong.
      NotImplementedError: dropout, a soft cap, sinks, cumulative lengths, pages, an output that is
        not normalised, logits that are not float32, a precision of float32 products. ejkernel
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
