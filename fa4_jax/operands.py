"""What the default path and the kernels compute with: arrays that travel together."""

from __future__ import annotations

from typing import NamedTuple

import jax

Array = jax.Array


class Operands(NamedTuple):
    """Arrays of the forward.

    query [B, T, N, H], key and value [B, S, K, H]; extents [B, 4] int32 (query length, key length,
    query offset, 0); bias and mask, or None, broadcast to [B, N, T, S] without holding it; offset
    [] int32, the query offset of all entries of the batch, or None where they have their own;
    scale [], the softmax scale in the type of the sums, or None where it is static.
    """

    query: Array
    key: Array
    value: Array
    extents: Array
    bias: Array | None = None
    mask: Array | None = None
    offset: Array | None = None
    scale: Array | None = None


class Cotangents(NamedTuple):
    """What the backward gets besides the operands: o, do [B, T, N, H]; lse, dlse [B, N, T]."""

    output: Array
    lse: Array
    output_bar: Array
    lse_bar: Array


class Gradients(NamedTuple):
    """Cotangents of the operands; None for a bias or a scale that is no operand."""

    query: Array
    key: Array
    value: Array
    bias: Array | None
    scale: Array | None = None
