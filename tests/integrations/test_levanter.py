"""The backend for Levanter against Levanter's own backends."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.integrations.packages import assert_same, normal, package

hax = package("haliax")
theirs = package("levanter.layers.attention")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from fa4_jax.integrations import levanter as adapter

Mask = theirs.AttentionMask
Batch, Outer, Head, Group = (
    hax.Axis("batch", 2),
    hax.Axis("outer", 3),
    hax.Axis("kv_head", 2),
    hax.Axis("q_heads_per_group", 3),
)
QPos, Pos, KPos = hax.Axis("position", 12), hax.Axis("key_position", 12), hax.Axis("key_pos", 20)
Key, Value = hax.Axis("head_size", 8), hax.Axis("value_size", 5)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(theirs, "_te_flash_attention", theirs._te_flash_attention)
    adapter.install(deterministic=True)
    with jax.numpy_rank_promotion("allow"):
        yield


def named(rng: np.random.Generator, *axes: Any, **kwargs: Any) -> Any:
    """Normal numbers."""
    return hax.named(normal(rng, tuple(a.size for a in axes), **kwargs)[0], axes)


def operands(rng: np.random.Generator, keys: Any = Pos, **kwargs: Any) -> list[Any]:
    """In the order of axes in Levanter's layers: heads before positions."""
    query = Batch, Head, Group, QPos, Key
    return [named(rng, *axes, **kwargs) for axes in (query, *((Batch, Head, keys, Key),) * 2)]


def assert_same_calls(
    arrays: list[Any], keys: Any = Pos, own: str = "vanilla", **kwargs: Any
) -> None:
    """Our backend, reached as NVTE, and one of Levanter's have equal values and gradients."""
    axes = [x.axes for x in arrays]

    def call(backend: str) -> Any:
        def function(*arrays: jax.Array) -> jax.Array:
            q, k, v, *bias = (hax.named(x, a) for x, a in zip(arrays, axes, strict=True))
            out = theirs.dot_product_attention(
                QPos,
                keys,
                Key,
                q,
                k,
                v,
                bias=bias[0] if bias else None,
                attn_backend=theirs.AttentionBackend(backend),
                **kwargs,
            )
            order = [a for a in q.axes if a != Key]
            return out.rearrange((*order, *(a for a in out.axes if a not in order))).array

        return function

    assert_same(call("nvte"), call(own), [x.array for x in arrays])


def masks(rng: np.random.Generator, keys: Any = Pos) -> dict[str, Any]:
    explicit = hax.named(
        jnp.asarray(rng.random((2, 12, keys.size)) < 0.6).at[..., 0].set(True), (Batch, QPos, keys)
    )
    ids = hax.named(jnp.asarray([[0] * 5 + [1] * 7, [3] * 12]), (Batch, QPos))
    causal, window = Mask.causal(), Mask.causal(sliding_window=4)
    found = {
        "none": None,
        "empty": Mask(),
        "causal": causal,
        "window": window,
        "window of 1": Mask.causal(sliding_window=1),
        "window without causal": Mask(sliding_window=3),
        "two-sided": Mask.bidirectional_sliding_window(3),
        "both windows": Mask.bidirectional_sliding_window(2) & window,
        "both windows without causal": Mask(sliding_window=4, bidirectional_window=2),
        "offset": Mask.causal(offset=3),
        "offsets": Mask.causal(offset=hax.named(jnp.asarray([0, 5]), (Batch,))),
        "offset and window": Mask.causal(offset=2, sliding_window=4),
        "explicit": Mask.explicit(explicit),
        "array": explicit,
        "array without batch": explicit["batch", 0],
        "explicit and causal": Mask.explicit(explicit) & causal,
    }
    if keys is Pos:
        found["segments"] = window.with_segment_ids(ids)
        found["segments of the keys"] = causal.with_segment_ids(ids, ids)
    return found


NAMES = list(masks(np.random.default_rng(0)))


@pytest.mark.parametrize("name", NAMES)
def test_masks(name: str, rng: np.random.Generator):
    assert_same_calls(operands(rng), mask=masks(rng)[name])


@pytest.mark.parametrize("name", ["none", "causal", "window", "offset", "explicit and causal"])
def test_more_keys_than_queries(name: str, rng: np.random.Generator):
    assert_same_calls(operands(rng, KPos), KPos, mask=masks(rng, KPos)[name])


def test_windows_and_offsets_need_no_dense_mask(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
):
    seen: list[Any] = []
    own = adapter.fa4_attention

    def recorded(*args: Any, **kwargs: Any) -> Any:
        seen.append((args[4], kwargs))
        return own(*args, **kwargs)

    monkeypatch.setattr(adapter, "fa4_attention", recorded)
    dense = {}
    for name, mask in masks(rng).items():
        q, k, v = operands(rng)
        adapter.attention(QPos, Pos, Key, q, k, v, mask)
        dense[name] = seen[-1][0] is not None
    assert {name for name, found in dense.items() if found} == {
        "offset and window",
        "explicit",
        "array",
        "array without batch",
        "explicit and causal",
    }
    adapter.attention(QPos, Pos, Key, *operands(rng), mask=Mask.causal(sliding_window=4))
    assert seen[-1][1]["local_window_size"] == (3, 0)
    theirs.dot_product_attention(
        QPos, Pos, Key, *operands(rng), attn_backend=theirs.AttentionBackend.NVTE
    )
    assert seen[-1][1]["deterministic"]  # an option of install


@pytest.mark.parametrize(
    "axes",
    [
        ((), (), ()),
        ((Batch,), (), ()),
        ((), (Head,), ()),
        ((), (Head,), (Group,)),
        ((Outer, Batch), (Head,), (Group,)),
        ((Batch,), (), (Group,)),
    ],
    ids=lambda axes: " ".join(a.name for bin in axes for a in bin),
)
@pytest.mark.parametrize("heads_first", [False, True])
def test_axes_of_any_names_and_orders(axes: Any, heads_first: bool, rng: np.random.Generator):
    batch, head, group = axes
    if heads_first:
        query = (*batch, *head, *group, QPos, Key)
        key, value = (*batch, *head, Pos, Key), (*batch, *head, Pos, Value)
    else:
        query = (*batch, QPos, *head, *group, Key)
        key, value = (*batch, Pos, *head, Key), (Pos, *reversed((*batch, *head)), Value)
    arrays = [named(rng, *axes) for axes in (query, key, value)]
    assert_same_calls(arrays, mask=Mask.causal())


def test_bias_and_scale(rng: np.random.Generator):
    for axes in ((QPos, Pos), (Head, Group, QPos, Pos), (Batch, Group, Pos)):
        arrays = [*operands(rng), named(rng, *axes)]
        assert_same_calls(arrays, mask=Mask.causal(), scaling_factor=0.3)


def test_soft_caps_and_segments(rng: np.random.Generator):
    ids = {
        "batch": hax.named(jnp.asarray([[0] * 5 + [1] * 7, [3] * 12]), (Batch, QPos)),
        "all": hax.named(jnp.asarray([7] * 4 + [2] * 8), (QPos,)),
    }
    for own in ids.values():
        mask = Mask.causal().with_segment_ids(own)
        assert_same_calls(operands(rng), mask=mask, logits_soft_cap=1.5)
    assert_same_calls(operands(rng), mask=Mask.causal(offset=2).with_segment_ids(ids["batch"]))
    explicit = Mask.explicit(hax.named(jnp.eye(12, dtype=bool) | True, (QPos, Pos)))
    assert_same_calls(operands(rng), mask=explicit.with_segment_ids(ids["all"]))
    extra = hax.named(jnp.zeros((3, 12), jnp.int32), (Outer, QPos))
    with pytest.raises(ValueError, match=r"segment_ids have the axes.*outer"):
        adapter.attention(QPos, Pos, Key, *operands(rng), mask=Mask().with_segment_ids(extra))


def test_levanter_own_flash_attention_too(rng: np.random.Generator):
    for mask in (None, Mask.causal(sliding_window=4)):
        assert_same_calls(operands(rng), mask=mask, own="jax_flash", flash_block_size=4)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("attention_dtype", [None, jnp.float32])
def test_16_bits(dtype: Any, attention_dtype: Any, rng: np.random.Generator):
    arrays = operands(rng, dtype=dtype)
    exact = theirs.dot_product_attention(
        QPos,
        Pos,
        Key,
        *(x.astype(jnp.float32) for x in arrays),
        mask=Mask.causal(),
        attn_backend=theirs.AttentionBackend.VANILLA,
    )
    found = theirs.dot_product_attention(
        QPos,
        Pos,
        Key,
        *arrays,
        mask=Mask.causal(),
        attention_dtype=attention_dtype,
        precision="highest",
        attn_backend=theirs.AttentionBackend.NVTE,
    )
    assert found.dtype == dtype
    found = found.rearrange(exact.axes).array.astype(jnp.float32)
    np.testing.assert_allclose(found, exact.array, atol=0.02, rtol=0.02)


def test_a_narrower_attention_dtype(rng: np.random.Generator):
    q, k, v = operands(rng)
    found = adapter.attention(QPos, Pos, Key, q, k, v, attention_dtype=jnp.bfloat16)
    rounded = adapter.attention(QPos, Pos, Key, *(x.astype(jnp.bfloat16) for x in (q, k, v)))
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found.array, rounded.array.astype(jnp.float32))


def test_a_layer_of_levanter(rng: np.random.Generator):
    embed = hax.Axis("embed", 24)

    def layer(backend: str) -> Any:
        config = theirs.AttentionConfig(
            Embed=embed,
            num_heads=6,
            num_kv_heads=2,
            attn_backend=theirs.AttentionBackend(backend),
            use_bias=False,
        )
        return theirs.Attention.init(config, key=jax.random.key(1))

    x = named(rng, Batch, hax.Axis("position", 12), embed)
    own, ours = layer("vanilla"), layer("nvte")

    def call(layer: Any) -> Any:
        return lambda x_: layer(hax.named(x_, x.axes), Mask.causal()).rearrange(x.axes).array

    assert_same(call(ours), call(own), [x.array])


def test_what_is_refused_names_the_argument(rng: np.random.Generator):
    arrays = operands(rng)
    with pytest.raises(NotImplementedError, match=r"precision.*supported: "):
        adapter.attention(QPos, Pos, Key, *arrays, precision=jax.lax.Precision.HIGHEST)
    capped_bias = {"logits_soft_cap": 5.0, "bias": named(rng, QPos, Pos)}
    with pytest.raises(NotImplementedError, match=r"logits_soft_cap with a bias.*supported: "):
        adapter.attention(QPos, Pos, Key, *arrays, **capped_bias)
    with pytest.raises(NotImplementedError, match=r"dropout=0\.1.*inference=True"):
        adapter.attention(QPos, Pos, Key, *arrays, dropout=0.1)
    found = adapter.attention(QPos, Pos, Key, *arrays, dropout=0.1, inference=True)
    expected = adapter.attention(QPos, Pos, Key, *arrays)
    np.testing.assert_array_equal(found.array, expected.array)
    nvte = {"attn_backend": theirs.AttentionBackend.NVTE}
    with pytest.raises(NotImplementedError, match="logits_soft_cap"):
        theirs.dot_product_attention(QPos, Pos, Key, *arrays, **capped_bias, **nvte)


def test_axes_without_a_place(rng: np.random.Generator):
    q, k, v = operands(rng)
    extra = hax.Axis("extra", 2)
    with pytest.raises(ValueError, match="extra"):
        adapter.attention(QPos, Pos, Key, q, k.broadcast_axis(extra), v)
    with pytest.raises(ValueError, match=r"mask has the axes.*extra"):
        seen = hax.ones((extra, QPos, Pos), dtype=jnp.bool_)
        adapter.attention(QPos, Pos, Key, q, k, v, seen)
    with pytest.raises(ValueError, match="causal_offset"):
        mask = Mask.causal(offset=hax.zeros(extra, dtype=jnp.int32))
        adapter.attention(QPos, Pos, Key, q, k, v, mask)
