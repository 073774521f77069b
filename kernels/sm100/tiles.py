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


BUFFERS = 2
"""Score buffers of a CTA: one for each of two query tiles, or two in turn for a single one."""

SPECULATED = 16
"""First keys of a block, whose exponentials do not wait for the block's maximum."""


@dataclasses.dataclass(frozen=True)
class ForwardTile:
    """Sizes of the forward kernel.

    Attributes:
      n: keys of a block.
      kv_stages: depth of the ring that K and V blocks share.
      ctas: 1, or 2: a pair on neighbouring SMs. Each has query tiles of its own, but only half of
        the keys of a K block and half of the columns of a V block: the pair's products (M = 256)
        read both halves.
      parts: keys of a block up to which the MMA warp gets probabilities at a time; the last is n.
      query_tiles: of a CTA, 1 or 2, of `rows` query rows each.
      polynomial_pairs: with `polynomial_exp2`, how many of every 16 pairs of exponentials are
        polynomials, but none in the first and last 32 keys of a block: there the latency counts.
      registers: by role.
      span_bytes: swizzle span of all operand tiles.
    """

    n: int
    kv_stages: int
    parts: tuple[int, ...]
    query_tiles: int = 2
    ctas: int = 1
    polynomial_pairs: int = 0
    registers: RegisterBudget = RegisterBudget(192, 80, 48)
    span_bytes: int = 128

    rows = 128  # of a query tile: one per lane of tensor memory

    @property
    def m(self) -> int:
        """Query rows of a CTA, or of a pair."""
        return self.rows * self.query_tiles * self.ctas

    @property
    def keys(self) -> int:
        """Keys of a K block that a CTA has."""
        return self.n // self.ctas

    @property
    def span(self) -> int:
        """Columns of a swizzle span: what of an output tile is stored at a time."""
        return self.span_bytes // 2

    def columns_of_v(self, head_dim: int) -> int:
        """Columns of a V block that a CTA has."""
        return head_dim // self.ctas

    @property
    def buffers_per_tile(self) -> int:
        """How many blocks of scores of a query tile there may be at a time."""
        return BUFFERS // self.query_tiles

    @property
    def threads(self) -> int:
        return WARPS * 32

    def smem_bytes(self, head_dim: int) -> int:
        """Barriers and row statistics (3 KiB with padding), query tiles, an output tile, the ring.

        With output in memory of its own the next query tiles are loaded while it is stored.
        """
        rows = (self.query_tiles + 1) * self.rows + self.kv_stages * self.keys
        return 3 * 1024 + rows * head_dim * 2

    def columns(self, head_dim: int) -> TensorColumns:
        """What lives where in tensor memory."""
        n = self.n
        first_o = BUFFERS * n
        return TensorColumns(
            s=tuple(range(0, first_o, n)),
            p=tuple(range(n // 2, first_o, n)),
            o=tuple(range(first_o, first_o + self.query_tiles * head_dim, head_dim)),
            end=first_o + self.query_tiles * head_dim,
        )


@dataclasses.dataclass(frozen=True)
class TensorColumns:
    """First columns of scores and probabilities by buffer, of output accumulators by query tile.

    P, two 16-bit values a column, takes the upper half of S's columns: a thread writes P after it
    has read its whole row of S, and the next S is multiplied after P has been.
    """

    s: tuple[int, ...]
    p: tuple[int, ...]
    o: tuple[int, ...]
    end: int


FORWARD_TILES: dict[int, ForwardTile] = {
    # head_dim
    64: ForwardTile(n=128, kv_stages=8, parts=(64, 96, 128), polynomial_pairs=8),
    96: ForwardTile(n=128, kv_stages=6, parts=(64, 96, 128), polynomial_pairs=4, span_bytes=64),
    128: ForwardTile(n=128, kv_stages=4, parts=(64, 96, 128), polynomial_pairs=4),
    192: ForwardTile(n=128, kv_stages=5, parts=(64, 96, 128), query_tiles=1, ctas=2, span_bytes=64),
    256: ForwardTile(n=128, kv_stages=3, parts=(64, 96, 128), query_tiles=1, ctas=2),
}


@dataclasses.dataclass(frozen=True)
class BackwardRegisters:
    """Registers per thread after setmaxnreg: the reduce warpgroup, two compute warpgroups, one of
    the single-warp roles; multiples of 8 that sum to at most 512."""

    reduce: int
    compute: int
    others: int


@dataclasses.dataclass(frozen=True)
class BackwardTile:
    """Sizes of the backward kernel.

    Attributes:
      stages: depth of the Q ring and of the dO ring.
      m: query rows of a step.
      parts: of head_dim: a CTA has the scores whole, but only one part of the columns of dV, dK and
        dQ, where tensor memory has no room for all.
      width: columns of head_dim that a CTA computes with; None for head_dim.
      span_bytes: swizzle span of the operand tiles.
      registers: by role.
    """

    stages: int
    m: int = 128
    parts: int = 1
    width: int | None = None
    span_bytes: int = 128
    registers: BackwardRegisters = BackwardRegisters(152, 136, 88)

    n = 128  # keys of a CTA: one per lane of tensor memory

    @property
    def threads(self) -> int:
        return WARPS * 32

    def columns_of_head(self, head_dim: int) -> int:
        """`width`, for a kernel of this head_dim."""
        return self.width or head_dim

    def smem_bytes(self, head_dim: int) -> int:
        """Barriers (256 bytes) with LSE and delta; K, V; the rings of Q and dO; dS."""
        statistics = 256 + 2 * self.stages * self.m * 4
        rows = 2 * self.n + 2 * self.stages * self.m
        operands = rows * self.columns_of_head(head_dim) * 2 + self.n * self.m * 2
        return -(-statistics // 1024) * 1024 + operands

    def columns(self, head_dim: int) -> BackwardColumns:
        """What lives where in tensor memory; dQ takes dP's columns where there are no others."""
        part = self.columns_of_head(head_dim) // self.parts
        dq = part if self.parts == 1 else self.m
        dv, dk = 2 * self.m, 2 * self.m + part
        own_dq = dk + part + dq <= TENSOR_MEMORY_COLUMNS
        return BackwardColumns(s=0, dp=self.m, dv=dv, dk=dk, dq=dk + part if own_dq else self.m)


@dataclasses.dataclass(frozen=True)
class BackwardColumns:
    """First columns of the transposed scores S, dP and of the accumulators dV, dK, dQ.

    P takes the first quarter of the columns of each half of S, dS of each half of dP: a thread of
    compute warpgroup c has read its row of half c before it writes there, and nobody else reads it.
    """

    s: int
    dp: int
    dv: int
    dk: int
    dq: int


BACKWARD_TILES: dict[int, BackwardTile] = {
    # head_dim
    64: BackwardTile(stages=2),
    96: BackwardTile(stages=2, span_bytes=64),
    128: BackwardTile(stages=2),
    192: BackwardTile(
        stages=1, m=64, parts=2, width=256, registers=BackwardRegisters(112, 144, 112)
    ),
    256: BackwardTile(stages=1, m=64, parts=2, registers=BackwardRegisters(112, 144, 112)),
}
