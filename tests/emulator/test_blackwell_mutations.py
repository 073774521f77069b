"""Broken copies of the Blackwell kernels are noticed: some mutations, others each time.

`python -m tests.emulator.mutation_score` takes all of them; docs/notes/emulator.md has its result.
About 45 s of a core.
"""

from __future__ import annotations

import importlib.util
from collections import Counter

import numpy as np
import pytest

from fa4_jax import catalogue
from fa4_jax.key import KernelKey
from tests.emulator import attention, mutation_score
from tests.emulator.mutations import mutations, notices

if importlib.util.find_spec("cutlass") is None:
    pytest.skip("the PTX comes from CuTe-DSL, which is not here", allow_module_level=True)

KEYS = {key.name: key for key in catalogue.keys("sm_100f")}
SOME = 12


@pytest.mark.parametrize(
    "key",
    [KEYS["sm_100f_fwd_bf16_d128"], KEYS["sm_100f_bwd_bf16_d64_deterministic"]],
    ids=lambda key: key.name,
)
def test_broken_kernels_are_noticed(key: KernelKey, rng: np.random.Generator) -> None:
    """One mutation each of some kinds; what survives takes every trial."""
    survivors = mutation_score.SURVIVORS[key.name]
    kinds: dict[str, list] = {}
    for mutation in mutations(attention.ptx(key).text):
        kinds.setdefault(mutation.kind, []).append(mutation)
    noticed = [kind for kind, found in kinds.items() if len(found) > survivors[kind]]
    assert len(noticed) >= 25
    chosen = [
        kinds[kind][rng.integers(len(kinds[kind]))]
        for kind in rng.choice(noticed, SOME, replace=False)
    ]
    trials = mutation_score.trials(key, mutation_score.cases(key), mutation_score.policies(key))
    surviving = Counter(mutation.kind for mutation in chosen if not notices(trials, mutation))
    assert surviving <= survivors
