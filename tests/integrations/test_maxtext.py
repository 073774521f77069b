"""The branch for MaxText's AttentionOp against its dot_product kernel."""

from __future__ import annotations

import types
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.integrations.packages import assert_same, normal, package

attention_op = package("maxtext.layers.attention_op")
common = package("maxtext.common.common_types")
kvcache = package("maxtext.inference.kvcache")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from fa4_jax.integrations import maxtext as adapter

Kind = common.AttentionType
B, T, N, H = 2, 12, 4, 8
OURS = "cudnn_flash_jax"

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    undo = adapter.install(OURS, deterministic=True)
    with jax.numpy_rank_promotion("allow"):
        yield
    undo()


def make_op(kernel: str, *, axis: str = "data", kv_heads: int = 2, **kwargs: Any) -> Any:
    """MaxText's AttentionOp, whose configuration has what this operation reads of it."""
    config = types.SimpleNamespace(
        attention_type="global",
        context_parallel_load_balance=False,
        context_parallel_strategy="all_gather",
        context_sharding="context",
        debug_sharding=False,
        head_dim=H,
        ici_context_autoregressive_parallelism=0,
        matmul_precision="default",
        moba=kwargs.pop("moba", False),
        shard_mode=common.ShardMode.AUTO,
        ulysses_context_sharding="context_ulysses",
    )
    mesh = jax.make_mesh((1 if axis == "data" else 2,), (axis,))
    op = attention_op.AttentionOp
    return op(config, mesh, kernel, 2 * T, N, kv_heads, float32_logits=True, **kwargs)


def operands(rng: np.random.Generator, kv_heads: int = 2, **kwargs: Any) -> list[jax.Array]:
    shapes = (B, T, N, H), (B, T, kv_heads, H), (B, T, kv_heads, kwargs.pop("value_dim", H))
    q, k, v = normal(rng, *shapes, **kwargs)
    return [q * H**-0.5, k, v]  # MaxText scales the query before it calls the operation


def run(op: Any, ids: Any = None, mode: str = common.MODEL_MODE_TRAIN, **kwargs: Any) -> Any:
    """The operation as a function of query, key and value."""
    return lambda *arrays: op.apply_attention(
        *arrays,
        decoder_segment_ids=ids,
        segment_positions=None,
        lengths=None,
        model_mode=mode,
        qk_product_einsum=jnp.einsum,
        wv_product_einsum=jnp.einsum,
        **kwargs,
    )


def call(op: Any, ids: Any = None) -> Any:
    """The whole layer as a function of query, key and value."""
    return lambda *arrays: op(*arrays, ids, None, common.MODEL_MODE_TRAIN)


def assert_same_ops(arrays: list[jax.Array], ids: Any = None, **kwargs: Any) -> None:
    """Rows of padding are 0 here; the ids 0 of MaxText's own meet each other."""
    ours, own = make_op(OURS, **kwargs), make_op("dot_product", **kwargs)
    valid = True if ids is None else (ids > 0)[..., None, None]
    assert_same(call(ours, ids), lambda *x: jnp.where(valid, call(own, ids)(*x), 0), arrays)
    out, *rest = run(ours, ids)(*arrays)
    assert rest == [None, None]
    np.testing.assert_array_equal(out, call(ours, ids)(*arrays))


IDS = {
    "none": None,
    "one": np.ones((B, T), np.int32),
    "packed": np.asarray([[1] * 5 + [2] * 4 + [3] * 3, [1] * 12], np.int32),
    "packed and padded": np.asarray([[1] * 5 + [2] * 4 + [0] * 3, [1] * 11 + [0]], np.int32),
}
KINDS = {
    "global": {"attention_type": Kind.GLOBAL},
    "window": {"attention_type": Kind.LOCAL_SLIDING, "sliding_window_size": 4},
    "window of 1": {"attention_type": Kind.LOCAL_SLIDING, "sliding_window_size": 1},
    "mla": {"attention_type": Kind.MLA},
    "full": {"attention_type": Kind.FULL},
    "chunks": {"attention_type": Kind.CHUNK, "chunk_attn_window_size": 4},
    "soft cap": {"attn_logits_soft_cap": 3.0},
    "soft cap, window": {
        "attention_type": Kind.LOCAL_SLIDING,
        "sliding_window_size": 4,
        "attn_logits_soft_cap": 3.0,
    },
}


@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_and_segments(kind: str, ids: str, rng: np.random.Generator):
    given = None if IDS[ids] is None else jnp.asarray(IDS[ids])
    assert_same_ops(operands(rng), given, **KINDS[kind])


@pytest.mark.parametrize("kind", ["global", "window"])
def test_sinks(kind: str, rng: np.random.Generator):
    ids = jnp.asarray(IDS["packed"])
    ours, own = make_op(OURS, **KINDS[kind]), make_op("dot_product", **KINDS[kind])

    def expected(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array) -> jax.Array:
        output, _, total = run(own, ids, sinks=sinks)(q, k, v)
        return output / total

    def found(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array) -> jax.Array:
        return run(ours, ids, sinks=sinks)(q, k, v)[0]

    assert_same(found, expected, [*operands(rng), *normal(rng, (N,))])


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_grouped_queries_and_wider_values(kv_heads: int, rng: np.random.Generator):
    assert_same_ops(operands(rng, kv_heads), kv_heads=kv_heads)
    assert_same_ops(operands(rng, kv_heads, value_dim=5), kv_heads=kv_heads)


def test_prefill(rng: np.random.Generator):
    arrays, ids = operands(rng), jnp.asarray(IDS["packed"])
    found, *rest = run(make_op(OURS), ids, common.MODEL_MODE_PREFILL)(*arrays)
    out, _, total = run(make_op("dot_product"), ids, common.MODEL_MODE_PREFILL)(*arrays)
    assert rest == [None, None]
    np.testing.assert_allclose(found, out / total, atol=1e-5)


def test_negative_ids_are_padding(rng: np.random.Generator):
    ids = jnp.asarray([[1] * 5 + [-1] * 7, [-1] * 2 + [2] * 10], jnp.int32)
    valid = (ids >= 0)[..., None, None]
    own = make_op("dot_product")
    expected = lambda *x: jnp.where(valid, call(own, ids)(*x), 0)  # noqa: E731
    assert_same(call(make_op(OURS), ids), expected, operands(rng))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_are_not_packed(kind: str, rng: np.random.Generator):
    """Lengths in place of segment ids: equal where there is no padding, and zero there."""
    adapter.install("fa4_jax_lengths", packed=False)
    ids = jnp.asarray([[1] * 5 + [0] * 7, [1] * 12], jnp.int32)
    valid = (ids > 0)[..., None, None]
    ours = make_op(OURS, **KINDS[kind])
    ours.attention_kernel = "fa4_jax_lengths"
    own = make_op("dot_product", **KINDS[kind])
    arrays = operands(rng)
    assert_same(call(ours, ids), lambda *x: jnp.where(valid, call(own, ids)(*x), 0), arrays)


def test_what_reaches_the_kernels(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch):
    seen: list[dict[str, Any]] = []
    own = adapter.attention

    def recorded(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs)
        return own(*args, **kwargs)

    monkeypatch.setattr(adapter, "attention", recorded)
    arrays, ids = operands(rng), jnp.asarray(IDS["one"])
    q, k, v = arrays
    call(make_op(OURS, **KINDS["window"]))(*arrays)
    expected = {"scale": 1.0, "is_causal": True, "local_window_size": (3, 0)}
    expected |= {"mask": None, "logits_soft_cap": None, "sinks": None}
    assert seen.pop() == {**expected, "deterministic": True}
    call(make_op(OURS), ids)(*arrays)
    options = seen.pop()
    assert options["mask"] is None
    for found in options["segment_ids"]:
        np.testing.assert_array_equal(found, ids - 1)
    adapter.apply_attention(
        make_op(OURS), q, k, v, ids, None, None, common.MODEL_MODE_TRAIN, packed=False
    )
    options = seen.pop()
    assert "segment_ids" not in options
    np.testing.assert_array_equal(options["key_value_seq_lengths"], [T, T])
    call(make_op("dot_product"))(*arrays)
    assert not seen


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_16_bits(dtype: Any, rng: np.random.Generator):
    arrays = operands(rng, dtype=dtype)
    exact = call(make_op("dot_product"))(*(x.astype(jnp.float32) for x in arrays))
    found = call(make_op(OURS))(*arrays)
    assert found.dtype == dtype
    np.testing.assert_allclose(found.astype(jnp.float32), exact, atol=0.02, rtol=0.02)


def test_quantised_keys_and_values(rng: np.random.Generator):
    q, k, v = operands(rng)
    scale = jnp.full((1, 1, 1, 1), 0.05)
    tensors = [
        kvcache.KVTensor(
            qvalue=jnp.int8(jnp.rint(x / scale)),
            scale=[scale],
            scale_t=None,
            dequant_dtype=jnp.float32,
            bias=[],
        )
        for x in (k, v)
    ]
    found, *_ = run(make_op(OURS))(q, *tensors)
    expected = call(make_op("dot_product"))(q, *(x.dequant() for x in tensors))
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_what_is_refused_names_the_argument(rng: np.random.Generator):
    arrays = operands(rng)
    zeros = jnp.zeros((B, T))
    refused = {
        "previous_chunk": jnp.zeros((B, 3, 2, H)),
        "bidirectional_mask": zeros,
        "indexer_mask": jnp.zeros((B, T, T)),
        "compressed_mask": jnp.zeros((B, 1, T, 4)),
        "record_max_logits": True,
        "pad_kv_total": 4,
        "compress_ratio": 2,
    }
    for name, value in refused.items():
        with pytest.raises(NotImplementedError, match=f"{name}.*supported: "):
            run(make_op(OURS), **{name: value})(*arrays)
    supported = ("global", "mla", "local_sliding", "chunk", "full")
    other = next(kind for kind in Kind if kind.value not in supported)
    settings = {
        "dropout_rate": {"dropout_rate": 0.1},
        "moba": {"moba": True},
        "attention_type": {"attention_type": other},
    }
    for name, kwargs in settings.items():
        with pytest.raises(NotImplementedError, match=f"{name}.*supported: "):
            call(make_op(OURS, **kwargs))(*arrays)
    with pytest.raises(ValueError, match="sliding_window_size=None"):
        call(make_op(OURS, attention_type=Kind.LOCAL_SLIDING))(*arrays)
    with pytest.raises(ValueError, match="chunk_attn_window_size=None"):
        call(make_op(OURS, attention_type=Kind.CHUNK))(*arrays)
    with pytest.raises(NotImplementedError, match=r"autoregressive.*dot_product"):
        run(make_op(OURS), mode=common.MODEL_MODE_AUTOREGRESSIVE)(*arrays)
    op = make_op(OURS, dropout_rate=0.1)
    run(op, mode=common.MODEL_MODE_PREFILL)(*arrays)


def test_context_parallelism_is_refused(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch):
    op = make_op(OURS, axis="context")
    monkeypatch.setattr(
        attention_op, "get_logical_axis_rules", lambda: [(common.Q_LENGTH, "context")]
    )
    with pytest.raises(NotImplementedError, match="context parallelism over 2 shards"):
        call(op)(*operands(rng))


def test_undo(rng: np.random.Generator):
    own = attention_op.AttentionOp.apply_attention
    undo = adapter.install("another")
    assert attention_op.AttentionOp.apply_attention is not own
    undo()
    assert attention_op.AttentionOp.apply_attention is own
