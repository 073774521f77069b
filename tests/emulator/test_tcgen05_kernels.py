"""Small CuTe-DSL kernels for sm_100 on the emulator: right whatever the timing."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from kernels.emulator import EmulationError, Policy
from tests.emulator import sm100_programs
from tests.emulator.mutations import mutations
from tests.emulator.sm100_programs import BF16, CHAIN, GEMM, PAIR, Program

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
    PAIR: ((256, 192), (128, 192)),
}


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a.astype(np.float64) @ b.astype(np.float64).T


def chain(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    p = (q.astype(np.float32) @ k.astype(np.float32).T).astype(BF16)
    return p.astype(np.float64) @ v.astype(np.float64)


REFERENCES: dict[Program, Callable[..., np.ndarray]] = {GEMM: product, CHAIN: chain, PAIR: product}


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


def notices(program: Program, text: str, expected: np.ndarray) -> str:
    """The rule that a broken text breaks, "result" if it computes something else, or ""."""
    for seed, policy in enumerate(POLICIES[:2]):
        policy = dataclasses.replace(policy, most_steps=50_000)
        try:
            found = sm100_programs.launch(program, operands(program, 0), policy, seed, text)
        except EmulationError as error:
            return error.rule
        if not np.array_equal(found, expected):
            return "result"
    return ""


@pytest.mark.parametrize("program", SHAPES, ids=lambda program: program.source)
def test_broken_programs_are_noticed(program: Program) -> None:
    expected = REFERENCES[program](*operands(program, 0))
    broken = list(mutations(sm100_programs.ptx(program)))
    rules = [notices(program, mutation.text, expected) for mutation in broken]
    noticed = sum(map(bool, rules))
    print(f"{program.source}: {noticed} of {len(broken)}, {Counter(rules).most_common()}")
    survivors = [m for m, rule in zip(broken, rules, strict=True) if not rule]
    for mutation in survivors:
        print(f"survives: line {mutation.line}, {mutation.change}")
    assert not survivors
