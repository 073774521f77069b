"""One call of `decode`: the static facts, and the arrays that travel together."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax

from fa4_jax.operands import Operands
from fa4_jax.plan import Plan
from fa4_jax.problem import Problem

Array = jax.Array

FP8 = "float8_e4m3fn"


@dataclasses.dataclass(frozen=True)
class PagedProblem:
    """The static facts of one call. Hashable.

    Attributes:
      attention: the call as one of `attention` over key_length = table entries x page size; its
        window holds causality. Its dtype is that of the query.
      num_pages, page_size: P, and the tokens of a page.
      is_fp8: pages are float8_e4m3fn.
      axis: manual mesh axis over which the pages of each sequence are dealt out, or None.
    """

    attention: Problem
    num_pages: int
    page_size: int
    is_fp8: bool = False
    axis: str | None = None

    @property
    def table_entries(self) -> int:
        """Page numbers of one batch entry, M."""
        return self.attention.key_length // self.page_size


@dataclasses.dataclass(frozen=True)
class PagedPlan:
    """What computes a call.

    Attributes:
      reason: why no kernel does, where the log is to say so; None where the caller asked for none.
      kernels: their launches on the whole call, or None.
    """

    problem: PagedProblem
    reason: str | None
    kernels: Plan | None = None


def not_whole(problem: PagedProblem) -> str | None:
    """Why a call's pages hold no whole sequences, which every kernel takes, or None."""
    if problem.axis is not None:
        return f"pages dealt out over mesh axis {problem.axis!r}: the kernels take whole sequences"
    return None if problem.num_pages else "0 pages: the kernels take at least 1"


class PagedOperands(NamedTuple):
    """Arrays of one call.

    query [B, T, N, H]; key_pages and value_pages [P, page, K, H] (value may have another H);
    page_table [B, M] int32, as the caller gave it; extents [B, 4] int32 (query length, key length,
    query offset = key length - query length, 0); scale and soft_cap [] in the type of the sums, or
    None where they are static or absent; sinks [N] in that type, or None; key_scale, value_scale
    [P | 1, K] float32, or None.
    """

    query: Array
    key_pages: Array
    value_pages: Array
    page_table: Array
    extents: Array
    scale: Array | None = None
    soft_cap: Array | None = None
    sinks: Array | None = None
    key_scale: Array | None = None
    value_scale: Array | None = None


def without_keys(operands: PagedOperands) -> Operands:
    """The operands for what concerns no key: the query stands in their place."""
    query = operands.query
    return Operands(
        *(query, query, query, operands.extents),
        scale=operands.scale,
        soft_cap=operands.soft_cap,
        sinks=operands.sinks,
    )


class Sums(NamedTuple):
    """A softmax that is not yet divided: maxima and sums of weights [b, k, g, t, 1], and sums of
    values [b, k, g, t, h], in the type of the sums.

    A row without a key has the least finite number as its maximum, and sums of 0.
    """

    top: Array
    total: Array
    values: Array
