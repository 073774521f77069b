"""What the compiler needs of every kernel, by kernel key."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from fa4_jax.key import KernelKey, Pass
from fa4_jax.manifest import Launch, Param


@dataclasses.dataclass(frozen=True)
class KernelSource:
    """A kernel that is ready to be compiled.

    Attributes:
      host: the `cute.jit` host function; its arguments are `host_arguments` and a stream.
      arguments: example arguments for `cute.compile`, the stream last.
      host_arguments: what each argument of `host` before the stream is, in the manifest's words.
      launch: how the handler launches the kernel.
      tile: sizes that the build prints.
      symbol_prefix: the kernel's symbol starts with this.
    """

    host: Callable[..., Any]
    arguments: tuple[Any, ...]
    host_arguments: tuple[Param, ...]
    launch: Launch
    tile: dict[str, int]
    symbol_prefix: str


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
