"""Every wrong argument is an error that names it and its value."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fa4_jax import attention, masks

T, S, N, K, H = 5, 7, 4, 2, 16
HALF: Any = 2.5


def zeros(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.zeros(shape, dtype)


def call(**changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "query": zeros(2, T, N, H),
        "key": zeros(2, S, K, H),
        "value": zeros(2, S, K, H),
    }
    return attention(**(arguments | changes))


def lengths(*values: int, dtype: Any = np.int32) -> np.ndarray:
    return np.asarray(values, dtype)


def ids(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.int32)


TABLE = masks.tile_table(
    None, np.zeros((2, T, N, H)), np.zeros((2, T, K, H)), segment_ids=ids(1, T)
)

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"query": zeros(T, H)}, r"query .*\(5, 16\)"),
    ({"query": zeros(1, 2, T, N, H)}, r"query .*\(1, 2, 5, 4, 16\)"),
    ({"query": zeros(T, N, H)}, r"key .*\(2, 7, 2, 16\).*\(5, 4, 16\)"),
    ({"query": zeros(3, T, N, H)}, r"key .*batch.* 2 .* 3"),
    ({"query": zeros(2, T, 3, H)}, r"query has 3 heads.* 2"),
    ({"query": zeros(2, T, N, 8)}, r"key has head_dim 16 .* 8"),
    ({"query": zeros(2, T, N, 0)}, r"query .*\(2, 5, 4, 0\)"),
    ({"key": zeros(2, S, 0, H), "value": zeros(2, S, 0, H)}, r"key .*\(2, 7, 0, 16\)"),
    ({"value": zeros(2, 6, K, H)}, r"value .*\(2, 6, 2, 16\).*\(2, 7, 2, 16\)"),
    ({"value": zeros(2, S, 1, 8)}, r"value .*\(2, 7, 1, 8\).*\(2, 7, 2, 16\)"),
    ({"value": zeros(2, S, K, H, dtype=jnp.bfloat16)}, r"value .*bfloat16.*float32"),
    ({name: zeros(2, 7, 2, H, dtype=jnp.int32) for name in ("query", "key", "value")}, "int32"),
    ({"bias": zeros(2, N, T, 6)}, r"bias .*\(2, 4, 5, 7\).*\(2, 4, 5, 6\)"),
    ({"bias": zeros(1, 2, N, T, S)}, r"bias .*\(1, 2, 4, 5, 7\)"),
    ({"bias": zeros(2, N, T, S, dtype=jnp.int32)}, "bias .*int32"),
    ({"mask": zeros(2, N, T, S)}, "mask .*float32"),
    ({"mask": zeros(3, 1, 1, S, dtype=bool)}, r"mask .*\(3, 1, 1, 7\)"),
    ({"scale": 0}, "scale .*0"),
    ({"scale": 0.0}, r"scale .*0\.0"),
    ({"scale": float("nan")}, "scale .*nan"),
    ({"scale": float("inf")}, "scale .*inf"),
    ({"scale": -1.0}, r"scale .*-1\.0"),
    ({"scale": 1e-60}, "scale .*1e-60"),
    ({"scale": 1e60}, r"scale .*1e\+60"),
    ({"scale": "large"}, "scale .*large"),
    ({"scale": True}, "scale .*True"),
    ({"scale": np.ones(2)}, r"scale .*\(2,\)"),
    ({"is_causal": 1}, "is_causal .*1"),
    ({"is_causal": None}, "is_causal .*None"),
    ({"query_offset": 0.5}, r"query_offset .*0\.5"),
    ({"query_offset": True}, "query_offset .*True"),
    ({"query_offset": 2**30}, "query_offset .*1073741824"),
    ({"query_offset": 2**70}, f"query_offset .*{2**70}"),
    ({"query_offset": [0, -(2**40)]}, f"query_offset .*-{2**40}"),
    ({"query_offset": np.uint64(2**63)}, f"query_offset .*{2**63}"),
    ({"query_offset": np.array([0, 2**31])}, f"query_offset .*{2**31}"),
    ({"query_offset": None}, "query_offset .*None"),
    ({"query_offset": jnp.zeros(3, jnp.int32)}, r"query_offset .*\(2,\).*\(3,\)"),
    ({"query_offset": jnp.zeros(2)}, "query_offset .*float32"),
    ({"query_seq_lengths": lengths(1)}, r"query_seq_lengths .*\(2,\).*\(1,\)"),
    ({"query_seq_lengths": lengths(1, -2)}, r"query_seq_lengths .*\[1, -2\]"),
    ({"query_seq_lengths": [3, -1]}, r"query_seq_lengths .*\[3, -1\]"),
    ({"key_value_seq_lengths": jnp.asarray(5)}, r"key_value_seq_lengths .*\(\)"),
    ({"key_value_seq_lengths": np.ones(2, bool)}, "key_value_seq_lengths .*bool"),
    ({"key_value_seq_lengths": [True, False]}, "key_value_seq_lengths .*bool"),
    ({"key_value_seq_lengths": [1, 2**31]}, "key_value_seq_lengths .*int32.* 2147483648"),
    ({"key_value_seq_lengths": [1, 2**70]}, f"key_value_seq_lengths .*int32.* {2**70}"),
    (
        {"query_seq_lengths": lengths(1, 2**40, dtype=np.int64)},
        f"query_seq_lengths .*int32.* {2**40}",
    ),
    ({"query_seq_lengths": "all"}, "query_seq_lengths .*all"),
    ({"key_value_seq_lengths": lengths(1, 2, dtype=np.float32)}, "key_value_seq_lengths .*float32"),
    ({"key_value_seq_lengths": [1.0, 2.0]}, "key_value_seq_lengths .*float64"),
    ({"local_window_size": -1}, "local_window_size .*-1"),
    ({"local_window_size": (-8, 4)}, r"local_window_size .*\(-8, 4\)"),
    ({"local_window_size": (4, -8), "is_causal": True}, r"local_window_size .*\(4, -8\)"),
    ({"local_window_size": (1, 2, 3)}, r"local_window_size .*\(1, 2, 3\)"),
    ({"local_window_size": 1.5}, r"local_window_size .*1\.5"),
    ({"local_window_size": (True, 2)}, r"local_window_size .*True"),
    ({"segment_ids": ids(2, T)}, "segment_ids .*pair .*T = 5 and S = 7"),
    ({"segment_ids": (ids(2, T), ids(2, T))}, r"segment_ids of key .*7.*\(2, 5\)"),
    ({"segment_ids": (ids(3, T), ids(2, S))}, r"segment_ids of query .*5.*\(3, 5\)"),
    ({"segment_ids": (ids(T), ids(S))}, r"segment_ids of query .*\(5,\)"),
    ({"segment_ids": (zeros(2, T), ids(2, S))}, "segment_ids of query .*float32"),
    ({"segment_ids": (np.full((2, T), 2**31), ids(2, S))}, f"segment_ids of query .*{2**31}"),
    ({"segment_ids": (ids(2, T),) * 3}, "segment_ids .*3"),
    ({"mask": masks.segments(ids(2, T))}, "segment_ids .*pair"),
    ({"mask": masks.block_causal(ids(2, S), ids(2, S))}, r"block_causal.*query .*\(2, 7\)"),
    ({"mask": masks.ranges(ids(2, S), ids(2, T))}, r"ranges' low .*5.*\(2, 7\)"),
    ({"mask": masks.ranges(ids(2, T), zeros(2, T))}, "ranges' high .*float32"),
    ({"mask": masks.prefix(lengths(1, 2, 3))}, r"prefix's lengths .*\(3,\)"),
    ({"mask": masks.prefix(1.5)}, "prefix's lengths .*float"),
    ({"mask": masks.prefix(lengths(1, 2)), "is_causal": True}, "is_causal=True .*prefix.*drop"),
    ({"mask": masks.chunked(0)}, "chunked's size .*0"),
    ({"mask": masks.chunked(HALF)}, r"chunked's size .*2\.5"),
    ({"mask": masks.chunked(4, ids(2, T))}, "positions .*pair"),
    ({"mask": masks.window(-1, 0)}, "mask: window .*-1"),
    ({"mask": masks.window(jnp.zeros(2, jnp.int32), 0)}, r"mask: window .*\(2,\)"),
    ({"mask": masks.window(jnp.zeros(()), 0)}, "mask: window .*float32"),
    ({"mask": TABLE}, r"tile table .*\(5, 5\).*\(5, 7\)"),
    ({"mask": masks.segments(ids(1, T), ids(1, S)) & TABLE}, "tile table composes"),
    ({"logits_soft_cap": 0}, "logits_soft_cap .*0"),
    ({"logits_soft_cap": -3.0}, r"logits_soft_cap .*-3\.0"),
    ({"logits_soft_cap": float("nan")}, "logits_soft_cap .*nan"),
    ({"logits_soft_cap": "50"}, "logits_soft_cap .*50"),
    ({"logits_soft_cap": np.ones(2)}, r"logits_soft_cap .*\(2,\)"),
    ({"sinks": zeros(K)}, r"sinks .*\(4,\).*\(2,\)"),
    ({"sinks": ids(N)}, "sinks .*int32"),
    ({"return_max_logit": 1}, "return_max_logit .*1"),
    ({"deterministic": "yes"}, "deterministic .*yes"),
    ({"numerics": "faster"}, "numerics .*faster"),
    ({"return_residual": 1}, "return_residual .*1"),
    ({"implementation": "cudnn"}, "implementation .*cudnn"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=lambda x: x if type(x) is str else "")
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
def test_wrong(changes: dict[str, Any], message: str, jitted: bool):
    run = jax.jit(lambda: call(**changes)) if jitted else lambda: call(**changes)
    with pytest.raises(ValueError) as error:
        run()
    assert re.search(message, str(error.value)), str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "query dtype f32"),
        ({"bias": zeros(1, 1, T, 1), "dtype": jnp.bfloat16}, "bias: the kernels take alibi"),
        ({"scale": "traced", "dtype": jnp.bfloat16}, "scale: it is traced"),
        ({"head_dim": 12, "dtype": jnp.bfloat16}, "head_dim 12"),
        ({"head_dim": 264, "dtype": jnp.float16}, "head_dim 264"),
    ],
    ids=[
        "float32",
        "bias",
        "scale",
        "head_dim_12",
        "head_dim_264",
    ],
)
def test_what_kernels_do_not_take(kernels_present: None, changes: dict[str, Any], message: str):
    h, dtype = changes.pop("head_dim", H), changes.pop("dtype", jnp.float32)
    operands = {
        "query": zeros(2, T, N, h, dtype=dtype),
        "key": zeros(2, S, K, h, dtype=dtype),
        "value": zeros(2, S, K, h, dtype=dtype),
    }

    def run(scale: Any, **options: Any) -> jax.Array:
        traced = {"scale": scale} if "scale" in changes else {}
        return call(**operands, **(changes | traced), **options)

    with pytest.raises(NotImplementedError, match=f"implementation='kernel': {message}"):
        jax.jit(functools.partial(run, implementation="kernel"))(1.0)
    assert jax.jit(run)(1.0).shape == (2, T, N, h)


def test_two_comparisons_by_at_most_are_not_implemented():
    mask = masks.block_causal(ids(2, T), ids(2, S))
    with pytest.raises(NotImplementedError, match="2 masks of block_causal"):
        call(mask=mask & mask & masks.chunked(3))


def test_traced_ids_of_a_wide_type_are_refused():
    with pytest.raises(ValueError, match=r"segment_ids of query .*uint32"):
        jax.jit(lambda x: call(segment_ids=(x, ids(2, S))))(np.zeros((2, T), np.uint32))


def test_other_floating_types_are_not_implemented():
    names = ("query", "key", "value")
    with pytest.raises(NotImplementedError, match=r"query .*float8_e4m3fn; .*float64"):
        call(**{name: zeros(2, 7, 2, H, dtype=jnp.float8_e4m3fn) for name in names})


@pytest.mark.parametrize(
    ("scale", "message"),
    [(np.float32(1), None), (np.ones(2), r"scale .*float32\[2\]"), (2, r"scale .*int32\[\]")],
    ids=str,
)
def test_a_traced_scale_is_one_number(scale: Any, message: str | None):
    run = jax.jit(lambda scale: call(scale=scale))
    if message is None:
        assert run(scale).shape == (2, T, N, H)
        return
    with pytest.raises(ValueError, match=message):
        run(scale)


def test_a_traced_flag_is_refused():
    with pytest.raises(ValueError, match="is_causal must be True or False"):
        jax.jit(lambda flag: call(is_causal=flag))(True)


def test_traced_lengths_out_of_range_are_clipped(rng: np.random.Generator):
    q, k, v = (
        jnp.asarray(rng.normal(size=(2, *x)), jnp.float32)
        for x in ((T, N, H), (S, K, H), (S, K, H))
    )

    @jax.jit
    def run(query_lengths, key_lengths):
        return attention(
            q, k, v, query_seq_lengths=query_lengths, key_value_seq_lengths=key_lengths
        )

    output = run(lengths(-3, 99), lengths(99, 99))
    np.testing.assert_array_equal(output[0], 0)
    np.testing.assert_array_equal(output[1], attention(q, k, v)[1])
    np.testing.assert_array_equal(run(lengths(T, T), lengths(-1, S))[0], 0)


@pytest.mark.parametrize(
    ("b", "t", "s"), [(0, T, S), (2, 0, S), (2, T, 0), (0, 0, 0)], ids=lambda x: str(x)
)
@pytest.mark.parametrize("value_dim", [H, 8])
def test_empty_arrays_have_defined_results(b: int, t: int, s: int, value_dim: int):
    q, k, v = zeros(b, t, N, H), zeros(b, s, K, H), zeros(b, s, K, value_dim)

    def run(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        return attention(q, k, v, is_causal=True, return_residual=True)

    output, lse = run(q, k, v)
    np.testing.assert_array_equal(output, np.zeros((b, t, N, value_dim)))
    assert output.shape == (b, t, N, value_dim) and output.dtype == q.dtype
    np.testing.assert_array_equal(lse, np.full((b, N, t), -np.inf))
    gradients = jax.grad(lambda *x: run(*x)[0].sum(), (0, 1, 2))(q, k, v)
    for gradient, x in zip(gradients, (q, k, v), strict=True):
        assert gradient.shape == x.shape and not gradient.any()
