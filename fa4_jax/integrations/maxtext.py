"""Attention for MaxText: a branch of `AttentionOp.apply_attention`, for training and prefill.

    fa4_jax.integrations.maxtext.install("cudnn_flash_jax")
    python -m maxtext.trainers.pre_train.train ... attention=cudnn_flash_jax

MaxText's configuration names the kernel in `attention`; install() says which name is this library.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from maxtext.common.common_types import MODEL_MODE_AUTOREGRESSIVE, MODEL_MODE_TRAIN, AttentionType
from maxtext.layers.attention_op import AttentionOp

from fa4_jax.api import attention
from fa4_jax.masks import Mask, chunked

Result = tuple[jax.Array, None, None]

_CAUSAL = (
    AttentionType.GLOBAL,
    AttentionType.MLA,
    AttentionType.LOCAL_SLIDING,
    AttentionType.CHUNK,
)
_REFUSED = {
    "previous_chunk": "prefill of whole prompts",
    "bidirectional_mask": "None",
    "indexer_mask": "None",
    "compressed_mask": "None",
    "record_max_logits": "False",
    "pad_kv_total": "0",
    "compress_ratio": "0",
}


def _refuse(op: Any, model_mode: str, arguments: dict[str, Any]) -> None:
    """Raises NotImplementedError for what `attention` lacks in a call of MaxText's."""
    if model_mode == MODEL_MODE_AUTOREGRESSIVE:
        raise NotImplementedError(
            f"model_mode={model_mode!r}; supported: training and prefill; decode with "
            "attention='dot_product'"
        )
    for name, choice in _REFUSED.items():
        found = arguments.get(name)
        if found is not None and (isinstance(found, jax.Array) or found):
            what = f" of shape {found.shape}" if isinstance(found, jax.Array) else f"={found!r}"
            raise NotImplementedError(f"{name}{what}; supported: {choice}")
    if op.attention_type not in (*_CAUSAL, AttentionType.FULL):
        names = ", ".join(x.value for x in (*_CAUSAL, AttentionType.FULL))
        raise NotImplementedError(f"attention_type={op.attention_type.value!r}; supported: {names}")
    if op.dropout_rate > 0 and model_mode == MODEL_MODE_TRAIN:
        raise NotImplementedError(f"dropout_rate={op.dropout_rate} in training; supported: 0")
    if getattr(op.config, "moba", False):
        raise NotImplementedError(f"moba={op.config.moba!r}; supported: False")
    if (shards := op._context_parallel_size()) > 1:
        raise NotImplementedError(
            f"context parallelism over {shards} shards; supported: 1, or fa4_jax.parallel in a "
            "layer of your own"
        )


def _window(op: Any) -> tuple[int, int] | None:
    """MaxText's window of W counts the query's own key."""
    if op.attention_type != AttentionType.LOCAL_SLIDING:
        return None
    if op.sliding_window_size is None:
        raise ValueError("sliding_window_size=None with attention_type='local_sliding'")
    return op.sliding_window_size - 1, 0


def _chunks(op: Any) -> Mask | None:
    """Causal chunks, counted from the first row whatever the segments."""
    if op.attention_type != AttentionType.CHUNK:
        return None
    if op.chunk_attn_window_size is None:
        raise ValueError("chunk_attn_window_size=None with attention_type='chunk'")
    return chunked(op.chunk_attn_window_size)


def _segments(queries: jax.Array | None, keys: jax.Array | None, packed: bool) -> dict[str, Any]:
    """Options of `attention` for MaxText's segment ids [B, T] and [B, S], where 0 is padding."""
    if queries is None:
        return {}
    each = queries, queries if keys is None else keys
    if packed:
        # Here negative ids are padding; the maximum keeps the subtraction from wrapping around.
        return {"segment_ids": tuple(jnp.maximum(ids.astype(jnp.int32), 0) - 1 for ids in each)}
    lengths = [jnp.sum(ids > 0, axis=-1, dtype=jnp.int32) for ids in each]
    return dict(zip(("query_seq_lengths", "key_value_seq_lengths"), lengths, strict=True))


def apply_attention(
    op: AttentionOp,
    query: jax.Array,
    key: Any,
    value: Any,
    decoder_segment_ids: jax.Array | None,
    segment_positions: jax.Array | None,
    lengths: jax.Array | None,
    model_mode: str,
    *,
    decoder_segment_ids_kv: jax.Array | None = None,
    sinks: jax.Array | None = None,
    packed: bool = True,
    options: dict[str, Any] | None = None,
    **arguments: Any,
) -> Result:
    """The branch: call it with all that `AttentionOp.apply_attention` receives.

    Args:
      op: the AttentionOp, which says the kind of attention, its window or chunk, and its soft cap.
      query, key, value: [B, T, N, H], [B, S, K, H], [B, S, K, Hv]; query is scaled already. Key and
        value may be quantised (KVTensor).
      decoder_segment_ids, decoder_segment_ids_kv: integers [B, T] and [B, S], or None.
      segment_positions, lengths: unused outside of decoding and context parallelism.
      sinks: [N], a score of each head that no value belongs to, or None.
      packed: rows hold several segments with ids > 0. False says that each row is one, followed by
        padding: lengths, which cost less. Tokens with ids <= 0 are padding either way: they are
        met by nothing and their rows are 0, where MaxText's own lets the ids 0 meet each other.
      options: further keyword arguments of `fa4_jax.attention`.
      **arguments: MaxText's others, of which those that change nothing are accepted.

    Returns:
      (output, None, None): MaxText takes such an output to be normalised.

    Raises:
      ValueError: a window or a chunk without a size.
      NotImplementedError: decoding, a chunked prefill, other kinds of attention, masks beyond
        segments, dropout, recorded logits, or context parallelism.
    """
    del segment_positions, lengths
    _refuse(op, model_mode, arguments)
    key, value = (x.dequant() if hasattr(x, "dequant") else x for x in (key, value))
    settings: dict[str, Any] = {
        "scale": 1.0,
        "is_causal": op.attention_type in _CAUSAL,
        "local_window_size": _window(op),
        "mask": _chunks(op),
        # MaxText caps the scaled scores before it masks them, as `attention` does; 0 is no cap.
        "logits_soft_cap": op.attn_logits_soft_cap or None,
        "sinks": sinks,
    }
    settings |= _segments(decoder_segment_ids, decoder_segment_ids_kv, packed)
    settings |= options or {}
    return attention(query, key, value, **settings), None, None


def install(
    attention_kernel: str = "cudnn_flash_jax", *, packed: bool = True, **options: Any
) -> Callable[[], None]:
    """Makes MaxText's `attention=<attention_kernel>` run `apply_attention`.

    Args:
      attention_kernel: one of the names that MaxText's configuration allows.
      packed: as for `apply_attention`; give False where MaxText's `packing` is.
      **options: keyword arguments of `fa4_jax.attention`, such as deterministic=True.

    Returns:
      A function that undoes it.
    """
    own = AttentionOp.apply_attention

    @functools.wraps(own)
    def apply(op: AttentionOp, *args: Any, **kwargs: Any) -> Any:
        if op.attention_kernel != attention_kernel:
            return own(op, *args, **kwargs)
        return apply_attention(op, *args, packed=packed, options=options, **kwargs)

    AttentionOp.apply_attention = apply

    def undo() -> None:
        AttentionOp.apply_attention = own

    return undo
