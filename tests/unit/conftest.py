"""Fixtures of tests that compare derivatives of the default path in float64."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest

from tests.default_paths import PATHS, forced


@pytest.fixture
def float64() -> Iterator[None]:
    """Arrays are float64 unless their type is given."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module", params=PATHS)
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """Makes every size run on one path, `blockwise` with several blocks a side."""
    with forced(request.param, 8):
        yield request.param
