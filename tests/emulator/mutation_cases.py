"""The cases of a kernel's mutations: few, which take it through all its paths."""

from __future__ import annotations

import dataclasses
from typing import Any

from fa4_jax.conformance.cases import Case
from fa4_jax.key import (
    BIAS_GRADIENT_TILES,
    HESSIAN_PASSES,
    NARROW_TILES,
    SHORT_TILES,
    TICKETS_WITH_BANDS,
    KernelKey,
    Pass,
)
from kernels.descriptions import describe
from kernels.sm90 import hessian_description
from kernels.sm90 import tiles as sm90_tiles
from kernels.sm100 import tiles as sm100_tiles


def cases(key: KernelKey) -> tuple[Case, ...]:
    """Cases, the cheapest first; one has padding, and one uses every ring slot again."""
    common = {"head_dim": key.head_dim, "value_dim": key.value_dim, "dtype": key.dtype}
    common["is_causal"] = key.band
    if key.ranges:  # Tags are compared in both; few pairs of the first see each other.
        common["masks"] = ("scattered",) if key.kernel == Pass.FORWARD else ("unsorted",)
    common["soft_cap"] = 9.0 if key.reads_cap else None
    if key.bias:
        common["bias"] = "relative"
    if key.kernel == Pass.FORWARD and key.ranges:
        common |= {"sinks": True, "max_logit": True}
    if key.sinks:
        common["sinks"] = True
    if key.kernel in (Pass.FORWARD_SPLIT, Pass.FORWARD_JOIN):
        return _split_cases(key, common | {"growing": True})
    if key.kernel == Pass.TANGENT:
        return _tangent_cases(key, common)
    if key.kernel in HESSIAN_PASSES:
        return _hessian_cases(key, common)
    if key.kernel is Pass.BIAS_GRADIENT:
        return _bias_gradient_cases(key, common)
    if key.kernel == Pass.FORWARD and key.paged:
        numerics = "fast" if key.polynomial_exp2 else "exact"
        return _paged_cases(key, common | {"growing": True, "numerics": numerics})
    if key.kernel == Pass.FORWARD:
        common |= {"growing": True, "numerics": "exact"}
        near = [_near_case(common)] if key.soft_cap else []
        return *_forward_cases(key, common), *near
    return _backward_cases(key, common | {"deterministic": key.deterministic})


def _forward_cases(key: KernelKey, common: dict[str, Any]) -> tuple[Case, ...]:
    """Cases that take a forward through its paths.

    The first has padded keys, and tiles of three blocks, none, one, two, and three of one: enough
    that a barrier of four which asks for three gets out of step. The second has three tiles of four
    blocks, or in a band with a left edge of three to five: some blocks are masked on the right,
    some not at all, some on the left, where an edge off the blocks' corners masks several.

    Hopper has a loop of its own for blocks that the diagonal crosses after the first, so a band has
    a case for it there. As many blocks come after those as the ring has slots, or (the short tile's
    ring of four) another tile does, so that their slots are used again.
    Where tags are compared, every block is masked. With ranges one more case compares none, so that
    it has the same blocks as a band's, and one has a mask of pairs.

    Blackwell packs the heads of a group into a tile. A tile of its pairs uses the slots of their
    ring again, which K and V of four or eight blocks fill, only if it has more blocks; and the load
    warp can be a ring ahead when it begins a tile only if the tile before has more, too.

    Hopper's tall tiles of a band are for rows that see many keys, its narrow ones for rows that see
    few; where there are such, its short ones are for what is between. With a bias one more case has
    blocks with a slope, and one a dense bias, of which each tile copies several blocks.
    """
    if not key.band and key.arch in TICKETS_WITH_BANDS:
        return _dense_cases(key, common)
    rows, block, heads = 512 if key.pair else 256, 128, 2 if key.arch == "sm_100f" else 1
    tall = (key.arch, key.head_dim) in SHORT_TILES and not (key.short or key.narrow)
    far = 9 * block if tall else 0
    if (key.arch, key.head_dim) in NARROW_TILES and key.short:
        far = block
    if key.narrow:
        rows, block = 128, 64
    crossed = 2 * block if key.narrow else block
    diagonal = Case(
        **common,
        batch=2 if key.short else 1,
        heads=(1, 1),
        query_length=crossed,
        key_length=block * 332 // 128 + crossed + far,
        query_offset=block * 326 // 128 + far,
    )
    ring = next((x.count for x in describe(key).barriers if x.name == "kv_full"), 0)
    more = (ring // 2 + 2) * block
    without_masks: dict[str, Any] = {**common, "masks": ()}
    long = Case(
        **without_masks,
        batch=2,
        heads=(1, 1),
        query_length=rows,
        key_length=more,
        query_offset=more - rows if key.band else 0,
    )
    wide = Case(
        **common,
        batch=1,
        heads=(1, 1),
        query_length=2 * rows + 40,
        key_length=2 * rows + 40 + 3 * block + far if key.band else 3 * block + 9,
        window=(3 * block - 40 + far, None) if key.band else None,
        query_offset=3 * block + far if key.band else 0,
    )
    others = ((), *([("function",)] if key.reads_mask else [])) if key.ranges else ()
    shape = 1, 1, wide.query_length, wide.key_length
    pairs = dataclasses.replace(wide, bias=shape, window=None)
    return (
        *([diagonal] if key.band and key.arch == "sm_90a" else []),
        Case(
            **common,
            batch=7,
            heads=(heads, 1),
            query_length=(rows - 20) // heads,
            key_length=3 * block + far,
            query_offset=3 * block,
            key_lengths=(2 * block + 11, 0, block - 30, block + 10, block - 20, 10, 40),
            poison=not key.ranges,
        ),
        *([long] if key.pair else []),
        wide,
        *(dataclasses.replace(wide, masks=masks) for masks in others),
        *([_sloping_case(common), pairs] if key.bias and key.pairwise_bias else []),
    )


def _near_case(common: dict[str, Any]) -> Case:
    """A case whose growing scores are below half of the cap in the first blocks alone.

    Where a largest score is wanted all have maxima.
    """
    return Case(
        **{**common, "masks": (), "soft_cap": 40.0, "max_logit": False},
        batch=1,
        heads=(1, 1),
        query_length=300,
        key_length=700,
        query_offset=400,
    )


def _sloping_case(common: dict[str, Any]) -> Case:
    """A case with blocks before and after the ones that load ALiBi's numbers."""
    return Case(
        **{**common, "bias": "alibi_steep", "growing": False},
        batch=1,
        heads=(1, 1),
        query_length=130,
        key_length=870,
        query_offset=600,
    )


def _paged_cases(key: KernelKey, common: dict[str, Any]) -> tuple[Case, ...]:
    """Cases of forwards of many rows from pages, of 64 keys where these divide all, else of 16.

    Tiles have no block, one, two, or more blocks than the ring has slots. The last page and the
    last block are not full. A window hides the first blocks of the last case, whose pages have 64
    keys. Blackwell packs the heads of a group into a tile where there are few rows: its load warp
    has four ways, by pages and by heads.
    """
    rows, block = describe(key).division.rows, 128
    short, long = 5 * block - 16, 5 * block
    ways = [(1, short), (2, short), (2, long)] if key.arch == "sm_100f" else [(1, short)]
    lengths = (long - 100, 0, 40, block, 2 * block - 20)
    several = [
        Case(
            **common,
            batch=len(lengths),
            heads=(heads, 1),
            query_length=(rows - 20) // heads,
            key_length=keys,
            query_offset=tuple(length - (rows - 20) // heads for length in lengths),
            key_lengths=lengths,
            poison=True,
        )
        for heads, keys in ways
    ]
    wide = Case(
        **common,
        batch=1,
        heads=(2, 1),
        query_length=2 * rows + 40,
        key_length=7 * block,
        query_offset=7 * block - 30 - 2 * rows - 40,
        key_lengths=(7 * block - 30,),
        window=(3 * block - 40, None),
    )
    return *several, wide


def _dense_cases(key: KernelKey, common: dict[str, Any]) -> tuple[Case, ...]:
    """Cases of Hopper's dense forwards, which get no lengths.

    The first has seven tiles of one block, the second at least three tiles of five, so that both
    slots of a ring are used by turns. The rows fill a tall tile, where there are two tiles. Where
    warpgroups leave out what lies past the last row, every third tile of one more has one at work.
    """
    rows = describe(key).division.rows
    lone = {"batch": 2, "heads": (1, 1), "query_length": 2 * rows + 40, "key_length": 4 * 128 + 9}
    return (
        Case(**common, batch=7, heads=(1, 1), query_length=rows - 20, key_length=98),
        Case(**common, batch=1, heads=(1, 1), query_length=552, key_length=4 * 128 + 9),
        *([Case(**common, **lone)] if sm90_tiles.leaves_past_rows(key) else []),
    )


def _tangent_cases(key: KernelKey, common: dict[str, Any]) -> tuple[Case, ...]:
    """Returns cases that take the tangents' kernel through its paths.

    Some tiles have no block, some have one, and some use ring slots again. All kernels but
    Hopper's dense ones, which get no lengths, have padded keys. Under a band blocks are masked on
    the left, on the right, on both sides, or not at all. On Blackwell two heads share a tile in
    the first case.
    """
    tiles = {"sm_90a": sm90_tiles, "sm_100f": sm100_tiles}[key.arch].TANGENT_TILES
    rows, keys = describe(key).division.rows, 6 * tiles[key.head_dim].n
    heads = 2 if key.arch == "sm_100f" else 1
    padded = key.band or key.arch not in TICKETS_WITH_BANDS
    lengths = {"key_lengths": (keys - 20, 0, 30, 70), "poison": True} if padded else {}
    several = {"batch": 4, "heads": (heads, 1), "key_length": keys}
    several["query_length"] = (rows - 20) // heads
    window = {"window": (keys - 40, None), "query_offset": keys // 2} if key.band else {}
    return (
        Case(**common, **several, **lengths, query_offset=keys // 2 if key.band else 0),
        Case(**common, **window, batch=1, heads=(2, 1), query_length=2 * rows, key_length=keys + 9),
    )


def _bias_gradient_cases(key: KernelKey, common: dict[str, Any]) -> tuple[Case, ...]:
    """Returns cases that take the kernel of a bias's gradient through its paths.

    The cases sum whole tiles, columns, diagonals, and tiles of a banded bias. A CTA visits no pair
    of tiles, one pair, or more pairs than the ring has slots, and skips those outside of the band.
    """
    tile, ring = BIAS_GRADIENT_TILES[key.arch], describe(key).barrier("full").count
    several: dict[str, Any] = {**common, "batch": ring + 2, "heads": (2, 1)}
    lengths = tuple((tile, 0, 30, 2 * tile)[b % 4] for b in range(ring + 2))
    sizes: dict[str, Any] = {"query_length": tile + 20, "key_length": 2 * tile + 9}
    sizes["query_offset"] = 40
    padded: dict[str, Any] = {"key_lengths": lengths, "poison": True}
    return (
        Case(**several, **sizes, **padded, bias=(1, 1, tile + 20, 2 * tile + 9)),
        Case(**several, **sizes, bias=(1, 2, 1, 2 * tile + 9)),
        Case(**several, **sizes, **padded, bias="alibi"),
        Case(**several, **sizes, bias="banded_both_sides"),
    )


def _hessian_cases(key: KernelKey, common: dict[str, Any]) -> tuple[Case, ...]:
    """Returns cases that take a kernel of Hessian-vector products through its paths.

    Rows see no block, one block, or more blocks than the ring has slots. The blocks belong to one
    head, or to all heads of a group. Under a band rows and columns have padding, and blocks are
    masked on the left, on the right, or not at all.
    """
    tile = hessian_description.tile_of(key)
    rows, columns = tile.m, (tile.stages + 3) * tile.n
    if key.kernel is Pass.HESSIAN_KEY:
        rows, columns = columns, rows
    lengths: dict[str, Any] = {}
    if key.band:
        padded = {"query_lengths": (rows - 20, rows, 0), "key_lengths": (columns - 9, 10, columns)}
        lengths = {**padded, "poison": True, "query_offset": columns}
    window = {"window": (columns - 40, None), "query_offset": columns // 2} if key.band else {}
    return (
        Case(**common, **lengths, batch=3, heads=(1, 1), query_length=rows, key_length=columns),
        Case(
            **(common | window),
            batch=1,
            heads=(2, 1),
            query_length=rows + 30,
            key_length=columns + 30,
        ),
    )


def _split_cases(key: KernelKey, common: dict[str, Any]) -> tuple[Case, ...]:
    """Cases that take a split forward through its paths, with all keys in one part.

    One has four warps for the same rows, padded keys, and entries without a block and with two; two
    have a warp for each 16 rows (Hopper: a warpgroup), the first of these with all that scores may
    have, the other with padded keys. All have several rounds of the ring. Pages are those of
    `split_launches.page_of`: long ones in the first and third, short ones in the second.
    """
    masks, most = () if key.paged else ("scattered",), 31 * 64
    scores = {"soft_cap": 9.0, "sinks": True, "max_logit": True, "masks": masks}
    return (
        Case(
            **common,
            batch=3,
            heads=(5, 1),
            query_length=1,
            key_length=most,
            key_lengths=(0, 70, most),
            poison=True,
        ),
        Case(**(common | scores), batch=1, heads=(4, 1), query_length=13, key_length=2000),
        Case(
            **common,
            batch=1,
            heads=(4, 1),
            query_length=13,
            key_length=704,
            key_lengths=(650,),
            poison=True,
        ),
    )


def _backward_cases(key: KernelKey, common: dict[str, Any]) -> tuple[Case, ...]:
    """Cases that take a backward through its paths.

    Keys and queries are padded, each in a CTA's first step and in later ones, alone and together;
    a CTA has six steps, and in the deterministic kernel key tiles wait for their dQ turn. In a
    pair's block of few queries, both CTAs have padding.

    The other kernel has two key tiles, whose sum is the same in either order. The deterministic
    one visits the last query block first, so that only a second head has it later. Hopper's rings
    have enough rounds that a barrier of eight which asks for seven gets out of step, also where two
    CTAs have half of the queries each. With a bias one more case has a dense one of an odd number
    of keys, of which every step of both heads copies pairs. With a soft cap one has steps of near
    scores, steps of others, and no mask.
    """
    rows, few = (64, 20) if key.head_dim > 128 else (128, 40 if key.pair else 98)
    ctas = 2 if key.pair else 1  # of 128 keys, that share a key tile
    key_length = (300 if key.deterministic else 200) * ctas
    many_turns = []
    if key.arch == "sm_90a" and key.kernel == Pass.BACKWARD:
        parts = 2 if describe(key).division.splits_tail else 1
        length = 23 * parts * sm90_tiles.BACKWARD_TILES[key.head_dim, key.value_dim].m
        many_turns = [Case(**common, batch=1, heads=(1, 1), query_length=length, key_length=100)]
    pairs = Case(
        **{**common, "bias": (2, 2, 200, 261)},
        batch=2,
        heads=(2, 1),
        query_length=200,
        key_length=261,
        query_offset=61,
    )
    near = Case(  # Some steps have scores above an eighth of the cap.
        **{**common, "masks": (), "soft_cap": 60.0, "magnitude": 1.3},
        batch=1,
        heads=(1, 1),
        query_length=3 * rows,
        key_length=256 * ctas,
        query_offset=256 * ctas,
    )
    return (
        *([pairs] if key.bias and key.pairwise_bias else []),
        *([near] if key.soft_cap and key.kernel == Pass.BACKWARD else []),
        Case(
            **common,
            batch=4,
            heads=(2, 1) if key.deterministic else (1, 1),
            query_length=rows + 20,
            key_length=200 * ctas,
            query_offset=200 * ctas - 20,
            query_lengths=(rows + 10, few, 0, rows + 20),
            key_lengths=tuple(length * ctas for length in (150, 70, 200, 90)),
            poison=not key.ranges,
        ),
        Case(
            **common,
            batch=1,
            heads=(2, 1),
            query_length=2 * rows + 40,
            key_length=key_length,
            query_offset=key_length - 2 * rows if key.band else 0,
        ),
        *many_turns,
    )
