"""Calls of `decode` on the kernels, beside others that have to give the same."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fa4_jax import attention, decode
from fa4_jax.conformance.paged import PagedCase, make_cache

Arrays = list[np.ndarray]


def paged_and_contiguous(case: PagedCase, seed: int) -> tuple[Arrays, Arrays]:
    """Output and log-sum-exp of `decode`, and of `attention` over the same keys in order."""
    cache, whole = make_cache(case, seed), case.contiguous
    paged = decode(*cache.arrays, return_residual=True, implementation="kernel", **cache.options)
    inputs = cache.inputs
    contiguous = attention(
        *(inputs.query, inputs.key, inputs.value),
        is_causal=True,
        query_offset=np.asarray(whole.query_offset, np.int32),
        query_seq_lengths=np.asarray(whole.query_lengths, np.int32),
        key_value_seq_lengths=np.asarray(whole.key_lengths, np.int32),
        local_window_size=(whole.window[0], None) if isinstance(whole.window, tuple) else None,
        logits_soft_cap=case.soft_cap,
        sinks=inputs.sinks,
        return_residual=True,
        implementation="kernel",
    )
    return [np.asarray(x) for x in paged], [np.asarray(x) for x in contiguous]


def with_numbers_of_no_page(case: PagedCase, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Outputs of a table whose first numbers are no pages', and of the nearest ones."""
    cache = make_cache(case, seed)
    pages = cache.key_pages.shape[0]
    key, value = (
        np.where(np.isnan(x), 0, x).astype(x.dtype) for x in (cache.key_pages, cache.value_pages)
    )
    wrong = cache.page_table.copy()
    wrong[:, 0] = [-7, *[pages + 5] * (case.batch - 1)]
    outputs = (
        decode(cache.query, key, value, table, cache.lengths, implementation="kernel")
        for table in (wrong, np.clip(wrong, 0, pages - 1))
    )
    assert not any(np.isnan(x).any() for x in (key, value))
    first, second = (np.asarray(x) for x in outputs)
    return first, second


def vmapped_and_looped(case: PagedCase, own_pools: bool, seed: int) -> tuple[Arrays, Arrays]:
    """Two calls by vmap in a jitted while_loop, and one after another."""
    one, other = (make_cache(case, seed + i).arrays for i in range(2))
    if not own_pools:
        other = (other[0], *one[1:])
    axes = tuple(0 if i == 0 or own_pools else None for i in range(5))
    taken = [
        np.stack(pair) if axis == 0 else pair[0]
        for pair, axis in zip(zip(one, other, strict=True), axes, strict=True)
    ]

    def call(*arrays: Any) -> jax.Array:
        return decode(*arrays, implementation="kernel")

    @jax.jit
    def looped(*arrays: jax.Array) -> jax.Array:
        mapped = jax.vmap(call, axes)
        start = 0, jnp.zeros_like(arrays[0])
        return jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, mapped(*arrays)), start)[
            1
        ]

    return list(np.asarray(looped(*taken))), [np.asarray(call(*x)) for x in (one, other)]
