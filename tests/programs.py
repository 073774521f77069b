"""Which kernels a program launches, read in its StableHLO."""

from __future__ import annotations

import re


def launched_kernels(program: str) -> list[str]:
    """Returns the names of the kernels in order; one call may launch several."""
    calls = re.findall(r'kernel = "([^"]*)"', program)
    return [name for call in calls for name in call.split(",")]
