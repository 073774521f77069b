"""Small CuTe-DSL kernels for sm_100 on the emulator: right whatever the timing."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import numpy as np
import pytest

from kernels.emulator import Policy
from tests.emulator import sm100_programs
from tests.emulator.sm100_programs import BF16, CHAIN, GEMM, Program

if importlib.util.find_spec("cutlass") is None:
    pytest.skip("the PTX comes from CuTe-DSL, which is not here", allow_module_level=True)

POLICIES = (
    Policy("random", "late"),
    Policy("starve", "random"),
    Policy("random", "early"),
    Policy("in_order", "late"),
)

SHAPES = {
    GEMM: ((128, 192), (128, 192)),
    CHAIN: ((128, 64), (192, 64), (192, 64)),
}


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a.astype(np.float64) @ b.astype(np.float64).T


def chain(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    p = (q.astype(np.float32) @ k.astype(np.float32).T).astype(BF16)
    return p.astype(np.float64) @ v.astype(np.float64)


REFERENCES: dict[Program, Callable[..., np.ndarray]] = {GEMM: product, CHAIN: chain}


def operands(program: Program, seed: int) -> list[np.ndarray]:
    """Small integers: every sum is exact, so that P rounds as the reference does."""
    rng = np.random.default_rng(seed)
    return [rng.integers(-2, 3, shape).astype(BF16) for shape in SHAPES[program]]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: f"{p.schedule}-{p.asynchronous}")
@pytest.mark.parametrize("program", SHAPES, ids=lambda program: program.source)
def test_result(program: Program, policy: Policy, seed: int) -> None:
    arrays = operands(program, seed)
    found = sm100_programs.launch(program, arrays, policy, seed)
    np.testing.assert_array_equal(found, REFERENCES[program](*arrays))
