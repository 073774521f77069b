"""What the Hopper backward's kernels consist of; see `backward`."""

from __future__ import annotations

import dataclasses
import functools

from fa4_jax.key import KernelKey
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
)

SCORE_BUFFERS = 2
"""Buffers of dS, which steps use in turn."""

VISIT_WORDS = 2
"""int32 words that say what a step is: its query block, and what ranges hide in it."""

ORDER_WARPS = 2
"""Warps that add dQ, or open the turns for it, in a fixed order: each has every other step."""

WORK_WORDS = 12
"""int32 words that say what a tile's work is; with ranges in memory one more counts its blocks."""

TICKET_WORDS = 4
"""int32 words of a ticket that the even CTA of a pair sends: a copy is of 16 bytes at least."""

TAIL_WORDS = 2
"""More such words where the last tiles are split: which of these it is, and into how many parts."""

_VISITS = "query block of a step, and what ranges hide in it"
_BITS = ", and where the bits of a mask of pairs are"


@functools.cache
def of_key(key: KernelKey) -> Description:
    """Describes the main backward kernel of a key."""
    head_dim, value_dim, deterministic = key.head_dim, key.value_dim, key.deterministic
    tile = BACKWARD_TILES[head_dim, value_dim].of_kernel(deterministic, key.soft_cap)
    words, text = VISIT_WORDS, _VISITS
    if key.reads_mask:
        words, text = words + tile.m // WARPGROUP_ROWS, text + _BITS
    visits = (Region("visits", (words, tile.stages), text, "i32"),) if key.ranges else ()
    if tile.ctas > 1:
        text = "key tile, head and blocks of the pair's tile"
        work = Region("work", (WORK_WORDS + key.ranges, 2), text, "i32")
        text = "the pair's place in the order of work, four times"
        ticket = Region("ticket", (TICKET_WORDS, 2), text, "i32", alignment=TICKET_WORDS * 4)
        visits = (ticket, work, *visits)
    else:
        text = "key tile, head and blocks of the CTA's tile"
        words = WORK_WORDS + key.ranges + TAIL_WORDS * _splits_tail(key)
        work = Region("work", (words, 2), text, "i32")
        blocks = Region("dq_block", (tile.dq_buffers,), "query block of a buffer of dQ", "i32")
        places = Region("tile_index", (2,), "place of the CTA's tile in the order of work", "i32")
        parts = Region("parts_done", (1,), "parts of a split tile that were done before", "i32")
        more = [blocks] * key.ranges + [places] * clears(key) + [parts] * _splits_tail(key)
        visits = (work, *visits, *more)
    return Description(
        roles=_roles(tile, deterministic),
        barriers=_barriers(tile, deterministic),
        named_barriers=_named_barriers_of_pair() if tile.ctas > 1 else _named_barriers(tile),
        regions=(*visits, *_regions(tile, (head_dim, value_dim), deterministic)),
        division=_division(key),
        maps=_maps(tile, head_dim, value_dim),
        ctas=tile.ctas,
    )


def pre(key: KernelKey) -> Description:
    """Describes the kernel before the main one."""
    return ends_description.pre(dataclasses.replace(_division(key), persistent=0))


def post(head_dim: int, value_dim: int) -> Description:
    """Describes the kernel after the main one."""
    tile = BACKWARD_TILES[head_dim, value_dim]
    division = Division(tile.m, stores_first=tile.persistent)
    return ends_description.post(division, WARPGROUP_ROWS, head_dim, tile.post_span_bytes)


def clears(key: KernelKey) -> bool:
    """Whether the main kernel clears dQ: backward_clear.py."""
    return _division(key).cleared_bytes > 0


def _splits_tail(key: KernelKey) -> bool:
    """Whether CTAs split the last tiles; of the kernel before the main one: whether they may."""
    splits = BACKWARD_TILES[key.head_dim, key.value_dim].splits_tail
    return splits and not (key.band or key.ranges or key.deterministic)


def _division(key: KernelKey) -> Division:
    tile = BACKWARD_TILES[key.head_dim, key.value_dim]
    return Division(
        *(tile.m, tile.keys, key.head_dim),
        persistent=1,
        by_ticket=True,
        splits_tail=_splits_tail(key),
        cleared_bytes=tile.cleared_bytes(key.deterministic),
        stores_first=key.deterministic and tile.persistent,
    )


def _users(tile: BackwardTile) -> tuple[str, ...]:
    """Names the roles that issue products."""
    return ("scores", "gradient") if tile.ctas > 1 else ("mma",)


def _roles(tile: BackwardTile, deterministic: bool) -> tuple[Role, ...]:
    budget = REGISTER_BUDGETS[tile.mma_warpgroups]
    load, groups = budget.load, tile.mma_warpgroups
    order = Role(
        "order",
        first_warp=1,
        warps=ORDER_WARPS,
        job="opens the turns to add dQ; backward_dq, Note [dq order]",
        registers=load,
    )
    warps = ORDER_WARPS if deterministic else 1
    reduce = Role("reduce", 1, warps, "adds dQ to global memory in bulk", registers=load)
    second = [reduce] if tile.persistent else [order] if deterministic else []
    if tile.persistent and not deterministic:
        second.append(Role("clear", 2, 1, "clears dQ of the next section", registers=load))
    idle = 3 - sum(role.warps for role in second)
    mma = (Role("mma", 4, 4, "the five products and what lies between them", groups, budget.mma),)
    of_pair = (
        Role("scores", 4, 4, "S, P, dV and half of the CTA's dQ", registers=budget.mma),
        Role("gradient", 8, 4, "dP, dS, dK and half of the CTA's dQ", registers=budget.mma),
    )
    return (
        Role("load", 0, 1, "TMA: K, V of a tile, then Q, dO and row statistics", registers=load),
        *second,
        Role("idle", 4 - idle, idle, "none", registers=load),
        *(of_pair if tile.ctas > 1 else mma),
    )


def _named_barriers(tile: BackwardTile) -> tuple[NamedBarrier, ...]:
    meanings = {
        "scores_ready": "dS is in shared memory; Note [scores]",
        "finished": "dS has been read; dK and dV are staged; they have been stored",
        "padding": "rows past a length are cleared",
    }
    threads = tile.mma_warpgroups * WARPGROUP
    return tuple(
        NamedBarrier(name, number, threads, ("mma",), meaning)
        for number, (name, meaning) in enumerate(meanings.items(), 1)
    )


def _named_barriers_of_pair() -> tuple[NamedBarrier, ...]:
    both = ("scores", "gradient")
    meanings = {
        "p_ready": (both, "P of a step can be read; then: scores has read Q"),
        "ds_ready": (both, "dS is in shared memory, P has been read; then: gradient has read dO"),
        "padding": (both, "rows of dO are cleared"),
        "scores_meet": (("scores",), "rows of Q are cleared; then: dV is in dO's memory"),
        "gradient_meet": (("gradient",), "dS is in shared memory; then: dK is in Q's memory"),
    }
    named = [
        NamedBarrier(name, number, len(roles) * WARPGROUP, roles, meaning)
        for number, (name, (roles, meaning)) in enumerate(meanings.items(), 1)
    ]
    cleared = "keys past the length are cleared; one for each warpgroup, which waits there"
    keys = NamedBarrier("keys_cleared", len(named) + 1, 2 * WARPGROUP, both, cleared, count=2)
    return (*named, keys)


def _barriers(tile: BackwardTile, deterministic: bool) -> tuple[Barrier, ...]:
    users = _users(tile)
    loaded, released = (copied("load"),), tuple(warps(role) for role in users)
    q_stages, do_stages = tile.stages, tile.do_stages
    staging = (
        Barrier("dq_full", released, ("reduce",), "step: dQ is in shared memory", tile.dq_buffers),
        Barrier("dq_empty", (one("reduce"),), users, "step: dQ has been read", tile.dq_buffers),
    )
    order = (
        Barrier("dq_turn", (one("order"),), users, "step: dQ may be added", ORDER_WARPS),
        Barrier("dq_added", released, ("order",), "step: dQ has been added", ORDER_WARPS),
    )
    return (
        *_of_keys(tile, deterministic),
        *(staging if tile.persistent else order if deterministic else ()),
        *(_exchange() if tile.ctas > 1 else ()),
        Barrier("q_full", loaded, users, "step: Q, lse_log2", q_stages),
        Barrier("q_empty", released, ("load",), "step", q_stages),
        Barrier("do_full", loaded, users, "step: dO, delta", do_stages),
        Barrier("do_empty", released, ("load",), "step", do_stages),
    )


def _of_keys(tile: BackwardTile, deterministic: bool) -> tuple[Barrier, ...]:
    """Lists the barriers of K and V, and of the words that say what a CTA's tile is."""
    users, loaded = _users(tile), (copied("load"),)
    if not tile.persistent:
        order = [("order", warps("order"))] if deterministic else []
        readers = (*users, *(role for role, _ in order))
        read = (*(warps(role) for role in users), *(signal for _, signal in order))
        return (
            Barrier("kv_full", loaded, readers, "key tile"),
            Barrier("kv_empty", read, ("load",), "key tile"),
            Barrier("ticket_full", loaded, ("load",), "key tile: its ticket has come", 2),
            Barrier("ticket_empty", (one("load"),), ("load",), "key tile: the odd CTA has it", 2),
        )
    readers = (*users, "reduce", *(() if deterministic else ("clear",)))
    read = tuple(warps(role) for role in readers)
    return (
        Barrier("kv_full", loaded, readers, "key tile"),
        Barrier("kv_empty", read, ("load",), "key tile"),
    )


def _exchange() -> tuple[Barrier, ...]:
    """Lists the barriers of backward_pair, Note [exchange]; the other CTA completes them."""
    users = ("scores", "gradient")
    used = tuple(warps(role) for role in users)
    return (
        Barrier("ds_full", (copied("gradient"),), users, "step: the other's dS", SCORE_BUFFERS),
        Barrier("ds_empty", used, ("gradient",), "step: the other used dS", SCORE_BUFFERS),
    )


def _regions(
    tile: BackwardTile, head_dims: tuple[int, int], deterministic: bool
) -> tuple[Region, ...]:
    (d, dv), m, n, span = head_dims, tile.m, tile.n, tile.span_bytes
    ring, do_ring, of_keys = tile.stages, tile.do_stages, tile.key_span_bytes
    ds_buffers, ds_meaning = SCORE_BUFFERS, "dS of a step"
    if tile.late_dq:
        ds_buffers, ds_meaning = 2 * SCORE_BUFFERS, "dS of a step; then the other CTA's"
    dq = Region(
        *("dq", (m * d, tile.dq_buffers), "dQ of a step; backward_dq, Note [dq_acc]", "f32"),
        alignment=1024,
    )
    return (
        Region("lse_log2", (m, ring), "LSE, in units of log2", "f32", alignment=1024),
        Region("delta", (m, do_ring), "rowsum(dO * O) - dLSE", "f32", alignment=128),
        operand("k", (n, d), of_keys, "the key tile"),
        operand("kt", (d, n), of_keys, "K transposed", shares="k", transposed=True),
        operand("v", (n, dv), span, "the key tile's values"),
        operand("q", (m, d, ring), span, "queries of a step"),
        operand("qt", (d, m, ring), span, "Q transposed", shares="q", transposed=True),
        operand("do", (m, dv, do_ring), span, "dO of a step"),
        operand("dot", (dv, m, do_ring), span, "dO transposed", shares="do", transposed=True),
        operand("ds", (n, m, ds_buffers), 128, ds_meaning),
        operand("dst", (m, n, ds_buffers), 128, "dS transposed", shares="ds", transposed=True),
        *([dq, *_gradients(tile, head_dims)] if tile.persistent else []),
        *(_regions_of_pair(tile, d // tile.ctas) if tile.ctas > 1 else []),
    )


def _gradients(tile: BackwardTile, head_dims: tuple[int, int]) -> list[Region]:
    """Lists where dK and dV are staged, while K and V of the next tile come already.

    These are the memory of dS, and that of the dQ buffer which the next step will use.
    """
    (d, dv), n = head_dims, tile.n
    buffers = tile.dq_buffers * dv_places(tile, d, dv)
    return [
        operand("grad_k", (n, d), tile.key_span_bytes, "dK on its way", shares="ds"),
        operand("grad_v", (n, dv, buffers), tile.span_bytes, "dV on its way", shares="dq"),
    ]


def dv_places(tile: BackwardTile, head_dim: int, value_dim: int) -> int:
    """Counts the tiles of dV for which a buffer of dQ has room."""
    return tile.m * head_dim * 4 // (tile.n * value_dim * 2)


def _regions_of_pair(tile: BackwardTile, part: int) -> list[Region]:
    """Lists P and what a CTA has of the other one, for its `part` columns of dQ."""
    m, n, span = tile.m, tile.n, tile.key_span_bytes
    of_other = "the other CTA's keys, columns of this one's dQ"
    other_ds = [
        operand("other_ds", (n, m, SCORE_BUFFERS), 128, "the other CTA's dS of a step"),
        operand(
            *("other_dst", (m, n, SCORE_BUFFERS), 128, "it, transposed"),
            shares="other_ds",
            transposed=True,
        ),
    ]
    return [
        Region("p", (n * m,), "P of a step, thread by thread", "f32", alignment=128),
        *([] if tile.late_dq else other_ds),
        operand("other_k", (n, part), span, of_other),
        operand(
            *("other_kt", (part, n), span, "they, transposed"), shares="other_k", transposed=True
        ),
    ]


def _maps(tile: BackwardTile, head_dim: int, value_dim: int) -> tuple[TensorMap, ...]:
    span, of_keys, d, dv = tile.span_bytes, tile.key_span_bytes, head_dim, value_dim
    other_k = TensorMap("other_k", "k", tile.n, d // tile.ctas, of_keys)
    return (
        TensorMap("q", "q", tile.m, d, span),
        TensorMap("k", "k", tile.n, d, of_keys),
        TensorMap("v", "v", tile.n, dv, span),
        *([other_k] if tile.ctas > 1 else []),
        TensorMap("do", "do", tile.m, dv, span),
        # A pair stages dK where Q was.
        TensorMap("dk", "dk", WARPGROUP_ROWS, d, span if tile.ctas > 1 else of_keys, store=True),
        TensorMap("dv", "dv", WARPGROUP_ROWS, dv, span, store=True),
    )
