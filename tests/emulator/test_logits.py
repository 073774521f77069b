"""Forwards with sinks, largest scores and soft caps, and the gradients of the latter.

The cases of `fa4_jax.conformance`, and numbers at the ends of their ranges.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
from collections.abc import Hashable
from math import inf

import ml_dtypes
import numpy as np
import pytest

from fa4_jax import designs
from fa4_jax.catalogue import ARCHITECTURES
from fa4_jax.conformance.cases import CASES, Case
from fa4_jax.conformance.compare import compare
from fa4_jax.conformance.oracle import REFERENCE_SHIFTS, Inputs, make_inputs, oracle, ordinary
from fa4_jax.designs import DESIGNS
from fa4_jax.key import Pass
from fa4_jax.plan import kernel_keys
from kernels.emulator import Policy
from tests.emulator import attention
from tests.sampling import features, sampled

if importlib.util.find_spec("cutlass") is None:
    pytest.skip("the PTX comes from CuTe-DSL, which is not here", allow_module_level=True)

POLICIES = (Policy("random", "late"), Policy("starve", "random"), Policy("in_order", "early"))

LISTED = tuple(
    (arch, case)
    for arch, case in itertools.product(ARCHITECTURES, CASES)
    if case.has_kernels(arch, Pass.FORWARD) and (case.sinks or case.max_logit or case.soft_cap)
)

SINKS = (-1e30, -200.0, 0.0, 5.0, 200.0, 1e30)


def run(
    case: Case, inputs: Inputs, policy: Policy, seed: int = 0, arch: str = "sm_90a"
) -> dict[str, np.ndarray]:
    """Results of the forward."""
    launch = attention.attention(
        case, inputs, gradients=False, arch=arch, design=DESIGNS[seed % len(DESIGNS)]
    )
    if launch.keys[0].kernel is Pass.FORWARD:
        assert all(key.ranges or key.sinks for key in launch.keys)
        assert all(key.reads_cap for key in launch.keys) or not case.soft_cap
    return launch.run(policy, seed)


def designs_of(arch: str, case: Case) -> tuple[str, ...]:
    """Returns the designs of the backward, of which one is built where no other is chosen."""
    dims = (case.head_dim, case.value_dim or case.head_dim)
    return DESIGNS if designs.has_both(arch, Pass.BACKWARD, dims) else DESIGNS[:1]


def check(case: Case, inputs: Inputs, results: dict[str, np.ndarray], arch: str = "sm_90a") -> None:
    """Fails unless the results are the oracle's."""
    exact, judges = oracle(case, inputs), [ordinary(case, inputs, x) for x in REFERENCE_SHIFTS]
    polynomial = kernel_keys(case.problem, arch)[0][0].polynomial_exp2
    for name in ("output", "lse", *(["max_logit"] if case.max_logit else [])):
        usual = [x[name] for x in judges]
        verdict = compare(name, case.dtype, results[name], exact[name], usual, polynomial)
        assert verdict.failure is None, verdict
    # What nobody wants takes no memory.
    assert case.max_logit or "max_logit" not in results or results["max_logit"].size == 0


def identity(value: str | Case) -> str:
    """Returns how a test is called."""
    return value if isinstance(value, str) else value.id


def features_of(arch: str, case: Case) -> frozenset[Hashable]:
    """Every argument on either architecture, head dims and what scores go through on both."""
    scores = (case.sinks, case.max_logit, case.soft_cap is not None)
    return features(case) | {(arch, case.head_dim, case.value_dim), (arch, scores)}


@pytest.mark.parametrize(("arch", "case"), sampled(LISTED, features_of), ids=identity)
def test_cases(arch: str, case: Case) -> None:
    seed = sum(map(ord, case.id)) % 1000
    inputs = make_inputs(case, seed)
    check(case, inputs, run(case, inputs, POLICIES[seed % len(POLICIES)], seed, arch), arch)


def capped(head_dim: int, masks: tuple[str, ...]) -> Case:
    """A deterministic case of a head dim, with masks."""
    return Case(
        batch=1,
        heads=(2, 1),
        head_dim=head_dim,
        query_length=150,
        key_length=220,
        is_causal=True,
        query_offset=70,
        masks=masks,
        soft_cap=3.0,
        deterministic=True,
    )


OF_HEAD_DIMS = (
    capped(64, ("unsorted",)),
    capped(128, ("scattered",)),
    capped(192, ("segments",)),
    dataclasses.replace(capped(192, ("segments",)), value_dim=128),
    capped(256, ()),
)

CAPPED = tuple(
    (arch, design, case)
    for arch in ARCHITECTURES
    for case in (
        *(
            x
            for which, x in LISTED
            if which == arch and x.soft_cap and x.has_kernels(arch, Pass.BACKWARD)
        ),
        *OF_HEAD_DIMS,
    )
    for design in designs_of(arch, case)
)


@pytest.mark.parametrize(
    ("arch", "design", "case"),
    sampled(CAPPED, lambda arch, design, case: features_of(arch, case) | {(arch, design)}),
    ids=identity,
)
def test_gradients_of_capped_scores(arch: str, design: str, case: Case) -> None:
    seed = sum(map(ord, case.id)) % 1000
    inputs = make_inputs(case, seed)
    launch = attention.attention(case, inputs, arch=arch, design=design)
    *forward, before, main, after = launch.keys
    assert [key.reads_cap for key in (before, main, after)] == [False, True, False]
    assert forward[0].reads_cap == (forward[0].kernel is Pass.FORWARD)
    results = launch.run(POLICIES[seed % len(POLICIES)], seed)
    exact, judges = oracle(case, inputs), [ordinary(case, inputs, x) for x in REFERENCE_SHIFTS]
    for name in ("dq", "dk", "dv"):
        verdict = compare(name, case.dtype, results[name], exact[name], [x[name] for x in judges])
        assert verdict.failure is None, verdict


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_sinks_far_above_and_far_below_all_scores(policy: Policy, arch: str) -> None:
    """No exponential overflows; a row that sees no key has LSE = its sink and output 0."""
    case = Case(
        batch=2,
        heads=(6, 2),
        query_length=100,
        key_length=150,
        query_lengths=(90, 100),
        key_lengths=(150, 0),
        masks=("segments",),
        sinks=True,
    )
    sinks = np.array(SINKS, np.float32)
    inputs = dataclasses.replace(make_inputs(case, 0), sinks=sinks)
    results = run(case, inputs, policy, arch=arch)
    check(case, inputs, results, arch)
    np.testing.assert_allclose(results["lse"][1], np.tile(sinks, (100, 1)).T, rtol=2e-7)
    assert (results["output"][1] == 0).all() and (results["output"][0, 90:] == 0).all()
    assert (results["lse"][0, :, 90:] == -inf).all()
    assert (results["output"][0, :90, 5] == 0).all()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_sinks_alone(arch: str, dtype: str) -> None:
    """Kernels for sinks begin with them: float16 has no normal numbers far below one, and a sink
    of any size is a reference whose multiple is rounded."""
    sinks = np.array([*SINKS, 8.0, 12.0, -3e8, 3e8, 7e10, 1.1e13, -1.3e17, 1.7e24], np.float32)
    case = Case(
        batch=2,
        heads=(len(sinks), 2),
        query_length=100,
        key_length=150,
        query_offset=50,
        query_lengths=(90, 100),
        key_lengths=(150, 0),
        is_causal=True,
        scale=0.1,
        dtype=dtype,
        sinks=True,
    )
    inputs = dataclasses.replace(make_inputs(case, 0), sinks=sinks)
    results = run(case, inputs, POLICIES[0], arch=arch)
    check(case, inputs, results, arch)
    # A sink is a reference and a weight in units of log2, whose sum is rounded.
    found = results["lse"][1]
    np.testing.assert_allclose(found, np.tile(sinks, (100, 1)).T, rtol=2e-7, atol=5e-7)
    assert (results["output"][1] == 0).all() and (results["lse"][0, :, 90:] == -inf).all()


def test_a_sink_of_minus_infinity_is_none() -> None:
    case = Case(batch=1, heads=(1, 1), query_length=100, key_length=300, max_logit=True)
    inputs = make_inputs(case, 0)
    none = run(case, inputs, POLICIES[0])
    below = dataclasses.replace(inputs, sinks=np.array([-inf], np.float32))
    found = run(dataclasses.replace(case, sinks=True), below, POLICIES[0])
    for name, value in none.items():
        np.testing.assert_array_equal(found[name], value)


def test_an_infinite_sink_and_nan_are_not_hidden() -> None:
    case = Case(batch=1, heads=(3, 1), query_length=70, key_length=130, sinks=True)
    inputs = make_inputs(case, 0)
    sinks = np.array([0.0, np.nan, inf], np.float32)
    results = run(case, dataclasses.replace(inputs, sinks=sinks), POLICIES[0])
    assert np.isfinite(results["lse"][0, 0]).all()
    assert np.isnan(results["lse"][0, 1:]).all()


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_largest_scores_below_zero(arch: str) -> None:
    """As integers the bits of negative numbers are in the opposite order."""
    case = Case(batch=2, heads=(2, 1), query_length=200, key_length=300, max_logit=True)
    inputs = make_inputs(case, 0)
    inputs = dataclasses.replace(inputs, query=np.abs(inputs.query), key=-np.abs(inputs.key))
    results = run(case, inputs, POLICIES[1], arch=arch)
    assert (results["max_logit"] < 0).all()
    check(case, inputs, results, arch)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_nan_is_the_largest_score_of_its_head(arch: str) -> None:
    case = Case(batch=1, heads=(2, 2), query_length=200, key_length=300, max_logit=True)
    inputs = make_inputs(case, 0)
    inputs.query[0, 130, 1, 3] = np.nan
    found = run(case, inputs, POLICIES[2], arch=arch)["max_logit"]
    assert np.isfinite(found[0, 0]) and np.isnan(found[0, 1])


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("soft_cap", [1e-3, 1e4, 1e30])
def test_caps_far_from_the_scores(soft_cap: float, arch: str) -> None:
    """Errors are relative to the scores, not to the cap: a large cap is none."""
    case = Case(batch=1, heads=(2, 1), query_length=100, key_length=200, soft_cap=soft_cap)
    case = dataclasses.replace(case, max_logit=True, magnitude=2.0)
    inputs = make_inputs(case, 0)
    results = run(case, inputs, POLICIES[0], arch=arch)
    check(case, inputs, results, arch)
    if soft_cap == 1e30:
        check(dataclasses.replace(case, soft_cap=None), inputs, results, arch)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_infinite_scores_are_capped(arch: str) -> None:
    """A product that overflows has the score cap or -cap."""
    case = Case(batch=1, heads=(1, 1), query_length=70, key_length=130, soft_cap=3.0)
    case = dataclasses.replace(case, max_logit=True)
    inputs = make_inputs(case, 0)
    huge = np.array(3e38, ml_dtypes.bfloat16)
    inputs = dataclasses.replace(inputs, query=np.copysign(huge, inputs.query))
    inputs.query[..., 1:] = 0
    results = run(case, inputs, POLICIES[0], arch=arch)
    assert np.isfinite(results["lse"]).all()
    np.testing.assert_allclose(results["max_logit"], 3.0, rtol=1e-6)
