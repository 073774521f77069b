"""Attention for Levanter: what its backend NVTE runs, after `install()`.

    fa4_jax.integrations.levanter.install()
    config = LlamaConfig(attn_backend=AttentionBackend.NVTE)

Levanter's AttentionBackend is a closed enumeration. NVTE is its default on GPUs, and its
private function receives every argument that ours needs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from levanter.layers import attention as levanter_attention
from levanter.layers.attention_mask import AttentionMask, materialize_mask

from fa4_jax.api import attention as fa4_attention

_DEFAULT_PRECISIONS = (None, "default", jax.lax.Precision.DEFAULT)


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Which axes of a call are the batch, which the heads.

    Attributes:
      batch: axes of query, key and value, perhaps none.
      kv_heads: at most one axis of query, key and value.
      groups: axes of query alone; query head (kv_head, group) uses kv_head.
      value_dim: the axis of value alone, or Key.
    """

    batch: tuple[Axis, ...]
    kv_heads: tuple[Axis, ...]
    groups: tuple[Axis, ...]
    queries: Axis
    keys: Axis
    head_dim: Axis
    value_dim: Axis

    def flat(self, x: NamedArray, *bins: tuple[Axis, ...]) -> jax.Array:
        """x as an array with one axis for each bin."""
        array = x.rearrange(tuple(axis for axes in bins for axis in axes)).array
        return array.reshape(tuple(math.prod(axis.size for axis in axes) for axes in bins))

    def dense(self, name: str, x: NamedArray | None) -> jax.Array | None:
        """What broadcasts to [B, N, T, S] of a mask or a bias, any of whose axes may be missing."""
        if x is None:
            return None
        bins = self.batch, (*self.kv_heads, *self.groups), (self.queries,), (self.keys,)
        known = tuple(axis for axes in bins for axis in axes)
        if extra := [axis for axis in x.axes if axis not in known]:
            raise ValueError(f"{name} has the axes {extra}, which neither query nor key have")
        # A bin of which x has some axes is broadcast to all of them; of the others 1 is left.
        used = [axes if any(axis in x.axes for axis in axes) else () for axes in bins]
        full = x.broadcast_axis(tuple(axis for axes in used for axis in axes))
        return self.flat(full, *used)

    def segment_ids(self, given: Any) -> tuple[jax.Array, jax.Array]:
        """Segment ids [B, T] and [B, S] of a mask's; both may have the axis of the queries."""
        queries, keys = given if isinstance(given, tuple) else (given, given)
        renamed = {self.queries.name: self.keys.name} if self.keys.name not in keys.axes else {}
        return self._of_tokens(queries, self.queries), self._of_tokens(
            keys.rename(renamed), self.keys
        )

    def _of_tokens(self, ids: NamedArray, tokens: Axis) -> jax.Array:
        known = (*self.batch, tokens)
        if extra := [axis for axis in ids.axes if axis not in known]:
            raise ValueError(f"segment_ids have the axes {extra}, batch has {self.batch}")
        return self.flat(ids.broadcast_axis(known), self.batch, (tokens,))


def _layout(
    positions: tuple[Any, Any, Any], query: NamedArray, key: NamedArray, value: NamedArray
) -> _Layout:
    """The last axis that query, key and value share is that of the heads, unless query begins with
    it.

    Raises:
      ValueError: key or value has an axis that has no place.
    """
    queries, keys = query.resolve_axis(positions[0]), key.resolve_axis(positions[1])
    head_dim = query.resolve_axis(positions[2])
    own = {queries.name, keys.name, head_dim.name}
    shared = [a for a in query.axes if a.name not in own and a in key.axes and a in value.axes]
    groups = [a for a in query.axes if a.name not in own and a not in shared]
    value_dims = [a for a in value.axes if a.name != keys.name and a not in shared]
    wrong = [a for a in key.axes if a.name not in own and a not in shared]
    wrong += [a for a in groups if a in key.axes or a in value.axes] + value_dims[1:]
    if wrong or not value_dims:
        raise ValueError(
            f"axes {wrong} have no place in attention with query {query.axes}, key {key.axes} and "
            f"value {value.axes}"
        )
    has_heads = bool(shared) and shared[-1] != query.axes[0]
    batch, kv_heads = (shared[:-1], shared[-1:]) if has_heads else (shared, [])
    return _Layout(
        tuple(batch), tuple(kv_heads), tuple(groups), queries, keys, head_dim, value_dims[0]
    )


def _band(mask: Any, layout: _Layout) -> tuple[dict[str, Any], Any]:
    """Options of `fa4_jax.attention` for a mask, and what is left of it for a dense one."""
    if not isinstance(mask, AttentionMask):
        return {}, mask
    left, right = [], []
    # The windows count from the same positions as keys do; only the causal limit has an offset.
    options: dict[str, Any] = {"is_causal": mask.is_causal}
    if mask.segment_ids is not None:
        options["segment_ids"] = layout.segment_ids(mask.segment_ids)
    rest = dataclasses.replace(mask, is_causal=False, causal_offset=None, segment_ids=None)
    offset = mask.causal_offset if mask.is_causal else None
    if offset is not None:
        batch = tuple(axis for axis in layout.batch if axis in offset.axes)
        if len(batch) != len(offset.axes):
            raise ValueError(f"causal_offset has the axes {offset.axes}, batch has {layout.batch}")
        full = offset.broadcast_axis(layout.batch) if batch else offset
        options["query_offset"] = layout.flat(full, layout.batch) if batch else full.array
        return options, rest
    if mask.sliding_window is not None:
        left, right = [mask.sliding_window - 1], [0]
    if mask.bidirectional_window is not None:
        left, right = [*left, mask.bidirectional_window], [*right, mask.bidirectional_window]
    if left:
        options["local_window_size"] = min(left), min(right)
    return options, dataclasses.replace(rest, sliding_window=None, bidirectional_window=None)


def _refuse(dropout: float, inference: bool, capped_bias: bool, precision: Any, dtype: Any) -> None:
    """Raises NotImplementedError for what `fa4_jax.attention` lacks."""
    if dropout > 0 and not inference:
        raise NotImplementedError(
            f"dropout={dropout} outside of inference; supported: 0.0, or inference=True"
        )
    if capped_bias:
        raise NotImplementedError(
            "logits_soft_cap with a bias, which Levanter adds before the cap and fa4_jax after it; "
            "supported: one of the two"
        )
    if jnp.dtype(dtype).itemsize > 2 and precision not in _DEFAULT_PRECISIONS:
        raise NotImplementedError(f"precision={precision} of {dtype}; supported: DEFAULT")


def attention(
    QPos: Any,
    KPos: Any,
    Key: Any,
    query: NamedArray,
    key: NamedArray,
    value: NamedArray,
    mask: AttentionMask | NamedArray | None = None,
    bias: NamedArray | None = None,
    dropout: float = 0.0,
    inference: bool = False,
    *,
    prng: jax.Array | None = None,
    attention_dtype: Any = None,
    precision: Any = None,
    block_size: int | None = None,
    scaling_factor: float | jax.Array | None = None,
    logits_soft_cap: float | None = None,
    options: dict[str, Any] | None = None,
) -> NamedArray:
    """Attention of named arrays, with the arguments of Levanter's function for NVTE.

    Args:
      QPos, KPos, Key: the axes of queries, of keys, and of the head dim.
      query, key, value: query {QPos, Key, ...}, key {KPos, Key, ...}, value {KPos, ...}. The last
        axis that the three share holds the heads of key and value, others hold the batch; axes of
        query alone are the query heads that share a head of key and value.
      mask: a causal mask with or without an offset, windows and segment ids run on the kernels.
        Explicit masks, and windows beside an offset are dense: the kernels hold bits of them. A row
        that sees no key is 0; Levanter takes the mean of all values there. A negative segment id is
        padding and meets nothing, where Levanter lets equal ones meet.
      bias: broadcasts to query's and key's axes; default path.
      dropout, inference: as in Levanter, where they change nothing.
      logits_soft_cap: as in Levanter, without a bias.
      prng, block_size: unused.
      attention_dtype: operands are cast to it if it is narrower; a wider one changes nothing, since
        products of 16 bits and softmax are in float32 here.
      scaling_factor: 1 / sqrt(size of Key) by default. A traced one runs on the default path.
      options: further keyword arguments of `fa4_jax.attention`.

    Returns:
      The output, with value's axes but KPos, and query's but Key.

    Raises:
      ValueError: the axes do not fit together.
      NotImplementedError: dropout outside of inference, a soft cap of a bias, or a precision of
        float32.
    """
    del prng, block_size
    result_dtype = jnp.result_type(query.dtype, value.dtype)
    dtype = jnp.result_type(query.dtype, key.dtype, value.dtype)
    if attention_dtype is not None and jnp.dtype(attention_dtype).itemsize < dtype.itemsize:
        dtype = jnp.dtype(attention_dtype)
    capped_bias = logits_soft_cap is not None and bias is not None
    _refuse(dropout, inference, capped_bias, precision, dtype)
    layout = _layout((QPos, KPos, Key), query, key, value)
    band, rest = _band(mask, layout)
    heads = (*layout.kv_heads, *layout.groups)
    output = fa4_attention(
        layout.flat(query, layout.batch, (layout.queries,), heads, (layout.head_dim,)).astype(
            dtype
        ),
        layout.flat(key, layout.batch, (layout.keys,), layout.kv_heads, (layout.head_dim,)).astype(
            dtype
        ),
        layout.flat(
            value, layout.batch, (layout.keys,), layout.kv_heads, (layout.value_dim,)
        ).astype(dtype),
        layout.dense("bias", bias),
        layout.dense("mask", materialize_mask(rest, layout.queries, layout.keys)),
        scale=scaling_factor,
        logits_soft_cap=logits_soft_cap,
        **(band | (options or {})),
    )
    axes = (*layout.batch, layout.queries, *heads, layout.value_dim)
    named = hax.named(output.reshape(tuple(axis.size for axis in axes)), axes)
    order = [axis for axis in query.axes if axis != layout.head_dim]
    return named.rearrange((*order, layout.value_dim)).astype(result_dtype)


def install(**options: Any) -> None:
    """Makes Levanter's AttentionBackend.NVTE, its default on GPUs, run `attention`.

    Where Levanter chose the backend itself, it answers our NotImplementedError with a warning and
    its reference implementation; where the configuration names NVTE, it raises.

    Args:
      **options: keyword arguments of `fa4_jax.attention`, such as deterministic=True.
    """
    levanter_attention._te_flash_attention = functools.partial(attention, options=options)
