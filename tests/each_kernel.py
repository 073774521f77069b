"""Tests that look at each kernel (marker `each_kernel`, parameter `key`), one a case.

`make test` runs them for the kernels of its sample, which must be there, and for others that are.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import pytest

from fa4_jax import runtime
from kernels.build import sample

MARKER = "each_kernel"


def not_built(items: Sequence[pytest.Item]) -> list[bool]:
    """Returns for each test whether it looks at a kernel that is not built, and need not be."""
    looks = [item.get_closest_marker(MARKER) is not None for item in items]
    if not any(looks) or importlib.util.find_spec("cutlass") is None:
        return [False] * len(items)
    installed = runtime.manifest()
    held = sample.kernels() | set(() if installed is None else installed.cubins)
    return [look and _key(item) not in held for item, look in zip(items, looks, strict=True)]


def _key(item: Any) -> Any:
    return item.callspec.params["key"]
