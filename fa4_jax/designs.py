"""Which design runs where a pass has two: one CTA a tile, or a pair of CTAs that share operands;
and on Hopper, tall or short tiles of query rows.

Both are built. Between one CTA and a pair the table below chooses by the timing model's estimates,
since no Blackwell GPU was available: `python -m benchmarks.day_one` times both on one, and prints
the line to change. Between tiles `fa4_jax.tile_choice` chooses by shapes.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Generator

from fa4_jax.key import DENSE_TILES, SHORT_TILES, KernelKey, Pass

SINGLE, PAIR = "single", "pair"
DESIGNS = (SINGLE, PAIR)
TALL, SHORT = "tall", "short"
TILES = (TALL, SHORT)
_NAMES = (*DESIGNS, *TILES)

CHOSEN: dict[tuple[str, Pass, int, int], str] = {
    # (arch, pass, head_dim, value_dim) of tiles with both designs
    ("sm_100f", Pass.FORWARD, 64, 64): SINGLE,
    ("sm_100f", Pass.FORWARD, 128, 128): SINGLE,
    ("sm_100f", Pass.BACKWARD, 128, 128): PAIR,
    ("sm_100f", Pass.BACKWARD, 192, 128): PAIR,
}
"""The design that calls get. By the model no length changes which is faster: docs/blackwell.md."""

VARIABLE = "FA4_JAX_DESIGN"
"""The environment variable that names one design for all calls that are traced from then on."""

_asked: contextvars.ContextVar[str | None] = contextvars.ContextVar("fa4_jax_design", default=None)


def has_both(arch: str, kernel: Pass, head_dims: tuple[int, int]) -> bool:
    """Whether kernels of both designs are built for tiles of these head dims."""
    return (arch, kernel, *head_dims) in CHOSEN


def is_pair(arch: str, kernel: Pass, head_dims: tuple[int, int], design: str | None) -> bool:
    """`KernelKey.pair` of a call: of the design that is asked for, or else of the chosen one."""
    chosen = CHOSEN.get((arch, kernel, *head_dims))
    return chosen is not None and (design if design in DESIGNS else chosen) == PAIR


def design_of(key: KernelKey) -> str:
    """The design to ask for where a call shall run a kernel."""
    tiles = (key.arch, key.head_dim)
    if key.kernel is Pass.FORWARD and (tiles in SHORT_TILES or tiles in DENSE_TILES):
        # Calls whose rows see few keys get the narrow tile, if nothing else is asked for.
        is_tall = not (key.short if tiles in SHORT_TILES else key.band)
        return SINGLE if key.narrow else TALL if is_tall else SHORT
    return PAIR if key.pair else SINGLE


def asked() -> str | None:
    """The design that `asking` or the environment names for the calls traced now, or None.

    Raises:
      ValueError: the environment names none of DESIGNS and TILES.
    """
    design = _asked.get() or os.environ.get(VARIABLE) or None
    if design not in (None, *_NAMES):
        raise ValueError(f"{VARIABLE} must be one of {', '.join(_NAMES)}, not {design!r}")
    return design


@contextlib.contextmanager
def asking(design: str) -> Generator[None]:
    """Names the design of calls that are traced inside, for tests and measurements.

    What was traced before keeps its design.

    Raises:
      ValueError: there is no such design.
    """
    if design not in _NAMES:
        raise ValueError(f"design must be one of {', '.join(_NAMES)}, not {design!r}")
    token = _asked.set(design)
    try:
        yield
    finally:
        _asked.reset(token)
