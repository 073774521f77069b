"""Runs a case through `fa4_jax.attention` and judges everything it returns."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fa4_jax.api import Call, Implementation, attention, canonicalise
from fa4_jax.conformance.cases import Case
from fa4_jax.conformance.compare import Verdict, compare
from fa4_jax.conformance.oracle import (
    NAMES,
    REFERENCE_SHIFTS,
    Inputs,
    make_inputs,
    oracle,
    ordinary,
)
from fa4_jax.plan import make_plan
from fa4_jax.target import current_target


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
        "deterministic": case.deterministic,
        "numerics": case.numerics,
    }


def compute(
    case: Case, inputs: Inputs, implementation: Implementation, gradients: bool = True
) -> dict[str, np.ndarray]:
    """output, lse and, if wanted, dq, dk, dv (and dbias) from `fa4_jax.attention`."""
    options = arguments(case)
    mask = None if inputs.mask is None else jnp.asarray(inputs.mask)

    @jax.jit
    def run(primals: list[jax.Array], bars: tuple[jax.Array, jax.Array]) -> tuple[Any, ...]:
        def forward(*primals: jax.Array) -> Any:
            return attention(
                *primals, mask=mask, return_residual=True, implementation=implementation, **options
            )

        if not gradients:
            return forward(*primals)
        results, pull_back = jax.vjp(forward, *primals)
        return *results, *pull_back(bars)

    primals = [inputs.query, inputs.key, inputs.value]
    primals += [] if inputs.bias is None else [inputs.bias]
    bars = jnp.asarray(inputs.output_bar), jnp.asarray(inputs.lse_bar)
    # A GPU's default for float32 products is TF32: three digits, which is JAX's choice, not ours.
    with jax.default_matmul_precision("highest"):
        values = run([jnp.asarray(x) for x in primals], bars)
    return {name: np.asarray(x) for name, x in zip(NAMES, values, strict=False)}


def uses_polynomial(case: Case, inputs: Inputs, implementation: Implementation) -> bool:
    """Whether the forward kernel, if there is one, computes exponentials by polynomial."""
    operands = inputs.query, inputs.key, inputs.value, inputs.bias, inputs.mask
    _, problem = canonicalise(Call(*operands, **arguments(case)))
    plan = make_plan(problem, current_target(), implementation)
    return any(kernel.key.polynomial_exp2 for kernel in plan.forward)


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
    polynomial = uses_polynomial(case, inputs, implementation)
    # Padding may hold Inf and NaN on purpose; the kernels' overflow is what the comparison shows.
    with np.errstate(all="ignore"):
        expected = oracle(case, inputs)
        usual = [ordinary(case, inputs, shift) for shift in REFERENCE_SHIFTS]
        return [
            compare(
                name,
                case.dtype,
                value,
                expected[name],
                [computed[name] for computed in usual],
                polynomial,
            )
            for name, value in results.items()
        ]
