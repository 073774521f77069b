"""The texts of Hopper's backwards for a small L2 differ from the shipped ones in that alone."""

from __future__ import annotations

import importlib.util

import pytest

from fa4_jax import catalogue
from fa4_jax.key import KernelKey, Pass
from tests.emulator import attention
from tests.emulator.small_l2 import ROWS, with_small_l2

if importlib.util.find_spec("cutlass") is None:
    pytest.skip("the PTX comes from CuTe-DSL, which is not here", allow_module_level=True)

BACKWARDS = [
    key for key in catalogue.all_keys() if key.arch == "sm_90a" and key.kernel is Pass.BACKWARD
]


@pytest.mark.each_kernel
@pytest.mark.parametrize("key", BACKWARDS, ids=lambda key: key.name)
def test_only_the_rows_of_a_section_change(key: KernelKey):
    text = attention.ptx(key).text
    small = with_small_l2(key, text)
    pairs = zip(text.splitlines(), small.splitlines(), strict=True)
    changed = [(before.split(), after.split()) for before, after in pairs if before != after]
    assert {after[0] for _, after in changed} == {"div.s32", "setp.ne.b32"}
    for before, after in changed:
        numbers = [(x, y) for x, y in zip(before, after, strict=True) if x != y]
        assert len(numbers) == 1 and numbers[0][1].strip(",;") == str(ROWS)
