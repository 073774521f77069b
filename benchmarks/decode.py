"""Prints a table of the decode cases: microseconds of a call, and how fast K and V are read.

    python -m benchmarks.decode             # two minutes on a GPU
    python -m benchmarks.decode --parts 1 4 16 33 66 132 264   # our kernel alone, divided otherwise
    python -m benchmarks.decode --few-keys  # the ordinary and the split forward of few keys
    python -m benchmarks.decode --copies    # calls for which pages are copied
    python -m benchmarks.decode --steps     # a step of a loop beside the same call in a chain

It measures as `python -m benchmarks.attention --group decode` does, beside it our kernel on the
same keys in pages of 64 tokens in random order and, where they can be imported, flash-attn-4 and
FlashInfer (on such pages) from CUDA graphs, and writes no file. With --parts it shows the
microseconds of our kernel with these numbers of parts of the keys, for
`fa4_jax.splits.COST_BLOCKS`; --few-keys is for its LEAST_KEYS.
--copies times `decode` for chunks of a prompt and for float8 pages, beside its default path and
`attention` on the same keys side by side.
--steps times a decoding step in loops beside as many steps one after another.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import unittest.mock
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import flashinfer_peer, measure, shapes, torch_peer
from benchmarks.peers import CUDNN, OURS, XLA
from benchmarks.shapes import Case
from benchmarks.timing import Protocol, Timing, interleave
from fa4_jax import attention, decode, extents, ffi_call, launches, splits
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
                shape = splits.shape(parts, *parts_of_rule[1:3])
                buffers["parts"] = jnp.zeros(shape, jnp.int32)
                operands = Operands(query, key, value, buffers["extents"])
                buffers |= launches.split_buffers(plan.problem, operands)
                kernels = plan.forward[: 2 if splits.are_joined(shape) else 1]
                buffers |= ffi_call.launch(kernels, buffers, scalars(plan.problem))
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


FEW_KEYS = (64, 128, 192, 256, 384, 512, 1024)
"""Key lengths that are near `splits.LEAST_KEYS`."""


def show_few_keys(batch: int, protocol: Protocol) -> None:
    """Prints microseconds of the ordinary and of the split forward, by the number of keys."""
    cells = []
    for keys in FEW_KEYS:
        case = dataclasses.replace(shapes.DECODE[0], batch=batch, key_length=keys)
        found = interleave({name: _forward(case, name) for name in ("ordinary", "split")}, protocol)
        each = [_microseconds(found[name], case.chained) for name in ("ordinary", "split")]
        cells.append(f"{keys}: {' / '.join(each)}")
    print(f"batch {batch}, ordinary / split by keys: {', '.join(cells)}", flush=True)


def _forward(case: Case, name: str) -> Any:
    """Returns a chain of calls of the "ordinary" or of the "split" forward."""
    least = 0 if name == "split" else case.key_length + 1
    with unittest.mock.patch.object(splits, "LEAST_KEYS", least):
        plan = plan_of(case)
    assert (plan.parts is not None) == (name == "split")
    inputs = measure.make_inputs(case)[:3]
    limits = [jnp.full(case.batch, length) for length in (case.query_length, case.key_length)]

    def run(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        for _ in range(case.chained):
            operands = Operands(query, key, value, extents.stacked(*limits))
            query = launches.forward(plan, operands).output
        return query

    return functools.partial(jax.jit(run).lower(*inputs).compile(), *inputs)


def _microseconds(timing: Timing | Exception, chained: int) -> str:
    if isinstance(timing, Timing):
        return f"{timing.median / chained * 1e6:.1f}"
    return measure.describe(timing)[:60]


COPIES = (
    # batch, rows, tokens, heads, head_dim, type of the pages
    (1, 512, 32768, (32, 8), 128, "bfloat16"),
    (4, 512, 32768, (32, 8), 128, "bfloat16"),
    (1, 512, 32768, (64, 8), 64, "bfloat16"),
    (8, 128, 8192, (32, 8), 128, "bfloat16"),
    (8, 1, 8192, (32, 8), 128, "float8_e4m3fn"),
    (64, 1, 4096, (64, 8), 128, "float8_e4m3fn"),
)


def show_copies(protocol: Protocol) -> None:
    """Prints microseconds of calls for which pages are copied, and of their alternatives."""
    for batch, rows, tokens, (heads, kv_heads), head_dim, dtype in COPIES:
        keys = jax.random.split(jax.random.key(0), 3)
        shapes_of = ((rows, heads), (tokens, kv_heads), (tokens, kv_heads))
        q, k, v = (
            jax.random.normal(key, (batch, *shape, head_dim), jnp.bfloat16)
            for key, shape in zip(keys, shapes_of, strict=True)
        )
        count = batch * tokens // PAGE
        pages = [x.astype(dtype).reshape(count, PAGE, kv_heads, head_dim) for x in (k, v)]
        order = np.random.default_rng(0).permutation(count).reshape(batch, -1)
        paged = (q, *pages, jnp.asarray(order, jnp.int32), jnp.full(batch, tokens))
        whole = functools.partial(attention, is_causal=True, query_offset=tokens - rows)
        functions = {
            "pages": (functools.partial(decode, implementation="kernel"), paged),
            "default path": (functools.partial(decode, implementation="xla"), paged),
            "side by side": (whole, (q, k, v)),
        }
        calls = {
            name: functools.partial(jax.jit(function).lower(*given).compile(), *given)
            for name, (function, given) in functions.items()
        }
        found = interleave(calls, protocol)
        cells = (f"{name}: {_microseconds(timing, 1)}" for name, timing in found.items())
        size = f"{batch}, {rows}, {tokens}, {heads}/{kv_heads}, {head_dim}, {dtype}"
        print(f"{size}: {', '.join(cells)}", flush=True)


STEPS = 64
"""Steps of a loop that `show_steps` times."""
State = tuple[jax.Array, jax.Array]
"""What a step hands on: the query and the lengths."""


def show_steps(case: Case, protocol: Protocol) -> None:
    """Prints microseconds of a decoding step: in loops, and one after another in a chain.

    A step attends from pages and adds a token to the lengths. `loop` ends by a count that is a
    value of the run, as sampling does; of `counted` the compiler knows it, and `in twos` does two
    steps an iteration; `idle` is `loop` without attention. `kernels` is a chain whose lengths stay
    what they are on average in the loops, so that a step is its kernels alone, and they load as
    many blocks of keys. The differences are the loops' own.
    """
    plan = plan_of(case, PAGE)
    query, key, value, _ = measure.make_inputs(case)
    count = case.batch * case.key_length // PAGE
    pages = [x.reshape(count, PAGE, *x.shape[2:]) for x in (key, value)]
    table = np.random.default_rng(0).permutation(count).reshape(case.batch, -1)
    table = jnp.asarray(table, jnp.int32)
    lengths = jnp.full(case.batch, case.key_length - STEPS, jnp.int32)

    def step(state: State, pages: Any) -> State:
        query, lengths = state
        keys, values = pages
        return decode(query, keys, values, table, lengths, implementation="kernel"), lengths + 1

    def idle_step(state: State, pages: Any) -> State:
        del pages
        return state[0], state[1] + 1

    def until(one: Callable[[State, Any], State], state: State, steps: Any, pages: Any) -> State:
        def body(counted: tuple[jax.Array, State]) -> tuple[jax.Array, State]:
            return counted[0] + 1, one(counted[1], pages)

        start = (jnp.int32(0), state)
        return jax.lax.while_loop(lambda counted: counted[0] < steps, body, start)[1]

    def counted(state: State, steps: jax.Array, pages: Any, unroll: int = 1) -> State:
        del steps
        one = functools.partial(step, pages=pages)
        return jax.lax.fori_loop(0, STEPS, lambda _, state: one(state), state, unroll=unroll)

    def kernels(state: State, steps: jax.Array, pages: Any) -> State:
        del steps
        query, lengths = state[0], state[1] + STEPS // 2
        for _ in range(STEPS):
            query = step((query, lengths), pages)[0]
        return query, lengths

    def chain(state: State, steps: jax.Array, pages: Any) -> State:
        del steps
        for _ in range(STEPS):
            state = step(state, pages)
        return state

    given = ((query, lengths), jnp.int32(STEPS), pages)
    functions = {
        "loop": functools.partial(until, step),
        "counted": counted,
        "in twos": functools.partial(counted, unroll=2),
        "kernels": kernels,
        "idle": functools.partial(until, idle_step),
        "chain": chain,
    }
    calls = {
        name: functools.partial(jax.jit(function).lower(*given).compile(), *given)
        for name, function in functions.items()
    }
    found = interleave(calls, protocol)
    parts = plan.parts[0] if plan.parts else 0
    cells = (f"{name} {_microseconds(timing, STEPS)}" for name, timing in found.items())
    print(f"{case.id}, {parts} parts: a step, {', '.join(cells)}", flush=True)


def flash_attn_4_cell(case: Case, protocol: Protocol) -> str:
    """Returns microseconds of a call of flash-attn-4, or why there are none."""
    try:
        call = torch_peer.chained(case, measure.make_inputs(case))
    except Exception as error:  # One case must not end the table.
        return measure.describe(error)[:60]
    return _microseconds(interleave({"one": call}, protocol)["one"], case.chained)


def flashinfer_cell(case: Case, protocol: Protocol) -> str:
    """Returns microseconds of a call of FlashInfer on pages, or why there are none."""
    try:
        call = flashinfer_peer.chained(case, measure.make_inputs(case), PAGE)
    except Exception as error:  # One case must not end the table.
        return measure.describe(error)[:60]
    return _microseconds(interleave({"one": call}, protocol)["one"], case.chained)


def row(case: Case, record: dict[str, Any], others: list[str]) -> str:
    """Returns a case's line of the table."""
    sizes = f"{case.batch}, {case.query_length}, {case.key_length}, "
    cells = [sizes + "/".join(map(str, case.heads)) + f", {case.head_dim}"]
    for name in (OURS, CUDNN, XLA):
        result = record["forward"]["results"].get(name, {})
        failed = result.get("error", result.get("absent", "none"))[:60]
        cells.append(f"{result['median_s'] * 1e6:.1f}" if "median_s" in result else failed)
    ours = record["forward"]["results"].get(OURS, {})
    cells += [*others, f"{floor_s(case) * 1e6:.1f}"]
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


CELLS = {
    "ours, pages": paged_cell,
    torch_peer.FA4: flash_attn_4_cell,
    flashinfer_peer.FLASHINFER: flashinfer_cell,
}
"""Columns of the table that are timed apart."""


def main() -> None:
    """Measures case by case and prints the table as it grows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decode")
    parser.add_argument("--loops", type=int, default=5, help="bursts of each contender (5)")
    parser.add_argument("--only", default="", help="cases whose name contains this text")
    parser.add_argument("--few-keys", action="store_true", help="ordinary and split forward")
    parser.add_argument("--copies", action="store_true", help="calls for which pages are copied")
    parser.add_argument("--steps", action="store_true", help="steps of loops, and of a chain")
    parser.add_argument("--parts", type=int, nargs="+", help="numbers of parts of our kernel")
    options = parser.parse_args()
    torch_peer.load_torch()  # before JAX starts its devices
    torch_peer.load()
    print(jax.devices()[0].device_kind)
    protocol = Protocol(options.loops, 0.03)
    for batch in (1, 8, 64) if options.few_keys else ():
        show_few_keys(batch, protocol)
    if options.copies:
        show_copies(protocol)
    cases = [case for case in shapes.DECODE if options.only in case.id]
    for case in cases if options.parts else ():
        show_parts(case, options.parts, protocol)
        jax.clear_caches()
    for case in cases if options.steps else ():
        show_steps(case, protocol)
        jax.clear_caches()
    if options.parts or options.few_keys or options.copies or options.steps:
        return
    head = ("B, T, S, N/K, d", OURS, CUDNN, XLA, *CELLS, "floor", "share", "differences")
    print("| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|", flush=True)
    for case in cases:
        try:
            others = [cell(case, protocol) for cell in CELLS.values()]
            line = row(case, measure.measure(case, protocol), others)
        except Exception as error:  # One case must not end the table.
            line = f"| {case.id}: {measure.describe(error)} |"
        print(line, flush=True)
        jax.clear_caches()


if __name__ == "__main__":
    main()
