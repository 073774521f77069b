"""The forward and backward operations, with their vmap rules: an unbatched operand is not copied.

Both implementations share the rules, since they are chosen below them (`dispatch`), when the
program is lowered and the platform is known.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from fa4_jax import dispatch, mesh_types, xla
from fa4_jax.operands import Cotangents, Direction, Gradients, Operands, Results, Tangents
from fa4_jax.plan import Kernel, Plan
from fa4_jax.problem import Problem

Way = Literal["native", "fold", "heads", "loop"]


def _fold(tree: Any, batched: Any, size: int) -> Any:
    """[V, B, ...] -> [V * B, ...] for every array; an unbatched one (small) is repeated."""

    def fold(x: jax.Array, has_axis: bool) -> jax.Array:
        if not has_axis:
            x = jnp.broadcast_to(x[None], (size, *x.shape))
        return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])

    return jax.tree.map(fold, tree, batched)


def _fold_operands(operands: Operands, flags: Operands, size: int) -> Operands:
    """Folds operands like `_fold`; what is shared by all entries of the batch stays so.

    One offset stays one, several become one for each; ranges and bits of one for all stay one.
    """
    b = operands.query.shape[1]
    shared = dict.fromkeys(("offset", "rows", "soft_cap", "sinks", "bits"))
    folded = _fold(operands._replace(**shared), flags._replace(**shared), size)

    def each(x: jax.Array, has_axis: bool) -> jax.Array:
        x = x if has_axis else x[None]
        x = jnp.broadcast_to(x, (size, b, *x.shape[2:]))
        return x.reshape(size * b, *x.shape[2:])

    def of_batch(tree: Any, flags: Any) -> Any:
        own = any(jax.tree.leaves(flags)) or any(x.shape[0] > 1 for x in jax.tree.leaves(tree))
        return jax.tree.map(each, tree, flags) if own else tree

    rows = of_batch(operands.rows, flags.rows)
    bits = of_batch(operands.bits, flags.bits)
    offset = None if flags.offset else operands.offset
    cap, sinks = operands.soft_cap, operands.sinks
    return folded._replace(offset=offset, rows=rows, soft_cap=cap, sinks=sinks, bits=bits)


def _way(problem: Problem, kernels: tuple[Kernel, ...], flags: Operands, operands: Operands) -> Way:
    """The way in which a batch of calls runs; the forward alone takes "heads".

    JAX batches no launch of `kernels`.
    """
    own_rows = any(jax.tree.leaves((flags.rows, flags.bits)))
    evaluated = problem.has_mask and operands.bits is None
    traced = problem.scale is None or (operands.soft_cap is not None and not kernels)
    if problem.bias is not None and kernels:
        return "loop"
    if problem.bias is not None or problem.has_score_fn or evaluated or traced:
        # JAX's batching of loops of several lengths copies what they carry at every step.
        own_blocks = flags.extents if operands.offset is None else flags.offset
        return "loop" if own_rows or (problem.band and own_blocks) else "native"
    if flags.soft_cap or flags.sinks:
        return "loop"
    if flags.query and flags.key and flags.value:
        return "fold"
    shared = not (flags.key or flags.value or flags.extents or own_rows)
    shared &= operands.bits is None or operands.bits.words.shape[1] == 1
    return "heads" if flags.query and shared else "loop"


def _unfold(tree: Any, size: int) -> Any:
    """[V * B, ...] -> [V, B, ...]."""
    return jax.tree.map(lambda x: x.reshape(size, x.shape[0] // size, *x.shape[1:]), tree)


def _no_instances(tree: Any, args: Any) -> Any:
    """[0, ...] for every array [...]; they vary as `args` do."""
    axes = mesh_types.union_varying(jax.tree.leaves(args))
    return jax.tree.map(
        lambda x: mesh_types.cast_varying(jnp.zeros((0, *x.shape), x.dtype), axes), tree
    )


def _no_gradients(flags: Operands, operands: Operands) -> Gradients:
    """Gradients of operands of which those that are batched have no instance."""
    one = jax.tree.map(
        lambda x, flag: jax.ShapeDtypeStruct(x.shape[1:] if flag else x.shape, x.dtype),
        operands,
        flags,
    )
    found = Gradients(one.query, one.key, one.value, one.bias, one.scale, one.soft_cap)
    return _no_instances(found, operands)


def one_by_one(function: Callable[..., Any], batched: Any, args: Any) -> Any:
    """Maps over the batched leaves in a loop; the others are used in place."""
    leaves, structure = jax.tree.flatten(args)
    flags = jax.tree.leaves(batched)

    def call(mapped: list[jax.Array]) -> Any:
        rest = iter(mapped)
        merged = [next(rest) if flag else x for x, flag in zip(leaves, flags, strict=True)]
        return function(*jax.tree.unflatten(structure, merged))

    return jax.lax.map(call, [x for x, flag in zip(leaves, flags, strict=True) if flag])


def _native(function: Callable[..., Any], batched: Any, args: Any) -> Any:
    """JAX's own batching."""
    return jax.vmap(function, in_axes=jax.tree.map(lambda flag: 0 if flag else None, batched))(
        *args
    )


def _mapped_axes(flags: Any, args: Any) -> tuple[str, ...]:
    """Explicit mesh axes over which the instances lie."""
    leaves = zip(jax.tree.leaves(args), jax.tree.leaves(flags), strict=True)
    return max((mesh_types.explicit_axes(x)[0] for x, flag in leaves if flag), key=len, default=())


def _on_devices(
    function: Callable[..., Any], axes: tuple[str, ...], flags: tuple[Any, ...], args: Any
) -> Any:
    """Each device runs the instances that it has; not differentiated: the rule is below that."""
    mesh = jax.sharding.get_abstract_mesh()
    specs = jax.tree.map(lambda flag: PartitionSpec(axes) if flag else PartitionSpec(), flags)
    args = jax.tree.map(
        lambda x, spec: jax.sharding.reshard(x, NamedSharding(mesh, spec)), args, specs
    )

    def local(*args: Any) -> Any:
        varying = mesh_types.union_varying(jax.tree.leaves(args))
        args = jax.tree.map(lambda x: mesh_types.cast_varying(x, varying), args)
        return _native(function, flags, args)

    return jax.shard_map(
        local, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(axes), axis_names=set(axes)
    )(*args)


def _all_true(tree: Any) -> Any:
    return jax.tree.map(lambda _: True, tree)


@functools.lru_cache(maxsize=512)
def forward(plan: Plan) -> Callable[[Operands], Results]:
    """Output [B, T, N, H], log-sum-exp [B, N, T] and largest scores of Operands, for one plan."""
    run = functools.partial(dispatch.forward, plan)
    operation = jax.custom_batching.custom_vmap(lambda operands: run(operands))

    @operation.def_vmap
    def rule(size: int, batched: list[Operands], operands: Operands) -> Any:
        (flags,) = batched
        if size == 0:
            out = _no_instances(xla.nothing(plan.problem, operands), operands)
        elif axes := _mapped_axes(flags, operands):
            out = _on_devices(operation, axes, (flags,), (operands,))
        elif (way := _way(plan.problem, plan.forward, flags, operands)) == "native":
            out = _native(run, (flags,), (operands,))
        elif way == "fold":
            folded = plan.resized(batch=size * plan.problem.batch)
            out = _unfold(forward(folded)(_fold_operands(operands, flags, size)), size)
        elif way == "heads":
            out = _forward_in_heads(plan, size, operands)
        else:
            out = one_by_one(operation, (flags,), (operands,))
        return out, _all_true(out)

    return operation


def _forward_in_heads(plan: Plan, size: int, operands: Operands) -> Results:
    """Batched queries of the same keys: more query heads in each key head's group."""
    problem = plan.problem
    b, t, k, g = problem.batch, problem.query_length, problem.kv_heads, problem.group
    h, value_dim = problem.head_dims
    q = operands.query.reshape(size, b, t, k, g, h).transpose(1, 2, 3, 4, 0, 5)
    q = q.reshape(b, t, k * g * size, h)
    sinks = None if operands.sinks is None else jnp.repeat(operands.sinks, size)
    more = operands._replace(query=q, sinks=sinks)
    o, lse, top = forward(plan.resized(query_heads=k * g * size))(more)
    o = o.reshape(b, t, k * g, size, value_dim).transpose(3, 0, 1, 2, 4)
    top = None if top is None else top.reshape(b, k * g, size).transpose(2, 0, 1)
    return Results(o, lse.reshape(b, k * g, size, t).transpose(2, 0, 1, 3), top)


@functools.lru_cache(maxsize=512)
def backward(plan: Plan) -> Callable[[Operands, Cotangents], Gradients]:
    """Gradients of the operands, for one plan."""
    run = functools.partial(dispatch.backward, plan)
    operation = jax.custom_batching.custom_vmap(lambda *args: run(*args))

    @operation.def_vmap
    def rule(size: int, batched: list[Any], operands: Operands, cotangents: Cotangents) -> Any:
        flags = tuple(batched)
        args = (operands, cotangents)
        if size == 0:
            out = _no_gradients(flags[0], operands)
        elif axes := _mapped_axes(flags, args):
            out = _on_devices(operation, axes, flags, args)
        elif (way := _way(plan.problem, plan.backward, flags[0], operands)) == "native":
            out = _native(run, flags, args)
        elif way == "fold":
            folded = plan.resized(batch=size * plan.problem.batch)
            own = _fold_operands(operands, flags[0], size)
            out = _unfold(backward(folded)(own, _fold(cotangents, flags[1], size)), size)
        else:
            # Each instance has a gradient of its own for an operand that all of them share.
            out = one_by_one(operation, flags, args)
        return out, _all_true(out)

    return operation


@functools.lru_cache(maxsize=512)
def tangent(plan: Plan) -> Callable[[Operands, Direction], Results]:
    """Tangents of output and log-sum-exp, for one plan that has a launch for them."""
    run = functools.partial(dispatch.tangent, plan)
    operation = jax.custom_batching.custom_vmap(lambda *args: run(*args))

    @operation.def_vmap
    def rule(size: int, batched: list[Any], operands: Operands, direction: Direction) -> Any:
        flags, args = tuple(batched), (operands, direction)
        if size == 0:
            out = _no_instances(Results(direction.output, direction.lse), args)
        elif axes := _mapped_axes(flags, args):
            out = _on_devices(operation, axes, flags, args)
        elif _way(plan.problem, plan.tangent, flags[0], operands) == "fold":
            folded = plan.resized(batch=size * plan.problem.batch)
            own = _fold_operands(operands, flags[0], size)
            out = _unfold(tangent(folded)(own, _fold(direction, flags[1], size)), size)
        else:
            out = one_by_one(operation, flags, args)
        return out, _all_true(out)

    return operation


@functools.lru_cache(maxsize=512)
def hessian(plan: Plan) -> Callable[[Operands, Cotangents, Tangents], Gradients]:
    """How gradients of query, key and value move, for one plan that has launches for it."""
    run = functools.partial(dispatch.hessian, plan)
    operation = jax.custom_batching.custom_vmap(lambda *args: run(*args))

    @operation.def_vmap
    def rule(
        size: int,
        batched: list[Any],
        operands: Operands,
        cotangents: Cotangents,
        tangents: Tangents,
    ) -> Any:
        flags, args = tuple(batched), (operands, cotangents, tangents)
        if size == 0:
            out = _no_gradients(flags[0], operands)
        elif axes := _mapped_axes(flags, args):
            out = _on_devices(operation, axes, flags, args)
        elif _way(plan.problem, plan.hessian, flags[0], operands) == "fold":
            folded = plan.resized(batch=size * plan.problem.batch)
            own = _fold_operands(operands, flags[0], size)
            others = (_fold(x, flag, size) for x, flag in zip(args[1:], flags[1:], strict=True))
            out = _unfold(hessian(folded)(own, *others), size)
        else:
            out = one_by_one(operation, flags, args)
        return out, _all_true(out)

    return operation
