"""The derivative: one custom_vjp for both implementations, with residuals q, k, v, o, lse.

Output and log-sum-exp carry names, so that a rematerialised layer can keep them:
under `save_attention_policy` the backward does not run the forward again.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from fa4_jax import batching
from fa4_jax.operands import Cotangents, Gradients, Operands
from fa4_jax.plan import Plan

OUTPUT_NAME = "fa4_jax_output"
LSE_NAME = "fa4_jax_lse"

save_attention_policy = jax.checkpoint_policies.save_only_these_names(OUTPUT_NAME, LSE_NAME)
"""For jax.checkpoint(policy=...): keeps every attention's output and log-sum-exp, nothing else."""

Result = tuple[jax.Array, jax.Array]


def _forward(plan: Plan, operands: Operands) -> tuple[Result, tuple[Operands, Result]]:
    output, lse = batching.forward(plan)(operands)
    result = checkpoint_name(output, OUTPUT_NAME), checkpoint_name(lse, LSE_NAME)
    return result, (operands, result)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _gradients(plan: Plan, operands: Operands, cotangents: Cotangents) -> Gradients:
    """Jitted because a gradient without jit would compile its loops anew at every call."""
    return batching.backward(plan)(operands, cotangents)


def _backward(plan: Plan, residuals: tuple[Operands, Result], bars: Result) -> tuple[Any]:
    if plan.insist and not plan.backward:
        raise NotImplementedError(f"implementation='kernel': backward: {plan.backward_reason}")
    operands, (output, lse) = residuals
    gradients = _gradients(plan, operands, Cotangents(output, lse, *bars))
    found = Operands(gradients.query, gradients.key, gradients.value, None, gradients.bias)  # type: ignore[arg-type]
    return (found._replace(scale=gradients.scale),)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: Plan, operands: Operands) -> Result:
    return _forward(plan, operands)[0]


_attend.defvjp(_forward, _backward)

# Jitted so that the platform is that of the operands, also where the caller does not jit.
attend = jax.jit(_attend, static_argnums=0, inline=True)
