"""What the compiler needs of a kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

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
