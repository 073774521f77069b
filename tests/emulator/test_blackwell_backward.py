"""The Blackwell forward and backward on the emulator: right by the oracle, whatever the timing.

About 50 s.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools

import numpy as np
import pytest

from fa4_jax.conformance.cases import Case
from fa4_jax.conformance.compare import compare
from fa4_jax.conformance.oracle import REFERENCE_SHIFTS, make_inputs, oracle, ordinary
from fa4_jax.designs import PAIR, SINGLE
from fa4_jax.key import Pass
from kernels.emulator import Policy
from tests.emulator.attention import attention

if importlib.util.find_spec("cutlass") is None:
    pytest.skip("the PTX comes from CuTe-DSL, which is not here", allow_module_level=True)

POLICIES = (
    Policy("random", "late"),
    Policy("starve", "random", start_order="random"),
    Policy("in_order", "early", start_order="random"),
    Policy("starve", "late", resident_ctas=1, start_order="reversed"),
    Policy("random", "random", start_order="reversed"),
)

_ONE = {"batch": 1, "heads": (1, 1)}
CASES = (
    Case(batch=1, heads=(2, 1), query_length=200, key_length=300),
    Case(**_ONE, query_length=200, key_length=300, growing=True, is_causal=True, query_offset=100),
    Case(
        batch=2,
        heads=(2, 1),
        query_length=150,
        key_length=190,
        query_lengths=(70, 149),
        key_lengths=(0, 130),
        poison=True,
    ),
    Case(**_ONE, query_length=300, key_length=200, head_dim=96, window=(50, 70)),
    Case(**_ONE, query_length=1, key_length=129, head_dim=72, deterministic=True),
    Case(
        batch=1,
        heads=(2, 1),
        query_length=260,
        key_length=260,
        head_dim=128,
        is_causal=True,
        dtype="fp16",
        deterministic=True,
    ),
    Case(**_ONE, query_length=129, key_length=257, head_dim=128, numerics="exact"),
    Case(batch=1, heads=(2, 1), query_length=70, key_length=150, head_dim=256, is_causal=True),
    Case(
        **_ONE,
        query_length=100,
        key_length=190,
        head_dim=192,
        query_lengths=(70,),
        key_lengths=(130,),
        poison=True,
        deterministic=True,
    ),
    Case(batch=1, heads=(2, 1), query_length=70, key_length=300, head_dim=192, value_dim=128),
    Case(
        **_ONE,
        query_length=150,
        key_length=200,
        head_dim=160,
        value_dim=96,
        window=(90, 20),
        key_lengths=(170,),
        poison=True,
        deterministic=True,
    ),
)

PAIR_CASES = (
    Case(batch=1, heads=(2, 1), query_length=200, key_length=420, head_dim=128),
    Case(
        **_ONE, query_length=300, key_length=270, head_dim=104, is_causal=True, deterministic=True
    ),
    Case(
        batch=3,
        heads=(1, 1),
        query_length=150,
        key_length=300,
        head_dim=128,
        query_lengths=(40, 149, 0),
        key_lengths=(0, 130, 290),
        poison=True,
        dtype="fp16",
    ),
    Case(**_ONE, query_length=300, key_length=300, head_dim=128, window=(50, 70)),
    Case(batch=1, heads=(2, 1), query_length=150, key_length=300, head_dim=192, value_dim=128),
    Case(
        **_ONE,
        query_length=150,
        key_length=300,
        head_dim=160,
        value_dim=96,
        window=(90, 20),
        query_lengths=(90,),
        key_lengths=(270,),
        poison=True,
        deterministic=True,
    ),
)
"""Cases of tiles with both designs, for the design of pairs."""


@pytest.mark.parametrize(
    ("case", "design", "policy"),
    [
        (case, design, policy)
        for design, cases in ((SINGLE, CASES), (PAIR, PAIR_CASES))
        for case, policy in zip(cases, itertools.cycle(POLICIES), strict=False)
    ],
    ids=lambda value: value.id if isinstance(value, Case) else value if value == PAIR else "",
)
def test_gradients_agree_with_oracle(case: Case, design: str, policy: Policy, seed: int) -> None:
    inputs = make_inputs(case, seed)
    launches = attention(case, inputs, arch="sm_100f", design=design)
    assert any(key.pair for key in launches.keys) == (design == PAIR)
    polynomial = any(key.polynomial_exp2 for key in launches.keys)
    results = launches.run(policy, seed)
    with np.errstate(all="ignore"):
        expected = oracle(case, inputs)
        usual = [ordinary(case, inputs, shift) for shift in REFERENCE_SHIFTS]
        verdicts = [
            compare(
                name, case.dtype, results[name], value, [some[name] for some in usual], polynomial
            )
            for name, value in expected.items()
        ]
    assert len(verdicts) == 5
    assert not [verdict for verdict in verdicts if verdict.failure]


@pytest.mark.parametrize(
    ("head_dim", "value_dim", "design"),
    [
        *((64, 64, SINGLE), (192, 128, SINGLE), (256, 256, SINGLE)),
        *((128, 128, PAIR), (192, 128, PAIR)),
    ],
)
def test_deterministic_backward_ignores_timing(
    head_dim: int, value_dim: int, design: str, seed: int
) -> None:
    """The order in which dQ is summed over key tiles is the kernel's, not the schedule's, nor that
    in which CTAs start, one at a time or several."""
    case = Case(
        **_ONE,
        head_dim=head_dim,
        value_dim=value_dim,
        query_length=150,
        key_length=600 if design == PAIR else 300,
        is_causal=True,
        query_offset=470 if design == PAIR else 170,
        deterministic=True,
    )
    inputs = make_inputs(case, seed)
    launches = attention(case, inputs, arch="sm_100f", design=design).only(Pass.BACKWARD)
    first, *others = (
        launches.run(dataclasses.replace(policy, ordered_reductions=True), seed + i)
        for i, policy in enumerate(POLICIES)
    )
    for other, (name, value) in itertools.product(others, first.items()):
        assert np.array_equal(value, other[name]), name
