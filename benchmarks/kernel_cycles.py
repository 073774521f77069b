"""Measures the cycles of each kernel on a GPU, with which timing estimates are compared.

    ncu --csv --cache-control none --clock-control none -k regex:^fa4_ \\
        --metrics sm__cycles_elapsed.max,gpu__time_duration.sum \\
        python -m benchmarks.kernel_cycles > log.csv
    python -m benchmarks.kernel_cycles --collect log.csv results.json

Every shape runs twice; the second run, with a warm instruction cache, counts.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import pathlib
from typing import Any

from fa4_jax.key import HEAD_DIM_TILES

_LABEL = "KERNELS "
_TOKENS = 8192
_WIDTH = 2048  # heads x head_dim


def shapes() -> list[dict[str, Any]]:
    """Returns the shapes [B, S, N, H] with their masks, dtypes and kinds of backward."""
    return [
        {
            "dtype": dtype,
            "head_dim": head_dim,
            "batch": _TOKENS // length,
            "length": length,
            "heads": _WIDTH // head_dim,
            "is_causal": causal,
            "deterministic": deterministic,
        }
        for head_dim, dtype, causal, deterministic, length in itertools.product(
            HEAD_DIM_TILES, ("bfloat16", "float16"), (False, True), (False, True), (1024, 4096)
        )
    ]


def run() -> None:
    """Runs every shape, each after a line that names its kernels in launch order."""
    import jax
    import jax.numpy as jnp

    import fa4_jax

    for shape in shapes():
        size = (shape["batch"], shape["length"], shape["heads"], shape["head_dim"])
        keys = jax.random.split(jax.random.key(0), 4)
        query, key, value, bar = (
            jax.random.normal(k, size, jnp.dtype(shape["dtype"])) for k in keys
        )
        options = {
            "is_causal": shape["is_causal"],
            "deterministic": shape["deterministic"],
            "implementation": "kernel",
        }

        @jax.jit
        def step(
            query: Any, key: Any, value: Any, bar: Any, options: dict[str, Any] = options
        ) -> Any:
            def forward(*operands: Any) -> Any:
                return fa4_jax.attention(*operands, **options)

            output, pull_back = jax.vjp(forward, query, key, value)
            return output, pull_back(bar)

        explanation = fa4_jax.explain(query, key, value, **options)
        names = [*explanation.forward, *explanation.backward]
        for _ in range(2):
            print(_LABEL + json.dumps({**shape, "kernels": names}), flush=True)
            jax.block_until_ready(step(query, key, value, bar))


def collect(log: str, path: str) -> None:
    """Joins Nsight Compute's rows with the labels between them and writes the JSON.

    Raises:
      ValueError: the log has another number of launches than the labels say.
    """
    lines = pathlib.Path(log).read_text().splitlines()
    labels = [json.loads(line[len(_LABEL) :]) for line in lines if line.startswith(_LABEL)]
    start = next(i for i, line in enumerate(lines) if line.startswith('"ID"'))
    launches: dict[int, dict[str, float]] = {}
    for row in csv.DictReader(line for line in lines[start:] if line.startswith('"')):
        values = launches.setdefault(int(row["ID"]), {})
        values[row["Metric Name"]] = float(row["Metric Value"].replace(",", ""))
    expected = sum(len(label["kernels"]) for label in labels)
    if len(launches) != expected:
        raise ValueError(f"{len(launches)} launches in the log, the labels name {expected}")
    measured, rows = iter(launches.values()), []
    for number, label in enumerate(labels):
        for name in label.pop("kernels"):
            metrics = next(measured)
            if number % 2:
                cycles, time = metrics["sm__cycles_elapsed.max"], metrics["gpu__time_duration.sum"]
                rows.append({"kernel": name, **label, "cycles": cycles, "nanoseconds": time})
    pathlib.Path(path).write_text(json.dumps(rows, indent=1) + "\n")


def main() -> None:
    """Runs the shapes, or collects a log."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--collect", nargs=2, metavar=("LOG", "JSON"), help="join a log")
    arguments = parser.parse_args()
    if arguments.collect:
        collect(*arguments.collect)
    else:
        run()


if __name__ == "__main__":
    main()
