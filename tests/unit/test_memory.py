"""Peak temporary memory of the default path grows linearly with the length."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from fa4_jax import attention


def temporary_bytes(length: int, **options: Any) -> int:
    """Of one forward and backward, as XLA plans it."""
    operand = jax.ShapeDtypeStruct((1, length, 4, 64), jnp.bfloat16)

    def run(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        value, pull_back = jax.vjp(lambda *x: attention(*x, **options), q, k, v)
        return pull_back(value)

    analysis = jax.jit(run).lower(*[operand] * 3).compile().memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


@pytest.mark.parametrize("options", [{}, {"is_causal": True}], ids=["dense", "causal"])
def test_linear_in_length(options: dict[str, Any]):
    short, middle, long = (temporary_bytes(length, **options) for length in (4096, 8192, 16384))
    scores = 4 * 4 * 16384**2  # what a softmax that is written down holds
    assert long < scores / 20
    # A pair of blocks is a constant part. Doubling the step doubles a linear rest (up to which
    # buffers XLA lets share memory); it would quadruple a quadratic one.
    assert long - middle < 2.5 * (middle - short)
    assert long < 4 * short
