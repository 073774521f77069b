"""The default path of `decode`: pages are gathered block by block and joined by an online softmax.

Every batch entry begins at the first page that it sees, so that a window costs its own length only.
The keys that a row sees are a range of the entry's cached tokens; the arithmetic of a block is that
of `fa4_jax.xla.tile`.

Letters: b batch, k KV head, g query head of its group, t row, h head dim.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fa4_jax import mesh_types
from fa4_jax.bands import EVERYTHING, UNBOUNDED
from fa4_jax.operands import Operands, Results, RowRanges
from fa4_jax.paged.gather import gathered, num_pages
from fa4_jax.paged.problem import PagedOperands, PagedProblem, Sums, without_keys
from fa4_jax.paged.shard import Shard, shard_of
from fa4_jax.problem import Problem
from fa4_jax.xla import tile as tiles
from fa4_jax.xla.tile import Keys, Tile

Array = jax.Array

BLOCK_SCORES = 2**20
"""Most scores of a block, over batch and heads."""

BLOCK_ELEMENTS, BLOCK_ELEMENTS_ON_CPU = 2**24, 2**19
"""Most elements of the keys that a block gathers. On CPUs they stay in a core's cache as float32:
of 2^15 to 2^22 these were the fastest for 1 to 8 entries of 512 to 8192 tokens."""

BLOCK_ROWS = 512
"""Most rows of an entry that one loop over the pages serves."""


def forward(problem: PagedProblem, operands: PagedOperands) -> Results:
    """Output [B, T, N, H] in the query's type, and log-sum-exp [B, N, T]."""
    axes = mesh_types.union_varying(operands)
    own = jax.tree.map(lambda x: mesh_types.cast_varying(x, axes), operands)
    found = _sums(problem, own)
    if problem.axis is not None:
        found = _joined(found, problem.axis)
    return _finish(problem, operands, found)


def _sums(problem: PagedProblem, operands: PagedOperands) -> Sums:
    """The softmax over the pages of this device's table, without sinks."""
    shard = shard_of(problem.axis)
    t = problem.attention.query_length
    low, high = _row_ranges(problem, operands, shard)
    if t <= BLOCK_ROWS:
        return _sums_of_rows(problem, shard, operands, low, high)
    blocks = -(-t // BLOCK_ROWS)
    rows = -(-t // blocks)

    def split(x: Array) -> Array:
        """[B, T, ...] to [blocks, B, rows, ...]."""
        x = tiles.padded(x, 1, blocks * rows)
        return jnp.moveaxis(x.reshape(x.shape[0], blocks, rows, *x.shape[2:]), 1, 0)

    part = dataclasses.replace(
        problem, attention=dataclasses.replace(problem.attention, query_length=rows)
    )
    found = lax.map(
        lambda x: _sums_of_rows(part, shard, operands._replace(query=x[0]), x[1], x[2]),
        (split(operands.query), split(low), split(high)),
    )

    def joined(x: Array) -> Array:
        """[blocks, b, k, g, rows, h] to [b, k, g, T, h]."""
        x = jnp.moveaxis(x, 0, 3)
        return x.reshape(*x.shape[:3], blocks * rows, x.shape[-1])[..., :t, :]

    return jax.tree.map(joined, found)


def _finish(problem: PagedProblem, operands: PagedOperands, found: Sums) -> Results:
    """Output and log-sum-exp of complete sums, to which sinks are added."""
    attention = problem.attention
    top, total, values = found
    if operands.sinks is not None:
        top, total, values = tiles.with_sinks(operands.sinks, top, total, values)
    t = attention.query_length
    call = tiles.make_call(attention, without_keys(operands), t, attention.key_length)
    output, lse = tiles.finish(call, top, total, values)
    output = tiles.native_rows(output.astype(operands.query.dtype))
    return Results(output, lse.reshape(attention.batch, attention.query_heads, t))


def _row_ranges(
    problem: PagedProblem, operands: PagedOperands, shard: Shard
) -> tuple[Array, Array]:
    """The tokens of this table that each row sees: low <= j < high, [B, T] int32; 0 and 0 if none.

    Tokens are counted within the table, in the order of its pages.
    """
    left, _ = problem.attention.window
    extents = operands.extents
    rows = lax.iota(jnp.int32, problem.attention.query_length)[None, :]
    position = rows + extents[:, 2:3]  # of the row among all tokens of its sequence
    high = position + 1
    low = jnp.zeros_like(high) if left >= UNBOUNDED else position - left
    low, high = (shard.tokens(jnp.maximum(x, 0), problem.page_size) for x in (low, high))
    seen = (low < high) & (rows < extents[:, 0:1])
    return jnp.where(seen, low, 0), jnp.where(seen, high, 0)


def _pages_per_block(problem: PagedProblem, shard: Shard, most_elements: int) -> tuple[int, int]:
    """Pages that a block gathers for each entry, and blocks at most."""
    attention, page = problem.attention, problem.page_size
    entries = num_pages(problem, shard.devices)
    scores = attention.batch * attention.query_heads * attention.query_length * page
    elements = attention.batch * attention.kv_heads * max(attention.head_dims) * page
    most = min(BLOCK_SCORES // scores, most_elements // elements)
    blocks = math.ceil(entries / max(1, most))
    return -(-entries // blocks), blocks


def _sums_of_rows(
    problem: PagedProblem, shard: Shard, operands: PagedOperands, low: Array, high: Array
) -> Sums:
    """The softmax of rows that see the tokens low <= j < high, [B, T] each."""
    cpu, default = (
        functools.partial(_sums_by_blocks, problem, _pages_per_block(problem, shard, most))
        for most in (BLOCK_ELEMENTS_ON_CPU, BLOCK_ELEMENTS)
    )
    return lax.platform_dependent(operands, low, high, cpu=cpu, default=default)


def _sums_by_blocks(
    problem: PagedProblem,
    tiling: tuple[int, int],
    operands: PagedOperands,
    low: Array,
    high: Array,
) -> Sums:
    """The softmax of rows, over blocks of the size and number of `_pages_per_block`."""
    attention, page = problem.attention, problem.page_size
    count, blocks = tiling
    end = high.max(1)  # [B]
    first = jnp.where(low < high, low, jnp.iinfo(jnp.int32).max).min(1)
    first = jnp.minimum(first, end) // page  # [B]: the first page that is read
    pages = -(-end // page) - first  # [B]
    (b, t), width = low.shape, attention.head_dims[1]
    shape = (b, attention.kv_heads, attention.group, t)
    empty = Sums(
        jnp.full((*shape, 1), jnp.finfo(attention.accumulator).min, attention.accumulator),
        jnp.zeros((*shape, 1), attention.accumulator),
        jnp.zeros((*shape, width), attention.accumulator),
    )
    axes = mesh_types.union_varying((operands, low))
    empty = jax.tree.map(lambda x: mesh_types.cast_varying(x, axes), empty)

    def step(operands: PagedOperands, i: Any, found: Sums) -> Sums:
        block = _Block(problem, operands, count)
        return _merged(found, block.sums(first + i * count, low, high))

    if blocks == 1:
        return step(operands, 0, empty)
    steps = mesh_types.cast_varying((-(-pages // count)).max(), axes)
    start = mesh_types.cast_varying(jnp.int32(0), axes)

    def body(carry: tuple[Array, Sums]) -> tuple[Array, Sums]:
        # XLA's CPU gathers narrow numbers in float32, and would convert all pages before the loop.
        *pages, i = lax.optimization_barrier((operands.key_pages, operands.value_pages, carry[0]))
        own = operands._replace(key_pages=pages[0], value_pages=pages[1])
        return i + 1, step(own, i, carry[1])

    return lax.while_loop(lambda carry: carry[0] < steps, body, (start, empty))[1]


def _joined(found: Sums, axis: str) -> Sums:
    """The sums over the disjoint sets of keys of the devices of an axis."""
    top = lax.pmax(found.top, axis)
    keep = jnp.exp(found.top - top)
    total, values = lax.psum((found.total * keep, found.values * keep), axis)
    return Sums(top, total, values)


def _merged(a: Sums, b: Sums) -> Sums:
    """The sums over two disjoint sets of keys."""
    top = jnp.maximum(a.top, b.top)
    keep_a, keep_b = jnp.exp(a.top - top), jnp.exp(b.top - top)
    return Sums(top, a.total * keep_a + b.total * keep_b, a.values * keep_a + b.values * keep_b)


class _Block(NamedTuple):
    """Blocks of some pages of each batch entry."""

    problem: PagedProblem
    operands: PagedOperands
    pages: int

    def sums(self, first: Array, low: Array, high: Array) -> Sums:
        """The softmax over the pages from `first` on, [B].

        Args:
          low, high: tokens that each row sees, [B, T].
        """
        paged, operands = self.problem, self.operands
        start = (first * paged.page_size)[:, None]
        size = self.pages * paged.page_size
        low, high = (jnp.clip(x - start, 0, size) for x in (low, high))
        end = high.max(1)
        own = _with_keys(operands, *gathered(paged, operands, self.pages, first, end), end)
        # The one row of an entry sees all of its tokens, if it has no window: a length suffices.
        has_ranges = low.shape[1] > 1 or paged.attention.window[0] < UNBOUNDED
        problem = _block_problem(paged.attention, low.shape[1], size, has_ranges)
        call = tiles.make_call(problem, own, low.shape[1], size)
        if has_ranges:
            table = jnp.zeros((1, 0, 4), jnp.int32)  # which the default path does not read
            call = dataclasses.replace(call, row_ranges=RowRanges(low, high, table))
        tile = Tile(0, low.shape[1], 0, size)
        keys = tiles.make_keys(call, own) if has_ranges else Keys(own.key, own.value, None)
        keys = keys.part(tile)
        query = call.query_of(own.query, tile)
        found = tiles.softmax(call.scores(call.scaled(query, keys), tile))
        return Sums(found.top, found.total, tiles.weighted(found.weights, keys))


def _block_problem(attention: Problem, rows: int, keys: int, has_ranges: bool) -> Problem:
    """What the arithmetic of a block of keys has to know."""
    return dataclasses.replace(
        attention,
        query_length=rows,
        key_length=keys,
        window=EVERYTHING,
        has_lengths=not has_ranges,
        has_ranges=has_ranges,
    )


def _with_keys(operands: PagedOperands, key: Array, value: Array, lengths: Array) -> Operands:
    """The operands of a block's arithmetic; lengths of its keys: [B]."""
    extents = operands.extents.at[:, 1].set(lengths)
    return Operands(
        *(operands.query, key, value, extents), scale=operands.scale, soft_cap=operands.soft_cap
    )
