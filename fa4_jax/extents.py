"""Lengths and offsets as one array: what the kernels and the default path read at run time."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fa4_jax import mesh_types, validate
from fa4_jax.bands import LIMIT

_INT32 = np.iinfo(np.int32)


class Extents(NamedTuple):
    """Checked lengths and offset: NumPy arrays where they are static; None for no length."""

    query_lengths: Any
    key_lengths: Any
    query_offset: Any

    @property
    def has_lengths(self) -> bool:
        """Whether there may be padding."""
        return self.query_lengths is not None or self.key_lengths is not None

    def common_offset(self) -> jax.Array | None:
        """int32 [], the offset of all entries of the batch; None where they have their own."""
        return None if self.query_offset.shape else jnp.asarray(offset_array(self.query_offset))

    def array(self, batch: int, query_length: int, key_length: int) -> jax.Array:
        """int32 [B, 4]: query length, key length, query offset, 0; in the limits of the call."""
        t, s = query_length, key_length
        columns = (
            to_int32(_known(t) if self.query_lengths is None else self.query_lengths, 0, t),
            to_int32(_known(s) if self.key_lengths is None else self.key_lengths, 0, s),
            offset_array(self.query_offset),
            np.int32(0),
        )
        if isinstance(batch, int) and not any(isinstance(x, jax.Array) for x in columns):
            return jnp.asarray(np.stack([np.broadcast_to(x, (batch,)) for x in columns], axis=1))
        return stacked(*(jnp.broadcast_to(x, (batch,)) for x in columns[:3]))


def stacked(
    query_lengths: jax.Array, key_lengths: jax.Array, offsets: jax.Array | None = None
) -> jax.Array:
    """int32 [B, 4], as the kernels read it, from int32 [B] each; offsets are 0 by default."""
    zeros = jnp.zeros_like(query_lengths)
    columns = [query_lengths, key_lengths, zeros if offsets is None else offsets, zeros]
    return jnp.stack(mesh_types.sharded_alike(columns), axis=1)


def _known(size: int) -> Any:
    """A size that may be symbolic (`jax.export`), which is a value of the run."""
    return size if isinstance(size, int) else jnp.asarray(size)


def checked(query_lengths: Any, key_lengths: Any, query_offset: Any, batch: int) -> Extents:
    """The arguments of a call.

    Raises:
      ValueError: one of them is wrong.
    """
    return Extents(
        validate.lengths("query_seq_lengths", query_lengths, batch),
        validate.lengths("key_value_seq_lengths", key_lengths, batch),
        validate.query_offset(query_offset, batch),
    )


def offset_array(query_offset: Any) -> Any:
    """A checked query offset as int32, within what sums of positions allow."""
    return to_int32(query_offset, 1 - LIMIT, LIMIT - 1)


def to_int32(x: Any, low: int, high: int) -> Any:
    """Integers of any type within [low, high], as int32; NumPy's stay NumPy's."""
    if not isinstance(x, jax.Array):
        return np.clip(x, low, high).astype(np.int32)
    # A wider type is clipped before it is narrowed, or a large number would wrap around.
    info = jnp.iinfo(x.dtype)
    x = jnp.minimum(x, high) if info.max > _INT32.max else x
    x = jnp.maximum(x, low) if info.min < _INT32.min else x
    return jnp.clip(x.astype(jnp.int32), low, high)
