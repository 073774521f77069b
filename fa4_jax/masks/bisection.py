"""Places in ordered arrays, and entries there."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fa4_jax.bands import LIMIT

Array = jax.Array


def bits(length: Any) -> int:
    """Bits of a length, or of the longest if it is symbolic."""
    return length.bit_length() if isinstance(length, int) else LIMIT.bit_length()


def take(x: Array, index: Array) -> Array:
    """x [B|1, S] at index [B|1, T], the nearest one if it is beyond."""
    batch = max(x.shape[0], index.shape[0], key=lambda size: size != 1)
    x, index = (jnp.broadcast_to(y, (batch, y.shape[1])) for y in (x, index))
    return jnp.take_along_axis(x, index, axis=1, mode="clip")


def count(ordered: Array, x: Array, inclusive: bool) -> Array:
    """How many entries of an ordered [B|1, S] are less than x [B|1, T], or at most x if inclusive.

    Bisection in as many steps as lengths have bits: one kernel on a GPU, unlike a sort.
    """
    length = ordered.shape[1]
    batch = max(ordered.shape[0], x.shape[0], key=lambda size: size != 1)
    found = jnp.zeros((batch, x.shape[1]), jnp.int32)
    for bit in reversed(range(bits(length))):
        further = found + (1 << bit)
        entry = take(ordered, jnp.minimum(further, length) - 1)
        before = entry <= x if inclusive else entry < x
        found = jnp.where((further <= length) & before, further, found)
    return found
