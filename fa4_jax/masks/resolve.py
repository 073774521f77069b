"""From the masks of a call to one range of keys a row, and tags where ranges do not say it all."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from fa4_jax import bands, mesh_types, validate
from fa4_jax.bands import LIMIT, UNBOUNDED
from fa4_jax.extents import to_int32
from fa4_jax.masks import table, tags, values
from fa4_jax.masks.tags import Ids
from fa4_jax.operands import RowRanges, Tags

Array = jax.Array
INT32 = int(np.iinfo(np.int32).min), int(np.iinfo(np.int32).max)

Range = tuple[Any, Any]
"""low and high of every row, int32 [B|1, T] or []: it sees the keys low <= j < high."""


@dataclasses.dataclass(frozen=True)
class Tokens:
    """How arrays of one number a token are given: by default whole, in their natural order.

    Attributes:
      shards: the number of shards of a sequence, of which an array holds one.
      whole: makes arrays of whole sequences [B|1, L] in their natural order of what is given.
    """

    shards: int = 1
    whole: Callable[[Array], Array] = lambda x: x


@dataclasses.dataclass(frozen=True)
class Call:
    """What masks are resolved against.

    Attributes:
      batch, query_length, key_length: sizes B, T, S.
      rank: of query, as the caller gave it; 3 drops the batch axis of all arrays.
      offset: query offset, int32 [] or [B].
      tokens: how arrays of tokens are given.
    """

    batch: Any
    query_length: Any
    key_length: Any
    rank: int
    offset: Any
    tokens: Tokens = Tokens()

    @property
    def rows_given(self) -> Any:
        """Rows of which the caller gives numbers."""
        shards = self.tokens.shards
        return self.query_length if shards == 1 else self.query_length // shards

    @property
    def positions(self) -> Array:
        """Positions of the rows among the keys, int32 [B|1, T]."""
        offset = jnp.asarray(self.offset).reshape(-1, 1)
        return offset + jnp.arange(self.query_length, dtype=jnp.int32)[None]

    @property
    def key_positions(self) -> Array:
        """Positions of the keys, int32 [1, S]."""
        return jnp.arange(self.key_length, dtype=jnp.int32)[None]


def static_window(parts: list[Any]) -> tuple[bands.Window, list[Any]]:
    """The masks that are windows of ints, which are computed, as one; and the other masks.

    Raises:
      ValueError: a side of a window is wrong.
    """
    found, rest = bands.EVERYTHING, list[Any]()
    for part in parts:
        if isinstance(part, values.Window) and not (
            validate.is_array(part.left) or validate.is_array(part.right)
        ):
            left, right = validate.window((part.left, part.right), False, "mask: window")
            found = min(found[0], left), min(found[1], right)
        else:
            rest.append(part)
    return found, rest


def rows(parts: list[Any], call: Call) -> RowRanges | None:
    """Ranges and tags of masks; None for none, and where there is nothing to see.

    Raises:
      ValueError: an array has a wrong shape or type, or a table was made for other lengths.
      NotImplementedError: two masks each compare by `<=`.
    """
    if not parts:
        return None
    if any(isinstance(part, values.Prepared) for part in parts):
        return _prepared(parts, call)
    found = given(parts, call)
    if len(found.at_most) > 1:
        raise NotImplementedError(
            f"{len(found.at_most)} masks of block_causal: comparisons by <= of different ids are "
            "not one; supported: one, with any number of segments, chunks, ranges and windows"
        )
    if validate.nothing((call.batch, call.query_length, call.key_length)):
        return None
    return combined(found, call.query_length, call.key_length)


class Given(NamedTuple):
    """What masks say, in arrays: all ranges hold, all ids of `equal` are equal, `at_most` is <=."""

    limits: list[Range]
    equal: list[Ids]
    at_most: list[Ids]


def given(parts: list[Any], call: Call) -> Given:
    """What masks say that are ranges or compare ids.

    Raises:
      ValueError: an array has a wrong shape or type.
    """
    limits, equal, at_most = list[Range](), list[Ids](), list[Ids]()
    for part in parts:
        match part:
            case values.Segments(ids):
                equal.append(_ids("segment_ids", ids, call))
            case values.Chunked(size, None):
                limits.append(_chunk(validate.chunk_size(size), call))
            case values.Chunked(size, positions):
                found, size = _ids("positions", positions, call), validate.chunk_size(size)
                equal.append(Ids(found.query // size, found.key // size))
            case values.BlockCausal(ids):
                at_most.append(_ids("block_causal's ids", ids, call))
            case values.Prefix(lengths):
                limits.append(_prefix(lengths, call))
            case values.Ranges(low, high):
                limits.append((_ends("ranges' low", low, call), _ends("ranges' high", high, call)))
            case values.Window(left, right):
                limits.append(_window(left, right, call))
            case _:
                raise ValueError(f"mask must be a bool array or of fa4_jax.masks, got {part!r}")
    return Given(limits, equal, at_most)


def combined(given: Given, query_length: Any, key_length: Any) -> RowRanges:
    """Rows that see what all masks show; on Explicit mesh axes each device has its own batch.

    Raises:
      ValueError: an array is sharded along its length.
    """
    mesh = mesh_types.explicit_mesh(given)
    if mesh is None:
        return _combined(given, query_length, key_length)
    batch: tuple[str, ...] = ()
    for x in jax.tree.leaves(given):
        axes, length = mesh_types.explicit_axes(x) or [(), ()]
        if length:
            raise ValueError(
                f"segment_ids or mask: an array of shape {x.shape} is sharded along its length, "
                f"over mesh axis {' and '.join(map(repr, length))}: jax.sharding.reshard it before"
            )
        batch = max(batch, axes, key=len)
    return _on_mesh(mesh, batch, query_length, key_length, given)


# Jitted because types hold no devices: eagerly, shard_map would need them.
@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3), inline=True)
def _on_mesh(mesh: Any, batch: tuple[str, ...], t: Any, s: Any, given: Given) -> RowRanges:
    specs = jax.tree.map(
        lambda x: PartitionSpec(batch or None) if x.ndim and x.shape[0] > 1 else PartitionSpec(),
        given,
    )
    given = jax.tree.map(
        lambda x, spec: jax.sharding.reshard(x, NamedSharding(mesh, spec)), given, specs
    )
    only = set() if mesh.explicit_axes == mesh.axis_names else set(mesh.explicit_axes)
    return jax.shard_map(
        lambda given: _combined(given, t, s),
        mesh=mesh,
        in_specs=(specs,),
        out_specs=PartitionSpec(batch or None),
        axis_names=only,
    )(given)


def _combined(given: Given, query_length: Any, key_length: Any) -> RowRanges:
    hull = compared = None
    each = given.limits
    if given.equal or given.at_most:
        compared = tags.intervals(given.equal, given.at_most[0] if given.at_most else None)
        hull = tags.hull(compared)
        each = [*each, (hull.low, hull.high)]
    length = jnp.asarray(key_length).astype(jnp.int32)
    low = functools.reduce(jnp.maximum, (x for x, _ in each), jnp.int32(0))
    high = functools.reduce(jnp.minimum, (x for _, x in each), length)
    batch = max((x.shape[0] for x in (low, high) if x.ndim), key=lambda size: size != 1)
    low, high = (jnp.broadcast_to(x, (batch, query_length)) for x in (low, high))
    seen = low < high
    low, high = jnp.where(seen, low, 0), jnp.where(seen, high, 0)
    # Otherwise XLA computes the rows anew for each number of the table, of prefixes three times
    # slower (one H200: benchmarks/results/nvidia-h200-mask-cost.md).
    compares = None if hull is None else seen & ~hull.complete
    low, high, compares = jax.lax.optimization_barrier((low, high, compares))
    if compared is None or compares is None:
        return RowRanges(low, high, table.limits(low, high))
    limits, tiles = table.limits_and_any(low, high, compares)
    first, last, tag = (
        jnp.broadcast_to(x, (batch, x.shape[1]))
        for x in (compared.low, compared.high, compared.tag)
    )
    return RowRanges(low, high, limits, Tags(first, last, tag, tiles))


def _prepared(parts: list[Any], call: Call) -> RowRanges | None:
    if len(parts) > 1:
        raise ValueError(
            "mask: a tile table composes with nothing: give tile_table all masks and segment_ids"
        )
    (found,) = parts
    assert isinstance(found, values.Prepared)
    bits = found.bits
    made_for, lengths = (found.query_length, found.key_length), (call.query_length, call.key_length)
    if made_for != lengths:
        raise ValueError(
            f"mask: its tile table was made for lengths (T, S) = {made_for}, but query and key "
            f"have {lengths}"
        )
    made = [] if found.rows is None else [found.rows.low.shape[0]]
    made += [] if bits is None else [bits.words.shape[0]]
    if size := next((size for size in made if size not in (1, call.batch)), 0):
        raise ValueError(
            f"mask: its tile table was made for batch size {size}, but query has {call.batch}"
        )
    return found.rows


def _ids(name: str, ids: Any, call: Call) -> Ids:
    """Ids of rows and keys, as the caller gave them."""
    if not isinstance(ids, tuple | list):
        if call.query_length != call.key_length:
            raise ValueError(
                f"{name} must be a pair (query's, key's) where lengths differ, got one array for "
                f"T = {call.query_length} and S = {call.key_length}"
            )
        query = _tokens(name, ids, call, call.query_length)
        return Ids(query, query)
    if len(ids) != 2:
        raise ValueError(f"{name} must be an array or a pair (query's, key's), got {len(ids)}")
    query, key = ids
    return Ids(
        _tokens(f"{name} of query", query, call, call.query_length),
        _tokens(f"{name} of key", key, call, call.key_length),
    )


def _tokens(name: str, x: Any, call: Call, length: Any) -> Array:
    """One int32 for each token, [B|1, L]."""
    x = validate.tokens(name, x, call.batch, length // call.tokens.shards, call.rank)
    x = x[None] if call.rank == 3 else x
    return call.tokens.whole(jnp.asarray(to_int32(x, *INT32)))


def _ends(name: str, x: Any, call: Call) -> Array:
    return jnp.maximum(_tokens(name, x, call, call.query_length), 0)


def _chunk(size: int, call: Call) -> Range:
    size = min(size, UNBOUNDED)
    low = call.positions // size * size
    return low, low + size


def _prefix(lengths: Any, call: Call) -> Range:
    found = jnp.asarray(to_int32(validate.prefix_lengths(lengths, call.batch), 0, LIMIT))
    return jnp.int32(0), jnp.maximum(found.reshape(-1, 1), call.positions + 1)


def _window(left: Any, right: Any, call: Call) -> Range:
    left, right = (
        UNBOUNDED
        if side is None
        else jnp.asarray(to_int32(validate.window_side(side), -UNBOUNDED, UNBOUNDED))
        for side in (left, right)
    )
    return call.positions - left, call.positions + right + 1
