"""Between which keys the ids lie that are at most a row's, and whether it sees all between.

The keys' ids are compared as unsigned numbers, so that negative ones, which nothing sees, are above
all others. The least id up to each key, and from it on, says by bisection where a row's first and
last key are. Between them lies the key with the least of all ids, if the row sees any: so the
greatest id from a key to that one, on either side, says whether all between are seen. Four scans
take a third of the time of a sort on a GPU (benchmarks/results/nvidia-h200-mask-cost.md).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fa4_jax.masks.bisection import count, take

Array = jax.Array

_LEAST = np.uint32(0)


class Hull(NamedTuple):
    """The first key that a row sees, one past its last, and whether it sees all between: [B, T].

    low == high == 0, and complete, in a row that sees nothing.
    """

    low: Array
    high: Array
    complete: Array


def hull(query: Array, key: Array) -> Hull:
    """`Hull` of rows with ids [B|1, T] that see the keys [B|1, S] with ids from 0 to their own."""
    own, ids = (x.astype(jnp.uint32) for x in (query, key))
    least_to, least_from = lax.cummin(ids, axis=1), lax.cummin(ids, axis=1, reverse=True)
    before = count(~least_to, ~own, inclusive=False)
    seen = (query >= 0) & (before < key.shape[1])
    after = count(least_from, own, inclusive=True)

    center = count(~least_to, ~least_to[:, -1:], inclusive=False)
    place = lax.broadcasted_iota(jnp.int32, ids.shape, 1)
    greatest_from = lax.cummax(jnp.where(place <= center, ids, _LEAST), axis=1, reverse=True)
    greatest_to = lax.cummax(jnp.where(place >= center, ids, _LEAST), axis=1)
    greatest = jnp.maximum(take(greatest_from, before), take(greatest_to, after - 1))
    complete = (greatest <= own) | ~seen
    return Hull(jnp.where(seen, before, 0), jnp.where(seen, after, 0), complete)
