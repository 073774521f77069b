"""What the Hopper tangent kernel consists of: roles, barriers, shared memory; see `tangent`."""

from __future__ import annotations

import functools

from fa4_jax.key import KernelKey
from kernels.description import (
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
from kernels.sm90.forward_description import WORK_WORDS
from kernels.sm90.tiles import (
    REGISTER_BUDGETS,
    TANGENT_TILES,
    WARPGROUP,
    WARPGROUP_ROWS,
    TangentTile,
)

_FIRST_TURN, _FIRST_EPILOGUE, _PADDING = 1, 4, 7


@functools.cache
def of_key(key: KernelKey) -> Description:
    """Describes the tangent kernel of a key."""
    tile, d = TANGENT_TILES[key.head_dim], key.head_dim
    groups, span = tile.mma_warpgroups, tile.span_bytes
    budget = REGISTER_BUDGETS[groups]
    job = "TMA: Q and its tangent, then K and V blocks and theirs, then O"
    mma = "S, its tangent, P and the output's tangent of 64 query rows a warpgroup"
    loads = (("q", tile.m), ("k", tile.n), ("v", tile.n))
    return Description(
        roles=(
            Role("load", 0, 1, job + ("; takes tickets" if key.band else ""), 1, budget.load),
            Role("idle", 1, 3, "none", registers=budget.load),
            Role("mma", 4, 4, mma, groups, budget.mma),
        ),
        barriers=_barriers(tile),
        named_barriers=(
            NamedBarrier(
                "issue_turn",
                first=_FIRST_TURN,
                count=groups,
                threads=2 * WARPGROUP,
                roles=("mma",),
                meaning="the warpgroup may issue a block's products; forward, Note [issue turns]",
            ),
            NamedBarrier(
                "epilogue",
                first=_FIRST_EPILOGUE,
                count=groups,
                threads=WARPGROUP,
                roles=("mma",),
                meaning="a warpgroup's tangent is in shared memory",
            ),
            *([_padding(groups)] if key.band else []),  # Calls with lengths take a band's kernel.
        ),
        regions=_regions(tile, d),
        division=Division(tile.m, persistent=1, by_ticket=key.band),
        maps=(
            *(
                TensorMap(name, name, rows, d, span)
                for buffer, rows in loads
                for name in (buffer, f"{buffer}_tangent")
            ),
            TensorMap("o", "o", tile.m, d, span),
            TensorMap("o_tangent", "o_tangent", WARPGROUP_ROWS, d, span, store=True),
        ),
    )


def _padding(warpgroups: int) -> NamedBarrier:
    return NamedBarrier(
        "padding",
        first=_PADDING,
        threads=warpgroups * WARPGROUP,
        roles=("mma",),
        meaning="values past the key length, and their tangents, are cleared",
    )


def _barriers(tile: TangentTile) -> tuple[Barrier, ...]:
    loaded, released = (copied("load"),), (warps("mma"),)
    rings = (("q", "query tile", 1), ("o", "query tile", 1))
    rings += (("k", "block", tile.k_stages), ("v", "block", tile.v_stages))
    return tuple(
        barrier
        for name, per, count in rings
        for barrier in (
            Barrier(f"{name}_full", loaded, ("mma",), per, count),
            Barrier(f"{name}_empty", released, ("load",), per, count),
        )
    )


def _regions(tile: TangentTile, d: int) -> tuple[Region, ...]:
    span = tile.span_bytes
    found = [Region("work", (WORK_WORDS, 1), "rows, head and blocks of the query tile", "i32")]
    for name, shape, text in (
        ("q", (tile.m, d), "query tile"),
        ("k", (tile.n, d, tile.k_stages), "K blocks"),
        ("v", (tile.n, d, tile.v_stages), "V blocks"),
    ):
        found.append(operand(name, shape, span, text))
        found.append(operand(f"{name}_tangent", shape, span, f"tangents of {name}"))
    for name in ("v", "v_tangent"):
        text, shape = f"{name} transposed", (d, tile.n, tile.v_stages)
        found.append(operand(f"{name}_t", shape, span, text, shares=name, transposed=True))
    text = "the output of the query tile, then its tangent on its way"
    shares = "" if tile.own_output else "q"
    return (*found, operand("o", (tile.m, d), span, text, shares=shares))
