"""The static facts of one attention call: everything known when it is traced."""

from __future__ import annotations

import dataclasses
import math

from fa4_jax.bands import EVERYTHING, Band, Window
from fa4_jax.key import NO_BAND


def default_scale(head_dim: int) -> float:
    """The softmax scale of a call that names none: 1 / sqrt(head_dim)."""
    return 1.0 / math.sqrt(head_dim)


@dataclasses.dataclass(frozen=True)
class Problem:
    """One attention call, without its arrays. Hashable: part of the jit cache key.

    Which keys a row sees is said in `bands`. Query offset and lengths are values of the run: a
    program serves all of them.

    Attributes:
      batch, query_length, key_length, query_heads, kv_heads, head_dim: sizes B, T, S, N, K, H.
      dtype: storage of query, key, value and output: "bf16", "fp16", "f32" or "f64".
      scale: softmax scale, applied to query . key; None if it is traced.
      window: as `bands` has it.
      has_lengths: query or key lengths were given, so padding may hold anything.
      bias: what is added to the scores: "dense" with an element for every key, "distance" by the
        distance of row and key, "banded" for the keys of a band, "other", or None; has_score_fn: a
        user's function changes them.
      bias_first: of a banded bias, the first distance that has a column.
      has_mask: a mask says of each pair whether it is seen.
      soft_cap: scores become soft_cap * tanh(score / soft_cap); None if it is traced or there is
        none, which has_soft_cap tells apart.
      has_sinks: each head has a score that takes part in the softmax, with a value of 0.
      returns_max_logit: the largest score of each head is returned.
      has_ranges: ranges of keys were given, row by row; has_tags: and tags that are compared.
      deterministic: gradients must be bitwise reproducible.
      numerics: "fast" or "exact".
      value_dim: head dim of value and output, if it is not H.
      page_length: tokens of a page, if key and value are pages [P, page_length, K, H]; S is then as
        many as a row of the page table has room for.
    """

    batch: int
    query_length: int
    key_length: int
    query_heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    scale: float | None
    window: Window = EVERYTHING
    has_lengths: bool = False
    bias: str | None = None
    bias_first: int = NO_BAND
    has_score_fn: bool = False
    has_mask: bool = False
    soft_cap: float | None = None
    has_soft_cap: bool = False
    has_sinks: bool = False
    returns_max_logit: bool = False
    has_ranges: bool = False
    has_tags: bool = False
    deterministic: bool = False
    numerics: str = "fast"
    value_dim: int | None = None
    page_length: int | None = None

    @property
    def head_dims(self) -> tuple[int, int]:
        """The head dim of query and key, and that of value and output."""
        return self.head_dim, self.head_dim if self.value_dim is None else self.value_dim

    @property
    def accumulator(self) -> str:
        """Type of scores, of sums and of the log-sum-exp."""
        return "float64" if self.dtype == "f64" else "float32"

    @property
    def band(self) -> bool:
        """Whether causality or a window limits the keys of a row."""
        return self.window != EVERYTHING

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.query_heads // self.kv_heads

    def band_of(self, query_length: int, key_length: int, offset: int) -> Band:
        """The band of a batch entry of these lengths and this offset."""
        return Band(query_length, key_length, offset, *self.window)
