"""Tile tables of the Hopper kernels: every size that was chosen, in one place.

Shared memory per CTA is at most 227 KiB, registers per SM 65536.
"""

from __future__ import annotations

import dataclasses

WARPGROUP = 128  # threads
MAX_DYNAMIC_SMEM_BYTES = 227 * 1024
REGISTERS_PER_SM = 65536
L2_BUDGET_BYTES = 40 * 1024 * 1024
"""Share of the L2 that K and V of the heads in flight may fill (H100, H200: 50 MB)."""


@dataclasses.dataclass(frozen=True)
class RegisterBudget:
    """Registers per thread after setmaxnreg, for the load warpgroup and each MMA warpgroup."""

    load: int
    mma: int


REGISTER_BUDGETS = {2: RegisterBudget(24, 240), 3: RegisterBudget(32, 160)}
"""By number of MMA warpgroups; multiples of 8 that sum to at most the register file."""


@dataclasses.dataclass(frozen=True)
class ForwardTile:
    """Sizes of the forward kernel.

    Attributes:
      m: query rows of a CTA, 64 for each MMA warpgroup.
      n: keys of a block.
      kv_stages: depth of the K ring and of the V ring.
      polynomial_one_in: with polynomial_exp2, one in this many exponentials is a polynomial.
    """

    m: int
    n: int
    kv_stages: int
    polynomial_one_in: int = 0

    @property
    def mma_warpgroups(self) -> int:
        return self.m // 64

    @property
    def threads(self) -> int:
        return (self.mma_warpgroups + 1) * WARPGROUP

    def smem_bytes(self, head_dim: int) -> int:
        """Barriers (1 KiB with padding), the query tile, the K ring and the V ring."""
        return 1024 + (self.m + 2 * self.kv_stages * self.n) * head_dim * 2


FORWARD_TILES: dict[tuple[int, bool], ForwardTile] = {
    # (head_dim, band)
    (64, False): ForwardTile(m=128, n=128, kv_stages=2, polynomial_one_in=8),
    (64, True): ForwardTile(m=128, n=128, kv_stages=2, polynomial_one_in=8),
    (96, False): ForwardTile(m=128, n=128, kv_stages=2),
    (96, True): ForwardTile(m=128, n=128, kv_stages=2),
    (128, False): ForwardTile(m=128, n=128, kv_stages=2),
    (128, True): ForwardTile(m=128, n=128, kv_stages=2),
    (192, False): ForwardTile(m=128, n=96, kv_stages=2),
    (192, True): ForwardTile(m=128, n=80, kv_stages=2),
    (256, False): ForwardTile(m=128, n=80, kv_stages=2),
    (256, True): ForwardTile(m=128, n=64, kv_stages=2),
}
