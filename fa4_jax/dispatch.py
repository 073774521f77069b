"""Forward and backward of a plan: the choice between the kernels and the default path.

It is made when a program is lowered. Only then is the platform known that it is for: where the
operands lie, or what it is exported for.
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

from fa4_jax import log, xla
from fa4_jax.operands import Cotangents, Direction, Gradients, Operands, Results, Tangents
from fa4_jax.plan import Plan, unsupported
from fa4_jax.sharding import auto

SECOND_DERIVATIVES = "second derivatives"
TANGENTS = f"tangents and {SECOND_DERIVATIVES}"

_zero_lowering = mlir.lower_fun(lambda: jnp.zeros((), jnp.int32), multiple_results=False)


def _zero_type(**params: Any) -> Any:
    del params
    return jax.core.ShapedArray((), jnp.int32)


# Stands for an int32 zero where implementation="kernel" meets what no kernel computes. Lowering it
# raises, so that no program runs that holds it.
_refuse_p = Primitive("fa4_jax_refuse")
_refuse_p.def_abstract_eval(_zero_type)


def _refuse_lowering(ctx: Any, *, message: str) -> Any:
    del ctx
    raise NotImplementedError(f"implementation='kernel': {message}")


mlir.register_lowering(_refuse_p, _refuse_lowering)

# Stands for an int32 zero in programs of the default path. Lowering it for CUDA logs why there is
# no kernel.
_left_out_p = Primitive("fa4_jax_left_out")
_left_out_p.def_abstract_eval(_zero_type)


def _left_out_lowering(ctx: Any, *, message: str) -> Any:
    log.warn_once(message)
    return _zero_lowering(ctx)


mlir.register_lowering(_left_out_p, lambda ctx, *, message: _zero_lowering(ctx))
mlir.register_lowering(_left_out_p, _left_out_lowering, platform="cuda")


def forward(plan: Plan, operands: Operands) -> Results:
    """Output [B, T, N, H], log-sum-exp [B, N, T] and largest scores."""
    default = functools.partial(xla.forward, plan.problem)
    if not plan.forward:
        return default(_left_out(plan, "forward and backward", operands))
    return choose(plan, functools.partial(auto.forward, plan), default, operands)


def backward(plan: Plan, operands: Operands, cotangents: Cotangents) -> Gradients:
    """Gradients of the operands.

    Raises:
      NotImplementedError: the caller insists on kernels, and there is none for the backward.
    """
    default = functools.partial(xla.backward, plan.problem)
    if not plan.backward:
        if plan.insist:
            raise NotImplementedError(f"implementation='kernel': backward: {plan.backward_reason}")
        own = _left_out(plan, "backward", operands) if plan.forward else operands
        return default(own, cotangents)
    return choose(plan, functools.partial(auto.backward, plan), default, operands, cotangents)


def tangent(plan: Plan, operands: Operands, direction: Direction) -> Results:
    """Tangents of output and log-sum-exp, of a plan that has a launch for them."""
    default = functools.partial(xla.tangent, plan.problem)
    return choose(plan, functools.partial(auto.tangent, plan), default, operands, direction)


def hessian(
    plan: Plan, operands: Operands, cotangents: Cotangents, tangents: Tangents
) -> Gradients:
    """How gradients of query, key and value move, of a plan that has launches for it."""
    default = functools.partial(xla.hessian, plan.problem)
    kernel = functools.partial(auto.hessian, plan)
    return choose(plan, kernel, default, operands, cotangents, tangents)


def choose(plan: Plan, kernel: Callable[..., Any], default: Callable[..., Any], *args: Any) -> Any:
    """Runs `kernel` in programs lowered for one of the plan's platforms, elsewhere `default`."""

    def otherwise(*args: Any) -> Any:
        if not plan.insist:
            return default(*args)
        zero = _refuse_p.bind(
            message=f"the kernels run on {' and '.join(plan.platforms)}, but this program is "
            "compiled for another platform (where the operands lie, or what is exported for)"
        )
        return jax.tree.map(lambda x: x + zero.astype(x.dtype), default(*args))

    branches = dict.fromkeys(plan.platforms, kernel)
    return jax.lax.platform_dependent(*args, default=otherwise, **branches)


def _left_out(plan: Plan, part: str, operands: Operands) -> Operands:
    """The operands of the default path, with a word in the log if it is lowered for CUDA.

    Args:
      part: of attention that has no kernel.
    """
    reason = plan.forward_reason or plan.backward_reason
    if reason is None or plan.declined:
        return operands
    message = f"attention uses the default path for its {part}: {reason}"
    if plan.arch is None and unsupported(plan.problem) is None:
        message += "; arch= names the GPU that a program is lowered for elsewhere"
    return operands._replace(extents=operands.extents + left_out(message))


def left_out(message: str) -> jax.Array:
    """An int32 zero for a program of the default path: lowering it for CUDA logs the message."""
    return _lowered(_left_out_p, message)


def _lowered(primitive: Primitive, message: str) -> jax.Array:
    """Binds a primitive that has a lowering alone, also where JAX traces no program."""
    return jax.jit(functools.partial(primitive.bind, message=message), inline=True)()


def of_derivatives(plan: Plan, operands: Operands) -> Operands:
    """The operands of tangents and second derivatives that the default path computes.

    Lowering them says so in the log, and raises NotImplementedError if the caller insists on
    kernels.
    """
    part = SECOND_DERIVATIVES if plan.tangent else TANGENTS
    if not plan.forward:
        return _left_out(plan, part, operands)
    reason = missing_derivatives(plan)
    if plan.insist:
        zero = _lowered(_refuse_p, reason)
    else:
        zero = left_out(f"attention uses the default path for its {part}: {reason}")
    return operands._replace(extents=operands.extents + zero)


def missing_derivatives(plan: Plan) -> str:
    """Why the default path computes what kernels of a plan's forward do not."""
    if plan.tangent:
        return plan.hessian_reason or f"no kernel computes these {SECOND_DERIVATIVES}"
    return plan.tangent_reason or f"no kernel computes {TANGENTS}"
