"""Prints a table of the decode cases: microseconds of a call, and how fast K and V are read.

    python -m benchmarks.decode             # two minutes on a GPU
    python -m benchmarks.decode --parts 1 4 16 33 66 132 264   # our kernel alone, divided otherwise

It measures as `python -m benchmarks.attention --group decode` does, beside it our kernel on the
same keys in pages of 64 tokens in random order, and writes no file. With --parts it shows the
microseconds of our kernel with these numbers of parts of the keys, for `fa4_jax.splits`.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import measure, shapes
from benchmarks.peers import CUDNN, OURS, XLA
from benchmarks.shapes import Case
from benchmarks.timing import Protocol, Timing, interleave
from fa4_jax import extents, ffi_call, launches
from fa4_jax.operands import Operands
from fa4_jax.plan import Plan, make_plan, scalars
from fa4_jax.problem import Problem, default_scale
from fa4_jax.target import current_target

MEMORY_BYTES_PER_S = 4.6e12
"""Of an H200, measured."""

PAGE = 64


def floor_s(case: Case) -> float:
    """Returns the seconds that reading K and V once takes."""
    elements = case.head_dim + case.output_dim
    return 2 * elements * case.batch * case.key_length * case.heads[1] / MEMORY_BYTES_PER_S


def plan_of(case: Case, page_length: int | None = None) -> Plan:
    """Returns the launches of a case."""
    sizes = (case.batch, case.query_length, case.key_length, *case.heads, case.head_dim)
    problem = Problem(*sizes, "bf16", default_scale(case.head_dim), page_length=page_length)
    return make_plan(problem, current_target(), "kernel")


def parts_s(case: Case, numbers: list[int], protocol: Protocol) -> dict[str, Timing | Exception]:
    """Returns the timings of a chain of calls with these numbers of parts."""
    plan = plan_of(case)
    parts_of_rule = plan.parts
    assert parts_of_rule is not None
    query, key, value, _ = measure.make_inputs(case)
    limits = [jnp.full(case.batch, length) for length in (case.query_length, case.key_length)]

    def call(parts: int) -> Any:
        def run(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            for _ in range(case.chained):
                buffers = {"q": query, "k": key, "v": value, "extents": extents.stacked(*limits)}
                buffers["parts"] = jnp.zeros((parts, *parts_of_rule[1:]), jnp.int32)
                for kernel in plan.forward:
                    buffers |= ffi_call.launch(kernel, buffers, scalars(plan.problem))
                query = buffers["o"]
            return query

        compiled = jax.jit(run).lower(query, key, value).compile()
        return lambda: compiled(query, key, value)

    chosen = [number for number in {*numbers, parts_of_rule[0]} if number <= case.key_length // 64]
    return interleave({str(number): call(number) for number in sorted(chosen)}, protocol)


def show_parts(case: Case, numbers: list[int], protocol: Protocol) -> None:
    """Prints a line of a case: microseconds by number of parts, the rule's first."""
    found = parts_s(case, numbers, protocol)
    plan = plan_of(case)
    assert plan.parts is not None
    cells = [
        f"{parts}: {timing.median / case.chained * 1e6:.1f}"
        if isinstance(timing, Timing)
        else f"{parts}: {measure.describe(timing)[:50]}"
        for parts, timing in found.items()
    ]
    floor = f"floor {floor_s(case) * 1e6:.1f}"
    print(f"{case.id}: rule {plan.parts[0]}, {floor}, {', '.join(cells)}", flush=True)


def paged_s(case: Case, protocol: Protocol) -> float:
    """Returns the seconds of a call whose keys are in pages, all of its lengths full."""
    plan = plan_of(case, PAGE)
    query, key, value, _ = measure.make_inputs(case)
    count = case.batch * case.key_length // PAGE
    pages = [x.reshape(count, PAGE, *x.shape[2:]) for x in (key, value)]
    table = np.random.default_rng(0).permutation(count).reshape(case.batch, -1)
    lengths = [jnp.full(case.batch, length) for length in (case.query_length, case.key_length)]

    @jax.jit
    def run(query: jax.Array, keys: jax.Array, values: jax.Array, table: jax.Array) -> jax.Array:
        for _ in range(case.chained):
            operands = Operands(query, keys, values, extents.stacked(*lengths))
            query = launches.forward(plan, operands, table).output
        return query

    compiled = run.lower(query, *pages, jnp.asarray(table, jnp.int32)).compile()
    arguments = (query, *pages, jnp.asarray(table, jnp.int32))
    timing = interleave({"paged": lambda: compiled(*arguments)}, protocol)["paged"]
    if not isinstance(timing, Timing):
        raise timing
    return timing.median / case.chained


def row(case: Case, record: dict[str, Any], paged: str) -> str:
    """Returns a case's line of the table."""
    sizes = f"{case.batch}, {case.query_length}, {case.key_length}, "
    cells = [sizes + "/".join(map(str, case.heads)) + f", {case.head_dim}"]
    for name in (OURS, CUDNN, XLA):
        result = record["forward"]["results"].get(name, {})
        failed = result.get("error", result.get("absent", "none"))[:60]
        cells.append(f"{result['median_s'] * 1e6:.1f}" if "median_s" in result else failed)
    ours = record["forward"]["results"].get(OURS, {})
    cells += [paged, f"{floor_s(case) * 1e6:.1f}"]
    cells.append(f"{floor_s(case) / ours['median_s']:.2f}" if "median_s" in ours else "")
    differences = [
        f"{result['difference']:.1e}"
        for result in record["forward"]["results"].values()
        if "difference" in result
    ]
    return "| " + " | ".join([*cells, " ".join(differences)]) + " |"


def paged_cell(case: Case, protocol: Protocol) -> str:
    """Returns microseconds of a call with pages, or why there are none."""
    try:
        return f"{paged_s(case, protocol) * 1e6:.1f}"
    except Exception as error:  # One case must not end the table.
        return measure.describe(error)[:60]


def main() -> None:
    """Measures case by case and prints the table as it grows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decode")
    parser.add_argument("--loops", type=int, default=5, help="bursts of each contender (5)")
    parser.add_argument("--parts", type=int, nargs="+", help="numbers of parts of our kernel")
    options = parser.parse_args()
    head = ("B, T, S, N/K, d", OURS, CUDNN, XLA, "ours, pages", "floor", "share", "differences")
    print(jax.devices()[0].device_kind)
    protocol = Protocol(options.loops, 0.03)
    for case in shapes.DECODE if options.parts else ():
        show_parts(case, options.parts, protocol)
        jax.clear_caches()
    if options.parts:
        return
    print("| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|", flush=True)
    for case in shapes.DECODE:
        try:
            line = row(case, measure.measure(case, protocol), paged_cell(case, protocol))
        except Exception as error:  # One case must not end the table.
            line = f"| {case.id}: {measure.describe(error)} |"
        print(line, flush=True)
        jax.clear_caches()


if __name__ == "__main__":
    main()
