"""A small decoder-only transformer over bytes in Flax NNX; the caller chooses its attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding

VOCABULARY = 256

Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""Attention of q, k, v [B, T, heads, head_dim]."""

AttendWithin = Callable[[jax.Array], Attend]
"""Attention within documents [B, T]; all layers use what it returns, so ids are prepared once."""


class Rows(NamedTuple):
    """Rows of packed documents.

    Attributes:
      symbols: uint8 [B, T + 1], the bytes; each but the last of a row predicts the next.
      documents: int32 [B, T + 1], the document of each byte.
    """

    symbols: jax.Array | np.ndarray
    documents: jax.Array | np.ndarray


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of the model; its width is divided among the heads."""

    layers: int
    width: int
    heads: int

    @property
    def head_dim(self) -> int:
        """Returns the features of one head."""
        return self.width // self.heads


def rotate(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Applies rotary position embedding to x [B, T, heads, head_dim] at positions [T] or [B, T]."""
    features = x.shape[-1]
    frequencies = 10_000.0 ** (-jnp.arange(0, features, 2) / features)
    positions = jnp.atleast_2d(positions)[:, :, None, None]
    angles = positions * frequencies[None, None, None, :]  # [1 or B, T, 1, head_dim / 2]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    even, odd = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([even * cos - odd * sin, even * sin + odd * cos], axis=-1)


class Attention(nnx.Module):
    """Causal self-attention; the products with the weights are float32, attention's are bf16."""

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs) -> None:
        self.sizes = sizes
        self.project_in = nnx.Linear(sizes.width, 3 * sizes.width, use_bias=False, rngs=rngs)
        self.project_out = nnx.Linear(sizes.width, sizes.width, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array, positions: jax.Array, attend: Attend) -> jax.Array:
        batch, length, width = x.shape
        # The layout is head by head, so that a part of the columns is a part of the heads.
        heads = (batch, length, self.sizes.heads, 3, self.sizes.head_dim)
        q, k, v = jnp.moveaxis(self.project_in(x).reshape(heads), 3, 0)
        rotated = rotate(q, positions), rotate(k, positions)
        q, k, v = (part.astype(jnp.bfloat16) for part in (*rotated, v))
        output = attend(q, k, v).astype(x.dtype)  # [B, T, heads, head_dim]
        return self.project_out(output.reshape(batch, length, width))


class Block(nnx.Module):
    """Attention, then a perceptron, each beside a residual path."""

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs) -> None:
        width = sizes.width
        self.attention_norm = nnx.RMSNorm(width, rngs=rngs)
        self.attention = Attention(sizes, rngs)
        self.perceptron_norm = nnx.RMSNorm(width, rngs=rngs)
        self.widen = nnx.Linear(width, 4 * width, use_bias=False, rngs=rngs)
        self.narrow = nnx.Linear(4 * width, width, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array, positions: jax.Array, attend: Attend) -> jax.Array:
        x = x + self.attention(self.attention_norm(x), positions, attend)
        return x + self.narrow(nnx.gelu(self.widen(self.perceptron_norm(x))))


class LanguageModel(nnx.Module):
    """Computes logits [B, T, 256] of the byte after each of tokens [B, T].

    Their positions are [T] or, where entries are at different ones, [B, T].
    """

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCABULARY, sizes.width, rngs=rngs)
        self.blocks = nnx.List([Block(sizes, rngs) for _ in range(sizes.layers)])
        self.norm = nnx.RMSNorm(sizes.width, rngs=rngs)
        self.predict = nnx.Linear(sizes.width, VOCABULARY, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array, positions: jax.Array, attend: Attend) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, positions, attend)
        return self.predict(self.norm(x))


def loss(
    model: LanguageModel,
    rows: Rows,
    attend_within: AttendWithin,
    order: np.ndarray | None = None,
    sharding: NamedSharding | None = None,
) -> jax.Array:
    """Returns the mean cross-entropy, in nats per byte, of the bytes 1..T of rows.

    The first byte of a document is not counted: no byte before it says anything about it.

    Args:
      order: positions [T] in the order that attention takes them in; by default 0, 1, ...
      sharding: of tokens, labels and documents [B, T].
    """
    symbols = jnp.asarray(rows.symbols).astype(jnp.int32)
    documents = jnp.asarray(rows.documents)
    tokens, labels = symbols[:, :-1], symbols[:, 1:]
    is_counted = documents[:, :-1] == documents[:, 1:]
    documents = documents[:, :-1]
    positions = jnp.arange(tokens.shape[1])
    if order is not None:
        positions = jnp.asarray(order)
        tokens, labels, documents, is_counted = (
            x[:, order] for x in (tokens, labels, documents, is_counted)
        )
    if sharding is not None:
        tokens, labels, documents, is_counted = jax.lax.with_sharding_constraint(
            (tokens, labels, documents, is_counted), sharding
        )
    logits = model(tokens, positions, attend_within(documents))
    each = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.sum(each, where=is_counted) / jnp.maximum(jnp.sum(is_counted), 1)


def attention_operands(
    model: LanguageModel, rows: Rows, attend_within: AttendWithin, layer: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Computes what one layer's attention receives in training, each [B, T, heads, head_dim] bf16.

    Returns:
      Its query, key and value on the rows, and the gradient of the loss by its output.
    """

    def shifted_loss(shift: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        calls: list[tuple[jax.Array, ...]] = []

        def recording_within(documents: jax.Array) -> Attend:
            attend = attend_within(documents)

            def recording(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
                calls.append((q, k, v))
                output = attend(q, k, v)
                return output + shift if len(calls) == layer + 1 else output

            return recording

        return loss(model, rows, recording_within), calls[layer]

    batch, length = rows.symbols.shape
    sizes = model.blocks[layer].attention.sizes
    shape = (batch, length - 1, sizes.heads, sizes.head_dim)
    output_bar, (q, k, v) = jax.grad(shifted_loss, has_aux=True)(jnp.zeros(shape, jnp.bfloat16))
    return q, k, v, output_bar
