"""Tangents on the emulator: the kernels alone under adversarial timing, and jax.jvp end to end.

They take about four minutes of a core.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Hashable, Iterable

import numpy as np
import pytest

from fa4_jax import catalogue
from fa4_jax.conformance.cases import Case
from fa4_jax.key import KernelKey, Pass
from tests import sampling
from tests.emulator import emulated_tangents, mutation_cases, mutation_score
from tests.emulator.kernel_conformance import ADVERSARIES, Problem, targets, verdicts
from tests.emulator.processes import HOW, Gpu

if importlib.util.find_spec("cutlass") is None:
    pytest.skip("the PTX comes from CuTe-DSL, which is not here", allow_module_level=True)

KERNELS = [key for key in catalogue.all_keys() if key.kernel is Pass.TANGENT]
TARGETS = [(case, key) for case, key in targets(least=1) if key.kernel is Pass.TANGENT]


def _features(case: Case, key: KernelKey) -> Iterable[Hashable]:
    return {*sampling.features(case), sampling.alike(key)}


def _first_and_last(key: KernelKey) -> bool:
    """The narrowest and the widest tile, whose kernels are arranged differently."""
    return key.dtype == "bf16" and key.band and key.head_dim in (64, 256)


@pytest.mark.parametrize(("case", "key"), sampling.sampled(TARGETS, _features))
def test_conforms(case: Case, key: KernelKey, seed: int) -> None:
    problem = Problem(case, Pass.TANGENT, key.arch, seed % 2)
    found = verdicts(problem, ADVERSARIES[seed % len(ADVERSARIES)], seed)
    assert len(found) == 2
    assert not [verdict for verdict in found if verdict.failure]


def test_the_cases_reach_every_kernel() -> None:
    assert {key for _, key in TARGETS} == set(KERNELS)


@pytest.mark.slow
@pytest.mark.parametrize("key", sampling.only(KERNELS, _first_and_last))
def test_ctas_start_in_any_order(key: KernelKey) -> None:
    """Bit by bit the same results, whatever CTA starts first and however few there are."""
    launch = mutation_score.problem(key, mutation_cases.cases(key)[1])
    first, *others = (
        dataclasses.replace(launch, multiprocessors=ctas).run(policy, 3)
        for ctas, policy in zip((1, 2, 3), ADVERSARIES, strict=True)
    )
    for other in others:
        for name, array in first.items():
            assert np.array_equal(other[name], array, True), name


@pytest.fixture(params=["gpu", "blackwell"])
def device(request: pytest.FixtureRequest) -> Gpu:
    """Calls functions in a process whose GPU is an emulated Hopper, or Blackwell."""
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("case", emulated_tangents.CASES, ids=lambda case: case.id)
def test_jvp(device: Gpu, case: Case, seed: int) -> None:
    found = device(emulated_tangents.verdicts, case, seed, HOW[seed % len(HOW)])
    assert len(found) == 2
    assert not [verdict for verdict in found if verdict.failure]


@pytest.mark.slow
def test_vmap_and_linearize(device: Gpu, seed: int) -> None:
    together, apart = device(emulated_tangents.vmapped_and_looped, emulated_tangents.CASES[0], seed)
    for one, other in zip(together, apart, strict=True):
        assert np.array_equal(one, other)


def test_a_gradient_over_a_stopped_tangent(
    device: Gpu, request: pytest.FixtureRequest, seed: int
) -> None:
    """The launches are those of a forward, its tangents and a backward: no more."""
    found, expected, launches = device(emulated_tangents.meanflow, emulated_tangents.CASES[0], seed)
    assert np.abs(found - expected).max() <= 0.03 * np.abs(expected).max()
    blackwell = "blackwell" in request.node.callspec.id
    arch, forward = ("sm_100f", "d64_polynomial_exp2") if blackwell else ("sm_90a", "d64")
    assert launches == [
        f"{arch}_fwd_bf16_{forward}",
        f"{arch}_tangent_bf16_d64",
        f"{arch}_bwd_pre_bf16_d64",
        f"{arch}_bwd_bf16_d64",
        f"{arch}_bwd_post_bf16_d64",
    ]
