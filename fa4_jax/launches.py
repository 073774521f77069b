"""Attention by kernel launches: one for the forward, three for the backward."""

from __future__ import annotations

import jax

from fa4_jax import ffi_call
from fa4_jax.group_split import group_split
from fa4_jax.operands import Cotangents, Gradients, Operands
from fa4_jax.plan import Kernel, Plan, scalars
from fa4_jax.problem import Problem


def _run(
    kernels: tuple[Kernel, ...], problem: Problem, buffers: dict[str, jax.Array]
) -> dict[str, jax.Array]:
    numbers = scalars(problem)
    for kernel in kernels:
        buffers = buffers | ffi_call.launch(kernel, buffers, numbers)
    return buffers


def forward(plan: Plan, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """Output [B, T, N, H] and log-sum-exp [B, N, T] f32, as `xla.forward`."""
    buffers = {
        "q": operands.query,
        "k": operands.key,
        "v": operands.value,
        "extents": operands.extents,
    }
    results = _run(plan.forward, plan.problem, buffers)
    return results["o"], results["lse"]


def backward(plan: Plan, operands: Operands, cotangents: Cotangents) -> Gradients:
    """Gradients of query, key and value, as `xla.backward`."""
    split = group_split(plan)
    operands = split.divide(operands)
    buffers = {
        "q": operands.query,
        "k": operands.key,
        "v": operands.value,
        "extents": operands.extents,
        "o": cotangents.output,
        "lse": cotangents.lse,
        "do": cotangents.output_bar,
        "dlse": cotangents.lse_bar,
    }
    results = _run(plan.backward, split.plan.problem, buffers)
    return Gradients(results["dq"], split.join(results["dk"]), split.join(results["dv"]), None)
