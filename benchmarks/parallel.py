"""Times context parallelism on the GPUs of one host and writes JSON, Markdown and a plot.

    python -m benchmarks.parallel                    # all lengths; minutes on 2 or 4 GPUs
    python -m benchmarks.parallel --only 128k        # the cases with this in their names
    python -m benchmarks.parallel --profile FOLDER   # also traces one call of each scheme
    python -m benchmarks.parallel --quick            # does it all run? seconds, also on CPUs
    python -m benchmarks.parallel_report FILE.json   # the report again, from the numbers

It compares forward and backward of causal self-attention, with sequences in zig-zag order, with one
GPU that has all of the work. Efficiency is the time of a GPU's share of the FLOPs at the speed of
that one GPU, over the time measured: 1 where N GPUs are N times as fast.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import fa4_jax
from benchmarks import parallel_trace
from benchmarks.environment import clocks, environment
from benchmarks.measure import describe
from benchmarks.report import save
from fa4_jax import parallel

ONE = "one GPU"

OPTIONS = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_experimental_parallel_collective_overlap_limit": "4",
}
"""The compiler options of everything that is timed: transfers start early and end late, and up to
four run at a time: those of K, V, dK and dV (by default one runs, and the next begins when it has
ended).
"""

COPY_ENGINES = {"xla_gpu_use_memcpy_local_p2p": True}
"""The option by which the GPUs' copy engines permute, instead of NCCL's kernels, which occupy
multiprocessors.
"""


@dataclasses.dataclass(frozen=True)
class Case:
    """Causal self-attention of one sequence.

    Attributes:
      tokens: length of the whole sequence.
      heads: (query heads, KV heads).
    """

    tokens: int
    heads: tuple[int, int]
    head_dim: int = 128

    @property
    def id(self) -> str:
        """Returns a readable name."""
        n, k = self.heads
        tokens = f"{self.tokens // 1024}k" if self.tokens % 1024 == 0 else str(self.tokens)
        return f"{tokens}-h{n}over{k}-d{self.head_dim}"

    @property
    def flops(self) -> float:
        """Returns the FLOPs of forward and backward: 3.5 times 4 per pair, head and feature."""
        pairs = self.tokens * (self.tokens + 1) / 2
        return 3.5 * 4 * self.heads[0] * self.head_dim * pairs


CASES = (Case(32 * 1024, (16, 2)), Case(128 * 1024, (16, 2)), Case(512 * 1024, (8, 1)))
PROFILED = 128 * 1024
"""The tokens of the case that is traced."""

QUICK = (Case(256, (8, 1), 16),)


@dataclasses.dataclass(frozen=True)
class Contender:
    """A scheme and the compiler's options for it; with scheme None it is one GPU."""

    scheme: parallel.Scheme | None
    options: tuple[tuple[str, Any], ...] = ()


CONTENDERS = {
    ONE: Contender(None),
    "ring": Contender(parallel.Ring("seq", "zigzag")),
    "ring, copy engines": Contender(parallel.Ring("seq", "zigzag"), tuple(COPY_ENGINES.items())),
    "all-gather": Contender(parallel.AllGather("seq", "zigzag")),
    "Ulysses": Contender(parallel.Ulysses("seq", "zigzag")),
    "Ulysses, contiguous": Contender(parallel.Ulysses("seq")),
    "ring, contiguous": Contender(parallel.Ring("seq")),
}

USUAL = ("ring", "ring, copy engines", "all-gather", "Ulysses")
"""The contenders that are timed unless --schemes names others."""

Arrays = tuple[jax.Array, ...]


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parallel", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--devices", type=int, help="GPUs to use (all)")
    parser.add_argument("--only", action="append", metavar="TEXT", help="cases with TEXT in names")
    parser.add_argument("--schemes", nargs="+", choices=[x for x in CONTENDERS if x != ONE])
    parser.add_argument("--loops", type=int, default=5, help="turns of each contender (5)")
    parser.add_argument("--turn", type=float, default=0.15, help="seconds of a turn, at least")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument(
        "--profile", type=Path, metavar="FOLDER", help="trace one call of each scheme"
    )
    parser.add_argument("--quick", action="store_true", help="one tiny case")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    return parser.parse_args(argv)


def parsed_options(texts: list[str]) -> dict[str, Any]:
    """Returns the compiler's options of the command line, over those that are always set."""
    words = {"true": True, "false": False}
    pairs = (text.partition("=") for text in texts)
    return OPTIONS | {name: words.get(value.lower(), value) for name, _, value in pairs}


def make_arrays(case: Case, mesh: Mesh, where: P) -> Arrays:
    """Makes random query, key, value and output cotangent, each on its devices."""
    (n, k), h = case.heads, case.head_dim
    shapes = [(1, case.tokens, heads, h) for heads in (n, k, k, n)]
    sharding = NamedSharding(mesh, where)

    @functools.partial(jax.jit, out_shardings=(sharding,) * 4)
    def draw() -> Arrays:
        keys = jax.random.split(jax.random.key(0), 4)
        pairs = zip(keys, shapes, strict=True)
        return tuple(jax.random.normal(key, shape, jnp.bfloat16) for key, shape in pairs)

    return draw()


def make_call(contender: Contender, mesh: Mesh, where: P) -> Callable[..., Any]:
    """Returns a function to output and gradients from query, key, value and output cotangent."""
    scheme = contender.scheme
    if scheme is None:
        attend = functools.partial(fa4_jax.attention, is_causal=True)
    else:
        attend = functools.partial(
            parallel.attention, scheme=scheme, mesh=mesh, specs=where, is_causal=True
        )

    def both(q: Any, k: Any, v: Any, output_bar: Any) -> Any:
        output, transpose = jax.vjp(attend, q, k, v)
        return output, *transpose(output_bar)

    return both


@dataclasses.dataclass
class Program:
    """A compiled contender and its operands."""

    compiled: Any
    arrays: Arrays

    def __call__(self) -> Any:
        return self.compiled(*self.arrays)

    @property
    def bytes_per_gpu(self) -> dict[str, int]:
        """Returns the bytes of operands, results and everything between, as the compiler allots
        them.
        """
        found = self.compiled.memory_analysis()
        parts = {
            "operands": found.argument_size_in_bytes,
            "results": found.output_size_in_bytes,
            "temporary": found.temp_size_in_bytes,
        }
        return parts | {"total": sum(parts.values())}


def build(
    case: Case, contender: Contender, devices: list[Any], options: dict[str, Any]
) -> tuple[Program, float]:
    """Returns the compiled program, and the seconds that compiling took."""
    alone = contender.scheme is None
    used = devices[:1] if alone else devices
    mesh = jax.make_mesh((len(used),), ("seq",), (AxisType.Auto,), devices=used)
    where = P() if alone else P(None, "seq")
    arrays = make_arrays(case, mesh, where)
    if jax.default_backend() != "gpu":
        options = {}
    start = time.perf_counter()
    lowered = jax.jit(make_call(contender, mesh, where)).lower(*arrays)
    compiled = lowered.compile(options | (dict(contender.options) if options else {}))
    seconds = time.perf_counter() - start
    return Program(compiled, arrays), seconds


def interleaved(
    programs: dict[str, Program], loops: int, turn_s: float
) -> dict[str, tuple[float, ...]]:
    """Returns the seconds of one call in each turn; the order of the contenders rotates."""
    repeats = {}
    for name, program in programs.items():
        jax.block_until_ready(program())
        start = time.perf_counter()
        jax.block_until_ready(program())
        repeats[name] = max(1, math.ceil(turn_s / (time.perf_counter() - start)))
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    names = list(programs)
    for loop in range(loops):
        first = loop % len(names)
        for name in names[first:] + names[:first]:
            start = time.perf_counter()
            result = None
            for _ in range(repeats[name]):
                result = programs[name]()
            jax.block_until_ready(result)
            seconds[name].append((time.perf_counter() - start) / repeats[name])
    return {name: tuple(x) for name, x in seconds.items()}


def disagreement(program: Program, alone: Program, order: int | None) -> float:
    """Returns the largest relative (Euclidean) difference of output and gradients from one GPU's.

    Args:
      order: shards of the zig-zag order that the program's arrays are in, or None.
    """
    device = alone.arrays[0].sharding

    def natural(x: jax.Array) -> jax.Array:
        x = jax.device_put(np.asarray(x), device)
        return x if order is None else parallel.from_zigzag(x, order)

    expected = alone.compiled(*(natural(x) for x in program.arrays))
    worst = 0.0
    for ours, theirs in zip(program(), expected, strict=True):
        a, b = (np.asarray(x, np.float32) for x in (natural(ours), theirs))
        worst = max(worst, float(np.linalg.norm(a - b) / np.linalg.norm(b)))
    return worst


def measure(
    case: Case, names: Sequence[str], devices: list[Any], options: argparse.Namespace, check: bool
) -> tuple[dict[str, Any], dict[str, Program]]:
    """Measures one case; returns the record for the report, and its programs."""
    record: dict[str, Any] = {
        "id": case.id,
        **dataclasses.asdict(case),
        "flops": case.flops,
        "clocks_before": clocks(),
        "results": {},
    }
    programs: dict[str, Program] = {}
    for name in [ONE, *names]:
        result = record["results"][name] = {}
        try:
            program, result["compile_s"] = build(
                case, CONTENDERS[name], devices, parsed_options(options.option)
            )
            result["bytes_per_gpu"] = program.bytes_per_gpu
            jax.block_until_ready(program())
            programs[name] = program
        except Exception as error:
            result["error"] = describe(error)
    loops = options.loops if case.tokens < 500_000 else min(3, options.loops)
    for name, seconds in interleaved(programs, loops, options.turn).items():
        record["results"][name] |= {"seconds": seconds, "median_s": statistics.median(seconds)}
    alone = record["results"][ONE].get("median_s")
    for name in programs:
        result = record["results"][name]
        share = 1 if name == ONE else len(devices)
        result["tflops_per_gpu"] = case.flops / share / result["median_s"] / 1e12
        if alone is not None:
            result["efficiency"] = alone / share / result["median_s"]
        scheme = CONTENDERS[name].scheme
        if check and scheme is not None and ONE in programs:
            order = len(devices) if scheme.layout == "zigzag" else None
            result["disagreement"] = disagreement(programs[name], programs[ONE], order)
    record["clocks_after"] = clocks()
    return record, programs


def profile(programs: dict[str, Program], folder: Path, devices: int) -> dict[str, Any]:
    """Traces one call of each scheme and returns how much of its transfers kernels hide."""
    found = {}
    for name, program in programs.items():
        if name != ONE:
            here = folder / name.replace(", ", "-").replace(" ", "-")
            jax.block_until_ready(program())
            try:
                found[name] = parallel_trace.traced(program, here, devices)
            except Exception as error:
                found[name] = {"error": describe(error)}
    return found


def main(argv: list[str] | None = None) -> int:
    """Runs the program; returns its exit status."""
    options = arguments(argv)
    devices = jax.devices()[: options.devices]
    cases = QUICK if options.quick else CASES
    cases = [x for x in cases if not options.only or any(text in x.id for text in options.only)]
    names = options.schemes or list(USUAL)
    options.output.mkdir(parents=True, exist_ok=True)
    kind = devices[0].device_kind.lower().replace(" ", "-")
    path = (
        options.output / f"{kind}-x{len(devices)}-parallel{'-quick' if options.quick else ''}.json"
    )
    run: dict[str, Any] = {
        "environment": environment(),
        "devices": len(devices),
        "options": parsed_options(options.option),
        "cases": [],
    }
    profiled = next((case for case in cases if case.tokens == PROFILED), cases[-1])
    for case in cases:
        start = time.perf_counter()
        record, programs = measure(case, names, devices, options, check=case is cases[0])
        if options.profile is not None and case is profiled:
            schemes = profile(programs, options.profile, len(devices))
            run["profile"] = {"case": case.id, "schemes": schemes}
        run["cases"].append(record)
        save(run, path)
        print(f"{case.id}: {time.perf_counter() - start:.1f} s", flush=True)
        for name, result in record["results"].items():
            numbers = {
                key: round(result[key], 4)
                for key in ("median_s", "efficiency", "tflops_per_gpu", "compile_s", "disagreement")
                if key in result
            }
            print(f"  {name}: {result.get('error') or numbers}", flush=True)
        del programs
    for name, found in run.get("profile", {}).get("schemes", {}).items():
        print(f"  profile of {name}: { {k: v for k, v in found.items() if k != 'gpus'} }")
    print(f"written: {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
