"""The calls that a device makes for its rows and another device's keys: shapes and extents.

Which device it is and whose keys it has are known only at run time, so every device makes the same
calls; what differs are the extents (lengths and offset), by which kernels skip what is masked.
There are no conditionals: on a GPU they would wait for the host.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fa4_jax.bands import LIMIT
from fa4_jax.extents import stacked
from fa4_jax.parallel.row_ranges import Seen, Whole, folded
from fa4_jax.parallel.shard_attention import ShardCall, View
from fa4_jax.parallel.shard_plan import ShardPlan
from fa4_jax.plan import Plan

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Work:
    """What is static about one device's share. Hashable.

    Attributes:
      axis: mesh axis that the sequences are sharded over.
      shards: how they are.
      plan: launches under the band, if there is one.
      dense: launches without a band.
    """

    axis: str
    shards: ShardPlan
    plan: Plan
    dense: Plan

    @property
    def device(self) -> Array:
        """Index of this device."""
        return lax.axis_index(self.axis)

    def owner(self, shift: int) -> Array:
        """Index of the device `shift` before this one."""
        return (self.device - shift) % self.shards.devices


def _clipped(length: Array, start: Any, count: int) -> Array:
    """How much of [start, start + count) lies below a length, int32."""
    return jnp.clip(length - start, 0, count)


def shard_lengths(work: Work, whole: Array, device: Array) -> tuple[Array, Array]:
    """Rows and keys of a device's shard that are no padding, int32 [B] each.

    Chunks lie in the order of their positions, so these are always the first of the shard.

    Args:
      whole: extents of the whole sequences, int32 [B, 4].
    """
    shards = work.shards

    def length(column: int, size: int) -> Array:
        halves = (
            _clipped(whole[:, column], shards.chunk(device, half) * size, size)
            for half in range(shards.chunks)
        )
        return sum(halves, jnp.zeros_like(whole[:, column]))

    return length(0, shards.rows_of_chunk), length(1, shards.keys_of_chunk)


def chunk_extents(shards: ShardPlan, whole: Array, row_chunk: Any, key_chunk: Any) -> Array:
    """Extents of one chunk of rows and one of keys, int32 [B, 4]."""
    first_row, first_key = row_chunk * shards.rows_of_chunk, key_chunk * shards.keys_of_chunk
    rows = _clipped(whole[:, 0], first_row, shards.rows_of_chunk)
    keys = _clipped(whole[:, 1], first_key, shards.keys_of_chunk)
    offset = jnp.clip(whole[:, 2] + first_row - first_key, 1 - LIMIT, LIMIT - 1)
    return stacked(rows, keys, offset)


def shard_calls(
    work: Work, shift: int, whole: Array, masks: Whole | None = None
) -> list[ShardCall]:
    """The calls for the keys of the device `shift` before, none where no device's rows see them.

    Args:
      whole: extents of the whole sequences, int32 [B, 4].
      masks: of the whole sequences, or None.
    """
    shards = work.shards
    n = shards.devices
    if not any(shards.meet(device, (device - shift) % n) for device in range(n)):
        return []
    problem = work.plan.problem
    # Rows past their length take part in the causal call, as rows of zeros: their scores would
    # count among the largest.
    padded = problem.returns_max_logit and problem.has_lengths
    if shards.kind == "causal" and not padded:
        return [_causal_call(work, shift, whole, masks)]
    if shards.kind in ("causal", "general"):
        return _chunk_calls(work, shift, whole, masks)
    own = _seen(work, shift, masks)
    if shards.layout == "contiguous":
        found = chunk_extents(shards, whole, work.device, work.owner(shift))
        return [ShardCall(work.plan, found, seen=own)]
    rows, _ = shard_lengths(work, whole, work.device)
    _, keys = shard_lengths(work, whole, work.owner(shift))
    return [ShardCall(work.dense, stacked(rows, keys), seen=own)]


def _seen(work: Work, shift: int, masks: Whole | None, swapped: bool = False) -> Seen:
    """What the device's rows, whose chunks may be swapped, see of an owner's keys by masks."""
    if masks is None:
        return Seen()
    halves = range(work.shards.chunks)
    rows = [work.shards.chunk(work.device, half) for half in halves]
    keys = [work.shards.chunk(work.owner(shift), half) for half in halves]
    return masks.between(work.shards, rows[::-1] if swapped else rows, keys)


def _causal_call(work: Work, shift: int, whole: Array, masks: Whole | None) -> ShardCall:
    """Zig-zag under a causal mask: the same shape and the same work on every device.

    The own shard is causal by local indices. Of an owner before this device both row chunks see
    the first key chunk whole, and of one after it the second row chunk sees both key chunks whole.
    With the row chunks swapped, either is a dense rectangle from the first row and key on: all rows
    by half of the keys, or half of the rows by all keys.
    """
    half = work.shards.rows_of_chunk
    rows, _ = shard_lengths(work, whole, work.device)
    _, keys = shard_lengths(work, whole, work.owner(shift))
    if shift == 0:
        return ShardCall(work.plan, stacked(rows, keys), seen=_seen(work, shift, masks))
    before = work.device >= shift
    # Lengths of rows would not be prefixes here: `rows_used` is for them.
    rows = jnp.where(before, 2 * half, half) + jnp.zeros_like(rows)
    keys = jnp.where(before, jnp.minimum(keys, half), keys)
    return ShardCall(
        *(work.dense, stacked(rows, keys)),
        rows=View(swapped=True),
        partial_rows=True,
        seen=_seen(work, shift, masks, swapped=True),
    )


def _chunk_calls(work: Work, shift: int, whole: Array, masks: Whole | None) -> list[ShardCall]:
    """Zig-zag under any mask: two chunks of rows with the key chunks in order, then crossed."""
    shards = work.shards
    n = shards.devices
    found = []
    for crossed in (False, True):
        halves = ((0, int(crossed)), (1, int(not crossed)))
        if any(shards.halves_meet(d, (d - shift) % n, r, k) for d in range(n) for r, k in halves):
            pairs = [
                (shards.chunk(work.device, r), shards.chunk(work.owner(shift), k))
                for r, k in halves
            ]
            chunks = [chunk_extents(shards, whole, r, k) for r, k in pairs]
            extents = jnp.stack(chunks, axis=1).reshape(-1, 4)  # batch major, as the views fold
            own = Seen()
            if masks is not None:
                halves_seen = [masks.between(shards, [r], [k]) for r, k in pairs]
                own = folded(halves_seen, whole.shape[0])
            views = View(folded=True), View(crossed, folded=True)
            found.append(ShardCall(work.plan, extents, *views, seen=own))
    return found


def rows_used(work: Work, whole: Array) -> Array | None:
    """Which rows are no padding, bool [B, T], where the calls' own lengths do not say it."""
    if work.shards.kind != "causal" or not work.plan.problem.has_lengths:
        return None
    rows, _ = shard_lengths(work, whole, work.device)
    return jnp.arange(work.shards.rows)[None, :] < rows[:, None]


def keep_rows(used: Array | None, x: Array, fill: float = 0.0) -> Array:
    """x [B, T, N, H] or [B, N, T] with the rows that are not `used` set to `fill`."""
    if used is None:
        return x
    return jnp.where(used[:, :, None, None] if x.ndim == 4 else used[:, None, :], x, fill)
