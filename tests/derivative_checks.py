"""What tests of derivatives share: a loss of all results, and a comparison in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def loss(function: Callable[..., Any]) -> Callable[..., jax.Array]:
    """A function of output and log-sum-exp, none of whose derivatives is zero."""

    def of_all(*args: Any) -> jax.Array:
        output, lse = function(*args)
        return jnp.sin(output).sum() + (jnp.where(lse == -jnp.inf, 0, lse) ** 2).sum()

    return of_all


def close(actual: Any, expected: Any) -> None:
    """Fails unless all arrays are equal up to the rounding of float64."""

    def same(a: jax.Array, b: jax.Array) -> None:
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)

    jax.tree.map(same, actual, expected)
