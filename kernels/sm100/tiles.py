"""Tile tables of the Blackwell kernels: every size that was chosen, in one place.

Shared memory per CTA is at most 227 KiB, registers per SM 65536, tensor memory 128 lanes of 512
columns of 32 bits.
"""

from __future__ import annotations

import dataclasses

WARPS = 16
TENSOR_MEMORY_COLUMNS = 512
MAX_DYNAMIC_SMEM_BYTES = 227 * 1024
REGISTERS_PER_SM = 65536
L2_BUDGET_BYTES = 100 * 1024 * 1024
"""Share of the L2 that K and V of the heads in flight may fill (B200: 126 MB)."""


@dataclasses.dataclass(frozen=True)
class RegisterBudget:
    """Registers per thread after setmaxnreg: two softmax warpgroups, one correction, one of the
    single-warp roles; multiples of 8 that sum to at most 512."""

    softmax: int
    correction: int
    others: int


@dataclasses.dataclass(frozen=True)
class ForwardTile:
    """Sizes of the forward kernel.

    Attributes:
      n: keys of a block.
      kv_stages: depth of the ring that K and V blocks share.
      registers: by role.
      early_keys: keys of a block whose probabilities the MMA warp may use before the rest is there.
      span_bytes: swizzle span of all operand tiles.
    """

    n: int
    kv_stages: int
    registers: RegisterBudget
    early_keys: int = 96
    span_bytes: int = 128

    rows = 128  # of a query tile: one per lane of tensor memory
    query_tiles = 2

    @property
    def m(self) -> int:
        """Query rows of a CTA."""
        return self.rows * self.query_tiles

    @property
    def threads(self) -> int:
        return WARPS * 32

    def smem_bytes(self, head_dim: int) -> int:
        """Barriers and row statistics (3 KiB with padding), query and output tiles, the ring."""
        return 3 * 1024 + (2 * self.m + self.kv_stages * self.n) * head_dim * 2

    def columns(self, head_dim: int) -> TensorColumns:
        """First columns of what lives in tensor memory."""
        n = self.n
        return TensorColumns(s=(0, n), p=(n // 2, n + n // 2), o=(2 * n, 2 * n + head_dim))


@dataclasses.dataclass(frozen=True)
class TensorColumns:
    """First column of scores, probabilities and output accumulators of the two query tiles.

    P, two 16-bit values a column, takes the upper half of S's columns: a thread writes P after it
    has read its whole row of S, and the next S is multiplied after P has been.
    """

    s: tuple[int, int]
    p: tuple[int, int]
    o: tuple[int, int]


FORWARD_TILES: dict[int, ForwardTile] = {
    # head_dim
    64: ForwardTile(n=128, kv_stages=8, registers=RegisterBudget(192, 72, 56)),
    96: ForwardTile(n=128, kv_stages=5, registers=RegisterBudget(192, 72, 56), span_bytes=64),
    128: ForwardTile(n=128, kv_stages=3, registers=RegisterBudget(192, 72, 56)),
}
