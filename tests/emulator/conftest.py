"""Ends the processes that compile PTX."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.emulator import attention, sm100_programs


@pytest.fixture(scope="session", autouse=True)
def compiler() -> Iterator[None]:
    """Shuts the compiling processes down after the last test."""
    yield
    attention.close()
    sm100_programs.close()
