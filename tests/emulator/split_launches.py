"""Launches of split forwards with a number of parts, and of forwards with keys in pages."""

from __future__ import annotations

import dataclasses

import numpy as np

from fa4_jax import splits
from fa4_jax.conformance.cases import Case
from fa4_jax.key import SHORT_TILES, SPLIT_ROWS, Pass
from tests.emulator.attention import Attention, nothing_more


def in_parts(launches: Attention, case: Case, parts: int) -> Attention:
    """The launches of a case whose keys are in `parts` parts."""
    row_blocks = -(-case.query_length * case.problem.group // SPLIT_ROWS)
    heads = case.heads[0] if case.max_logit else 0
    arrays = {**nothing_more(), **launches.arrays}
    arrays["parts"] = np.zeros(splits.shape(parts, row_blocks, heads), np.int32)
    keys = launches.keys
    if keys[0].kernel is Pass.FORWARD:  # of a case with more rows than one CTA's
        flags = dict.fromkeys(("band", "polynomial_exp2", "ranges", "soft_cap", "short"), False)
        split = dataclasses.replace(keys[0], kernel=Pass.FORWARD_SPLIT, **flags)
        keys = split, dataclasses.replace(split, kernel=Pass.FORWARD_JOIN)
    return dataclasses.replace(launches, arrays=arrays, keys=keys[: 1 if parts == 1 else 2])


def in_pages(
    launches: Attention, lengths: tuple[int, ...], page: int, rng: np.random.Generator
) -> Attention:
    """The launches whose keys and values lie in pages, in random order, poison past the lengths."""
    batch, length = launches.arrays["k"].shape[:2]
    width = length // page
    numbers = 1 + rng.permutation(batch * width).reshape(batch, width)
    pools = {}
    for name in ("k", "v"):
        x = launches.arrays[name]
        pages = x.reshape(batch * width, page, *x.shape[2:])
        pool = np.full((batch * width + 2, *pages.shape[1:]), np.nan, x.dtype)
        pool[numbers.ravel()] = pages
        pools[name] = pool
    table = numbers.astype(np.int32)
    for row, entries in zip(lengths, table, strict=True):
        entries[-(-row // page) :] = rng.choice([0, batch * width + 1, -5, 1 << 30])
    arrays = launches.arrays | pools | {"page_table": table}
    first, *others = launches.keys
    if first.kernel is Pass.FORWARD:
        short = (first.arch, first.head_dim) in SHORT_TILES
        tile = {"short": short, "narrow": False}
        first = dataclasses.replace(first, band=True, value_dim=first.head_dim, **tile)
    keys = dataclasses.replace(first, paged=True), *others
    return dataclasses.replace(launches, arrays=arrays, keys=keys)


def page_of(case: Case) -> int:
    """The length of the pages of a case: of 64 keys where they divide its keys, otherwise of 16."""
    return 64 if case.key_length % 64 == 0 else 16


def launch_in_pages(launches: Attention, case: Case) -> Attention:
    """The launches of a case with its keys in pages, in an order that depends on the case alone."""
    lengths = case.key_lengths or (case.key_length,) * case.batch
    return in_pages(launches, lengths, page_of(case), np.random.default_rng(0))
