"""The attention of many scores: blockwise online softmax, forward and backward, O(length) memory.

Online softmax: Milakov & Gimelshein 2018; blocks and recomputation: FlashAttention-2
(Dao 2023, sections 2.3 and 3.1). The equations are in `default`.

Letters: b batch, k KV head, g query head of its group, q row, s key, h head dim.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fa4_jax import mesh_types
from fa4_jax.bands import UNBOUNDED
from fa4_jax.operands import Cotangents, Gradients, Operands
from fa4_jax.problem import Problem
from fa4_jax.xla.blocks import Range, Side, band_range, block_size
from fa4_jax.xla.products import clean, dot, is_bad, poisoned

Array = jax.Array

SCORES_PER_BLOCK = 2**20
"""Scores in flight, over batch and heads: 4 MB, measured best on 2 CPU cores (256 kB..16 MB)."""

BLOCK_RANGE = (64, 512)


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

    @property
    def pads_keys(self) -> bool:
        """Whether a block of keys may hold padding."""
        return self.problem.has_lengths or self.tiling.keys.whole < self.tiling.keys.count

    @property
    def is_masked(self) -> bool:
        """Whether a pair may be masked that is not padding."""
        return self.problem.band or self.mask is not None

    def visible(self, row_block: Any, key_block: Any) -> Array | None:
        """Pairs that are not masked nor key padding, broadcasting to bool [b, k, g, q, s]."""
        parts = []
        if self.problem.band:
            rows = row_block * self.tiling.rows.size + jnp.arange(self.tiling.rows.size)
            keys = key_block * self.tiling.keys.size + jnp.arange(self.tiling.keys.size)
            positions = rows[None, :, None] + self.extents[:, 2][:, None, None]
            distance = keys[None, None, :] - positions
            left, right = self.problem.window
            parts += [distance <= right] if right < UNBOUNDED else []
            parts += [distance >= -left] if left < UNBOUNDED else []
            parts = [x[:, None, None] for x in parts]
        if self.mask is not None:
            parts.append(_dense_block(self.mask, self.tiling, row_block, key_block))
        if self.pads_keys:
            parts.append(self.key_padding(key_block)[:, None, None, None, :])
        allowed = None
        for part in parts:
            allowed = part if allowed is None else allowed & part
        return allowed

    def scores(self, q: Array, k: Array, row_block: Any, key_block: Any) -> Array:
        """Scores of one pair of blocks, [b, k, g, q, s], -inf where masked."""
        s = dot("bkgqh,bksh->bkgqs", q, k) * self.scale
        if self.bias is not None:
            s += _dense_block(self.bias, self.tiling, row_block, key_block).astype(s.dtype)
        visible = self.visible(row_block, key_block)
        return s if visible is None else jnp.where(visible, s, -jnp.inf)

    def keys(self, x: Array, key_block: Any) -> Array:
        """Block of [blocks, b, k, s, h], rows past the key length zeroed if there can be any."""
        x = lax.dynamic_index_in_dim(x, key_block, keepdims=False)
        if self.pads_keys:
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
        return band_range(first - greatest, last - least, (above, below), self.tiling.rows)


def _blockwise(problem: Problem, operands: Operands) -> _Blockwise:
    tiling = _tiling(problem)
    bias, mask = (_dense(x, problem, tiling) for x in (operands.bias, operands.mask))
    offset, each = operands.offset, operands.extents[:, 2]
    offsets = (each.min(), each.max()) if offset is None else (offset, offset)
    scale = operands.scale
    scale = jnp.asarray(problem.scale, problem.accumulator) if scale is None else scale
    return _Blockwise(problem, tiling, operands.extents, offsets, scale, bias, mask)


def _loop(blocks: Range, step: Any, init: Any) -> Any:
    """Runs step(block, carry) over a range; a single block needs no loop."""
    if isinstance(blocks.lo, int) and isinstance(blocks.hi, int) and blocks.hi - blocks.lo == 1:
        return step(blocks.lo, init)
    return lax.fori_loop(blocks.lo, blocks.hi, step, init)


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
    axes = mesh_types.union_varying(operands)

    def rows(_: None, xs: tuple[Array, Array]) -> tuple[None, tuple[Array, Array]]:
        row_block, q = xs  # q: [b, k, g, q, h]

        def step(key_block: Any, carry: Any) -> Any:
            top, total, acc = carry  # [b, k, g, q, 1], the same, [b, k, g, q, h]
            k, v = (steps.keys(x, key_block) for x in (keys, values))
            s = steps.scores(q, k, row_block, key_block)
            new_top = jnp.maximum(top, s.max(-1, keepdims=True))
            finite_top = jnp.where(new_top == -jnp.inf, 0, new_top)
            p = jnp.exp(s - finite_top)
            shrink = jnp.exp(top - finite_top)
            total = total * shrink + p.sum(-1, keepdims=True)
            if steps.is_masked:
                p, v = poisoned(p, s, is_bad(v)[:, :, None, None, :]), clean(v)
            acc = acc * shrink + dot("bkgqs,bksh->bkgqh", p.astype(v.dtype), v)
            return new_top, total, acc

        zero = mesh_types.cast_varying(jnp.zeros((*q.shape[:-1], 1), problem.accumulator), axes)
        acc = jnp.zeros((*q.shape[:-1], values.shape[-1]), problem.accumulator)
        acc = mesh_types.cast_varying(acc, axes)
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


def backward(problem: Problem, operands: Operands, cotangents: Cotangents) -> Gradients:
    """Gradients of query, key, value (in the storage type), and of bias and scale (in theirs)."""
    steps = _blockwise(problem, operands)
    tiling = steps.tiling
    query, output_bar, output = operands.query, cotangents.output_bar, cotangents.output
    if problem.has_lengths:
        rows = jnp.arange(problem.query_length)[None, :] < operands.extents[:, 0:1]
        query, output_bar = (jnp.where(rows[:, :, None, None], x, 0) for x in (query, output_bar))
    delta = dot("btnh,btnh->bnt", output_bar, output) - cotangents.lse_bar
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
    axes = mesh_types.union_varying((*operands, *cotangents))

    def columns(carry: Any, key_block: Array) -> Any:
        def step(row_block: Any, carry: Any) -> Any:
            dq, dbias, dk, dv = carry
            q, do, lse, delta = (
                lax.dynamic_index_in_dim(x, row_block, keepdims=False) for x in row_arrays
            )
            k, v = (steps.keys(x, key_block) for x in (keys, values))
            s = steps.scores(q, k, row_block, key_block)
            p = jnp.where(s == -jnp.inf, 0, jnp.exp(s - lse))
            ds = p * (dot("bkgqh,bksh->bkgqs", do, v) - delta)
            ds = jnp.where((s == -jnp.inf) | (lse == jnp.inf), 0, ds)
            if dbias is not None:
                dbias = _add_dense(dbias, ds, tiling, row_block, key_block)
            if steps.is_masked:
                # A query or key that is cleaned has NaN in the ds of every pair that is seen.
                p = poisoned(p, s, is_bad(do)[..., None])
                do, q, k = clean(do), clean(q), clean(k)
            dv += dot("bkgqs,bkgqh->bksh", p.astype(do.dtype), do)
            ds = ds.astype(q.dtype)
            dk += dot("bkgqs,bkgqh->bksh", ds, q)
            rows = lax.dynamic_index_in_dim(dq, row_block, keepdims=False)
            rows += dot("bkgqs,bksh->bkgqh", ds, k)
            dq = lax.dynamic_update_index_in_dim(dq, rows, row_block, 0)
            return dq, dbias, dk, dv

        zeros = (jnp.zeros(x.shape[1:], problem.accumulator) for x in (keys, values))
        zeros = (mesh_types.cast_varying(x, axes) for x in zeros)
        dq, dbias, dk, dv = _loop(steps.key_range(key_block), step, (*carry, *zeros))
        dk *= steps.scale
        return (dq, dbias), (dk.astype(keys.dtype), dv.astype(values.dtype))

    dq = mesh_types.cast_varying(jnp.zeros(row_arrays[0].shape, problem.accumulator), axes)
    dbias = None
    if steps.bias is not None:
        dbias = mesh_types.cast_varying(jnp.zeros(steps.bias.shape, problem.accumulator), axes)
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
