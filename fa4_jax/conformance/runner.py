"""Runs a case through `fa4_jax.attention` and judges everything it returns."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fa4_jax.api import Call, Implementation, attention, planned
from fa4_jax.conformance import biases, row_masks
from fa4_jax.conformance.cases import Case
from fa4_jax.conformance.compare import Verdict, compare
from fa4_jax.conformance.oracle import (
    HESSIAN_PRODUCTS,
    REFERENCE_SHIFTS,
    Inputs,
    judges,
    make_inputs,
    names,
    oracle,
    ordinary,
    with_tangents,
)
from fa4_jax.group_split import group_split
from fa4_jax.plan import Plan
from fa4_jax.target import current_target

DIFFERENTIABLE = ("query", "key", "value", "bias", "sinks")
"""Operands with a gradient, in the order of `names`."""


def arguments(case: Case) -> dict[str, Any]:
    """Keyword arguments of `attention` for a case."""

    def array(x: Any) -> jax.Array | None:
        return None if x is None else jnp.asarray(x, jnp.int32)

    offset = case.query_offset
    return {
        "scale": case.scale,
        "is_causal": case.is_causal,
        "query_offset": offset if isinstance(offset, int) else array(offset),
        "query_seq_lengths": array(case.query_lengths),
        "key_value_seq_lengths": array(case.key_lengths),
        "local_window_size": case.window,
        "logits_soft_cap": case.soft_cap,
        "deterministic": case.deterministic,
        "numerics": case.numerics,
    }


def masking(inputs: Inputs) -> dict[str, Any]:
    """Keyword arguments of `attention` for the masks of a case."""
    value = row_masks.value(inputs.masks)
    if inputs.mask is None:
        return {"mask": value}
    mask = jnp.asarray(inputs.mask)
    return {"mask": mask if value is None else mask & value}


def compute(
    case: Case, inputs: Inputs, implementation: Implementation, gradients: bool = True
) -> dict[str, np.ndarray]:
    """What `names` says, or without gradients the first of it, from `fa4_jax.attention`."""
    options = arguments(case) | masking(inputs)
    options["return_max_logit"] = case.max_logit

    @jax.jit
    def run(primals: dict[str, jax.Array], bars: Any) -> tuple[Any, ...]:
        def forward(primals: dict[str, jax.Array]) -> Any:
            added = biases.value(case.bias_kind, primals["bias"]) if case.bias else None
            operands = primals | {"bias": added}
            return attention(
                **operands, return_residual=True, implementation=implementation, **options
            )

        if not gradients:
            return forward(primals)
        results, pull_back = jax.vjp(forward, primals)
        (found,) = pull_back((*bars, *(jnp.zeros_like(x) for x in results[2:])))
        return *results, *(found[name] for name in DIFFERENTIABLE if name in found)

    operands = {name: getattr(inputs, name) for name in DIFFERENTIABLE}
    primals = {name: jnp.asarray(x) for name, x in operands.items() if x is not None}
    bars = jnp.asarray(inputs.output_bar), jnp.asarray(inputs.lse_bar)
    # A GPU's default for float32 products is TF32: three digits, which is JAX's choice, not ours.
    with jax.default_matmul_precision("highest"):
        values = run(primals, bars)
    return {name: np.asarray(x) for name, x in zip(names(case), values, strict=gradients)}


def call(case: Case, inputs: Inputs) -> Call:
    """A case as `attention` gathers it."""
    added = biases.value(case.bias_kind, inputs.bias)
    operands = inputs.query, inputs.key, inputs.value, added
    return Call(
        *operands,
        sinks=inputs.sinks,
        return_max_logit=case.max_logit,
        **(arguments(case) | masking(inputs)),
    )


def plan_of(case: Case, inputs: Inputs, implementation: Implementation) -> Plan:
    """The kernels, if there are any, that `compute` launches."""
    _, plan = planned(call(case, inputs), current_target(), implementation)
    return plan


def run_case(
    case: Case, seed: int, implementation: Implementation = None, gradients: bool = True
) -> list[Verdict]:
    """Verdicts on output, log-sum-exp and gradients of one case.

    Args:
      seed: of the random inputs.
      implementation: as in `attention`.
      gradients: also run the backward.
    """
    inputs = make_inputs(case, seed)
    results = compute(case, inputs, implementation, gradients)
    plan = plan_of(case, inputs, implementation)
    return judged(case, inputs, plan, results, group_split(plan).parts if gradients else 1)


def run_tangents(case: Case, seed: int, implementation: Implementation = None) -> list[Verdict]:
    """Verdicts on the tangents of output and log-sum-exp where query, key and value move."""
    inputs = with_tangents(case, make_inputs(case, seed), seed)
    added = biases.value(case.bias_kind, inputs.bias)
    options = arguments(case) | masking(inputs) | {"sinks": inputs.sinks, "bias": added}

    def forward(*operands: jax.Array) -> Any:
        return attention(*operands, return_residual=True, implementation=implementation, **options)

    primals = inputs.query, inputs.key, inputs.value
    with jax.default_matmul_precision("highest"):
        run = jax.jit(lambda primals, moved: jax.jvp(forward, primals, moved)[1])
        output, lse = run(primals, inputs.tangents)
    results = {"output_tangent": np.asarray(output), "lse_tangent": np.asarray(lse)}
    return judged(case, inputs, plan_of(case, inputs, implementation), results)


def run_hessian(case: Case, seed: int, implementation: Implementation = None) -> list[Verdict]:
    """Verdicts on how gradients move where query, key and value do and cotangents do not."""
    inputs = with_tangents(case, make_inputs(case, seed), seed)
    added = biases.value(case.bias_kind, inputs.bias)
    options = arguments(case) | masking(inputs) | {"sinks": inputs.sinks, "bias": added}

    def gradients(*operands: jax.Array) -> Any:
        def forward(*operands: jax.Array) -> Any:
            return attention(
                *operands, return_residual=True, implementation=implementation, **options
            )

        return jax.vjp(forward, *operands)[1]((inputs.output_bar, inputs.lse_bar))

    primals = inputs.query, inputs.key, inputs.value
    with jax.default_matmul_precision("highest"):
        run = jax.jit(lambda primals, moved: jax.jvp(gradients, primals, moved)[1])
        found = run(primals, inputs.tangents)
    results: dict[str, np.ndarray] = {
        name: np.asarray(x) for name, x in zip(HESSIAN_PRODUCTS, found, strict=True)
    }
    return judged(case, inputs, plan_of(case, inputs, implementation), results)


def judged(
    case: Case, inputs: Inputs, plan: Plan, results: dict[str, np.ndarray], copies: int = 1
) -> list[Verdict]:
    """How what a plan computed compares with the oracle's; copies: as of `ordinary`."""
    polynomial = any(kernel.key.polynomial_exp2 for kernel in plan.forward)
    # Padding may hold Inf and NaN on purpose; the kernels' overflow is what the comparison shows.
    with np.errstate(all="ignore"):
        expected = oracle(case, inputs)
        usual = [ordinary(case, inputs, shift, copies) for shift in REFERENCE_SHIFTS]
        return [
            compare(
                name,
                case.dtype,
                value,
                expected[name],
                judges(name, expected, usual),
                polynomial,
            )
            for name, value in results.items()
        ]
