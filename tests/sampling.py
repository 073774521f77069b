"""Which cases `make cover` runs of a test that runs many: few that have every feature between them.

`make test` runs those for which `case_seconds` has time, `make proof` all cases. A choice is the
same on every machine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import pytest

from fa4_jax.conformance.cases import Case
from fa4_jax.key import KernelKey

FLAGS = (
    *("dtype", "is_causal", "numerics", "deterministic", "growing", "opposed", "poison"),
    *("sinks", "max_logit"),
)
OPTIONAL = ("window", "query_lengths", "key_lengths", "scale", "bias", "mask", "soft_cap")


def features(case: Case) -> frozenset[Hashable]:
    """Returns what a case asks for, one argument at a time."""
    found: set[Hashable] = {("head_dims", case.head_dim, case.value_dim)}
    found |= {(name, getattr(case, name)) for name in FLAGS}
    found |= {name for name in OPTIONAL if getattr(case, name) is not None}
    found |= {("masks", name) for name in case.masks}
    found |= {("offset of an entry", isinstance(case.query_offset, tuple))}
    found |= {("grouped heads", case.heads[0] != case.heads[1])}
    return frozenset(found)


def work(case: Case) -> int:
    """Returns how many numbers a case multiplies, to within a factor that is the same for all."""
    scores = case.batch * case.heads[0] * case.query_length * case.key_length
    return scores * (case.head_dim + (case.value_dim or case.head_dim) + 64)


def cover(
    calls: Iterable[tuple[Any, ...]], of: Callable[..., Iterable[Hashable]]
) -> list[tuple[Any, ...]]:
    """Returns calls that have every feature of all: next the one with most new ones for its work.

    Args:
      calls: arguments of a test, of which one is a Case.
      of: the features of a call, given its arguments.
    """
    left = {call: frozenset(of(*call)) for call in calls}
    missing, chosen = frozenset[Hashable]().union(*left.values()), []
    while missing:
        best = max(left, key=lambda call: len(left[call] & missing) / work(_case(call)))
        missing -= left.pop(best)
        chosen.append(best)
    return chosen


def sampled(calls: Iterable[tuple[Any, ...]], of: Callable[..., Iterable[Hashable]]) -> list[Any]:
    """Returns parameters of a test: those out of the cover run with --every-case alone."""
    calls = list(calls)
    chosen = set(cover(calls, of))
    return [
        pytest.param(*call, marks=[] if call in chosen else pytest.mark.every_case)
        for call in calls
    ]


def alike(key: KernelKey) -> KernelKey:
    """The key that stands for those whose kernels differ in the storage type alone."""
    return dataclasses.replace(key, dtype="bf16")


def only(keys: Iterable[KernelKey], chosen: Callable[[KernelKey], bool]) -> list[Any]:
    """Returns parameters of a test of kernels: those not chosen run with --every-case alone."""
    return [
        pytest.param(key, marks=[] if chosen(key) else pytest.mark.every_case, id=key.name)
        for key in keys
    ]


def _case(call: tuple[Any, ...]) -> Case:
    return next(x for x in call if isinstance(x, Case))
