"""Ends the process that compiles PTX."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.emulator import attention


@pytest.fixture(scope="session", autouse=True)
def compiler() -> Iterator[None]:
    """Shuts the compiling process down behind the last test."""
    yield
    attention.close()
