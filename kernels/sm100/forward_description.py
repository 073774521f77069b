"""What the Blackwell forward consists of: roles, barriers, shared memory; see `forward`."""

from __future__ import annotations

import functools

from fa4_jax.key import KernelKey
from kernels.common.page_maps import maps_of_pages
from kernels.description import (
    LANES,
    Barrier,
    Columns,
    Description,
    Division,
    NamedBarrier,
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
from kernels.sm100.tiles import BUFFERS, FORWARD_TILES, ForwardTile

WORK_WORDS = 13  # what describes one query tile's work
RANGE_WORDS = 5  # more with ranges: whether tags are compared; blocks that band and table allow
WORK_SLOTS = 2  # tiles whose work is known at a time
SOFTMAX_GROUPS = 2
UNIT = 8  # query rows of one head in a tile that heads share: an atom of the swizzle


@functools.cache
def of_key(key: KernelKey) -> Description:
    """Describes the forward kernel of a key."""
    head_dim, ranges = key.head_dim, key.ranges
    tile = FORWARD_TILES[head_dim, key.pair]
    roles = _roles(tile, ranges or key.bias)
    return Description(
        roles=roles,
        barriers=_barriers(tile, head_dim, roles),
        named_barriers=(
            NamedBarrier(
                "rescale",
                first=1,
                count=BUFFERS * 4,
                threads=2 * LANES,
                roles=("softmax", "correction"),
                meaning="the factors by which a warp's rows of O are rescaled are there; "
                "by score buffer and warp",
            ),
        ),
        regions=(*(_visits(tile) if ranges else ()), *_regions(tile, head_dim, ranges)),
        division=Division(tile.m, persistent=1),
        maps=_maps(tile, head_dim, key.paged),
        tensor_memory=_columns(tile, head_dim),
        ctas=tile.ctas,
    )


def _roles(tile: ForwardTile, ranges: bool) -> tuple[Role, ...]:
    """Lists the roles.

    A warp reaches the quarter of tensor memory's lanes that its place in its warpgroup gives it, so
    each group of softmax and correction warps starts at a multiple of four.
    """
    budget = tile.registers_of(ranges)
    roles = [
        Role(
            "softmax",
            first_warp=0,
            warps=4,
            groups=tile.query_tiles,
            registers=budget.softmax,
            job="P and row sums from S, one row a thread; a group for each query tile",
        )
    ]
    idle = SOFTMAX_GROUPS - tile.query_tiles
    if idle:
        job = "none: a single query tile has one softmax group"
        roles.append(Role("idle", 4 * tile.query_tiles, 4 * idle, job, registers=budget.idle))
    others = {
        "mma": "issues all products; in a pair's odd CTA relays the completion of loads",
        "load": "TMA: Q of the query tiles, K and V blocks into one ring, last block first",
        "store": "TMA: output tiles to global memory",
        "schedule": "finds which tile comes next, one round ahead of all other roles",
    }
    job = "rescales O where a row's reference moved; at the end O / sum to shared memory"
    return (
        *roles,
        Role("correction", 4 * SOFTMAX_GROUPS, 4, job, registers=budget.correction),
        *(
            Role(name, 4 * SOFTMAX_GROUPS + 4 + i, 1, job, registers=budget.others)
            for i, (name, job) in enumerate(others.items())
        ),
    )


def _barriers(tile: ForwardTile, head_dim: int, roles: tuple[Role, ...]) -> tuple[Barrier, ...]:
    """Lists the barriers; a pair's MMA warp waits for what both CTAs have loaded and computed.

    It is the even CTA's. The odd CTA's loads complete its own barriers, and its MMA warp, which has
    nothing else to do, relays them by an arrival at the even CTA's.
    """
    workers = tuple(role.name for role in roles if role.name not in ("schedule", "idle"))
    tiles, ring, spans = tile.query_tiles, tile.kv_stages, head_dim // tile.span
    later_parts = BUFFERS * (len(tile.p_splits) - 1)
    scored = (group("softmax"), warps("correction"))
    pair = tile.ctas > 1
    per_o = "query tile" if tiles > 1 else "block"
    return (
        Barrier("work_full", (one("schedule"),), workers, "query tile", WORK_SLOTS),
        Barrier("work_empty", tuple(map(warps, workers)), ("schedule",), "query tile", WORK_SLOTS),
        Barrier("q_full", (copied("load"),), ("mma",), "query tile", tiles, pair),
        Barrier("q_empty", (committed("mma"),), ("load",), "query tile", tiles),
        Barrier("kv_full", (copied("load"),), ("mma",), "block of K or V", ring, pair),
        Barrier("kv_empty", (committed("mma"),), ("load",), "block of K or V", ring),
        Barrier("s_full", (committed("mma"),), ("softmax",), "block", BUFFERS),
        # The first part of P is there, and O may be changed.
        Barrier("p_early", scored, ("mma",), "block: first part of P", BUFFERS, pair),
        Barrier(
            "p_late", (group("softmax"),), ("mma",), "block: another part of P", later_parts, pair
        ),
        Barrier("o_full", (committed("mma"),), ("correction",), per_o, tiles),
        Barrier("sums_full", (group("softmax"),), ("correction",), "query tile", tiles),
        Barrier("sums_empty", (warps("correction"),), ("softmax",), "query tile", tiles),
        Barrier("out_full", (warps("correction"),), ("store",), "span of output columns", spans),
        Barrier("out_empty", (one("store"),), ("correction",), "span of output columns", spans),
    )


def _visits(tile: ForwardTile) -> tuple[Region, ...]:
    """Describes the visits that the load warp has published, in as many slots as it needs.

    When it publishes visit i, it has waited for the slot of V(i - p), which is use p + 2 (i - p) of
    a ring of k slots; K runs p blocks ahead. So V(i - p - k / 2) has been used, and its P before.
    """
    needed = tile.buffers_per_tile + (tile.kv_stages + 1) // 2
    slots = 1 << (needed - 1).bit_length()
    return (Region("visits", (slots,), "blocks of visits, and whether ranges hide any", "i32"),)


def _regions(tile: ForwardTile, head_dim: int, ranges: bool) -> tuple[Region, ...]:
    work_words = WORK_WORDS + (RANGE_WORDS if ranges else 0)
    span, rows = tile.span_bytes, tile.rows
    ring, columns_of_v = tile.kv_stages, tile.columns_of_v(head_dim)
    kv = "one ring: K(0), V(0), K(1), V(1), ... of the blocks"
    return (
        Region("tmem_base", (), "where this CTA's tensor memory begins", "i32"),
        Region("work", (work_words, WORK_SLOTS), "what the schedule warp says of a tile", "i32"),
        Region("factors", (rows, BUFFERS), "by what O is rescaled before the block", "f32"),
        # A single query tile uses half of it.
        Region("inverse_sums", (rows, BUFFERS), "negative where there is no output", "f32"),
        operand("q", (rows, head_dim, tile.query_tiles), span, "query tiles"),
        operand("k", (tile.keys, head_dim, ring), span, kv),
        operand("v", (tile.n, columns_of_v, ring), span, "the same ring", shares="k"),
        operand("o", (rows, head_dim), span, "a query tile's output on its way"),
    )


def _columns(tile: ForwardTile, head_dim: int) -> tuple[Columns, ...]:
    """Lists the columns; P, two 16-bit values a column, overwrites the upper half of S's.

    A thread writes its row of P after it has read its whole row of S, and the next S is multiplied
    after P has been.
    """
    n = tile.n
    return (
        Columns("s", 0, n, "S of a block", BUFFERS),
        Columns("p", n // 2, n // 2, "P of a block, 16 bits each", BUFFERS, n, shares="s"),
        Columns("o", BUFFERS * n, head_dim, "O of a query tile", tile.query_tiles),
    )


def _maps(tile: ForwardTile, head_dim: int, paged: bool) -> tuple[TensorMap, ...]:
    """Lists the tensor maps.

    q and o move by whole tiles where a tile has one head's rows, else by units.
    """
    span, d, rows = tile.span_bytes, head_dim, tile.rows
    if paged:
        of_keys = maps_of_pages({"k": d, "v": tile.columns_of_v(d)}, tile.keys, span)
    else:
        of_keys = (
            TensorMap("k", "k", tile.keys, d, span),
            TensorMap("v", "v", tile.n, tile.columns_of_v(d), span),
        )
    return (
        TensorMap("q", "q", UNIT, d, span),
        *of_keys,
        TensorMap("o", "o", UNIT, tile.span, span, store=True),
        TensorMap("q_rows", "q", rows, d, span),
        TensorMap("o_rows", "o", rows, tile.span, span, store=True),
    )
