"""What the Blackwell backward's kernels consist of, where a CTA or a pair has a key tile."""

from __future__ import annotations

import functools

from kernels.common import ends_description
from kernels.description import (
    LANES,
    TENSOR_MEMORY_COLUMNS,
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
from kernels.sm100.tiles import (
    BACKWARD_TILES,
    BUFFERS,
    AnyBackwardTile,
    BackwardM256Tile,
    BackwardPairTile,
    BackwardTile,
)

COMPUTE_GROUPS = 2
_STATISTICS_ALIGNMENT = 128  # bulk copies of row statistics

VISIT_SLOTS = 8
"""Steps whose query block the load warp has published at most.

When it publishes step i, dK(i - 3) is complete. So dQ(i - 4) has been issued, and reduce warps,
the last that read a step's block, have read dQ(i - 6) and that step's block.
"""


@functools.cache
def description(
    head_dim: int, value_dim: int, deterministic: bool, pair: bool, ranges: bool = False
) -> Description:
    """Describes the main backward kernel of these head dims; the flags as in `KernelKey`."""
    tile = BACKWARD_TILES[head_dim, value_dim, pair]
    if isinstance(tile, BackwardM256Tile):
        barriers, regions = _m256_barriers(tile), _m256_regions(tile)
        maps, columns = _m256_maps(tile), _m256_columns(tile)
    elif isinstance(tile, BackwardPairTile):
        barriers, regions = _pair_barriers(), _pair_regions(tile)
        maps, columns = _pair_maps(tile), _pair_columns(tile)
    else:
        barriers, regions = _barriers(tile.stages), _regions(tile)
        maps, columns = _maps(tile), _columns(tile)
    return Description(
        roles=_roles(tile),
        barriers=(*barriers, *_order_barriers(deterministic)),
        named_barriers=(
            NamedBarrier(
                "stored",
                first=1,
                threads=COMPUTE_GROUPS * 4 * LANES,
                roles=("compute",),
                meaning="dK and dV are in shared memory",
            ),
        ),
        regions=(*(_VISITS if ranges else ()), *regions),
        division=Division(tile.m, tile.n, tile.head_dim, programmatic=True),
        maps=maps,
        tensor_memory=columns,
        ctas=tile.ctas,
    )


_VISITS = (
    Region(
        "visits", (2, VISIT_SLOTS), "query blocks of steps, and what ranges hide in them", "i32"
    ),
)


def pre(head_dim: int, value_dim: int) -> Description:
    """Describes the kernel before the main one, of one CTA or a pair."""
    tile = BACKWARD_TILES[head_dim, value_dim, False]
    return ends_description.pre(Division(tile.m, columns=tile.head_dim))


def post(head_dim: int, value_dim: int) -> Description:
    """Describes the kernel after the main one, of one CTA or a pair."""
    tile = BACKWARD_TILES[head_dim, value_dim, False]
    division = Division(tile.m, programmatic=True)
    return ends_description.post(division, tile.m, tile.head_dim, tile.span_bytes)


def _roles(tile: AnyBackwardTile) -> tuple[Role, ...]:
    """Lists the roles.

    A warp reaches the quarter of tensor memory's lanes that its place in its warpgroup gives it, so
    each group of reduce and compute warps starts at a multiple of four.
    """
    compute = "P and dS from S and dP, one key a thread; at the end dV and dK to global memory"
    if isinstance(tile, BackwardPairTile):
        compute += "; the two groups take steps in turn"
    budget = tile.registers
    reduce = "dQ from tensor memory to global memory by vector additions"
    others = {
        "mma": "issues all products; in a pair's odd CTA relays the completion of loads",
        "load": "TMA: K, V once, then Q, dO and row statistics of every step",
        "order": "deterministic only: draws the ticket of the CTA or pair, opens the turns for dQ",
        "idle": "none",
    }
    return (
        Role("reduce", 0, 4, reduce, registers=budget.reduce),
        Role("compute", 4, 4, compute, COMPUTE_GROUPS, budget.compute),
        *(
            Role(name, 12 + i, 1, job, registers=budget.others)
            for i, (name, job) in enumerate(others.items())
        ),
    )


def _order_barriers(deterministic: bool) -> tuple[Barrier, ...]:
    """Lists the order warp's barriers: it lets reduce warps add dQ and waits until they have."""
    if not deterministic:
        return ()
    return (
        Barrier("dq_turn", (one("order"),), ("reduce",), "step"),
        Barrier("dq_added", (warps("reduce"),), ("order",), "step"),
    )


def _barriers(stages: int) -> tuple[Barrier, ...]:
    mma, load, compute = ("mma",), ("load",), ("compute",)
    loaded, multiplied, computed = (copied("load"),), (committed("mma"),), (warps("compute"),)
    return (
        Barrier("kv_full", loaded, mma, "CTA"),
        Barrier("q_full", loaded, mma, "step: Q, lse_log2, delta", stages),
        Barrier("q_empty", multiplied, load, "step", stages),
        Barrier("do_full", loaded, mma, "step", stages),
        Barrier("do_empty", multiplied, load, "step", stages),
        Barrier("s_full", multiplied, compute, "step"),
        Barrier("p_full", computed, mma, "step"),
        Barrier("dp_full", multiplied, compute, "step"),
        Barrier("ds_full", computed, mma, "step: dS in tensor memory and in shared memory"),
        Barrier("dq_full", multiplied, ("reduce",), "step"),
        Barrier("dq_empty", (warps("reduce"),), mma, "step"),
        Barrier("grads_full", multiplied, compute, "CTA"),
    )


def _pair_barriers() -> tuple[Barrier, ...]:
    """Lists a pair's barriers; its MMA warp waits for what both CTAs load, compute and read."""
    mma, load, compute = ("mma",), ("load",), ("compute",)
    loaded, multiplied, computed = (copied("load"),), (committed("mma"),), (group("compute"),)
    by_step, in_buffer, scores = "step", "step, by buffer", ("compute", "load")
    return (
        Barrier("kv_full", loaded, mma, "CTA: k, v, kt", of_pair=True),
        Barrier("q_full", loaded, mma, "step: q, lse_log2, delta", of_pair=True),
        Barrier("qt_full", loaded, mma, by_step, of_pair=True),
        Barrier("do_full", loaded, mma, by_step, of_pair=True),
        Barrier("dot_full", loaded, mma, by_step, of_pair=True),
        Barrier("qt_empty", multiplied, load, by_step),
        Barrier("dot_empty", multiplied, load, by_step),
        Barrier("s_full", multiplied, scores, in_buffer, BUFFERS),
        Barrier("dp_full", multiplied, scores, in_buffer, BUFFERS),
        Barrier("p_full", computed, mma, in_buffer, BUFFERS, of_pair=True),
        # dS is in the shared memory of both CTAs.
        Barrier("ds_full", computed, mma, in_buffer, BUFFERS, of_pair=True),
        Barrier("dq_full", multiplied, ("reduce",), in_buffer, BUFFERS),
        Barrier("dq_empty", (warps("reduce"),), mma, in_buffer, BUFFERS, of_pair=True),
        Barrier("grads_full", multiplied, compute, "CTA"),
    )


def _m256_barriers(tile: BackwardM256Tile) -> tuple[Barrier, ...]:
    """Lists the barriers of a pair with M = 256, where row statistics come with q and with do."""
    s_read = Barrier(
        "s_read", (warps("compute"),), ("mma",), "step: S is in registers", of_pair=True
    )
    mma, load, compute = ("mma",), ("load",), ("compute",)
    loaded, multiplied, computed = (copied("load"),), (committed("mma"),), (warps("compute"),)
    step, scores = "step", ("compute", "load")
    return (
        Barrier("kv_full", loaded, mma, "CTA: k, v, kt", of_pair=True),
        Barrier("q_full", loaded, mma, "step: q, lse_log2", of_pair=True),
        Barrier("qt_full", loaded, mma, step, of_pair=True),
        Barrier("do_full", loaded, mma, "step: do, delta", of_pair=True),
        Barrier("dot_full", loaded, mma, step, of_pair=True),
        Barrier("qt_empty", multiplied, load, step),
        Barrier("dot_empty", multiplied, load, step),
        Barrier("s_full", multiplied, scores, step),
        Barrier("dp_full", multiplied, scores, step),
        *(() if tile.dq_transposed else (s_read,)),
        Barrier("p_full", computed, mma, "step; one for each part", tile.parts, of_pair=True),
        Barrier("ds_full", computed, mma, "step: dS is in tensor memory", of_pair=True),
        # dS is in the shared memory of both CTAs.
        Barrier("dst_full", computed, mma, "step, by buffer", BUFFERS, of_pair=True),
        Barrier("dq_full", multiplied, ("reduce",), step),
        Barrier("dq_empty", (warps("reduce"),), mma, step, of_pair=True),
        Barrier("grads_full", multiplied, compute, "CTA"),
    )


def _head(rows: int, stages: int) -> tuple[Region, ...]:
    """Lists what lies before the operands: single values, then row statistics of every stage."""
    ticket = "deterministic: the place of the CTA, or the pair, among those that have started"
    return (
        Region("tmem_base", (), "where this CTA's tensor memory begins", "i32"),
        Region("ticket", (), ticket, "i32"),
        *(
            Region(name, (rows, stages), holds, "f32", alignment=_STATISTICS_ALIGNMENT)
            for name, holds in (
                ("lse_log2", "LSE of the step's queries, in units of log2"),
                ("delta", "rowsum(dO * O) - dLSE of the step's queries"),
            )
        ),
    )


def _regions(tile: BackwardTile) -> tuple[Region, ...]:
    m, n, d, value_dim, span = tile.m, tile.n, tile.head_dim, tile.value_dim, tile.span_bytes
    return (
        *_head(m, tile.stages),
        operand("k", (n, d), span, "the key tile; later stages dK"),
        # The last product of K's columns may read V's, too, so V lies right after K.
        operand("v", (n, value_dim), span, "the key tile's values; later stages dV"),
        operand("q", (m, d, tile.stages), span, "queries of a step"),
        operand("do", (m, value_dim, tile.stages), span, "dO of a step"),
        operand("ds", (n, m), 128, "dS of a step, for dQ"),
    )


def _pair_regions(tile: BackwardPairTile) -> tuple[Region, ...]:
    """Lists the regions of a CTA of a pair; those of the other one are the same."""
    d, span, part = tile.head_dim, tile.span_bytes, tile.part
    keys, queries = tile.keys, tile.queries
    return (
        *_head(tile.m, tile.statistics),
        operand("k", (keys, d), span, "K of the CTA's keys; later stages dK"),
        operand("v", (keys, d), span, "V of the CTA's keys; later stages dV"),
        operand("kt", (tile.n, part), span, "K of all keys, the CTA's columns"),
        operand("q", (queries, d), span, "Q of the CTA's queries"),
        operand("do", (queries, d), span, "dO of the CTA's queries"),
        operand("qt", (tile.m, part), span, "Q of all queries, the CTA's columns"),
        operand("dot", (tile.m, part), span, "dO of all queries, the CTA's columns"),
        operand("p", (keys, tile.m, BUFFERS), span, "P of the CTA's keys"),
        operand("ds", (keys, tile.m, BUFFERS), span, "dS of the CTA's keys"),
        _dst(tile),
    )


def _m256_regions(tile: BackwardM256Tile) -> tuple[Region, ...]:
    """Lists the regions of a CTA of a pair with M = 256; those of the other one are the same."""
    d, value_dim, span, of_part = (
        *(tile.head_dim, tile.value_dim),
        *(tile.span_bytes, tile.part_span_bytes),
    )
    keys, queries = tile.keys, tile.queries
    return (
        *_head(tile.m, tile.statistics),
        operand("k", (keys, d), span, "K of the CTA's keys; later stages dK"),
        # The product of kt's columns may read V's, too, so V lies right after kt.
        operand("kt", (tile.n, tile.part), of_part, "K of all keys, the CTA's columns"),
        operand("v", (keys, value_dim), span, "V of the CTA's keys; later stages dV"),
        operand("q", (queries, d), span, "Q of the CTA's queries"),
        operand("do", (queries, value_dim), span, "dO of the CTA's queries"),
        operand("qt", (tile.m, tile.part), of_part, "Q of all queries, the CTA's columns"),
        operand("dot", (tile.m, tile.value_part), span, "dO of all queries, the CTA's columns"),
        _dst(tile),
    )


def _dst(tile: BackwardPairTile | BackwardM256Tile) -> Region:
    """dS of a CTA's queries; compute warps of both CTAs write it (`ptx.store_swizzled_row`).

    A row is one swizzle span of 64 or 128 bytes.
    """
    shape = (tile.n, tile.queries, BUFFERS)
    return Region("dst", shape, "dS of all keys, the CTA's queries", alignment=1024)


def _columns(tile: BackwardTile) -> tuple[Columns, ...]:
    """Lists the columns of a CTA.

    P overwrites the first half of the columns of each half of S, dS those of each half of dP. A
    thread of compute warpgroup c has read its row of half c before it writes there, and no other
    thread reads that row. dQ begins with dP's columns if there is no room beside them.
    """
    m, dq_width, dq_columns = tile.m, tile.dq_width, tile.dq_products * tile.dq_width
    beside = 2 * m + dq_columns + tile.head_dim + tile.value_dim <= TENSOR_MEMORY_COLUMNS
    first_dv = 2 * m if beside else max(2 * m, m + dq_columns)
    first_dk = first_dv + tile.value_dim
    first_dq = first_dk + tile.head_dim if beside else m
    half, of_half = m // COMPUTE_GROUPS, m // COMPUTE_GROUPS // 2
    return (
        Columns("s", 0, m, "S of a step"),
        Columns("p", 0, of_half, "P by halves, 16 bits each", COMPUTE_GROUPS, half, shares="s"),
        Columns("dp", m, m, "dP of a step"),
        Columns("ds", m, of_half, "dS by halves, 16 bits each", COMPUTE_GROUPS, half, shares="dp"),
        Columns("dv", first_dv, tile.value_dim, "dV"),
        Columns("dk", first_dk, tile.head_dim, "dK"),
        Columns(
            *("dq", first_dq, dq_width, "dQ of a step", tile.dq_products),
            shares="" if beside else "dp",
        ),
    )


def _pair_columns(tile: BackwardPairTile) -> tuple[Columns, ...]:
    """Lists the columns of each CTA of a pair."""
    queries, m, part = tile.queries, tile.m, tile.part
    first_dq = 2 * BUFFERS * queries
    first_dv = first_dq + BUFFERS * m
    return (
        Columns("s", 0, queries, "S of a step", BUFFERS),
        Columns("dp", BUFFERS * queries, queries, "dP of a step", BUFFERS),
        Columns("dq", first_dq, m, "dQ of a step, transposed", BUFFERS),
        Columns("dv", first_dv, part, "dV, the CTA's part"),
        Columns("dk", first_dv + part, part, "dK, the CTA's part"),
    )


def _m256_columns(tile: BackwardM256Tile) -> tuple[Columns, ...]:
    """Lists the columns of each CTA of a pair with M = 256.

    Compute warpgroup c has the 32 columns from 32 c on of every 64 of S and of dP, and writes P and
    dS over the first 32 of them alone, which it has read. So of 128 columns of S the upper 64 are
    free once S has been read: dQ takes them, where it has no columns of its own.
    """
    m, chunk = tile.m, tile.chunk
    beside = 2 * m + tile.dq_width if tile.dq_transposed else 2 * m
    first_dq = 2 * m if tile.dq_transposed else m // 2
    written = {"width": tile.parts * chunk // 2, "count": COMPUTE_GROUPS, "stride": chunk}
    return (
        Columns("s", 0, m, "S of a step"),
        Columns("p", 0, holds="P by warpgroups, 16 bits each", shares="s", **written),
        Columns("dp", m, m, "dP of a step"),
        Columns("ds", m, holds="dS by warpgroups, 16 bits each", shares="dp", **written),
        Columns(
            *("dq", first_dq, tile.dq_width, "dQ of a step"),
            shares="" if tile.dq_transposed else "s",
        ),
        Columns("dv", beside, tile.value_dim, "dV of the CTA's keys"),
        Columns("dk", beside + tile.value_dim, tile.head_dim, "dK of the CTA's keys"),
    )


def _maps(tile: BackwardTile) -> tuple[TensorMap, ...]:
    m, n, d, value_dim, span = tile.m, tile.n, tile.head_dim, tile.value_dim, tile.span_bytes
    return (
        TensorMap("q", "q", m, d, span),
        TensorMap("k", "k", n, d, span),
        TensorMap("v", "v", n, value_dim, span),
        TensorMap("do", "do", m, value_dim, span),
        TensorMap("dk", "dk", n, d, span, store=True),
        TensorMap("dv", "dv", n, value_dim, span, store=True),
    )


def _pair_maps(tile: BackwardPairTile) -> tuple[TensorMap, ...]:
    d, span, part, keys, queries = (
        tile.head_dim,
        tile.span_bytes,
        tile.part,
        tile.keys,
        tile.queries,
    )
    return (
        TensorMap("k", "k", keys, d, span),
        TensorMap("v", "v", keys, d, span),
        TensorMap("kt", "k", tile.n, part, span),
        TensorMap("q", "q", queries, d, span),
        TensorMap("do", "do", queries, d, span),
        TensorMap("qt", "q", tile.m, part, span),
        TensorMap("dot", "do", tile.m, part, span),
        TensorMap("dk", "dk", keys, d, span, store=True),
        TensorMap("dv", "dv", keys, d, span, store=True),
    )


def _m256_maps(tile: BackwardM256Tile) -> tuple[TensorMap, ...]:
    d, value_dim, span, of_part, keys, queries = (
        *(tile.head_dim, tile.value_dim),
        *(tile.span_bytes, tile.part_span_bytes),
        *(tile.keys, tile.queries),
    )
    return (
        TensorMap("k", "k", keys, d, span),
        TensorMap("v", "v", keys, value_dim, span),
        TensorMap("kt", "k", tile.n, tile.part, of_part),
        TensorMap("q", "q", queries, d, span),
        TensorMap("do", "do", queries, value_dim, span),
        TensorMap("qt", "q", tile.m, tile.part, of_part),
        TensorMap("dot", "do", tile.m, tile.value_part, span),
        TensorMap("dk", "dk", keys, d, span, store=True),
        TensorMap("dv", "dv", keys, value_dim, span, store=True),
    )
