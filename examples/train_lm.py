"""Trains a small transformer on the bytes of Python's own standard library.

    python examples/train_lm.py --steps 1000 --implementation kernel

Each row packs excerpts of several files; no byte attends to another file's, and none is predicted
from one. Attention is `fa4_jax.attention`: on its GPU kernels where there are any for this GPU,
otherwise in pure JAX. The script ends with the loss on files that were held out, beside what the
best guess without context would reach, and with attention's gradients beside those of a float64
computation, and with a checkpoint, from which examples/generate.py samples.
It exits with 1 if loss or gradients are not as they should be.

    python examples/train_lm.py --mesh data=2,seq=4

trains on 8 devices (GPUs, or virtual CPU devices where there is none): two groups with half of each
batch, in each of which four devices share the sequences (`fa4_jax.parallel`); tensor=2 would
shard heads and the perceptron. On several hosts, or as several processes on one, run on each

    python examples/train_lm.py --mesh ... --coordinator HOST:PORT --processes N --process I
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
import sysconfig
import time
import zlib
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from flax import nnx
from tqdm import tqdm

import checkpoint
import fa4_jax
from fa4_jax.conformance.cases import Case
from fa4_jax.conformance.compare import compare
from fa4_jax.conformance.oracle import REFERENCE_SHIFTS, Inputs, oracle, ordinary
from language_model import (
    Attend,
    AttendWithin,
    LanguageModel,
    Rows,
    Sizes,
    attention_operands,
    loss,
)
from sharing import SCHEMES, Processes, Sharing, make_mesh

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HELD_OUT_ROWS = 64
HELD_OUT_SEED = 1
CLEARLY_BELOW = 0.9
"""The held-out loss has to be below this share of the unigram entropy."""


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--implementation", choices=["auto", "kernel", "xla"], default="auto")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--batch", type=int, default=8, help="rows per step (8)")
    parser.add_argument("--length", type=int, default=256, help="bytes per row (256)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    parser.add_argument("--mesh", metavar="AXIS=N,...", help="axes data, seq, tensor; any of them")
    parser.add_argument("--scheme", choices=list(SCHEMES), default="ring", help="of axis seq")
    parser.add_argument("--layout", choices=["zigzag", "contiguous"], default="zigzag")
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="process 0, of several")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--process", type=int, default=0, help="which one this is")
    parser.add_argument("--output", type=Path, default=Path("demo_output"), help="folder")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    for name in ("steps", "batch", "length", "layers", "width", "heads"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: at least 1")
    if options.width % (2 * options.heads):
        parser.error(f"--width {options.width}: no multiple of 2 x --heads {options.heads}")
    if (options.processes > 1) != (options.coordinator is not None and options.mesh is not None):
        parser.error("--processes N goes with --coordinator HOST:PORT and --mesh")
    options.sharing = None
    if options.mesh is not None:
        try:
            Processes(options.coordinator, options.processes, options.process).start()
            options.sharing = Sharing(make_mesh(options.mesh), options.scheme, options.layout)
            options.sharing.check(options.batch, options.length, options.heads)
        except ValueError as error:
            parser.error(f"--mesh {options.mesh}: {error}")
    return options


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The bytes of files, one after another.

    Attributes:
      text: uint8 [bytes].
      ends: int64 [files], where each file ends in text.
    """

    text: np.ndarray
    ends: np.ndarray

    def __len__(self) -> int:
        return len(self.text)

    def pack(self, count: int, length: int, rng: np.random.Generator) -> Rows:
        """Packs rows [count, length + 1] full of excerpts of files.

        An excerpt starts anywhere; it has an eighth of a row to a whole one, or less where its file
        or the row ends.
        """
        symbols = np.empty((count, length + 1), np.uint8)
        documents = np.empty((count, length + 1), np.int32)
        for row in range(count):
            filled = document = 0
            while filled <= length:
                start = rng.integers(len(self.text))
                file_end = self.ends[np.searchsorted(self.ends, start, side="right")]
                wanted = rng.integers(length // 8 + 1, length + 1, endpoint=True)
                size = min(wanted, file_end - start, length + 1 - filled)
                symbols[row, filled : filled + size] = self.text[start : start + size]
                documents[row, filled : filled + size] = document
                filled, document = filled + size, document + 1
        return Rows(symbols, documents)


def read_corpus() -> tuple[Corpus, Corpus]:
    """Reads the standard library's sources: those for training, and the files held out."""
    root = Path(sysconfig.get_path("stdlib"))
    others = {"site-packages", "dist-packages", "test", "tests"}
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not others.intersection(name.parts):
            held_out = zlib.crc32(name.as_posix().encode()) % 10 == 0
            parts[held_out].append(path.read_bytes())
    training, held_out = (
        Corpus(np.frombuffer(b"".join(part), np.uint8), np.cumsum([len(x) for x in part]))
        for part in parts
    )
    return training, held_out


def unigram_entropy(symbols: np.ndarray) -> float:
    """Returns the nats per byte of the best prediction that ignores context."""
    share = np.bincount(symbols.ravel(), minlength=256) / symbols.size
    return float(-np.sum(share[share > 0] * np.log(share[share > 0])))


def make_optimizer(
    model: LanguageModel, steps: int, learning_rate: float
) -> nnx.Optimizer[LanguageModel]:
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, learning_rate, warmup_steps=min(30, steps // 2), decay_steps=steps
    )
    rule = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.1))
    return nnx.Optimizer(model, rule, wrt=nnx.Param)


def train(
    model: LanguageModel, corpus: Corpus, attend_within: AttendWithin, options: argparse.Namespace
) -> list[float]:
    """Trains in place, on the mesh if there is one; returns each step's loss in nats per byte."""
    optimizer = make_optimizer(model, options.steps, options.learning_rate)
    sharing: Sharing | None = options.sharing
    layout = {}
    put = jax.device_put
    if sharing is not None:
        state = nnx.state((model, optimizer))
        nnx.update((model, optimizer), sharing.put_state(state))
        attend_within = sharing.attend_within(which(options))
        layout = {"order": sharing.order(options.length), "sharding": sharing.tokens}
        put = sharing.put_rows

    @nnx.jit
    def step(
        model: LanguageModel, optimizer: nnx.Optimizer[LanguageModel], rows: Rows
    ) -> jax.Array:
        value, gradients = nnx.value_and_grad(loss)(model, rows, attend_within, **layout)
        optimizer.update(model, gradients)
        return value

    rng = np.random.default_rng(options.seed)
    losses: list[jax.Array] = []
    tokens_per_step = options.batch * options.length
    bar = tqdm(range(options.steps), desc="training", unit="step", disable=jax.process_index() > 0)
    start = time.perf_counter()
    for i in bar:
        rows = put(corpus.pack(options.batch, options.length, rng))
        losses.append(step(model, optimizer, rows))
        if i == 0:
            jax.block_until_ready(losses)
            start = time.perf_counter()  # compilation is over
        elif i % 10 == 9 or i == options.steps - 1:
            latest = float(losses[-1])
            speed = i * tokens_per_step / (time.perf_counter() - start)
            bar.set_postfix_str(f"loss {latest:.3f} nats/byte, {speed:,.0f} tokens/s")
    return [float(x) for x in losses]


def evaluate(
    model: LanguageModel, corpus: Corpus, attend_within: AttendWithin, options: argparse.Namespace
) -> tuple[float, float]:
    """Returns the loss on held-out rows and the unigram entropy of the bytes that it predicts, in
    nats.
    """
    rng = np.random.default_rng(HELD_OUT_SEED)
    step = nnx.jit(lambda model, rows: loss(model, rows, attend_within))
    total, predicted = 0.0, []
    for _ in range(-(-HELD_OUT_ROWS // options.batch)):
        rows = corpus.pack(options.batch, options.length, rng)
        counted = rows.symbols[:, 1:][rows.documents[:, :-1] == rows.documents[:, 1:]]
        total += float(step(model, jax.device_put(rows))) * counted.size
        predicted.append(counted)
    symbols = np.concatenate(predicted)
    return total / symbols.size, unigram_entropy(symbols)


def check_gradients(
    model: LanguageModel, corpus: Corpus, attend_within: AttendWithin, options: argparse.Namespace
) -> list[str]:
    """Prints how far attention's gradients in the last layer are from float64's; names failures."""
    rows = corpus.pack(options.batch, options.length, np.random.default_rng(HELD_OUT_SEED))
    documents = np.asarray(rows.documents[:, :-1])
    layer = options.layers - 1
    operands = nnx.jit(lambda model, rows: attention_operands(model, rows, attend_within, layer))
    q, k, v, output_bar = operands(model, jax.device_put(rows))
    pullback = jax.jit(lambda q, k, v, ids, do: jax.vjp(attend_within(ids), q, k, v)[1](do))
    gradients = pullback(q, k, v, jnp.asarray(documents), output_bar)
    case = Case(
        head_dim=q.shape[3],
        batch=q.shape[0],
        heads=(q.shape[2], k.shape[2]),
        query_length=q.shape[1],
        key_length=k.shape[1],
        is_causal=True,
        masks=("segments",),
    )
    lse_bar = np.zeros((q.shape[0], q.shape[2], q.shape[1]), np.float32)
    inputs = Inputs(
        *(np.asarray(x) for x in (q, k, v, output_bar)),
        lse_bar=lse_bar,
        masks={"segments": (documents, documents)},
    )
    truth = oracle(case, inputs)
    usual = [ordinary(case, inputs, shift) for shift in REFERENCE_SHIFTS]
    failures, errors, usual_errors = [], [], []
    for name, gradient in zip(("dq", "dk", "dv"), gradients, strict=True):
        largest = np.abs(truth[name]).max()
        errors.append(np.abs(np.asarray(gradient, np.float64) - truth[name]).max() / largest)
        rounded = [x[name] for x in usual]
        usual_errors.append(np.abs(rounded[0] - truth[name]).max() / largest)
        verdict = compare(name, case.dtype, np.asarray(gradient), truth[name], rounded)
        if verdict.failure is not None:
            failures.append(f"{name}: {verdict.failure}")
    print(
        f"attention gradients: at most {max(errors):.2e} of the largest entry from float64's "
        f"(an ordinary bf16 computation: {max(usual_errors):.2e})"
    )
    return failures


def which(options: argparse.Namespace) -> Literal["kernel", "xla"] | None:
    """Returns the implementation to ask for."""
    return None if options.implementation == "auto" else options.implementation


def make_attend_within(options: argparse.Namespace) -> AttendWithin:
    """Returns causal attention within documents, on one device."""

    def within(documents: jax.Array) -> Attend:
        shape = jax.ShapeDtypeStruct((*documents.shape, 1, 1), jnp.bfloat16)
        table = fa4_jax.masks.tile_table(None, shape, shape, segment_ids=documents)
        return functools.partial(
            fa4_jax.attention, mask=table, is_causal=True, implementation=which(options)
        )

    return within


def which_implementation(options: argparse.Namespace, implementation: Any) -> str:
    """Says what computes attention on each device."""
    sizes = options.batch, options.length, options.heads
    if options.sharing is not None:
        parts = (options.sharing.size(axis) for axis in ("data", "seq", "tensor"))
        sizes = tuple(size // part for size, part in zip(sizes, parts, strict=True))
    shape = (*sizes, options.width // options.heads)
    operand = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    found = fa4_jax.explain(
        operand,
        operand,
        operand,
        segment_ids=jax.ShapeDtypeStruct(shape[:2], jnp.int32),
        is_causal=True,
        implementation=implementation,
    )
    forward = ", ".join(found.forward) or f"pure-JAX default ({found.forward_reason})"
    backward = ", ".join(found.backward) or f"pure-JAX default ({found.backward_reason})"
    if forward == backward:
        return forward
    return f"forward {forward}; backward {backward}"


def plot(losses: list[float], held_out: float, unigram: float, path: Path) -> None:
    figure, axis = plt.subplots(figsize=(7, 4.5))
    axis.plot(np.arange(1, len(losses) + 1), losses, linewidth=1, label="training")
    axis.plot(len(losses), held_out, "o", label=f"held out: {held_out:.3f}")
    axis.axhline(unigram, color="gray", linestyle="--", label=f"unigram entropy: {unigram:.3f}")
    axis.set(xlabel="step", ylabel="nats per byte", title="Python's standard library, by bytes")
    axis.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main(argv: list[str] | None = None) -> int:
    """Runs the program; returns its exit status."""
    options = arguments(argv)
    implementation = which(options)
    training, held_out = read_corpus()
    device = jax.local_devices()[0]
    count = 1 if options.sharing is None else options.sharing.mesh.size
    print(f"{len(training):,} bytes to train on, {len(held_out):,} held out")
    print(f"{count} x {device.device_kind}, JAX {jax.__version__}")
    sizes = Sizes(options.layers, options.width, options.heads)
    model = LanguageModel(sizes, nnx.Rngs(options.seed))
    attend_within = make_attend_within(options)
    losses = train(model, training, attend_within, options)
    # One device does the evaluation and the check: the trained weights move to the first.
    if options.sharing is not None:
        nnx.update(model, options.sharing.gather_state(nnx.state(model)))
    if jax.process_index() > 0:
        return 0
    loss_there, unigram = evaluate(model, held_out, attend_within, options)
    bits = np.log(2)
    print(
        f"held-out loss: {loss_there:.3f} nats/byte ({loss_there / bits:.3f} bits); unigram "
        f"entropy of the same bytes: {unigram:.3f} nats/byte ({unigram / bits:.3f} bits)"
    )
    print(f"attention ran on: {which_implementation(options, implementation)}")
    failures = check_gradients(model, held_out, attend_within, options)
    plot(losses, loss_there, unigram, options.output / "loss.png")
    (options.output / "losses.json").write_text(json.dumps(losses))
    print(f"loss curve: {options.output / 'loss.png'}")
    checkpoint.save(options.output / "checkpoint", sizes, model)
    print(f"checkpoint: {options.output / 'checkpoint'}")
    if not loss_there < CLEARLY_BELOW * unigram:
        failures.append(f"the held-out loss is not under {CLEARLY_BELOW} of the unigram entropy")
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
