"""The selftest by kernel family: forward before backward, one CTA before pairs, fast before
deterministic, then the designs that no call gets unless it asks (`fa4_jax.designs`). Each case is
small, since the first question is which kernels work at all."""

from __future__ import annotations

import contextlib
import dataclasses
import functools

from benchmarks.day_one.litmus import BLACKWELL
from benchmarks.day_one.outcome import Result, Verdict
from fa4_jax import designs
from fa4_jax.conformance.cases import CASES, Case
from fa4_jax.key import HEAD_DIM_TILES, Pass, head_dim_tile, value_dim_tile


@dataclasses.dataclass(frozen=True)
class Family:
    """The cases that one kind of kernel runs.

    Attributes:
      gradients: whether the backward runs, too.
      other_design: whether its last pass runs the design that was not chosen.
    """

    name: str
    gradients: bool
    cases: tuple[Case, ...]
    other_design: bool = False


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
                others = tuple(case for case in cases if _other_design(arch, case, gradients))
                if others:
                    found.append(Family(f"{name}: the other design", gradients, others, True))
    return tuple(found)


def _tiles(arch: str, case: Case, gradients: bool) -> tuple[Pass, tuple[int, int]] | None:
    """Returns the last pass of a case and the head dims of its tiles."""
    tile = head_dim_tile(max(case.head_dim, case.value_dim or 0))
    if tile is None:
        return None
    kernel = Pass.BACKWARD if gradients else Pass.FORWARD
    return kernel, (tile, value_dim_tile(arch, kernel, tile, case.value_dim or case.head_dim))


def _other_design(arch: str, case: Case, gradients: bool) -> str | None:
    """Returns the design that a case's last pass has and does not run unasked, or None."""
    tiles = _tiles(arch, case, gradients)
    if tiles is None or not designs.has_both(arch, *tiles):
        return None
    return designs.SINGLE if designs.is_pair(arch, *tiles, None) else designs.PAIR


def _in_pairs(arch: str, case: Case, gradients: bool) -> bool:
    """Returns whether a pair of CTAs runs the case's last kernel."""
    tiles = _tiles(arch, case, gradients)
    if arch != BLACKWELL or tiles is None:
        return False
    if designs.has_both(arch, *tiles):
        return designs.is_pair(arch, *tiles, None)
    (head_dim, value_dim) = tiles[1]
    return head_dim > 128 and head_dim == value_dim


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


def run(case: Case, family: Family, arch: str, seed: int) -> Result:
    """Runs the conformance of a case of a family by kernels alone."""
    from fa4_jax.conformance.runner import run_case

    other = _other_design(arch, case, family.gradients) if family.other_design else None
    with contextlib.nullcontext() if other is None else designs.asking(other):
        verdicts = run_case(case, seed, "kernel", family.gradients)
    failures = [f"{v.name}: {v.failure}" for v in verdicts if v.failure]
    worst = max(v.worst / v.worst_allowed for v in verdicts)
    data = {v.name: [v.worst, v.worst_allowed, v.rms, v.rms_allowed] for v in verdicts}
    if failures:
        return Result(Verdict.FALLS, "; ".join(failures), data)
    return Result(Verdict.HOLDS, f"largest error {worst:.2f} of what is allowed", data)
