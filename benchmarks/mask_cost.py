"""Times what XLA makes of masks before the kernels start, and prints a table.

    python -m benchmarks.mask_cost

Each row is a mask's table of tiles (`fa4_jax.masks.tile_table`) for 65536 tokens, unless
`--tokens` says otherwise. A model that makes it itself does so once a step for all layers; else
each call of attention does. A program makes many tables one after the other, so that their time is
the GPU's, not that of starting a program; it contains one more operation, which makes each table
depend on the one before.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.shapes import DOCUMENTS_PER_ROW
from benchmarks.timing import Call, Protocol, Timing, interleave
from fa4_jax import masks

OPERATIONS = ("fusion", "sort", "while", "copy", "custom-call")
"""What a GPU runs as a kernel, or, of "while", as several."""

TABLES = 64
"""Tables that a program makes after its first."""

ROWS = (1, 8)
"""Rows of the batch, among which the tokens are divided."""


def makers(rows: int, length: int) -> dict[str, tuple[Callable[..., masks.Mask], jax.Array]]:
    """Returns functions that make a table, with their argument, by the name of the mask."""
    documents = rows * DOCUMENTS_PER_ROW * max(1, length // 8192)
    ids = np.arange(rows * length).reshape(rows, length) * documents // (rows * length)
    sizes = jax.ShapeDtypeStruct((rows, length, 1, 64), jnp.bfloat16)

    def table(mask: Callable[[jax.Array], masks.Mask | None]) -> Callable[..., masks.Mask]:
        return lambda x: masks.tile_table(mask(x), sizes, sizes)

    packed = jnp.asarray(ids, jnp.int32)
    return {
        "segments": (table(masks.segments), packed),
        "segments, chunked": (table(lambda x: masks.segments(x) & masks.chunked(8192)), packed),
        "block_causal": (table(masks.block_causal), packed),
        "ranges": (table(lambda x: masks.ranges(x, x + 512)), packed),
        "prefix": (table(masks.prefix), jnp.full((rows,), length // 3, jnp.int32)),
    }


def bound(function: Callable[..., masks.Mask], argument: jax.Array) -> tuple[Call, int]:
    """Returns a compiled call that makes TABLES tables, and of how many kernels one is made."""
    entry = (jax.jit(function).lower(argument).compile().as_text() or "").split("ENTRY ")[-1]
    launches = sum(entry.count(f" {name}(") for name in OPERATIONS)

    def step(_: Any, carry: tuple[jax.Array, masks.Mask]) -> tuple[jax.Array, masks.Mask]:
        x, made = carry
        # No row begins before key 0, but XLA does not know.
        x = jnp.where(jax.tree.leaves(made)[0][0, 0] < 0, x + 1, x)
        return x, function(x)

    def repeated(x: jax.Array) -> Any:
        return jax.lax.fori_loop(0, TABLES, step, (x, function(x)))

    program = jax.jit(repeated).lower(argument).compile()
    return lambda: program(argument), launches


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--tokens", type=int, default=65536)
    options = parser.parse_args()
    table = Table("mask", "batch", "length", "operations of XLA", "us a table")
    for rows in ROWS:
        length = options.tokens // rows
        made = {name: bound(*x) for name, x in makers(rows, length).items()}
        timings = interleave({name: call for name, (call, _) in made.items()}, Protocol())
        for name, timing in timings.items():
            if not isinstance(timing, Timing):
                raise timing
            each = timing.median / (TABLES + 1) * 1e6
            table.add_row(name, str(rows), str(length), str(made[name][1]), f"{each:.1f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
