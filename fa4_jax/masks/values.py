"""What users write: masks as small values that compose with `&`, `|` and `~`.

A value says what is meant, in arrays of the run: nothing is compiled for it. `resolve` makes one
range of keys a row of all that a call is given, and a mask of pairs of what ranges cannot say.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fa4_jax import validate
from fa4_jax.operands import MaskBits, RowRanges

Ids = Any
"""int32 [B, T] where T == S, or a pair (query [B, T], key [B, S]); the axis B may be 1, and 3-D
calls drop it."""


class Mask:
    """Which keys a row sees: `a & b` those that both show, `a | b` those that either does, `~a`
    those that it hides. Either side may be a boolean array that broadcasts to [B, N, T, S].

    A pytree; its arrays may be traced.
    """

    __array_ufunc__ = None  # NumPy's arrays leave operators to this class.

    def __and__(self, other: Any) -> Mask:
        """Both masks.

        Raises:
          ValueError: the other is neither a mask value nor a boolean array.
        """
        return Both(self, as_mask(other))

    def __or__(self, other: Any) -> Mask:
        """What either mask shows; raises as `&`."""
        return Union(self, as_mask(other))

    def __invert__(self) -> Mask:
        """What the mask hides."""
        return Complement(self)

    __rand__, __ror__ = __and__, __or__


def as_mask(x: Any) -> Mask:
    """A mask value, or a boolean array as one.

    Raises:
      ValueError: it is neither.
    """
    if isinstance(x, Mask):
        return x
    if not validate.is_array(x) or x.dtype != jnp.bool_:
        what = f"an array of {x.dtype}" if validate.is_array(x) else type(x).__name__
        raise ValueError(f"mask: masks compose with masks and boolean arrays, got {what}")
    return Array(x)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Both(Mask):
    """The keys that two masks show."""

    left: Mask
    right: Mask


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Union(Mask):
    """The keys that either of two masks shows."""

    left: Mask
    right: Mask


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Complement(Mask):
    """The keys that a mask hides."""

    mask: Mask


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Array(Mask):
    """A boolean array that broadcasts to [B, N, T, S]."""

    array: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Function(Mask):
    """`function`."""

    fn: Callable[..., Any] = dataclasses.field(metadata={"static": True})
    operands: tuple[Any, ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Intervals(Mask):
    """`intervals`."""

    low: Any
    high: Any


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
    pairs: Any = None
    bits: MaskBits | None = None


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


def function(fn: Callable[..., Any], *operands: Any) -> Mask:
    """Row and key meet where fn(b, h, q, k, *operands) is true.

    Args:
      fn: written in jax.numpy, elementwise. It gets int32 arrays that broadcast to [B, N, T, S], of
        which it is asked for one part at a time: indices of batch entries and of query heads, the
        rows' positions i + query_offset, and the keys' j; it returns a boolean array of what they
        broadcast to. Programs are traced again for another function, so define it once.
      operands: arrays that it reads, whole; traced ones come here, and must not be closed over.
        A table of the queries, say [B, T], is read by table[b, q] if query_offset is 0.
    """
    return Function(fn, operands)


def intervals(low: Any, high: Any) -> Mask:
    """Row i sees the keys low[i, n] <= j < high[i, n] of any n: at most three intervals a row.

    They may overlap or be empty.

    Args:
      low, high: int32 [B, T, n]; the axis B may be 1, and 3-D calls drop it.
    """
    return Intervals(low, high)


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


def holds(mask: Any, kind: type[Mask]) -> bool:
    """Whether a mask is composed of one of a kind, among others."""
    if isinstance(mask, Both | Union):
        return holds(mask.left, kind) or holds(mask.right, kind)
    return holds(mask.mask, kind) if isinstance(mask, Complement) else isinstance(mask, kind)


def parts(mask: Any, segment_ids: Ids = None) -> list[Any]:
    """The masks that one is composed of, and one of segments for the ids, if there are any."""
    if isinstance(mask, Both):
        found = parts(mask.left) + parts(mask.right)
    else:
        found = [] if mask is None else [mask]
    return found if segment_ids is None else [*found, Segments(segment_ids)]
