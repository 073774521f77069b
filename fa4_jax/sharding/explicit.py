"""Attention on Explicit mesh axes: the operands' types say how it is shared out.

A call is mapped over the devices. An operand that is sharded along its length or head_dim is a
ValueError.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding

from fa4_jax import mesh_types
from fa4_jax.boxes import Boxed
from fa4_jax.operands import Operands, Results
from fa4_jax.plan import Plan
from fa4_jax.problem import Problem
from fa4_jax.sharding.split import Axes, Split, local_plan, make_split, own_heads


def attend_on_mesh(
    attend: Callable[[Plan, Operands], Results], plan: Plan, operands: Operands
) -> Results:
    """attend(plan, operands), on the devices of the operands' Explicit mesh axes if there are any.

    Returns:
      Output, log-sum-exp and largest scores, sharded along batch and heads as the operands are.

    Raises:
      ValueError: an operand is sharded along its length or head_dim, or two are sharded in ways
        that do not fit together.

    Inside a shard_map over some of the axes of an Explicit mesh JAX (to 0.12) cannot differentiate
    this one: make all of them manual.
    """
    mesh = mesh_types.explicit_mesh(operands)
    if mesh is None:
        return attend(plan, operands)
    # Each device has the offsets of its own part of the batch.
    return _in_explicit_mesh(attend, plan, mesh, operands._replace(offset=None))


# Jitted because types hold no devices: eagerly, shard_map would need them.
@functools.partial(jax.jit, static_argnums=(0, 1, 2), inline=True)
def _in_explicit_mesh(attend: Any, plan: Plan, mesh: Any, operands: Operands) -> Results:
    split = explicit_split(plan.problem, mesh, operands, _DIMENSIONS)
    specs = split.operands(operands)
    operands = jax.tree.map(
        lambda x, spec: jax.sharding.reshard(x, NamedSharding(mesh, spec)), operands, specs
    )

    def local(operands: Operands) -> Results:
        # Outside the custom derivative: the cast's transpose sums the gradients of copies.
        axes = mesh_types.union_varying(operands)
        operands = jax.tree.map(lambda x: mesh_types.cast_varying(x, axes), operands)
        key, value = (own_heads(split, plan.problem, x) for x in (operands.key, operands.value))
        return attend(local_plan(plan, split), operands._replace(key=key, value=value))

    # Left empty it means all axes but those that an enclosing vmap maps over.
    only = set() if mesh.explicit_axes == mesh.axis_names else set(mesh.explicit_axes)
    results = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(specs,),
        out_specs=split.results(plan.problem),
        axis_names=only,
    )(operands)
    return results._replace(lse=used(results.lse))


def used(lse: jax.Array) -> jax.Array:
    """The log-sum-exp of a shard_map, with a name that keeps it.

    JAX 0.8 drops a result that the program does not use, and fails then if the backward needs it as
    a residual. A name counts as a use.
    """
    return checkpoint_name(lse, "fa4_jax_lse_in_mesh")


_DIMENSIONS = {
    "query": ("batch", "length", "heads", "head_dim"),
    "key": ("batch", "length", "heads", "head_dim"),
    "value": ("batch", "length", "heads", "head_dim"),
    "extents": ("batch", "columns"),
    "bias": ("batch", "heads", "query length", "key length"),
    "mask": ("batch", "heads", "query length", "key length"),
    "offset": (),
    "scale": (),
    "rows": ("batch", "length", "columns"),
    "soft_cap": (),
    "sinks": ("heads",),
    "bits": ("batch", "heads", "query length", "key length", "columns"),
}


def explicit_split(
    problem: Problem, mesh: Any, operands: Any, dimensions: Mapping[str, tuple[str, ...]]
) -> Split:
    """The split that the operands' types ask for.

    Args:
      operands: a named tuple of arrays.
      dimensions: the names of each array's dimensions.

    Raises:
      ValueError: as `attend_on_mesh`.
    """
    found: dict[str, dict[str, Axes]] = {"batch": {}, "heads": {}}
    arrays = [
        (name, x, named)
        for name, tree in operands._asdict().items()
        for x, named in _with_dimensions(tree, dimensions.get(name, ()))
    ]
    for name, x, named in arrays:
        for dimension, axes in zip(named, mesh_types.explicit_axes(x), strict=False):
            if dimension in found:
                found[dimension][name] = axes
            elif axes:
                raise ValueError(
                    f"{name} is sharded along its {dimension}, over mesh axis "
                    f"{' and '.join(map(repr, axes))}: calls are shared out by batch "
                    f"and heads only; {_instead(dimension)}"
                )
    batch, heads = (_longest(dimension, axes) for dimension, axes in found.items())
    return make_split(problem, batch, heads, mesh.shape)


def _with_dimensions(tree: Any, named: tuple[str, ...]) -> list[tuple[Any, tuple[str, ...]]]:
    """The arrays of an operand with the names of their dimensions; a boxed value knows them."""
    if not isinstance(tree, Boxed):
        return [(x, named) for x in jax.tree.leaves(tree)]
    found = list[tuple[Any, tuple[str, ...]]]()
    tree.mapped(lambda x, own: found.append((x, own)))
    return found


def _instead(dimension: str) -> str:
    """What to do about a dimension that is sharded and must not be."""
    if dimension == "pages":
        return "use fa4_jax.parallel.local_decode, or jax.sharding.reshard it before"
    if "length" in dimension:
        return "use fa4_jax.parallel.attention, or jax.sharding.reshard it before"
    return "jax.sharding.reshard it before"


def _longest(dimension: str, found: dict[str, Axes]) -> Axes:
    """The finest sharding of a dimension, which the others must be coarser forms of.

    Raises:
      ValueError: they are not.
    """
    name = max(found, key=lambda name: len(found[name]))
    for other, axes in found.items():
        if found[name][: len(axes)] != axes:
            raise ValueError(
                f"{name} is sharded along its {dimension} over mesh axes {found[name]}, but "
                f"{other} over {axes}"
            )
    return found[name]
