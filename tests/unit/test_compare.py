"""The comparison must fail what is wrong."""

from __future__ import annotations

import numpy as np
import pytest

from fa4_jax.conformance.cases import CASES
from fa4_jax.conformance.compare import compare


@pytest.fixture
def expected(rng: np.random.Generator) -> np.ndarray:
    return rng.normal(size=(3, 50, 4))


@pytest.fixture
def noise(rng: np.random.Generator) -> np.ndarray:
    return rng.normal(size=(3, 50, 4)) * 1e-3


def test_the_ordinary_error_passes_and_one_and_a_half_of_it(expected, noise):
    for factor in (1.0, 1.5):
        result = expected + factor * noise
        assert compare("output", "bf16", result, expected, [expected + noise]).failure is None


def test_three_times_the_ordinary_error_fails(expected, noise):
    verdict = compare("output", "bf16", expected + 3 * noise, expected, [expected + noise])
    assert verdict.failure and "error" in verdict.failure


def test_one_bad_element_fails_by_its_largest_error(expected, noise):
    result = expected + noise
    result[1, 7, 2] += 0.1
    verdict = compare("dq", "bf16", result, expected, [expected + noise])
    assert verdict.failure and "(1, 7, 2)" in verdict.failure


def test_a_small_bias_everywhere_fails_by_its_rms(expected, noise):
    noise[0, 0, 0] = 1.0  # One outlier of the ordinary computation hides nothing.
    result = expected + 0.2
    ordinary = expected + np.where(np.abs(noise) < 1, noise, 1.0)
    assert compare("output", "bf16", result, expected, [ordinary]).failure


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 0.0])
def test_special_values_must_be_at_the_same_places(expected, noise, value):
    expected = expected.copy()
    expected[0, 0, 0] = -np.inf
    result = expected + noise
    result[0, 0, 0] = value
    failure = compare("lse", "bf16", result, expected, [expected + noise]).failure
    assert (failure is None) == (value == -np.inf)


def test_few_values_may_err_by_the_rounding_of_their_type():
    """Gradients of sinks that a good kernel gave: half a unit is 1/32."""
    expected, ordinary = np.array([12.609729, 0.5]), np.array([12.625, 0.5])
    assert compare("dsinks", "bf16", np.array([12.5625, 0.5]), expected, [ordinary]).failure is None
    assert compare("dsinks", "bf16", np.array([12.5, 0.5]), expected, [ordinary]).failure
    assert compare("dk", "bf16", np.array([12.5625, 0.5]), expected, [ordinary]).failure


def test_another_shape_fails(expected):
    assert compare("output", "bf16", expected[:2], expected, [expected]).failure


def test_cases_have_distinct_names():
    assert len({case.id for case in CASES}) == len(CASES)
