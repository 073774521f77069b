"""One tile of scores, rows x keys, all held at once: `dense` is one, `blockwise` visits many.

XLA's CPU compiles every kernel of its own for about 14 ms, while products, sums and the chain
maximum, subtraction, exponential come from its library. So masks act on scores alone, and nothing
stands between the maximum and the exponential.

Letters: b batch, k KV head, g query head of its group, t row, s key, h head dim, r (g, t).
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fa4_jax.bands import UNBOUNDED
from fa4_jax.boxes import Box, positions
from fa4_jax.masks import bits
from fa4_jax.masks.pairs import Pairs
from fa4_jax.operands import Cotangents, Gradients, Operands, RowRanges, Tags
from fa4_jax.problem import Problem
from fa4_jax.score import ScoreFunction
from fa4_jax.xla import additions
from fa4_jax.xla.grouped import Tile, by_group, dense, padded, part, part_of
from fa4_jax.xla.products import clean, dot, poison, select

Array = jax.Array

FEW_ROWS = 16
"""Up to these, XLA's CPU is faster with the keys on the left: with 4 rows and 2048 keys of 128 a
bf16 forward takes 1.00 of `jax.nn`'s time, 1.20 with the rows there (float32: 0.70 and 0.84)."""


class Keys(NamedTuple):
    """key and value [B, S, K, H]; the values' poison [B, S, K], or None where nothing is masked."""

    key: Array
    value: Array
    poison: Array | None

    def part(self, tile: Tile) -> Keys:
        """Those of a tile: key and value [b, k, s, h], poison [b, k, 1, 1, s]."""
        key, value = (part(x, 1, tile.key, tile.keys) for x in (self.key, self.value))
        key, value = (x.transpose(0, 2, 1, 3) for x in (key, value))
        if self.poison is None:
            return Keys(key, value, None)
        bad = part(self.poison, 1, tile.key, tile.keys).transpose(0, 2, 1)[..., None]
        return Keys(key + bad.astype(key.dtype), clean(value), None)


class Rows(NamedTuple):
    """query and do [B, T, N, H]; shift and delta [B, N, T].

    shift: log-sum-exp; +inf for rows that see nothing, whose weights exp(s - shift) are 0, and NaN
      for those with an Inf or NaN in query or do, where pairs may be masked.
    """

    query: Array
    output_bar: Array
    shift: Array
    delta: Array

    def part(self, tile: Tile, call: Call) -> Rows:
        """Those of a tile: query and do [b, k, g, t, h], shift and delta [b, k, g, t, 1]."""
        return Rows(
            call.query_of(self.query, tile),
            call.cleaned(call.rows_of(self.output_bar, tile)),
            call.row_vector(self.shift, tile),
            call.row_vector(self.delta, tile),
        )


class Softmax(NamedTuple):
    """A tile's maxima and sums [b, k, g, t, 1], and weights exp(s - top) [b, k, g, t, s].

    A row whose scores are all -inf has that maximum, and weights of 0.
    """

    top: Array
    total: Array
    weights: Array


class Products(NamedTuple):
    """A tile's part of the gradients, in the type of sums, with the scale if queries have it.

    query [B, t, N, H], key and value [B, s, K, H]; bias as of `additions`, of a dense one the
    tile's part; or None. soft_cap [], or None if it has no gradient.
    """

    query: Array
    key: Array
    value: Array
    bias: Any
    soft_cap: Array | None


@dataclasses.dataclass(frozen=True)
class Call:
    """What the tiles of one call share.

    Attributes:
      rows, keys: lengths, padded to whole tiles.
      extents: as of `Operands`; offset: query offsets, [b|1] int32.
      scale: softmax scale, [], in the type of the sums.
      scales_query: whether queries are multiplied by it, not the scores and the gradients' sums:
        less to compute and to compile, but narrow types would be rounded once more, and a gradient
        of the scale needs the sums without it.
      soft_cap: [], in the type of the sums, or None.
      bias: as of `additions`; mask: [b|1, k|1, g|1, t|1, s|1].
      row_ranges: as of `Operands`, the lengths padded; tile table and tile flags are not read.
      pairs: a mask of pairs, its lengths padded, or None. score: a user's function, or None.
    """

    problem: Problem
    rows: Any
    keys: Any
    extents: Array
    offset: Array
    scale: Array
    scales_query: bool
    soft_cap: Array | None
    bias: Any
    mask: Array | None
    row_ranges: RowRanges | None
    pairs: Pairs | None
    score: ScoreFunction | None

    @property
    def is_masked(self) -> bool:
        """Whether a pair may be masked that is not padding."""
        return self.problem.band or self.problem.has_mask or self.problem.has_ranges

    @property
    def pads_keys(self) -> bool:
        """Whether a tile may hold keys that do not exist."""
        return self.problem.has_lengths or self.keys != self.problem.key_length

    def cleaned(self, x: Array) -> Array:
        """x, clean if it meets weights of 0 for pairs that are masked."""
        return clean(x) if self.is_masked else x

    def visible(self, tile: Tile) -> Array | None:
        """Pairs that band, ranges, masks and length allow, broadcasting to bool [b, k, g, t, s]."""
        keys = positions(tile.key, tile.keys)
        parts: list[Array] = []
        if self.problem.band:
            left, right = self.problem.window
            rows = positions(tile.row, tile.rows)[None, :, None] + self.offset[:, None, None]
            distance = keys[None, None, :] - rows
            parts += [distance <= right] if right < UNBOUNDED else []
            parts += [distance >= -left] if left < UNBOUNDED else []
            parts = [x[:, None, None] for x in parts]
        if self.row_ranges is not None:
            parts += [x[:, None, None] for x in in_ranges(self.row_ranges, tile, keys)]
        if self.mask is not None:
            parts.append(part_of(self.mask, tile))
        if self.pairs is not None:
            parts.append(by_group(self.pairs.seen(tile), self.problem))
        if self.pads_keys:
            parts.append((keys[None, :] < self.extents[:, 1:2])[:, None, None, None, :])
        return functools.reduce(operator.and_, parts) if parts else None

    def scaled(self, query: Array, keys: Keys) -> Array:
        """Scaled products [b, k, g, t, s] of a query [b, k, g, t, h] of `query_of` and keys."""
        rows = merged(query)
        if rows.shape[2] <= FEW_ROWS:
            s = dot(keys.key, rows, 3, 3).transpose(0, 1, 3, 2)
        else:
            s = dot(rows, keys.key, 3, 3)
        s = unmerged(s, query)
        return s if self.scales_query else s * self.scale

    def biased(self, scaled: Array, tile: Tile) -> Array:
        """Scores [b, k, g, t, s] of `scaled`, with soft cap and bias."""
        s = scaled
        if self.soft_cap is not None:
            s = self.soft_cap * lax.tanh(s / self.soft_cap)
        if self.bias is not None:
            added = additions.of_tile(self.bias, tile, self.problem, self.offset)
            if self.problem.has_lengths:
                # Keys past their length are hidden; of rows past theirs a bias may hold anything.
                row = positions(tile.row, tile.rows)
                used = row[None, :] < self.extents[:, :1]
                added = jnp.where(used[:, None, None, :, None], added, 0)
            s += added.astype(s.dtype)
        return s

    def changed(self, s: Array, tile: Tile) -> Array:
        """What the user's function, if there is one, makes of scores [b, k, g, t, s]."""
        if self.score is None:
            return s
        by_head = s.reshape(s.shape[0], self.problem.query_heads, *s.shape[3:])
        return self.score.changed(by_head, tile).reshape(s.shape)

    def scores(self, scaled: Array, tile: Tile) -> Array:
        """Scores [b, k, g, t, s] of `scaled`: -inf if masked, else NaN if poisoned."""
        s = self.changed(self.biased(scaled, tile), tile)
        visible = self.visible(tile)
        return s if visible is None else select(visible, s, -jnp.inf)

    def hide(self, x: Array, scores: Array, tile: Tile, fill: float) -> Array:
        """x with `fill` for the pairs that are masked, whatever it holds there."""
        plain = self.bias is None and self.score is None
        seen = self.visible(tile) if plain else scores != -jnp.inf
        return x if seen is None else select(seen, x, fill)

    def rows_of(self, x: Array, tile: Tile) -> Array:
        """A tile's rows of [B, T, N, H], [b, k, g, t, h]."""
        x = part(x, 1, tile.row, tile.rows)
        b, t, _, h = x.shape
        x = x.reshape(b, t, self.problem.kv_heads, self.problem.group, h)
        return x.transpose(0, 2, 3, 1, 4)

    def query_of(self, x: Array, tile: Tile) -> Array:
        """A tile's rows of the query, [b, k, g, t, h], scaled if queries are."""
        x = self.rows_of(x, tile)
        return x * self.scale if self.scales_query else x

    def row_vector(self, x: Array, tile: Tile) -> Array:
        """A tile's rows of [B, N, T], [b, k, g, t, 1]."""
        x = part(x, 2, tile.row, tile.rows)
        return x.reshape(x.shape[0], self.problem.kv_heads, self.problem.group, tile.rows, 1)


def make_call(problem: Problem, operands: Operands, rows: Any, keys: Any) -> Call:
    """The call, its lengths padded to `rows` and `keys`."""
    scale, scales_query, cap = operands.scale, False, operands.soft_cap
    if scale is None:
        scale = jnp.asarray(problem.scale, problem.accumulator)
        scales_query = operands.query.dtype == problem.accumulator
    if problem.soft_cap is not None:
        cap = jnp.asarray(problem.soft_cap, problem.accumulator)
    offset = operands.extents[:, 2] if operands.offset is None else operands.offset[None]

    bias = None if operands.bias is None else additions.made(operands.bias, problem, rows, keys)
    mask = None if operands.mask is None else dense(operands.mask, problem, rows, keys)
    ranges = None if operands.rows is None else _padded_ranges(problem, operands, rows, keys)
    return Call(
        *(problem, rows, keys, operands.extents, offset, scale, scales_query),
        *(cap, bias, mask, ranges, bits.pairs_of(operands, rows, keys)),
        score=operands.score,
    )


def _padded_ranges(problem: Problem, operands: Operands, rows: Any, keys: Any) -> RowRanges:
    """Ranges whose lengths are padded; rows past the query length see nothing."""
    found = operands.rows
    assert found is not None
    low, high = found.low, found.high
    if problem.has_lengths:
        below = jnp.arange(problem.query_length)[None, :] < operands.extents[:, 0:1]
        low = jnp.broadcast_to(low, below.shape)
        high = jnp.where(below, high, low)
    low, high = (padded(x, 1, rows) for x in (low, high))
    tags = found.tags
    if tags is not None:
        first, last = (padded(x, 1, rows) for x in (tags.query_low, tags.query_high))
        tags = Tags(first, last, padded(tags.key, 1, keys), tags.tiles)
    return RowRanges(low, high, found.table, tags)


def in_ranges(found: RowRanges, tile: Box, keys: Array) -> list[Array]:
    """Comparisons that hold for the pairs of a tile that ranges and tags allow, [b|1, t, s]."""

    def rows(x: Array) -> Array:
        return part(x, 1, tile.row, tile.rows)[:, :, None]

    parts = [rows(found.low) <= keys[None, None, :], keys[None, None, :] < rows(found.high)]
    if found.tags is not None:
        tags = part(found.tags.key, 1, tile.key, tile.keys)[:, None, :]
        parts += [rows(found.tags.query_low) <= tags, tags <= rows(found.tags.query_high)]
    return parts


def merged(x: Array) -> Array:
    """[b, k, g, t, h] -> [b, k, r, h]: the rows of a group side by side, one matrix a KV head."""
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3], x.shape[4])


def unmerged(x: Array, like: Array) -> Array:
    """[b, k, r, s] -> [b, k, g, t, s]."""
    return x.reshape(*like.shape[:4], x.shape[-1])


def native_rows(x: Array) -> Array:
    """[b, k, g, t, h] -> [B, T, N, H]."""
    b, k, g, t, h = x.shape
    return x.transpose(0, 3, 1, 2, 4).reshape(b, t, k * g, h)


def native_keys(x: Array) -> Array:
    """[b, k, s, h] -> [B, S, K, H]."""
    return x.transpose(0, 2, 1, 3)


def make_keys(call: Call, operands: Operands) -> Keys:
    """The keys and values of a call, 0 past the key length."""
    found = [operands.key, operands.value]
    if call.problem.has_lengths:
        below = jnp.arange(call.problem.key_length)[None, :] < call.extents[:, 1:2]
        found = [jnp.where(below[:, :, None, None], x, 0) for x in found]
    key, value = (padded(x, 1, call.keys) for x in found)
    bad = padded(poison(operands.value), 1, call.keys) if call.is_masked else None
    return Keys(key, value, bad)


def known_rows(x: Array, call: Call) -> Array:
    """[B, T, N, H] with 0 past the query length."""
    if not call.problem.has_lengths:
        return x
    below = jnp.arange(call.problem.query_length)[None, :] < call.extents[:, 0:1]
    return jnp.where(below[:, :, None, None], x, 0)


def make_rows(call: Call, operands: Operands, cotangents: Cotangents) -> Rows:
    """What the backward knows of each row."""
    query, output_bar = (known_rows(x, call) for x in (operands.query, cotangents.output_bar))
    delta = dot(output_bar, cotangents.output, 3, 3, 3).transpose(0, 2, 1) - cotangents.lse_bar
    seen, shift = cotangents.lse != -jnp.inf, cotangents.lse
    if call.is_masked:
        # Selected, not added, since XLA's CPU would add in the library and compile the logarithm
        # of the forward by itself.
        bad = poison(query).transpose(0, 2, 1) + (delta - delta)
        shift, delta = select(bad == 0, shift, jnp.nan), clean(delta)
    else:
        delta = select(seen, delta, 0)
    shift = select(seen, shift, jnp.inf)
    query, output_bar = (padded(x, 1, call.rows) for x in (query, output_bar))
    # A row of padding has weights of 0, whatever numbers a bias has there.
    shift, delta = padded(shift, 2, call.rows, jnp.inf), padded(delta, 2, call.rows)
    return Rows(query, output_bar, shift, delta)


def row_top(scores: Array) -> Array:
    """Greatest score of each row, [..., 1], for derivatives a constant: no result depends on it.

    Besides, JAX's derivative of a maximum divides by how many scores equal it, and XLA may compute
    a score in two ways, so that none does.
    """
    axis = scores.ndim - 1
    return lax.stop_gradient(lax.expand_dims(lax.reduce_max(scores, (axis,)), (axis,)))


def exponentials(scores: Array) -> Array:
    """exp(score - greatest of its row), and 0 in a row whose scores are all -inf."""
    # The least number, since -inf - -inf would be NaN; under the maximum, not after it, lest XLA's
    # CPU compile the exponential anew.
    least = lax.full_like(scores, jnp.finfo(scores.dtype).min)
    return lax.exp(scores - row_top(lax.max(scores, least)))


def softmax(scores: Array) -> Softmax:
    """Softmax, not yet divided by the sums."""
    weights = exponentials(scores)
    # Not the maximum that is in the weights, since a second use of it would take XLA's chain apart.
    return Softmax(row_top(scores), weights.sum(-1, keepdims=True), weights)


def weighted(weights: Array, keys: Keys) -> Array:
    """Sums of values [b, k, g, t, h]."""
    acc = dot(merged(weights.astype(keys.value.dtype)), keys.value, 3, 2)
    return unmerged(acc, weights)


def with_sinks(sinks: Array, top: Array, total: Array, acc: Array) -> tuple[Array, Array, Array]:
    """Maxima, sums and sums of values of all rows, as of `finish`, with sinks [N] added."""
    sink = sinks.reshape(1, *top.shape[1:3], 1, 1)
    # The least number, since a row without a key and a head without a sink have -inf.
    reference = lax.max(lax.max(top, sink), lax.full_like(top, jnp.finfo(top.dtype).min))
    reference = lax.stop_gradient(reference)
    keep = lax.exp(top - reference)
    return reference, total * keep + lax.exp(sink - reference), acc * keep


def below_length(call: Call, rows: int) -> Array:
    """Which of the first rows are within the query length, [b, 1, 1, t, 1]."""
    positions = jnp.arange(rows)
    return (positions[None, :] < call.extents[:, 0:1])[:, None, None, :, None]


def finish(call: Call, top: Array, total: Array, acc: Array) -> tuple[Array, Array]:
    """Output [b, k, g, t, h] and log-sum-exp [b, k, g, t, 1] of all rows, in the type of sums."""
    seen = total != 0
    if call.problem.has_lengths:
        seen &= below_length(call, total.shape[3])
    total = select(seen, total, 1)
    return select(seen, acc / total, 0), select(seen, top + lax.log(total), -jnp.inf)


def max_logit(call: Call, top: Array, total: Array) -> Array | None:
    """Largest score of each head, [B, N], from `finish`'s maxima and sums; None if unwanted."""
    if not call.problem.returns_max_logit:
        return None
    seen = (total != 0) & below_length(call, total.shape[3])
    top = select(seen, top, -jnp.inf)
    return top.max((3, 4)).reshape(top.shape[0], -1).astype(jnp.float32)


def before_cap(call: Call, ds: Array, scaled: Array, tile: Tile) -> tuple[Array, Array]:
    """Gradients of scaled products and of the cap c, element by element, from those of scores.

        s = c tanh(x / c),  dx = (1 - tanh^2) ds,  dc = (tanh - x / c (1 - tanh^2)) ds

    A pair that is masked has 0 in both, whatever its product is.
    """
    assert call.soft_cap is not None
    ratio = scaled / call.soft_cap
    tanh = lax.tanh(ratio)
    slope = 1 - tanh * tanh
    # An infinite ratio has the slope 0.
    of_cap = tanh - jnp.where(slope == 0, 0, ratio * slope)
    visible = call.visible(tile)
    if visible is not None:
        slope, of_cap = select(visible, slope, 0), select(visible, of_cap, 0)
    return ds * slope, ds * of_cap


def before_function(call: Call, ds: Array, scaled: Array, tile: Tile) -> Array:
    """Gradients of the scores that the user's function is given, 0 for a pair that is masked."""
    before = call.biased(scaled, tile)
    found = jax.vjp(lambda s: call.changed(s, tile), before)[1](ds)[0]
    visible = call.visible(tile)
    return found if visible is None else select(visible, found, 0)


def products(
    call: Call, rows: Rows, keys: Keys, weights: Array, scaled: Array, tile: Tile
) -> Products:
    """The products of the backward, from weights p and scaled products of a tile."""
    output_bar = merged(rows.output_bar)
    dp = unmerged(dot(output_bar, keys.value, 3, 3), weights)
    ds = weights * (dp - rows.delta)
    if call.score is not None:
        ds = before_function(call, ds, scaled, tile)
    dbias = None
    if call.bias is not None:
        dbias = additions.gradient(call.bias, ds, tile, call.problem, call.offset)
    dcap = None
    if call.soft_cap is not None:
        ds, of_cap = before_cap(call, ds, scaled, tile)
        dcap = None if call.problem.soft_cap is not None else of_cap.sum()
    # A query or key that is cleaned has NaN in the weights of every pair that is seen.
    query, key = merged(call.cleaned(rows.query)), call.cleaned(keys.key)
    dv = dot(merged(weights.astype(output_bar.dtype)), output_bar, 2, 2)
    narrow = merged(ds.astype(query.dtype))
    dk = dot(narrow, query, 2, 2)
    dq = dot(narrow, key, 3, 2)
    dq = dq * call.scale if call.scales_query else dq
    dq = native_rows(unmerged(dq, weights))
    return Products(dq, native_keys(dk), native_keys(dv), dbias, dcap)


def gradients(call: Call, operands: Operands, rows: Rows, sums: Products) -> Gradients:
    """Gradients of the operands from the sums over all tiles."""
    t, s = call.problem.query_length, call.problem.key_length
    query, key, value = sums.query[:, :t], sums.key[:, :s], sums.value[:, :s]
    dtype = operands.query.dtype
    dscale = None
    if operands.scale is not None:
        # The query of a row that sees nothing may hold anything.
        seen = (rows.shift[:, :, :t] < jnp.inf).transpose(0, 2, 1)[..., None]
        dscale = jnp.where(seen, query * operands.query.astype(query.dtype), 0).sum()
    dbias = None
    if operands.bias is not None:
        dbias = additions.of_operand(sums.bias, operands.bias)
    if not call.scales_query:
        query, key = query * call.scale, key * call.scale
    query, key = query.astype(dtype), key.astype(dtype)
    return Gradients(query, key, value.astype(dtype), dbias, dscale, sums.soft_cap)
