"""Measures one case: compiles all contenders, compares their results, times them in turns."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.contenders import Attention, Contender, Eager, Foreign, Inputs, Results
from benchmarks.flops import flops
from benchmarks.peers import OURS, OWN, contenders
from benchmarks.shapes import Case
from benchmarks.timing import Call, Protocol, Timing, interleave

DIRECTIONS = ("forward", "backward")

Lower = Callable[[], jax.stages.Lowered]


def describe(error: Exception) -> str:
    """Describes an exception in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:400]}"


def make_inputs(case: Case) -> Inputs:
    """Makes random query, key, value and output cotangent, on the device."""
    n, k = case.heads
    rows, keys = (case.batch, case.query_length, n), (case.batch, case.key_length, k)

    @jax.jit
    def draw(seed: jax.Array) -> Inputs:
        parts = jax.random.split(seed, 4)
        query = jax.random.normal(parts[0], (*rows, case.head_dim), case.dtype) * case.deviation
        key = jax.random.normal(parts[1], (*keys, case.head_dim), case.dtype)
        value = jax.random.normal(parts[2], (*keys, case.output_dim), case.dtype)
        cotangent = jax.random.normal(parts[3], (*rows, case.output_dim), case.dtype)
        return query, key, value, cotangent

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
    """A pass of one contender with its arguments bound.

    Attributes:
      temp_bytes: JAX's temporary memory, None where it is unknown.
    """

    call: Call
    temp_bytes: int | None


Passes = dict[str, Pass | Exception]


def _bound(compiled: jax.stages.Compiled, arguments: tuple[Any, ...]) -> Pass:
    memory = compiled.memory_analysis()
    temp_bytes = None if memory is None else int(memory.temp_size_in_bytes)
    return Pass(lambda: compiled(*arguments), temp_bytes)


def _eager(present: list[Contender], inputs: Inputs, direction: str) -> Passes:
    outcomes: Passes = {}
    for contender in present:
        if isinstance(contender.attend, Eager):
            try:
                call = contender.attend.bind(contender.layout.enter(inputs), direction)
                outcomes[contender.name] = Pass(call, None)
            except Exception as error:
                outcomes[contender.name] = error
    return outcomes


def _chain(attend: Attention, calls: int) -> Attention:
    """Returns a chain of calls of an attention: each takes the last output as its query."""

    def run(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        for _ in range(calls):
            query = attend(query, key, value)
        return query

    return run


def _forwards(present: list[Contender], inputs: Inputs, chained: int = 1) -> Passes:
    timed = [c for c in present if not c.backward_only]
    arguments: dict[str, tuple[Any, ...]] = {}
    jobs: dict[str, Lower] = {}
    for contender in timed:
        attend = contender.attend
        if not isinstance(attend, Eager):
            arguments[contender.name] = contender.layout.enter(inputs)[:3]
            jobs[contender.name] = _lowering(_chain(attend, chained), arguments[contender.name])
    outcomes: Passes = {
        name: x if isinstance(x, Exception) else _bound(x, arguments[name])
        for name, x in compile_all(jobs).items()
    }
    return outcomes | (_eager(timed, inputs, "forward") if chained == 1 else {})


def _backwards(present: list[Contender], inputs: Inputs) -> Passes:
    """Makes each contender's vjp with its residuals as arguments, without any forward."""
    timed = [c for c in present if c.no_backward is None]
    entered: dict[str, Inputs] = {}
    programs: dict[str, Lower] = {}
    for contender in timed:
        attend = contender.attend
        if not isinstance(attend, Eager):
            entered[contender.name] = contender.layout.enter(inputs)
            programs[contender.name] = _lowering(
                functools.partial(jax.vjp, attend), entered[contender.name][:3]
            )
    outcomes: Passes = {}
    jobs: dict[str, Lower] = {}
    residuals: dict[str, tuple[Any, ...]] = {}
    for name, program in compile_all(programs).items():
        if isinstance(program, Exception):
            outcomes[name] = program
            continue
        try:
            *operands, cotangent = entered[name]
            _, vjp = program(*operands)
            leaves, tree = jax.tree.flatten(vjp)
            residuals[name] = (leaves, cotangent)
            jobs[name] = _lowering(_apply(tree), residuals[name])
        except Exception as error:
            outcomes[name] = error
    for name, x in compile_all(jobs).items():
        outcomes[name] = x if isinstance(x, Exception) else _bound(x, residuals[name])
    return outcomes | _eager(timed, inputs, "backward")


_PREPARE = {"forward": _forwards, "backward": _backwards}


def _lowering(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Lower:
    return lambda: jax.jit(function).lower(*arguments)


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


def _results(contender: Contender, outcome: Pass) -> Results:
    results = outcome.call()
    arrays = results.arrays() if isinstance(results, Foreign) else jax.tree.leaves(results)
    return contender.layout.leave(arrays)


def _check(
    present: list[Contender],
    passes: Passes,
    records: dict[str, dict[str, Any]],
) -> None:
    """Notes how far each contender's results are from ours."""
    ours = passes.get(OURS)
    if not isinstance(ours, Pass):
        return
    for contender in present:
        outcome = passes.get(contender.name)
        if not contender.computes_the_case or contender.name == OURS:
            continue
        if isinstance(outcome, Pass):
            try:
                difference = _difference(_results(contender, outcome), jax.tree.leaves(ours.call()))
                records[contender.name]["difference"] = float(difference)
            except Exception as error:
                records[contender.name]["difference_error"] = describe(error)


def _record(outcome: Timing | Exception, operations: int, chained: int) -> dict[str, Any]:
    if isinstance(outcome, Exception):
        return {"error": describe(outcome)}
    median = outcome.median / chained
    return {
        "seconds": [seconds / chained for seconds in outcome.seconds],
        "median_s": median,
        "calls": outcome.calls * chained,
        "tflops": operations / median / 1e12,
    }


def our_pass(case: Case, direction: str, name: str = OURS) -> Pass:
    """Returns the forward or backward of one of our contenders in a case, compiled."""
    present, _ = contenders(case, jax.default_backend())
    passes = _PREPARE[direction]([c for c in present if c.name == name], make_inputs(case))
    outcome = passes[name]
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _share_of_dense(case: Case, direction: str, ours: Pass, protocol: Protocol) -> float:
    """Returns our TFLOP/s over ours of the same shape without a mask; both take turns."""
    dense = case.without_mask()
    calls = {"case": ours.call, "dense": our_pass(dense, direction).call}
    timings = interleave(calls, protocol)
    rates: list[float] = []
    for name, of_case in (("case", case), ("dense", dense)):
        timing = timings[name]
        if isinstance(timing, Exception):
            raise timing
        rates.append(flops(of_case, direction) / timing.median)
    return rates[0] / rates[1]


def rates(
    case: Case, present: list[Contender], protocol: Protocol
) -> dict[str, dict[str, float | str]]:
    """Returns TFLOP/s by direction and contender, or the error's text, from calls in turns."""
    inputs = make_inputs(case)
    found: dict[str, dict[str, float | str]] = {}
    for direction in DIRECTIONS:
        outcomes: dict[str, Any] = dict(_PREPARE[direction](present, inputs))
        calls = {name: x.call for name, x in outcomes.items() if isinstance(x, Pass)}
        outcomes |= interleave(calls, protocol)
        found[direction] = {
            name: flops(case, direction) / x.median / 1e12 if isinstance(x, Timing) else describe(x)
            for name, x in outcomes.items()
        }
    return found


def measure(case: Case, protocol: Protocol) -> dict[str, Any]:
    """Returns the record of a case, as it goes into the JSON file.

    It has, for each direction and contender, `seconds` of each burst, `median_s`, `tflops`,
    `temp_bytes`, `difference` from our results; or `error`, or `absent` with the reason. `ratios`
    are our speed over the contender's. Where no other contender has a time and the case has a mask,
    `share_of_dense` is our TFLOP/s over ours of the same shape without one (or `share_error`).
    """
    present, absent = contenders(case, jax.default_backend())
    inputs = make_inputs(case)
    record: dict[str, Any] = {"id": case.id, **dataclasses.asdict(case)}
    for direction in DIRECTIONS:
        operations = flops(case, direction)
        records: dict[str, dict[str, Any]] = {x.name: {"absent": x.reason} for x in absent}
        records |= {c.name: {} for c in present if direction == "backward" or not c.backward_only}
        if direction == "backward":
            for contender in present:
                if contender.no_backward is not None:
                    records[contender.name] = {"absent": contender.no_backward}
        if case.chained > 1 and direction == "backward":
            record[direction] = {"flops": operations, "results": {}, "ratios": {}}
            continue
        passes = (
            _forwards(present, inputs, case.chained)
            if direction == "forward"
            else _backwards(present, inputs)
        )
        _check(present, passes, records)
        ready = {name: x for name, x in passes.items() if isinstance(x, Pass)}
        timings: dict[str, Timing | Exception] = {
            name: x for name, x in passes.items() if isinstance(x, Exception)
        }
        timings |= interleave({name: x.call for name, x in ready.items()}, protocol)
        for name, outcome in timings.items():
            records[name] |= _record(outcome, operations, case.chained)
            if name in ready:
                records[name]["temp_bytes"] = ready[name].temp_bytes
        ratios = _ratios(records)
        record[direction] = {"flops": operations, "results": records, "ratios": ratios}
        if case.hides_keys and OURS in ready and not set(ratios) - set(OWN):
            try:
                share = _share_of_dense(case, direction, ready[OURS], protocol)
                record[direction]["share_of_dense"] = share
            except Exception as error:
                record[direction]["share_error"] = describe(error)
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
