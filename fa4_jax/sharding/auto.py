"""Attention on Auto mesh axes: the compiler shares it out, by a rule for the kernels' launches.

The compiler cannot see into a launch, so `forward` and `backward` wrap it in a partitioning rule.
The pure-JAX implementation it partitions by itself. An operand that is sharded along its length or
head_dim is gathered, and the former is logged.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from fa4_jax import launches, log
from fa4_jax.operands import (
    Cotangents,
    Direction,
    Gradients,
    MaskBits,
    Operands,
    Results,
    RowRanges,
    Tangents,
)
from fa4_jax.plan import Plan
from fa4_jax.problem import Problem
from fa4_jax.sharding.split import Axes, Split, local_plan, make_split, own_heads, shards


def forward(plan: Plan, operands: Operands) -> Results:
    """`launches.forward`, partitioned by batch and heads on Auto mesh axes."""

    def local(split: Split, operands: Operands) -> Results:
        key, value = (own_heads(split, plan.problem, x) for x in (operands.key, operands.value))
        own = operands._replace(key=key, value=value)
        return launches.forward(local_plan(plan, split), own)

    q, k, lse = _factors(plan.problem)
    cap = [] if operands.soft_cap is None else [""]
    sinks = [] if operands.sinks is None else ["n"]
    bits = _factors_of_bits(operands.bits)
    largest = ["b n"] if plan.problem.returns_max_logit else []
    rows = [*_factors_of_bias(operands.bias), *_factors_of_rows(operands.rows)]
    taken = ", ".join([q, k, k, "b e", *rows, *cap, *sinks, *bits])
    rule = f"{taken} -> {', '.join([q, lse, *largest])}"
    return partitioned(local, _sharing(plan.problem, rule))(operands._replace(offset=None))


def backward(plan: Plan, operands: Operands, cotangents: Cotangents) -> Gradients:
    """`launches.backward`, partitioned by batch and heads on Auto mesh axes."""
    alike = [tuple(size == 1 for size in x.shape[:2]) for x in jax.tree.leaves(operands.bias)]

    def local(split: Split, operands: Operands, cotangents: Cotangents) -> Gradients:
        def run(*of_keys: jax.Array) -> Gradients:
            own = operands._replace(key=of_keys[0], value=of_keys[1])
            found = launches.backward(local_plan(plan, split), own, cotangents)
            return found._replace(bias=_over_devices(found.bias, alike, split))

        return _of_own_heads(plan.problem, split, run, (operands.key, operands.value))

    q, k, lse = _factors(plan.problem)
    bias = _factors_of_bias(operands.bias)
    rows = [*bias, *_factors_of_rows(operands.rows), *_factors_of_bits(operands.bits)]
    taken = ", ".join([q, k, k, "b e", *rows, q, lse, q, lse])
    rule = f"{taken} -> {', '.join([q, k, k, *bias])}"
    sharing = _sharing(plan.problem, rule)
    return partitioned(local, sharing)(operands._replace(offset=None), cotangents)


def tangent(plan: Plan, operands: Operands, direction: Direction) -> Results:
    """`launches.tangent`, partitioned by batch and heads on Auto mesh axes."""

    def local(split: Split, operands: Operands, direction: Direction) -> Results:
        key, value, *moved = (
            own_heads(split, plan.problem, x)
            for x in (operands.key, operands.value, direction.key, direction.value)
        )
        own = operands._replace(key=key, value=value)
        direction = direction._replace(key=moved[0], value=moved[1])
        return launches.tangent(local_plan(plan, split), own, direction)

    q, k, lse = _factors(plan.problem)
    rule = f"{', '.join([q, k, k, 'b e', q, lse, q, k, k])} -> {q}, {lse}"
    sharing = _sharing(plan.problem, rule)
    return partitioned(local, sharing)(operands._replace(offset=None), direction)


def hessian(
    plan: Plan, operands: Operands, cotangents: Cotangents, tangents: Tangents
) -> Gradients:
    """`launches.hessian`, partitioned by batch and heads on Auto mesh axes."""

    def local(
        split: Split, operands: Operands, cotangents: Cotangents, tangents: Tangents
    ) -> Gradients:
        def run(*of_keys: jax.Array) -> Gradients:
            key, value, *moved = of_keys
            own = operands._replace(key=key, value=value)
            direction = tangents._replace(key=moved[0], value=moved[1])
            return launches.hessian(local_plan(plan, split), own, cotangents, direction)

        of_keys = operands.key, operands.value, tangents.key, tangents.value
        return _of_own_heads(plan.problem, split, run, of_keys)

    q, k, lse = _factors(plan.problem)
    rule = f"{', '.join([q, k, k, 'b e', q, lse, q, lse, q, k, k, q, lse])} -> {q}, {k}, {k}"
    sharing = _sharing(plan.problem, rule)
    return partitioned(local, sharing)(operands._replace(offset=None), cotangents, tangents)


def _of_own_heads(
    problem: Problem, split: Split, run: Callable[..., Gradients], of_keys: tuple[Any, ...]
) -> Gradients:
    """What `run` returns of a device's heads of arrays like key; sums where devices share heads.

    of_keys: key and value, then others like them.
    """
    if not split.copied:
        return run(*of_keys)
    own_part = functools.partial(own_heads, split, problem)
    parts, transposes = zip(*(jax.vjp(own_part, x) for x in of_keys), strict=True)
    found = run(*parts)
    key, value = (
        jax.lax.psum(back(x)[0].astype(jnp.float32), split.copied).astype(x.dtype)
        for back, x in zip(transposes[:2], (found.key, found.value), strict=True)
    )
    return found._replace(key=key, value=value)


def _over_devices(bias: Any, alike: list[tuple[bool, bool]], split: Split) -> Any:
    """The gradient of a bias: what is alike for batch entries or heads, summed over their devices.

    alike: for each array, whether all batch entries, and all heads, share it.
    """
    leaves, structure = jax.tree.flatten(bias)
    found = list[jax.Array]()
    for x, (batch, heads) in zip(leaves, alike, strict=True):
        axes = (split.batch if batch else ()) + (split.heads if heads else ())
        found.append(jax.lax.psum(x.astype(jnp.float32), axes).astype(x.dtype) if axes else x)
    return jax.tree.unflatten(structure, found)


def _factors(problem: Problem) -> tuple[str, str, str]:
    """Dimensions of query, of key and of the log-sum-exp in a Shardy rule.

    Query and KV heads are one factor only if there are as many. With a factor for groups and one
    for their members Shardy would cut mesh axes in two, and collectives cannot name half an axis.
    """
    kv_heads = "n" if problem.group == 1 else "k"
    return "b t n h", f"b s {kv_heads} h", "b n t"


def _factors_of_bias(bias: Any) -> list[str]:
    """Dimensions of a bias's arrays; those of one batch entry or head for all stay whole."""
    found = list[str]()
    for x in jax.tree.leaves(bias):
        batch, heads, *_ = x.shape
        found.append(f"{'b' if batch > 1 else 'p'} {'n' if heads > 1 else 'q'} x y"[: 2 * x.ndim])
    return found


def _factors_of_rows(rows: RowRanges | None) -> list[str]:
    """Dimensions of the arrays of row ranges; those of one batch entry for all stay whole."""
    if rows is None:
        return []
    b = "b" if rows.low.shape[0] > 1 else "o"
    tags = [] if rows.tags is None else [f"{b} t", f"{b} t", f"{b} s", f"{b} u"]
    return [f"{b} t", f"{b} t", f"{b} u w", *tags]


def _factors_of_bits(bits: MaskBits | None) -> list[str]:
    """Dimensions of the arrays of bits; those of one batch entry or head for all stay whole."""
    if bits is None:
        return []
    batch, heads = bits.words.shape[:2]
    b, n = "b" if batch > 1 else "p", "n" if heads > 1 else "q"
    states = f"{b} {n} x z"
    return [f"{b} {n} x y r", states, states, f"{b} {n} u c", f"{b} {n} x", f"{b} {n} g"]


@dataclasses.dataclass(frozen=True)
class Sharing:
    """How the compiler may share an operation out.

    Attributes:
      rule: Shardy's, over the flat operands. Its factors a (pools), b (batch), n and k (heads) may
        be sharded; the others are whole on every device.
      split: from a mesh and the operands, as the compiler has sharded them, to what that means.
      specs: from the split and the operands to the shardings of operands and results.
    """

    rule: str
    split: Callable[[Mesh, tuple[Any, ...]], Split]
    specs: Callable[[Split, tuple[Any, ...]], tuple[Any, Any]]


def _sharing(problem: Problem, rule: str) -> Sharing:
    """That of operands alone, or also of cotangents or tangents."""

    def split(mesh: Mesh, args: tuple[Any, ...]) -> Split:
        q, k = args[0].query, args[0].key
        _tell_of_gathering(mesh, args[0])
        return auto_split(problem, mesh, ((q, 0), (k, 0)), ((q, 2), (k, 2)))

    def specs(split: Split, args: tuple[Any, ...]) -> tuple[Any, Any]:
        own = split.operands(args[0])
        if len(args) == 1:
            return (own,), split.results(problem)
        if isinstance(args[1], Direction):
            moved = Direction(split.query, split.lse, split.query, split.key, split.key)  # type: ignore[arg-type]
            return (own, moved), split.results(problem)
        cotangents = Cotangents(split.query, split.lse, split.query, split.lse)  # type: ignore[arg-type]
        moved = Tangents(split.query, split.key, split.key, split.query, split.lse)  # type: ignore[arg-type]
        taken = (own, cotangents, moved)[: len(args)]
        return taken, Gradients(split.query, split.key, split.key, own.bias)  # type: ignore[arg-type]

    return Sharing(rule, split, specs)


def partitioned(local: Callable[..., Any], sharing: Sharing) -> Callable[..., Any]:
    """One device's work as an operation on all devices' operands.

    Args:
      local: takes a Split and the device's parts of the operands.
    """
    enclosing = jax.sharding.get_abstract_mesh()
    if not enclosing.empty and enclosing.manual_axes == enclosing.axis_names:
        return functools.partial(local, Split())

    def partition(mesh: Mesh, args: tuple[Any, ...], _: Any) -> Any:
        if enclosing.manual_axes:
            mesh = _rest(enclosing, args)
        split = sharing.split(mesh, args)
        if enclosing.manual_axes:
            # The compiler's mesh is that of one group of devices, whose axis_index and psum are not
            # those of the program. Where query heads follow the KV heads neither is needed.
            split = dataclasses.replace(split, heads=split.kv_heads)
        arg_shardings, result_shardings = (
            jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
            for specs in sharing.specs(split, args)
        )
        return mesh, functools.partial(_without_mesh, local, split), result_shardings, arg_shardings

    operation = custom_partitioning(lambda *args: local(Split(), *args))
    operation.def_partition(
        partition,
        sharding_rule=sharing.rule,
        # In the order of the rule, as the compiler asks for.
        need_replication_factors=tuple(dict.fromkeys(re.findall("[c-jlmo-z]", sharing.rule))),
        # A sharding may divide a mesh axis, which no PartitionSpec can name: `mesh_axes` takes the
        # whole axes only.
        decode_shardings=False,
    )
    return operation


def _without_mesh(local: Callable[..., Any], *args: Any) -> Any:
    """Calls local, traced for one device, though the compiler runs within the caller's set_mesh."""
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        return local(*args)


def _rest(enclosing: Any, args: tuple[Any, ...]) -> Mesh:
    """Inside a shard_map over some of the axes: the mesh of the others, of one group of devices."""
    sizes = [enclosing.shape[axis] for axis in enclosing.auto_axes]
    devices = list(jax.tree.leaves(args)[0].sharding.device_set)[: math.prod(sizes)]
    return Mesh(np.array(devices).reshape(sizes), enclosing.auto_axes)


Dimensions = Iterable[tuple[Any, int]]
"""Dimensions of operands; the first that is sharded counts."""


def first_axes(mesh: Mesh, dimensions: Dimensions) -> Axes:
    """Mesh axes over which the first of these dimensions that is sharded is so."""
    return next(filter(None, (mesh_axes(mesh, x, i) for x, i in dimensions)), ())


def auto_split(
    problem: Problem, mesh: Mesh, batch: Dimensions, heads: Dimensions, pools: Dimensions = ()
) -> Split:
    """The split that the compiler has chosen, as far as whole mesh axes describe it."""
    of_pools = first_axes(mesh, pools)
    of_batch = tuple(axis for axis in first_axes(mesh, batch) if axis not in of_pools)
    taken = of_pools + of_batch
    of_heads = tuple(axis for axis in first_axes(mesh, heads) if axis not in taken)
    while True:
        try:
            split = make_split(problem, of_batch, of_heads, mesh.shape)
            return dataclasses.replace(split, pools=of_pools)
        except ValueError:
            of_heads = of_heads[:-1]


def _tell_of_gathering(mesh: Mesh, operands: Operands) -> None:
    """Says once that a sequence is gathered, and what does not."""
    for name, x in zip(("query", "key", "value"), operands[:3], strict=True):
        if axes := mesh_axes(mesh, x, 1):
            log.warn_once(
                f"{name} {x.shape} is sharded along its length, over mesh axis "
                f"{' and '.join(map(repr, axes))}: every device gathers it whole; "
                "fa4_jax.parallel.attention works on the shards"
            )


def mesh_axes(mesh: Mesh, x: Any, dimension: int) -> Axes:
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
    return axes if x.shape[dimension] % shards(axes, mesh.shape) == 0 else ()
