"""Masks of whole sequences, ranges above all; and what a device's rows see of some keys.

Whole sequences are in their natural order here, and every device of a sequence's axes has the same
ranges (a few int32 a token). A shard's chunks lie in the order of their positions, so the part of a
range that lies in a shard is one range again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from fa4_jax import api, mesh_types
from fa4_jax.api import Call
from fa4_jax.extents import Extents
from fa4_jax.masks import resolve, table, values
from fa4_jax.masks.pairs import Pairs
from fa4_jax.operands import Operands, RowRanges, Tags
from fa4_jax.parallel import pair_masks
from fa4_jax.parallel.shard_plan import ShardPlan
from fa4_jax.problem import Problem

Array = jax.Array


def with_masks(
    problem: Problem, operands: Operands, call: Call, numbers: Extents, tokens: resolve.Tokens
) -> tuple[Problem, Operands]:
    """The problem and the operands with the masks of a call.

    Args:
      problem, operands: of the call without masks; shards of the sequences or whole ones.
      numbers: lengths and offset of the whole sequences.
      tokens: how arrays of tokens become those of whole sequences.

    Raises:
      ValueError, NotImplementedError: as `fa4_jax.attention`, and for a tile table.
    """
    if call.mask is not None and not isinstance(call.mask, values.Mask):
        raise ValueError(f"mask must be of fa4_jax.masks here, got {type(call.mask).__name__}")
    if any(isinstance(part, values.Prepared) for part in values.parts(call.mask)):
        raise NotImplementedError(
            "mask: a tile table in fa4_jax.parallel; supported: the masks that it was made of"
        )
    pair_masks.check(values.parts(call.mask))
    t, s = problem.query_length, problem.key_length
    sizes = problem.batch, tokens.shards * t, tokens.shards * s
    rows, window = api.resolved_rows(call, numbers, sizes, tokens)
    pairs, _ = api.resolved_pairs(call, numbers, (*sizes, problem.query_heads), tokens)
    problem = dataclasses.replace(
        problem,
        window=window,
        has_ranges=rows is not None,
        has_tags=rows is not None and rows.tags is not None,
        has_mask=pairs is not None,
    )
    return problem, operands._replace(rows=rows, pairs=pairs)


def unsharded(x: Array) -> Array:
    """An array of tokens [B, L] with its length on every device, where Explicit types shard it."""
    mesh = mesh_types.explicit_mesh(x)
    if mesh is None:
        return x
    batch = mesh_types.explicit_axes(x)[0] if x.ndim == 2 else ()
    return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(batch or None)))


def padded(found: RowRanges | None, query_length: int, key_length: int) -> RowRanges | None:
    """Ranges of longer sequences, whose further rows see nothing and whose keys nobody sees."""
    if found is None:
        return None

    def pad(x: Array, length: int, fill: int = 0) -> Array:
        return jnp.pad(x, ((0, 0), (0, length - x.shape[1])), constant_values=fill)

    low, high = pad(found.low, query_length), pad(found.high, query_length)
    tags = found.tags
    if tags is not None:
        tags = Tags(
            pad(tags.query_low, query_length),
            pad(tags.query_high, query_length, -1),
            pad(tags.key, key_length, -1),
            pad(tags.tiles, table.tiles(query_length)),
        )
    return RowRanges(low, high, table.limits(low, high), tags)


class Seen(NamedTuple):
    """Which keys the rows of a call see by masks: ranges and a mask of pairs, or None."""

    ranges: RowRanges | None = None
    pairs: Pairs | None = None


@dataclasses.dataclass(frozen=True)
class Whole:
    """Masks of whole sequences; ranges have a batch axis of B.

    Attributes:
      rows: ranges, or None.
      compared: rows in whose tile tags are compared, int32 [B, T]; None without tags.
      pairs: a mask of pairs, or None.
    """

    rows: RowRanges | None
    compared: Array | None
    pairs: Pairs | None

    def between(
        self, shards: ShardPlan, row_chunks: Sequence[Any], key_chunks: Sequence[Any]
    ) -> Seen:
        """What the rows of some chunks see of the keys of others, in the order of positions."""
        size = shards.keys_of_chunk

        def own(x: Array) -> Array:
            return sum(
                (jnp.clip(x - chunk * size, 0, size) for chunk in key_chunks), jnp.zeros_like(x)
            )

        keys = _joined([(chunk * size, size) for chunk in key_chunks])
        return self._part(shards, row_chunks, own, keys)

    def among(
        self, shards: ShardPlan, row_chunks: Sequence[Any], first_key: Any, count: int
    ) -> Seen:
        """What the rows of some chunks see of `count` keys in natural order from `first_key` on."""

        def own(x: Array) -> Array:
            return jnp.clip(x - first_key, 0, count)

        def keys(x: Array) -> Array:
            # Past the last key there may be room for more.
            x = jnp.pad(x, ((0, 0), (0, count)), constant_values=-1)
            return lax.dynamic_slice_in_dim(x, first_key, count, axis=1)

        return self._part(shards, row_chunks, own, keys)

    def _part(
        self,
        shards: ShardPlan,
        row_chunks: Sequence[Any],
        own: Callable[[Array], Array],
        keys: Callable[[Array], Array],
    ) -> Seen:
        size = shards.rows_of_chunk
        rows = _joined([(chunk * size, size) for chunk in row_chunks])
        pairs = None
        if self.pairs is not None:
            lengths = shards.devices * shards.rows, shards.devices * shards.keys
            pairs = pair_masks.cut(self.pairs, pair_masks.Part(rows, keys, own, lengths))
        if self.rows is None:
            return Seen(None, pairs)
        low, high = own(rows(self.rows.low)), own(rows(self.rows.high))
        tags = self.rows.tags
        if tags is None or self.compared is None:
            return Seen(RowRanges(low, high, table.limits(low, high), tags), pairs)
        compares = (low < high) & (rows(self.compared) != 0)
        limits, tiles = table.limits_and_any(low, high, compares)
        tags = Tags(rows(tags.query_low), rows(tags.query_high), keys(tags.key), tiles)
        return Seen(RowRanges(low, high, limits, tags), pairs)


def _joined(parts: Sequence[tuple[Any, int]]) -> Callable[[Array], Array]:
    """[B, L] -> its parts (start, size) one after the other."""
    return lambda x: jnp.concatenate(
        [lax.dynamic_slice_in_dim(x, start, size, axis=1) for start, size in parts], axis=1
    )


def whole_masks(operands: Operands) -> Whole | None:
    """Masks of whole sequences, from which those of shards are cut; None without."""
    found, batch = operands.rows, operands.query.shape[0]
    if found is None:
        return None if operands.pairs is None else Whole(None, None, operands.pairs)
    rows: RowRanges = jax.tree.map(lambda x: jnp.broadcast_to(x, (batch, *x.shape[1:])), found)
    compared = None
    if rows.tags is not None:
        compared = jnp.repeat(rows.tags.tiles, table.TILE_ROWS, axis=1)[:, : rows.low.shape[1]]
    return Whole(rows, compared, operands.pairs)


def folded(halves: Sequence[Seen], batch: int) -> Seen:
    """Masks of two chunks beside each other in the batch, as a folded view has them."""
    ranges = jax.tree.map(
        lambda *x: jnp.stack(x, axis=1).reshape(-1, *x[0].shape[1:]),
        *(half.ranges for half in halves),
    )
    pairs = [half.pairs for half in halves if half.pairs is not None]
    return Seen(ranges, pair_masks.folded(pairs, batch) if pairs else None)
