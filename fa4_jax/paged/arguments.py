"""Every error about the arguments of `decode`, and the operands and facts that they make."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify

from fa4_jax import extents, mesh_types, validate
from fa4_jax.bands import LIMIT
from fa4_jax.paged.problem import FP8, PagedOperands, PagedProblem
from fa4_jax.paged.shard import shard_of
from fa4_jax.problem import Problem

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class DecodeCall:
    """The arguments of `decode` that describe what is computed, as the caller gave them."""

    query: Any
    key_pages: Any
    value_pages: Any
    page_table: Any
    lengths: Any
    _: dataclasses.KW_ONLY
    query_lengths: Any = None
    scale: Any = None
    local_window_size: Any = None
    logits_soft_cap: Any = None
    sinks: Any = None
    key_scale: Any = None
    value_scale: Any = None
    check: Any = False
    axis: str | None = None


def canonicalise(call: DecodeCall) -> tuple[PagedOperands, PagedProblem]:
    """Checked operands, and the static facts about them.

    Raises:
      ValueError, NotImplementedError: as `decode`.
    """
    query, key_pages, value_pages = (
        jnp.asarray(x) for x in (call.query, call.key_pages, call.value_pages)
    )
    _arrays(query, key_pages, value_pages)
    (b, t, n, h), (pages, page, kv_heads, _) = query.shape, key_pages.shape
    table = _page_table(call.page_table, b)
    own_tokens = table.shape[1] * page
    tokens = own_tokens * shard_of(call.axis).devices
    if tokens >= LIMIT:
        raise NotImplementedError(
            f"page_table holds {table.shape[1]} pages of {page} tokens for each entry, "
            f"{tokens} tokens in all; the limit is {LIMIT}"
        )
    scale, traced_scale = validate.scale(call.scale, h)
    cap, traced_cap = validate.soft_cap(call.logits_soft_cap)
    sinks = validate.sinks(call.sinks, n)
    is_fp8 = key_pages.dtype.name == FP8
    scales = [
        _page_scale(name, getattr(call, name), is_fp8, pages, kv_heads)
        for name in ("key_scale", "value_scale")
    ]
    lengths = validate.lengths("lengths", call.lengths, b)
    query_lengths = validate.lengths("query_lengths", call.query_lengths, b)
    if lengths is None:
        raise ValueError("lengths must be integers [B], got None")
    if validate.flag("check", call.check):
        _values(table, lengths, query_lengths, pages=pages, page=page, rows=t)
    value_dim = value_pages.shape[-1]
    attention = Problem(
        batch=b,
        query_length=t,
        key_length=own_tokens,
        query_heads=n,
        kv_heads=kv_heads,
        head_dim=h,
        dtype=validate.DTYPES[query.dtype.name],
        scale=scale,
        window=validate.window(call.local_window_size, is_causal=True),
        has_lengths=True,
        soft_cap=cap,
        has_soft_cap=call.logits_soft_cap is not None,
        has_sinks=sinks is not None,
        value_dim=None if value_dim == h else value_dim,
    )
    validate.known_sizes(attention, "decode")
    traced_scale, traced_cap, sinks = (
        None if x is None else x.astype(attention.accumulator)
        for x in (traced_scale, traced_cap, sinks)
    )
    operands = PagedOperands(
        *(query, key_pages, value_pages, table, _extents(lengths, query_lengths, b, t, tokens)),
        *(traced_scale, traced_cap, sinks, *scales),
    )
    return operands, PagedProblem(attention, pages, page, is_fp8, call.axis)


def _arrays(query: Array, key_pages: Array, value_pages: Array) -> None:
    """Ranks, sizes and types of query and pages.

    Raises:
      ValueError: they do not fit together.
      NotImplementedError: a floating type that no implementation takes.
    """
    if query.ndim != 4:
        raise ValueError(f"query must have shape [B, T, N, H], got {query.shape}")
    for name, x in (("key_pages", key_pages), ("value_pages", value_pages)):
        if x.ndim != 4:
            raise ValueError(f"{name} must have shape [P, page, K, H], got {x.shape}")
        if 0 in x.shape:
            raise ValueError(f"{name} must hold a page, tokens, heads and features, got {x.shape}")
    if query.dtype.name not in validate.DTYPES:
        if not jnp.issubdtype(query.dtype, jnp.floating):
            raise ValueError(f"query must be floating point, got dtype {query.dtype}")
        raise NotImplementedError(
            f"query has dtype {query.dtype}; supported: {', '.join(validate.DTYPES)}"
        )
    if 0 in query.shape[2:]:
        raise ValueError(f"query must have heads and a head_dim, got shape {query.shape}")
    if key_pages.shape[:3] != value_pages.shape[:3]:
        raise ValueError(
            f"value_pages has shape {value_pages.shape} but key_pages has {key_pages.shape}"
        )
    if key_pages.dtype != value_pages.dtype:
        raise ValueError(
            f"value_pages has dtype {value_pages.dtype} but key_pages has {key_pages.dtype}"
        )
    if key_pages.dtype.itemsize == 1 and key_pages.dtype.name != FP8:
        raise NotImplementedError(
            f"key_pages has dtype {key_pages.dtype}; pages of one byte a number are {FP8}"
        )
    if key_pages.dtype not in (query.dtype, jnp.dtype(FP8)):
        raise ValueError(
            f"key_pages has dtype {key_pages.dtype} but query has {query.dtype}: pages have "
            f"query's type, or {FP8}"
        )
    if query.shape[3] != key_pages.shape[3]:
        raise ValueError(
            f"key_pages has head_dim {key_pages.shape[3]} but query has {query.shape[3]}"
        )
    if query.shape[2] % key_pages.shape[2]:
        raise ValueError(
            f"query has {query.shape[2]} heads, not a multiple of key_pages' {key_pages.shape[2]}"
        )


def _page_table(x: Any, batch: int) -> Array:
    """The page table as an array.

    Raises:
      ValueError: another type or shape.
    """
    if not validate.is_array(x):
        x = np.asarray(x)
    if x.dtype != np.int32:
        raise ValueError(f"page_table must be int32, got dtype {x.dtype}")
    if x.ndim != 2 or x.shape[0] != batch:
        raise ValueError(f"page_table must have shape [B, M] = ({batch}, M), got {x.shape}")
    return jnp.asarray(x)


def _page_scale(name: str, x: Any, is_fp8: bool, pages: int, kv_heads: int) -> Array | None:
    """A scale of pages as an array [P | 1, K].

    Raises:
      ValueError: another type or shape, or the pages need none.
    """
    if x is None:
        return None
    if not is_fp8:
        raise ValueError(f"{name} goes with pages of {FP8}: these hold numbers as they are")
    x = jnp.asarray(x)
    if x.shape not in ((kv_heads,), (pages, kv_heads)):
        raise ValueError(
            f"{name} must have shape [K] = ({kv_heads},) or [P, K] = ({pages}, {kv_heads}), "
            f"got {x.shape}"
        )
    if x.dtype != jnp.float32:
        raise ValueError(f"{name} must be float32, got dtype {x.dtype}")
    return x.reshape(-1, kv_heads)


def _extents(lengths: Any, query_lengths: Any, batch: int, rows: int, tokens: int) -> Array:
    """int32 [B, 4]: query length, key length, query offset, 0; clamped to rows and table."""
    keys = jnp.asarray(extents.to_int32(lengths, 0, tokens))
    if query_lengths is None:
        own = jnp.full_like(keys, rows)
    else:
        own = jnp.asarray(extents.to_int32(query_lengths, 0, rows))
    keys, own = mesh_types.sharded_alike([keys, own])
    return extents.stacked(own, keys, keys - own)


def _values(
    table: Array, lengths: Any, query_lengths: Any, *, pages: int, page: int, rows: int
) -> None:
    """Checks values that are otherwise clamped: at once, or inside jit by `checkify`.

    Raises:
      ValueError: one that is known now is out of range.
    """
    entries = table.shape[1]
    lengths = jnp.asarray(lengths)
    is_read = jnp.arange(entries)[None, :] < -(-lengths // page)[:, None]
    wrong = is_read & ((table < 0) | (table >= pages))
    facts = [
        (
            (lengths >= 0) & (lengths <= entries * page),
            "lengths",
            lengths,
            f"0 to {entries * page}",
        ),
        (~wrong, "page_table", table, f"0 to {pages - 1}"),
    ]
    if query_lengths is not None:
        own = jnp.asarray(query_lengths)
        facts.append(((own >= 0) & (own <= rows), "query_lengths", own, f"0 to {rows}"))
    for holds, name, x, allowed in facts:
        bad = jnp.argmin(holds.ravel())
        if validate.is_static(holds):
            if not bool(holds.all()):
                at = tuple(int(i) for i in np.unravel_index(int(bad), holds.shape))
                raise ValueError(f"{name} must be within {allowed}, got {x[at]} at {list(at)}")
        else:
            checkify.check(
                holds.all(),
                f"{name} must be within {allowed}, got {{value}} at {{at}} of the flat array",
                value=x.ravel()[bad],
                at=bad,
            )
