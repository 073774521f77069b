"""Pages of one sequence that lie on several devices, dealt out one by one in turns."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Shard(NamedTuple):
    """One device's part of the pages: entry i of its table is page i * devices + index."""

    index: Any = 0
    devices: int = 1

    def pages(self, count: jax.Array) -> jax.Array:
        """How many of the first `count` pages of a sequence are this device's."""
        return (count - self.index + self.devices - 1) // self.devices

    def tokens(self, count: jax.Array, page_size: int) -> jax.Array:
        """How many of the first `count` tokens of a sequence are this device's."""
        if self.devices == 1:
            return count
        page, within = count // page_size, count % page_size
        return self.pages(page) * page_size + jnp.where(self.holds(page), within, 0)

    def holds(self, page: jax.Array) -> jax.Array:
        """Whether a page of a sequence is this device's."""
        return page % self.devices == self.index


WHOLE = Shard()


def shard_of(axis: str | None) -> Shard:
    """The part of this device on a manual mesh axis; everything without one.

    Raises:
      ValueError: there is no such axis here.
    """
    if axis is None:
        return WHOLE
    try:
        return Shard(lax.axis_index(axis), lax.axis_size(axis))
    except NameError:
        manual = jax.sharding.get_abstract_mesh().manual_axes
        raise ValueError(
            f"axis={axis!r} is no manual mesh axis here (there are: "
            f"{', '.join(map(repr, manual)) or 'none'}): call inside a shard_map over it"
        ) from None
