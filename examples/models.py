"""The attention of today's models on packed rows: is it right, and how long does a layer take?

    PYTHONPATH=. python examples/models.py                    # all layers; timed where kernels run
    PYTHONPATH=. python examples/models.py --only Gemma --most 2048

Every layer is causal, its rows hold documents cut anywhere, and it has the model's own head dims,
windows, chunks, caps and sinks. The check compares output and gradients of `fa4_jax.attention` in
bfloat16 with the library's float64 oracle, by the tolerances of its conformance cases, on one KV
head (heads do not know of each other) and on rows that are longer than the layer's window or chunk.
The shapes are those of the models' configurations.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

import fa4_jax
from benchmarks import measure, peers, shapes
from benchmarks.timing import Protocol
from fa4_jax import masks
from fa4_jax.conformance.cases import Case
from fa4_jax.conformance.compare import Verdict, compare
from fa4_jax.conformance.oracle import REFERENCE_SHIFTS, Inputs, make_inputs, oracle, ordinary

DOCUMENTS_PER_ROW = 8
NAMES = ("output", "dq", "dk", "dv", "dsinks")
Arrays = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Layer:
    """The attention of one kind of layer.

    Attributes:
      heads: (query heads, KV heads).
      value_dim: head dim of value, if it is not head_dim.
      window: how many keys a row sees, its own among them.
      chunk: rows see keys of their own chunk of so many positions.
      scale: of the scores, if it is not head_dim ** -0.5.
    """

    name: str
    heads: tuple[int, int]
    head_dim: int
    value_dim: int | None = None
    window: int | None = None
    chunk: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    scale: float | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `fa4_jax.attention`."""
        return {
            "is_causal": True,
            "local_window_size": None if self.window is None else (self.window - 1, 0),
            "mask": None if self.chunk is None else masks.chunked(self.chunk),
            "logits_soft_cap": self.soft_cap,
            "scale": self.scale,
        }

    def check_length(self, most: int) -> int:
        """A length at which the window or the chunk hides something, if it is at most `most`."""
        return min(most, max(512, 5 * (self.window or self.chunk or 0) // 4))


LAYERS = (
    Layer("Llama 3 8B", (32, 8), 128),
    Layer("Qwen 3 8B", (32, 8), 128),
    Layer("Gemma 2 9B, local", (16, 8), 256, window=4096, soft_cap=50.0),
    Layer("Gemma 2 9B, global", (16, 8), 256, soft_cap=50.0),
    Layer("Gemma 3 27B, local", (32, 16), 128, window=1024, scale=168**-0.5),
    Layer("Gemma 3 27B, global", (32, 16), 128, scale=168**-0.5),
    Layer("GPT-OSS 20B, local", (64, 8), 64, window=128, sinks=True),
    Layer("GPT-OSS 20B, full", (64, 8), 64, sinks=True),
    Layer("DeepSeek-V3", (128, 128), 192, value_dim=128),
    Layer("Llama 4 Scout, chunked", (40, 8), 128, chunk=8192),
)


def documents(rng: np.random.Generator, length: int) -> tuple[int, ...]:
    """Lengths of documents that fill a row, DOCUMENTS_PER_ROW in the mean, cut anywhere."""
    count = min(length - 1, int(rng.poisson(DOCUMENTS_PER_ROW - 1)))
    cuts = np.sort(rng.choice(np.arange(1, length), count, replace=False))
    return tuple(int(x) for x in np.diff(cuts, prepend=0, append=length))


def visible_ranges(layer: Layer, row: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Of each position of a row of documents, [low, high) of what it may see, int32 [1, T]."""
    ends = np.cumsum(row)
    low, high = np.repeat(ends - row, row), np.repeat(ends, row)
    if layer.chunk is not None:
        start = np.arange(len(low)) // layer.chunk * layer.chunk
        low, high = np.maximum(low, start), np.minimum(high, start + layer.chunk)
    return low[None].astype(np.int32), high[None].astype(np.int32)


def attend(layer: Layer, x: Arrays, ids: jax.Array) -> jax.Array:
    """The layer's output [1, T, N, H] by the library; ids [1, T] are the documents'."""
    return fa4_jax.attention(
        x["query"], x["key"], x["value"], segment_ids=ids, sinks=x.get("sinks"), **layer.options
    )


def results(layer: Layer, inputs: Inputs, ids: jax.Array, library: Any) -> dict[str, np.ndarray]:
    """Output and gradients by the library."""
    operands = {n: getattr(inputs, n) for n in ("query", "key", "value", "sinks")}

    @jax.jit
    def run(x: Arrays, bar: jax.Array) -> tuple[jax.Array, ...]:
        output, pull_back = jax.vjp(lambda x: library(layer, x, ids), x)
        (found,) = pull_back(bar)
        return output, *(found[name] for name in operands if name in x)

    x = {name: jnp.asarray(array) for name, array in operands.items() if array is not None}
    found = run(x, jnp.asarray(inputs.output_bar))
    return {name: np.asarray(array) for name, array in zip(NAMES, found, strict=False)}


def check(layer: Layer, length: int, seed: int, library: Any = attend) -> list[Verdict]:
    """Compares the library's output and gradients with the oracle's."""
    row = documents(np.random.default_rng(seed), length)
    case = Case(
        head_dim=layer.head_dim,
        value_dim=layer.value_dim,
        batch=1,
        heads=(min(2, layer.heads[0] // layer.heads[1]), 1),
        query_length=length,
        key_length=length,
        is_causal=True,
        window=None if layer.window is None else (layer.window - 1, 0),
        scale=layer.scale,
        soft_cap=layer.soft_cap,
        sinks=layer.sinks,
    )
    inputs = make_inputs(case, seed)
    inputs = dataclasses.replace(
        inputs,
        masks={"ranges": visible_ranges(layer, row)},
        lse_bar=np.zeros_like(inputs.lse_bar),
    )
    ids = jnp.asarray(np.repeat(np.arange(len(row)), row)[None], jnp.int32)
    found = results(layer, inputs, ids, library)
    exact = oracle(case, inputs)
    usual = [ordinary(case, inputs, shift) for shift in REFERENCE_SHIFTS]
    return [compare(n, "bf16", y, exact[n], [x[n] for x in usual]) for n, y in found.items()]


def timed_case(layer: Layer, batch: int, length: int) -> shapes.Case:
    """The whole layer as the benchmarks have it; a document that a chunk's end cuts is two."""
    rng, rows = np.random.default_rng(0), list[tuple[int, ...]]()
    for _ in range(batch):
        ends = set(np.cumsum(documents(rng, length)).tolist())
        ends |= set(range(layer.chunk, length, layer.chunk)) if layer.chunk else set()
        rows.append(tuple(int(x) for x in np.diff(sorted(ends), prepend=0)))
    return shapes.Case(
        *("models", batch, length, length, layer.heads, layer.head_dim),
        is_causal=True,
        value_dim=layer.value_dim,
        window=None if layer.window is None else (layer.window - 1, 0),
        documents=tuple(rows),
        sinks=layer.sinks,
        soft_cap=layer.soft_cap,
    )


def times(layer: Layer, batch: int, length: int) -> str:
    """TFLOP/s of the layer, forward and backward, of all that can do the same call here."""
    case = timed_case(layer, batch, length)
    present, _ = peers.contenders(case, jax.default_backend())
    found = measure.rates(case, present, Protocol(3))
    lines: list[str] = []
    for direction, rates in found.items():
        cells = [f"{n} {r:.0f}" if isinstance(r, float) else f"{n}: {r}" for n, r in rates.items()]
        lines.append(f"{direction}: {', '.join(cells)}")
    return "\n".join(lines)


def main() -> int:
    """Returns 1 if a layer is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--only", default="", metavar="TEXT", help="layers with TEXT in the name")
    parser.add_argument("--most", type=int, default=10240, help="longest row of the check")
    parser.add_argument("--batch", type=int, default=4, help="rows of the timed call")
    parser.add_argument("--length", type=int, default=8192, help="of the timed rows")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    console, wrong = Console(width=160), 0
    on_gpu = jax.default_backend() == "gpu"
    table = Table("layer", "length", *NAMES, *(["TFLOP/s"] if on_gpu else []))
    for layer in LAYERS:
        if options.only not in layer.name:
            continue
        length = layer.check_length(options.most)
        verdicts = check(layer, length, options.seed)
        wrong += sum(v.failure is not None for v in verdicts)
        cells = {
            v.name: f"{v.worst:.2g} / {v.worst_allowed:.2g}{' WRONG' if v.failure else ''}"
            for v in verdicts
        }
        rates = [times(layer, options.batch, options.length)] if on_gpu else []
        table.add_row(layer.name, str(length), *(cells.get(n, "") for n in NAMES), *rates)
    console.print(table)
    console.print("Largest errors against float64, and what is allowed.")
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
