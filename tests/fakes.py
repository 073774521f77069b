"""A manifest of kernels without their code: every launch is the one that its description gives."""

from __future__ import annotations

import functools
import pathlib

from fa4_jax import catalogue
from fa4_jax.key import KernelKey
from fa4_jax.manifest import Cubin, Manifest
from fa4_jax.plan import Target
from kernels.common.launches import launch
from kernels.descriptions import describe

TILE = 128
"""The size that a fake record tells a person; no launch depends on it."""


def fake_manifest(keys: tuple[KernelKey, ...] = catalogue.all_keys()) -> Manifest:
    """Records of the given kernels, without files."""
    return Manifest({key: _record(key) for key in keys}, {}, pathlib.Path())


@functools.cache
def _record(key: KernelKey) -> Cubin:
    """Made once: all records take half a second, and many tests ask for them."""
    return Cubin(
        key,
        launch(key, describe(key)),
        symbol=key.name,
        file=f"{key.name}.cubin",
        sha256="",
        registers=0,
        spill_bytes=0,
        tile={"m": TILE},
    )


def fake_target(keys: tuple[KernelKey, ...] = catalogue.all_keys()) -> Target:
    """A Hopper GPU with the given kernels."""
    return Target("sm_90a", fake_manifest(keys))
