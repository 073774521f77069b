"""Decoding with the pages of each sequence on several devices, joined by log-sum-exp."""

from __future__ import annotations

from typing import Any

import jax
from jax.typing import ArrayLike

from fa4_jax.api import Implementation, Window
from fa4_jax.paged.arguments import DecodeCall
from fa4_jax.paged.call import run


def local_decode(
    query: ArrayLike,
    key_pages: ArrayLike,
    value_pages: ArrayLike,
    page_table: ArrayLike,
    lengths: ArrayLike,
    *,
    axis: str,
    query_lengths: ArrayLike | None = None,
    scale: float | jax.Array | None = None,
    local_window_size: Window = None,
    logits_soft_cap: float | jax.Array | None = None,
    sinks: ArrayLike | None = None,
    key_scale: ArrayLike | None = None,
    value_scale: ArrayLike | None = None,
    return_residual: bool = False,
    implementation: Implementation = None,
) -> Any:
    """`fa4_jax.decode` of sequences whose pages are dealt out over the devices of a mesh axis.

    To be called inside a shard_map whose manual axes include it. Page i of each sequence is on
    device i % n of the axis, as entry i // n of that device's table (`PagedCache` with this axis
    keeps them so). Each device attends over its own pages; the results are joined by log-sum-exp:
    every device receives B N T (H + 2) numbers in float32, whatever the lengths are.

    Args:
      query, lengths, query_lengths: as `fa4_jax.decode`, the same on all devices of the axis;
        lengths are those of the whole sequences.
      key_pages, value_pages: this device's, [P, page, K, H].
      page_table: this device's, int32 [B, M], of numbers in its own pages.
      axis: the mesh axis.
      scale, local_window_size, logits_soft_cap, sinks, key_scale, value_scale, return_residual,
        implementation: as `fa4_jax.decode`.

    Returns:
      As `fa4_jax.decode`, the same on all devices of the axis.

    Raises:
      ValueError, NotImplementedError: as `fa4_jax.decode`.
    """
    call = DecodeCall(
        *(query, key_pages, value_pages, page_table, lengths),
        query_lengths=query_lengths,
        scale=scale,
        local_window_size=local_window_size,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        key_scale=key_scale,
        value_scale=value_scale,
        axis=axis,
    )
    return run(call, implementation, return_residual)
