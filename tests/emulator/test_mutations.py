"""Broken copies of the kernels are noticed: one wait, fence, arrival or count changed or moved.

All changes of Hopper's forward and postprocessing; of the others some, at random, so that in time
every one is tried. `python -m tests.emulator.mutation_score` takes all of all kernels;
docs/emulator/proof.md has its result, and proves redundant what survives.
"""

from __future__ import annotations

import importlib.util
from collections import Counter

import numpy as np
import pytest

from fa4_jax import catalogue, designs
from fa4_jax.key import KernelKey, Pass
from tests.emulator import attention, kernel_conformance, mutation_cases, mutation_score
from tests.emulator.mutations import Mutation, moved, mutations, notices
from tests.emulator.survivors import MOVED_SURVIVORS, SURVIVORS

if importlib.util.find_spec("cutlass") is None:
    pytest.skip("the PTX comes from CuTe-DSL, which is not here", allow_module_level=True)

KEYS = {key.name: key for key in catalogue.all_keys()}
SOME, SHARES = 2, 6


def surviving(key: KernelKey, chosen: list[Mutation]) -> Counter[str]:
    """Kinds of the mutations that nothing notices."""
    trials = mutation_score.Trials(key)
    return Counter(mutation.kind for mutation in chosen if not notices(trials, mutation)[0])


def test_guarded_instructions_are_changed() -> None:
    arrive = "@%p1 mbarrier.arrive.shared::cta.b64 _, [%r1];"
    release = "@leader red.release.gpu.global.add.s32 [%rd1], 1;"
    assert [mutation.text for mutation in mutations(arrive)] == [""]
    relaxed = "@leader red.relaxed.gpu.global.add.s32 [%rd1], 1;"
    assert [mutation.text for mutation in mutations(release)] == ["", relaxed]


@pytest.mark.parametrize(
    "name", ["sm_90a_fwd_bf16_d64", "sm_90a_fwd_join_bf16_d64", "sm_90a_bwd_post_bf16_d64"]
)
def test_all_broken_kernels_are_noticed(name: str) -> None:
    broken = list(mutations(attention.ptx(KEYS[name]).text))
    left = surviving(KEYS[name], broken)
    print(f"{name}: {len(broken) - left.total()} of {len(broken)} noticed, left: {left}")
    assert left == SURVIVORS[name]
    assert left.total() <= max(0.05 * len(broken), 1)


@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize(
    "name",
    [
        "sm_90a_bwd_bf16_d64_deterministic",
        "sm_100f_fwd_bf16_d128",
        "sm_100f_bwd_bf16_d64_deterministic",
    ],
)
def test_some_broken_kernels_are_noticed(name: str, share: int, rng: np.random.Generator) -> None:
    """One mutation each of some kinds of which not all survive; a survivor takes every trial.

    A case draws from its share of the kinds, so that `make test` has time for one.
    """
    survivors, kinds = SURVIVORS[name], {}
    for mutation in mutations(attention.ptx(KEYS[name]).text):
        kinds.setdefault(mutation.kind, []).append(mutation)
    noticed = [kind for kind, found in kinds.items() if len(found) > survivors[kind]]
    assert len(noticed) >= 20
    chosen = [
        kinds[kind][rng.integers(len(kinds[kind]))]
        for kind in rng.choice(noticed[share::SHARES], SOME, replace=False)
    ]
    assert surviving(KEYS[name], chosen) <= survivors


def test_moved_instructions_are_noticed() -> None:
    name = "sm_90a_bwd_post_bf16_d64"
    left = surviving(KEYS[name], list(moved(attention.ptx(KEYS[name]).text)))
    assert left == MOVED_SURVIVORS[name]


FENCES = 7


# Nothing notices the second, so that it takes every trial.
@pytest.mark.parametrize(
    "number", [pytest.param(i, marks=[pytest.mark.slow] if i == 1 else []) for i in range(FENCES)]
)
def test_every_proxy_fence_of_a_backward_is_needed(number: int) -> None:
    """A backward fences cleared padding and dQ, the dQ that it stages, dS and its results.

    A fence with its stores right before it is moved before them; each other one is removed. Nothing
    notices that of the reduce warp, which waits for zeros (docs/emulator/proof.md says why it is
    there).
    """
    name = "sm_90a_bwd_bf16_d128"
    ptx = attention.ptx(KEYS[name]).text
    fences = {
        mutation.line: mutation
        for mutation in mutations(ptx)
        if mutation.kind.startswith("removed: fence.proxy")
    }
    too_early = {
        mutation.line: mutation
        for mutation in moved(ptx)
        if mutation.kind.startswith("moved up") and ": fence.proxy" in mutation.kind
    }
    assert len(fences) == FENCES and len(too_early) == 5
    changed = [mutation for _, mutation in sorted((fences | too_early).items())]
    survives = [x.kind == "removed: fence.proxy.async.global" for x in changed]
    assert survives.index(True) == 1 and survives.count(True) == 1
    left = surviving(KEYS[name], [changed[number]])
    assert left.total() == survives[number]


def _of_one_plan(key: KernelKey) -> bool:
    """Whether a forward is what its problems' calls launch, with `numerics` as they are."""
    return key.kernel is Pass.FORWARD and not (key.paged or key.polynomial_exp2)


OF_ONE_PLAN = list(filter(_of_one_plan, catalogue.all_keys()))


@pytest.mark.parametrize("key", OF_ONE_PLAN, ids=lambda key: key.name)
def test_a_forwards_problems_launch_it(key: KernelKey) -> None:
    design = designs.design_of(key)
    for case in mutation_cases.cases(key):
        assert kernel_conformance.key_of(case, key.kernel, key.arch, design) == key, case.id


OF_PAGES = [key for key in catalogue.all_keys() if key.kernel is Pass.FORWARD and key.paged]


@pytest.mark.parametrize("key", OF_PAGES, ids=lambda key: key.name)
def test_a_paged_forwards_problems_launch_it(key: KernelKey) -> None:
    for case in mutation_cases.cases(key):
        problem = kernel_conformance.Problem(
            case, key.kernel, key.arch, 0, designs.design_of(key), paged=True
        )
        assert kernel_conformance.launches_of(problem).keys == (key,), case.id
