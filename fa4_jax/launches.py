"""Attention by kernel launches: one for the forward, three for the backward."""

from __future__ import annotations

import math

import jax

from fa4_jax import ffi_call
from fa4_jax.operands import Cotangents, Gradients, Operands
from fa4_jax.plan import Plan
from fa4_jax.problem import Problem

RESCALE_THRESHOLD_LOG2 = {"fast": 8.0, "exact": 0.0}
"""How far (in powers of two) the row maximum may lag before the accumulator is rescaled: FA4."""


def attributes(problem: Problem) -> dict[str, float]:
    """Every runtime scalar of the kernels, by parameter name."""
    assert problem.scale is not None  # plan.unsupported
    return {
        "scale": problem.scale,
        "scale_log2": problem.scale * math.log2(math.e),
        "rescale_threshold_log2": RESCALE_THRESHOLD_LOG2[problem.numerics],
        "window_left": problem.window[0],
        "window_right": problem.window[1],
    }


def _run(kernels, problem: Problem, buffers: dict[str, jax.Array]) -> dict[str, jax.Array]:
    scalars = attributes(problem)
    for kernel in kernels:
        buffers = buffers | ffi_call.launch(kernel, buffers, scalars)
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
    results = _run(plan.backward, plan.problem, buffers)
    return Gradients(results["dq"], results["dk"], results["dv"], None)
