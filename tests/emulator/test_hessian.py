"""Hessian-vector products on the emulator: kernels under adversarial timing, and end to end.

They take about four minutes of a core.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Hashable, Iterable

import numpy as np
import pytest

from fa4_jax import catalogue
from fa4_jax.conformance.cases import Case
from fa4_jax.key import HESSIAN_PASSES, KernelKey
from kernels.emulator import Policy
from tests import sampling
from tests.emulator import emulated_tangents, mutation_score
from tests.emulator.kernel_conformance import Problem, quantities, targets, verdicts
from tests.emulator.processes import HOW, Gpu

if importlib.util.find_spec("cutlass") is None:
    pytest.skip("the PTX comes from CuTe-DSL, which is not here", allow_module_level=True)

POLICIES = (
    Policy("random", "late", start_order="random", global_races=True),
    Policy("starve", "random", start_order="reversed", global_races=True),
    Policy("in_order", "early", resident_ctas=1),
)
KERNELS = [key for key in catalogue.all_keys() if key.kernel in HESSIAN_PASSES]
TARGETS = [(case, key) for case, key in targets(least=1) if key.kernel in HESSIAN_PASSES]


def _features(case: Case, key: KernelKey) -> Iterable[Hashable]:
    return {*sampling.features(case), key}


@pytest.mark.parametrize(("case", "key"), sampling.sampled(TARGETS, _features))
def test_conforms(case: Case, key: KernelKey, seed: int) -> None:
    problem = Problem(case, key.kernel, key.arch, seed % 2)
    found = verdicts(problem, POLICIES[seed % len(POLICIES)], seed)
    assert len(found) == len(quantities(case, key.kernel))
    assert not [verdict for verdict in found if verdict.failure]


def test_the_cases_reach_every_kernel() -> None:
    assert {key for _, key in TARGETS} == set(KERNELS)


@pytest.mark.parametrize("key", KERNELS, ids=lambda key: key.name)
def test_ctas_start_in_any_order(key: KernelKey) -> None:
    """Bit by bit the same results, whatever CTA starts first and however few there are."""
    launch = mutation_score.problems(key)[1]
    first, *others = (launch.run(policy, 3) for policy in POLICIES)
    for other in others:
        for name, array in first.items():
            assert np.array_equal(other[name], array, True), name


END_TO_END = (
    Case(batch=2, heads=(2, 1), query_length=130, key_length=200),
    Case(
        dtype="fp16",
        head_dim=72,
        batch=2,
        heads=(2, 2),
        query_length=100,
        key_length=190,
        is_causal=True,
        query_offset=(40, 90),
        key_lengths=(150, 0),
        poison=True,
    ),
    Case(head_dim=128, batch=1, heads=(2, 1), query_length=150, key_length=90, window=(60, 10)),
)


@pytest.mark.parametrize("case", END_TO_END, ids=lambda case: case.id)
def test_jvp_of_a_gradient(gpu: Gpu, case: Case, seed: int) -> None:
    found, launches = gpu(emulated_tangents.hessian, case, seed, HOW[seed % len(HOW)])
    assert len(found) == 3
    assert not [verdict for verdict in found if verdict.failure]
    assert launches == ["fwd", "tangent", "hessian_q", "hessian_kv"]


def test_vmap_and_a_gradient_of_a_gradient(gpu: Gpu, seed: int) -> None:
    together, apart = gpu(emulated_tangents.hessians_by_vmap, END_TO_END[0], seed)
    for one, other in zip(together, apart, strict=True):
        assert np.array_equal(one, other)
