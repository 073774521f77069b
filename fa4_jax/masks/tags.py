"""Comparisons of ids as one interval of tags a row, and the keys between which its matches lie.

Row i sees key j if all its ids are equal to the key's and, of at most one pair, the key's id is at
most the row's. One pair is compared as it is. Several are replaced by ranks: of all rows and keys
in the order of their ids, those that are compared by <= last, each has the number of different
ones before it. A row then sees the ranks from the first with its equal ids to its own.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fa4_jax import mesh_types
from fa4_jax.masks import bisection, id_order
from fa4_jax.masks.bisection import count, take
from fa4_jax.masks.id_order import Hull

Array = jax.Array

SLOT_BITS = 12
"""Bits of a tag's hash, by which rows look their tag up among the keys'."""

_NONE = np.iinfo(np.int32).max


class Ids(NamedTuple):
    """Ids of rows and keys, [B|1, T] and [B|1, S] int32; negative ones meet nothing."""

    query: Array
    key: Array


class Intervals(NamedTuple):
    """Row i sees key j only if low[i] <= tag[j] <= high[i].

    low, high [B|1, T], tag [B|1, S]; start [B|1, S]: the least tag that a row sees which sees this
    key, or None where it is the same for all keys: 0 if `from_zero`, else low == high in every row
    that sees anything.
    """

    low: Array
    high: Array
    tag: Array
    start: Array | None = None
    from_zero: bool = False


def intervals(equal: list[Ids], at_most: Ids | None) -> Intervals:
    """One comparison that says the same as all: equal ids, and key <= row of `at_most`."""
    if at_most is None and len(equal) == 1:
        (ids,) = equal
        return Intervals(jnp.maximum(ids.query, 0), ids.query, ids.key)
    if at_most is not None and not equal:
        low = jnp.zeros_like(at_most.query)
        return Intervals(low, at_most.query, at_most.key, from_zero=True)
    return _ranked(equal, at_most)


def _ranked(equal: list[Ids], at_most: Ids | None) -> Intervals:
    every = [*equal, at_most] if at_most is not None else equal
    keys = every[0].key.shape[1]
    batch = max((x.shape[0] for ids in every for x in ids), key=lambda size: size != 1)

    def joined(ids: Ids) -> Array:
        return jnp.concatenate(
            [jnp.broadcast_to(x, (batch, x.shape[1])) for x in (ids.key, ids.query)], axis=1
        )

    columns = [joined(ids) for ids in every]
    place = lax.broadcasted_iota(jnp.int32, columns[0].shape, 1)
    *ordered, order = lax.sort((*columns, place), dimension=1, num_keys=len(columns))
    new_group = _any_changed(ordered[: len(equal)])
    rank = jnp.cumsum(new_group | _any_changed(ordered), axis=1, dtype=jnp.int32)
    start = lax.cummax(jnp.where(new_group, rank, 0), axis=1)
    _, rank, start = lax.sort((order, rank, start), dimension=1, num_keys=1)
    known = jnp.stack(columns).min(0) >= 0
    tag = jnp.where(known, rank, -1)
    low = start if at_most is not None else rank
    return Intervals(
        low[:, keys:],
        tag[:, keys:],
        tag[:, :keys],
        None if at_most is None else jnp.where(known, start, -1)[:, :keys],
    )


def _any_changed(columns: list[Array]) -> Array:
    """Whether any column differs from the entry before, [B, L]; True at the first."""
    before = [jnp.roll(x, 1, axis=1) for x in columns]
    changed = jnp.stack([x != y for x, y in zip(columns, before, strict=True)]).any(0)
    return changed | (lax.broadcasted_iota(jnp.int32, changed.shape, 1) == 0)


def hull(found: Intervals) -> Hull:
    """Between which keys the matches of each row lie; low == high == 0 without any."""
    if found.start is not None:
        return _hull_of_several(found, found.start)
    return id_order.hull(found.high, found.tag) if found.from_zero else _hull_of_one(found)


def _hull_of_one(found: Intervals) -> Hull:
    """`hull` where a row sees keys with one tag.

    Runs are keys with the same tag, one after the other. Each tag has a slot by a hash, which
    knows where its first run begins, and where its last one begins and ends. A slot of one run says
    all of its tag. In any other, a tag comes back, or two tags share it: all of its runs lie
    between the ends, and tags have to be compared. O(T + S), and two operations of a GPU.
    """
    first, last, end, tag = (x.squeeze(-1) for x in jnp.split(_found(found), 4, axis=-1))
    last, end = -last, -end
    one_run = first == last
    seen = (found.high >= 0) & (first < _NONE) & (~one_run | (tag == found.high))
    return Hull(jnp.where(seen, first, 0), jnp.where(seen, end, 0), one_run | ~seen)


def _found(found: Intervals) -> Array:
    """What the slot of a row's tag knows, [B|1, T, 4]: see `_slots`."""
    bits = min(bisection.bits(found.tag.shape[1]), SLOT_BITS)
    slots, index = _slots(found.tag, bits), _hash(found.high, bits)
    batch = max(slots.shape[0], index.shape[0], key=lambda size: size != 1)
    slots = jnp.broadcast_to(slots, (batch, *slots.shape[1:]))
    index = jnp.broadcast_to(index, (batch, index.shape[1]))
    return jax.vmap(lambda slots, index: slots.at[index].get(mode="promise_in_bounds"))(
        slots, index
    )


def _slots(tags: Array, bits: int) -> Array:
    """Where runs of tags lie, by the tags' hashes.

    Returns:
      int32 [B|1, 2^bits, 4]: the first key of the first run, minus that of the last one, minus one
      past its last key, the least tag; the greatest int32 in a slot of no tag.
    """
    place = lax.broadcasted_iota(jnp.int32, tags.shape, 1)
    inside = tags[:, 1:] == tags[:, :-1]
    begins = jnp.pad(~inside, ((0, 0), (1, 0)), constant_values=True)
    ends = jnp.pad(~inside, ((0, 0), (0, 1)), constant_values=True)
    known = jnp.stack(
        (
            jnp.where(begins, place, _NONE),
            jnp.where(begins, -place, _NONE),
            jnp.where(ends, -place - 1, _NONE),
            tags,
        ),
        axis=-1,
    )
    # Only the ends of runs are written: many writes to one slot would wait for each other.
    slot = jnp.where((tags >= 0) & (begins | ends), _hash(tags, bits), 1 << bits)
    empty = jnp.full((tags.shape[0], 1 << bits, 4), _NONE, jnp.int32)
    empty = mesh_types.cast_varying(empty, mesh_types.varying(tags))
    return jax.vmap(lambda slots, slot, known: slots.at[slot].min(known, mode="drop"))(
        empty, slot, known
    )


def _hash(tags: Array, bits: int) -> Array:
    """A number below 2^bits; tags below it have their own."""
    high = lax.shift_right_logical(tags, jnp.full_like(tags, bits))
    mixed = high * np.int32(-1640531535)  # 2^32 over the golden ratio
    mixed = lax.shift_right_logical(mixed, jnp.full_like(tags, 32 - bits))
    return (tags ^ mixed) & ((1 << bits) - 1)


def _hull_of_several(found: Intervals, start: Array) -> Hull:
    """`hull` where a row sees keys with tags of an interval, which begins at `start`."""
    keys = found.tag.shape[1]
    place = lax.broadcasted_iota(jnp.int32, found.tag.shape, 1)
    tags, order, start = lax.sort((found.tag, place, start), dimension=1, num_keys=1)
    least, greatest = _extremes(order, start)
    begin = count(tags, found.low, inclusive=False)
    end = count(tags, found.high, inclusive=True)
    seen = begin < end
    first = take(least, jnp.minimum(end - 1, keys - 1))
    last = take(greatest, jnp.maximum(end - 1, 0))
    complete = end - begin == last + 1 - first
    return Hull(jnp.where(seen, first, 0), jnp.where(seen, last + 1, 0), complete | ~seen)


def _extremes(x: Array, group: Array) -> tuple[Array, Array]:
    """The least and the greatest entry of x [B, S] so far, within each run of a group.

    Each step doubles how far an entry looks back: as few kernels on a GPU as lengths have bits.
    """
    place = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    least = greatest = x
    for bit in range(bisection.bits(x.shape[1])):
        before = place - (1 << bit)
        inside = (before >= 0) & (take(group, before) == group)
        least = jnp.where(inside, jnp.minimum(least, take(least, before)), least)
        greatest = jnp.where(inside, jnp.maximum(greatest, take(greatest, before)), greatest)
    return least, greatest
