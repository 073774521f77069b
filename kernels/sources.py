"""From a kernel key to what is compiled: the one door to the kernels."""

from __future__ import annotations

import importlib

from fa4_jax.key import KernelKey, Pass
from kernels.kernel_source import KernelSource

_PLACES = {
    Pass.FORWARD: ("forward", "source"),
    Pass.FORWARD_SPLIT: ("forward_split", "source"),
    Pass.FORWARD_JOIN: ("forward_join", "source"),
    Pass.TANGENT: ("tangent", "source"),
    Pass.HESSIAN_QUERY: ("hessian", "source"),
    Pass.HESSIAN_KEY: ("hessian", "source"),
    Pass.BACKWARD_PRE: ("backward_ends", "pre_source"),
    Pass.BACKWARD: ("backward", "source"),
    Pass.BACKWARD_POST: ("backward_ends", "post_source"),
    Pass.BIAS_GRADIENT: ("bias_gradient", "source"),
}
"""The module and the function that make the kernels of a pass."""

_PACKAGES = {"sm_90a": "kernels.sm90", "sm_100f": "kernels.sm100"}


def module(key: KernelKey) -> str:
    """Returns the module that makes the kernel of a key: with its imports, all it depends on.

    Raises:
      NotImplementedError: no kernel family has this key.
    """
    if key.arch not in _PACKAGES:
        raise NotImplementedError(f"no kernel source for {key.name}")
    name = _PLACES[key.kernel][0]
    of_hopper = key.kernel is Pass.FORWARD_SPLIT and key.arch == "sm_90a"
    if key.kernel in (Pass.FORWARD_SPLIT, Pass.FORWARD_JOIN) and not of_hopper:
        return f"kernels.common.{name}"
    if key.arch == "sm_100f" and key.kernel is Pass.BACKWARD:
        from kernels.sm100 import tiles

        tile = tiles.BACKWARD_TILES[key.head_dim, key.value_dim, key.pair]
        if isinstance(tile, tiles.BackwardPairTile):
            name = "backward_pair"
        if isinstance(tile, tiles.BackwardM256Tile):
            name = "backward_m256"
    if key.arch == "sm_90a" and key.kernel is Pass.BACKWARD:
        from kernels.sm90 import tiles

        if tiles.BACKWARD_TILES[key.head_dim, key.value_dim].ctas == 2:
            name = "backward_pair"
    return f"{_PACKAGES[key.arch]}.{name}"


def source(key: KernelKey) -> KernelSource:
    """Returns the kernel of a key.

    Raises:
      NotImplementedError: no kernel family has this key.
    """
    return getattr(importlib.import_module(module(key)), _PLACES[key.kernel][1])(key)
