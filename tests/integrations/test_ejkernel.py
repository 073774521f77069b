"""The implementation for ejkernel against ejkernel's own for XLA."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.integrations.packages import assert_same, normal, package

ejkernel = package("ejkernel")
modules = package("ejkernel.modules")
errors = package("ejkernel.errors")
registry = package("ejkernel.kernels._registry")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from fa4_jax.integrations import ejkernel as adapter

B, T, S, N, H = 2, 12, 20, 4, 16

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def ejkernel_promotes_ranks() -> Iterator[None]:
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def ours() -> Iterator[Callable[..., jax.Array]]:
    """Our implementation, registered for the time of a test."""
    kept = registry.kernel_registry.list_implementations("flash_attention")
    yield adapter.register(backend="any", deterministic=True)
    registry.kernel_registry._registry["flash_attention"] = kept


def theirs(*args: Any, **kwargs: Any) -> jax.Array:
    return registry.kernel_registry.get("flash_attention", platform="xla")(*args, **kwargs)


def operands(
    rng: np.random.Generator, kv_heads: int = 2, keys: int = T, **kwargs: Any
) -> list[jax.Array]:
    shapes = (B, T, N, H), (B, keys, kv_heads, H), (B, keys, kv_heads, H)
    return normal(rng, *shapes, **kwargs)


def assert_same_calls(ours: Any, arrays: list[jax.Array], **kwargs: Any) -> None:
    assert_same(lambda *x: ours(*x, **kwargs), lambda *x: theirs(*x, **kwargs), arrays)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_grouped_queries(kv_heads: int, causal: bool, ours: Any, rng: np.random.Generator):
    assert_same_calls(ours, operands(rng, kv_heads), causal=causal)
    assert_same_calls(ours, operands(rng, kv_heads), causal=causal, softmax_scale=0.1)


@pytest.mark.parametrize("window", [(3, 0), (0, 2), (4, 1), 2], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_windows_count_the_keys_beside_the_own(
    window: Any, causal: bool, ours: Any, rng: np.random.Generator
):
    assert_same_calls(ours, operands(rng), sliding_window=window, causal=causal)


def test_more_keys_than_queries(ours: Any, rng: np.random.Generator):
    assert_same_calls(ours, operands(rng, keys=S), causal=True)
    assert_same_calls(ours, operands(rng, keys=S))


@pytest.mark.parametrize("heads", [1, N])
@pytest.mark.parametrize("dtype", [jnp.bool_, jnp.int32])
def test_masks(heads: int, dtype: Any, ours: Any, rng: np.random.Generator):
    mask = jnp.asarray(rng.random((B, heads, T, S)) < 0.6).at[..., 0].set(True).astype(dtype)
    assert_same_calls(ours, operands(rng, keys=S), attention_mask=mask, causal=True)


def test_bias(ours: Any, rng: np.random.Generator):
    """In the value and the gradients of query, key and value: ejkernel's bias has no gradient."""
    (bias,) = normal(rng, (B, N, T, S))
    assert_same_calls(ours, operands(rng, keys=S), bias=bias, causal=True)


def test_segments(ours: Any, rng: np.random.Generator):
    ids = jnp.asarray([[0] * 5 + [1] * 7, [3] * 12], jnp.int32)
    assert_same_calls(ours, operands(rng), q_segment_ids=ids, causal=True)
    mask = jnp.asarray(rng.random((B, 1, T, T)) < 0.6) | jnp.eye(T, dtype=bool)
    given = {"q_segment_ids": ids, "kv_segment_ids": ids, "attention_mask": mask}
    assert_same_calls(ours, operands(rng), **given)
    with pytest.raises(ValueError, match="without q_segment_ids"):
        ours(*operands(rng), kv_segment_ids=ids)


def test_soft_caps_and_sinks(ours: Any, rng: np.random.Generator):
    ids = jnp.asarray([[0] * 5 + [1] * 7, [3] * 12], jnp.int32)
    assert_same_calls(ours, operands(rng), logits_soft_cap=1.5, causal=True)
    for count in (1, 3):
        (aux,) = normal(rng, (count,))
        given = {"q_segment_ids": ids, "logits_soft_cap": 2.0}
        assert_same_calls(ours, operands(rng), softmax_aux=aux, **given)
    # ejkernel's checks of types refuse the sinks of each head that its documentation has.
    arrays, plain = operands(rng), adapter.make_flash_attention()
    of_heads = jnp.broadcast_to(aux, (N, 3))
    found, expected = (plain(*arrays, softmax_aux=x, **given) for x in (of_heads, aux))
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_segments_need_no_dense_mask(
    ours: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
):
    seen: list[Any] = []
    own = adapter.attention

    def recorded(*args: Any, **kwargs: Any) -> Any:
        seen.append((args[4], kwargs["segment_ids"]))
        return own(*args, **kwargs)

    monkeypatch.setattr(adapter, "attention", recorded)
    ours(*operands(rng), q_segment_ids=jnp.zeros((B, T), jnp.int32))
    ((mask, segment_ids),) = seen
    assert mask is None and segment_ids is not None


def test_padding_has_negative_ids(ours: Any, rng: np.random.Generator):
    """ejkernel's layer sets such rows to 0; ours are."""
    arrays = operands(rng)
    ids = jnp.asarray([[0] * 5 + [-1] * 7, [3] * 12], jnp.int32)
    valid = (ids >= 0)[:, :, None, None]

    def their_layer(*arrays: jax.Array) -> jax.Array:
        return jnp.where(valid, theirs(*arrays, q_segment_ids=ids), 0)

    assert_same(lambda *x: ours(*x, q_segment_ids=ids), their_layer, arrays)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_16_bits(dtype: Any, ours: Any, rng: np.random.Generator):
    arrays = operands(rng, dtype=dtype)
    exact = theirs(*(x.astype(jnp.float32) for x in arrays), causal=True)
    found = ours(*arrays, causal=True, precision=jax.lax.Precision.HIGHEST)
    assert found.dtype == dtype
    np.testing.assert_allclose(found.astype(jnp.float32), exact, atol=0.02, rtol=0.02)


def test_the_highest_priority_wins_for_cuda_alone(ours: Any):
    get = registry.kernel_registry.get
    assert get("flash_attention", platform="cuda", backend="gpu") is ours
    assert get("flash_attention", platform="xla", backend="any") is not ours
    higher = adapter.register(adapter.PRIORITY + 1)
    assert get("flash_attention", platform="cuda", backend="gpu") is higher
    assert get("flash_attention", platform="cuda", backend="any") is ours
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        registry.kernel_registry.validate_signatures("flash_attention")
    own, found = (f.__signature__ for f in (get("flash_attention", platform="xla"), ours))
    assert own == found


def test_the_public_function_takes_it(
    ours: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
):
    calls = []
    own = adapter.attention

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return own(*args, **kwargs)

    monkeypatch.setattr(adapter, "attention", counted)
    options = {"causal": True, "sliding_window": (3, 0), "softmax_scale": 0.2}

    def public(platform: str) -> Callable[..., jax.Array]:
        return lambda *x: modules.flash_attention(*x, platform=platform, **options)

    arrays = operands(rng)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_same(public("cuda"), public("xla"), arrays)
    assert calls and all(x["deterministic"] and x["is_causal"] for x in calls)


def test_what_is_refused_names_the_argument(ours: Any, rng: np.random.Generator):
    arrays = operands(rng)
    lengths = jnp.asarray([0, 5, 12], jnp.int32)
    refused = {
        "dropout_prob": 0.1,
        "cum_seqlens_q": lengths,
        "cum_seqlens_k": lengths,
        "normalize_output": False,
        "logits_dtype": jnp.bfloat16,
        "precision": jax.lax.Precision.HIGHEST,
        "block_tables": jnp.zeros((B, 1), jnp.int32),
    }
    plain = adapter.make_flash_attention()
    with pytest.raises(NotImplementedError, match=r"logits_soft_cap with a bias.*; supported: "):
        plain(*arrays, logits_soft_cap=5.0, bias=jnp.zeros((B, N, T, T)))
    for name, value in refused.items():
        with pytest.raises(NotImplementedError, match=f"{name}.*not supported; supported: "):
            plain(*arrays, **{name: value})
        with pytest.raises(errors.EjkernelRuntimeError, match=name):
            ours(*arrays, **{name: value})
