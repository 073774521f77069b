"""Peak temporary memory of the default path grows linearly with the length."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from fa4_jax import attention


def temporary_bytes(length: int, **options: Any) -> int:
    """Returns the temporary bytes of one forward and backward, as XLA plans it."""
    operand = jax.ShapeDtypeStruct((1, length, 4, 64), jnp.bfloat16)

    def run(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        value, pull_back = jax.vjp(lambda *x: attention(*x, **options), q, k, v)
        return pull_back(value)

    analysis = jax.jit(run).lower(*[operand] * 3).compile().memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


@pytest.mark.parametrize("options", [{}, {"is_causal": True}], ids=["dense", "causal"])
def test_linear_in_length(options: dict[str, Any]):
    short, middle, long = (temporary_bytes(length, **options) for length in (8192, 16384, 32768))
    assert long < 4 * 4 * 32768**2 / 50  # a fiftieth of the scores, if they are written down
    # The cost of a pair of blocks is constant, so doubling the length less than doubles the whole.
    assert middle <= 2.02 * short
    assert long <= 2.02 * middle
