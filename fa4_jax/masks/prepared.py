"""The tile table of a mask, made once for all layers of a step."""

from __future__ import annotations

from typing import Any

from fa4_jax import extents, validate
from fa4_jax.masks import resolve, values


def tile_table(
    mask: values.Mask | None,
    query: Any,
    key: Any,
    *,
    segment_ids: values.Ids = None,
    query_offset: Any = 0,
) -> values.Mask:
    """A mask value that carries what is computed of a mask, in O(T + S) memory.

    To be passed as `mask=` to every attention of these lengths, without the mask and the segment
    ids that it was made of; causality, windows and lengths that are arguments of `attention` are
    not part of it.

    Args:
      mask: or None, if segment_ids are given.
      query, key: as of `attention`, or of these shapes (`jax.ShapeDtypeStruct`).
      segment_ids, query_offset: as of `attention`, which has to be given the same offset.

    Raises:
      ValueError, NotImplementedError: as `attention`.
    """
    *batch, t, _, _ = query.shape
    s, size = key.shape[-3], batch[0] if batch else 1
    offset = extents.offset_array(validate.query_offset(query_offset, size))
    parts = values.parts(mask, segment_ids)
    if not parts:
        raise ValueError("mask and segment_ids are None: there is nothing to make a table of")
    call = resolve.Call(size, t, s, len(query.shape), offset)
    return values.Prepared(t, s, resolve.rows(parts, call))
