"""What Blackwell's kernel of a bias's gradient consists of; see `bias_gradient`."""

from __future__ import annotations

import functools
from dataclasses import replace

from fa4_jax.key import BIAS_GRADIENT_TILES
from kernels.description import (
    LANES,
    Barrier,
    Description,
    Division,
    NamedBarrier,
    Region,
    Role,
    TensorMap,
    copied,
    operand,
    warps,
)

TILE = BIAS_GRADIENT_TILES["sm_100f"]
MMA_WARPS = 4
OPERANDS = ("q", "k", "v", "do")
STAGES = {64: 3, 96: 2, 128: 2, 192: 2, 256: 1}
"""Visits whose operands are there or on their way, by head dim: shared memory has room for them."""

PADDED_KEYS = TILE + 1
"""Columns of a row of sums in shared memory: those of a diagonal lie in as many banks."""


@functools.cache
def description(head_dim: int) -> Description:
    """Describes the kernel of a head dim."""
    tile, ring = TILE, STAGES[head_dim]
    span = 64 if head_dim == 96 else 128
    both = ("mma",)
    of_q = Region("sums", (PADDED_KEYS, tile), "the sum of dS, by row", "f32", shares="q")
    sums = of_q if of_q.num_bytes <= 2 * tile * head_dim * ring else replace(of_q, shares="")
    return Description(
        roles=(
            Role("mma", 0, MMA_WARPS, "S, dP and the sum of dS of 16 query rows and all keys"),
            Role("load", MMA_WARPS, 1, "TMA: Q, K, V and dO of every visit"),
        ),
        barriers=(
            Barrier("full", (copied("load"),), both, "visit", ring),
            Barrier("empty", (warps("mma"),), ("load",), "visit", ring),
        ),
        named_barriers=(
            NamedBarrier(
                "sums",
                first=1,
                threads=MMA_WARPS * LANES,
                roles=both,
                meaning="operands have been read; then: the sums of all warps are there",
            ),
        ),
        regions=(
            *(
                operand(name, (tile, head_dim, ring), span, f"{name} of visits")
                for name in OPERANDS
            ),
            sums,
        ),
        division=Division(tile, keys=tile),
        maps=tuple(TensorMap(name, name, tile, head_dim, span) for name in OPERANDS),
    )
