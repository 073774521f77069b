"""Attention on a mesh: batch and heads are shared out, lengths and head_dim never are.

Each device attends with its own batch entries and its own heads, so the forward needs no
communication. Who shares out depends on the type of the mesh axes:

- Auto: the compiler. `forward` and `backward` wrap the kernel launches, which it cannot see into,
  in a partitioning rule; the pure-JAX implementation it partitions by itself. An operand sharded
  along its length or head_dim is gathered, and the former is logged.
- Explicit: `in_mesh` maps over the devices, by what the operands' types say. An operand sharded
  along its length or head_dim is a ValueError.
- Manual (inside the caller's own shard_map): nobody. A call is the attention of one device.

KV heads are sharded as their query heads, over as many of the mesh axes as they suffice for. Over
the others each device takes the KV heads that its query heads need from a copy of them, and dK and
dV are summed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from fa4_jax import launches, log, mesh_types
from fa4_jax.operands import Cotangents, Gradients, Operands
from fa4_jax.plan import Plan
from fa4_jax.problem import Problem

Axes = tuple[str, ...]
Result = tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class Split:
    """Mesh axes, major first, over which one call is shared out.

    Attributes:
      batch, heads: axes of the batch and of the query heads.
      kv_heads: those of `heads`, from the first, that the KV heads are sharded over too.
      sizes: of the axes.
    """

    batch: Axes = ()
    heads: Axes = ()
    kv_heads: Axes = ()
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def copied(self) -> Axes:
        """Axes over which query heads are sharded but KV heads are copied."""
        return self.heads[len(self.kv_heads) :]

    @property
    def query(self) -> PartitionSpec:
        """Of query and output, [B, T, N, H]."""
        return _spec(self.batch, (), self.heads, ())

    @property
    def key(self) -> PartitionSpec:
        """Of key and value, [B, S, K, H]."""
        return _spec(self.batch, (), self.kv_heads, ())

    @property
    def lse(self) -> PartitionSpec:
        """Of the log-sum-exp, [B, N, T]."""
        return _spec(self.batch, self.heads, ())

    def operands(self, operands: Operands) -> Any:
        """Of all operands. Axes of size 1 of a dense one, [B|1, N|1, T|1, S|1], stay whole."""

        def dense(x: jax.Array | None) -> PartitionSpec | None:
            if x is None:
                return None
            batch, heads, _, _ = x.shape
            return _spec(self.batch if batch > 1 else (), self.heads if heads > 1 else (), (), ())

        return operands._replace(
            query=self.query,
            key=self.key,
            value=self.key,
            extents=_spec(self.batch, ()),
            bias=dense(operands.bias),
            mask=dense(operands.mask),
            scale=None if operands.scale is None else _spec(),
        )


def _spec(*dimensions: Axes) -> Any:
    return PartitionSpec(*(axes or None for axes in dimensions))


def _shards(axes: Axes, sizes: Mapping[str, int]) -> int:
    """Parts that mesh axes cut a dimension into."""
    return math.prod(sizes[axis] for axis in axes)


def make_split(problem: Problem, batch: Axes, heads: Axes, sizes: Mapping[str, int]) -> Split:
    """With KV heads on as many axes of the query heads as they suffice for.

    Raises:
      ValueError: the query heads of one device would be parts of several groups.
    """
    own = problem.query_heads // _shards(heads, sizes)
    if own % problem.group and problem.group % own:
        raise ValueError(
            f"query's {problem.query_heads} heads are sharded over mesh axes {heads}: a device's "
            f"{own} would be parts of several groups of {problem.group} that share a KV head"
        )
    count = len(heads)
    while problem.kv_heads % _shards(heads[:count], sizes):
        count -= 1
    return Split(batch, heads, heads[:count], dict(sizes))


def own_heads(split: Split, problem: Problem, x: jax.Array) -> jax.Array:
    """KV heads that this device's query heads need, of those that it holds.

    Args:
      problem: of all devices together.
      x: this device's part of key or value, [B, S, K', H].
    """
    if not split.copied:
        return x
    heads = problem.query_heads // _shards(split.heads, split.sizes)
    first = jax.lax.axis_index(split.heads) * heads // problem.group
    if split.kv_heads:
        first -= jax.lax.axis_index(split.kv_heads) * x.shape[2]
    return jax.lax.dynamic_slice_in_dim(x, first, max(1, heads // problem.group), axis=2)


def _local_plan(plan: Plan, split: Split) -> Plan:
    """The launches of one device, which has the heads of `own_heads`."""
    problem = plan.problem
    heads = problem.query_heads // _shards(split.heads, split.sizes)
    kv_heads = heads // problem.group if heads % problem.group == 0 else 1
    batch = problem.batch // _shards(split.batch, split.sizes)
    return plan.resized(batch=batch, query_heads=heads, kv_heads=kv_heads)


# Explicit axes: the types say everything while the program is traced.


def in_mesh(attend: Callable[[Plan, Operands], Result], plan: Plan, operands: Operands) -> Result:
    """attend(plan, operands), on the devices of the operands' Explicit mesh axes if there are any.

    Returns:
      Output and log-sum-exp, sharded along batch and heads as the operands are.

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
def _in_explicit_mesh(attend: Any, plan: Plan, mesh: Any, operands: Operands) -> Result:
    split = _explicit_split(plan.problem, mesh, operands)
    specs = split.operands(operands)
    operands = jax.tree.map(
        lambda x, spec: jax.sharding.reshard(x, NamedSharding(mesh, spec)), operands, specs
    )

    def local(operands: Operands) -> Result:
        # Outside the custom derivative: the cast's transpose sums the gradients of copies.
        axes = mesh_types.union_varying(operands)
        operands = jax.tree.map(lambda x: mesh_types.cast_varying(x, axes), operands)
        key, value = (own_heads(split, plan.problem, x) for x in (operands.key, operands.value))
        return attend(_local_plan(plan, split), operands._replace(key=key, value=value))

    # Left empty it means all axes but those that an enclosing vmap maps over.
    only = set() if mesh.explicit_axes == mesh.axis_names else set(mesh.explicit_axes)
    output, lse = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(specs,),
        out_specs=(split.query, split.lse),
        axis_names=only,
    )(operands)
    # The name makes the result used: JAX 0.8 fails where a residual is a result that nobody uses.
    return output, checkpoint_name(lse, "fa4_jax_lse_in_mesh")


_DIMENSIONS = {
    "query": ("batch", "length", "heads", "head_dim"),
    "key": ("batch", "length", "heads", "head_dim"),
    "value": ("batch", "length", "heads", "head_dim"),
    "extents": ("batch", "columns"),
    "bias": ("batch", "heads", "query length", "key length"),
    "mask": ("batch", "heads", "query length", "key length"),
    "offset": (),
    "scale": (),
}


def _explicit_split(problem: Problem, mesh: Any, operands: Operands) -> Split:
    """From the operands' types.

    Raises:
      ValueError: as `in_mesh`.
    """
    found: dict[str, dict[str, Axes]] = {"batch": {}, "heads": {}}
    for name, x in operands._asdict().items():
        for dimension, axes in zip(_DIMENSIONS[name], mesh_types.explicit_axes(x), strict=False):
            if dimension in found:
                found[dimension][name] = axes
            elif axes:
                raise ValueError(
                    f"{name} is sharded along its {dimension}, over mesh axis "
                    f"{' and '.join(map(repr, axes))}: fa4_jax.attention is shared out by batch "
                    f"and heads only; {_instead(dimension)}"
                )
    batch, heads = (_longest(dimension, axes) for dimension, axes in found.items())
    return make_split(problem, batch, heads, mesh.shape)


def _instead(dimension: str) -> str:
    """What to do about a dimension that is sharded and must not be."""
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


# Auto axes: the compiler asks, when it partitions the program.


def forward(plan: Plan, operands: Operands) -> Result:
    """`launches.forward`, partitioned by batch and heads on Auto mesh axes."""

    def local(split: Split, operands: Operands) -> Result:
        key, value = (own_heads(split, plan.problem, x) for x in (operands.key, operands.value))
        own = operands._replace(key=key, value=value)
        return launches.forward(_local_plan(plan, split), own)

    q, k, lse = _factors(plan.problem)
    rule = f"{q}, {k}, {k}, b e -> {q}, {lse}"
    return _partitioned(plan.problem, local, rule)(operands._replace(offset=None))


def backward(plan: Plan, operands: Operands, cotangents: Cotangents) -> Gradients:
    """`launches.backward`, partitioned by batch and heads on Auto mesh axes."""

    def local(split: Split, operands: Operands, cotangents: Cotangents) -> Gradients:
        if not split.copied:
            return launches.backward(_local_plan(plan, split), operands, cotangents)
        own_part = functools.partial(own_heads, split, plan.problem)
        key, key_transpose = jax.vjp(own_part, operands.key)
        value, value_transpose = jax.vjp(own_part, operands.value)
        own = operands._replace(key=key, value=value)
        gradients = launches.backward(_local_plan(plan, split), own, cotangents)
        (dk,), (dv,) = key_transpose(gradients.key), value_transpose(gradients.value)
        dk, dv = (
            jax.lax.psum(x.astype(jnp.float32), split.copied).astype(x.dtype) for x in (dk, dv)
        )
        return gradients._replace(key=dk, value=dv)

    q, k, lse = _factors(plan.problem)
    rule = f"{q}, {k}, {k}, b e, {q}, {lse}, {q}, {lse} -> {q}, {k}, {k}"
    return _partitioned(plan.problem, local, rule)(operands._replace(offset=None), cotangents)


def _factors(problem: Problem) -> tuple[str, str, str]:
    """Dimensions of query, of key and of the log-sum-exp in a Shardy rule.

    Query and KV heads are one factor only if there are as many. With a factor for groups and one
    for their members Shardy would cut mesh axes in two, and collectives cannot name half an axis.
    """
    kv_heads = "n" if problem.group == 1 else "k"
    return "b t n h", f"b s {kv_heads} h", "b n t"


def _partitioned(problem: Problem, local: Callable[..., Any], rule: str) -> Callable[..., Any]:
    """One device's work as an operation on all devices' operands.

    Args:
      local: takes a Split and the device's parts of the operands.
      rule: Shardy's, over the flat operands.
    """
    enclosing = jax.sharding.get_abstract_mesh()
    if not enclosing.empty and enclosing.manual_axes == enclosing.axis_names:
        return functools.partial(local, Split())

    def partition(mesh: Mesh, args: tuple[Any, ...], _: Any) -> Any:
        operands = args[0]
        if enclosing.manual_axes:
            mesh = _rest(enclosing, operands)
        split = _auto_split(problem, mesh, operands)
        _tell_of_gathering(mesh, operands)
        if enclosing.manual_axes:
            # Devices are counted within the rest: indices and sums would not mean what they say.
            split = dataclasses.replace(split, heads=split.kv_heads)
        arg_specs: Any = (split.operands(operands),)
        result_specs: Any = (split.query, split.lse)
        if len(args) == 2:
            arg_specs += (Cotangents(split.query, split.lse, split.query, split.lse),)  # type: ignore[arg-type]
            result_specs = Gradients(split.query, split.key, split.key, None)  # type: ignore[arg-type]
        arg_shardings, result_shardings = (
            jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
            for specs in (arg_specs, result_specs)
        )
        return mesh, functools.partial(_without_mesh, local, split), result_shardings, arg_shardings

    operation = custom_partitioning(lambda *args: local(Split(), *args))
    operation.def_partition(
        partition,
        sharding_rule=rule,
        need_replication_factors=("t", "h", "s", "e"),
        # Shardings may cut a mesh axis in two, which has no name: `_mesh_axes` makes do with it.
        decode_shardings=False,
    )
    return operation


def _without_mesh(local: Callable[..., Any], *args: Any) -> Any:
    """Calls local, traced for one device, though the compiler runs within the caller's set_mesh."""
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        return local(*args)


def _rest(enclosing: Any, operands: Operands) -> Mesh:
    """Inside a shard_map over some of the axes: the mesh of the others, of one group of devices."""
    sizes = [enclosing.shape[axis] for axis in enclosing.auto_axes]
    devices = list(operands.query.sharding.device_set)[: math.prod(sizes)]
    return Mesh(np.array(devices).reshape(sizes), enclosing.auto_axes)


def _auto_split(problem: Problem, mesh: Mesh, operands: Operands) -> Split:
    """From the shardings that the compiler has chosen, as far as whole mesh axes describe them."""
    q, k = operands.query, operands.key
    batch = _mesh_axes(mesh, q, 0) or _mesh_axes(mesh, k, 0)
    heads = _mesh_axes(mesh, q, 2) or _mesh_axes(mesh, k, 2)
    heads = tuple(axis for axis in heads if axis not in batch)
    while True:
        try:
            return make_split(problem, batch, heads, mesh.shape)
        except ValueError:
            heads = heads[:-1]


def _tell_of_gathering(mesh: Mesh, operands: Operands) -> None:
    """Says once that a sequence is gathered, and what does not."""
    for name, x in zip(("query", "key", "value"), operands[:3], strict=True):
        if axes := _mesh_axes(mesh, x, 1):
            log.warn_once(
                f"{name} {x.shape} is sharded along its length, over mesh axis "
                f"{' and '.join(map(repr, axes))}: every device gathers it whole; "
                "fa4_jax.parallel.attention works on the shards"
            )


def _mesh_axes(mesh: Mesh, x: Any, dimension: int) -> Axes:
    """Mesh axes that cut a dimension of x into equal parts, major first."""
    sharding = x.sharding._to_xla_hlo_sharding(x.ndim)
    if sharding.is_replicated() or mesh.empty:
        return ()
    tiles = np.array(sharding.tile_assignment_devices())
    tiles = tiles.reshape(sharding.tile_assignment_dimensions())
    part = np.empty(tiles.size, np.int64)  # of this dimension, by device
    part[tiles.ravel()] = np.indices(tiles.shape)[dimension].ravel()
    part = part.reshape(mesh.devices.shape)
    steps = {}
    for i, (axis, size) in enumerate(mesh.shape.items()):
        along = np.moveaxis(part, i, 0).reshape(size, -1)[:, 0]
        if size > 1 and len(np.unique(along)) == size:
            steps[axis] = along[1] - along[0]
    axes = tuple(sorted(steps, key=lambda axis: -steps[axis]))
    return axes if x.shape[dimension] % _shards(axes, mesh.shape) == 0 else ()
