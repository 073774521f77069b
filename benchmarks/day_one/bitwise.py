"""Runs the same call many times over, which must give the same bits.

Forwards always run so, backwards where they are deterministic. On the emulator every launch has
another seed, and so another schedule.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from benchmarks.day_one.outcome import Result, Verdict
from fa4_jax.conformance.cases import Case

RUNS, EMULATED_RUNS = 30, 3
_HEAD_DIMS = (64, 128, 256)


def cases(emulated: bool) -> tuple[Case, ...]:
    """Returns cases that are long enough for many CTAs to add to the same queries, causal,
    deterministic.
    """
    length, heads, batch = (260, (1, 1), 1) if emulated else (2048, (8, 4), 2)
    dims = (64, 256) if emulated else _HEAD_DIMS
    return tuple(
        Case(
            head_dim=head_dim,
            batch=batch,
            heads=heads,
            query_length=length,
            key_length=length,
            is_causal=True,
            deterministic=True,
        )
        for head_dim in dims
    )


def run(case: Case, emulated: bool, seed: int) -> Result:
    """Repeats output, log-sum-exp and gradients of a case and compares their bits."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from fa4_jax.api import attention
    from fa4_jax.conformance.oracle import make_inputs, names
    from fa4_jax.conformance.runner import arguments

    inputs, options = make_inputs(case, seed), arguments(case)

    @jax.jit
    def everything(primals: tuple[Any, ...], bars: tuple[Any, ...]) -> tuple[Any, ...]:
        def forward(*operands: Any) -> Any:
            return attention(*operands, return_residual=True, implementation="kernel", **options)

        results, pull_back = jax.vjp(forward, *primals)
        return *results, *pull_back(bars)

    primals = tuple(jnp.asarray(x) for x in (inputs.query, inputs.key, inputs.value))
    bars = jnp.asarray(inputs.output_bar), jnp.asarray(inputs.lse_bar)
    runs = EMULATED_RUNS if emulated else RUNS
    first = [np.asarray(x).view(np.uint8) for x in everything(primals, bars)]
    other: dict[str, int] = {}
    for _ in range(runs - 1):
        for name, before, value in zip(names(case), first, everything(primals, bars), strict=False):
            if not np.array_equal(before, np.asarray(value).view(np.uint8)):
                other[name] = other.get(name, 0) + 1
    data = {"runs": runs, "other": other, "case": dataclasses.asdict(case)}
    if other:
        text = ", ".join(f"{name} in {count}" for name, count in other.items())
        return Result(Verdict.FALLS, f"other bits than in the first of {runs} runs: {text}", data)
    return Result(Verdict.HOLDS, f"the same bits in {runs} runs", data)
