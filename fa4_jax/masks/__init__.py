"""Masks as small values that compose with `&`, `|` and `~`, passed to `attention` as `mask=`.

values     what users write
resolve    from a call's masks to one range of keys a row (`RowRanges`)
tags       ids that are compared, where ranges cannot say it
table      min and max of the ranges, tile by tile
pairs      what ranges cannot say: masks that are evaluated pair by pair
of_pairs   from masks to these
bits       these as packed bits, which kernels read
order      the order in which kernels take tiles
in_bias    a mask beside a dense bias, for kernels: -inf in a copy of it
"""

from fa4_jax.masks.prepared import tile_table
from fa4_jax.masks.values import (
    Mask,
    block_causal,
    chunked,
    function,
    intervals,
    prefix,
    ranges,
    segments,
    window,
)

__all__ = [
    "Mask",
    "block_causal",
    "chunked",
    "function",
    "intervals",
    "prefix",
    "ranges",
    "segments",
    "tile_table",
    "window",
]
