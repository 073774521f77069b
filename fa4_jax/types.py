"""Mesh types of traced arrays: which manual axes they vary over, in old and new JAX spellings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec


def varying(x: Any) -> frozenset[str]:
    """Manual mesh axes (of an enclosing shard_map) over which x differs."""
    aval = jax.typeof(x)
    manual = getattr(aval, "manual_axis_type", None)
    return frozenset(manual.varying if manual is not None else getattr(aval, "vma", ()))


def union_varying(arrays: Iterable[Any]) -> frozenset[str]:
    """Axes over which any of the arrays varies."""
    return frozenset().union(*(varying(x) for x in arrays if x is not None))


def cast_varying(x: Any, axes: frozenset[str]) -> Any:
    """x, typed as varying over `axes` too.

    Its transpose is a sum over the added axes: what makes the gradient of a replicated key right
    when the queries are sharded.
    """
    missing = tuple(sorted(axes - varying(x)))
    if not missing:
        return x
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
