"""Tensor maps that copy K and V of forwards of many rows from pages, a few keys at a time."""

from __future__ import annotations

from fa4_jax.key import PAGE_KEYS
from kernels.description import TensorMap

LONG_COPY = 64
"""Keys that a copy from pages has at most."""


def has_long_copies(keys: int) -> bool:
    """Returns whether copies of LONG_COPY keys make up this number of keys."""
    return keys % LONG_COPY == 0


def maps_of_pages(operands: dict[str, int], keys: int, span_bytes: int) -> tuple[TensorMap, ...]:
    """Lists the maps of K and V in pages, whose boxes fit into a page.

    Args:
      operands: the columns of k and v.
      keys: of a block, or of the smallest part of it that a CTA has.
      span_bytes: swizzle of their tiles.
    """
    long = operands if has_long_copies(keys) else {}
    return (
        *(TensorMap(name, name, LONG_COPY, columns, span_bytes) for name, columns in long.items()),
        *(TensorMap(f"{x}_short", x, PAGE_KEYS, span_bytes // 2, span_bytes) for x in operands),
    )
