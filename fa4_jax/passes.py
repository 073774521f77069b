"""The two ways to run the forward and the backward of a plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from fa4_jax import batching, dispatch, xla
from fa4_jax.operands import Cotangents, Gradients, Operands, Results
from fa4_jax.plan import Plan


class Passes(NamedTuple):
    """A forward and a backward that belong together."""

    forward: Callable[[Plan, Operands], Results]
    backward: Callable[[Plan, Operands, Cotangents], Gradients]


def _forward(plan: Plan, operands: Operands) -> Results:
    """By the default path; the log says so where the plan has kernels."""
    return xla.forward(plan.problem, dispatch.of_derivatives(plan, operands))


def _backward(plan: Plan, operands: Operands, cotangents: Cotangents) -> Gradients:
    """By the default path; the log says so where the plan has kernels."""
    return xla.backward(plan.problem, dispatch.of_derivatives(plan, operands), cotangents)


DISPATCHED = Passes(
    lambda plan, operands: batching.forward(plan)(operands),
    lambda plan, operands, cotangents: batching.backward(plan)(operands, cotangents),
)
"""Kernels where the platform has them, otherwise the default path."""

DIFFERENTIABLE = Passes(_forward, _backward)
"""The default path, which JAX differentiates forwards."""
