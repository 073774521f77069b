"""The forward and backward operations, with their vmap rules: an unbatched operand is not copied.

Both implementations share the rules, since they are chosen below them (`_choose`), when the
program is lowered and the platform is known.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir

from fa4_jax import default, partition
from fa4_jax.default import Cotangents, Gradients, Operands
from fa4_jax.plan import Plan

ForwardResult = tuple[jax.Array, jax.Array]


# Zero, in programs that are never lowered: where implementation="kernel" meets another platform.
_refuse_p = Primitive("fa4_jax_refuse")


@_refuse_p.def_abstract_eval
def _refuse_type(*, platforms: tuple[str, ...]) -> Any:
    del platforms
    return jax.core.ShapedArray((), jnp.int32)


def _refuse_lowering(ctx: Any, *, platforms: tuple[str, ...]) -> Any:
    del ctx
    raise NotImplementedError(
        f"implementation='kernel': the kernels run on {' and '.join(platforms)}, but this program "
        "is compiled for another platform (where the operands lie, or what is exported for)"
    )


mlir.register_lowering(_refuse_p, _refuse_lowering)


def _choose(plan: Plan, kernel: Callable[..., Any], xla: Callable[..., Any], *args: Any) -> Any:
    """Runs `kernel` where the program is lowered for one of the plan's platforms, else `xla`."""

    def otherwise(*args: Any) -> Any:
        if not plan.insist:
            return xla(*args)
        zero = _refuse_p.bind(platforms=plan.platforms)
        return jax.tree.map(lambda x: x + zero.astype(x.dtype), xla(*args))

    branches = dict.fromkeys(plan.platforms, kernel)
    return jax.lax.platform_dependent(*args, default=otherwise, **branches)


def _run_forward(plan: Plan, operands: Operands) -> ForwardResult:
    xla = functools.partial(default.forward, plan.problem)
    if not plan.forward:
        return xla(operands)
    return _choose(plan, functools.partial(partition.forward, plan), xla, operands)


def _run_backward(plan: Plan, operands: Operands, cotangents: Cotangents) -> Gradients:
    xla = functools.partial(default.backward, plan.problem)
    if not plan.backward:
        return xla(operands, cotangents)
    return _choose(plan, functools.partial(partition.backward, plan), xla, operands, cotangents)


def _fold(tree: Any, batched: Any, size: int) -> Any:
    """[V, B, ...] -> [V * B, ...] for every array; an unbatched one (small) is repeated."""

    def fold(x: jax.Array, has_axis: bool) -> jax.Array:
        if not has_axis:
            x = jnp.broadcast_to(x[None], (size, *x.shape))
        return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])

    return jax.tree.map(fold, tree, batched)


def _unfold(tree: Any, size: int) -> Any:
    """[V * B, ...] -> [V, B, ...]."""
    return jax.tree.map(lambda x: x.reshape(size, x.shape[0] // size, *x.shape[1:]), tree)


def _one_by_one(function: Callable[..., Any], batched: Any, args: Any) -> Any:
    """Maps over the batched leaves in a loop; the others are used in place."""
    leaves, structure = jax.tree.flatten(args)
    flags = jax.tree.leaves(batched)

    def call(mapped: list[jax.Array]) -> Any:
        rest = iter(mapped)
        merged = [next(rest) if flag else x for x, flag in zip(leaves, flags, strict=True)]
        return function(*jax.tree.unflatten(structure, merged))

    return jax.lax.map(call, [x for x, flag in zip(leaves, flags, strict=True) if flag])


def _native(function: Callable[..., Any], batched: Any, args: Any) -> Any:
    """JAX's own batching of the pure-JAX implementation."""
    return jax.vmap(function, in_axes=jax.tree.map(lambda flag: 0 if flag else None, batched))(
        *args
    )


def _all_true(tree: Any) -> Any:
    return jax.tree.map(lambda _: True, tree)


@functools.lru_cache(maxsize=512)
def forward(plan: Plan) -> Callable[[Operands], ForwardResult]:
    """Output [B, T, N, H] and log-sum-exp [B, N, T] of Operands, for one plan."""
    run = functools.partial(_run_forward, plan)
    operation = jax.custom_batching.custom_vmap(lambda operands: run(operands))

    @operation.def_vmap
    def rule(size: int, batched: list[Operands], operands: Operands) -> Any:
        (flags,) = batched
        if plan.problem.has_bias or plan.problem.has_mask:
            out = _native(run, (flags,), (operands,))
        elif flags.query and flags.key and flags.value:
            folded = plan.resized(batch=size * plan.problem.batch)
            out = _unfold(forward(folded)(_fold(operands, flags, size)), size)
        elif flags.query and not (flags.key or flags.value or flags.extents):
            out = _forward_in_heads(plan, size, operands)
        else:
            out = _one_by_one(operation, (flags,), (operands,))
        return out, _all_true(out)

    return operation


def _forward_in_heads(plan: Plan, size: int, operands: Operands) -> ForwardResult:
    """Batched queries of the same keys: more query heads in each key head's group."""
    problem = plan.problem
    b, t, k, g = problem.batch, problem.query_length, problem.kv_heads, problem.group
    h, value_dim = problem.head_dims
    q = operands.query.reshape(size, b, t, k, g, h).transpose(1, 2, 3, 4, 0, 5)
    q = q.reshape(b, t, k * g * size, h)
    o, lse = forward(plan.resized(query_heads=k * g * size))(operands._replace(query=q))
    o = o.reshape(b, t, k * g, size, value_dim).transpose(3, 0, 1, 2, 4)
    return o, lse.reshape(b, k * g, size, t).transpose(2, 0, 1, 3)


@functools.lru_cache(maxsize=512)
def backward(plan: Plan) -> Callable[[Operands, Cotangents], Gradients]:
    """Gradients of the operands, for one plan."""
    run = functools.partial(_run_backward, plan)
    operation = jax.custom_batching.custom_vmap(lambda *args: run(*args))

    @operation.def_vmap
    def rule(size: int, batched: list[Any], operands: Operands, cotangents: Cotangents) -> Any:
        flags = tuple(batched)
        args = (operands, cotangents)
        if plan.problem.has_bias or plan.problem.has_mask:
            out = _native(run, flags, args)
        elif flags[0].query and flags[0].key and flags[0].value:
            folded = plan.resized(batch=size * plan.problem.batch)
            out = _unfold(backward(folded)(*_fold(args, flags, size)), size)
        else:
            # Each instance has a gradient of its own for an operand that all of them share.
            out = _one_by_one(operation, flags, args)
        return out, _all_true(out)

    return operation
