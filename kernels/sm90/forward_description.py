"""What the Hopper forward consists of: roles, barriers, shared memory; see `forward`."""

from __future__ import annotations

import dataclasses
import functools

from fa4_jax.key import KernelKey
from kernels.common.page_maps import maps_of_pages
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
    LARGE_LOAD_REGISTERS,
    REGISTER_BUDGETS,
    WARPGROUP,
    WARPGROUP_ROWS,
    ForwardTile,
    forward_tile,
    leaves_out,
)

WORK_WORDS = 12
"""int32 words that say what a tile's work is; forward_schedule."""

RANGE_WORDS = 3
"""int32 words more with ranges: whether tags are compared, and the range that all rows have."""

_VECTOR_WORDS = 4

GROUP_WORDS = 4
"""int32 words that say which of a tile's blocks a warpgroup's rows see; forward_groups."""

VISIT_WORDS = 2
"""int32 words that say what a block is under a mask of pairs; forward_visits."""

RAMP_WORDS = 4
"""int32 words of a key in the ramp of a bias; forward_bias."""

_WIDEST_WITH_SCHEDULE_WARP = 128
"""The widest head whose forwards with ranges have one."""

_FIRST_TURN, _FIRST_EPILOGUE, _PADDING = 1, 8, 12


def has_schedule_warp(key: KernelKey) -> bool:
    """Whether a warp beside the load warp finds out what the work of a forward's tiles is.

    With ranges that takes four loads from global memory that wait for each other, and tiles are
    short where documents are: they were 1 to 6 % faster so (docs/hopper.md). With wider heads they
    were 1 to 3 % slower, and of the narrow tiles a multiprocessor has several.
    """
    return key.ranges and key.head_dim <= _WIDEST_WITH_SCHEDULE_WARP and not key.narrow


@functools.cache
def of_key(key: KernelKey) -> Description:
    """Describes the forward kernel of a key."""
    head_dim, value_dim, band = key.head_dim, key.value_dim, key.band
    tile = forward_tile(key)
    groups = tile.mma_warpgroups
    loads_more = key.paged or (key.bias and not key.pairwise_bias)
    budget = LARGE_LOAD_REGISTERS if loads_more else REGISTER_BUDGETS[groups]
    job = "TMA: Q, then K and V blocks" + ("; takes tickets" if band else "")
    mma = "S, softmax, O += P V and the output of 64 query rows a warpgroup"
    schedules = has_schedule_warp(key)
    beside = (Role("idle", 1, 3, "none", registers=budget.load),)
    if schedules:
        job = "TMA: Q, then K and V blocks"
        own = "finds out what tiles' work is, takes tickets"
        beside = (
            Role("schedule", 1, 1, own, registers=budget.load),
            Role("idle", 2, 2, "none", registers=budget.load),
        )
    return Description(
        roles=(
            Role("load", 0, 1, job, registers=budget.load),
            *beside,
            Role("mma", 4, 4, mma, groups, budget.mma),
        ),
        barriers=_barriers(tile, schedules),
        named_barriers=(
            *([_issue_turn(groups)] if groups > 1 else []),
            NamedBarrier(
                "epilogue",
                first=_FIRST_EPILOGUE,
                count=groups,
                threads=WARPGROUP,
                roles=("mma",),
                meaning="a warpgroup's output memory is free, or its output is there",
            ),
            *([_padding(groups)] if band else []),  # Calls with lengths take a kernel with a band.
        ),
        regions=(
            *_ramp(key, tile),
            *_groups(key, tile),
            *_regions(tile, (head_dim, value_dim), _more_words(key), key.reads_mask),
            *_output(key, tile),
        ),
        division=Division(tile.m, persistent=tile.ctas, by_ticket=band),
        maps=(
            TensorMap("q", "q", tile.m, head_dim, tile.span_bytes),
            *_maps_of_keys(tile, (head_dim, value_dim), key.paged),
            TensorMap("o", "o", WARPGROUP_ROWS, value_dim, tile.span_bytes, store=True),
        ),
    )


def _maps_of_keys(tile: ForwardTile, dims: tuple[int, int], paged: bool) -> tuple[TensorMap, ...]:
    """Lists the maps of K and V."""
    operands, span = dict(zip(("k", "v"), dims, strict=True)), tile.span_bytes
    if paged:
        return maps_of_pages(operands, tile.n, span)
    return tuple(TensorMap(name, name, tile.n, columns, span) for name, columns in operands.items())


def _issue_turn(warpgroups: int) -> NamedBarrier:
    return NamedBarrier(
        "issue_turn",
        first=_FIRST_TURN,
        count=warpgroups,
        threads=2 * WARPGROUP,
        roles=("mma",),
        meaning="the warpgroup may issue a block's products; forward, Note [issue turns]",
    )


def _padding(warpgroups: int) -> NamedBarrier:
    return NamedBarrier(
        "padding",
        first=_PADDING,
        threads=warpgroups * WARPGROUP,
        roles=("mma",),
        meaning="values past the key length are cleared",
    )


def _barriers(tile: ForwardTile, schedules: bool) -> tuple[Barrier, ...]:
    stages = tile.kv_stages
    loaded, released = (copied("load"),), (warps("mma"),)
    both, finds_work = ("load", "mma"), "schedule" if schedules else "load"
    o_empty = Barrier("o_empty", released, both, "query tile")
    of_work = (
        Barrier("work_full", (one("schedule"),), ("load",), "query tile", tile.q_stages),
        Barrier("ticket_due", (one("load"),), ("schedule",), "query tile"),
    )
    return (
        Barrier("q_full", loaded, ("mma",), "query tile", tile.q_stages),
        Barrier("q_empty", released, (finds_work,), "query tile", tile.q_stages),
        Barrier("k_full", loaded, ("mma",), "block", stages),
        Barrier("k_empty", released, ("load",), "block", stages),
        Barrier("v_full", loaded, ("mma",), "block", stages),
        Barrier("v_empty", released, ("load",) if tile.own_output else both, "block", stages),
        *([] if tile.own_output else [o_empty]),
        *(of_work if schedules else ()),
    )


def _ramp(key: KernelKey, tile: ForwardTile) -> tuple[Region, ...]:
    # compute-sanitizer takes its operand for twice as long as it is (forward_bias.ramp_operand), so
    # it must not be the last region.
    if not (key.bias and key.pairwise_bias):
        return ()
    text = "the number of each key in a block, times 8; forward_bias"
    return (Region("ramp", (RAMP_WORDS * tile.n,), text, "i32", alignment=16),)


def _groups(key: KernelKey, tile: ForwardTile) -> tuple[Region, ...]:
    if not leaves_out(key):
        return ()
    text = "blocks that each warpgroup's rows see: from, full from, full to, to"
    return (Region("groups", (GROUP_WORDS, tile.mma_warpgroups, tile.q_stages), text, "i32"),)


def _more_words(key: KernelKey) -> int:
    """A mask of pairs has a word more that says which head's bits are read, sinks have the sink."""
    return RANGE_WORDS * key.ranges + key.reads_mask + key.sinks


def _regions(
    tile: ForwardTile, dims: tuple[int, int], more_words: int, mask: bool
) -> tuple[Region, ...]:
    span, (d, value_dim), ring = tile.span_bytes, dims, tile.kv_stages
    tiles = tile.q_stages
    # Whole vectors of 16 bytes: otherwise each word is loaded and stored alone.
    words = -(-(WORK_WORDS + more_words) // _VECTOR_WORDS) * _VECTOR_WORDS
    work = Region("work", (words, tiles), "rows, head and blocks of the query tiles", "i32")
    text = "key blocks, and whether ranges hide any of them, under a mask of pairs"
    visits = (Region("visits", (VISIT_WORDS, ring), text, "i32"),) if mask else ()
    return (
        work,
        *visits,
        operand("q", (tile.m, d, tiles), span, "query tiles"),
        operand("k", (tile.n, d, ring), span, "K blocks"),
        operand("v", (tile.n, value_dim, ring), span, "V blocks"),
        operand("vt", (value_dim, tile.n, ring), span, "V transposed", shares="v", transposed=True),
    )


def _output(key: KernelKey, tile: ForwardTile) -> tuple[Region, ...]:
    if not tile.own_output:
        return ()
    output = operand("o", (tile.m, key.value_dim), tile.span_bytes, "the output on its way")
    if not (key.bias and key.pairwise_bias):
        return (output,)
    holds = "a block of a dense bias; staged_bias"
    bias = operand("bias", (tile.m, tile.n), tile.span_bytes, holds)
    return bias, dataclasses.replace(output, shares="bias")
