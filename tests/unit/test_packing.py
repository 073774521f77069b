"""Documents packed into a row give what separate calls give, and the same gradients."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fa4_jax import attention
from tests import example_counts

HEAD_DIM = 8

OPTIONS = st.fixed_dictionaries(
    {
        "is_causal": st.booleans(),
        "local_window_size": st.sampled_from([None, (3, 0), (2, 4)]),
        "logits_soft_cap": st.sampled_from([None, 1.5]),
    }
)


@settings(
    max_examples=example_counts.count(6),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    database=None,
)
@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.integers(1, 40), min_size=2, max_size=3),
    st.sampled_from([(2, 2), (4, 2), (3, 1)]),
    OPTIONS,
    st.booleans(),
)
def test_packed_documents_are_separate_calls(
    seed: int,
    lengths: list[int],
    heads: tuple[int, int],
    options: dict[str, Any],
    has_sinks: bool,
):
    rng = np.random.default_rng(seed)
    rows = sum(lengths)
    shapes = [(1, rows, count, HEAD_DIM) for count in (heads[0], heads[1], heads[1])]
    arrays = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]
    if has_sinks:
        arrays.append(jnp.asarray(rng.normal(size=heads[0]), jnp.float32))
    ids = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)[None]
    attend = functools.partial(attention, return_residual=True, **options)

    def packed(q: Any, k: Any, v: Any, sinks: Any = None) -> Any:
        return attend(q, k, v, segment_ids=ids, sinks=sinks)

    def separate(q: Any, k: Any, v: Any, sinks: Any = None) -> Any:
        ends = np.cumsum(lengths)
        parts = [
            attend(*(x[:, end - size : end] for x in (q, k, v)), sinks=sinks)
            for end, size in zip(ends, lengths, strict=True)
        ]
        outputs, lses = zip(*parts, strict=True)
        return jnp.concatenate(outputs, axis=1), jnp.concatenate(lses, axis=2)

    (found, found_pullback), (expected, pullback) = (
        jax.vjp(jax.jit(function), *arrays) for function in (packed, separate)
    )
    cotangents = tuple(jnp.asarray(rng.normal(size=x.shape), x.dtype) for x in expected)
    pairs = zip(
        (*found, *found_pullback(cotangents)), (*expected, *pullback(cotangents)), strict=True
    )
    for actual, wanted in pairs:
        np.testing.assert_allclose(actual, wanted, rtol=5e-5, atol=5e-5)
