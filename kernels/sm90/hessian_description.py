"""What Hopper's kernels of Hessian-vector products consist of; see `hessian`."""

from __future__ import annotations

import functools

from fa4_jax.key import KernelKey, Pass
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
from kernels.sm90.tiles import (
    HESSIAN_KEY_TILES,
    HESSIAN_QUERY_TILES,
    REGISTER_BUDGETS,
    WARPGROUP,
    WARPGROUP_ROWS,
    HessianTile,
)

OF_QUERIES = ("q", "q_tangent", "do")
OF_KEYS = ("k", "k_tangent", "v", "v_tangent")
"""Operands by what their rows are; do has no tangent, since cotangents do not move."""

STATISTICS = 4  # of a query row: LSE in log2, LSE', delta, delta'

_FIRST_EPILOGUE, _PADDING = 1, 4


def tile_of(key: KernelKey) -> HessianTile:
    """Returns the sizes of a key's kernel."""
    tiles = HESSIAN_KEY_TILES if key.kernel is Pass.HESSIAN_KEY else HESSIAN_QUERY_TILES
    return tiles[key.head_dim]


def sides(by_key: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the operands of a CTA's rows, and those of the blocks of columns that it visits."""
    return (OF_KEYS, OF_QUERIES) if by_key else (OF_QUERIES, OF_KEYS)


def summed(by_key: bool) -> tuple[str, ...]:
    """Returns the operands of columns that results are sums of, which are read transposed."""
    return ("q", "q_tangent", "do") if by_key else ("k", "k_tangent")


def results(by_key: bool) -> tuple[tuple[str, str], ...]:
    """Returns each result with the operand of rows whose memory it takes at the end."""
    return (("dk_tangent", "k"), ("dv_tangent", "v")) if by_key else (("dq_tangent", "q"),)


@functools.cache
def of_key(key: KernelKey) -> Description:
    """Describes the kernel of a key."""
    tile, d, by_key = tile_of(key), key.head_dim, key.kernel is Pass.HESSIAN_KEY
    groups, span = tile.mma_warpgroups, tile.span_bytes
    budget = REGISTER_BUDGETS[groups]
    rows, columns = sides(by_key)
    what = "dK' and dV' of 64 keys" if by_key else "dQ' of 64 query rows"
    mma = f"S, S', dP, dP', and {what} a warpgroup"
    loads = [(name, tile.m) for name in rows] + [(name, tile.n) for name in columns]
    return Description(
        roles=(
            Role("load", 0, 1, "TMA: a tile of rows, then blocks of columns", 1, budget.load),
            Role("idle", 1, 3, "none", registers=budget.load),
            Role("mma", 4, 4, mma, groups, budget.mma),
        ),
        barriers=(
            Barrier("rows_full", (copied("load"),), ("mma",), "tile of rows"),
            Barrier("block_full", (copied("load"),), ("mma",), "block of columns", tile.stages),
            Barrier("block_empty", (warps("mma"),), ("load",), "block of columns", tile.stages),
        ),
        named_barriers=(
            NamedBarrier(
                "epilogue",
                first=_FIRST_EPILOGUE,
                count=groups,
                threads=WARPGROUP,
                roles=("mma",),
                meaning="a warpgroup reads its rows no more; then: its results are in their place",
            ),
            *([_padding(groups)] if key.band else []),  # Calls with lengths take a band's kernel.
        ),
        regions=_regions(tile, d, by_key),
        division=Division(0, keys=tile.m) if by_key else Division(tile.m),
        maps=(
            *(TensorMap(name, name, count, d, span) for name, count in loads),
            *(
                TensorMap(name, name, WARPGROUP_ROWS, d, span, store=True)
                for name, _ in results(by_key)
            ),
        ),
    )


def _padding(warpgroups: int) -> NamedBarrier:
    return NamedBarrier(
        "padding",
        first=_PADDING,
        threads=warpgroups * WARPGROUP,
        roles=("mma",),
        meaning="columns past their length are cleared",
    )


def _regions(tile: HessianTile, d: int, by_key: bool) -> tuple[Region, ...]:
    span, block = tile.span_bytes, (tile.n, d, tile.stages)
    rows, columns = sides(by_key)
    found = [operand(name, (tile.m, d), span, f"rows of {name}") for name in rows]
    found += [operand(name, block, span, f"blocks of {name}") for name in columns]
    for name in summed(by_key):
        text, shape = f"{name} transposed", (d, tile.n, tile.stages)
        found.append(operand(f"{name}_t", shape, span, text, shares=name, transposed=True))
    if by_key:
        shape = (STATISTICS, tile.n, tile.stages)
        text = "row_statistics of a block's queries"
        found.append(Region("statistics", shape, text, "f32", alignment=16))
    return tuple(found)
