"""The cases that are timed, as data."""

from __future__ import annotations

import dataclasses
import itertools

TOKENS = 32768
"""Batch times length of the grid's cases; all of them hold the same amount of data."""

WIDTH = 2048
"""Heads times head dim of the grid's cases."""

HEAD_DIMS = (64, 128, 256)
LENGTHS = (4096, 8192, 16384, 32768, 1024, 2048)
"""The lengths; long ones come first, so that a run that is cut short has them."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem: query [batch, query_length, heads[0], head_dim], keys likewise with heads[1].

    Attributes:
      group: "grid", "gqa", "cross" or "fp16": the part of the report it belongs to.
      heads: (query heads, KV heads).
      query_offset: position of query row 0 among the keys (causal only).
      dtype: "bfloat16" or "float16".
    """

    group: str
    batch: int
    query_length: int
    key_length: int
    heads: tuple[int, int]
    head_dim: int
    is_causal: bool = False
    query_offset: int = 0
    dtype: str = "bfloat16"

    @property
    def id(self) -> str:
        """Returns a readable and unique name, such as "grid-d128-causal-b8-s4096"."""
        parts = [self.group, f"d{self.head_dim}", "causal" if self.is_causal else "dense"]
        parts.append(f"b{self.batch}")
        if self.heads[0] != self.heads[1]:
            parts.append(f"h{self.heads[0]}:{self.heads[1]}")
        if self.query_length != self.key_length:
            parts.append(f"t{self.query_length}")
        parts.append(f"s{self.key_length}")
        return "-".join(parts)


def self_attention(group: str, head_dim: int, length: int, is_causal: bool, dtype: str) -> Case:
    """Makes a case of the grid's size: TOKENS tokens of WIDTH features."""
    heads = WIDTH // head_dim
    return Case(
        group,
        TOKENS // length,
        length,
        length,
        (heads, heads),
        head_dim,
        is_causal=is_causal,
        dtype=dtype,
    )


GRID = tuple(
    self_attention("grid", head_dim, length, is_causal, "bfloat16")
    for length, head_dim, is_causal in itertools.product(LENGTHS, HEAD_DIMS, (False, True))
)

GQA = (
    Case("gqa", 2, 8192, 8192, (64, 8), 64, is_causal=True),
    Case("gqa", 2, 8192, 8192, (32, 8), 128, is_causal=True),
    Case("gqa", 2, 8192, 8192, (32, 8), 128),
    Case("gqa", 4, 8192, 8192, (16, 1), 128, is_causal=True),
    Case("gqa", 2, 8192, 8192, (16, 2), 256, is_causal=True),
)

CROSS = (
    Case("cross", 4, 1024, 16384, (32, 8), 128, is_causal=True, query_offset=15360),
    Case("cross", 4, 1024, 16384, (32, 8), 128),
    Case("cross", 8, 4096, 1024, (16, 16), 128),
    Case("cross", 8, 4096, 1024, (32, 32), 64),
)

FP16 = tuple(
    self_attention("fp16", head_dim, length, is_causal, "float16")
    for length, head_dim, is_causal in itertools.product((16384, 4096), HEAD_DIMS, (False, True))
)
"""The cases for the peer that accepts float16 alone."""

ALL = (*GRID, *GQA, *CROSS, *FP16)

QUICK = (
    Case("grid", 2, 256, 256, (2, 2), 64),
    Case("grid", 2, 256, 256, (2, 2), 64, is_causal=True),
    Case("gqa", 1, 256, 256, (4, 2), 64, is_causal=True),
    Case("cross", 1, 128, 256, (2, 2), 64, is_causal=True, query_offset=128),
    Case("fp16", 1, 256, 256, (2, 2), 64, dtype="float16"),
)
"""These show in seconds, also on a CPU, that everything runs; their times mean nothing."""

FIRST_CALL = self_attention("host", 128, 8192, True, "bfloat16")
FIRST_CALL_QUICK = Case("host", 1, 256, 256, (2, 2), 64, is_causal=True)
DISPATCH = Case("host", 1, 64, 64, (1, 1), 64, is_causal=True)
"""These are so small that the host sets the pace."""

MEMORY = tuple(self_attention("host", d, 8192, True, "bfloat16") for d in HEAD_DIMS)
MEMORY_QUICK = (FIRST_CALL_QUICK,)
