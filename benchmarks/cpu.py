"""Times `fa4_jax.attention` and `jax.nn.dot_product_attention` on a CPU: compilation and calls.

    taskset -c 0,1 python -m benchmarks.cpu --name cpu              # everything; an hour
    python -m benchmarks.cpu --name try --only decode --loops 3     # cases with this in their names
    python -m benchmarks.cpu --table cpu-before cpu                 # two runs side by side, cpu.md

Both run in one process, on the cores that it may use, and take turns. A gradient is one program
with its forward in it. Compilation counts from the Python call to the executable, without a cache.
Ratios are our time over `jax.nn`'s: the median over the turns of a call, of medians of compilation.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import fa4_jax
from benchmarks.environment import environment
from benchmarks.report import save
from benchmarks.timing import Protocol, Timing, interleave

RESULTS = Path(__file__).parent / "results"
OURS, PEER = "fa4_jax", "jax.nn"
PASSES = ("forward", "gradient")
BOUNDS = {"compile forward": 1.5, "compile gradient": 1.5, "forward": 1.1, "gradient": 1.2}
"""The greatest ratios that the project allows itself."""

Attend = Callable[..., jax.Array]


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem: query [1, rows, heads[0], head_dim], keys [1, keys, heads[1], head_dim].

    Attributes:
      kind: "self", "decode", "decode-lengths" (the number of keys is a value of the run), "mask"
        (a dense one of [rows, keys]) or "offset" (causal with an offset that is a value of the run;
        `jax.nn` receives the same as a mask).
    """

    kind: str
    rows: int
    keys: int
    heads: tuple[int, int]
    head_dim: int
    dtype: str
    is_causal: bool = False

    @property
    def id(self) -> str:
        """Returns a readable and unique name, such as "self-f32-d64-causal-s512"."""
        parts = [self.kind, {"float32": "f32", "bfloat16": "bf16"}[self.dtype], f"d{self.head_dim}"]
        parts += ["causal"] if self.is_causal else []
        return "-".join([*parts, f"s{self.keys}"])


def _cases() -> tuple[Case, ...]:
    dtypes, heads = ("float32", "bfloat16"), (4, 4)
    found = []
    for keys, dtype, causal in itertools.product((64, 128, 256, 512, 1024, 2048), dtypes, (0, 1)):
        found.append(Case("self", keys, keys, heads, 64, dtype, bool(causal)))
    for keys, dtype, causal in itertools.product((64, 512, 2048), dtypes, (0, 1)):
        found.append(Case("self", keys, keys, heads, 128, dtype, bool(causal)))
    for kind in ("decode", "decode-lengths"):
        for keys, dtype in itertools.product((512, 2048, 8192), dtypes):
            found.append(Case(kind, 1, keys, (8, 2), 128, dtype))
    for kind, keys, dtype in itertools.product(("mask", "offset"), (64, 512, 2048), dtypes):
        found.append(Case(kind, keys, keys, heads, 64, dtype, kind == "offset"))
    # One head, since `jax.nn` holds its scores: 256 MB and several times that in the gradient.
    for keys, dtype, causal in itertools.product((4096, 8192), dtypes, (0, 1)):
        found.append(Case("self", keys, keys, (1, 1), 64, dtype, bool(causal)))
    found.append(Case("self", 8192, 8192, (1, 1), 128, "float32", True))
    return tuple(found)


CASES = _cases()


@dataclasses.dataclass(frozen=True)
class Contender:
    """One attention with the operands of a case: query, key, value, and what its kind adds."""

    attend: Attend
    operands: tuple[jax.Array, ...]
    output_bar: jax.Array

    def lower(self, direction: str) -> jax.stages.Lowered:
        """Lowers the program of a pass, traced anew."""
        if direction == "forward":
            return jax.jit(lambda *x: self.attend(*x)).lower(*self.operands)

        def gradient(output_bar: jax.Array, *operands: jax.Array) -> Any:
            def attend(*x: jax.Array) -> jax.Array:
                return self.attend(*x, *operands[3:])

            output, pull_back = jax.vjp(attend, *operands[:3])
            return output, pull_back(output_bar)

        return jax.jit(gradient).lower(self.output_bar, *self.operands)

    def arguments(self, direction: str) -> tuple[jax.Array, ...]:
        """Returns the arguments of the program of a pass."""
        return self.operands if direction == "forward" else (self.output_bar, *self.operands)


def contenders(case: Case) -> dict[str, Contender]:
    """Returns our contender and `jax.nn`'s, on the same random operands."""
    (n, k), h = case.heads, case.head_dim
    parts = jax.random.split(jax.random.key(0), 5)
    rows, keys = (1, case.rows, n, h), (1, case.keys, k, h)
    q, do = (jax.random.normal(parts[i], rows, case.dtype) for i in (0, 3))
    key, value = (jax.random.normal(parts[i], keys, case.dtype) for i in (1, 2))

    def ours(q: jax.Array, k: jax.Array, v: jax.Array, *extra: jax.Array) -> jax.Array:
        options: dict[str, Any] = {"is_causal": case.is_causal}
        if extra:
            name = {"mask": "mask", "offset": "query_offset"}.get(case.kind)
            options[name or "key_value_seq_lengths"] = extra[0]
        return fa4_jax.attention(q, k, v, implementation="xla", **options)

    def peer(q: jax.Array, k: jax.Array, v: jax.Array, *extra: jax.Array) -> jax.Array:
        options: dict[str, Any] = {"is_causal": case.is_causal}
        if case.kind == "offset":
            positions = extra[0] + jnp.arange(case.rows)[:, None]
            mask = (jnp.arange(case.keys)[None, :] <= positions)[None, None]
            options = {"mask": mask}
        elif extra:
            options["mask" if case.kind == "mask" else "key_value_seq_lengths"] = extra[0]
        return jax.nn.dot_product_attention(q, k, v, implementation="xla", **options)

    extra: tuple[jax.Array, ...] = ()
    if case.kind == "mask":
        extra = (jax.random.bernoulli(parts[4], 0.7, (1, 1, case.rows, case.keys)),)
    elif case.kind == "offset":
        extra = (jnp.int32(0),)
    elif case.kind == "decode-lengths":
        extra = (jnp.full(1, case.keys - 7, jnp.int32),)
    return {
        name: Contender(attend, (q, key, value, *extra), do)
        for name, attend in ((OURS, ours), (PEER, peer))
    }


def compilations(
    present: dict[str, Contender], direction: str, loops: int
) -> tuple[dict[str, list[float]], dict[str, jax.stages.Compiled]]:
    """Returns the seconds from the Python call to the executable; every compilation starts from
    nothing.
    """
    seconds: dict[str, list[float]] = {name: [] for name in present}
    programs: dict[str, jax.stages.Compiled] = {}
    for loop in range(loops):
        for name in sorted(present, reverse=bool(loop % 2)):
            jax.clear_caches()
            start = time.perf_counter()
            programs[name] = present[name].lower(direction).compile()
            seconds[name].append(time.perf_counter() - start)
    return seconds, programs


def _difference(programs: dict[str, Any], arguments: dict[str, Any]) -> float:
    """Returns the largest relative (Euclidean) difference of a result of ours from `jax.nn`'s."""
    found, expected = (
        [x.astype(jnp.float32) for x in jax.tree.leaves(programs[name](*arguments[name]))]
        for name in (OURS, PEER)
    )
    norms = [
        (jnp.linalg.norm(x - y), jnp.linalg.norm(y)) for x, y in zip(found, expected, strict=True)
    ]
    return max(float(a / b) for a, b in norms)


def measure(case: Case, protocol: Protocol, compile_loops: int) -> dict[str, Any]:
    """Returns the record of a case, as it goes into the JSON file.

    It has, for each pass and contender, `compile_s`, `seconds` of each turn and `temp_bytes`; then
    `ratios` by the names of BOUNDS and the `difference` of the results.
    """
    present = contenders(case)
    record: dict[str, Any] = {"id": case.id, **dataclasses.asdict(case), "ratios": {}}
    ratios = record["ratios"]
    for direction in PASSES:
        seconds, programs = compilations(present, direction, compile_loops)
        arguments = {name: x.arguments(direction) for name, x in present.items()}
        calls = {
            name: lambda program=program, own=arguments[name]: program(*own)
            for name, program in programs.items()
        }
        timings = interleave(calls, protocol)
        results: dict[str, Any] = {}
        for name, timing in timings.items():
            if not isinstance(timing, Timing):
                raise timing
            analysis = programs[name].memory_analysis()
            results[name] = {
                "compile_s": seconds[name],
                "seconds": list(timing.seconds),
                "median_s": timing.median,
                "temp_bytes": None if analysis is None else int(analysis.temp_size_in_bytes),
            }
        ours, peer = results[OURS], results[PEER]
        ratios[f"compile {direction}"] = statistics.median(ours["compile_s"]) / statistics.median(
            peer["compile_s"]
        )
        turns = zip(ours["seconds"], peer["seconds"], strict=True)
        ratios[direction] = statistics.median(a / b for a, b in turns)
        results["difference"] = _difference(programs, arguments)
        record[direction] = results
    return record


def line(record: dict[str, Any]) -> str:
    """Returns a line about a case for the terminal."""
    cells = [f"{name} {ratio:.2f}" for name, ratio in record["ratios"].items()]
    worst = max(record[direction]["difference"] for direction in PASSES)
    return f"{record['id']:32s} " + ", ".join(cells) + f" (differ by {worst:.1e})"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}"


def table(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Returns a Markdown table of every ratio before and after, with our milliseconds after."""
    old = {(case["id"], *case["heads"]): case for case in before["cases"]}
    columns = list(BOUNDS)
    heads = [f"{name} (<= {BOUNDS[name]})" for name in columns]
    lines = [
        "| case | " + " | ".join(heads) + " | ours, `jax.nn` forward [ms] | gradient [ms] |",
        "|---|" + "---|" * (len(columns) + 2),
    ]
    for case in after["cases"]:
        cells = []
        for name in columns:
            ratio = case["ratios"][name]
            earlier = old.get((case["id"], *case["heads"]))
            text = f"{ratio:.2f}"
            text = f"**{text}**" if ratio > BOUNDS[name] else text
            cells.append(text if earlier is None else f"{earlier['ratios'][name]:.2f} -> {text}")
        for direction in PASSES:
            both = (case[direction][name]["median_s"] for name in (OURS, PEER))
            cells.append(", ".join(map(_milliseconds, both)))
        lines.append(f"| {case['id']} | " + " | ".join(cells) + " |")
    return lines


def markdown(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Returns the report of two runs."""
    env = after["environment"]
    over = {
        name: sum(case["ratios"][name] > bound for case in after["cases"])
        for name, bound in BOUNDS.items()
    }
    lines = [
        "# Small calls on a CPU: our time over `jax.nn`'s",
        "",
        f"Measured {env['date']} on {after['processor']}, {after['cores']} cores, "
        f"jax {env['jax']}, by `python -m benchmarks.cpu`. A ratio below 1 means that fa4_jax is "
        "faster. Before -> after; bold is beyond the bound in the column's head.",
        *([] if "note" not in after else ["", after["note"]]),
        "",
        "Cases beyond the bound: "
        + ", ".join(f"{name} {count} of {len(after['cases'])}" for name, count in over.items())
        + ".",
        "",
        *table(before, after),
    ]
    return "\n".join(lines) + "\n"


def _processor() -> str:
    for text in Path("/proc/cpuinfo").read_text().splitlines():
        if text.startswith("model name"):
            return text.split(":", 1)[1].strip()
    return "an unknown CPU"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--name", default="cpu", help="of the JSON file (cpu)")
    parser.add_argument("--only", action="append", metavar="TEXT", help="part of a case's name")
    parser.add_argument("--loops", type=int, default=7, help="turns of each contender (7)")
    parser.add_argument("--compile-loops", type=int, default=3, help="compilations of each (3)")
    parser.add_argument("--table", nargs=2, metavar=("BEFORE", "AFTER"), help="only the report")
    parser.add_argument("--output", type=Path, default=RESULTS)
    asked = parser.parse_args(argv)
    if asked.table:
        runs = [json.loads((asked.output / f"{name}.json").read_text()) for name in asked.table]
        (asked.output / f"{asked.table[1]}.md").write_text(markdown(*runs))
        return
    jax.config.update("jax_enable_compilation_cache", False)
    cores = len(os.sched_getaffinity(0))
    run = {"environment": environment(), "processor": _processor(), "cores": cores, "cases": []}
    for case in CASES:
        if not asked.only or any(text in case.id for text in asked.only):
            record = measure(case, Protocol(loops=asked.loops), asked.compile_loops)
            run["cases"].append(record)
            print(line(record), flush=True)
            save(run, asked.output / f"{asked.name}.json")


if __name__ == "__main__":
    main()
