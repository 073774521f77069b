"""Times `fa4_jax.decode` over a paged cache against attention over a contiguous one.

    python -m benchmarks.paged_cache                      # every case, on the device at hand
    python -m benchmarks.paged_cache --only bf16 --loops 21

The peers are `jax.nn.dot_product_attention` (XLA) and `fa4_jax.attention` with as many keys side by
side; pages lie in random order in a pool that is four times as large. All run in turns; a line has
the medians and the median of the turns' ratios.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fa4_jax
from benchmarks.timing import Protocol, Timing, interleave

OURS, CONTIGUOUS, PEER = "decode", "attention", "jax.nn"
POOL = 4
"""Pages of the pool over those that are in use."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: query [batch, rows, heads[0], head_dim], keys [batch, keys, heads[1], head_dim].

    Attributes:
      page: tokens of a page.
    """

    batch: int
    keys: int
    heads: tuple[int, int]
    head_dim: int
    page: int
    dtype: str
    rows: int = 1

    @property
    def id(self) -> str:
        """Returns a readable and unique name, such as "bf16-b1-t1-s2048-h8over2-d128-page64"."""
        (n, k), name = self.heads, {"float32": "f32", "bfloat16": "bf16"}[self.dtype]
        sizes = f"b{self.batch}-t{self.rows}-s{self.keys}-h{n}over{k}-d{self.head_dim}"
        return f"{name}-{sizes}-page{self.page}"


CASES = tuple(
    Case(*sizes, dtype)
    for sizes, dtype in itertools.product(
        (
            (1, 512, (8, 2), 128, 64),
            (1, 2048, (8, 2), 128, 64),
            (1, 8192, (8, 2), 128, 64),
            (4, 4096, (8, 2), 128, 64),
            (8, 1024, (8, 2), 64, 16),
            (8, 512, (8, 8), 64, 64),
        ),
        ("bfloat16", "float32"),
    )
)


def calls(case: Case) -> dict[str, Callable[[], Any]]:
    """Returns the compiled contenders with their operands, on the same random numbers."""
    rng = np.random.default_rng(0)
    b, s, (n, k), h = case.batch, case.keys, case.heads, case.head_dim
    used = b * s // case.page
    pages = [
        jnp.asarray(rng.normal(size=(POOL * used, case.page, k, h)), case.dtype) for _ in range(2)
    ]
    table = rng.permutation(POOL * used)[:used].reshape(b, -1).astype(np.int32)
    query = jnp.asarray(rng.normal(size=(b, case.rows, n, h)), case.dtype)
    key, value = (x[table].reshape(b, s, k, h) for x in pages)
    lengths = jnp.full(b, s, jnp.int32)

    def contiguous(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array) -> jax.Array:
        return fa4_jax.attention(
            *(q, k, v),
            is_causal=case.rows > 1,
            query_offset=lengths - case.rows,
            key_value_seq_lengths=lengths,
        )

    def peer(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array) -> jax.Array:
        mask = None
        if case.rows > 1:
            row, column = jnp.arange(case.rows)[None, :, None], jnp.arange(s)[None, None, :]
            mask = (column <= lengths[:, None, None] - case.rows + row)[:, None]
        return jax.nn.dot_product_attention(
            *(q, k, v), mask=mask, key_value_seq_lengths=lengths, implementation="xla"
        )

    contenders: dict[str, tuple[Any, tuple[Any, ...]]] = {
        OURS: (fa4_jax.decode, (query, *pages, jnp.asarray(table), lengths)),
        CONTIGUOUS: (contiguous, (query, key, value, lengths)),
        PEER: (peer, (query, key, value, lengths)),
    }
    compiled = {
        name: (jax.jit(function).lower(*operands).compile(), operands)
        for name, (function, operands) in contenders.items()
    }
    return {
        name: lambda program=program, operands=operands: program(*operands)
        for name, (program, operands) in compiled.items()
    }


def line(case: Case, protocol: Protocol) -> str:
    """Returns a row of the table for a case."""
    found = interleave(calls(case), protocol)
    cells, seconds = [case.id], {}
    for name in (OURS, CONTIGUOUS, PEER):
        timing = found[name]
        if not isinstance(timing, Timing):
            raise timing
        seconds[name] = timing.seconds
        cells.append(f"{timing.median * 1e3:.3f}")
    for name in (CONTIGUOUS, PEER):
        turns = zip(seconds[OURS], seconds[name], strict=True)
        cells.append(f"{statistics.median(a / b for a, b in turns):.2f}")
    return f"| {' | '.join(cells)} |"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paged_cache", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--only", action="append", metavar="TEXT", help="part of a case's name")
    parser.add_argument("--loops", type=int, default=9, help="turns of each contender (9)")
    asked = parser.parse_args(argv)
    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}\n")
    heads = [f"{name} [ms]" for name in (OURS, CONTIGUOUS, PEER)]
    heads += [f"over {name}" for name in (CONTIGUOUS, PEER)]
    print(f"| case | {' | '.join(heads)} |\n|{'---|' * (len(heads) + 1)}")
    for case in CASES:
        if not asked.only or any(text in case.id for text in asked.only):
            print(line(case, Protocol(loops=asked.loops)), flush=True)


if __name__ == "__main__":
    main()
