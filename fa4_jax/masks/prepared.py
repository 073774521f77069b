"""The tile table of a mask, made once for all layers of a step."""

from __future__ import annotations

from typing import Any

import jax

from fa4_jax import extents, target, validate
from fa4_jax.masks import bits, of_pairs, resolve, values


def tile_table(
    mask: values.Mask | jax.Array | None,
    query: Any,
    key: Any,
    *,
    segment_ids: values.Ids = None,
    query_offset: Any = 0,
    arch: str | None = None,
) -> values.Mask:
    """A mask value that carries what is computed of a mask, in O(T + S) memory.

    Of a boolean array, a function, a union or a complement it carries the bits that kernels read,
    B|1 x N|1 x T x S / 8 bytes, where kernels would run; the default path computes those anew.

    To be passed as `mask=` to every attention of these lengths, without the mask and the segment
    ids that it was made of; causality, windows and lengths that are arguments of `attention` are
    not part of it.

    Args:
      mask: or None, if segment_ids are given.
      query, key: as of `attention`, or of these shapes (`jax.ShapeDtypeStruct`).
      segment_ids, query_offset: as of `attention`, which has to be given the same offset.
      arch: as of `attention`: the kernels that the bits are for.

    Raises:
      ValueError, NotImplementedError: as `attention`.
    """
    *batch, t, heads, _ = query.shape
    s, size = key.shape[-3], batch[0] if batch else 1
    offset = extents.offset_array(validate.query_offset(query_offset, size))
    given = mask if mask is None or isinstance(mask, values.Mask) else values.as_mask(mask)
    parts = values.parts(given, segment_ids)
    if not parts:
        raise ValueError("mask and segment_ids are None: there is nothing to make a table of")
    call = resolve.Call(size, t, s, len(query.shape), offset)
    parts, others = of_pairs.divided(parts)
    rows, pairs = resolve.rows(parts, call), of_pairs.found(others, call, heads)
    if pairs is None or not target.has_kernels(arch):
        return values.Prepared(t, s, rows, pairs)
    bits.limited(pairs, t, s)
    return values.Prepared(t, s, rows, bits=bits.pack(pairs, t, s))
