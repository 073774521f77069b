"""The attention of today's models on packed rows: is it right, and how long does a layer take?

    PYTHONPATH=. python examples/models.py                    # all layers; timed where kernels run
    PYTHONPATH=. python examples/models.py --only Gemma --most 2048

Every layer is causal, its rows hold documents cut anywhere, and it has the model's own head dims,
windows, chunks, caps and sinks. The check compares output and gradients of `fa4_jax.attention` in
bfloat16 with the definition in float32, on one KV head (heads do not know of each other) and on
rows that are longer than the layer's window or chunk. An error may be twice that of the definition
with bfloat16 operands, as in the library's own conformance cases. The shapes are those of the
models' configurations.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

import fa4_jax
from benchmarks import measure, peers
from benchmarks.shapes import Case
from benchmarks.timing import Protocol
from fa4_jax import masks

DOCUMENTS_PER_ROW = 8
FACTOR, FLOOR = 2.0, 1e-5
"""An error is right up to FACTOR times the ordinary one, plus FLOOR of the largest value."""

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


def inputs(layer: Layer, length: int, rng: np.random.Generator) -> tuple[Arrays, jax.Array]:
    """Query, key, value, the output's cotangent (and sinks) of one KV head; segment ids [1, T]."""
    group = min(2, layer.heads[0] // layer.heads[1])
    value_dim = layer.value_dim or layer.head_dim
    shapes = {
        "query": (1, length, group, layer.head_dim),
        "key": (1, length, 1, layer.head_dim),
        "value": (1, length, 1, value_dim),
        "bar": (1, length, group, value_dim),
    }
    found = {
        name: jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for name, shape in shapes.items()
    }
    if layer.sinks:
        found["sinks"] = jnp.asarray(rng.normal(size=group), jnp.bfloat16)
    row = documents(rng, length)
    return found, jnp.asarray(np.repeat(np.arange(len(row)), row)[None], jnp.int32)


def definition(layer: Layer, x: Arrays, ids: jax.Array) -> jax.Array:
    """The layer's output by the textbook; operands of products keep the dtype of x."""
    dtype, length = x["query"].dtype, ids.shape[1]
    query, key, value = (x[name].swapaxes(1, 2) for name in ("query", "key", "value"))
    exact = {"preferred_element_type": jnp.float32, "precision": jax.lax.Precision.HIGHEST}
    scores = jnp.einsum("bnth,bksh->bnts", query, key, **exact)
    scores *= layer.head_dim**-0.5 if layer.scale is None else layer.scale
    if layer.soft_cap is not None:
        scores = layer.soft_cap * jnp.tanh(scores / layer.soft_cap)
    i, j = jnp.arange(length)[:, None], jnp.arange(length)[None]
    seen = (j <= i) & (ids[0][:, None] == ids[0][None])
    if layer.window is not None:
        seen &= j > i - layer.window
    if layer.chunk is not None:
        seen &= i // layer.chunk == j // layer.chunk
    scores = jnp.where(seen, scores, -jnp.inf)
    if layer.sinks:
        sinks = x["sinks"].astype(jnp.float32)[None, :, None, None]
        scores = jnp.concatenate([scores, jnp.broadcast_to(sinks, (*scores.shape[:3], 1))], axis=-1)
    weights = jax.nn.softmax(scores)[..., :length]
    output = jnp.einsum("bnts,bksh->bnth", weights.astype(dtype), value, **exact)
    return output.swapaxes(1, 2).astype(dtype)


def results(call: Callable[[Arrays], jax.Array], x: Arrays) -> dict[str, np.ndarray]:
    """Output and gradients, in float32."""
    operands = {name: array for name, array in x.items() if name != "bar"}

    @jax.jit
    def run(operands: Arrays, bar: jax.Array) -> tuple[jax.Array, ...]:
        output, pull_back = jax.vjp(call, operands)
        (found,) = pull_back(bar)
        return output, *(found[name] for name in ("query", "key", "value", "sinks") if name in x)

    with jax.numpy_rank_promotion("allow"):
        found = run(operands, x["bar"])
    return {n: np.asarray(a, np.float32) for n, a in zip(NAMES, found, strict=False)}


def attend(layer: Layer, x: Arrays, ids: jax.Array) -> jax.Array:
    """The layer's output by the library."""
    return fa4_jax.attention(
        x["query"], x["key"], x["value"], segment_ids=ids, sinks=x.get("sinks"), **layer.options
    )


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The largest errors of one quantity, ours and the ordinary one, and whether ours is right."""

    name: str
    error: float
    ordinary: float
    right: bool


def check(layer: Layer, length: int, seed: int, library: Any = attend) -> list[Verdict]:
    """Compares the library's output and gradients with the definition's."""
    x, ids = inputs(layer, length, np.random.default_rng(seed))
    wide = {name: array.astype(jnp.float32) for name, array in x.items()}
    exact = results(lambda x: definition(layer, x, ids), wide)
    ordinary = results(lambda x: definition(layer, x, ids), x)
    ours = results(lambda x: library(layer, x, ids), x)
    verdicts: list[Verdict] = []
    for name, truth in exact.items():
        error, usual = (float(np.abs(y[name] - truth).max()) for y in (ours, ordinary))
        allowed = FACTOR * usual + FLOOR * float(np.abs(truth).max())
        verdicts.append(Verdict(name, error, usual, error <= allowed))
    return verdicts


def timed_case(layer: Layer, batch: int, length: int) -> Case:
    """The whole layer as the benchmarks have it; a document that a chunk's end cuts is two."""
    rng, rows = np.random.default_rng(0), list[tuple[int, ...]]()
    for _ in range(batch):
        ends = set(np.cumsum(documents(rng, length)).tolist())
        ends |= set(range(layer.chunk, length, layer.chunk)) if layer.chunk else set()
        rows.append(tuple(int(x) for x in np.diff(sorted(ends), prepend=0)))
    return Case(
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
        wrong += sum(not verdict.right for verdict in verdicts)
        cells = {
            v.name: f"{v.error:.2g} / {v.ordinary:.2g}{'' if v.right else ' WRONG'}"
            for v in verdicts
        }
        rates = [times(layer, options.batch, options.length)] if on_gpu else []
        table.add_row(layer.name, str(length), *(cells.get(n, "") for n in NAMES), *rates)
    console.print(table)
    console.print("Largest errors against float32: ours / the definition with bfloat16 operands.")
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
