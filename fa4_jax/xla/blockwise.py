"""The attention of many scores: tile by tile, O(length) memory.

One loop visits the pairs of blocks that meet, and adds each tile's part to arrays of all rows and
keys. Nested loops compute the same, but XLA compiles more kernels for them.

Online softmax: Milakov & Gimelshein 2018; blocks and recomputation: FlashAttention-2
(Dao 2023, sections 2.3 and 3.1). The equations are in `fa4_jax.xla`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from math import inf, isqrt
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fa4_jax import mesh_types
from fa4_jax.operands import Cotangents, Gradients, Operands, Results, RowRanges
from fa4_jax.problem import Problem
from fa4_jax.xla import additions, grouped
from fa4_jax.xla import tile as tiles
from fa4_jax.xla.blocks import Range, Side, Within, block_size, unsigned
from fa4_jax.xla.tile import Call, Products, Softmax, Tile

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """How long and wide blocks are.

    Attributes:
      scores: in flight, over batch and heads.
      least, most: rows or keys of a block.
    """

    scores: int
    least: int
    most: int


BLOCK_SIZES = {"cpu": BlockSizes(2**20, 64, 512), "gpu": BlockSizes(2**26, 64, 4096)}
"""By backend. CPU: 4 MB of scores, measured best on two cores (256 kB to 16 MB). GPU: 256 MB, since
smaller products do not fill it (docs/hopper.md, "Second derivatives")."""

LIBRARY_ELEMENTS = 4096
"""Least number of elements of which XLA's CPU leaves a maximum to its library (jaxlib 0.10)."""


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Block sizes of both sides."""

    rows: Side
    keys: Side


def block_sizes() -> BlockSizes:
    """Returns those of JAX's default backend."""
    return BLOCK_SIZES.get(jax.default_backend(), BLOCK_SIZES["cpu"])


def _side(length: Any, target: int) -> Side:
    size = block_size(length, target) if isinstance(length, int) else target // 8 * 8
    return Side(size, -(-length // size), length // size)


def square(problem: Problem) -> Tiling:
    """Blocks of both sides, about as long as wide."""
    sizes = block_sizes()
    target = sizes.least  # of a symbolic batch, which may be large
    if isinstance(problem.batch, int):
        heads = max(1, problem.batch * problem.query_heads)
        target = min(sizes.most, max(sizes.least, isqrt(sizes.scores // heads)))
    return Tiling(_side(problem.query_length, target), _side(problem.key_length, target))


@dataclasses.dataclass(frozen=True)
class Grid:
    """The tiles of a call."""

    call: Call
    tiling: Tiling
    offsets: tuple[Array, Array]  # the least and the greatest query offset, [] i32
    visited: tuple[Array, Array] | None  # by row ranges, key blocks [low, high) [row blocks] u32

    def tile(self, row_block: Any, key_block: Any) -> Tile:
        """The tile of a pair of blocks."""
        rows, keys = self.tiling.rows.size, self.tiling.keys.size
        row, key = lax.mul(row_block, unsigned(rows)), lax.mul(key_block, unsigned(keys))
        return Tile(row, rows, key, keys)

    def row_range(self, row_block: Any) -> Range | Within:
        """Key blocks that a block of rows sees."""
        side = self.tiling.rows
        least, greatest = self.offsets
        first = lax.convert_element_type(row_block, jnp.int32) * side.size
        last = first + (side.size - 1)
        window = self.call.problem.window
        found = Range(first + least, last + greatest, window, self.tiling.keys)
        if self.visited is None:
            return found
        return Within(
            found, *(lax.dynamic_index_in_dim(x, row_block, 0, False) for x in self.visited)
        )

    def key_range(self, key_block: Any) -> Range:
        """Row blocks that see a block of keys."""
        side = self.tiling.keys
        least, greatest = self.offsets
        below, above = self.call.problem.window
        first = lax.convert_element_type(key_block, jnp.int32) * side.size
        last = first + (side.size - 1)
        return Range(first - greatest, last - least, (above, below), self.tiling.rows)


def make_grid(problem: Problem, operands: Operands) -> Grid:
    """The tiles of a call, their sizes by the number of scores."""
    tiling = square(problem)
    rows, keys = (
        length if side.whole == side.count else side.size * side.count
        for side, length in (
            (tiling.rows, problem.query_length),
            (tiling.keys, problem.key_length),
        )
    )
    offset, each = operands.offset, operands.extents[:, 2]
    offsets = (each.min(), each.max()) if offset is None else (offset, offset)
    call = tiles.make_call(problem, operands, rows, keys)
    return Grid(call, tiling, offsets, _visited(call.row_ranges, tiling))


def _visited(found: RowRanges | None, tiling: Tiling) -> tuple[Array, Array] | None:
    """Key blocks [low, high) between which the ranges of each block of rows lie, whole batch."""
    if found is None:
        return None
    rows, size = tiling.rows, tiling.keys.size
    shape = (found.low.shape[0], rows.count, rows.size)
    low, high = found.low.reshape(shape), found.high.reshape(shape)
    low = jnp.where(low < high, low, jnp.iinfo(jnp.int32).max).min((0, 2))
    low, high = (x.astype(jnp.uint32) for x in (low, high.max((0, 2))))
    # Past the last block is as good as far beyond it, where no row sees any key.
    return lax.div(low, unsigned(size)), lax.div(high + unsigned(size - 1), unsigned(size))


class _Sides(NamedTuple):
    """How the pairs of blocks are visited: for each block of `outer`, those in a range of `inner`.

    meeting: from an outer block to the inner ones that meet it.
    """

    outer: Side
    inner: Side
    meeting: Callable[[Any], Range | Within]


def _visit(sides: _Sides, step: Callable[..., Any], init: Any, axes: frozenset[str]) -> Any:
    """Runs step(outer block, inner block, state) over the pairs that meet, in one loop.

    An outer block that meets none is visited once. The state varies over `axes`.
    """
    outer, inner, meeting = sides
    # `lax`, since an operator of arrays takes four times as long to trace.
    count, one = unsigned(inner.count), unsigned(1)

    def first(block: Array) -> Array:
        lo = meeting(block).lo
        start = lax.mul(block, count)
        return start if isinstance(lo, int) else lax.add(start, lax.min(lo, lax.sub(count, one)))

    def body(carry: tuple[Array, Any]) -> tuple[Array, Any]:
        pair, state = carry
        block = lax.div(pair, count)
        other = lax.sub(pair, lax.mul(block, count))
        state = step(block, other, state)
        more = lax.lt(lax.add(other, one), meeting(block).hi)
        pair = lax.select(more, lax.add(pair, one), first(lax.add(block, one)))
        return mesh_types.cast_varying(pair, axes), state

    start = mesh_types.cast_varying(first(jnp.uint32(0)), axes)
    end = outer.count * count
    return lax.while_loop(lambda carry: carry[0] < end, body, (start, init))[1]


def _put(x: Array, new: Array, axis: int, start: Array) -> Array:
    """x with `new` at [start, ...) of an axis."""
    return lax.dynamic_update_slice_in_dim(x, new, start, axis)


def _add(x: Array, new: Array, axis: int, start: Array) -> Array:
    """x with `new` added at [start, ...) of an axis."""
    return _put(x, lax.add(grouped.part(x, axis, start, new.shape[axis]), new), axis, start)


def _widened(x: Array, before: int, after: int, fill: float) -> Array:
    """x with columns of `fill` around it."""
    return lax.pad(x, jnp.asarray(fill, x.dtype), [(0, 0, 0)] * 4 + [(before, after, 0)])


def _merged(state: Array, tile: Tile, found: Softmax, acc: Array) -> Array:
    """The state of `forward` with a tile's softmax and its sums of values."""
    h = acc.shape[-1]
    old = grouped.part(state, 3, tile.row, tile.rows)
    # Padded, not concatenated: XLA's CPU computes the maximum of what is concatenated one by one,
    # outside the chain that its library has, and compiles long concatenations by themselves.
    rows = acc.size // h if isinstance(acc.shape[0], int) else LIBRARY_ELEMENTS
    columns = max(2, -(-LIBRARY_ELEMENTS // rows))
    tops = _widened(old[..., h + 1 :], 0, columns - 1, -inf)
    tops = lax.max(tops, _widened(found.top, 1, columns - 2, -inf))
    share = tiles.exponentials(tops)
    keep = lax.broadcast_in_dim(share[..., :1], (*acc.shape[:4], h + 1), range(5))
    # The maximum of before is finite, unless its row is NaN in any case.
    new = old * _widened(keep, 0, 1, 0) + _widened(acc * share[..., 1:2], 0, 2, 0)
    new += _widened(found.total * share[..., 1:2], h, 1, 0)
    new += _widened(tiles.row_top(tops), h + 1, 0, 0)
    return _put(state, new, 3, tile.row)


def forward(problem: Problem, operands: Operands) -> Results:
    """Output, log-sum-exp and largest scores, as `xla.forward`."""
    grid = make_grid(problem, operands)
    call, keys = grid.call, tiles.make_keys(grid.call, operands)
    query = grouped.padded(operands.query, 1, call.rows)

    def step(row_block: Array, key_block: Array, state: Array) -> Array:
        tile = grid.tile(row_block, key_block)
        own = keys.part(tile)
        scaled = call.scaled(call.query_of(query, tile), own)
        found = tiles.softmax(call.scores(scaled, tile))
        return _merged(state, tile, found, tiles.weighted(found.weights, own))

    # One array, since one kernel begins it and one updates it: [b, k, g, t, h + 2], of which the
    # last two columns are the sums of the weights and the maxima.
    h, dtype = problem.head_dims[1], problem.accumulator
    state = jnp.zeros((problem.batch, problem.kv_heads, problem.group, call.rows, h + 1), dtype)
    state = _widened(state, 0, 1, float(jnp.finfo(dtype).min))
    axes = mesh_types.union_varying(operands)
    state = mesh_types.cast_varying(state, axes)
    sides = _Sides(grid.tiling.rows, grid.tiling.keys, grid.row_range)
    state = _visit(sides, step, state, axes)
    top, total, acc = state[..., h + 1 :], state[..., h : h + 1], state[..., :h]
    max_logit = tiles.max_logit(call, top, total)
    if operands.sinks is not None:
        top, total, acc = tiles.with_sinks(operands.sinks, top, total, acc)
    o, lse = tiles.finish(call, top, total, acc)
    lse = lse.reshape(problem.batch, problem.query_heads, call.rows)
    # Lest a gradient's program compute the output twice, in the backward's layout, too: one kernel
    # and one copy less to compile.
    o = lax.optimization_barrier(tiles.native_rows(o.astype(query.dtype)))
    length = problem.query_length
    return Results(o[:, :length], lse[:, :, :length], max_logit)


def backward(problem: Problem, operands: Operands, cotangents: Cotangents) -> Gradients:
    """Gradients of the operands, as `xla.backward`."""
    grid = make_grid(problem, operands)
    call, keys = grid.call, tiles.make_keys(grid.call, operands)
    rows = tiles.make_rows(call, operands, cotangents)

    def step(key_block: Array, row_block: Array, sums: Products) -> Products:
        tile = grid.tile(row_block, key_block)
        mine, own = rows.part(tile, call), keys.part(tile)
        # Of the query that the products need, lest it be cut out twice; the shift has NaN for what
        # is not finite in it. The dense backward, instead, shares the scores of its forward.
        scaled = call.scaled(call.cleaned(mine.query), own)
        s = call.scores(scaled, tile)
        weights = lax.exp(call.hide(s - mine.shift, s, tile, -inf))
        new = tiles.products(call, mine, own, weights, scaled, tile)
        return Products(
            _add(sums.query, new.query, 1, tile.row),
            _add(sums.key, new.key, 1, tile.key),
            _add(sums.value, new.value, 1, tile.key),
            None if sums.bias is None else additions.add(sums.bias, new.bias, tile),
            None if sums.soft_cap is None or new.soft_cap is None else sums.soft_cap + new.soft_cap,
        )

    axes = mesh_types.union_varying((*operands, *cotangents))
    like = Products(rows.query, keys.key, keys.value, call.bias, operands.soft_cap)
    zeros = jax.tree.map(
        lambda x: mesh_types.cast_varying(jnp.zeros(x.shape, problem.accumulator), axes), like
    )
    sides = _Sides(grid.tiling.keys, grid.tiling.rows, grid.key_range)
    if grid.visited is not None:
        # Which keys a row sees says nothing simple about the rows that see a key.
        sides, step = _Sides(grid.tiling.rows, grid.tiling.keys, grid.row_range), _swapped(step)
    return tiles.gradients(call, operands, rows, _visit(sides, step, zeros, axes))


def _swapped(step: Callable[..., Any]) -> Callable[..., Any]:
    return lambda outer, inner, state: step(inner, outer, state)
