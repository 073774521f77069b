"""Every kernel is there for something that the table of costs names."""

from __future__ import annotations

from fa4_jax import catalogue
from kernels.build.costs import CAPABILITIES


def test_every_kernel_has_a_capability():
    _, *rows = CAPABILITIES
    for key in catalogue.all_keys():
        assert any(row.has(key) for row in rows), key.name


def test_every_capability_has_kernels():
    for row in CAPABILITIES:
        assert any(row.has(key) for key in catalogue.all_keys()), row.name
