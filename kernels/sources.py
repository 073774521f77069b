"""From a kernel key to what is compiled: the one door to the kernels."""

from __future__ import annotations

from fa4_jax.key import KernelKey, Pass
from kernels.kernel_source import KernelSource


def source(key: KernelKey) -> KernelSource:
    """Returns the kernel of a key.

    Raises:
      NotImplementedError: no kernel family has this key.
    """
    if key.arch == "sm_90a":
        from kernels.sm90 import backward, backward_ends, forward
    elif key.arch == "sm_100f":
        from kernels.sm100 import backward, backward_ends, backward_pair, forward, tiles

        if key.kernel is Pass.BACKWARD and isinstance(
            tiles.BACKWARD_TILES[key.head_dim, key.value_dim], tiles.BackwardPairTile
        ):
            return backward_pair.source(key)
    else:
        raise NotImplementedError(f"no kernel source for {key.name}")
    families = {
        Pass.FORWARD: forward.source,
        Pass.BACKWARD_PRE: backward_ends.pre_source,
        Pass.BACKWARD: backward.source,
        Pass.BACKWARD_POST: backward_ends.post_source,
    }
    return families[key.kernel](key)
