"""Biases on the emulator: kernels under adversarial timing, and jax.grad end to end.

They take about four minutes of a core.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Any

import numpy as np
import pytest

from fa4_jax import catalogue
from fa4_jax.conformance.cases import MASKED_BIASES, Case
from fa4_jax.conformance.compare import compare
from fa4_jax.conformance.oracle import REFERENCE_SHIFTS, Inputs, make_inputs, oracle, ordinary
from fa4_jax.key import KernelKey, Pass
from kernels.emulator import Policy
from tests import sampling
from tests.emulator import attention, emulated_gpu, mutation_cases, mutation_score, mutations
from tests.emulator.kernel_conformance import ADVERSARIES, Problem, targets, verdicts
from tests.emulator.processes import HOW, Gpu

if importlib.util.find_spec("cutlass") is None:
    pytest.skip("the PTX comes from CuTe-DSL, which is not here", allow_module_level=True)


def _reads_bias(key: KernelKey) -> bool:
    return key.bias or key.kernel is Pass.BIAS_GRADIENT


KERNELS = {key for key in catalogue.all_keys() if _reads_bias(key)}
TARGETS = [(case, key) for case, key in targets(least=1) if _reads_bias(key)]


def _features(case: Case, key: KernelKey) -> Iterable[Hashable]:
    """Every argument, and each head dim and form of a bias for a pass of an architecture."""
    of_pass = ((key.head_dim, key.value_dim), (case.bias_form, case.bias_kind))
    return {*sampling.features(case), *((key.arch, key.kernel, x) for x in of_pass)}


@pytest.mark.parametrize(("case", "key"), sampling.sampled(TARGETS, _features))
def test_conforms(case: Case, key: KernelKey, seed: int) -> None:
    problem = Problem(case, key.kernel, key.arch, seed % 2)
    found = verdicts(problem, ADVERSARIES[seed % len(ADVERSARIES)], seed)
    assert found
    assert not [verdict for verdict in found if verdict.failure]


def test_the_cases_reach_every_kernel() -> None:
    assert {key for _, key in TARGETS} == KERNELS


OF_GRADIENTS = [key for key in KERNELS if key.kernel is Pass.BIAS_GRADIENT]


PROBLEMS = [(key, case) for key in sorted(OF_GRADIENTS) for case in mutation_cases.cases(key)]


@pytest.mark.parametrize(
    ("key", "case"),
    [
        pytest.param(
            *pair,
            marks=[]
            if pair[0].dtype == "bf16" and pair[0].head_dim == 64
            else pytest.mark.every_case,
            id=f"{pair[0].name}-{pair[1].id}",
        )
        for pair in PROBLEMS
    ],
)
def test_gradients_have_the_same_bits_in_any_order(key: KernelKey, case: Case) -> None:
    launch = mutation_score.problem(key, case)
    first, *others = (launch.run(policy, 3)["dbias"] for policy in ADVERSARIES)
    assert np.abs(first.astype(np.float32)).max() > 0
    for other in others:
        np.testing.assert_array_equal(other, first)


# What each kernel has around its copies: starts, waits, and lanes that meet before and after they
# load; the forward also waits for the output's memory.
COPIES = {
    "sm_90a_fwd_bf16_d128_band_bias": (
        -1,
        {"bar.warp.sync": 2, "cp.async.bulk.wait_group.read": 1},
    ),
    "sm_90a_bwd_bf16_d128_band_bias_deterministic": (0, {"bar.warp.sync": 2}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COPIES)
def test_what_orders_copies_of_a_dense_bias_is_missed(name: str) -> None:
    """Everything that a warp waits for around the copies of a bias, removed one at a time."""
    problem, expected = COPIES[name]
    (key,) = (key for key in KERNELS if key.name == name)
    text = attention.ptx(key).text
    lines = list(enumerate(text.split("\n"), 1))
    copies = [n for n, line in lines if "cp.async.cg" in line]
    waits = [n for n, line in lines if "cp.async.wait_group" in line]
    launch = mutation_score.problem(key, mutation_cases.cases(key)[problem])
    trial = mutations.Trial(launch, launch.run(Policy()), mutation_score.policies(key)[0], 0)
    found = {}
    for change in mutations.mutations(text, counts=False):
        if not (
            match := re.match(r"removed: (cp\.async\.[a-z_.]*|bar\.(?:warp\.)?sync)", change.change)
        ):
            continue
        near_copy = any(-10 < copy - change.line < 60 for copy in copies)
        near_wait = any(-60 < change.line - wait < 100 for wait in waits)
        if near_copy or near_wait:
            found[change.line, match[1]] = mutations.notices([trial], change)[0]
    kinds = Counter(kind for _, kind in found)
    assert kinds["cp.async.commit_group"] == 2 and kinds["cp.async.wait_group"] == 1
    assert {kind: kinds[kind] for kind in expected} == expected
    assert set(found.values()) <= {"race", "participants", "deadlock"}


SPECIAL = Case(
    batch=1,
    heads=(2, 1),
    query_length=70,
    key_length=150,
    is_causal=True,
    query_offset=80,
    bias=(1, 2, 70, 150),
    deterministic=True,
)


def _all_results(case: Case, inputs: Inputs, arch: str) -> dict[str, np.ndarray]:
    return attention.attention(case, inputs, arch=arch).run(ADVERSARIES[0], 1)


@pytest.mark.parametrize("arch", catalogue.ARCHITECTURES)
def test_minus_infinity_hides(arch: str) -> None:
    """A row of nothing else sees no key: 0 and -inf, and no gradient."""
    inputs = make_inputs(SPECIAL, 0)
    assert inputs.bias is not None
    bias = np.where(np.random.default_rng(0).random(inputs.bias.shape) < 0.3, -np.inf, inputs.bias)
    bias[0, 1, 3] = -np.inf
    inputs = dataclasses.replace(inputs, bias=bias.astype(inputs.bias.dtype))
    results = _all_results(SPECIAL, inputs, arch)
    with np.errstate(all="ignore"):
        exact = oracle(SPECIAL, inputs)
        usual = [ordinary(SPECIAL, inputs, shift) for shift in REFERENCE_SHIFTS]
    for name, expected in exact.items():
        verdict = compare(name, "bf16", results[name], expected, [x[name] for x in usual])
        assert verdict.failure is None, verdict
    assert (results["output"][0, 3, 1] == 0).all() and results["lse"][0, 1, 3] == -np.inf
    assert (results["dbias"][0, 1, 3] == 0).all() and (results["dq"][0, 3, 1] == 0).all()


@pytest.mark.parametrize("number", [-np.inf, np.nan])
def test_far_numbers_that_are_not_finite(number: float) -> None:
    """Keys far before a row have them: -inf hides these, NaN makes every row of the head NaN."""
    case = Case(
        **{"batch": 1, "heads": (2, 1), "query_length": 70, "key_length": 400},
        query_offset=200,
        bias="relative",
    )
    inputs = make_inputs(case, 0)
    assert inputs.bias is not None
    table = inputs.bias.copy()
    table[len(table) // 2 - 1, 1] = number
    results = attention.attention(case, dataclasses.replace(inputs, bias=table)).run(
        ADVERSARIES[0], 1
    )
    plain = attention.attention(case, inputs).run(ADVERSARIES[0], 1)
    np.testing.assert_array_equal(results["output"][:, :, 0], plain["output"][:, :, 0])
    if np.isnan(number):
        assert np.isnan(results["lse"][0, 1]).all() and np.isnan(results["output"][:, :, 1]).all()
        return
    with np.errstate(all="ignore"):
        exact = oracle(case, dataclasses.replace(inputs, bias=table))
    np.testing.assert_allclose(results["lse"], exact["lse"], rtol=1e-5)
    assert (results["lse"][0, 1] < plain["lse"][0, 1]).all()


@pytest.mark.parametrize("arch", catalogue.ARCHITECTURES)
@pytest.mark.parametrize("form", [SPECIAL.bias, "banded"], ids=["dense", "banded"])
def test_nan_stays_in_its_row(form: Any, arch: str) -> None:
    case = dataclasses.replace(SPECIAL, bias=form)
    inputs = make_inputs(case, 0)
    assert inputs.bias is not None
    plain = _all_results(case, inputs, arch)
    bias = inputs.bias.copy()
    bias[0, 1, 5, 7] = np.nan
    found = _all_results(case, dataclasses.replace(inputs, bias=bias), arch)
    rows = np.arange(case.query_length) != 5
    assert np.isnan(found["output"][0, 5, 1]).all() and np.isnan(found["lse"][0, 1, 5])
    for name in ("output", "dq"):
        np.testing.assert_array_equal(found[name][0, rows], plain[name][0, rows])
        np.testing.assert_array_equal(found[name][0, 5, 0], plain[name][0, 5, 0])
    np.testing.assert_array_equal(found["dbias"][0, 1, rows], plain["dbias"][0, 1, rows])


@pytest.fixture(params=["gpu", "blackwell"])
def device(request: pytest.FixtureRequest) -> Gpu:
    """Calls functions in a process whose GPU is an emulated Hopper, or Blackwell."""
    return request.getfixturevalue(request.param)


SMALL = (
    Case(
        batch=2,
        heads=(2, 1),
        query_length=70,
        key_length=150,
        bias=(1, 2, 70, 150),
    ),
    Case(
        batch=2,
        heads=(2, 1),
        query_length=90,
        key_length=130,
        bias="alibi",
        is_causal=True,
        deterministic=True,
    ),
    Case(
        batch=2,
        heads=(4, 2),
        head_dim=128,
        query_length=100,
        key_length=90,
        bias="relative",
        query_offset=(20, -30),
        key_lengths=(90, 50),
        poison=True,
        deterministic=True,
    ),
    Case(
        batch=2,
        heads=(4, 2),
        query_length=90,
        key_length=130,
        bias="banded_both_sides",
        query_offset=(-20, 50),
        key_lengths=(130, 60),
    ),
)
"""Calls from end to end: each form of a bias, with offsets and lengths."""


@pytest.mark.parametrize("case", (*SMALL, *MASKED_BIASES), ids=lambda case: case.id)
def test_grad(device: Gpu, case: Case, seed: int) -> None:
    found = device(emulated_gpu.verdicts, case, seed, HOW[seed % len(HOW)])
    assert [verdict.name for verdict in found] == ["output", "lse", "dq", "dk", "dv", "dbias"]
    assert not [verdict for verdict in found if verdict.failure]


def test_vmap_and_launches(device: Gpu, seed: int) -> None:
    """Calls with biases of their own; and the gradient's kernel runs only where it is asked for."""
    case = dataclasses.replace(SMALL[0], batch=1)
    together, apart, with_bias, without = device(emulated_gpu.vmapped_with_bias, case, seed)
    for one, other in zip(together, apart, strict=True):
        np.testing.assert_array_equal(one, other)
    assert [name for name in with_bias if "bias_grad" in name] and len(with_bias) == 5
    assert not [name for name in without if "bias_grad" in name] and len(without) == 4
