"""Broken copies of the Blackwell forward are noticed: one mutation of every kind.

`python -m tests.emulator.blackwell_mutations` takes all of them; docs/notes/emulator.md has its
result.
"""

from __future__ import annotations

import importlib.util
from collections import Counter, defaultdict

import pytest

from tests.emulator import blackwell_mutations
from tests.emulator.mutations import Mutation, notices

if importlib.util.find_spec("cutlass") is None:
    pytest.skip("the PTX comes from CuTe-DSL, which is not here", allow_module_level=True)


def sample(mutations: list[Mutation]) -> list[Mutation]:
    """Of every kind the one in the middle."""
    kinds = defaultdict(list)
    for mutation in mutations:
        kinds[mutation.kind].append(mutation)
    return [some[len(some) // 2] for some in kinds.values()]


@pytest.mark.parametrize("head_dim", [128, 256])
def test_broken_kernels_are_noticed(head_dim: int) -> None:
    _, padded = blackwell_mutations.cases(head_dim, band=False)
    trials = blackwell_mutations.trials([padded], blackwell_mutations.POLICIES[:2])
    chosen = sample(blackwell_mutations.broken(trials))
    surviving = Counter(mutation.kind for mutation in chosen if not notices(trials, mutation))
    assert len(chosen) >= 25
    assert surviving <= blackwell_mutations.SURVIVORS[head_dim]
