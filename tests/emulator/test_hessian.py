"""Hessian-vector products on the emulator: kernels under adversarial timing, and end to end.

They take about two minutes of a core.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Hashable, Iterable

import numpy as np
import pytest

from fa4_jax import catalogue
from fa4_jax.conformance.cases import Case
from fa4_jax.key import HESSIAN_PASSES, KernelKey
from tests import sampling
from tests.emulator import emulated_tangents, mutation_cases, mutation_score
from tests.emulator.kernel_conformance import ADVERSARIES, Problem, quantities, targets, verdicts
from tests.emulator.processes import HOW, Gpu

if importlib.util.find_spec("cutlass") is None:
    pytest.skip("the PTX comes from CuTe-DSL, which is not here", allow_module_level=True)

KERNELS = [key for key in catalogue.all_keys() if key.kernel in HESSIAN_PASSES]
TARGETS = [(case, key) for case, key in targets(least=1) if key.kernel in HESSIAN_PASSES]


def _features(case: Case, key: KernelKey) -> Iterable[Hashable]:
    return {*sampling.features(case), sampling.alike(key)}


def _first(key: KernelKey) -> bool:
    return key.dtype == "bf16" and key.band and key.head_dim == 64


@pytest.mark.parametrize(("case", "key"), sampling.sampled(TARGETS, _features))
def test_conforms(case: Case, key: KernelKey, seed: int) -> None:
    problem = Problem(case, key.kernel, key.arch, seed % 2)
    found = verdicts(problem, ADVERSARIES[seed % len(ADVERSARIES)], seed)
    assert len(found) == len(quantities(case, key.kernel))
    assert not [verdict for verdict in found if verdict.failure]


def test_the_cases_reach_every_kernel() -> None:
    assert {key for _, key in TARGETS} == set(KERNELS)


@pytest.mark.parametrize("key", sampling.only(KERNELS, _first))
def test_ctas_start_in_any_order(key: KernelKey) -> None:
    """Bit by bit the same results, whatever CTA starts first and however few there are."""
    launch = mutation_score.problem(key, mutation_cases.cases(key)[1])
    first, *others = (launch.run(policy, 3) for policy in ADVERSARIES)
    for other in others:
        for name, array in first.items():
            assert np.array_equal(other[name], array, True), name


@pytest.mark.parametrize("case", emulated_tangents.CASES, ids=lambda case: case.id)
def test_jvp_of_a_gradient(gpu: Gpu, case: Case, seed: int) -> None:
    found, launches = gpu(emulated_tangents.hessian, case, seed, HOW[seed % len(HOW)])
    assert len(found) == 3
    assert not [verdict for verdict in found if verdict.failure]
    assert launches == ["fwd", "tangent", "hessian_q", "hessian_kv"]


@pytest.mark.slow
def test_vmap_and_a_gradient_of_a_gradient(gpu: Gpu, seed: int) -> None:
    together, apart = gpu(emulated_tangents.hessians_by_vmap, emulated_tangents.CASES[0], seed)
    for one, other in zip(together, apart, strict=True):
        assert np.array_equal(one, other)
