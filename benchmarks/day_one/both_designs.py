"""Times both designs of the passes that have two, and says which line of the table is wrong."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

from benchmarks.day_one.outcome import Finding, Result, Verdict
from benchmarks.shapes import Case, self_attention
from fa4_jax import designs
from fa4_jax.key import Pass

LENGTHS = (2048, 8192)
MARGIN = 1.01
"""How much faster a design has to be before the table's line should change."""

_DIRECTIONS = {Pass.FORWARD: "forward", Pass.BACKWARD: "backward"}


def cells(arch: str) -> tuple[Case, ...]:
    """Returns a dense and a causal case of each length and head dims with both designs."""
    dims = sorted({(d, value) for of, _, d, value in designs.CHOSEN if of == arch})
    return tuple(
        dataclasses.replace(
            self_attention("designs", d, length, is_causal, "bfloat16"),
            value_dim=value if value != d else None,
        )
        for (d, value) in dims
        for length in LENGTHS
        for is_causal in (False, True)
    )


def run(case: Case) -> Result:
    """Times both designs of a case in turns: TFLOP/s of each direction that has two."""
    import jax

    import fa4_jax
    from benchmarks.contenders import Contender
    from benchmarks.measure import rates
    from benchmarks.timing import Protocol

    def attend(design: str, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        with designs.asking(design):
            return fa4_jax.attention(
                query, key, value, is_causal=case.is_causal, implementation="kernel"
            )

    both = [Contender(name, functools.partial(attend, name)) for name in designs.DESIGNS]
    found = rates(case, both, Protocol(loops=5, burst_s=0.03))
    errors = [
        f"{name} {direction}: {rate}"
        for direction, of_designs in found.items()
        for name, rate in of_designs.items()
        if isinstance(rate, str)
    ]
    text = ", ".join(
        f"{direction}: " + ", ".join(f"{name} {rate:.0f}" for name, rate in of_designs.items())
        for direction, of_designs in found.items()
        if not errors
    )
    verdict = Verdict.ERROR if errors else Verdict.MEASURED
    return Result(verdict, "; ".join(errors) or text, {"tflops": found})


def changes(findings: Sequence[Finding], arch: str) -> list[str]:
    """Returns the lines of `designs.CHOSEN` to change: where the other design is faster.

    Args:
      findings: of this part.
    """
    by_id = {case.id: case for case in cells(arch)}
    lines: list[str] = []
    for (of, kernel, d, value), chosen in designs.CHOSEN.items():
        other = designs.PAIR if chosen == designs.SINGLE else designs.SINGLE
        ratios: dict[str, float] = {}
        for x in findings:
            case = by_id.get(x.item)
            if of == arch and case and (case.head_dim, case.output_dim) == (d, value):
                rate: dict[str, Any] = x.data.get("tflops", {}).get(_DIRECTIONS[kernel], {})
                if {chosen, other} <= set(rate):
                    ratios[x.item] = rate[other] / rate[chosen]
        if not ratios:
            continue
        mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
        if mean > MARGIN:
            name = f"({of!r}, Pass.{kernel.name}, {d}, {value})"
            each = ", ".join(f"{item} {ratio:.2f}" for item, ratio in ratios.items())
            lines.append(
                f"fa4_jax/designs.py: {name}: {chosen.upper()} -> {other.upper()}, "
                f"{mean:.2f} times as fast ({each})"
            )
    return lines
