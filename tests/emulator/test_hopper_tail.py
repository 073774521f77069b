"""The last key tiles of Hopper's dense backward, which CTAs share; kernels/sm90/backward_tail.py.

Each case runs on as many multiprocessors as make its last tiles be split, or leave them whole.
"""

from __future__ import annotations

import dataclasses
import importlib.util

import numpy as np
import pytest

from fa4_jax.conformance.cases import Case
from fa4_jax.conformance.oracle import make_inputs
from fa4_jax.key import Pass
from kernels.emulator import Policy
from tests.emulator import attention
from tests.emulator.gradients import check_gradients

if importlib.util.find_spec("cutlass") is None:
    pytest.skip("the PTX comes from CuTe-DSL, which is not here", allow_module_level=True)

POLICIES = (
    Policy("random", "late", global_races=True),
    Policy("starve", "random", global_races=True),
    Policy("in_order", "early", global_races=True),
)

CASES = (
    # (case, multiprocessors, parts of each split tile)
    (Case(batch=1, heads=(1, 1), query_length=530, key_length=330, head_dim=96), 2, (2,)),
    pytest.param(
        Case(batch=1, heads=(2, 1), query_length=800, key_length=290, head_dim=128),
        10,
        (3, 3, 3),
        marks=pytest.mark.slow,
    ),
    pytest.param(
        Case(batch=1, heads=(1, 1), query_length=780, key_length=600, head_dim=96),
        3,
        (),
        marks=pytest.mark.slow,
    ),
    (
        Case(
            batch=3,
            heads=(2, 1),
            query_length=540,
            key_length=250,
            head_dim=128,
            query_lengths=(540, 0, 70),
            key_lengths=(250, 200, 90),
            poison=True,
        ),
        4,
        (2, 2),
    ),
    pytest.param(
        Case(batch=1, heads=(1, 1), query_length=511, key_length=130, head_dim=128),
        5,
        (),
        marks=pytest.mark.slow,
    ),
)


@pytest.mark.parametrize(("case", "multiprocessors", "parts"), CASES, ids=lambda x: str(x))
def test_parts_add_up(case: Case, multiprocessors: int, parts: tuple[int, ...]):
    inputs = make_inputs(case, 0)
    launch = dataclasses.replace(
        attention.attention(case, inputs), multiprocessors=multiprocessors
    ).after(Pass.BACKWARD_PRE)
    check_gradients(launch, case, inputs, POLICIES)
    expected = launch.arrays["tail_parts"].copy()  # What is not split is not counted.
    expected[: len(parts)] = parts
    counted = launch.after(Pass.BACKWARD).arrays["tail_parts"]
    np.testing.assert_array_equal(counted, expected)
