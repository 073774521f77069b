"""The arithmetic of scores: the polynomial of a soft cap, and what asks whether it is enough."""

import numpy as np
import pytest

pytest.importorskip("cutlass", reason="the kernels come from CuTe-DSL, which is not here")

from kernels.common.softmax import TANH_UNIT, near_coefficients


def test_near_tanh_errs_by_less_than_a_millionth() -> None:
    """In float32, step by step as `near_tanh` computes it."""
    y = np.linspace(1e-6, TANH_UNIT / 2, 100_001).astype(np.float32)
    square, (first, *others) = y * y, near_coefficients()
    factor = np.full_like(y, first)
    for coefficient in others:
        factor = factor * square + np.float32(coefficient)
    expected = np.tanh(y.astype(np.float64) / TANH_UNIT)
    assert np.abs(factor * y / expected - 1).max() < 1e-6


def test_bit_30_tells_what_is_near() -> None:
    """As `are_near` has it, also of words whose bits are combined."""
    near = np.float32(TANH_UNIT / 2)
    small = np.array([0, 1e-30, 1, -1.5, np.nextafter(near, np.float32(0))], np.float32)
    large = np.array([near, -near, 1e30, np.inf, -np.inf, np.nan], np.float32)
    assert np.bitwise_or.reduce(small.view(np.int32)) & 1 << 30 == 0
    assert (large.view(np.int32) & 1 << 30 != 0).all()
