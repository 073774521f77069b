"""What the tests of the adapters share: packages that may be absent, and comparisons."""

from __future__ import annotations

import importlib
import importlib.util
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

REQUIRED = "FA4_JAX_REQUIRED_PACKAGES"
"""Environment variable of `make integrations`: packages whose absence is a failure, by spaces."""

REASON = "{} is not installed: `make integrations` tests its adapter"


def package(name: str) -> Any:
    """The module, or a skip of the calling test file that says how to install it.

    What a package warns of when it is imported is its own affair.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if name.split(".")[0] in os.environ.get(REQUIRED, "").split():
            return importlib.import_module(name)
        return pytest.importorskip(name, reason=REASON.format(name))


def installed(name: str) -> pytest.MarkDecorator:
    """Skips a test where there is no such package, unless that is a failure; imports nothing."""
    absent = importlib.util.find_spec(name) is None
    required = name in os.environ.get(REQUIRED, "").split()
    return pytest.mark.skipif(absent and not required, reason=REASON.format(name))


def normal(
    rng: np.random.Generator, *shapes: tuple[int, ...], dtype: Any = None
) -> list[jax.Array]:
    """Normal numbers of several shapes, float32 by default."""
    return [jnp.asarray(rng.normal(size=x), dtype or jnp.float32) for x in shapes]


def value_and_gradients(
    function: Callable[..., jax.Array], operands: Sequence[Any], cotangent: np.ndarray
) -> list[np.ndarray]:
    """The result, then the gradient of <result, cotangent> in each operand, in float32."""
    result, pullback = jax.vjp(function, *operands)
    gradients = pullback(jnp.asarray(cotangent, result.dtype))
    return [np.asarray(x, np.float32) for x in (result, *jax.tree.leaves(gradients))]


def assert_same(
    ours: Callable[..., jax.Array],
    theirs: Callable[..., jax.Array],
    operands: Sequence[Any],
    *,
    tolerance: float = 2e-5,
) -> None:
    """Both functions have the same value and the same gradients in all operands.

    Args:
      tolerance: largest difference over the largest magnitude of each array of theirs, which
        counts as 0.25 where it is less: gradients that are zero, as where a row sees one key, are
        differences of numbers of about 5, with their rounding in float32.
    """
    shape = jax.eval_shape(theirs, *operands)
    cotangent = np.random.default_rng(0).normal(size=shape.shape)
    pairs = zip(
        value_and_gradients(ours, operands, cotangent),
        value_and_gradients(theirs, operands, cotangent),
        strict=True,
    )
    for i, (found, expected) in enumerate(pairs):
        assert found.shape == expected.shape
        assert np.isfinite(expected).all()
        limit = tolerance * max(np.abs(expected).max(), 0.25)
        np.testing.assert_allclose(found, expected, rtol=0, atol=limit, err_msg=f"array {i}")
