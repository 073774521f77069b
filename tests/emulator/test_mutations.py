"""Broken copies of the kernels are noticed: one wait, fence, arrival or count changed at a time.

All changes of Hopper's forward and postprocessing; of the others some, at random, so that in time
every one is tried. `python -m tests.emulator.mutation_score` takes all of all kernels;
docs/notes/emulator.md has its result, and proves redundant what survives. About 100 s of a core.
"""

from __future__ import annotations

import importlib.util
from collections import Counter

import numpy as np
import pytest

from fa4_jax import catalogue
from fa4_jax.key import KernelKey
from tests.emulator import attention, mutation_score
from tests.emulator.mutations import Mutation, mutations, notices

if importlib.util.find_spec("cutlass") is None:
    pytest.skip("the PTX comes from CuTe-DSL, which is not here", allow_module_level=True)

KEYS = {key.name: key for key in catalogue.all_keys()}
SOME = 12


def surviving(key: KernelKey, chosen: list[Mutation]) -> Counter[str]:
    """Kinds of the mutations that nothing notices."""
    trials = mutation_score.trials(key, mutation_score.cases(key), mutation_score.policies(key))
    return Counter(mutation.kind for mutation in chosen if not notices(trials, mutation))


def test_guarded_instructions_are_changed() -> None:
    arrive = "@%p1 mbarrier.arrive.shared::cta.b64 _, [%r1];"
    release = "@leader red.release.gpu.global.add.s32 [%rd1], 1;"
    assert [mutation.text for mutation in mutations(arrive)] == [""]
    relaxed = "@leader red.relaxed.gpu.global.add.s32 [%rd1], 1;"
    assert [mutation.text for mutation in mutations(release)] == ["", relaxed]


@pytest.mark.parametrize("name", ["sm_90a_fwd_bf16_d64", "sm_90a_bwd_post_bf16_d64"])
def test_all_broken_kernels_are_noticed(name: str) -> None:
    broken = list(mutations(attention.ptx(KEYS[name]).text))
    left = surviving(KEYS[name], broken)
    print(f"{name}: {len(broken) - left.total()} of {len(broken)} noticed, left: {left}")
    assert left == mutation_score.SURVIVORS[name]
    assert left.total() <= max(0.05 * len(broken), 1)


@pytest.mark.parametrize(
    "name",
    [
        "sm_90a_bwd_bf16_d64_deterministic",
        "sm_100f_fwd_bf16_d128",
        "sm_100f_bwd_bf16_d64_deterministic",
    ],
)
def test_some_broken_kernels_are_noticed(name: str, rng: np.random.Generator) -> None:
    """One mutation each of some kinds of which not all survive; a survivor takes every trial."""
    survivors, kinds = mutation_score.SURVIVORS[name], {}
    for mutation in mutations(attention.ptx(KEYS[name]).text):
        kinds.setdefault(mutation.kind, []).append(mutation)
    noticed = [kind for kind, found in kinds.items() if len(found) > survivors[kind]]
    assert len(noticed) >= 20
    chosen = [
        kinds[kind][rng.integers(len(kinds[kind]))]
        for kind in rng.choice(noticed, SOME, replace=False)
    ]
    assert surviving(KEYS[name], chosen) <= survivors
