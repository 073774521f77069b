"""Measures one case: compiles all contenders, compares their results, times them in turns."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.flops import flops
from benchmarks.peers import OURS, Contender, contenders
from benchmarks.shapes import Case
from benchmarks.timing import Call, Protocol, Timing, interleave

DIRECTIONS = ("forward", "backward")

Inputs = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
Lower = Callable[[], jax.stages.Lowered]


def describe(error: Exception) -> str:
    """Describes an exception in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:400]}"


def make_inputs(case: Case) -> Inputs:
    """Makes random query, key, value and output cotangent, on the device."""
    (n, k), h = case.heads, case.head_dim
    rows, keys = (case.batch, case.query_length, n, h), (case.batch, case.key_length, k, h)

    @jax.jit
    def draw(seed: jax.Array) -> Inputs:
        parts = jax.random.split(seed, 4)
        q, do = (jax.random.normal(parts[i], rows, case.dtype) for i in (0, 3))
        key, value = (jax.random.normal(parts[i], keys, case.dtype) for i in (1, 2))
        return q, key, value, do

    return draw(jax.random.key(0))


def compile_all(jobs: dict[str, Lower]) -> dict[str, jax.stages.Compiled | Exception]:
    """Traces one after the other, compiles all at once; failures are returned as values."""
    outcomes: dict[str, Any] = {}
    with concurrent.futures.ThreadPoolExecutor(max_workers=max(1, len(jobs))) as pool:
        futures = {}
        for name, lower in jobs.items():
            try:
                futures[name] = pool.submit(lower().compile)
            except Exception as error:
                outcomes[name] = error
        for name, future in futures.items():
            outcomes[name] = future.exception() or future.result()
    return outcomes


@dataclasses.dataclass(frozen=True)
class Pass:
    """A compiled pass of one contender with its arguments bound."""

    call: Call
    temp_bytes: int | None


def _bound(compiled: jax.stages.Compiled, arguments: tuple[Any, ...]) -> Pass:
    memory = compiled.memory_analysis()
    temp_bytes = None if memory is None else int(memory.temp_size_in_bytes)
    return Pass(lambda: compiled(*arguments), temp_bytes)


def _forwards(present: list[Contender], inputs: Inputs) -> dict[str, Pass | Exception]:
    timed = [c for c in present if not c.backward_only]
    arguments = {c.name: _arguments(c, inputs) for c in timed}
    compiled = compile_all({c.name: _lowering(c.attend, arguments[c.name]) for c in timed})
    return {
        name: x if isinstance(x, Exception) else _bound(x, arguments[name])
        for name, x in compiled.items()
    }


def _backwards(present: list[Contender], inputs: Inputs) -> dict[str, Pass | Exception]:
    """Makes each contender's vjp with its residuals as arguments, without any forward."""
    timed = [c for c in present if c.no_backward is None]
    arguments = {c.name: _arguments(c, inputs) for c in timed}
    programs = compile_all(
        {c.name: _lowering(_with_residuals(c), arguments[c.name]) for c in timed}
    )
    outcomes: dict[str, Pass | Exception] = {}
    jobs: dict[str, Lower] = {}
    residuals: dict[str, tuple[Any, ...]] = {}
    for name, program in programs.items():
        if isinstance(program, Exception):
            outcomes[name] = program
            continue
        try:
            _, vjp = program(*arguments[name])
            leaves, tree = jax.tree.flatten(vjp)
            residuals[name] = (leaves, inputs[3])
            jobs[name] = _lowering(_apply(tree), residuals[name])
        except Exception as error:
            outcomes[name] = error
    for name, x in compile_all(jobs).items():
        outcomes[name] = x if isinstance(x, Exception) else _bound(x, residuals[name])
    return outcomes


def _arguments(contender: Contender, inputs: Inputs) -> tuple[jax.Array, jax.Array, jax.Array]:
    query, key, value, _ = inputs
    if contender.query_factor != 1:
        query = (query * contender.query_factor).astype(query.dtype)
    return query, key, value


def _lowering(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Lower:
    return lambda: jax.jit(function).lower(*arguments)


def _with_residuals(contender: Contender) -> Callable[..., Any]:
    return lambda *operands: jax.vjp(contender.attend, *operands)


def _apply(tree: Any) -> Callable[..., Any]:
    return lambda leaves, cotangent: jax.tree.unflatten(tree, leaves)(cotangent)


@jax.jit
def _difference(results: list[jax.Array], expected: list[jax.Array]) -> jax.Array:
    """Returns the largest |x - y| / |y| (Euclidean norms) of the pairs."""

    def norm(x: jax.Array) -> jax.Array:
        return jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32))))

    return jnp.max(
        jnp.stack(
            [
                norm(x.astype(jnp.float32) - y.astype(jnp.float32)) / norm(y)
                for x, y in zip(results, expected, strict=True)
            ]
        )
    )


def _outputs(contender: Contender, outcome: Pass) -> list[jax.Array]:
    outputs = jax.tree.leaves(outcome.call())
    if contender.query_factor != 1 and len(outputs) > 1:
        outputs[0] = outputs[0] * contender.query_factor
    return outputs


def _check(
    present: list[Contender],
    passes: dict[str, Pass | Exception],
    records: dict[str, dict[str, Any]],
) -> None:
    """Notes how far each contender's results are from ours."""
    ours = passes.get(OURS)
    if not isinstance(ours, Pass):
        return
    for contender in present:
        outcome = passes.get(contender.name)
        if contender.name != OURS and isinstance(outcome, Pass):
            try:
                difference = _difference(_outputs(contender, outcome), jax.tree.leaves(ours.call()))
                records[contender.name]["difference"] = float(difference)
            except Exception as error:
                records[contender.name]["difference_error"] = describe(error)


def _record(outcome: Timing | Exception, operations: int) -> dict[str, Any]:
    if isinstance(outcome, Exception):
        return {"error": describe(outcome)}
    return {
        "seconds": list(outcome.seconds),
        "median_s": outcome.median,
        "calls": outcome.calls,
        "tflops": operations / outcome.median / 1e12,
    }


def measure(case: Case, protocol: Protocol) -> dict[str, Any]:
    """Returns the record of a case, as it goes into the JSON file.

    It has, for each direction and contender, `seconds` of each burst, `median_s`, `tflops`,
    `temp_bytes`, `difference` from our results; or `error`, or `absent` with the reason. `ratios`
    are our speed over the contender's.
    """
    present, absent = contenders(case, jax.default_backend())
    inputs = make_inputs(case)
    record: dict[str, Any] = {"id": case.id, **dataclasses.asdict(case)}
    for direction, prepare in zip(DIRECTIONS, (_forwards, _backwards), strict=True):
        operations = flops(case, direction)
        records: dict[str, dict[str, Any]] = {x.name: {"absent": x.reason} for x in absent}
        records |= {c.name: {} for c in present if direction == "backward" or not c.backward_only}
        if direction == "backward":
            for contender in present:
                if contender.no_backward is not None:
                    records[contender.name] = {"absent": contender.no_backward}
        passes = prepare(present, inputs)
        _check(present, passes, records)
        ready = {name: x for name, x in passes.items() if isinstance(x, Pass)}
        timings: dict[str, Timing | Exception] = {
            name: x for name, x in passes.items() if isinstance(x, Exception)
        }
        timings |= interleave({name: x.call for name, x in ready.items()}, protocol)
        for name, outcome in timings.items():
            records[name] |= _record(outcome, operations)
            if name in ready:
                records[name]["temp_bytes"] = ready[name].temp_bytes
        record[direction] = {"flops": operations, "results": records, "ratios": _ratios(records)}
    return record


def _ratios(records: dict[str, dict[str, Any]]) -> dict[str, float]:
    ours = records.get(OURS, {}).get("median_s")
    if ours is None:
        return {}
    return {
        name: record["median_s"] / ours
        for name, record in records.items()
        if name != OURS and "median_s" in record
    }
