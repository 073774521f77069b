"""The selftest by kernel family: forward before backward, one CTA before pairs, fast before
deterministic. Each case is small, since the first question is which kernels work at all."""

from __future__ import annotations

import dataclasses
import functools

from benchmarks.day_one.litmus import BLACKWELL
from benchmarks.day_one.outcome import Result, Verdict
from fa4_jax.conformance.cases import CASES, Case
from fa4_jax.key import HEAD_DIM_TILES, backward_value_dim, head_dim_tile


@dataclasses.dataclass(frozen=True)
class Family:
    """The cases that one kind of kernel runs.

    Attributes:
      gradients: whether the backward runs, too.
    """

    name: str
    gradients: bool
    cases: tuple[Case, ...]


def families(arch: str, emulated: bool, full: bool) -> tuple[Family, ...]:
    """Returns the families of an architecture, in the order in which they run.

    Args:
      emulated: so small that a core needs seconds for a case.
      full: all conformance cases instead of two for each head dim.
    """
    chosen = _emulated() if emulated else _full() if full else _quick()
    found = []
    for gradients, deterministic in ((False, False), (True, False), (True, True)):
        for pairs in (False, True):
            cases = tuple(
                dataclasses.replace(case, deterministic=deterministic) if not full else case
                for case in chosen
                if _in_pairs(arch, case, gradients) == pairs
                and (not full or not gradients or case.deterministic == deterministic)
            )
            name = "forward" if not gradients else "backward"
            if gradients:
                name += ", deterministic" if deterministic else ", fast"
            if arch == BLACKWELL:
                name += ", pairs of CTAs" if pairs else ", one CTA"
            if cases:
                found.append(Family(name, gradients, cases))
    return tuple(found)


def _in_pairs(arch: str, case: Case, gradients: bool) -> bool:
    """Returns whether a pair of CTAs runs the case's last kernel."""
    tile = head_dim_tile(max(case.head_dim, case.value_dim or 0))
    if arch != BLACKWELL or tile is None or tile <= 128:
        return False
    narrow = backward_value_dim(arch, tile, case.value_dim or case.head_dim) < tile
    return not (gradients and narrow)


def _quick() -> tuple[Case, ...]:
    """Returns two cases per head dim, dense, causal, with padding, grouped heads, several tiles."""
    found = []
    for head_dim in HEAD_DIM_TILES:
        found.append(Case(head_dim=head_dim, heads=(4, 2), query_length=300, key_length=700))
        found.append(
            Case(
                head_dim=head_dim,
                query_length=420,
                key_length=420,
                is_causal=True,
                dtype="fp16" if head_dim == 128 else "bf16",
            )
        )
    narrow = Case(head_dim=192, value_dim=128, query_length=420, key_length=420, is_causal=True)
    return (*found, narrow)


def _emulated() -> tuple[Case, ...]:
    """Returns two cases per head dim, dense with grouped heads and causal with padding."""
    found = []
    for head_dim in HEAD_DIM_TILES:
        sized = functools.partial(Case, batch=1, head_dim=head_dim, query_length=130)
        found.append(sized(heads=(2, 1), key_length=200))
        found.append(
            sized(
                heads=(1, 1),
                key_length=200,
                key_lengths=(170,),
                is_causal=True,
                query_offset=70,
                dtype="fp16" if head_dim == 128 else "bf16",
            )
        )
    return (*found, dataclasses.replace(found[1], head_dim=192, value_dim=128))


def _full() -> tuple[Case, ...]:
    return tuple(case for case in CASES if case.has_kernel)


def run(case: Case, gradients: bool, seed: int) -> Result:
    """Runs the conformance of a case by kernels alone."""
    from fa4_jax.conformance.runner import run_case

    verdicts = run_case(case, seed, "kernel", gradients)
    failures = [f"{v.name}: {v.failure}" for v in verdicts if v.failure]
    worst = max(v.worst / v.worst_allowed for v in verdicts)
    data = {v.name: [v.worst, v.worst_allowed, v.rms, v.rms_allowed] for v in verdicts}
    if failures:
        return Result(Verdict.FALLS, "; ".join(failures), data)
    return Result(Verdict.HOLDS, f"largest error {worst:.2f} of what is allowed", data)
