"""Where JAX finds the derivatives of everything that a device computes.

Attention is an operation whose tangents are a linear one with the backward as its transpose
(`derivatives`). Its residuals are the operands, the output and the log-sum-exp. The latter two
carry names, so that a rematerialised layer can keep them: under `save_attention_policy` the
backward does not run the forward again.
"""

from __future__ import annotations

import jax
from jax.ad_checkpoint import checkpoint_name

from fa4_jax import batching, derivatives
from fa4_jax.derivatives import Computation
from fa4_jax.operands import Cotangents, Direction, Gradients, Operands, Results, Tangents
from fa4_jax.passes import Passes
from fa4_jax.plan import Plan

OUTPUT_NAME = "fa4_jax_output"
LSE_NAME = "fa4_jax_lse"

save_attention_policy = jax.checkpoint_policies.save_only_these_names(OUTPUT_NAME, LSE_NAME)
"""For jax.checkpoint(policy=...): keeps every attention's output and log-sum-exp, nothing else."""


def _named(found: Results) -> Results:
    """The results, of which those that the backward needs have names."""
    return found._replace(
        output=checkpoint_name(found.output, OUTPUT_NAME),
        lse=checkpoint_name(found.lse, LSE_NAME),
    )


def _run(of: Computation, operands: Operands) -> Results:
    return derivatives.attention(of, _named)(*derivatives.split(operands))


# Jitted so that the platform is that of the operands, also where the caller does not jit.
run = jax.jit(_run, static_argnums=0, inline=True)
"""Output [B, T, N, H], log-sum-exp [B, N, T] and largest scores of a computation's operands."""


def _forward(plan: Plan, passes: Passes, operands: Operands) -> Results:
    return passes.forward(plan, operands)


def _backward(plan: Plan, passes: Passes, operands: Operands, cotangents: Cotangents) -> Gradients:
    return passes.backward(plan, operands, cotangents)


def _tangent(plan: Plan, operands: Operands, direction: Direction) -> Results:
    return batching.tangent(plan)(operands, direction)


def _hessian(
    plan: Plan, operands: Operands, cotangents: Cotangents, tangents: Tangents
) -> Gradients:
    return batching.hessian(plan)(operands, cotangents, tangents)


def attend(plan: Plan, operands: Operands) -> Results:
    """The results of a plan, which knows all rows and keys."""
    tangent = _tangent if plan.tangent else None
    hessian = _hessian if plan.hessian else None
    return run(Computation(plan, _forward, _backward, tangent, hessian), operands)
