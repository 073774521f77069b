"""Kernels with ranges of keys in memory: segments, prefixes, chunks, windows of the run.

The cases of `fa4_jax.conformance` with masks, and random arrays of any int32.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Hashable

import jax.numpy as jnp
import numpy as np
import pytest

from fa4_jax import api, designs, launches, masks
from fa4_jax.conformance import runner
from fa4_jax.conformance.cases import CASES, Case
from fa4_jax.conformance.compare import compare
from fa4_jax.conformance.oracle import REFERENCE_SHIFTS, Inputs, make_inputs, oracle, ordinary
from fa4_jax.key import Pass
from fa4_jax.plan import kernel_keys
from kernels.emulator import Policy
from tests.emulator import attention
from tests.sampling import features, sampled

if importlib.util.find_spec("cutlass") is None:
    pytest.skip("the PTX comes from CuTe-DSL, which is not here", allow_module_level=True)

POLICIES = (Policy("random", "late"), Policy("starve", "random"), Policy("in_order", "early"))

MASKED = tuple(
    case
    for case in CASES
    if case.problem.has_ranges
    and not case.problem.has_mask
    and case.has_kernels("sm_90a", Pass.BACKWARD)
    and kernel_keys(case.problem, "sm_90a")[0][0].kernel is Pass.FORWARD
)
"""Few rows have a kernel of their own, masks of pairs a test of their own."""

KERNELS = (("sm_90a", "single"), ("sm_100f", "single"), ("sm_100f", "pair"))
"""Architectures and designs, of which the wider heads have one."""


def check(
    case: Case, inputs: Inputs, results: dict[str, np.ndarray], launch: attention.Attention
) -> None:
    """Compares all results with the oracle's."""
    exact, judges = oracle(case, inputs), [ordinary(case, inputs, x) for x in REFERENCE_SHIFTS]
    polynomial = any(key.polynomial_exp2 for key in launch.keys)
    backward = ("dq", "dk", "dv") if len(launch.keys) > 1 else ()
    for name in ("output", "lse", *backward):
        usual = [x[name] for x in judges]
        verdict = compare(name, case.dtype, results[name], exact[name], usual, polynomial)
        assert verdict.failure is None, verdict


def check_same_bits(case: Case, inputs: Inputs, launch: attention.Attention) -> None:
    """Compares results with the oracle, and gradients of several orders of CTAs bit by bit."""
    backward = launch.after(Pass.FORWARD)
    first, *others = (
        backward.run(dataclasses.replace(policy, start_order=order, ordered_reductions=True), seed)
        for seed, (policy, order) in enumerate(
            zip(POLICIES, ("index", "reversed", "random"), strict=True)
        )
    )
    check(case, inputs, first, launch)
    for results in others:
        for name in ("dq", "dk", "dv"):
            np.testing.assert_array_equal(results[name], first[name], err_msg=name)


def has_design(case: Case, arch: str, design: str) -> bool:
    dims = (case.head_dim, case.value_dim or case.head_dim)
    return design == "single" or designs.has_both(arch, Pass.FORWARD, dims)


def features_of(case: Case, arch: str, design: str) -> frozenset[Hashable]:
    """Each mask on either architecture, each head dim and order of sums on both."""
    return features(case) | {(arch, design, x) for x in (case.deterministic, case.head_dim)}


@pytest.mark.parametrize(
    ("case", "arch", "design"),
    sampled(
        [(x, *kernel) for x in MASKED for kernel in KERNELS if has_design(x, *kernel)], features_of
    ),
    ids=lambda x: x.id if isinstance(x, Case) else x,
)
def test_masks(case: Case, arch: str, design: str) -> None:
    seed = sum(map(ord, case.id)) % 1000
    inputs = make_inputs(case, seed)
    launch = attention.attention(case, inputs, True, arch, design)
    assert [key.ranges for key in launch.keys] == [True, False, True, False]
    assert launch.keys[0].pair == (design == "pair")
    check(case, inputs, launch.run(POLICIES[seed % len(POLICIES)], seed), launch)


@pytest.mark.parametrize(
    ("arch", "design", "head_dim"),
    [
        *(("sm_90a", "single", d) for d in (64, 192)),
        pytest.param("sm_90a", "single", 128, marks=pytest.mark.every_case),
        *(pytest.param("sm_100f", "single", d, marks=pytest.mark.every_case) for d in (128, 256)),
        ("sm_100f", "pair", 128),
    ],
)
def test_the_deterministic_backward_gives_the_same_bits(
    arch: str, design: str, head_dim: int
) -> None:
    """Segments that come back, so that key tiles skip query blocks between those they visit."""
    case = Case(
        batch=1,
        heads=(2, 1),
        head_dim=head_dim,
        query_length=330,
        key_length=400,
        is_causal=True,
        query_offset=70,
        masks=("scattered",),
        deterministic=True,
    )
    inputs = make_inputs(case, 3)
    launch = attention.attention(case, inputs, True, arch, design)
    check_same_bits(case, inputs, launch)


@pytest.mark.parametrize(("arch", "design"), KERNELS)
def test_any_int32_gives_a_defined_result(arch: str, design: str) -> None:
    """Tags and ranges of INT_MIN and INT_MAX, and rows whose range ends before it begins."""
    case = Case(heads=(1, 1), query_length=200, key_length=260, masks=("segments",))
    inputs, rng = make_inputs(case, 0), np.random.default_rng(1)
    limits = np.iinfo(np.int32)
    values = np.array([limits.min, -1, 0, 1, 100, 259, limits.max])
    low, high, query_ids = (jnp.asarray(rng.choice(values, (2, 200)), jnp.int32) for _ in range(3))
    key_ids = jnp.asarray(rng.choice(values, (2, 260)), jnp.int32)
    call = runner.call(dataclasses.replace(case, masks=()), dataclasses.replace(inputs, masks={}))
    mask = masks.ranges(low, high) & masks.segments(query_ids, key_ids)
    operands, problem = api.canonicalise(dataclasses.replace(call, mask=mask))
    launch = attention.attention(case, inputs, True, arch, design)
    buffers = launches.forward_buffers(problem, operands, attention.kernel(launch.keys[0]))
    arrays = launch.arrays | {name: np.asarray(x) for name, x in buffers.items()}
    arrays |= {attention.OF_BACKWARD[name]: arrays[name] for name in attention.ROWS}
    results = dataclasses.replace(launch, arrays=arrays).run(POLICIES[0], 0)

    j = np.arange(260)
    seen = (np.asarray(low)[..., None] <= j) & (j < np.asarray(high)[..., None])
    seen &= np.asarray(query_ids)[..., None] == np.asarray(key_ids)[:, None]
    seen &= np.asarray(query_ids)[..., None] >= 0
    dense = dataclasses.replace(case, masks=(), mask=(2, 1, 200, 260))
    inputs = dataclasses.replace(inputs, masks={}, mask=seen[:, None])
    assert (~seen.any(-1)).any() and seen.any()
    check(dense, inputs, results, launch)
