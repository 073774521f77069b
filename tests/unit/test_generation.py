"""A thousand steps of generation through a paged cache equal recomputing all from scratch."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fa4_jax import PagedCache, attention, decode
from fa4_jax.conformance.compare import compare

LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 2, 4, 2, 8, 17
WINDOWS = (None, 100)
STEPS = 1000
PROMPTS = np.array([5, 1, 37], np.int32)
WIDTH = HEADS * HEAD_DIM

Attend = Any
"""Attention of a layer: (layer, query [B, T, N, H], key, value [B, T, K, H])."""


def make_weights(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Weights of a small transformer without norms; the residual stream stays of unit size."""
    shapes = {
        "embed": (VOCABULARY, WIDTH),
        "position": (STEPS + int(PROMPTS.max()), WIDTH),
        "query": (LAYERS, WIDTH, HEADS * HEAD_DIM),
        "key": (LAYERS, WIDTH, KV_HEADS * HEAD_DIM),
        "value": (LAYERS, WIDTH, KV_HEADS * HEAD_DIM),
        "output": (LAYERS, HEADS * HEAD_DIM, WIDTH),
        "predict": (WIDTH, VOCABULARY),
    }
    return {
        name: rng.normal(size=shape).astype(np.float32)
        * (1 if name in ("embed", "position") else shape[-2] ** -0.5)
        for name, shape in shapes.items()
    }


def model(weights: Any, tokens: Any, positions: Any, attend: Attend) -> Any:
    """Logits [B, T, VOCABULARY] of tokens and positions [B, T], by JAX or by NumPy."""
    x = weights["embed"][tokens] + weights["position"][positions]
    for layer in range(LAYERS):
        q, k, v = (
            (x @ weights[name][layer]).reshape(*tokens.shape, heads, HEAD_DIM)
            for name, heads in (("query", HEADS), ("key", KV_HEADS), ("value", KV_HEADS))
        )
        x = x + attend(layer, q, k, v).reshape(*tokens.shape, WIDTH) @ weights["output"][layer]
    return x @ weights["predict"]


class State(NamedTuple):
    """What the loop carries: tokens [B, all] and logits [B, STEPS, VOCABULARY] so far."""

    cache: PagedCache
    tokens: jax.Array
    logits: jax.Array
    done: jax.Array


def extend(weights: Any, cache: PagedCache, tokens: Any, counts: Any, dtype: Any) -> Any:
    """The cache with the next counts[b] tokens, and the logits after the last of them."""
    cache = cache.grow(counts)
    positions = jnp.maximum(
        (cache.lengths - counts)[:, None] + jnp.arange(tokens.shape[1])[None, :], 0
    )
    caches = [cache]

    def attend(layer: int, *qkv: jax.Array) -> jax.Array:
        q, k, v = (x.astype(dtype) for x in qkv)
        caches.append(caches[-1].append(layer, k, v, counts))
        now = caches[-1]
        found = decode(
            *(q, *now.pages(layer), now.page_table, now.lengths),
            query_lengths=counts,
            local_window_size=WINDOWS[layer],
        )
        return found.astype(jnp.float32)

    logits = model(weights, tokens, positions, attend)
    last = jnp.maximum(counts - 1, 0)[:, None, None]
    return caches[-1], jnp.take_along_axis(logits, last, axis=1)[:, 0]


@functools.partial(jax.jit, static_argnums=2)
def generate(weights: Any, prompts: jax.Array, dtype: Any) -> State:
    """The likeliest tokens after prompts, in one loop; entry b's begin at PROMPTS[b]."""
    batch, longest = prompts.shape
    lengths = jnp.asarray(PROMPTS)
    cache = PagedCache.empty(
        batch,
        num_pages=230,
        max_pages=80,
        page_size=16,
        layers=LAYERS,
        heads=KV_HEADS,
        head_dim=HEAD_DIM,
        dtype=dtype,
    )
    cache, logits = extend(weights, cache, prompts, lengths, dtype)
    entries = jnp.arange(batch)

    def put(state: State, logits: jax.Array) -> State:
        """Takes the likeliest token of logits [B, VOCABULARY] into the state."""
        token = jnp.argmax(logits, -1).astype(jnp.int32)
        tokens = state.tokens.at[entries, lengths + state.done].set(token)
        kept = state.logits.at[:, state.done].set(logits)
        return State(state.cache, tokens, kept, state.done + 1)

    def step(state: State) -> State:
        last = jnp.take_along_axis(state.tokens, (lengths + state.done - 1)[:, None], axis=1)
        cache, logits = extend(weights, state.cache, last, jnp.ones(batch, jnp.int32), dtype)
        return put(state._replace(cache=cache), logits)

    tokens = jnp.zeros((batch, longest + STEPS), jnp.int32).at[:, :longest].set(prompts)
    kept = jnp.zeros((batch, STEPS, VOCABULARY))
    state = put(State(cache, tokens, kept, jnp.int32(0)), logits)
    return jax.lax.while_loop(lambda state: state.done < STEPS, step, state)


def from_scratch(weights: Any, tokens: Any, dtype: Any) -> np.ndarray:
    """Logits of whole sequences [B, all] by `attention`."""

    def attend(layer: int, *qkv: jax.Array) -> jax.Array:
        q, k, v = (x.astype(dtype) for x in qkv)
        found = attention(q, k, v, is_causal=True, local_window_size=WINDOWS[layer])
        return found.astype(jnp.float32)

    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return np.asarray(jax.jit(lambda w, t: model(w, t, positions, attend))(weights, tokens))


def in_float64(weights: dict[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    """The same in float64 by NumPy, every row over its own keys."""

    def attend(layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
        k, v = (np.repeat(x, HEADS // KV_HEADS, axis=1) for x in (k, v))
        scores = q @ k.swapaxes(2, 3) * HEAD_DIM**-0.5
        distance = np.arange(tokens.shape[1])[:, None] - np.arange(tokens.shape[1])
        seen = distance >= 0
        if (window := WINDOWS[layer]) is not None:
            seen &= distance <= window
        scores = np.where(seen, scores, -np.inf)
        share = np.exp(scores - scores.max(-1, keepdims=True))
        share /= share.sum(-1, keepdims=True)
        return (share @ v).swapaxes(1, 2)

    wide = {name: x.astype(np.float64) for name, x in weights.items()}
    positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    return model(wide, tokens, positions, attend)


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_a_thousand_steps(dtype: str, rng: np.random.Generator):
    storage = {"bf16": jnp.bfloat16, "f32": jnp.float32}[dtype]
    weights = make_weights(rng)
    prompts = rng.integers(0, VOCABULARY, (len(PROMPTS), PROMPTS.max())).astype(np.int32)
    state = generate(weights, prompts, storage)
    again = generate(weights, prompts, storage)
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
    assert not state.cache.is_exhausted.any()
    assert state.cache.lengths.tolist() == (PROMPTS + STEPS - 1).tolist()
    tokens = np.asarray(state.tokens)
    own = np.stack([np.arange(STEPS) + length - 1 for length in PROMPTS])[..., None]
    expected = np.take_along_axis(in_float64(weights, tokens), own, axis=1)
    scratch = np.take_along_axis(from_scratch(weights, tokens, storage), own, axis=1)
    found = np.asarray(state.logits)
    verdict = compare("output", dtype, found, expected, [scratch])
    assert verdict.failure is None, verdict.failure
    chosen = np.take_along_axis(tokens, own[..., 0] + 1, axis=1)
    np.testing.assert_array_equal(chosen, found.argmax(-1))
    assert len(np.unique(chosen)) > 3
