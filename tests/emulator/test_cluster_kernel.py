"""A CuTe-DSL kernel of two-CTA clusters: multicast, st.async, launch control, cluster barriers."""

from __future__ import annotations

import dataclasses
import importlib.util
import re

import numpy as np
import pytest

from kernels import emulator
from kernels.emulator import EmulationError, Policy
from kernels.emulator.tensor_map import TensorMap, encode
from tests.emulator import sm100_programs
from tests.emulator.mutations import mutations
from tests.emulator.sm100_programs import BF16, Program
from tests.emulator.test_memory import policies

if importlib.util.find_spec("cutlass") is None:
    pytest.skip("the PTX comes from CuTe-DSL, which is not here", allow_module_level=True)

TILES, ROWS = 5, 64
PAIRS = Program("pairs", (TILES,), ((64, 32),), (TILES * ROWS, 2), cluster=2)
OPERAND, RESULT = 0x10_0000, 0x80_0000


def run(text: str, operand: np.ndarray, policy: Policy, seed: int) -> np.ndarray:
    """Sums of the rows, plus the rank of the CTA that wrote them."""
    result = np.full(PAIRS.result, np.nan, np.float32)
    tensor = TensorMap(OPERAND, "bf16", (64, TILES * ROWS), (128,), PAIRS.boxes[0])
    entry = re.search(r"\.entry (\w+)", text)
    assert entry is not None
    emulator.launch(
        text,
        entry[1],
        grid=(2 * TILES, 1, 1),
        block=(160, 1, 1),
        cluster=(2, 1, 1),
        dynamic_smem=40_000,
        params=[encode(tensor), RESULT.to_bytes(8, "little")],
        memory={OPERAND: operand.view(np.uint8), RESULT: result.view(np.uint8)},
        policy=policy,
        seed=seed,
    )
    return result


@policies()
def test_sums(policy: Policy, rng: np.random.Generator, seed: int) -> None:
    operand = rng.integers(-8, 9, (TILES * ROWS, 64)).astype(BF16)
    policy = dataclasses.replace(policy, global_races=True)
    result = run(sm100_programs.ptx(PAIRS), operand, policy, seed)
    sums = operand.astype(np.float32).sum(1)
    np.testing.assert_array_equal(result, np.stack([sums, sums + 1], 1))


def test_broken_kernels_are_noticed(rng: np.random.Generator) -> None:
    """Every wait, arrival, fence and cluster barrier is needed, and its absence is noticed."""
    operand = rng.integers(-8, 9, (TILES * ROWS, 64)).astype(BF16)
    text = sm100_programs.ptx(PAIRS)
    sums = operand.astype(np.float32).sum(1)
    survivors, count = [], 0
    for mutation in mutations(text):
        count += 1
        for seed, name in enumerate(("late", "random", "early")):
            policy = Policy("random", name, most_steps=50_000)
            try:
                result = run(mutation.text, operand, policy, seed)
            except EmulationError:
                break
            if not np.array_equal(result, np.stack([sums, sums + 1], 1)):
                break
        else:
            survivors.append(f"line {mutation.line}, {mutation.change}")
    print(survivors)
    assert count >= 18
    assert not survivors
