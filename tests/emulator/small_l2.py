"""Hopper's backwards as on a GPU with a small L2, so that small problems can have several sections.

A backward works on sections of heads whose Q, dO and dQ's accumulators fill a share of the L2
(`backward_schedule.section_heads`): on a GPU thousands of rows, so that a problem that the
emulator can run would be one section. The number of rows is a constant of the text; it is replaced.
Backwards in a fixed order under a band keep one section: theirs have at least 8 or 32 heads
(`tiles.DETERMINISTIC_BAND_HEADS`). The kernel before may have the number, too, to clear dQ of the
first section alone (`sm90/backward_clear.py`).
"""

from __future__ import annotations

import re

from fa4_jax.key import KernelKey, Pass
from kernels.descriptions import describe
from kernels.sm90.tiles import BACKWARD_TILES, backward_row_bytes

ROWS = 300
"""Query rows of a section: two heads of 148 rows, the cheapest problem of `mutation_cases`."""


def with_small_l2(key: KernelKey, text: str) -> str:
    """Returns a kernel's text with `ROWS` for the query rows that its share of the L2 holds."""
    if key.arch != "sm_90a":
        return text
    num_bytes = 0
    if key.kernel is Pass.BACKWARD:
        tile = BACKWARD_TILES[key.head_dim, key.value_dim]
        num_bytes = tile.l2_bytes(key.band, key.ranges, key.deterministic)
    elif key.kernel is Pass.BACKWARD_PRE:
        num_bytes = describe(key).division.cleared_bytes
    if not num_bytes:
        return text
    rows = num_bytes // backward_row_bytes(key.head_dim, key.value_dim)
    # A division that is rounded down: by div, and a comparison that asks for a remainder.
    text, count = re.subn(rf"(\b(?:div\.s32|setp\.ne\.b32)\s.*\b){rows}\b", rf"\g<1>{ROWS}", text)
    assert count >= 2, f"{key.name} does not divide {rows} rows"
    return text
