"""Samples bytes from the transformer that examples/train_lm.py has trained.

    python examples/generate.py --bytes 200 --prompt 'import os' --prompt 'def main():'

Several prompts of different lengths go through the model at once: one call reads them all
(prefill), then one `lax.while_loop` samples byte after byte. Keys and values lie in pages
(`fa4_jax.PagedCache`), and `fa4_jax.decode` attends over them. The program is compiled once and
prints how many bytes a second it samples.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import checkpoint
from fa4_jax import PagedCache, decode
from language_model import LanguageModel, Sizes

PROMPTS = (
    "import ",
    "def main(argv=None):\n    ",
    "class Error(Exception):\n    ",
    "    def __init__(self, name, value):\n        self.",
)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--checkpoint", type=Path, default=Path("demo_output/checkpoint"))
    parser.add_argument("--prompt", action="append", help="may be repeated")
    parser.add_argument("--bytes", type=int, default=160, help="to sample after each prompt (160)")
    parser.add_argument("--temperature", type=float, default=0.6, help="0 takes the likeliest byte")
    parser.add_argument("--page-size", type=int, default=16, help="tokens of a page (16)")
    parser.add_argument("--implementation", choices=["auto", "kernel", "xla"], default="auto")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    options.prompt = options.prompt or list(PROMPTS)
    if "" in options.prompt:
        parser.error("--prompt '': at least one byte")
    if options.bytes < 1:
        parser.error(f"--bytes {options.bytes}: at least 1")
    if options.temperature < 0:
        parser.error(f"--temperature {options.temperature}: not negative")
    if not (options.checkpoint / "sizes.json").exists():
        parser.error(f"--checkpoint {options.checkpoint}: not there; run examples/train_lm.py")
    return options


class CachedAttention:
    """Attention of layer after layer over a cache, to which it appends each layer's keys first.

    Attributes:
      cache: with what has been appended so far.
      query_lengths: int32 [B], rows of each entry that are no padding.
    """

    def __init__(self, cache: PagedCache, query_lengths: jax.Array, implementation: Any) -> None:
        self.cache = cache
        self.query_lengths = query_lengths
        self.implementation = implementation
        self.layer = 0

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        self.cache = self.cache.append(self.layer, k, v, self.query_lengths)
        pages = self.cache.pages(self.layer)
        self.layer += 1
        return decode(
            *(q, *pages, self.cache.page_table, self.cache.lengths),
            query_lengths=self.query_lengths,
            implementation=self.implementation,
        )


class State(NamedTuple):
    """What the loop carries.

    Attributes:
      cache: of all tokens but the last.
      last: int32 [B], the last token of each entry.
      sampled: uint8 [B, bytes].
      done: bytes that are sampled of each entry.
      key: of the random numbers.
    """

    cache: PagedCache
    last: jax.Array
    sampled: jax.Array
    done: jax.Array
    key: jax.Array


def extend(
    model: LanguageModel,
    cache: PagedCache,
    tokens: jax.Array,
    lengths: jax.Array,
    implementation: Any,
) -> tuple[PagedCache, jax.Array]:
    """Runs the model on the next tokens of each entry.

    Args:
      tokens: int32 [B, T]; of entry b the first lengths[b].

    Returns:
      The cache with them, and the logits [B, 256] after the last of them.
    """
    cache = cache.grow(lengths)
    positions = (cache.lengths - lengths)[:, None] + jnp.arange(tokens.shape[1])[None, :]
    attend = CachedAttention(cache, lengths, implementation)
    logits = model(tokens, positions, attend)  # [B, T, 256]
    last = jnp.maximum(lengths - 1, 0)[:, None, None]
    return attend.cache, jnp.take_along_axis(logits, last, axis=1)[:, 0]


def sample(logits: jax.Array, temperature: float, key: jax.Array) -> jax.Array:
    """Samples int32 [B] from logits [B, 256]."""
    if temperature == 0:
        return jnp.argmax(logits, -1).astype(jnp.int32)
    return jax.random.categorical(key, logits / temperature).astype(jnp.int32)


def generate(
    model: LanguageModel,
    cache: PagedCache,
    prompts: jax.Array,
    lengths: jax.Array,
    options: argparse.Namespace,
) -> tuple[jax.Array, jax.Array]:
    """Samples what follows the prompts.

    Args:
      prompts: int32 [B, T], of which entry b has lengths[b].

    Returns:
      uint8 [B, bytes], and whether the cache had too few pages, bool [B].
    """
    implementation = None if options.implementation == "auto" else options.implementation
    batch = prompts.shape[0]
    keys = jax.random.split(jax.random.key(options.seed), 2)
    cache, logits = extend(model, cache, prompts, lengths, implementation)
    last = sample(logits, options.temperature, keys[0])
    sampled = jnp.zeros((batch, options.bytes), jnp.uint8)
    sampled = sampled.at[:, 0].set(last.astype(jnp.uint8))

    def step(state: State) -> State:
        key, own = jax.random.split(state.key)
        one = jnp.ones(batch, jnp.int32)
        cache, logits = extend(model, state.cache, state.last[:, None], one, implementation)
        last = sample(logits, options.temperature, own)
        sampled = state.sampled.at[:, state.done].set(last.astype(jnp.uint8))
        return State(cache, last, sampled, state.done + 1, key)

    state = State(cache, last, sampled, jnp.int32(1), keys[1])
    state = jax.lax.while_loop(lambda state: state.done < options.bytes, step, state)
    return state.sampled, state.cache.is_exhausted


def empty_cache(sizes: Sizes, lengths: np.ndarray, options: argparse.Namespace) -> PagedCache:
    """Makes a cache with as many pages as prompts and samples need."""
    pages = -(-(lengths + options.bytes) // options.page_size)
    return PagedCache.empty(
        len(lengths),
        num_pages=int(pages.sum()),
        max_pages=int(pages.max()),
        page_size=options.page_size,
        layers=sizes.layers,
        heads=sizes.heads,
        head_dim=sizes.head_dim,
    )


def main(argv: list[str] | None = None) -> int:
    """Runs the program; returns its exit status."""
    options = arguments(argv)
    sizes, model = checkpoint.load(options.checkpoint)
    texts = [prompt.encode() for prompt in options.prompt]
    lengths = np.array([len(text) for text in texts], np.int32)
    prompts = np.zeros((len(texts), lengths.max()), np.int32)
    for row, text in zip(prompts, texts, strict=True):
        row[: len(text)] = list(text)
    graph, weights = nnx.split(model)

    @jax.jit
    def program(
        weights: Any, prompts: jax.Array, query_lengths: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        cache = empty_cache(sizes, lengths, options)
        return generate(nnx.merge(graph, weights), cache, prompts, query_lengths, options)

    start = time.perf_counter()
    compiled = program.lower(weights, prompts, lengths).compile()
    compiled_at = time.perf_counter()
    sampled, is_exhausted = jax.block_until_ready(compiled(weights, prompts, lengths))
    seconds = time.perf_counter() - compiled_at
    for prompt, row in zip(options.prompt, np.asarray(sampled), strict=True):
        text = prompt + bytes(row).decode(errors="replace")
        print(f"--- {prompt!r}\n{text}")
    count = sampled.size
    print(
        f"{count} bytes of {len(texts)} prompts in {seconds:.2f} s: {count / seconds:,.0f} "
        f"tokens/s on {jax.local_devices()[0].device_kind} (compiled in "
        f"{compiled_at - start:.1f} s)"
    )
    if np.asarray(is_exhausted).any():
        print("FAILED: the cache had too few pages", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
