"""What the default path and the kernels compute with: arrays that travel together."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

Array = jax.Array


class Tags(NamedTuple):
    """What ranges cannot say: row i sees key j only if query_low[i] <= key[j] <= query_high[i].

    query_low, query_high [B|1, T], key [B|1, S] int32; tiles [B|1, ceil(T / 128)] int32: 1 where
    a tile of rows needs the comparison, 0 where its ranges alone say the same.
    """

    query_low: Array
    query_high: Array
    key: Array
    tiles: Array


class RowRanges(NamedTuple):
    """Keys that each row sees, besides what extents and window say: low <= j < high.

    low, high [B|1, T] int32, within [0, S], 0 and 0 in a row that sees none; all arrays have B or
    all have 1. table [B|1, ceil(T / 128), 4] int32: of each tile of 128 rows min low, max high,
    max low, min high over its rows that see a key (`masks.table`); tags: or None.
    """

    low: Array
    high: Array
    table: Array
    tags: Tags | None = None


class MaskBits(NamedTuple):
    """A mask of pairs as kernels read it (`masks.bits`), int32.

    words [B|1, N|1, ceil(T / 64), 4 ceil(S / 128), 64]: bit t of [..., u, w, i] says whether row
    64 u + i sees key 32 w + t. some, every [B|1, N|1, ceil(T / 64), ceil(S / 512)]: a bit for 64
    rows and 16 keys: whether any of their pairs are seen, or all.

    The rest follows from `some`; it is here so that no call computes it again. limits
    [B|1, N|1, ceil(T / 128), 2]: 128 rows see no key before the first or from the second on.
    row_boxes [B|1, N|1, ceil(T / 64)], key_boxes [B|1, N|1, 32 ceil(S / 512)]: of how many boxes of
    64 rows and 16 keys a pair is seen, by their rows and by their keys.
    """

    words: Array
    some: Array
    every: Array
    limits: Array
    row_boxes: Array
    key_boxes: Array


class Operands(NamedTuple):
    """Arrays of the forward.

    query [B, T, N, H], key and value [B, S, K, H]; extents [B, 4] int32 (query length, key length,
    query offset, 0); bias and mask, or None, broadcast to [B, N, T, S] without holding it, unless
    bias is a value of positions (`bias.Bias`); offset
    [] int32, the query offset of all entries of the batch, or None where they have their own;
    scale [], the softmax scale in the type of the sums, or None where it is static; rows: or None;
    soft_cap [], likewise, or None where it is static or absent; sinks [N] in that type, or None;
    pairs: a mask that is evaluated where it is needed (`masks.pairs`), which the default path alone
    does, or None; bits: what kernels take in place of it and of `mask`, or None; score: a user's
    function of scores (`score.ScoreFunction`), or None.
    """

    query: Array
    key: Array
    value: Array
    extents: Array
    bias: Any = None
    mask: Array | None = None
    offset: Array | None = None
    scale: Array | None = None
    rows: RowRanges | None = None
    soft_cap: Array | None = None
    sinks: Array | None = None
    pairs: Any = None
    bits: MaskBits | None = None
    score: Any = None


class Results(NamedTuple):
    """What the forward gives: output [B, T, N, H], lse [B, N, T], max_logit [B, N] or None."""

    output: Array
    lse: Array
    max_logit: Array | None = None


class Cotangents(NamedTuple):
    """What the backward gets besides the operands: o, do [B, T, N, H]; lse, dlse [B, N, T]."""

    output: Array
    lse: Array
    output_bar: Array
    lse_bar: Array


class Direction(NamedTuple):
    """What tangents get besides the operands: o [B, T, N, H] and lse [B, N, T] of the forward, and
    tangents of query, key and value.
    """

    output: Array
    lse: Array
    query: Array
    key: Array
    value: Array


class Tangents(NamedTuple):
    """How operands and results move: tangents of query, key, value, output and log-sum-exp."""

    query: Array
    key: Array
    value: Array
    output: Array
    lse: Array


class Gradients(NamedTuple):
    """Cotangents of the operands; None for what is no operand."""

    query: Array
    key: Array
    value: Array
    bias: Any
    scale: Array | None = None
    soft_cap: Array | None = None
