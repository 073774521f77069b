"""The mutation problems execute what they claim to: of some kernels here, of all by the command.

`python -m tests.emulator.coverage` has the table of all kernels. About 40 s of a core.
"""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from fa4_jax import catalogue
from kernels.emulator.ptx.parser import parse
from tests.emulator import coverage, mutation_score, programs

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is None,
    reason="the PTX comes from CuTe-DSL, which is not here",
)
KEYS = {key.name: key for key in catalogue.all_keys()}
SKIPPED = """
setp.eq.u32 %p1, %r1, 40;
setp.eq.u32 %p2, %r1, 5;
@%p1 bar.sync 1;
@%p2 st.shared.b32 [%r2], %r1;
bra.uni END;
bar.sync 2;
END:
"""


def test_executed_means_by_some_lane() -> None:
    """Neither a guard that holds for no lane counts, nor what a branch skips."""
    report = programs.run(SKIPPED, np.zeros(8, np.uint32))
    texts = programs.HEAD.format(threads=32) + SKIPPED + programs.TAIL
    instructions = parse(texts).kernels["test"].instructions
    missed = [i.text for at, i in enumerate(instructions) if at not in report.executed]
    assert missed == ["@%p1 bar.sync 1", "bar.sync 2"]


def test_what_is_explained_is_there() -> None:
    assert {explained.kernel for explained in coverage.EXPLAINED} <= KEYS.keys()


@needs_compiler
@pytest.mark.parametrize(
    "name",
    [
        "sm_90a_fwd_bf16_d64",
        "sm_90a_fwd_bf16_d96_band",
        "sm_90a_fwd_bf16_d256",
        "sm_90a_fwd_bf16_d128_band",
        "sm_90a_fwd_split_bf16_d128",
        "sm_90a_fwd_split_bf16_d64_paged",
        "sm_90a_fwd_join_bf16_d64",
        "sm_90a_bwd_bf16_d128",
        "sm_90a_bwd_bf16_d256_deterministic",
        "sm_90a_bwd_post_bf16_d64",
        "sm_100f_fwd_bf16_d128",
        "sm_100f_fwd_bf16_d256_band",
        "sm_100f_fwd_bf16_d256_band_paged",
        "sm_100f_bwd_bf16_d64_deterministic",
    ],
)
def test_problems_reach_every_synchronisation(name: str) -> None:
    found = coverage.coverage(KEYS[name], mutation_score.problems(KEYS[name]))
    assert found.is_complete, [f"line {i.line}: {i.text}" for i in found.missed]


@pytest.mark.slow
@needs_compiler
def test_a_loop_that_no_problem_enters_is_missed() -> None:
    """Without its first problem, nothing enters the loop for blocks that the diagonal crosses."""
    key = KEYS["sm_90a_fwd_bf16_d128_band"]
    found = coverage.coverage(key, mutation_score.problems(key)[1:])
    assert not found.is_complete
    assert {"bar.sync", "wgmma.fence.sync.aligned"} <= {i.mnemonic for i in found.missed}
