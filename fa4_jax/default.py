"""The pure-JAX attention: blockwise online softmax, forward and backward, O(length) memory.

    s_ij = scale q_i . k_j + bias_ij,  lse_i = log sum_j exp(s_ij),  p_ij = exp(s_ij - lse_i)
    o_i  = sum_j p_ij v_j
    dv_j = sum_i p_ij do_i,  delta_i = do_i . o_i - dlse_i,  ds_ij = p_ij (do_i . v_j - delta_i)
    dq_i = scale sum_j ds_ij k_j,  dk_j = scale sum_i ds_ij q_i,  dbias_ij = ds_ij,
    dscale = sum_i q_i . dq_i / scale

Online softmax: Milakov & Gimelshein 2018; blocks and recomputation: FlashAttention-2
(Dao 2023, sections 2.3 and 3.1). Masked keys and padding may hold Inf or NaN: wherever a product
meets such a row with weight zero, `_confined` keeps it out.

Letters: b batch, k KV head, g query head of its group, q row, s key, h head dim.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fa4_jax import types
from fa4_jax.blocks import Range, Side, band_range, block_size, edge_block
from fa4_jax.problem import UNBOUNDED, Problem

Array = jax.Array

SCORES_PER_BLOCK = 2**20
"""Scores in flight, over batch and heads: 4 MB, measured best on 2 CPU cores (256 kB..16 MB)."""

BLOCK_RANGE = (64, 512)


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


@dataclasses.dataclass(frozen=True)
class _Tiling:
    """Block sizes of both sides."""

    rows: Side
    keys: Side


def _tiling(problem: Problem) -> _Tiling:
    low, high = BLOCK_RANGE
    target = low  # of a symbolic batch, which may be large
    if isinstance(problem.batch, int):
        heads = max(1, problem.batch * problem.query_heads)
        target = min(high, max(low, math.isqrt(SCORES_PER_BLOCK // heads)))

    def side(length: int) -> Side:
        size = block_size(length, target) if isinstance(length, int) else target // 8 * 8
        return Side(size, -(-length // size), length // size)

    return _Tiling(side(problem.query_length), side(problem.key_length))


def _row_blocks(x: Array, problem: Problem, side: Side) -> Array:
    """[B, T, N, H] -> [blocks, B, K, G, rows, H], zero padded."""
    b, t, _, h = x.shape
    x = jnp.pad(x, ((0, 0), (0, side.size * side.count - t), (0, 0), (0, 0)))
    x = x.reshape(b, side.count, side.size, problem.kv_heads, problem.group, h)
    return x.transpose(1, 0, 3, 4, 2, 5)


def _key_blocks(x: Array, side: Side) -> Array:
    """[B, S, K, H] -> [blocks, B, K, keys, H], zero padded."""
    b, s, k, h = x.shape
    x = jnp.pad(x, ((0, 0), (0, side.size * side.count - s), (0, 0), (0, 0)))
    return x.reshape(b, side.count, side.size, k, h).transpose(1, 0, 3, 2, 4)


def _row_vectors(x: Array, problem: Problem, side: Side, fill: float) -> Array:
    """[B, N, T] -> [blocks, B, K, G, rows, 1]."""
    b, _, t = x.shape
    x = jnp.pad(x, ((0, 0), (0, 0), (0, side.size * side.count - t)), constant_values=fill)
    x = x.reshape(b, problem.kv_heads, problem.group, side.count, side.size, 1)
    return x.transpose(3, 0, 1, 2, 4, 5)


def _from_row_blocks(x: Array, length: int) -> Array:
    """[blocks, B, K, G, rows, H] -> [B, T, N, H]."""
    blocks, b, k, g, rows, h = x.shape
    return x.transpose(1, 0, 4, 2, 3, 5).reshape(b, blocks * rows, k * g, h)[:, :length]


def _from_key_blocks(x: Array, length: int) -> Array:
    """[blocks, B, K, keys, H] -> [B, S, K, H]."""
    blocks, b, k, keys, h = x.shape
    return x.transpose(1, 0, 3, 2, 4).reshape(b, blocks * keys, k, h)[:, :length]


def _dense(x: Array | None, problem: Problem, tiling: _Tiling) -> Array | None:
    """[B|1, N|1, T|1, S|1] -> [B|1, K|1, G|1, T|1, S|1], its lengths padded to whole blocks."""
    if x is None:
        return None
    b, n, t, s = x.shape
    heads = (1, 1) if n == 1 else (problem.kv_heads, problem.group)
    pad_t = 0 if t == 1 else tiling.rows.size * tiling.rows.count - t
    pad_s = 0 if s == 1 else tiling.keys.size * tiling.keys.count - s
    return jnp.pad(x, ((0, 0), (0, 0), (0, pad_t), (0, pad_s))).reshape(
        b, *heads, t + pad_t, s + pad_s
    )


def _dense_block(x: Array, tiling: _Tiling, row_block: Any, key_block: Any) -> Array:
    """The part of a dense operand that one pair of blocks needs, [b, k, g, q|1, s|1]."""
    sizes, starts = list(x.shape), [0] * 5
    if sizes[3] != 1:
        sizes[3], starts[3] = tiling.rows.size, row_block * tiling.rows.size
    if sizes[4] != 1:
        sizes[4], starts[4] = tiling.keys.size, key_block * tiling.keys.size
    return lax.dynamic_slice(x, starts, sizes)


def _dot(equation: str, x: Array, y: Array) -> Array:
    """Product whose sums and result are float32, or float64 for float64."""

    def product(x: Array, y: Array) -> Array:
        return jnp.einsum(equation, x, y, preferred_element_type=types.wide(x.dtype))

    # The CPU of jaxlib 0.8.0 refuses some of these products of narrow types when it runs them.
    if jax.__version_info__ > (0, 8, 0) or x.dtype.itemsize >= 4:
        return product(x, y)

    def widened(x: Array, y: Array) -> Array:
        return product(x.astype(jnp.float32), y.astype(jnp.float32))

    return lax.platform_dependent(x, y, cpu=widened, default=product)


def _confined(equation: str, weights: Array, visible: Array | None, x: Array) -> Array:
    """weights . x, in which a weight that is zero by `visible` ignores an Inf or NaN in x.

    Args:
      equation: contracts the last but one axis of x (its rows) with one axis of `weights`.
      weights: [b, k, g, q, s].
      visible: broadcasts to weights; None if all are.
      x: [b, k, s, h] or [b, k, g, q, h].
    """
    if visible is None:
        return _dot(equation, weights, x)
    bad = ~jnp.isfinite(x)
    pairs = jnp.broadcast_to(visible, weights.shape).astype(x.dtype)
    seen = _dot(equation, pairs, bad.astype(x.dtype))
    clean = _dot(equation, weights, jnp.where(bad, 0, x))
    return jnp.where(seen > 0, _dot(equation, weights, x), clean)


class _Scores(NamedTuple):
    """One pair of blocks: scores [b, k, g, q, s], -inf where masked; visible: None if all."""

    scores: Array
    visible: Array | None


@dataclasses.dataclass(frozen=True)
class _Blockwise:
    """What the steps of one call share. Row and key blocks are given by index."""

    problem: Problem
    tiling: _Tiling
    extents: Array  # [B, 4] i32
    offsets: tuple[Array, Array]  # the least and the greatest query offset, [] i32
    scale: Array  # [], in the type of the sums
    bias: Array | None  # [B|1, K|1, G|1, T|1, S|1]
    mask: Array | None

    def key_padding(self, key_block: Any) -> Array:
        """Whether keys lie below the key length, bool [B, s]."""
        columns = key_block * self.tiling.keys.size + jnp.arange(self.tiling.keys.size)
        return columns[None, :] < self.extents[:, 1:2]

    def row_padding(self, row_block: Any) -> Array:
        """Whether rows lie below the query length, bool [B, q]."""
        rows = row_block * self.tiling.rows.size + jnp.arange(self.tiling.rows.size)
        return rows[None, :] < self.extents[:, 0:1]

    def visible(self, row_block: Any, key_block: Any, edge: bool) -> Array | None:
        """Pairs that band and mask allow, bool [b, k, g, q, s] or broadcasting to it."""
        allowed = None
        if edge and self.problem.band:
            rows = row_block * self.tiling.rows.size + jnp.arange(self.tiling.rows.size)
            keys = key_block * self.tiling.keys.size + jnp.arange(self.tiling.keys.size)
            positions = rows[None, :, None] + self.extents[:, 2][:, None, None]
            distance = keys[None, None, :] - positions
            left, right = self.problem.window
            allowed = distance <= right if right < UNBOUNDED else None
            if left < UNBOUNDED:
                above = distance >= -left
                allowed = above if allowed is None else allowed & above
            assert allowed is not None
            allowed = allowed[:, None, None]
        if self.mask is not None:
            block = _dense_block(self.mask, self.tiling, row_block, key_block)
            allowed = block if allowed is None else allowed & block
        return allowed

    def scores(self, q: Array, k: Array, row_block: Any, key_block: Any, edge: bool) -> _Scores:
        """Scores of one pair of blocks; `edge` if part of it may be masked by band or padding."""
        s = _dot("bkgqh,bksh->bkgqs", q, k) * self.scale
        if self.bias is not None:
            s += _dense_block(self.bias, self.tiling, row_block, key_block).astype(s.dtype)
        visible = self.visible(row_block, key_block, edge)
        if visible is not None:
            s = jnp.where(visible, s, -jnp.inf)
        if edge or self.problem.has_lengths:
            s = jnp.where(self.key_padding(key_block)[:, None, None, None, :], s, -jnp.inf)
        return _Scores(s, visible)

    def keys(self, x: Array, key_block: Any, edge: bool) -> Array:
        """Block of [blocks, b, k, s, h], rows past the key length zeroed if there can be any."""
        x = lax.dynamic_index_in_dim(x, key_block, keepdims=False)
        if edge or self.problem.has_lengths:
            x = jnp.where(self.key_padding(key_block)[:, None, :, None], x, 0)
        return x

    def row_range(self, row_block: Any) -> Range:
        """Key blocks that a block of rows sees."""
        side = self.tiling.rows
        least, greatest = self.offsets
        first = row_block * side.size
        last = first + side.size - 1
        return band_range(first + least, last + greatest, self.problem.window, self.tiling.keys)

    def key_range(self, key_block: Any) -> Range:
        """Row blocks that see a block of keys."""
        side = self.tiling.keys
        least, greatest = self.offsets
        below, above = self.problem.window
        first = key_block * side.size
        last = first + side.size - 1
        blocks = band_range(first - greatest, last - least, (above, below), self.tiling.rows)
        padded = key_block >= side.whole
        full_lo = jnp.where(padded, blocks.hi, blocks.full_lo)
        return Range(blocks.lo, full_lo, jnp.where(padded, blocks.hi, blocks.full_hi), blocks.hi)


def _blockwise(problem: Problem, operands: Operands) -> _Blockwise:
    tiling = _tiling(problem)
    bias, mask = (_dense(x, problem, tiling) for x in (operands.bias, operands.mask))
    offset, each = operands.offset, operands.extents[:, 2]
    offsets = (each.min(), each.max()) if offset is None else (offset, offset)
    scale = operands.scale
    scale = jnp.asarray(problem.scale, problem.accumulator) if scale is None else scale
    return _Blockwise(problem, tiling, operands.extents, offsets, scale, bias, mask)


def _loop(blocks: Range, step: Any, init: Any) -> Any:
    """Runs step(block, carry, edge) over the whole blocks of a range and over its edges."""
    edges = blocks.hi - blocks.full_hi + blocks.full_lo - blocks.lo
    carry = lax.fori_loop(
        blocks.full_lo, blocks.full_hi, lambda i, carry: step(i, carry, False), init
    )
    return lax.fori_loop(0, edges, lambda i, carry: step(edge_block(i, blocks), carry, True), carry)


def forward(problem: Problem, operands: Operands) -> tuple[Array, Array]:
    """Attention output and log-sum-exp.

    Returns:
      output [B, T, N, H] in the storage type; lse [B, N, T] f32 (f64 for f64), natural log. Rows
      that see no key or lie past their query length are 0 and -inf.
    """
    steps = _blockwise(problem, operands)
    tiling = steps.tiling
    keys = _key_blocks(operands.key, tiling.keys)
    values = _key_blocks(operands.value, tiling.keys)
    axes = types.union_varying(operands)

    def rows(_: None, xs: tuple[Array, Array]) -> tuple[None, tuple[Array, Array]]:
        row_block, q = xs  # q: [b, k, g, q, h]

        def step(key_block: Any, carry: Any, edge: bool) -> Any:
            top, total, acc = carry  # [b, k, g, q, 1], the same, [b, k, g, q, h]
            k, v = (steps.keys(x, key_block, edge) for x in (keys, values))
            s, visible = steps.scores(q, k, row_block, key_block, edge)
            new_top = jnp.maximum(top, s.max(-1, keepdims=True))
            finite_top = jnp.where(new_top == -jnp.inf, 0, new_top)
            p = jnp.exp(s - finite_top)
            shrink = jnp.exp(top - finite_top)
            total = total * shrink + p.sum(-1, keepdims=True)
            acc = acc * shrink + _confined("bkgqs,bksh->bkgqh", p.astype(v.dtype), visible, v)
            return new_top, total, acc

        zero = types.cast_varying(jnp.zeros((*q.shape[:-1], 1), problem.accumulator), axes)
        acc = jnp.zeros((*q.shape[:-1], values.shape[-1]), problem.accumulator)
        acc = types.cast_varying(acc, axes)
        top, total, acc = _loop(steps.row_range(row_block), step, (zero - jnp.inf, zero, acc))
        empty = total == 0
        if problem.has_lengths:
            empty |= ~steps.row_padding(row_block)[:, None, None, :, None]
        o = jnp.where(empty, 0, acc / jnp.where(empty, 1, total)).astype(q.dtype)
        lse = jnp.where(empty, -jnp.inf, top + jnp.log(jnp.where(empty, 1, total)))
        return None, (o, lse)

    blocks = jnp.arange(tiling.rows.count)
    q = _row_blocks(operands.query, problem, tiling.rows)
    _, (o, lse) = lax.scan(rows, None, (blocks, q))
    lse = _from_row_blocks(lse, problem.query_length)[..., 0]  # [B, T, N]
    return _from_row_blocks(o, problem.query_length), lse.transpose(0, 2, 1)


def nothing(problem: Problem, operands: Operands) -> tuple[Array, Array]:
    """Output and log-sum-exp, as of `forward`, where no row sees any key."""
    b, t, n = problem.batch, problem.query_length, problem.query_heads
    output = jnp.zeros((b, t, n, problem.head_dims[1]), operands.query.dtype)
    lse = jnp.full((b, n, t), -jnp.inf, problem.accumulator)
    axes = types.union_varying(operands)
    return types.cast_varying(output, axes), types.cast_varying(lse, axes)


class Gradients(NamedTuple):
    """Cotangents of the operands; None for a bias or a scale that is no operand."""

    query: Array
    key: Array
    value: Array
    bias: Array | None
    scale: Array | None = None


def backward(problem: Problem, operands: Operands, cotangents: Cotangents) -> Gradients:
    """Gradients of query, key, value (in the storage type), and of bias and scale (in theirs)."""
    steps = _blockwise(problem, operands)
    tiling = steps.tiling
    query, output_bar, output = operands.query, cotangents.output_bar, cotangents.output
    if problem.has_lengths:
        rows = jnp.arange(problem.query_length)[None, :] < operands.extents[:, 0:1]
        query, output_bar = (jnp.where(rows[:, :, None, None], x, 0) for x in (query, output_bar))
    delta = _dot("btnh,btnh->bnt", output_bar, output) - cotangents.lse_bar
    # Rows that see nothing have weights exp(s - inf) = 0.
    lse = jnp.where(cotangents.lse == -jnp.inf, jnp.inf, cotangents.lse)
    delta = jnp.where(cotangents.lse == -jnp.inf, 0, delta)
    row_arrays = (
        _row_blocks(query, problem, tiling.rows),
        _row_blocks(output_bar, problem, tiling.rows),
        _row_vectors(lse, problem, tiling.rows, float("inf")),
        _row_vectors(delta, problem, tiling.rows, 0.0),
    )
    keys = _key_blocks(operands.key, tiling.keys)
    values = _key_blocks(operands.value, tiling.keys)
    axes = types.union_varying((*operands, *cotangents))

    def columns(carry: Any, key_block: Array) -> Any:
        def step(row_block: Any, carry: Any, edge: bool) -> Any:
            dq, dbias, dk, dv = carry
            q, do, lse, delta = (
                lax.dynamic_index_in_dim(x, row_block, keepdims=False) for x in row_arrays
            )
            k, v = (steps.keys(x, key_block, edge) for x in (keys, values))
            s, visible = steps.scores(q, k, row_block, key_block, edge)
            p = jnp.where(s == -jnp.inf, 0, jnp.exp(s - lse))
            dv += _confined("bkgqs,bkgqh->bksh", p.astype(do.dtype), visible, do)
            ds = p * (_dot("bkgqh,bksh->bkgqs", do, v) - delta)
            ds = jnp.where((s == -jnp.inf) | (lse == jnp.inf), 0, ds)
            if dbias is not None:
                dbias = _add_dense(dbias, ds, tiling, row_block, key_block)
            ds = ds.astype(q.dtype)
            dk += _confined("bkgqs,bkgqh->bksh", ds, visible, q)
            rows = lax.dynamic_index_in_dim(dq, row_block, keepdims=False)
            rows += _confined("bkgqs,bksh->bkgqh", ds, visible, k)
            dq = lax.dynamic_update_index_in_dim(dq, rows, row_block, 0)
            return dq, dbias, dk, dv

        zeros = (jnp.zeros(x.shape[1:], problem.accumulator) for x in (keys, values))
        zeros = (types.cast_varying(x, axes) for x in zeros)
        dq, dbias, dk, dv = _loop(steps.key_range(key_block), step, (*carry, *zeros))
        dk *= steps.scale
        return (dq, dbias), (dk.astype(keys.dtype), dv.astype(values.dtype))

    dq = types.cast_varying(jnp.zeros(row_arrays[0].shape, problem.accumulator), axes)
    dbias = None
    if steps.bias is not None:
        dbias = types.cast_varying(jnp.zeros(steps.bias.shape, problem.accumulator), axes)
    (dq, dbias), (dk, dv) = lax.scan(columns, (dq, dbias), jnp.arange(tiling.keys.count))
    dscale = None
    if operands.scale is not None:
        # The query of a row that sees nothing may hold anything.
        seen = row_arrays[2] < jnp.inf
        dscale = jnp.where(seen, dq * row_arrays[0].astype(dq.dtype), 0).sum()
    dq = (dq * steps.scale).astype(operands.query.dtype)
    if operands.bias is not None and dbias is not None:
        b, n, t, s = operands.bias.shape
        dbias = dbias.reshape(b, n, *dbias.shape[3:])[:, :, :t, :s].astype(operands.bias.dtype)
    return Gradients(
        _from_row_blocks(dq, problem.query_length),
        _from_key_blocks(dk, problem.key_length),
        _from_key_blocks(dv, problem.key_length),
        dbias,
        dscale,
    )


def _add_dense(total: Array, ds: Array, tiling: _Tiling, row_block: Any, key_block: Any) -> Array:
    """Adds one pair's ds to the gradient of a dense operand, summed over its broadcast axes."""
    old = _dense_block(total, tiling, row_block, key_block)
    summed = tuple(axis for axis in range(5) if total.shape[axis] == 1)
    starts = [0] * 5
    starts[3] = 0 if total.shape[3] == 1 else row_block * tiling.rows.size
    starts[4] = 0 if total.shape[4] == 1 else key_block * tiling.keys.size
    return lax.dynamic_update_slice(total, old + ds.sum(summed, keepdims=True), starts)
