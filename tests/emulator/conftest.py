"""Ends the processes that compile PTX; fixtures whose GPU is emulated."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kernels.emulator.driver.driver import SETTINGS_VARIABLE
from tests.emulator import attention, processes, sm100_programs


@pytest.fixture(scope="session", autouse=True)
def compiler() -> Iterator[None]:
    """Shuts the compiling processes down after the last test."""
    yield
    attention.close()
    sm100_programs.close()


@pytest.fixture(scope="session")
def variables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of a process whose GPU is emulated."""
    return processes.environment(tmp_path_factory.mktemp("emulated"))


@pytest.fixture(scope="module")
def gpu(variables: dict[str, str]) -> Iterator[processes.Gpu]:
    """Calls functions of emulated_gpu in a process whose GPU is an emulated Hopper."""
    yield from processes.process(variables)


@pytest.fixture(scope="module")
def blackwell(variables: dict[str, str]) -> Iterator[processes.Gpu]:
    """The same with an emulated Blackwell."""
    yield from processes.process(variables | {SETTINGS_VARIABLE: "capability=10.0"})
