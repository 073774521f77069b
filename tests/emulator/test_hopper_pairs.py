"""Hopper's backward of pairs where every step of a CTA has padding: one block a head, four heads.

Two stages of dO (head dim 192) let warpgroup 1 run ahead of warpgroup 0 by a step, whose dO it
clears; `kernels/sm90/backward_pair.py`, `receive_gradients`.
"""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from fa4_jax.conformance.cases import Case
from fa4_jax.conformance.oracle import make_inputs
from fa4_jax.key import Pass
from kernels.emulator import Policy
from tests.emulator import attention

if importlib.util.find_spec("cutlass") is None:
    pytest.skip("the PTX comes from CuTe-DSL, which is not here", allow_module_level=True)

CASE = Case(
    batch=1,
    heads=(4, 1),
    query_length=60,
    key_length=130,
    head_dim=192,
    query_lengths=(33,),
    poison=True,
    numerics="exact",
)

POLICIES = (
    Policy("random", "late"),
    Policy("random", "early"),
    Policy("starve", "late"),
    Policy("starve", "early"),
    Policy("in_order", "late"),
    Policy("in_order", "early"),
)


def _name(value: int | Policy) -> str:
    return f"{value.schedule}-{value.asynchronous}" if isinstance(value, Policy) else ""


@pytest.mark.parametrize(("number", "policy"), list(enumerate(POLICIES)), ids=_name)
def test_every_policy_gives_the_same(number: int, policy: Policy) -> None:
    inputs = attention.reversed_keys(CASE, make_inputs(CASE, 0))
    launch = attention.attention(CASE, inputs, True, "sm_90a").only(Pass.BACKWARD)
    expected = launch.run(Policy())
    results = launch.run(policy, number)
    for name, value in expected.items():
        np.testing.assert_array_equal(results[name], value, name)
