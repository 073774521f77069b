"""Times masks given as functions beside the same masks as ranges of keys, and prints a table.

    python -m benchmarks.pair_masks [--length 8192] [--head-dim 128]

Tables of tiles are made before, as a model does once for all layers of a step; a second table says
what making one costs. Of a mask that is no range, "half partial", the ratio is to a call that sees
all keys: a tile either sees all of its pairs or two of three.
"""

from __future__ import annotations

import argparse
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.timing import Call, Protocol, Timing, interleave
from fa4_jax import attention, masks

Array = jax.Array
WINDOW = 1024
PREFIX = 2048
DOCUMENT = 1024
"""Mean length of a document."""


def causal(b: Array, h: Array, q: Array, k: Array) -> Array:
    """A row sees the keys up to its own."""
    return k <= q


def sliding(b: Array, h: Array, q: Array, k: Array) -> Array:
    """A row sees the last WINDOW keys."""
    return (k <= q) & (k > q - WINDOW)


def prefix(b: Array, h: Array, q: Array, k: Array) -> Array:
    """A row sees the prefix, and the keys up to its own."""
    return (k <= q) | (k < PREFIX)


def documents(b: Array, h: Array, q: Array, k: Array, ids: Array) -> Array:
    """A row sees its document; ids: [1, length]."""
    return ids[0, q] == ids[0, k]


def half_partial(b: Array, h: Array, q: Array, k: Array) -> Array:
    """In every other tile of 128 x 128 a row sees two keys of three, elsewhere all."""
    return ((q // 128 + k // 128) % 2 == 0) | ((q + k) % 3 > 0)


def pairs_of_masks(ids: Array) -> dict[str, tuple[masks.Mask, dict[str, Any]]]:
    """Returns each mask as a function, and as what attention takes besides; ids: [1, length]."""
    length = ids.shape[1]
    upto = jnp.arange(1, length + 1, dtype=jnp.int32)[None]
    low, all_keys = jnp.zeros_like(upto), jnp.full_like(upto, length)
    return {
        "causal": (masks.function(causal), {"mask": masks.ranges(low, upto)}),
        "sliding": (
            masks.function(sliding),
            {"mask": masks.window(jnp.int32(WINDOW - 1), jnp.int32(0))},
        ),
        "prefix": (masks.function(prefix), {"mask": masks.prefix(PREFIX)}),
        "documents": (masks.function(documents, ids), {"segment_ids": ids}),
        "half partial": (masks.function(half_partial), {"mask": masks.ranges(low, all_keys)}),
    }


def calls_of(operands: tuple[Array, Array, Array], mask: masks.Mask | None) -> dict[str, Call]:
    """Returns a forward and a forward with gradients, by name."""

    def run(mask: masks.Mask | None, *operands: Array) -> Array:
        return attention(*operands, mask=mask)

    def loss(mask: masks.Mask | None, *operands: Array) -> Array:
        return run(mask, *operands).astype(jnp.float32).sum()

    gradients = jax.grad(loss, argnums=(1, 2, 3))
    return {
        "forward": functools.partial(jax.jit(run), mask, *operands),
        "forward and backward": functools.partial(jax.jit(gradients), mask, *operands),
    }


def milliseconds(timing: Timing | Exception) -> float:
    """Returns a call's median.

    Raises:
      Exception: the call's own.
    """
    if not isinstance(timing, Timing):
        raise timing
    return timing.median * 1e3


def parser(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser of the sizes that are timed."""
    found = argparse.ArgumentParser(description=description)
    found.formatter_class = argparse.RawDescriptionHelpFormatter
    found.add_argument("--length", type=int, default=8192)
    found.add_argument("--head-dim", type=int, default=128)
    found.add_argument("--heads", type=int, default=16)
    found.add_argument("--loops", type=int, default=5)
    return found


def document_ids(length: int) -> np.ndarray:
    """Returns ids [length] of ragged documents, side by side."""
    found = np.random.default_rng(0).integers(0, -(-length // DOCUMENT), length)
    return np.sort(found).astype(np.int32)


def main() -> None:
    """Prints both tables."""
    options = parser(__doc__).parse_args()
    shape = (1, options.length, options.heads, options.head_dim)
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, shape, jnp.bfloat16) for key in keys)
    listed = pairs_of_masks(jnp.asarray(document_ids(options.length))[None])
    protocol = Protocol(loops=options.loops)
    speeds = Table("mask", "direction", "function [ms]", "ranges [ms]", "ranges / function")
    plans: dict[str, Call] = {}
    for name, (function, plain) in listed.items():
        plans[name] = functools.partial(jax.jit(lambda m: masks.tile_table(m, q, k)), function)
        others = {key: x for key, x in plain.items() if key != "mask"}
        tables = {
            "function": masks.tile_table(function, q, k),
            "ranges": masks.tile_table(plain.get("mask"), q, k, **others),
        }
        calls = {
            f"{kind}/{way}": call
            for kind, mask in tables.items()
            for way, call in calls_of((q, k, v), mask).items()
        }
        timings = {key: milliseconds(x) for key, x in interleave(calls, protocol).items()}
        for way in ("forward", "forward and backward"):
            ours, other = timings[f"function/{way}"], timings[f"ranges/{way}"]
            speeds.add_row(name, way, f"{ours:.3f}", f"{other:.3f}", f"{other / ours:.3f}")
    dense = jnp.asarray(
        np.random.default_rng(1).random((1, 1, options.length, options.length)) < 0.5
    )
    plans["a boolean array"] = functools.partial(
        jax.jit(lambda m: masks.tile_table(m, q, k)), dense
    )
    costs = Table("table of tiles of", "made in [ms]")
    for name, timing in interleave(plans, protocol).items():
        costs.add_row(name, f"{milliseconds(timing):.3f}")
    console = Console(width=100)
    console.print(speeds, costs)


if __name__ == "__main__":
    main()
