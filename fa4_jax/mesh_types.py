"""Mesh types of traced arrays: manual axes that they vary over (in old and new JAX spellings),
Explicit axes that they are sharded over.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec


def varying(x: Any) -> frozenset[str]:
    """Manual mesh axes (of an enclosing shard_map) over which x differs."""
    aval = jax.typeof(x)
    manual = getattr(aval, "manual_axis_type", None)
    return frozenset(manual.varying if manual is not None else getattr(aval, "vma", ()))


def union_varying(tree: Any) -> frozenset[str]:
    """Axes over which any array of a tree varies."""
    return frozenset().union(*(varying(x) for x in jax.tree.leaves(tree)))


def cast_varying(x: Any, axes: frozenset[str]) -> Any:
    """x, typed as varying over `axes` too.

    Its transpose is a sum over the added axes (in float32, whatever the type): what makes the
    gradient of a replicated key right when the queries are sharded.
    """
    missing = tuple(sorted(axes - varying(x)))
    if not missing:
        return x
    if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4:
        return cast_varying(x.astype(jnp.float32), axes).astype(x.dtype)
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(x, missing, to="varying")
    return jax.lax.pvary(x, missing)  # pyright: ignore[reportAttributeAccessIssue]


def struct(shape: tuple[int, ...], dtype: Any, operands: Iterable[Any]) -> jax.ShapeDtypeStruct:
    """Type of a result that varies over every manual axis that an operand varies over."""
    widest = max(operands, key=lambda x: len(varying(x)))
    axes = varying(widest)
    if not axes:
        return jax.ShapeDtypeStruct(shape, dtype)
    aval = jax.typeof(widest)
    sharding = NamedSharding(aval.sharding.mesh, PartitionSpec(*(None,) * len(shape)))
    manual = getattr(aval, "manual_axis_type", None)
    kind: dict[str, Any] = {"vma": axes} if manual is None else {"manual_axis_type": manual}
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding, **kind)


def explicit_mesh(tree: Any) -> Any:
    """The mesh of the first array that has Explicit axes, without devices; None if none has."""
    meshes = (jax.typeof(x).sharding.mesh for x in jax.tree.leaves(tree))
    return next((mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types), None)


def explicit_axes(x: jax.Array | None) -> list[tuple[str, ...]]:
    """Explicit mesh axes that each dimension of x is sharded over; nothing for None."""
    if x is None:
        return []
    entries = [*jax.typeof(x).sharding.spec]
    entries += [None] * (x.ndim - len(entries))
    return [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries]


def sharded_alike(arrays: list[jax.Array]) -> list[jax.Array]:
    """The arrays, on Explicit axes all sharded as that one which is sharded over the most."""
    mesh = explicit_mesh(arrays)
    if mesh is None:
        return arrays
    finest = max(arrays, key=lambda x: sum(map(len, explicit_axes(x))))
    sharding = NamedSharding(mesh, jax.typeof(finest).sharding.spec)
    return [jax.sharding.reshard(x, sharding) for x in arrays]


def leading_alike(arrays: list[jax.Array]) -> list[jax.Array]:
    """The arrays, whose axes 0 lie over the same Explicit axes: those of the one that has most."""
    mesh = explicit_mesh(arrays)
    if mesh is None:
        return arrays
    leading = max((explicit_axes(x)[0] for x in arrays), key=len)
    specs = [
        PartitionSpec(*(entry or None for entry in (leading, *explicit_axes(x)[1:])))
        for x in arrays
    ]
    return [
        jax.sharding.reshard(x, NamedSharding(mesh, spec))
        for x, spec in zip(arrays, specs, strict=True)
    ]
