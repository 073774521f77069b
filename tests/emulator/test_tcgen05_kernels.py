"""Small CuTe-DSL kernels for sm_100 on the emulator: right whatever the timing."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from kernels.emulator import Policy
from tests.emulator import sm100_programs
from tests.emulator.sm100_programs import BF16, Gemm

if importlib.util.find_spec("cutlass") is None:
    pytest.skip("the PTX comes from CuTe-DSL, which is not here", allow_module_level=True)

POLICIES = (
    Policy("random", "late"),
    Policy("starve", "random"),
    Policy("random", "early"),
    Policy("in_order", "late"),
)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: f"{p.schedule}-{p.asynchronous}")
@pytest.mark.parametrize("gemm", [Gemm()], ids=str)
def test_gemm(gemm: Gemm, policy: Policy, seed: int, rng: np.random.Generator) -> None:
    a = rng.normal(size=(sm100_programs.ROWS, gemm.depth)).astype(BF16)
    b = rng.normal(size=(gemm.columns, gemm.depth)).astype(BF16)
    expected = a.astype(np.float64) @ b.astype(np.float64).T
    found = sm100_programs.run(gemm, a, b, policy, seed)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)
