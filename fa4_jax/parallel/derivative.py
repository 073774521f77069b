"""The derivative of a scheme: one custom_vjp around everything that a device does, transfers too.

Residuals are the shards that the device was given, its output and its log-sum-exp, under the names
by which `save_attention_policy` keeps them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from fa4_jax.autodiff import LSE_NAME, OUTPUT_NAME
from fa4_jax.operands import Cotangents, Gradients, Operands

Result = tuple[jax.Array, jax.Array]


def differentiable(
    run_forward: Callable[[Any, Operands], Result],
    run_backward: Callable[[Any, Operands, Cotangents], Gradients],
) -> Callable[[Any, Operands], Result]:
    """Output and log-sum-exp of a device's rows, with gradients of its query, key and value.

    Args:
      run_forward, run_backward: take the static work of a device first.
    """

    def forward(work: Any, operands: Operands) -> tuple[Result, Any]:
        output, lse = run_forward(work, operands)
        result = checkpoint_name(output, OUTPUT_NAME), checkpoint_name(lse, LSE_NAME)
        return result, (operands, result)

    def backward(work: Any, residuals: tuple[Operands, Result], bars: Result) -> tuple[Any]:
        # Else the compiler takes the forward's transfers for the backward's, and keeps all shards.
        (operands, (output, lse)), bars = jax.lax.optimization_barrier((residuals, bars))
        found = run_backward(work, operands, Cotangents(output, lse, *bars))
        return (Operands(found.query, found.key, found.value, None),)  # type: ignore[arg-type]

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def attend(work: Any, operands: Operands) -> Result:
        return forward(work, operands)[0]

    attend.defvjp(forward, backward)
    # Jitted so that the platform is that of the operands, also where the caller does not jit.
    return jax.jit(attend, static_argnums=0, inline=True)
