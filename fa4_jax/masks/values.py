"""What users write: masks as small values that compose with `&`.

A value says what is meant, in arrays of the run: nothing is compiled for it. `resolve` makes one
range of keys a row of all that a call is given.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from fa4_jax.operands import RowRanges

Ids = Any
"""int32 [B, T] where T == S, or a pair (query [B, T], key [B, S]); the axis B may be 1, and 3-D
calls drop it."""


class Mask:
    """Which keys a row sees. `a & b`: those that both show. A pytree; its arrays may be traced."""

    def __and__(self, other: Any) -> Mask:
        """Both masks.

        Raises:
          NotImplementedError: the other is no mask value.
        """
        if not isinstance(other, Mask):
            raise NotImplementedError(
                f"mask & {type(other).__name__}: masks compose with each other only; give "
                "segment_ids beside a bool mask"
            )
        return Both(self, other)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Both(Mask):
    """The keys that two masks show."""

    left: Mask
    right: Mask


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Prefix(Mask):
    """`prefix`."""

    lengths: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Chunked(Mask):
    """`chunked`."""

    size: int = dataclasses.field(metadata={"static": True})
    positions: Ids


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class BlockCausal(Mask):
    """`block_causal`."""

    ids: Ids


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Ranges(Mask):
    """`ranges`."""

    low: Any
    high: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Segments(Mask):
    """`segments`."""

    ids: Ids


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Window(Mask):
    """`window`."""

    left: Any
    right: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Prepared(Mask):
    """`tile_table`: a mask that has been resolved for calls with these lengths."""

    query_length: int = dataclasses.field(metadata={"static": True})
    key_length: int = dataclasses.field(metadata={"static": True})
    rows: RowRanges | None


def prefix(lengths: Any) -> Mask:
    """Row i sees the keys j < lengths[b] and, causally, j <= i + query_offset (prefix-LM).

    It contains causality: is_causal=True beside it is a ValueError.

    Args:
      lengths: integers [B], or one for all.
    """
    return Prefix(lengths)


def chunked(size: int, positions: Ids = None) -> Mask:
    """Row and key meet if floor(position / size) is equal (Llama 4's local layers).

    Args:
      size: of a chunk, in positions; an int >= 1.
      positions: of the tokens, as ids of `segments`; a negative one meets nothing. By default a
        row's is i + query_offset and a key's j, which do not restart in segments.
    """
    return Chunked(size, positions)


def block_causal(query_ids: Any, key_value_ids: Any = None) -> Mask:
    """Row and key meet if the key's id <= the row's, in any order; negative ids meet nothing.

    It does not imply is_causal.

    Args:
      query_ids: int32 [B, T]; the axis B may be 1, and 3-D calls drop it.
      key_value_ids: int32 [B, S]; by default those of the queries, where T == S.
    """
    return BlockCausal(_pair(query_ids, key_value_ids))


def ranges(low: Any, high: Any) -> Mask:
    """Row i sees the keys low[i] <= j < high[i], clamped to [0, S]; none if low[i] >= high[i].

    Args:
      low, high: int32 [B, T]; the axis B may be 1, and 3-D calls drop it.
    """
    return Ranges(low, high)


def segments(query_ids: Any, key_value_ids: Any = None) -> Mask:
    """Row and key meet if their ids are equal; negative ids (padding) meet nothing.

    Args:
      query_ids, key_value_ids: as for `block_causal`.
    """
    return Segments(_pair(query_ids, key_value_ids))


def window(left: Any, right: Any) -> Mask:
    """Row i sees the keys from i + query_offset - left to i + query_offset + right.

    Args:
      left, right: ints >= 0, or int32 scalars that may be traced (layers under `jax.lax.scan`
        with windows of their own); None is open. (W - 1, 0) sees W keys.
    """
    return Window(left, right)


def _pair(query_ids: Any, key_value_ids: Any) -> Ids:
    return query_ids if key_value_ids is None else (query_ids, key_value_ids)


def parts(mask: Any, segment_ids: Ids = None) -> list[Any]:
    """The masks that one is composed of, and one of segments for the ids, if there are any."""
    if isinstance(mask, Both):
        found = parts(mask.left) + parts(mask.right)
    else:
        found = [] if mask is None else [mask]
    return found if segment_ids is None else [*found, Segments(segment_ids)]
