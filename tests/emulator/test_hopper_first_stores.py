"""Hopper's backward in a fixed order: nobody clears dQ, whose first addition is a store.

In these cases some query tiles are visited by no key tile, and some lie past the length.
"""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest

from fa4_jax.conformance.cases import Case
from fa4_jax.conformance.oracle import make_inputs
from kernels.emulator import Policy
from tests.emulator import attention
from tests.emulator.gradients import check_gradients

if importlib.util.find_spec("cutlass") is None:
    pytest.skip("the PTX comes from CuTe-DSL, which is not here", allow_module_level=True)

POLICIES = (
    Policy("random", "late", global_races=True),
    Policy("starve", "early", global_races=True),
)

LENGTHS = Case(
    batch=4,
    heads=(2, 1),
    query_length=290,
    key_length=520,
    query_lengths=(290, 0, 60, 140),
    key_lengths=(520, 200, 0, 100),
    poison=True,
)

UNSEEN = Case(
    batch=1,
    heads=(2, 1),
    query_length=420,
    key_length=150,
    is_causal=True,
    query_offset=-260,
    deterministic=True,
)

CASES = (
    dataclasses.replace(LENGTHS, deterministic=True),
    dataclasses.replace(LENGTHS, deterministic=True, is_causal=True, head_dim=96, dtype="fp16"),
    UNSEEN,
    dataclasses.replace(UNSEEN, head_dim=128, sinks=True),
    dataclasses.replace(UNSEEN, head_dim=128, query_offset=100, window=(30, 0), is_causal=False),
    dataclasses.replace(UNSEEN, query_length=300, key_length=300, masks=("scattered",)),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_gradients(case: Case) -> None:
    inputs = make_inputs(case, 0)
    launch = dataclasses.replace(attention.attention(case, inputs), multiprocessors=3)
    check_gradients(launch, case, inputs, POLICIES)
