"""Measures what a call costs in addition to the kernels' time: first call, dispatch, memory."""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import fa4_jax
from benchmarks import peers, shapes
from benchmarks.contenders import Eager
from benchmarks.measure import compile_all, describe, make_inputs
from benchmarks.shapes import Case
from benchmarks.timing import burst

CALL_STEPS = ("import", "trace", "compile", "run")
"""The steps that count as the first call; `jax_import` and `jax_start` are JAX's own."""


def first_call(implementation: str, case: Case, processes: int) -> dict[str, Any]:
    """Returns the seconds of each step of a first call, from fresh processes one after the other.

    Call it before this process takes a GPU's memory.

    Args:
      implementation: "fa4_jax", or an implementation of jax.nn.dot_product_attention.
    """
    sizes = (case.batch, case.query_length, case.heads[0], case.head_dim)
    command = [sys.executable, "-m", "benchmarks.first_call", implementation, *map(str, sizes)]
    # A cache on disk would hide what a new user waits for.
    environment = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false"}
    runs: list[dict[str, float]] = []
    for _ in range(processes):
        try:
            done = subprocess.run(
                command,
                cwd=Path(__file__).parents[1],
                env=environment,
                capture_output=True,
                text=True,
                timeout=180,
                check=True,
            )
            runs.append(json.loads(done.stdout.splitlines()[-1]))
        except subprocess.CalledProcessError as error:
            return {"case": case.id, "error": error.stderr.strip()[-400:]}
        except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
            return {"case": case.id, "error": describe(error)}
    medians = {step: statistics.median(run[step] for run in runs) for step in runs[0]}
    totals = [sum(run[step] for step in CALL_STEPS) for run in runs]
    return {
        "case": case.id,
        "steps_s": medians,
        "total_s": statistics.median(totals),
        "totals_s": totals,
    }


def dispatch(calls: int) -> dict[str, Any]:
    """Returns the seconds per call of tiny jitted functions that are called back to back.

    "jax floor" is the same with nothing but an addition: what JAX itself takes.
    """
    case = shapes.DISPATCH
    query, key, value, cotangent = make_inputs(case)
    present, _ = peers.contenders(case, jax.default_backend())
    programs: dict[str, Any] = {"jax floor": lambda q, k, v, do: q + do}
    for contender in present:
        attend = contender.attend
        if isinstance(attend, Eager):
            continue
        if not contender.backward_only:
            programs[contender.name] = lambda q, k, v, do, f=attend: f(q, k, v)
        programs[f"{contender.name} with gradient"] = lambda q, k, v, do, f=attend: jax.vjp(
            f, q, k, v
        )[1](do)
    found: dict[str, Any] = {}
    for name, function in programs.items():
        program = jax.jit(function)
        try:
            burst(lambda p=program: p(query, key, value, cotangent), 10)
            found[name] = statistics.median(
                burst(lambda p=program: p(query, key, value, cotangent), calls) for _ in range(3)
            )
        except Exception as error:
            found[name] = describe(error)
    return found


def memory(case: Case) -> dict[str, Any]:
    """Returns the temporary bytes of our programs, and those that the theory expects.

    The theory expects, of the forward, the LSE in float32; of the gradient (whose results are dq,
    dk, dv), the output, the LSE, and a float32 workspace of dq's size.
    """
    query, key, value, cotangent = make_inputs(case)
    implementation = "kernel" if jax.default_backend() == "gpu" else None

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return fa4_jax.attention(
            q, k, v, is_causal=case.is_causal, query_offset=0, implementation=implementation
        )

    def gradient(q: jax.Array, k: jax.Array, v: jax.Array, do: jax.Array) -> Any:
        return jax.vjp(attend, q, k, v)[1](do)

    compiled = compile_all(
        {
            "forward": lambda: jax.jit(attend).lower(query, key, value),
            "gradient": lambda: jax.jit(gradient).lower(query, key, value, cotangent),
        }
    )
    rows = math.prod(query.shape[:3])
    output = query.size * jnp.dtype(query.dtype).itemsize
    theory = {"forward": 4 * rows, "gradient": output + 4 * rows + 4 * query.size}
    found: dict[str, Any] = {"case": case.id}
    for name, program in compiled.items():
        found[name] = {"theory_bytes": theory[name]}
        if isinstance(program, Exception):
            found[name]["error"] = describe(program)
            continue
        analysis = program.memory_analysis()
        if analysis is not None:
            found[name]["temp_bytes"] = int(analysis.temp_size_in_bytes)
            found[name]["argument_bytes"] = int(analysis.argument_size_in_bytes)
            found[name]["output_bytes"] = int(analysis.output_size_in_bytes)
    return found
