"""The derivative: one custom_vjp around everything that a device computes.

Attention and the schemes of context parallelism are wired here alike. Residuals are the operands,
the output and the log-sum-exp. The latter two carry names, so that a rematerialised layer can keep
them: under `save_attention_policy` the backward does not run the forward again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
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
Residuals = tuple[Operands, Result]


def differentiable(
    run_forward: Callable[[Any, Operands], Result],
    run_backward: Callable[[Any, Operands, Cotangents], Gradients],
    fence_backward: bool = False,
) -> Callable[[Any, Operands], Result]:
    """Output and log-sum-exp of operands, with gradients.

    Args:
      run_forward, run_backward: take what is static about the work first, which is hashable.
      fence_backward: the backward begins after the forward has ended. Without a fence common
        subexpression elimination merges the transfers of both, and keeps what was received.
    """

    def forward(work: Any, operands: Operands) -> tuple[Result, Residuals]:
        output, lse = run_forward(work, operands)
        result = checkpoint_name(output, OUTPUT_NAME), checkpoint_name(lse, LSE_NAME)
        return result, (operands, result)

    # Jitted because a gradient without jit would compile its loops anew at every call.
    gradients_of = jax.jit(run_backward, static_argnums=0, inline=True)

    def backward(work: Any, residuals: Residuals, bars: Result) -> tuple[Any]:
        if fence_backward:
            residuals, bars = jax.lax.optimization_barrier((residuals, bars))
        operands, (output, lse) = residuals
        found = gradients_of(work, operands, Cotangents(output, lse, *bars))
        no_gradient: Any = None
        return (
            Operands(
                *(found.query, found.key, found.value),
                extents=no_gradient,
                bias=found.bias,
                scale=found.scale,
            ),
        )

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def attend(work: Any, operands: Operands) -> Result:
        return forward(work, operands)[0]

    attend.defvjp(forward, backward)
    # Jitted so that the platform is that of the operands, also where the caller does not jit.
    return jax.jit(attend, static_argnums=0, inline=True)


def _forward(plan: Plan, operands: Operands) -> Result:
    return batching.forward(plan)(operands)


def _backward(plan: Plan, operands: Operands, cotangents: Cotangents) -> Gradients:
    return batching.backward(plan)(operands, cotangents)


attend = differentiable(_forward, _backward)
"""Output [B, T, N, H] and log-sum-exp [B, N, T] of a plan and its operands."""
