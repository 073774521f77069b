"""Errors of the Blackwell forward by share of polynomial exponentials and rescaling threshold.

    python -m benchmarks.blackwell_forward_errors [FILE.md]

Every variant is compiled with its own tile and runs on the emulator, against the float64 oracle.
The tables go after the marker line of the file, whose text before that line stays. Without a FILE
it is benchmarks/results/blackwell-forward-errors.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Iterator

import numpy as np

from fa4_jax.conformance.cases import Case
from fa4_jax.conformance.oracle import Inputs, make_inputs, oracle, ordinary
from kernels.build import compile
from kernels.emulator import Policy
from tests.emulator import attention

ARCH = "sm_100f"
POLYNOMIAL_PAIRS = (0, 4, 8, 12, 16)
THRESHOLDS_LOG2 = (0.0, 4.0, 8.0)
HEAD_DIMS = (64, 128)
DTYPES = ("bf16", "fp16")
SEEDS = (0, 1)
RESULTS = pathlib.Path(__file__).parent / "results" / "blackwell-forward-errors.md"
MARKER = "<!-- benchmarks.blackwell_forward_errors writes what follows -->"


@dataclasses.dataclass(frozen=True)
class Errors:
    """The errors against float64, the worst of all seeds.

    Attributes:
      output_rms: root mean square of the error over that of the output.
      output_worst: largest error over the largest output.
      lse_rms, lse_worst: root mean square and largest error; the LSE's
        error is the relative error of a row's sum.
    """

    output_rms: float
    output_worst: float
    lse_rms: float
    lse_worst: float

    def cells(self) -> str:
        """The errors as cells of a table."""
        return " | ".join(f"{value:.2e}" for value in dataclasses.astuple(self))


def case(dtype: str, head_dim: int, growing: bool) -> Case:
    """A problem of two query tiles and four blocks of keys."""
    return Case(
        dtype=dtype,
        head_dim=head_dim,
        batch=1,
        heads=(1, 1),
        query_length=256,
        key_length=512,
        growing=growing,
    )


@functools.cache
def data(some: Case, seed: int) -> tuple[Inputs, dict[str, np.ndarray]]:
    """The inputs of a seed and the float64 results."""
    inputs = make_inputs(some, seed)
    if some.growing:  # in the order in which the kernel visits the blocks
        inputs = attention.reversed_keys(some, inputs)
    return inputs, oracle(some, inputs)


def errors(some: list[dict[str, np.ndarray]], truths: list[dict[str, np.ndarray]]) -> Errors:
    """The errors of results, of which there is one per seed."""

    def rms(x: np.ndarray) -> float:
        return float(np.sqrt(np.mean(np.square(x))))

    found = []
    for results, truth in zip(some, truths, strict=True):
        wrong = {name: results[name].astype(np.float64) - truth[name] for name in truth}
        output = truth["output"]
        found.append(
            (
                rms(wrong["output"]) / rms(output),
                np.abs(wrong["output"]).max() / np.abs(output).max(),
                rms(wrong["lse"]),
                np.abs(wrong["lse"]).max(),
            )
        )
    return Errors(*(max(column) for column in zip(*found, strict=True)))


def variant(launch: attention.Attention, pairs: int) -> str:
    """The PTX of a launch's kernel with `pairs` of 16 pairs by polynomial in the middle chunks."""
    from kernels import sources
    from kernels.sm100 import tiles

    (key,) = launch.keys
    tile = tiles.FORWARD_TILES[key.head_dim, key.pair]
    tiles.FORWARD_TILES[key.head_dim, key.pair] = dataclasses.replace(tile, polynomial_pairs=pairs)
    try:
        return compile.compile_source(key, sources.source(key)).ptx
    finally:
        tiles.FORWARD_TILES[key.head_dim, key.pair] = tile


def rows(dtype: str, head_dim: int) -> Iterator[tuple[str, str, str, Errors]]:
    """Yields (exponential, threshold, inputs, errors) for a storage type and head dim."""
    cases = {
        name: case(dtype, head_dim, growing)
        for name, growing in (("ordinary", False), ("growing", True))
    }
    truths = {
        name: [
            {quantity: data(some, seed)[1][quantity] for quantity in ("output", "lse")}
            for seed in SEEDS
        ]
        for name, some in cases.items()
    }
    for name, some in cases.items():
        usual = [ordinary(some, data(some, seed)[0]) for seed in SEEDS]
        yield "float32 (numpy)", "", name, errors(usual, truths[name])
    for pairs in POLYNOMIAL_PAIRS:
        text = ""
        for (name, some), threshold in itertools.product(cases.items(), THRESHOLDS_LOG2):
            results = []
            for seed in SEEDS:
                launch = attention.attention(some, data(some, seed)[0], gradients=False, arch=ARCH)
                attributes = launch.attributes | {"rescale_threshold_log2": threshold}
                launch = dataclasses.replace(launch, attributes=attributes)
                text = text or variant(launch, pairs)
                run = functools.partial(launch.run, Policy(races=False), seed)
                results.append(run(lambda key, old, text=text: text))
            yield f"{pairs} of 16", f"{threshold:g}", name, errors(results, truths[name])


def main() -> None:
    """Writes the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=pathlib.Path, nargs="?", default=RESULTS)
    file = parser.parse_args().file
    compile.prepare_process(ARCH)
    lines = []
    for dtype, head_dim in itertools.product(DTYPES, HEAD_DIMS):
        lines += [
            "",
            f"## {dtype}, d = {head_dim}",
            "| exponentials | threshold (log2) | inputs | output rms | output worst | LSE rms"
            " | LSE worst |",
            "|---|---|---|---|---|---|---|",
        ]
        for exponential, threshold, inputs, found in rows(dtype, head_dim):
            lines.append(f"| {exponential} | {threshold} | {inputs} | {found.cells()} |")
            print(lines[-1], flush=True)
    before = file.read_text().split(MARKER)[0] if file.exists() else ""
    file.write_text(before + MARKER + "\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
