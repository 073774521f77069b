"""Context parallelism with masks, soft caps, sinks and largest scores equals one device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from fa4_jax import attention, masks, parallel
from tests.parallel_cases import make_mesh, schemes

B, N, K, H, T, DEVICES = 2, 4, 2, 8, 48, 4
SCHEMES = [*schemes("seq"), *schemes("ring", "ulysses")]

MASKS = (
    "segments",
    "segments, causal",
    "scattered, causal",
    "segments, window",
    "block causal in segments",
    "prefix, lengths",
    "chunks, offset",
    "chunks of positions",
    "ranges",
    "function of heads and entries",
    "intervals",
    "union, causal",
    "complement, window, segments",
)


def name_of(x: Any) -> str | None:
    return f"{type(x).__name__}-{x.layout}" if hasattr(x, "layout") else None


every_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=name_of)


def options_of(name: str, rng: np.random.Generator) -> dict[str, Any]:
    """Arguments of attention whose arrays of tokens are in natural order."""
    ids = np.sort(rng.integers(-1, 4, (B, T))).astype(np.int32)
    scattered = rng.integers(-1, 3, (B, T)).astype(np.int32)
    low = rng.integers(-5, T, (B, T)).astype(np.int32)
    found: dict[str, dict[str, Any]] = {
        "segments": {"segment_ids": ids},
        "segments, causal": {"segment_ids": ids, "is_causal": True},
        "scattered, causal": {"segment_ids": scattered, "is_causal": True},
        "segments, window": {"segment_ids": ids[:1], "local_window_size": (9, 3)},
        "block causal in segments": {"segment_ids": ids, "mask": masks.block_causal(scattered)},
        "prefix, lengths": {
            "mask": masks.prefix(np.array([5, 30])),
            "key_value_seq_lengths": np.array([48, 29]),
            "query_seq_lengths": np.array([30, 48]),
        },
        "chunks, offset": {"mask": masks.chunked(10), "query_offset": 7, "is_causal": True},
        "chunks of positions": {
            "mask": masks.chunked(5, np.tile(np.arange(T) % 24, (1, 1)).astype(np.int32)),
            "segment_ids": ids,
        },
        "ranges": {"mask": masks.ranges(low, low + rng.integers(-3, 20, (B, T), np.int32))},
    }
    ends = np.sort(rng.integers(-5, T, (B, T, 4)).astype(np.int32))
    offsets = jnp.asarray(rng.integers(0, 3, (B, N)), jnp.int32)
    found |= {
        "function of heads and entries": {
            "mask": masks.function(
                lambda b, h, q, k, table: (q + k + table[b, h]) % 3 > 0, offsets
            ),
            "query_offset": np.array([0, 5]),
        },
        "intervals": {"mask": masks.intervals(ends[..., ::2], ends[..., 1::2])},
        "union, causal": {
            "mask": masks.function(lambda b, h, q, k: k % 5 == 0) | masks.segments(scattered),
            "is_causal": True,
            "key_value_seq_lengths": np.array([48, 29]),
        },
        "complement, window, segments": {
            "mask": ~masks.ranges(low, low + 9) & masks.function(lambda b, h, q, k: q >= k - 7),
            "segment_ids": ids,
            "local_window_size": (20, 20),
        },
    }
    return found[name]


def ordered(tree: Any, scheme: Any, mesh: Any) -> Any:
    """Arrays of tokens, [B, T], in the scheme's order."""
    if scheme.layout == "contiguous":
        return tree
    shards = mesh.shape[scheme.axes[0]]

    def order(x: Any) -> Any:
        is_tokens = np.ndim(x) in (2, 3) and np.shape(x)[1] == T
        return parallel.to_zigzag(jnp.asarray(x), shards) if is_tokens else x

    return jax.tree.map(order, tree)


def ordered_shards(scheme: Any, mesh: Any, x: Any) -> Any:
    shards = mesh.shape[scheme.axes[0]]
    return parallel.to_zigzag(x, shards) if scheme.layout == "zigzag" else x


def natural(scheme: Any, mesh: Any, x: Any, axis: int) -> Any:
    shards = mesh.shape[scheme.axes[0]]
    return parallel.from_zigzag(x, shards, axis) if scheme.layout == "zigzag" else x


def sequence_mesh(kind: AxisType, scheme: Any) -> Any:
    if isinstance(scheme, parallel.RingUlysses):
        return make_mesh(kind, ring=2, ulysses=DEVICES // 2)
    return make_mesh(kind, seq=DEVICES)


def compare(kind: AxisType, scheme: Any, options: dict[str, Any], rng: np.random.Generator):
    """Compares results and gradients of `parallel.attention` with those of `attention`."""
    mesh = sequence_mesh(kind, scheme)
    q, k, v, bar = (jnp.asarray(rng.normal(size=(B, T, n, H)), jnp.float32) for n in (N, K, K, N))
    sinks = jnp.asarray(rng.normal(size=N), jnp.float32) if options.pop("sinks", False) else None
    most = options.get("return_max_logit", False)

    def loss(attend: Any, bar: Any) -> Any:
        def of(q: Any, k: Any, v: Any, sinks: Any) -> Any:
            output, lse, *top = attend(q, k, v, sinks)
            of_lse = jnp.where(lse > -1e30, jnp.cos(lse), 0)
            return (output * bar).sum() + of_lse.sum(), (output, lse, *top)

        return jax.jit(jax.value_and_grad(of, (0, 1, 2, 3), has_aux=True))

    def whole(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        return attention(q, k, v, sinks=sinks, return_residual=True, **options)

    (_, results), gradients = loss(whole, bar)(q, k, v, sinks)
    specs = P(None, scheme.axes)
    shared = ordered(options, scheme, mesh)

    def sharded(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        return parallel.attention(
            *(q, k, v),
            scheme=scheme,
            mesh=mesh,
            specs=None if kind is AxisType.Explicit else specs,
            sinks=sinks,
            return_residual=True,
            **shared,
        )

    def place(x: Any) -> Any:
        return jax.device_put(ordered_shards(scheme, mesh, x), NamedSharding(mesh, specs))

    (_, found), bars = loss(sharded, place(bar))(*map(place, (q, k, v)), sinks)
    for x, y, axis in zip(found[:2], results[:2], (1, 2), strict=True):
        x = jax.device_put(np.asarray(x))
        np.testing.assert_allclose(natural(scheme, mesh, x, axis), y, rtol=1e-4, atol=2e-5)
    if most:
        np.testing.assert_allclose(found[2], results[2], rtol=1e-5)
    for x, y in zip(bars[:3], gradients[:3], strict=True):
        x = jax.device_put(np.asarray(x))
        np.testing.assert_allclose(natural(scheme, mesh, x, 1), y, rtol=1e-3, atol=1e-4)
    if sinks is not None:
        np.testing.assert_allclose(bars[3], gradients[3], rtol=1e-3, atol=1e-4)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Sets `some_mask`: one of MASKS by the seed, or with --every-case each of them."""
    if "some_mask" in metafunc.fixturenames:
        every = metafunc.config.getoption("--every-case")
        names = MASKS if every else [None]
        metafunc.parametrize("some_mask", names, ids=lambda name: name or "any")


@every_scheme
def test_masks(scheme: Any, some_mask: str | None, rng: np.random.Generator):
    name = MASKS[rng.integers(len(MASKS))] if some_mask is None else some_mask
    compare(AxisType.Auto, scheme, options_of(name, rng), rng)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_a_function_of_heads_that_are_sharded(kind: AxisType, rng: np.random.Generator):
    mesh = make_mesh(kind, data=2, seq=2, tensor=2)
    q, k, v = (jnp.asarray(rng.normal(size=(B, T, n, H)), jnp.float32) for n in (N, K, K))
    shift = jnp.asarray(rng.integers(0, 3, (B, N)), jnp.int32)
    mask = masks.function(lambda b, h, q, k, shift: (q - k + shift[b, h]) % 3 > 0, shift)
    expected = attention(q, k, v, mask=mask, is_causal=True)
    spec = P("data", "seq", "tensor")
    for scheme in (parallel.Ring("seq"), parallel.AllGather("seq"), parallel.Ulysses("seq")):
        found = jax.jit(
            lambda *x, scheme=scheme: parallel.attention(
                *x, scheme=scheme, mesh=mesh, specs=spec, mask=mask, is_causal=True
            )
        )(*(jax.device_put(x, NamedSharding(mesh, spec)) for x in (q, k, v)))
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("scheme", SCHEMES[1::2], ids=name_of)
def test_shards_of_ids_inside_a_shard_map(scheme: Any, rng: np.random.Generator):
    """Sinks, too; one device's shards are all that `local_attention` gets."""
    mesh = sequence_mesh(AxisType.Auto, scheme)
    q, k, v = (jnp.asarray(rng.normal(size=(B, T, n, H)), jnp.float32) for n in (N, K, K))
    ids, sinks = options_of("segments", rng)["segment_ids"], jnp.linspace(-1, 1, N)
    expected = attention(q, k, v, segment_ids=ids, is_causal=True, sinks=sinks)

    def local(q: Any, k: Any, v: Any, ids: Any, sinks: Any) -> Any:
        options: dict[str, Any] = {"segment_ids": ids, "is_causal": True, "sinks": sinks}
        return parallel.local_attention(q, k, v, scheme=scheme, **options)

    spec = P(None, scheme.axes)
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(*(spec,) * 4, P()), out_specs=spec)
    shards = mesh.shape[scheme.axes[0]]
    found = jax.jit(mapped)(
        *(parallel.to_zigzag(jnp.asarray(x), shards) for x in (q, k, v, ids)), sinks
    )
    np.testing.assert_allclose(natural(scheme, mesh, found, 1), expected, rtol=1e-4, atol=2e-5)


def test_lengths_that_devices_do_not_divide(rng: np.random.Generator):
    mesh = make_mesh(AxisType.Auto, seq=DEVICES)
    q, k, v = (jnp.asarray(rng.normal(size=(B, 45, n, H)), jnp.float32) for n in (N, K, K))
    ids = rng.integers(-1, 3, (B, 45)).astype(np.int32)
    low = rng.integers(-5, 45, (B, 45)).astype(np.int32)
    mask = ~masks.ranges(low, low + 9) & masks.function(lambda b, h, q, k: q % 2 <= k % 3)
    expected = attention(q, k, v, segment_ids=ids, is_causal=True, mask=mask)
    for scheme in (parallel.Ring("seq"), parallel.AllGather("seq"), parallel.Ulysses("seq")):
        found = parallel.attention(
            *(q, k, v),
            scheme=scheme,
            mesh=mesh,
            specs=P(None, "seq"),
            segment_ids=ids,
            is_causal=True,
            mask=mask,
        )
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-5)


def test_what_it_does_not_take_is_refused():
    mesh = make_mesh(AxisType.Auto, seq=DEVICES)
    q, ids = jnp.zeros((1, 8, 4, 8)), np.zeros((1, 8), np.int32)
    options: dict[str, Any] = {
        "scheme": parallel.Ring("seq"),
        "mesh": mesh,
        "specs": P(None, "seq"),
    }
    with pytest.raises(ValueError, match=r"mask must be of fa4_jax\.masks .*ndarray"):
        parallel.attention(q, q, q, mask=np.ones((8, 8), bool), **options)  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match="mask: a tile table"):
        table = masks.tile_table(None, q, q, segment_ids=ids)
        parallel.attention(q, q, q, mask=table, **options)
    every = masks.function(lambda b, h, q, k: q >= k)
    with pytest.raises(NotImplementedError, match=r"mask: an array .*masks\.function"):
        parallel.attention(q, q, q, mask=~(every & np.ones((8, 8), bool)), **options)
    with pytest.raises(NotImplementedError, match="logits_soft_cap is traced"):
        jax.jit(lambda cap: parallel.attention(q, q, q, logits_soft_cap=cap, **options))(1.0)
    with pytest.raises(ValueError, match=r"segment_ids .*8.*\(1, 7\)"):
        parallel.attention(q, q, q, segment_ids=ids[:, 1:], **options)


@every_scheme
def test_cap_sinks_and_largest_scores(scheme: Any, rng: np.random.Generator):
    options = options_of("prefix, lengths", rng)
    options |= {"sinks": True, "logits_soft_cap": 2.0, "return_max_logit": True}
    compare(AxisType.Auto, scheme, options, rng)


@every_scheme
def test_padding_is_not_among_the_largest_scores(scheme: Any, rng: np.random.Generator):
    """All scores are below 0, which a row of zeros would have."""
    mesh = sequence_mesh(AxisType.Auto, scheme)
    q, k = (jnp.asarray(1 + rng.random((B, T, n, H)), jnp.float32) for n in (N, K))
    options: dict[str, Any] = {
        "is_causal": True,
        "query_seq_lengths": np.array([30, 47]),
        "return_max_logit": True,
    }
    _, expected = attention(q, -k, k, **options)
    q, k = (ordered_shards(scheme, mesh, x) for x in (q, k))
    _, found = parallel.attention(
        q, -k, k, scheme=scheme, mesh=mesh, specs=P(None, scheme.axes), **options
    )
    assert (expected < 0).all()
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@every_scheme
def test_explicit_axes(scheme: Any, rng: np.random.Generator):
    options = options_of("segments, causal", rng)
    compare(AxisType.Explicit, scheme, options | {"sinks": True, "return_max_logit": True}, rng)
