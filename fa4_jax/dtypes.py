"""The type in which sums are kept."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp


def wide(dtype: Any) -> Any:
    """The type in which sums of a floating type are kept: float32, or float64 for float64."""
    return jnp.promote_types(dtype, jnp.float32)
