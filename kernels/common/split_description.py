"""What the split forward and the kernel that joins its parts consist of."""

from __future__ import annotations

import dataclasses
import functools

from fa4_jax.key import PAGE_KEYS, SPLIT_CTAS, SPLIT_KEYS, SPLIT_MOST_PARTS, SPLIT_ROWS
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

MMA_WARPS = 4
WARP_ROWS = 16
"""Packed rows of a warp, those of one mma.sync."""

JOIN_WARPS = 8
VECTOR = 4  # fp32 values of one 16-byte access


@dataclasses.dataclass(frozen=True)
class SplitTile:
    """Sizes of the split forward of a head dim.

    Attributes:
      stages: blocks of K and V that are there or on their way.
      span_bytes: swizzle span of K and V.
      step_keys: keys that a warp works on at a time.
      query_in_shared: the threads keep their queries in shared memory, where registers are too few.
      unrolls_paged_steps: of a kernel for pages; the compiler spills registers otherwise.
    """

    stages: int
    span_bytes: int = 128
    step_keys: int = 32
    query_in_shared: bool = False
    unrolls_paged_steps: bool = False


SPLIT_TILES = {
    ("sm_90a", 64): SplitTile(stages=6),
    ("sm_90a", 96): SplitTile(stages=4, span_bytes=64),
    ("sm_90a", 128): SplitTile(stages=3),
    ("sm_90a", 192): SplitTile(stages=4),
    ("sm_90a", 256): SplitTile(stages=3, query_in_shared=True),
    ("sm_100f", 64): SplitTile(stages=6),
    ("sm_100f", 96): SplitTile(stages=4, span_bytes=64),
    ("sm_100f", 128): SplitTile(stages=3, step_keys=16, unrolls_paged_steps=True),
    ("sm_100f", 192): SplitTile(stages=4),
    ("sm_100f", 256): SplitTile(stages=3, query_in_shared=True),
}
"""By head dim; a multiprocessor then has 192 KiB of K and V on their way."""


PLACE_WORDS = 6
"""Of `split_data.Place`."""


def padded_columns(head_dim: int) -> int:
    """Columns of a row of partial outputs in shared memory: eight rows meet in no bank."""
    return head_dim + 8


@functools.cache
def split(arch: str, head_dim: int, paged: bool = False) -> Description:
    """Describes the split forward of a head dim.

    paged: K and V lie in pages; short ones are copied by their own tensor maps.
    """
    tile, n = SPLIT_TILES[arch, head_dim], SPLIT_KEYS
    rows = MMA_WARPS * WARP_ROWS
    padded = padded_columns(head_dim)
    short_pages = tuple(
        TensorMap(f"{of}_short", of, PAGE_KEYS, tile.span_bytes // 2, tile.span_bytes)
        for of in ("k", "v")
    )
    vt = operand("vt", (head_dim, n, tile.stages), tile.span_bytes, "V^T", "v", transposed=True)
    cleared = NamedBarrier(
        "cleared",
        first=2,
        threads=MMA_WARPS * LANES,
        roles=("mma",),
        meaning="values past the key length are 0",
    )
    hopper = arch == "sm_90a"
    words = (4, MMA_WARPS * LANES, head_dim // 16)
    query = Region("query", words, "each thread's queries, packed", "i32", alignment=16)
    return Description(
        roles=(
            Role("mma", 0, MMA_WARPS, "S, softmax and O of 16 packed rows and some of the keys"),
            Role("load", MMA_WARPS, 1, "TMA: K and V blocks"),
        ),
        barriers=(
            Barrier("kv_full", (copied("load"),), ("mma",), "block", tile.stages),
            Barrier("kv_empty", (warps("mma"),), ("load",), "block", tile.stages),
        ),
        named_barriers=(
            NamedBarrier(
                "start",
                first=3,
                threads=(MMA_WARPS + 1) * LANES,
                roles=("mma", "load"),
                meaning="mbarriers are initialised; the load warp arrives and does not wait",
            ),
            NamedBarrier(
                "parts",
                first=1,
                threads=MMA_WARPS * LANES,
                roles=("mma",),
                meaning="K has been read; then: all warps' sums and outputs are there",
            ),
            *([cleared] if hopper else []),
        ),
        regions=(
            Region("sums", (2, rows), "each row's largest score and sum, of each warp", "f32"),
            Region("place", (PLACE_WORDS,), "which rows and which part of the keys", "i32"),
            operand("k", (n, head_dim, tile.stages), tile.span_bytes, "K blocks"),
            operand("v", (n, head_dim, tile.stages), tile.span_bytes, "V blocks"),
            *([vt] if hopper else []),
            *([query] if tile.query_in_shared else []),
            Region("outputs", (padded, rows), "each warp's output", "f32", shares="k"),
        ),
        division=Division(SPLIT_ROWS, keys=n),
        maps=(
            TensorMap("k", "k", n, head_dim, tile.span_bytes),
            TensorMap("v", "v", n, head_dim, tile.span_bytes),
            *(short_pages if paged else ()),
        ),
    )


def ctas_fit(head_dim: int, shared_bytes: int) -> bool:
    """Whether the shared memory of a multiprocessor, 228 KiB, holds SPLIT_CTAS of them."""
    reserved = 1024  # bytes of each CTA that the system keeps
    return SPLIT_CTAS[head_dim] * (shared_bytes + reserved) <= 228 * 1024


def join_lanes(head_dim: int) -> int:
    """Threads that share a row of partial outputs, a vector each; a power of two."""
    return next(lanes for lanes in (16, 32, 64) if lanes * VECTOR >= head_dim)


@functools.cache
def join(head_dim: int) -> Description:
    """Describes the kernel that joins the parts of a row."""
    groups = JOIN_WARPS * LANES // join_lanes(head_dim)
    columns = VECTOR * join_lanes(head_dim)
    return Description(
        roles=(Role("join", 0, JOIN_WARPS, "O and LSE of a row from those of its parts"),),
        barriers=(),
        named_barriers=(),
        regions=(
            Region("sums", (columns, groups), "each group's share of O", "f32", alignment=16),
            Region("weights", (SPLIT_MOST_PARTS,), "of the parts", "f32"),
            Region("of_warps", (JOIN_WARPS, 2), "each warp's largest LSE, and its sum", "f32"),
        ),
        division=Division(1, programmatic=True),
    )
