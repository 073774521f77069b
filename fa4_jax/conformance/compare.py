"""Judging a result: Inf and NaN in the same places, then at most twice the ordinary error."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

FACTOR = 2.0
"""A result may err by this times what the ordinary computation in the same storage type errs."""

FLOORS = {
    # (quantity, storage type): what is always allowed, relative to the largest value expected.
    ("lse", "bf16"): 2e-6,
    ("lse", "fp16"): 2e-6,
    ("lse", "f32"): 2e-6,
    ("gradient", "bf16"): 1e-5,
    ("gradient", "fp16"): 1e-5,
    ("gradient", "f32"): 4e-6,
    ("output", "bf16"): 1e-5,
    ("output", "fp16"): 1e-5,
    ("output", "f32"): 1e-6,
    ("max_logit", "bf16"): 2e-6,
    ("max_logit", "fp16"): 2e-6,
    ("max_logit", "f32"): 2e-6,
}
"""The one tolerance table. Small against one rounding of the storage type (bf16: 4e-3)."""

POLYNOMIAL_ERROR = 8.6e-5
"""Largest relative error of a kernel's cubic for 2^x on [0, 1).

The LSE of one row may err by all of it: where one key has nearly all of the row's weight, rounding
can leave that key's exponent just below 0, which is the cubic's worst place.
"""

POLYNOMIAL_SHARE = 3 / 8
"""Largest share of a block's exponentials that a kernel computes by the cubic.

Over rows whose weight w falls on such columns, w^2 <= w has this mean: the root mean square of
their errors is at most the cubic's error times the root of the share.
`tests/kernels/test_blackwell_tiles.py` derives both from the kernels.
"""


MANTISSA_BITS = {"bf16": 7, "fp16": 10, "f32": 23}
"""Of the storage types, without the leading bit.

Sinks have one gradient a head. So few ordinary values may all lie near their roundings, while
another one that is as good rounds by up to half a unit of the last place.
"""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """How one quantity compares.

    Attributes:
      name: one of `oracle.names`.
      failure: what is wrong, or None.
      worst: largest error, and `worst_allowed` the bound on it.
      rms, rms_allowed: the same for the root mean square.
    """

    name: str
    failure: str | None
    worst: float = 0.0
    worst_allowed: float = 0.0
    rms: float = 0.0
    rms_allowed: float = 0.0


def _special(x: np.ndarray) -> np.ndarray:
    """Class of every element: 0 finite, 1 NaN, 2 and 3 the infinities."""
    return np.isnan(x) + 2 * np.isposinf(x) + 3 * np.isneginf(x)


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x)))) if x.size else 0.0


def _half_unit(dtype: str, value: float) -> float:
    """Half a unit of the last place of a value in a storage type."""
    _, exponent = math.frexp(value)  # value = fraction * 2^exponent, 1/2 <= fraction < 1
    return math.ldexp(1.0, exponent - 1 - MANTISSA_BITS[dtype] - 1)


def compare(
    name: str,
    dtype: str,
    result: np.ndarray,
    expected: np.ndarray,
    ordinary: Sequence[np.ndarray],
    polynomial: bool = False,
) -> Verdict:
    """Compares one quantity with the oracle's.

    Args:
      name: of the quantity.
      dtype: storage type of the case.
      result: what is judged.
      expected: the float64 oracle's.
      ordinary: of ordinary computations; the largest error of any of them counts.
      polynomial: the kernel may compute exponentials by polynomial.
    """
    if result.shape != expected.shape:
        return Verdict(name, f"shape {result.shape}, expected {expected.shape}")
    result = result.astype(np.float64)
    differs = _special(result) != _special(expected)
    if differs.any():
        at = tuple(int(i) for i in np.argwhere(differs)[0])
        return Verdict(
            name, f"at {at} is {result[at]}, expected {expected[at]} ({differs.sum()} such)"
        )
    finite = np.isfinite(expected) & np.logical_and.reduce([np.isfinite(x) for x in ordinary])
    truth = expected[finite]
    errors = result[finite] - truth
    ordinary_errors = [x.astype(np.float64)[finite] - truth for x in ordinary]
    quantity = name if name in ("output", "lse", "max_logit") else "gradient"
    floor = FLOORS[quantity, dtype] * max(1e-30, float(np.abs(truth).max(initial=0)))
    if name == "dsinks":
        floor += _half_unit(dtype, float(np.abs(truth).max(initial=0)))
    of_cubic = POLYNOMIAL_ERROR if quantity == "lse" and polynomial else 0.0
    worst = float(np.abs(errors).max(initial=0))
    worst_allowed = FACTOR * float(np.abs(ordinary_errors).max(initial=0)) + floor + of_cubic
    rms = _rms(errors)
    rms_allowed = (
        FACTOR * max(map(_rms, ordinary_errors)) + floor + of_cubic * POLYNOMIAL_SHARE**0.5
    )
    failure = None
    if worst > worst_allowed or rms > rms_allowed:
        masked = np.where(finite, np.abs(result - np.where(finite, expected, 0)), 0)
        at = tuple(int(i) for i in np.unravel_index(np.argmax(masked), masked.shape))
        failure = (
            f"error {worst:.3g} (allowed {worst_allowed:.3g}), rms {rms:.3g} (allowed "
            f"{rms_allowed:.3g}); worst at {at}: {result[at]:.8g}, expected {expected[at]:.8g}"
        )
    return Verdict(name, failure, worst, worst_allowed, rms, rms_allowed)
