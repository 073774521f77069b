"""Kernels with ranges of keys in memory: segments, prefixes, chunks, windows of the run.

The cases of `fa4_jax.conformance` with masks, and random arrays of any int32.
"""

from __future__ import annotations

import dataclasses
import importlib.util

import jax.numpy as jnp
import numpy as np
import pytest

from fa4_jax import api, designs, launches, masks
from fa4_jax.conformance import runner
from fa4_jax.conformance.cases import CASES, Case
from fa4_jax.conformance.compare import compare
from fa4_jax.conformance.oracle import REFERENCE_SHIFTS, Inputs, make_inputs, oracle, ordinary
from fa4_jax.key import Pass
from kernels.emulator import Policy
from tests.emulator import attention

if importlib.util.find_spec("cutlass") is None:
    pytest.skip("the PTX comes from CuTe-DSL, which is not here", allow_module_level=True)

POLICIES = (Policy("random", "late"), Policy("starve", "random"), Policy("in_order", "early"))

MASKED = tuple(case for case in CASES if case.masks and case.has_kernels("sm_90a", Pass.BACKWARD))

SAMPLE = tuple(
    dict.fromkeys(
        next(case for case in MASKED if name in case.masks and case.head_dim == head_dim)
        for name, head_dim in (
            ("segments", 64),
            ("segments", 128),
            ("scattered", 96),
            ("prefix", 128),
            ("window", 192),
            ("segments", 256),
        )
    )
)


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
    first, *others = (
        launch.run(dataclasses.replace(policy, start_order=order, ordered_reductions=True), seed)
        for seed, (policy, order) in enumerate(
            zip(POLICIES, ("index", "reversed", "random"), strict=True)
        )
    )
    check(case, inputs, first, launch)
    for results in others:
        for name in ("dq", "dk", "dv"):
            np.testing.assert_array_equal(results[name], first[name], err_msg=name)


@pytest.mark.parametrize(("arch", "design"), KERNELS)
@pytest.mark.parametrize("case", SAMPLE, ids=lambda case: case.id)
def test_masks(case: Case, arch: str, design: str) -> None:
    if design == "pair" and not designs.has_both(
        arch, Pass.FORWARD, (case.head_dim, case.head_dim)
    ):
        pytest.skip("one design")
    seed = sum(map(ord, case.id)) % 1000
    inputs = make_inputs(case, seed)
    launch = attention.attention(case, inputs, True, arch, design)
    assert [key.ranges for key in launch.keys] == [True, False, True, False]
    assert launch.keys[0].pair == (design == "pair")
    check(case, inputs, launch.run(POLICIES[seed % len(POLICIES)], seed), launch)


@pytest.mark.parametrize(
    ("arch", "design", "head_dim"),
    [
        *(("sm_90a", "single", d) for d in (64, 128, 192)),
        *(("sm_100f", "single", d) for d in (128, 256)),
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
    case = Case(query_length=200, key_length=260, masks=("segments",))
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
    results = dataclasses.replace(launch, arrays=arrays).run(POLICIES[0], 0)

    j = np.arange(260)
    seen = (np.asarray(low)[..., None] <= j) & (j < np.asarray(high)[..., None])
    seen &= np.asarray(query_ids)[..., None] == np.asarray(key_ids)[:, None]
    seen &= np.asarray(query_ids)[..., None] >= 0
    dense = dataclasses.replace(case, masks=(), mask=(2, 1, 200, 260))
    inputs = dataclasses.replace(inputs, masks={}, mask=seen[:, None])
    assert (~seen.any(-1)).any() and seen.any()
    check(dense, inputs, results, launch)
