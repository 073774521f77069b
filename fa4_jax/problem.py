"""The static facts of one attention call: everything known when it is traced."""

from __future__ import annotations

import dataclasses

UNBOUNDED = 2**30
"""Window side without a limit; lengths and offsets stay below it, so int32 sums cannot overflow."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """One attention call, without its arrays. Hashable: part of the jit cache key.

    Row i sees the keys j with -window[0] <= j - (i + query offset) <= window[1]. The offset is a
    value of the run, as lengths are: a program serves all of them.

    Attributes:
      batch, query_length, key_length, query_heads, kv_heads, head_dim: sizes B, T, S, N, K, H.
      dtype: storage of query, key, value and output: "bf16", "fp16", "f32" or "f64".
      scale: softmax scale, applied to query . key; None if it is traced.
      window: (left, right) in keys, causality included; UNBOUNDED for a side without limit.
      has_lengths: query or key lengths were given, so padding may hold anything.
      has_bias, has_mask: a dense [B, N, T, S] operand (or one that broadcasts to it) is added.
      deterministic: gradients must be bitwise reproducible.
      numerics: "fast" or "exact".
      value_dim: head dim of value and output, if it is not H.
    """

    batch: int
    query_length: int
    key_length: int
    query_heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    scale: float | None
    window: tuple[int, int] = (UNBOUNDED, UNBOUNDED)
    has_lengths: bool = False
    has_bias: bool = False
    has_mask: bool = False
    deterministic: bool = False
    numerics: str = "fast"
    value_dim: int | None = None

    @property
    def head_dims(self) -> tuple[int, int]:
        """Of query and key, and of value and output."""
        return self.head_dim, self.head_dim if self.value_dim is None else self.value_dim

    @property
    def accumulator(self) -> str:
        """Type of scores, of sums and of the log-sum-exp."""
        return "float64" if self.dtype == "f64" else "float32"

    @property
    def band(self) -> bool:
        """Whether causality or a window limits the keys of a row."""
        return self.window != (UNBOUNDED, UNBOUNDED)

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.query_heads // self.kv_heads
