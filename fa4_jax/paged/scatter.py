"""Writing to pages."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from fa4_jax import mesh_types

Array = jax.Array


def written(pages: Array, at: tuple[Array, ...], rows: Array) -> Array:
    """Pages with rows at the indices; what lies outside is dropped.

    XLA's CPU scatters narrow floating types in float32: it would convert all pages back and forth.
    As integers they are only copied, in a fifth of the time. What is as wide as float32 is written
    in place there, as everything is on GPUs.
    """

    def scattered(pages: Array, rows: Array) -> Array:
        return pages.at[at].set(rows, mode="drop")

    def by_bits(pages: Array, rows: Array) -> Array:
        bits: Any = jnp.uint16 if pages.dtype.itemsize == 2 else jnp.uint8
        found = scattered(*(lax.bitcast_convert_type(x, bits) for x in (pages, rows)))
        return lax.bitcast_convert_type(found, pages.dtype)

    mesh = mesh_types.explicit_mesh((pages, rows))
    if mesh is not None:
        # Every device has the whole pool of its heads, so it needs the rows of all entries.
        kept = jax.typeof(pages).sharding.spec[len(at) :]
        spec = PartitionSpec(*(None,) * (rows.ndim - len(kept)), *kept)
        rows = jax.sharding.reshard(rows, NamedSharding(mesh, spec))
    if pages.dtype.itemsize > 2:
        return scattered(pages, rows)
    return lax.platform_dependent(pages, rows, cpu=by_bits, default=scattered)
