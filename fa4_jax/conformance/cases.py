"""The conformance cases: one list for every implementation, device and test."""

from __future__ import annotations

import functools
import itertools

from fa4_jax.conformance.case import OF_BACKWARD, Case

__all__ = ["CASES", "OF_BACKWARD", "Case"]


def _sizes() -> list[Case]:
    """Lengths that are no multiple of anything, down to one, for every tile and a narrower head."""
    lengths = ((1, 1), (1, 257), (129, 1), (127, 129), (200, 333), (384, 256))
    dims = (64, 128, 256, 96, 192)
    cases = [
        Case(head_dim=d, query_length=t, key_length=s, is_causal=causal)
        for d, (t, s), causal in zip(
            itertools.cycle(dims), lengths * 3, itertools.cycle((False, True)), strict=False
        )
    ]
    narrow = [
        Case(head_dim=d, query_length=150, key_length=190, is_causal=d % 16 == 0)
        for d in (8, 40, 72, 80, 104, 136, 200, 248)
    ]
    return cases + narrow


def _long() -> list[Case]:
    """Many blocks on both sides, so that every pipeline stage is used again and again."""
    sized = functools.partial(Case, batch=1, query_length=1031, key_length=2063)
    return [
        sized(head_dim=64),
        sized(head_dim=64, is_causal=True, query_offset=1032, deterministic=True),
        sized(head_dim=128, is_causal=True, heads=(4, 1)),
        sized(head_dim=128, window=(300, 200), query_offset=500),
        sized(head_dim=256, is_causal=True, query_offset=700),
        sized(head_dim=96, key_lengths=(1500,), deterministic=True),
        sized(head_dim=96, is_causal=True, query_offset=1032),
    ]


def _masks() -> list[Case]:
    """Causal with offsets, two-sided windows, lengths, and their combinations."""
    sized = functools.partial(Case, query_length=300, key_length=420)
    return [
        sized(is_causal=True),
        sized(is_causal=True, query_offset=120),
        sized(is_causal=True, query_offset=-77),
        sized(is_causal=True, query_offset=(0, 120)),
        sized(is_causal=True, query_offset=1000),
        sized(is_causal=True, query_offset=-1000),
        sized(window=(50, 70)),
        sized(window=(0, 0)),
        sized(window=(None, 33)),
        sized(window=(140, None), query_offset=60),
        sized(window=17, is_causal=True),
        sized(window=(200, 0), is_causal=True, query_offset=120, head_dim=128),
        sized(window=(64, 128), query_offset=(-40, 350), head_dim=128),
        sized(key_lengths=(1, 419)),
        sized(key_lengths=(0, 128), query_lengths=(300, 0)),
        sized(query_lengths=(129, 64), is_causal=True, head_dim=128),
        sized(key_lengths=(200, 33), query_lengths=(7, 256), is_causal=True),
        sized(key_lengths=(250, 380), window=(90, 20), query_offset=11, head_dim=128),
        sized(key_lengths=(130, 60), query_lengths=(70, 290), poison=True),
        sized(key_lengths=(130, 60), is_causal=True, poison=True, head_dim=128),
    ]


def _heads() -> list[Case]:
    """Grouped and multi-query heads, odd counts, batch neighbours, values of another head dim."""
    sized = functools.partial(Case, query_length=160, key_length=275)
    return [
        sized(heads=(4, 2), is_causal=True),
        sized(heads=(6, 1), head_dim=128),
        sized(heads=(5, 5), batch=3, head_dim=96, is_causal=True),
        sized(heads=(8, 2), batch=1, head_dim=256, is_causal=True, query_offset=115),
        sized(heads=(3, 1), batch=3, key_lengths=(275, 0, 100), dtype="fp16"),
        sized(heads=(4, 2), head_dim=192, value_dim=128, is_causal=True, query_offset=115),
        sized(heads=(2, 1), head_dim=192, value_dim=128, dtype="fp16", deterministic=True),
        sized(head_dim=160, value_dim=96, key_lengths=(275, 60), poison=True),
        sized(head_dim=40, value_dim=128, key_lengths=(275, 60), poison=True),
    ]


def _numerics() -> list[Case]:
    """Magnitudes, scales, both storage types, exact and deterministic modes."""
    sized = functools.partial(Case, query_length=257, key_length=391)
    cases = [
        sized(magnitude=8.0),
        sized(magnitude=30.0, is_causal=True, head_dim=128),
        sized(magnitude=1e-3),
        sized(growing=True),
        sized(growing=True, head_dim=128, is_causal=True),
        sized(growing=True, numerics="exact", dtype="fp16"),
        sized(scale=1.0, head_dim=128),
        sized(scale=0.01, is_causal=True),
    ]
    cases += [
        Case(dtype=dtype, head_dim=d, numerics=numerics, deterministic=d != 96, is_causal=True)
        for dtype, d, numerics in (
            ("fp16", 64, "fast"),
            ("bf16", 64, "exact"),
            ("fp16", 96, "exact"),
            ("bf16", 128, "exact"),
            ("fp16", 192, "fast"),
            ("fp16", 256, "exact"),
        )
    ]
    cases += [sized(deterministic=True, heads=(4, 2), head_dim=d) for d in (64, 128, 256)]
    opposed = functools.partial(Case, batch=1, query_length=140, key_length=130, opposed=True)
    cases += [opposed(head_dim=d, deterministic=d == 96) for d in (64, 96, 128, 192, 256)]
    cases += [
        opposed(head_dim=192, value_dim=128, heads=(2, 1)),
        opposed(is_causal=True, query_offset=100, head_dim=128),
        opposed(key_lengths=(100,), dtype="fp16"),
    ]
    return cases


def _row_masks() -> list[Case]:
    """Segments, ranges, prefixes, chunks, windows of the run, and what is combined with them."""
    sized = functools.partial(Case, query_length=300, key_length=420)
    packed = functools.partial(Case, query_length=333, key_length=333, masks=("segments",))
    return [
        packed(),
        packed(is_causal=True, heads=(4, 2), head_dim=128),
        packed(is_causal=True, window=(60, 0), batch=1, deterministic=True),
        packed(query_lengths=(333, 70), key_lengths=(200, 333), head_dim=128),
        sized(masks=("segments",), dtype="fp16", head_dim=256),
        sized(masks=("scattered",), is_causal=True, query_offset=120),
        sized(masks=("scattered", "segments"), head_dim=96, deterministic=True),
        sized(masks=("ranges",)),
        sized(masks=("ranges", "segments"), head_dim=128, query_lengths=(300, 111)),
        sized(masks=("prefix",), query_offset=(0, 120), head_dim=128),
        sized(masks=("prefix", "segments"), query_offset=-30, deterministic=True),
        sized(masks=("chunked",), is_causal=True, query_offset=70),
        sized(masks=("chunked", "window"), query_offset=(-50, 200), head_dim=192),
        sized(masks=("rising",), heads=(4, 1)),
        sized(masks=("unsorted", "segments"), head_dim=128, dtype="fp16"),
        sized(masks=("window",), query_offset=(5, 90), head_dim=256),
    ]


def _pair_masks() -> list[Case]:
    """Masks of pairs: functions, intervals, unions, complements, arrays, and what joins them."""
    sized = functools.partial(Case, query_length=300, key_length=420)
    return [
        sized(masks=("function",)),
        sized(masks=("function",), head_dim=128, heads=(4, 2), is_causal=True, query_offset=120),
        sized(masks=("function", "segments"), head_dim=96, deterministic=True),
        sized(masks=("function",), head_dim=192, heads=(4, 1), query_offset=(-50, 200)),
        sized(masks=("function",), head_dim=256, dtype="fp16", window=(150, 90)),
        sized(masks=("intervals",), head_dim=128, query_lengths=(300, 111), dtype="fp16"),
        sized(masks=("intervals", "scattered"), deterministic=True, heads=(3, 1)),
        sized(masks=("images",), head_dim=128, query_length=333, key_length=333),
        sized(masks=("images", "window"), head_dim=192, value_dim=128, deterministic=True),
        sized(masks=("holes",), key_lengths=(130, 420), is_causal=True, query_offset=120),
        sized(masks=("holes", "intervals"), head_dim=256, deterministic=True),
        sized(mask=(2, 4, 300, 420), heads=(4, 2), head_dim=128, deterministic=True),
        sized(mask=(1, 2, 300, 420), is_causal=True, key_lengths=(66, 420)),
        sized(mask=(2, 1, 1, 420), head_dim=96, dtype="fp16", sinks=True, max_logit=True),
        sized(mask=(1, 1, 300, 1), batch=1, heads=(2, 1), head_dim=128),
        sized(masks=("function",), soft_cap=20.0, magnitude=3.0, heads=(4, 2)),
        # So few queries that the heads of a group share a tile on Blackwell.
        Case(masks=("function",), heads=(6, 2), query_length=90, key_length=391, head_dim=128),
        Case(
            query_length=90,
            key_length=130,
            mask=(1, 2, 90, 130),
            is_causal=True,
            key_lengths=(66, 130),
        ),
    ]


def _scores() -> list[Case]:
    """Soft caps, sinks and largest scores."""
    sized = functools.partial(Case, query_length=257, key_length=391)
    return [
        sized(soft_cap=50.0, is_causal=True, head_dim=256),
        sized(soft_cap=2.0, magnitude=3.0, head_dim=128, poison=True, key_lengths=(391, 100)),
        sized(soft_cap=5.0, window=(70, 10), dtype="fp16", deterministic=True),
        sized(soft_cap=64.0, magnitude=1.3, head_dim=128, dtype="fp16", deterministic=True),
        sized(soft_cap=1000.0, magnitude=4.0, dtype="fp16"),
        sized(sinks=True, window=(127, 0), heads=(8, 1), query_offset=134),
        sized(sinks=True, key_lengths=(0, 391), query_lengths=(200, 257), head_dim=128),
        sized(sinks=True, masks=("ranges",), numerics="exact", deterministic=True),
        sized(max_logit=True, is_causal=True, head_dim=128),
        sized(max_logit=True, masks=("ranges",), query_lengths=(0, 257), growing=True),
        sized(
            masks=("segments",),
            soft_cap=20.0,
            sinks=True,
            max_logit=True,
            magnitude=2.0,
            head_dim=128,
            heads=(4, 2),
            is_causal=True,
        ),
    ]


def _short() -> list[Case]:
    """Few query rows over many keys: decoding, draft tokens, groups and lengths of all kinds."""
    sized = functools.partial(Case, query_length=1, key_length=391)
    draft = functools.partial(sized, query_length=4, is_causal=True)
    many = functools.partial(Case, heads=(50, 50), batch=3, key_length=1200)
    return [
        sized(heads=(8, 1)),
        sized(heads=(8, 1), head_dim=128, key_lengths=(0, 1), poison=True),
        sized(heads=(5, 5), head_dim=96, key_lengths=(391, 130), poison=True, dtype="fp16"),
        sized(heads=(3, 1), head_dim=128, batch=1, key_length=1999, growing=True),
        # So many heads fill a GPU: all keys are in one part.
        many(query_length=1, head_dim=128, key_lengths=(1200, 0, 300), growing=True),
        many(query_length=33, is_causal=True, query_offset=1167),
        sized(heads=(6, 2), window=(0, 0), query_offset=(390, 17), head_dim=128),
        draft(heads=(8, 2), query_offset=387, head_dim=128),
        draft(heads=(16, 1), query_offset=(250, 56), key_lengths=(254, 60), poison=True),
        # More than 32 rows of a group: Hopper computes them by warpgroup.
        draft(heads=(16, 1), query_offset=62, head_dim=128, key_lengths=(66, 254), poison=True),
        draft(heads=(8, 1), window=(100, 0), query_offset=387, head_dim=256, numerics="exact"),
        draft(heads=(4, 1), query_offset=-2, head_dim=72, value_dim=40, magnitude=30.0),
        sized(heads=(2, 1), query_length=16, window=(70, 3), head_dim=192, value_dim=128),
        sized(heads=(4, 1), query_length=16, query_lengths=(16, 5), key_lengths=(200, 391)),
        sized(heads=(6, 2), query_length=13, is_causal=True, query_offset=(378, -5), dtype="fp16"),
    ]


def _short_scores() -> list[Case]:
    """Few query rows with soft caps, sinks, largest scores, ranges and tags."""
    sized = functools.partial(Case, query_length=1, key_length=391)
    draft = functools.partial(sized, query_length=4, is_causal=True, query_offset=387)
    return [
        sized(sinks=True, heads=(8, 1), key_lengths=(0, 391)),
        draft(sinks=True, heads=(8, 2), query_lengths=(4, 2), key_lengths=(391, 0), head_dim=128),
        draft(sinks=True, heads=(2, 2), window=(127, 0), magnitude=20.0, dtype="fp16"),
        sized(soft_cap=2.0, magnitude=3.0, heads=(8, 2), head_dim=128, key_lengths=(391, 100)),
        draft(soft_cap=30.0, window=(100, 0), head_dim=256, value_dim=192, poison=True),
        sized(max_logit=True, heads=(4, 1), key_lengths=(0, 391), head_dim=96),
        draft(max_logit=True, query_lengths=(0, 3), heads=(3, 1), growing=True, head_dim=192),
        draft(soft_cap=30.0, heads=(20, 2), head_dim=96, dtype="fp16"),
        draft(sinks=True, heads=(12, 1), head_dim=192, value_dim=128, key_lengths=(391, 250)),
        draft(masks=("segments",), heads=(10, 1), head_dim=128),
        draft(masks=("ranges",), heads=(4, 1), head_dim=128),
        sized(masks=("ranges",), query_length=32, heads=(2, 2), dtype="fp16", batch=3),
        sized(masks=("scattered",), query_length=10, heads=(6, 1), query_lengths=(10, 3)),
        draft(masks=("segments",), key_lengths=(391, 200), heads=(2, 1), head_dim=256),
        sized(masks=("chunked", "window"), query_length=6, query_offset=(30, 385), head_dim=192),
        draft(
            masks=("unsorted", "segments"),
            soft_cap=20.0,
            sinks=True,
            max_logit=True,
            magnitude=2.0,
            head_dim=128,
            heads=(8, 2),
        ),
    ]


def _biases() -> list[Case]:
    """Dense biases of every shape, those by positions, and what is combined with them."""
    sized = functools.partial(Case, query_length=200, key_length=333)
    paired = functools.partial(Case, query_length=200, key_length=334)  # bias_buffer
    far = functools.partial(Case, query_length=130, key_length=870, query_offset=400, batch=1)
    return [
        paired(bias=(1, 4, 200, 334), heads=(4, 2), head_dim=128, is_causal=True, query_offset=134),
        paired(bias=(2, 1, 200, 334), query_lengths=(33, 200), key_lengths=(334, 70), poison=True),
        paired(bias=(1, 1, 200, 334), head_dim=96, dtype="fp16", window=(50, 70)),
        paired(bias=(1, 2, 200, 334), head_dim=192, dtype="fp16", deterministic=True),
        paired(bias=(2, 2, 200, 334), head_dim=192, value_dim=128),
        paired(bias=(1, 2, 1, 334), head_dim=256, query_lengths=(200, 33)),
        sized(bias=(2, 2, 200, 333)),
        sized(bias=(1, 1, 10, 333), query_length=10),
        sized(bias=(1, 4, 200, 333), heads=(4, 2), head_dim=128, is_causal=True, query_offset=133),
        sized(bias=(2, 1, 1, 333), heads=(4, 1), dtype="fp16", key_lengths=(333, 70)),
        sized(bias=(1, 1, 200, 333), head_dim=96, window=(50, 70), deterministic=True),
        sized(bias=(1, 2, 1, 333), head_dim=256, query_lengths=(200, 33)),
        sized(bias=(2, 2, 200, 333), query_lengths=(33, 200), key_lengths=(333, 70), poison=True),
        sized(bias=(2, 2, 200, 333), head_dim=192, value_dim=128, deterministic=True),
        sized(bias="alibi", heads=(4, 2), is_causal=True, query_offset=133),
        sized(bias="alibi", head_dim=128, query_offset=(-40, 90), deterministic=True),
        sized(bias="alibi", head_dim=192, is_causal=True, window=(90, 0), dtype="fp16"),
        sized(bias="alibi", head_dim=256, heads=(2, 1), numerics="exact", deterministic=True),
        sized(bias="relative", key_lengths=(0, 250), head_dim=128, poison=True),
        sized(bias="relative", head_dim=96, heads=(3, 1), is_causal=True, dtype="fp16"),
        sized(bias="relative", head_dim=72, batch=1, growing=True, deterministic=True),
        sized(bias="relative", head_dim=192, value_dim=128, magnitude=8.0, batch=1),
        Case(bias="alibi", query_length=1, key_length=391, heads=(8, 2), query_offset=390),
        Case(bias="relative", query_length=129, key_length=1, is_causal=True, head_dim=40),
        sized(bias="banded", heads=(4, 2), head_dim=128, is_causal=True, query_offset=133),
        sized(bias="banded", query_offset=(133, 20), query_lengths=(33, 200), poison=True),
        sized(bias="banded", head_dim=96, heads=(3, 1), dtype="fp16", is_causal=True),
        sized(bias="banded_both_sides", head_dim=128, query_offset=(-40, 90), dtype="fp16"),
        sized(bias="banded_both_sides", heads=(4, 1), window=(50, 70), deterministic=True),
        sized(bias="banded_both_sides", head_dim=192, key_lengths=(333, 70), query_offset=30),
        sized(bias="banded_far", head_dim=192, value_dim=128, query_offset=(150, -300)),
        sized(bias="banded_far", query_offset=(190, 0), is_causal=True, numerics="exact"),
        sized(bias="banded_wide", head_dim=256, query_offset=(133, 0), is_causal=True),
        sized(bias="banded_wide", head_dim=128, query_offset=(133, 0)),
        Case(bias="banded", query_length=1, key_length=391, heads=(8, 2), query_offset=390),
        Case(bias="banded_wide", query_length=129, key_length=1, batch=3, head_dim=40),
        # Blocks of keys that are far from all rows of a tile, on either side.
        far(bias="relative", head_dim=128),
        far(bias="relative", head_dim=96, dtype="fp16", query_offset=740, is_causal=True),
        far(bias="alibi", query_offset=740, is_causal=True, key_lengths=(850,)),
        far(bias="alibi", query_offset=100_000, heads=(3, 1)),
        far(bias="alibi_steep", head_dim=128, heads=(4, 2)),
        far(bias="alibi_steep", head_dim=96, is_causal=True, query_offset=600),
        far(bias="banded_both_sides", query_offset=430, window=(400, 400), deterministic=True),
        far(bias="banded", head_dim=256, dtype="fp16", query_offset=740),
    ]


def _few_keys() -> list[Case]:
    """Windows in which a row sees so few keys that Hopper has a narrow tile, and some more."""
    sized = functools.partial(Case, query_length=330, key_length=500, query_offset=170)
    return [
        sized(window=(99, 0), heads=(4, 1)),
        sized(window=(70, 20), dtype="fp16", query_lengths=(330, 65), key_lengths=(77, 500)),
        sized(window=(127, 0), heads=(4, 2), sinks=True, max_logit=True, key_lengths=(400, 0)),
        sized(masks=("segments",), window=(150, 150), dtype="fp16", deterministic=True),
        sized(is_causal=True, heads=(4, 2)),
        sized(window=(300, 100), dtype="fp16", query_offset=(170, -90)),
        sized(window=(400, 0), sinks=True, key_lengths=(300, 500)),
    ]


def _masked_biases() -> list[Case]:
    """Masks beside a dense bias that has an element for each of their pairs (`masks.in_bias`)."""
    sized = functools.partial(Case, query_length=70, key_length=150)
    return [
        sized(bias=(2, 2, 70, 150), mask=(2, 1, 70, 150), heads=(2, 1)),
        sized(bias=(2, 1, 70, 150), masks=("segments",), is_causal=True, query_offset=80),
        sized(bias=(2, 2, 70, 150), masks=("scattered",), deterministic=True, head_dim=128),
        sized(bias=(2, 4, 70, 150), masks=("function",), heads=(4, 2), key_lengths=(150, 60)),
        sized(bias=(1, 2, 70, 150), batch=1, masks=("ranges",), mask=(1, 2, 1, 150), dtype="fp16"),
        sized(bias=(2, 2, 70, 150), masks=("images", "chunked"), window=(90, 60)),
    ]


def _default_only() -> list[Case]:
    """What no kernel takes: float32, a head dim above 256, a bias of one column or with a mask."""
    sized = functools.partial(Case, query_length=90, key_length=130)
    return [
        sized(dtype="f32", heads=(4, 2)),
        sized(dtype="f32", is_causal=True, window=(40, 3), query_offset=10),
        sized(dtype="f32", head_dim=7, key_lengths=(0, 77), poison=True),
        sized(dtype="bf16", head_dim=320, is_causal=True),
        sized(dtype="f32", bias=(2, 4, 90, 130), heads=(4, 2)),
        sized(dtype="bf16", bias=(1, 4, 90, 1), heads=(4, 2), is_causal=True),
        sized(dtype="f32", bias="relative", masks=("segments",), sinks=True),
        sized(dtype="f32", bias=(2, 1, 90, 1), mask=(1, 1, 90, 130)),
        sized(dtype="f32", mask=(2, 1, 1, 130), poison=True),
        sized(dtype="f32", masks=("ranges",), query_lengths=(90, 33), poison=True),
        sized(
            dtype="f32",
            bias=(1, 2, 90, 130),
            mask=(2, 1, 90, 1),
            masks=("scattered",),
            soft_cap=2.0,
            sinks=True,
            max_logit=True,
        ),
    ]


_LISTS = (
    *(_sizes, _long, _masks, _heads, _numerics, _row_masks, _pair_masks, _scores),
    *(_short, _short_scores, _biases, _few_keys, _masked_biases, _default_only),
)

CASES: tuple[Case, ...] = tuple(dict.fromkeys(case for listed in _LISTS for case in listed()))
"""Every case, each once."""

MASKED_BIASES = tuple(_masked_biases())
"""Those that kernels take in the form of a bias alone, which `Case.has_kernels` does not say."""
