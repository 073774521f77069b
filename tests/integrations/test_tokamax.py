"""The op for tokamax against tokamax's own XLA op."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.integrations.packages import assert_same, normal, package

tokamax = package("tokamax")

from fa4_jax.integrations import tokamax as adapter  # noqa: E402

base = package("tokamax._src.ops.attention.base")
package("absl.flags").FLAGS(["tests"])  # tokamax would parse pytest's arguments

B, T, N, H = 2, 12, 4, 8

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def tokamax_promotes_ranks() -> Iterator[None]:
    with jax.numpy_rank_promotion("allow"):
        yield


def operands(
    rng: np.random.Generator, kv_heads: int = 2, keys: int = T, **kwargs: Any
) -> list[jax.Array]:
    shapes = (B, T, N, H), (B, keys, kv_heads, H), (B, keys, kv_heads, H)
    return normal(rng, *shapes, **kwargs)


def assert_same_calls(
    arrays: list[jax.Array], op: Any = adapter.attention_op, own: Any = None, **kwargs: Any
) -> None:
    """tokamax's function with our op and with its own agree; `own` is for its own call alone."""

    def ours(*arrays: jax.Array) -> jax.Array:
        return tokamax.dot_product_attention(*arrays, implementation=[op], **kwargs)

    def theirs(*arrays: jax.Array) -> jax.Array:
        options = kwargs | (own or {})
        return tokamax.dot_product_attention(*arrays, implementation="xla", **options)

    assert_same(ours, theirs, arrays)
    assert_same(jax.jit(ours), theirs, arrays)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_grouped_queries(kv_heads: int, is_causal: bool, rng: np.random.Generator):
    assert_same_calls(operands(rng, kv_heads), is_causal=is_causal, scale=0.3)


def test_causal_with_more_keys_than_queries(rng: np.random.Generator):
    assert_same_calls(operands(rng, keys=17), is_causal=True)


def test_masks_and_biases(rng: np.random.Generator):
    mask = jnp.asarray(rng.random((B, 1, T, T)) < 0.6).at[..., 0].set(True)
    assert_same_calls(operands(rng), mask=mask)
    assert_same_calls(operands(rng), mask=mask, is_causal=True)
    for shape in ((B, N, T, T), (N, 1, T), (1, 1, T, T)):
        assert_same_calls([*operands(rng), *normal(rng, shape)], is_causal=True)


def test_soft_caps(rng: np.random.Generator):
    for is_causal in (False, True):
        assert_same_calls(operands(rng), logits_soft_cap=1.5, is_causal=is_causal)


def test_lengths(rng: np.random.Generator):
    arrays = operands(rng)
    assert_same_calls(arrays, key_value_seq_lengths=jnp.asarray([5, 12]), is_causal=True)
    # Past a query length our rows are 0 and tokamax's are means of values: compare the others.
    lengths = jnp.asarray([7, 12])
    seen = jnp.asarray(np.arange(T)[None] < np.asarray(lengths)[:, None])[..., None, None]

    def call(implementation: Any) -> Any:
        def function(*arrays: jax.Array) -> jax.Array:
            out = tokamax.dot_product_attention(
                *arrays,
                query_seq_lengths=lengths,
                key_value_seq_lengths=lengths,
                implementation=[implementation],
            )
            return jnp.where(seen, out, 0)

        return function

    assert_same(call(adapter.attention_op), call("xla"), arrays)
    out = tokamax.dot_product_attention(
        *arrays, query_seq_lengths=lengths, implementation=[adapter.attention_op]
    )
    np.testing.assert_array_equal(out[0, 7:], 0)


@pytest.mark.parametrize("window", [(3, 0), (0, 2), 2], ids=str)
def test_windows_in_the_call_and_as_a_field(window: Any, rng: np.random.Generator):
    """Both count `left` earlier keys beside the query's own."""
    assert_same_calls(operands(rng), local_window_size=window)
    op = adapter.DotProductAttention(local_window_size=window)
    assert_same_calls(operands(rng), op, own={"local_window_size": window})
    own = {"local_window_size": window}
    assert_same_calls(operands(rng), op, own=own, is_causal=True)


def test_lengths_causality_and_the_field_need_no_dense_mask(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
):
    seen: list[Any] = []
    own = adapter.attention

    def recorded(*args: Any, **kwargs: Any) -> Any:
        seen.append((args[3:], kwargs["is_causal"], kwargs["key_value_seq_lengths"]))
        return own(*args, **kwargs)

    monkeypatch.setattr(adapter, "attention", recorded)
    arrays, lengths = operands(rng), jnp.asarray([5, 12])
    op = adapter.DotProductAttention(local_window_size=(3, 0), deterministic=True)
    tokamax.dot_product_attention(
        *arrays, is_causal=True, key_value_seq_lengths=lengths, implementation=[op]
    )
    (dense, is_causal, key_lengths) = seen.pop()
    assert dense == (None, None) and is_causal
    np.testing.assert_array_equal(key_lengths, lengths)
    tokamax.dot_product_attention(*arrays, local_window_size=(3, 0), implementation=[op])
    assert seen.pop()[0][1] is not None


def test_batch_axes_value_heads_and_vmap(rng: np.random.Generator):
    op, own = adapter.attention_op, base.DotProductAttention()
    arrays = normal(rng, (2, 3, T, N, H), (2, 3, T, 2, H), (2, 3, T, 2, 5))
    mask = jnp.asarray(rng.random((3, 1, T, T)) < 0.6).at[..., 0].set(True)
    for seen in (None, mask, mask[None], base.Mask(mask, is_causal=True)):
        assert_same(lambda *x, m=seen: op(*x, mask=m), lambda *x, m=seen: own(*x, mask=m), arrays)
    assert_same(jax.vmap(op), jax.vmap(own), arrays)


def test_indices(rng: np.random.Generator):
    op, own = adapter.attention_op, base.DotProductAttention()
    indices = jnp.arange(T)[None]
    kwargs = {"q_indices": indices + 2, "k_indices": indices[:, ::-1], "is_causal": True}
    assert_same(lambda *x: op(*x, **kwargs), lambda *x: own(*x, **kwargs), operands(rng))
    with pytest.raises(NotImplementedError, match="local_window_size"):
        adapter.DotProductAttention(local_window_size=3)(*operands(rng), **kwargs)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_16_bits(dtype: Any, rng: np.random.Generator):
    arrays = operands(rng, dtype=dtype)
    exact = tokamax.dot_product_attention(
        *(x.astype(jnp.float32) for x in arrays), is_causal=True, implementation="xla"
    )
    for precision in (None, "highest"):
        found = tokamax.dot_product_attention(
            *arrays, is_causal=True, precision=precision, implementation=[adapter.attention_op]
        )
        assert found.dtype == dtype
        np.testing.assert_allclose(found.astype(jnp.float32), exact, atol=0.02, rtol=0.02)


def test_residuals_merge_as_tokamax_merges_them(rng: np.random.Generator):
    q, k, v = operands(rng)
    seen = jnp.ones((1, 1, T, T), bool).at[:, :, 0].set(False)  # the first row sees no key
    halves = [(k[:, :6], v[:, :6], None), (k[:, 6:], v[:, 6:], seen[..., 6:])]

    def merged(op: Any) -> tuple[jax.Array, jax.Array]:
        parts = [op(q, *kv, mask=mask, return_residuals=True) for *kv, mask in halves]
        out, residuals = jax.tree.map(lambda *x: jnp.stack(x), *parts)
        weights = jnp.swapaxes(residuals[1], -1, -2)[..., None]
        out, (m, denominator) = base.combine_partial_results(out * weights, residuals, True)
        return out, m + jnp.log(denominator)

    found, expected = merged(adapter.attention_op), merged(base.DotProductAttention())
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), found, expected)
    whole = tokamax.dot_product_attention(q, k, v, implementation="xla")
    np.testing.assert_allclose(found[0][:, 1:], whole[:, 1:], atol=1e-5)


def test_what_is_refused_names_the_argument_and_can_fall_back(rng: np.random.Generator):
    arrays = operands(rng)
    capped_bias = {"logits_soft_cap": 5.0, "bias": jnp.zeros((B, N, T, T))}
    with pytest.raises(NotImplementedError, match=r"logits_soft_cap with a bias.*supported: "):
        adapter.attention_op(*arrays, **capped_bias)
    refused = {
        "dropout_mask": jnp.ones((B, N, T, T), bool),
        "normalize_output": False,
        "logits_dtype": jnp.bfloat16,
        "precision": jax.lax.DotAlgorithmPreset.BF16_BF16_F32,
        "paging_info": base.PagingInfo(*(jnp.ones(x, jnp.int32) for x in ((B,), (B, 1), (B,)))),
    }
    for name, value in refused.items():
        with pytest.raises(NotImplementedError, match=f"{name}.*supported: "):
            adapter.attention_op(*arrays, **{name: value})
    both = [adapter.attention_op, "xla"]
    found = tokamax.dot_product_attention(*arrays, **capped_bias, implementation=both)
    own = tokamax.dot_product_attention(*arrays, **capped_bias, implementation="xla")
    np.testing.assert_array_equal(found, own)


def test_the_signature_is_tokamax_own():
    own = inspect.signature(base.DotProductAttention._fwd)
    assert inspect.signature(adapter.DotProductAttention._fwd) == own
