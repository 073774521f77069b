"""Hopper's backwards as on a GPU with a small L2, so that small problems have several sections.

A backward works on sections of heads whose Q, dO and dQ's accumulators fill a share of the L2
(`backward_schedule.assign`): on a GPU thousands of rows, so that a problem that the emulator can
run would be one section. The number of rows is a constant of the text; it is replaced.
"""

from __future__ import annotations

import re

from fa4_jax.key import KernelKey, Pass
from kernels.sm90.tiles import BACKWARD_TILES

ROWS = 300
"""Query rows of a section: one head of most problems, two of the smallest."""


def with_small_l2(key: KernelKey, text: str) -> str:
    """Returns a kernel's text with `ROWS` for the query rows that its share of the L2 holds."""
    if key.arch != "sm_90a" or key.kernel is not Pass.BACKWARD:
        return text
    tile = BACKWARD_TILES[key.head_dim, key.value_dim]
    row_bytes = key.head_dim * (2 + 4) + key.value_dim * 2
    rows = tile.l2_bytes(key.band, key.ranges, key.deterministic) // row_bytes
    # A division that is rounded down: by div, and a comparison that asks for a remainder.
    text, count = re.subn(rf"(\b(?:div\.s32|setp\.ne\.b32)\s.*\b){rows}\b", rf"\g<1>{ROWS}", text)
    assert count >= 2, f"{key.name} does not divide {rows} rows"
    return text
