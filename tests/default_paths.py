"""The default path's two ways, each forced on every size."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Generator

import jax
import pytest

from fa4_jax import xla
from fa4_jax.xla import blockwise

PATHS = ("dense", "blockwise")


def blocks_of(size: int) -> Callable[[], blockwise.BlockSizes]:
    """What stands in for `blockwise.block_sizes`: blocks of about one size."""
    sizes = dataclasses.replace(blockwise.block_sizes(), least=size, most=size)
    return lambda: sizes


@contextlib.contextmanager
def forced(path: str, block: int | None = None) -> Generator[None]:
    """All calls run by `path` while this is entered.

    Args:
      path: one of PATHS.
      block: target size of the blocks, instead of the measured one.
    """
    scores = {"dense": sys.maxsize, "blockwise": 0}[path]
    jax.clear_caches()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(xla, "SETTINGS", xla.Settings(dense_scores=scores))
        if block is not None:
            patch.setattr(blockwise, "block_sizes", blocks_of(block))
        yield
    jax.clear_caches()
