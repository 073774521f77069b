"""What the compiler makes of copies: Hopper's load warps issue each one once."""

import re

import pytest

from fa4_jax import catalogue
from fa4_jax.key import KernelKey
from kernels.build import cache, cubin_info

BRANCH = 0x947
ANY_LANE = 20
"""Bit of a branch's upper word: taken while a lane is left that has not had its turn."""

LANE_BY_LANE = r"(fwd_split_\w+16_(d96|d192)|fwd_\w+16_d192(x128)?_band_bias)$"
"""Kernels that still have such loops. With them the forwards of few rows that read pages at d = 128
took up to 15 % longer (benchmarks/results/nvidia-h200-decode.md)."""


@pytest.mark.each_kernel
@pytest.mark.parametrize("key", list(catalogue.keys("sm_90a")), ids=lambda key: key.name)
def test_copies_are_issued_once_not_in_loops_over_the_lanes(key: KernelKey) -> None:
    """Where ptxas does not see that a warp's lanes agree, it issues a copy for one after another.

    Whether it sees that depends on code elsewhere in the kernel, so it is looked at here.
    """
    entry = cache.find(key)
    assert entry is not None, f"run python -m kernels.build for {key.name}"
    code = cubin_info.instructions(entry.code, entry.cubin.symbol)
    loops = any(cubin_info.opcode(word) == BRANCH and word[1] >> ANY_LANE & 1 for word in code)
    assert loops == bool(re.search(LANE_BY_LANE, key.name))
