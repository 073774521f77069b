"""What Hopper's kernel of a bias's gradient consists of; see `bias_gradient`."""

from __future__ import annotations

import functools

from fa4_jax.key import BIAS_GRADIENT_TILES
from kernels.description import (
    Barrier,
    Description,
    Division,
    NamedBarrier,
    Region,
    Role,
    TensorMap,
    copied,
    one,
    operand,
    warps,
)
from kernels.sm90.tiles import REGISTER_BUDGETS, WARPGROUP, WARPGROUP_ROWS

TILE = BIAS_GRADIENT_TILES["sm_90a"]
GROUPS = TILE // WARPGROUP_ROWS
PARTS_BYTES = 160 * 1024
"""Of shared memory for parts of operands; a tile of fp32 numbers takes most of the rest."""

WORK_BUFFERS = 2
WORK_WORDS = 11
VISIT_WORDS = 7
"""Of what the load warp publishes: kernels/sm90/bias_gradient_tiles.py."""

ROW_BYTES = TILE * 2
"""Of a row of a tile in pairs."""

PADDED_KEYS = TILE + 1
"""Columns of a row of sums in shared memory: those of a diagonal lie in as many banks."""


def columns_of_part(head_dim: int) -> int:
    """Returns how many columns a part of an operand's tile has: a swizzle span."""
    return 32 if head_dim == 96 else 64


def stages(head_dim: int) -> int:
    """Returns for how many pairs of parts there is room."""
    return PARTS_BYTES // (2 * TILE * columns_of_part(head_dim) * 2)


@functools.cache
def description(head_dim: int) -> Description:
    """Describes the kernel of a head dim."""
    columns, ring, budget = columns_of_part(head_dim), stages(head_dim), REGISTER_BUDGETS[GROUPS]
    span, both = 2 * columns, ("mma",)
    part = (TILE, columns, ring)
    mma = "S, dP and the sum of dS of 64 query rows a warpgroup, and all keys"
    return Description(
        roles=(
            Role("load", 0, 1, "TMA: parts of Q with K, then of dO with V", 1, budget.load),
            Role("idle", 1, 3, "none", registers=budget.load),
            Role("mma", 4, 4, mma, GROUPS, budget.mma),
        ),
        barriers=(
            Barrier("work_full", (one("load"),), both, "tile: its work", WORK_BUFFERS),
            Barrier("work_empty", (warps("mma"),), ("load",), "tile: it is done", WORK_BUFFERS),
            Barrier("full", (copied("load"),), both, "pair of parts", ring),
            Barrier("empty", (warps("mma"),), ("load",), "pair of parts", ring),
        ),
        named_barriers=(
            NamedBarrier(
                "sums",
                first=1,
                threads=GROUPS * WARPGROUP,
                roles=both,
                meaning="the bias has been read; the sums of all warps are there; they are stored",
            ),
        ),
        regions=(
            Region("work", (WORK_WORDS, WORK_BUFFERS), "planes and tiles of a CTA's tile", "i32"),
            Region("visits", (VISIT_WORDS, ring), "head, rows, keys and extents of a visit", "i32"),
            operand("rows", part, span, "parts of Q and dO"),
            operand("keys", part, span, "parts of K and V"),
            Region(
                "sums",
                (PADDED_KEYS, TILE),
                "bias * log2(e), four numbers of each thread side by side; then the sums, by row",
                "f32",
                alignment=ROW_BYTES,
            ),
            Region(
                "pairs",
                (ROW_BYTES // 4, TILE, 2),
                "where the bias has pairs, row by row: those; the sums as pairs",
                "i32",
                alignment=ROW_BYTES,
                shares="sums",
            ),
        ),
        division=Division(TILE, keys=TILE, persistent=1, by_ticket=True),
        maps=tuple(TensorMap(name, name, TILE, columns, span) for name in ("q", "k", "v", "do")),
    )
