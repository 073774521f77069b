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

from fa4_jax.bands import UNBOUNDED
from fa4_jax.parallel.cut import Cut
from fa4_jax.parallel.pair import Part, View
from fa4_jax.plan import Plan

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Work:
    """What is static about one device's share. Hashable.

    Attributes:
      axis: mesh axis that the sequences are cut over.
      cut: how.
      plan: launches under the band, if there is one.
      dense: launches without a band.
    """

    axis: str
    cut: Cut
    plan: Plan
    dense: Plan

    @property
    def device(self) -> Array:
        """Index of this device."""
        return lax.axis_index(self.axis)

    def owner(self, shift: int) -> Array:
        """Index of the device `shift` before this one."""
        return (self.device - shift) % self.cut.devices


def _clipped(length: Array, start: Any, count: int) -> Array:
    """How much of [start, start + count) lies below a length, int32."""
    return jnp.clip(length - start, 0, count)


def shard_lengths(work: Work, whole: Array, device: Array) -> tuple[Array, Array]:
    """Rows and keys of a device's shard that are no padding, int32 [B] each.

    Chunks lie in the order of their positions, so these are always the first of the shard.

    Args:
      whole: extents of the whole sequences, int32 [B, 4].
    """
    cut = work.cut

    def length(column: int, size: int) -> Array:
        halves = (
            _clipped(whole[:, column], cut.chunk(device, half) * size, size)
            for half in range(cut.chunks)
        )
        return sum(halves, jnp.zeros_like(whole[:, column]))

    return length(0, cut.rows_of_chunk), length(1, cut.keys_of_chunk)


def chunk_extents(cut: Cut, whole: Array, row_chunk: Any, key_chunk: Any) -> Array:
    """Extents of one chunk of rows and one of keys, int32 [B, 4]."""
    first_row, first_key = row_chunk * cut.rows_of_chunk, key_chunk * cut.keys_of_chunk
    rows = _clipped(whole[:, 0], first_row, cut.rows_of_chunk)
    keys = _clipped(whole[:, 1], first_key, cut.keys_of_chunk)
    offset = jnp.clip(whole[:, 2] + first_row - first_key, -UNBOUNDED, UNBOUNDED)
    return extents(rows, keys, offset)


def extents(rows: Array, keys: Array, offset: Array | None = None) -> Array:
    """int32 [B, 4] from int32 [B] each."""
    zero = jnp.zeros_like(rows)
    return jnp.stack((rows, keys, zero if offset is None else offset, zero), axis=1)


def parts(work: Work, shift: int, whole: Array) -> list[Part]:
    """The calls for the keys of the device `shift` before, none where no device's rows see them.

    Args:
      whole: extents of the whole sequences, int32 [B, 4].
    """
    cut = work.cut
    n = cut.devices
    if not any(cut.meet(device, (device - shift) % n) for device in range(n)):
        return []
    if cut.kind == "causal":
        return [_causal_part(work, shift, whole)]
    if cut.kind == "general":
        return _chunk_parts(work, shift, whole)
    if cut.layout == "contiguous":
        return [Part(work.plan, chunk_extents(cut, whole, work.device, work.owner(shift)))]
    rows, _ = shard_lengths(work, whole, work.device)
    _, keys = shard_lengths(work, whole, work.owner(shift))
    return [Part(work.dense, extents(rows, keys))]


def _causal_part(work: Work, shift: int, whole: Array) -> Part:
    """Zig-zag under a causal mask: the same shape and the same work on every device.

    The own shard is causal by local indices. Of an owner before this device both row chunks see
    the first key chunk whole, and of one behind it the second row chunk sees both key chunks whole.
    With the row chunks swapped, either is a dense rectangle from the first row and key on: all rows
    by half of the keys, or half of the rows by all keys.
    """
    half = work.cut.rows_of_chunk
    rows, _ = shard_lengths(work, whole, work.device)
    _, keys = shard_lengths(work, whole, work.owner(shift))
    if shift == 0:
        return Part(work.plan, extents(rows, keys))
    before = work.device >= shift
    # Lengths of rows would not be prefixes here: `rows_used` is for them.
    rows = jnp.where(before, 2 * half, half) + jnp.zeros_like(rows)
    keys = jnp.where(before, jnp.minimum(keys, half), keys)
    return Part(work.dense, extents(rows, keys), rows=View(swapped=True), partial_rows=True)


def _chunk_parts(work: Work, shift: int, whole: Array) -> list[Part]:
    """Zig-zag under any mask: two chunks of rows with the key chunks in order, then crossed."""
    cut = work.cut
    n = cut.devices
    found = []
    for crossed in (False, True):
        halves = ((0, int(crossed)), (1, int(not crossed)))
        if any(cut.halves_meet(d, (d - shift) % n, r, k) for d in range(n) for r, k in halves):
            chunks = [
                chunk_extents(
                    cut, whole, cut.chunk(work.device, r), cut.chunk(work.owner(shift), k)
                )
                for r, k in halves
            ]
            folded = jnp.stack(chunks, axis=1).reshape(-1, 4)  # batch major, as the views fold
            found.append(Part(work.plan, folded, View(folded=True), View(crossed, folded=True)))
    return found


def rows_used(work: Work, whole: Array) -> Array | None:
    """Which rows are no padding, bool [B, T], where the calls' own lengths do not say it."""
    if work.cut.kind != "causal" or not work.plan.problem.has_lengths:
        return None
    rows, _ = shard_lengths(work, whole, work.device)
    return jnp.arange(work.cut.rows)[None, :] < rows[:, None]


def keep_rows(used: Array | None, x: Array, fill: float = 0.0) -> Array:
    """x [B, T, N, H] or [B, N, T] with the rows that are not `used` set to `fill`."""
    if used is None:
        return x
    return jnp.where(used[:, :, None, None] if x.ndim == 4 else used[:, None, :], x, fill)
