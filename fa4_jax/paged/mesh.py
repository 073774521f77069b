"""`decode` on Explicit mesh axes: the operands' types say how it is shared out.

A call is mapped over the devices, each with its own batch entries and heads. Every device has the
whole pool of pages, of its KV heads. On Auto axes the compiler does the same by itself.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding

from fa4_jax import mesh_types
from fa4_jax.operands import Results
from fa4_jax.paged.problem import PagedOperands, PagedPlan
from fa4_jax.sharding.explicit import explicit_split
from fa4_jax.sharding.split import Split, local_problem, own_heads, spec

_DIMENSIONS = {
    "query": ("batch", "length", "heads", "head_dim"),
    "key_pages": ("pages", "tokens of a page", "heads", "head_dim"),
    "value_pages": ("pages", "tokens of a page", "heads", "head_dim"),
    "page_table": ("batch", "table entries"),
    "extents": ("batch", "columns"),
    "scale": (),
    "soft_cap": (),
    "sinks": ("heads",),
    "key_scale": ("pages", "heads"),
    "value_scale": ("pages", "heads"),
}


def decode_on_mesh(
    attend: Callable[[PagedPlan, PagedOperands], Results], plan: PagedPlan, operands: PagedOperands
) -> Results:
    """attend(plan, operands), on the devices of the operands' Explicit mesh axes if there are any.

    Returns:
      Output and log-sum-exp, sharded along batch and heads as the operands are.

    Raises:
      ValueError: an operand is sharded along another dimension, or two are sharded in ways that do
        not fit together.
    """
    mesh = mesh_types.explicit_mesh(operands)
    return (
        attend(plan, operands) if mesh is None else _in_explicit_mesh(attend, plan, mesh, operands)
    )


# Jitted because types hold no devices: eagerly, shard_map would need them.
@functools.partial(jax.jit, static_argnums=(0, 1, 2), inline=True)
def _in_explicit_mesh(attend: Any, plan: PagedPlan, mesh: Any, operands: PagedOperands) -> Results:
    attention = plan.problem.attention
    split = explicit_split(attention, mesh, operands, _DIMENSIONS)
    specs = _specs(split, operands)
    operands = jax.tree.map(
        lambda x, spec: jax.sharding.reshard(x, NamedSharding(mesh, spec)), operands, specs
    )
    problem = dataclasses.replace(plan.problem, attention=local_problem(attention, split))
    local_plan = dataclasses.replace(plan, problem=problem)

    def local(operands: PagedOperands) -> Results:
        axes = mesh_types.union_varying(operands)
        operands = jax.tree.map(lambda x: mesh_types.cast_varying(x, axes), operands)
        key, value = (
            own_heads(split, attention, x) for x in (operands.key_pages, operands.value_pages)
        )
        key_scale, value_scale = (
            None if x is None else own_heads(split, attention, x[:, None, :, None])[:, 0, :, 0]
            for x in (operands.key_scale, operands.value_scale)
        )
        own = operands._replace(
            key_pages=key, value_pages=value, key_scale=key_scale, value_scale=value_scale
        )
        return attend(local_plan, own)

    # Left empty it means all axes but those that an enclosing vmap maps over.
    only = set() if mesh.explicit_axes == mesh.axis_names else set(mesh.explicit_axes)
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(specs,),
        out_specs=split.results(attention),
        axis_names=only,
    )(operands)


def _specs(split: Split, operands: PagedOperands) -> Any:
    """Shardings of all operands."""
    pages, scales = spec((), (), split.kv_heads, ()), spec((), split.kv_heads)
    each: dict[str, Any] = {
        "query": split.query,
        "key_pages": pages,
        "value_pages": pages,
        "page_table": spec(split.batch, ()),
        "extents": spec(split.batch, ()),
        "scale": spec(),
        "soft_cap": spec(),
        "sinks": spec(split.heads),
        "key_scale": scales,
        "value_scale": scales,
    }
    found: Any = {name: None if x is None else each[name] for name, x in operands._asdict().items()}
    return PagedOperands(**found)
