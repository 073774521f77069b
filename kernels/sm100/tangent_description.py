"""What the Blackwell tangent kernel consists of: roles, barriers, memory; see `tangent`."""

from __future__ import annotations

import functools

from kernels.description import (
    Barrier,
    Columns,
    Description,
    Division,
    Region,
    Role,
    TensorMap,
    committed,
    copied,
    group,
    one,
    operand,
    warps,
)
from kernels.sm100.forward_description import UNIT, WORK_SLOTS, WORK_WORDS
from kernels.sm100.tiles import BUFFERS, TANGENT_TILES, TangentTile

PAIR = 2  # an operand and its tangent, side by side


@functools.cache
def description(head_dim: int) -> Description:
    """Describes the tangent kernel of a head dim."""
    tile = TANGENT_TILES[head_dim]
    return Description(
        roles=_roles(tile),
        barriers=_barriers(tile),
        named_barriers=(),
        regions=_regions(tile, head_dim),
        division=Division(tile.m, persistent=1),
        maps=_maps(tile, head_dim),
        tensor_memory=_columns(tile, head_dim),
    )


def _roles(tile: TangentTile) -> tuple[Role, ...]:
    job = "P and W from S and its tangent, one row a thread; at the end the output's tangent"
    others = {
        "mma": "issues all products",
        "load": "TMA: Q and its tangent, K and V blocks and theirs into one ring, then O",
        "store": "TMA: the output's tangent to global memory",
        "schedule": "finds which tile comes next, one round ahead of all other roles",
    }
    first = 4 * tile.query_tiles
    return (
        Role("softmax", 0, 4, job, groups=tile.query_tiles),
        *(Role(name, first + i, 1, job) for i, (name, job) in enumerate(others.items())),
    )


def _barriers(tile: TangentTile) -> tuple[Barrier, ...]:
    """Lists the barriers: of those with one for each query tile, both have uses of their own.

    A single query tile's blocks take both barriers of s_full and p_full in turn.
    """
    workers = ("softmax", "mma", "load", "store")
    tiles, ring, per = tile.query_tiles, tile.kv_stages, "query tile"
    return (
        Barrier("work_full", (one("schedule"),), workers, per, WORK_SLOTS),
        Barrier("work_empty", tuple(map(warps, workers)), ("schedule",), per, WORK_SLOTS),
        Barrier("q_full", (copied("load"),), ("mma",), per, tiles),
        Barrier("q_empty", (committed("mma"),), ("load",), per, tiles),
        Barrier("o_full", (copied("load"),), ("softmax",), per, tiles),
        Barrier("out_full", (group("softmax"),), ("store",), per, tiles),
        Barrier("out_empty", (one("store"),), ("load",), per, tiles),
        Barrier("kv_full", (copied("load"),), ("mma",), "block of K or V", ring),
        Barrier("kv_empty", (committed("mma"),), ("load",), "block of K or V", ring),
        Barrier("s_full", (committed("mma"),), ("softmax",), "block", BUFFERS),
        Barrier("p_full", (group("softmax"),), ("mma",), "block", BUFFERS),
        Barrier("acc_full", (committed("mma"),), ("softmax",), "query tile with blocks", tiles),
    )


def _regions(tile: TangentTile, head_dim: int) -> tuple[Region, ...]:
    span, rows, ring = tile.span_bytes, tile.rows, tile.slot_operands * tile.kv_stages
    q = (rows, head_dim, PAIR * tile.query_tiles)
    kv = (tile.n, head_dim, ring)
    order = "K(0), V(0), K(1)" if tile.query_tiles == 2 else "K(0), K(1), V(0), K(2), V(1)"
    out = "in place of Q: O of a query tile, then its tangent on its way"
    return (
        Region("tmem_base", (), "where this CTA's tensor memory begins", "i32"),
        Region("work", (WORK_WORDS, WORK_SLOTS), "what the schedule warp says of a tile", "i32"),
        operand("q", q, span, "query tiles, each before its tangent"),
        operand("o", q, span, out, shares="q"),
        operand("k", kv, span, f"one ring: {order}, ..., each before its tangent"),
        operand("v", kv, span, "the same ring", shares="k"),
    )


def _columns(tile: TangentTile, head_dim: int) -> tuple[Columns, ...]:
    """Lists the columns; P and W, two 16-bit values a column, overwrite what they are made of.

    A thread writes those of 32 keys after it has read theirs and all before, and the next S is
    multiplied after P and W have been.
    """
    n, step = tile.n, PAIR * tile.n
    sums = "sums of a query tile's output tangent"
    return (
        Columns("s", 0, n, "S of a query tile's block", BUFFERS, step),
        Columns("s_tangent", n, n, "the tangent of S", BUFFERS, step),
        Columns("p", 0, n // 2, "P of the block, 16 bits each", BUFFERS, step, shares="s"),
        Columns("w", n, n // 2, "W of the block", BUFFERS, step, shares="s_tangent"),
        Columns("acc", BUFFERS * step, head_dim, sums, tile.query_tiles),
    )


def _maps(tile: TangentTile, head_dim: int) -> tuple[TensorMap, ...]:
    """Lists the tensor maps; rows move by whole tiles where a tile has one head's."""
    span, d = tile.span_bytes, head_dim
    rows = [
        TensorMap(f"{buffer}{suffix}", buffer, count, d, span, store=buffer == "o_tangent")
        for buffer in ("q", "q_tangent", "o", "o_tangent")
        for suffix, count in (("", UNIT), ("_rows", tile.rows))
    ]
    keys = [TensorMap(x, x, tile.n, d, span) for x in ("k", "k_tangent", "v", "v_tangent")]
    return (*rows, *keys)
