"""Where JAX finds the derivatives of everything that a device computes.

Attention is an operation whose tangents are a linear one with the backward as its transpose
(`derivatives`), the schemes of context parallelism have a `custom_vjp`. Residuals of both are
the operands, the output and the log-sum-exp. The latter two carry names, so that a rematerialised
layer can keep them: under `save_attention_policy` the backward does not run the forward again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from fa4_jax import derivatives, sinks
from fa4_jax.operands import Cotangents, Gradients, Operands, Results
from fa4_jax.plan import Plan

OUTPUT_NAME = "fa4_jax_output"
LSE_NAME = "fa4_jax_lse"

save_attention_policy = jax.checkpoint_policies.save_only_these_names(OUTPUT_NAME, LSE_NAME)
"""For jax.checkpoint(policy=...): keeps every attention's output and log-sum-exp, nothing else."""

Residuals = tuple[Operands, Results]


def _named(found: Results) -> Results:
    """The results, of which those that the backward needs have names."""
    return found._replace(
        output=checkpoint_name(found.output, OUTPUT_NAME),
        lse=checkpoint_name(found.lse, LSE_NAME),
    )


def differentiable(
    run_forward: Callable[[Any, Operands], Results],
    run_backward: Callable[[Any, Operands, Cotangents], Gradients],
    fence_backward: bool = False,
) -> Callable[[Any, Operands], Results]:
    """Output, log-sum-exp and largest scores of operands; the former two with gradients.

    Args:
      run_forward, run_backward: take what is static about the work first, which is hashable.
      fence_backward: the backward begins after the forward has ended. Without a fence common
        subexpression elimination merges the transfers of both, and keeps what was received.
    """

    def forward(work: Any, operands: Operands) -> tuple[Results, Residuals]:
        results = _named(run_forward(work, operands))
        return results, (operands, results._replace(max_logit=None))

    # Jitted because a gradient without jit would compile its loops anew at every call.
    gradients_of = jax.jit(run_backward, static_argnums=0, inline=True)

    def backward(work: Any, residuals: Residuals, bars: Results) -> tuple[Any]:
        bars = bars._replace(max_logit=None)
        if fence_backward:
            residuals, bars = jax.lax.optimization_barrier((residuals, bars))
        operands, results = residuals
        cotangents = Cotangents(results.output, results.lse, bars.output, bars.lse)
        found = gradients_of(work, operands._replace(sinks=None), cotangents)
        own = operands.sinks
        no_gradient: Any = None
        return (
            Operands(
                *(found.query, found.key, found.value),
                extents=no_gradient,
                bias=found.bias,
                scale=found.scale,
                soft_cap=found.soft_cap,
                sinks=None if own is None else sinks.gradient(own, cotangents),
            ),
        )

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def attend(work: Any, operands: Operands) -> Results:
        return forward(work, operands)[0]

    attend.defvjp(forward, backward)
    # Jitted so that the platform is that of the operands, also where the caller does not jit.
    return jax.jit(attend, static_argnums=0, inline=True)


def _attend(plan: Plan, operands: Operands) -> Results:
    return derivatives.attention(plan, _named)(*derivatives.split(operands))


# Jitted so that the platform is that of the operands, also where the caller does not jit.
attend = jax.jit(_attend, static_argnums=0, inline=True)
"""Output [B, T, N, H], log-sum-exp [B, N, T] and largest scores of a plan and its operands."""
