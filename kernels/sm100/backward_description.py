"""What the Blackwell backward consists of, with one CTA a key tile or a pair; see `backward`."""

from __future__ import annotations

import functools

from kernels.description import (
    LANES,
    Barrier,
    Description,
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
    BackwardPairTile,
    BackwardRegisters,
    BackwardTile,
)

COMPUTE_GROUPS = 2
_STATISTICS_ALIGNMENT = 128  # bulk copies of row statistics


@functools.cache
def description(head_dim: int, value_dim: int, deterministic: bool) -> Description:
    """The main backward kernel of these head dims."""
    tile = BACKWARD_TILES[head_dim, value_dim]
    pair = isinstance(tile, BackwardPairTile)
    return Description(
        roles=_roles(tile.registers, pair),
        barriers=_pair_barriers(deterministic) if pair else _barriers(tile.stages, deterministic),
        named_barriers=(
            NamedBarrier(
                "stored",
                first=1,
                threads=COMPUTE_GROUPS * 4 * LANES,
                roles=("compute",),
                meaning="dK and dV are in shared memory",
            ),
        ),
        regions=_pair_regions(tile) if pair else _regions(tile),
        maps=_pair_maps(tile) if pair else _maps(tile),
        ctas=tile.ctas,
    )


def _roles(budget: BackwardRegisters, pair: bool) -> tuple[Role, ...]:
    """Reduce and compute warps reach the lanes of tensor memory of their place in a warpgroup, so
    each of their groups starts at a multiple of four."""
    compute = "P and dS from S and dP, one key a thread; at the end dV and dK to global memory"
    if pair:
        compute += "; the two groups take steps in turn"
    reduce = "dQ from tensor memory to global memory by vector additions"
    others = {
        "mma": "issues all products; in a pair's odd CTA relays the completion of loads",
        "load": "TMA: K, V once, then Q, dO and row statistics of every step",
        "order": "deterministic only: the place in the order of work, turns to add dQ",
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
    """The order warp lets the reduce warps add dQ, and they tell it that they have."""
    if not deterministic:
        return ()
    return (
        Barrier("turn", (one("order"),), ("reduce",), "step"),
        Barrier("added", (warps("reduce"),), ("order",), "step"),
    )


def _barriers(stages: int, deterministic: bool) -> tuple[Barrier, ...]:
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
        *_order_barriers(deterministic),
    )


def _pair_barriers(deterministic: bool) -> tuple[Barrier, ...]:
    """The MMA warp of the even CTA waits for what both CTAs have loaded, computed and read."""
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
        *_order_barriers(deterministic),
    )


def _head(rows: int, stages: int) -> tuple[Region, ...]:
    """What lies before the operands: single values, then row statistics of every stage."""
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
        # K's last product may read V's columns, too: V lies right after K.
        operand("v", (n, value_dim), span, "the key tile's values; later stages dV"),
        operand("q", (m, d, tile.stages), span, "queries of a step"),
        operand("do", (m, value_dim, tile.stages), span, "dO of a step"),
        operand("ds", (n, m), 128, "dS of a step, for dQ"),
    )


def _pair_regions(tile: BackwardPairTile) -> tuple[Region, ...]:
    """Of CTA r: the same in both."""
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
        # Written by hand, from both CTAs, in spans of 64 bytes.
        Region(
            "dst", (tile.n, queries, BUFFERS), "dS of all keys, the CTA's queries", alignment=1024
        ),
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
