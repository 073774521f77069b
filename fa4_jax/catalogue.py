"""The key list: every kernel that an installation is built with.

`kernels.build` compiles it, the tests draw their cases from it, and the documentation's support
table is printed from it. Imports nothing heavy.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from fa4_jax import designs
from fa4_jax.key import (
    CAPPED_APART,
    DTYPES,
    HEAD_DIM_TILES,
    HESSIAN_HEAD_DIMS,
    HESSIAN_PASSES,
    NARROW_TILES,
    NARROW_VALUES,
    POLYNOMIAL_EXP2_TILES,
    SHORT_TILES,
    SINKS_WITH_BANDS,
    KernelKey,
    Pass,
)

ARCHITECTURES = ("sm_90a", "sm_100f")
"""Architectures with kernels."""


def architecture_of(capability: int) -> str | None:
    """Architecture of the kernels that run on a compute capability, 90 for 9.0; None if none do."""
    if capability == 90:
        return "sm_90a"
    return "sm_100f" if capability // 10 == 10 else None


def keys(arch: str) -> Iterator[KernelKey]:
    """The kernels of one architecture, in build order."""
    for dtype, head_dim in itertools.product(DTYPES, HEAD_DIM_TILES):
        yield from _forward(arch, dtype, head_dim, head_dim)
        if (narrow := NARROW_VALUES.get((arch, Pass.FORWARD, head_dim))) is not None:
            yield from _forward(arch, dtype, head_dim, narrow)
        for paged in (False, True):
            yield KernelKey(arch, Pass.FORWARD_SPLIT, dtype, head_dim, paged=paged)
        yield KernelKey(arch, Pass.FORWARD_JOIN, dtype, head_dim)
        for band in (False, True):
            yield KernelKey(arch, Pass.TANGENT, dtype, head_dim, band=band)
        for band in (False, True) if (arch, head_dim) in HESSIAN_HEAD_DIMS else ():
            for kernel in HESSIAN_PASSES:
                yield KernelKey(arch, kernel, dtype, head_dim, band=band)
        yield KernelKey(arch, Pass.BIAS_GRADIENT, dtype, head_dim, band=True)
        yield from _backward(arch, dtype, head_dim, head_dim)
        if (narrow := NARROW_VALUES.get((arch, Pass.BACKWARD, head_dim))) is not None:
            yield from _backward(arch, dtype, head_dim, narrow)


def all_keys() -> tuple[KernelKey, ...]:
    """The kernels of all architectures, sorted."""
    return tuple(sorted(key for arch in ARCHITECTURES for key in keys(arch)))


def _forward(arch: str, dtype: str, head_dim: int, value_dim: int) -> Iterator[KernelKey]:
    def key(**flags: bool) -> KernelKey:
        return KernelKey(arch, Pass.FORWARD, dtype, head_dim, value_dim=value_dim, **flags)

    polynomial = (False, True) if (arch, head_dim) in POLYNOMIAL_EXP2_TILES else (False,)
    both = designs.has_both(arch, Pass.FORWARD, (head_dim, value_dim))
    pairs = (False, True) if both else (False,)
    for pair, band, polynomial_exp2 in itertools.product(pairs, (False, True), polynomial):
        yield key(band=band, polynomial_exp2=polynomial_exp2, pair=pair)
    short = SHORT_TILES.get((arch, head_dim))
    for pair, polynomial_exp2, soft_cap in itertools.product(pairs, polynomial, _caps(arch)):
        if short and short.takes_ranges and not soft_cap:
            continue
        yield key(
            band=True,
            polynomial_exp2=polynomial_exp2,
            ranges=True,
            soft_cap=soft_cap,
            pair=pair,
            short=short is not None and soft_cap,
        )
    for ranges in (False, True) if short else ():
        yield key(band=True, ranges=ranges, short=True)
    for ranges in (False, True) if (arch, head_dim) in NARROW_TILES else ():
        yield key(band=True, ranges=ranges, narrow=True)
    if (arch, head_dim) in SINKS_WITH_BANDS:
        for tile in ({}, {"short": True}, {"narrow": True}):
            yield key(band=True, sinks=True, **tile)
    chosen = designs.is_pair(arch, Pass.FORWARD, (head_dim, value_dim), None)
    yield key(band=True, bias=True, pair=chosen, short=short is not None)
    if value_dim == head_dim:
        fast = {"polynomial_exp2": polynomial[-1]}
        yield key(band=True, pair=chosen, short=short is not None, paged=True, **fast)


def _caps(arch: str) -> tuple[bool, ...]:
    """The values of `KernelKey.soft_cap`."""
    return (False, True) if arch in CAPPED_APART else (False,)


def _backward(arch: str, dtype: str, head_dim: int, value_dim: int) -> Iterator[KernelKey]:
    def key(kernel: Pass, **flags: bool) -> KernelKey:
        return KernelKey(arch, kernel, dtype, head_dim, value_dim=value_dim, **flags)

    both = designs.has_both(arch, Pass.BACKWARD, (head_dim, value_dim))
    pairs = (False, True) if both else (False,)
    for deterministic in (False, True):
        yield key(Pass.BACKWARD_PRE, deterministic=deterministic)
        for pair, band in itertools.product(pairs, (False, True)):
            yield key(Pass.BACKWARD, band=band, deterministic=deterministic, pair=pair)
        for pair, soft_cap in itertools.product(pairs, _caps(arch)):
            flags = {"ranges": True, "soft_cap": soft_cap, "deterministic": deterministic}
            yield key(Pass.BACKWARD, band=True, pair=pair, **flags)
    chosen = designs.is_pair(arch, Pass.BACKWARD, (head_dim, value_dim), None)
    yield key(Pass.BACKWARD, band=True, bias=True, deterministic=True, pair=chosen)
    yield key(Pass.BACKWARD_POST)
