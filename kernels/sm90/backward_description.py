"""What the Hopper backward's kernels consist of; see `backward`."""

from __future__ import annotations

import functools

from kernels.common import ends_description
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
from kernels.sm90.tiles import (
    BACKWARD_TILES,
    REGISTER_BUDGETS,
    WARPGROUP,
    WARPGROUP_ROWS,
    BackwardTile,
    RegisterBudget,
)

SCORE_BUFFERS = 2


@functools.cache
def description(head_dim: int, deterministic: bool) -> Description:
    """Describes the main backward kernel of a head dim."""
    tile = BACKWARD_TILES[head_dim]
    budget, groups = REGISTER_BUDGETS[tile.mma_warpgroups], tile.mma_warpgroups
    staged = tile.stages_dq(deterministic)
    meanings = {
        "scores_ready": "dS, and P unless in registers, are in shared memory; Note [scores]",
        "finished": "K and V have been read; then: dK and dV are in their memory",
        "padding": "rows past a length are cleared",
    }
    return Description(
        roles=_roles(budget, groups, staged, deterministic),
        barriers=_barriers(tile.stages, staged, deterministic),
        named_barriers=tuple(
            NamedBarrier(name, number, groups * WARPGROUP, ("mma",), meaning)
            for number, (name, meaning) in enumerate(meanings.items(), 1)
        ),
        regions=_regions(tile, head_dim, staged, deterministic),
        division=Division(tile.m, tile.n, head_dim),
        maps=_maps(tile, head_dim),
    )


def pre(head_dim: int) -> Description:
    """Describes the kernel before the main one."""
    return ends_description.pre(BACKWARD_TILES[head_dim].m, head_dim)


def post(head_dim: int) -> Description:
    """Describes the kernel after the main one."""
    tile = BACKWARD_TILES[head_dim]
    return ends_description.post(Division(tile.m), WARPGROUP_ROWS, head_dim, tile.span_bytes)


def _roles(
    budget: RegisterBudget, groups: int, staged: bool, deterministic: bool
) -> tuple[Role, ...]:
    load = budget.load
    order = Role(
        "order", 1, 1, "opens the turns to add dQ; backward_dq, Note [dq order]", registers=load
    )
    reduce = Role("reduce", 1, 1, "adds dQ to global memory in bulk", registers=load)
    second = [reduce] if staged else [order] if deterministic else []
    idle = 3 - len(second)
    return (
        Role("load", 0, 1, "TMA: K, V once, then Q, dO and row statistics", registers=load),
        *second,
        Role("idle", 4 - idle, idle, "none", registers=load),
        Role("mma", 4, 4, "the five products and what lies between them", groups, budget.mma),
    )


def _barriers(stages: int, staged: bool, deterministic: bool) -> tuple[Barrier, ...]:
    loaded, released = (copied("load"),), (warps("mma"),)
    staging = (
        Barrier("dq_full", released, ("reduce",), "step: dQ is in shared memory"),
        Barrier("dq_empty", (one("reduce"),), ("mma",), "step: dQ has been read"),
    )
    order = (
        Barrier("dq_turn", (one("order"),), ("mma",), "step: dQ may be added"),
        Barrier("dq_added", released, ("order",), "step: dQ has been added"),
    )
    return (
        Barrier("kv_full", loaded, ("mma",), "CTA"),
        *(staging if staged else order if deterministic else ()),
        Barrier("q_full", loaded, ("mma",), "step: Q, lse_log2", stages),
        Barrier("q_empty", released, ("load",), "step", stages),
        Barrier("do_full", loaded, ("mma",), "step: dO, delta", stages),
        Barrier("do_empty", released, ("load",), "step", stages),
    )


def _regions(
    tile: BackwardTile, head_dim: int, staged: bool, deterministic: bool
) -> tuple[Region, ...]:
    m, n, d, span, ring = tile.m, tile.n, head_dim, tile.span_bytes, tile.stages
    ticket = Region("ticket", (), "the CTA's place among those that have started", "i32")
    dq = Region("dq", (m * d,), "dQ of a step; backward_dq, Note [dq_acc]", "f32", alignment=128)
    p_shares = "ds" if tile.split_keys else ""
    return (
        *([ticket] if deterministic else []),
        Region("lse_log2", (m, ring), "LSE, in units of log2", "f32", alignment=1024),
        Region("delta", (m, ring), "rowsum(dO * O) - dLSE", "f32", alignment=128),
        operand("k", (n, d), span, "the key tile; later stages dK"),
        operand("kt", (d, n), span, "K transposed", shares="k", transposed=True),
        operand("v", (n, d), span, "the key tile's values; later stages dV"),
        operand("q", (m, d, ring), span, "queries of a step"),
        operand("qt", (d, m, ring), span, "Q transposed", shares="q", transposed=True),
        operand("do", (m, d, ring), span, "dO of a step"),
        operand("dot", (d, m, ring), span, "dO transposed", shares="do", transposed=True),
        operand("ds", (n, m, SCORE_BUFFERS), 128, "dS of a step"),
        operand("dst", (m, n, SCORE_BUFFERS), 128, "dS transposed", shares="ds", transposed=True),
        operand("p", (n, m, SCORE_BUFFERS), 128, "P, unless in registers", shares=p_shares),
        *([dq] if staged else []),
    )


def _maps(tile: BackwardTile, head_dim: int) -> tuple[TensorMap, ...]:
    span, d = tile.span_bytes, head_dim
    return (
        TensorMap("q", "q", tile.m, d, span),
        TensorMap("k", "k", tile.n, d, span),
        TensorMap("v", "v", tile.n, d, span),
        TensorMap("do", "do", tile.m, d, span),
        TensorMap("dk", "dk", WARPGROUP_ROWS, d, span, store=True),
        TensorMap("dv", "dv", WARPGROUP_ROWS, d, span, store=True),
    )
