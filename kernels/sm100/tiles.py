"""Tile tables of the Blackwell kernels: every size that was chosen stands here.

A CTA has at most 227 KiB of shared memory; an SM has 65536 registers, and tensor memory of 128
lanes with 512 columns of 32 bits.
"""

from __future__ import annotations

import dataclasses

from kernels.description import TENSOR_MEMORY_LANES as LANES

L2_BUDGET_BYTES = 100 * 1024 * 1024
"""Share of the L2 that K and V of the heads in flight may fill (B200: 126 MB)."""

DETERMINISTIC_BAND_HEADS = 32
"""KV heads that the deterministic backward of a band interleaves at least; pairs of CTAs
interleave half of it.

The number follows from the grid model of benchmarks.blackwell_backward. With 32 heads, four to five
key tiles of a head are in flight. With 12 heads, whose operands are all that the L2 holds at
d = 128, more key tiles of a head are in flight, and their CTAs wait longer for each other's
additions: the order costs 17 % rather than 5 %. With 64 heads only two are, and each loads Q and dO
from DRAM for itself.
"""


@dataclasses.dataclass(frozen=True)
class RegisterBudget:
    """Registers per thread after setmaxnreg, multiples of 8.

    Two softmax warpgroups, one correction warpgroup and one of single-warp roles have them; the sum
    over the four is at most 512. With a single query tile the second softmax warpgroup is idle.
    """

    softmax: int
    correction: int
    others: int
    idle: int = 192


BUFFERS = 2
"""Score buffers of a CTA: one for each of two query tiles, or two in turn for a single one."""

SPECULATIVE_KEYS = 16
"""The number of first keys of a block whose exponentials do not wait for the block's maximum."""


RANGES_POLYNOMIAL_PAIRS = 3
"""The most polynomials of 16 pairs where rows read their keys from memory: more would spill."""


@dataclasses.dataclass(frozen=True)
class ForwardTile:
    """Sizes of the forward kernel.

    Attributes:
      n: keys of a block.
      kv_stages: depth of the ring that K and V blocks share.
      ctas: 1, or 2: a pair on neighbouring SMs. Each has query tiles of its own, but only half of
        the keys of a K block and half of the columns of a V block: the pair's products (M = 256)
        read both halves.
      p_splits: where the softmax warps split P of a block: the MMA warp gets the keys up to each
        of these as soon as they are there; the last is n.
      query_tiles: of a CTA, 1 or 2, of `rows` query rows each.
      polynomial_pairs: with `polynomial_exp2`, how many of every 16 pairs of exponentials are
        polynomials, but none in the first 32 keys of a block: there the latency counts.
      registers: by role.
      span_bytes: swizzle span of all operand tiles.
    """

    n: int
    kv_stages: int
    p_splits: tuple[int, ...]
    query_tiles: int = 2
    ctas: int = 1
    polynomial_pairs: int = 0
    registers: RegisterBudget = RegisterBudget(192, 80, 48)
    span_bytes: int = 128

    rows = 128  # of a query tile: one per lane of tensor memory

    def registers_of(self, ranges: bool) -> RegisterBudget:
        """The registers of a kernel whose rows read their keys from memory, or do not.

        The former needs more than 192 where O is wide; the idle warpgroup has them.
        """
        wide = ranges and self.query_tiles == 1
        return RegisterBudget(240, 80, 48, idle=48) if wide else self.registers

    @property
    def m(self) -> int:
        """The number of query rows of a CTA, or of a pair."""
        return self.rows * self.query_tiles * self.ctas

    @property
    def keys(self) -> int:
        """The number of keys of a K block that a CTA has."""
        return self.n // self.ctas

    @property
    def span(self) -> int:
        """The number of columns of a swizzle span; an output tile is stored span by span."""
        return self.span_bytes // 2

    def columns_of_v(self, head_dim: int) -> int:
        """The number of columns of a V block that a CTA has."""
        return head_dim // self.ctas

    @property
    def buffers_per_tile(self) -> int:
        """The number of blocks of scores of a query tile that there may be at a time."""
        return BUFFERS // self.query_tiles


_SPLITS = (64, 96, 128)

FORWARD_TILES: dict[tuple[int, bool], ForwardTile] = {
    # (head_dim, KernelKey.pair): the design for pairs, where there are both
    (64, False): ForwardTile(128, 8, _SPLITS, polynomial_pairs=8),
    (64, True): ForwardTile(128, 16, _SPLITS, ctas=2, polynomial_pairs=8, span_bytes=64),
    (96, False): ForwardTile(128, 6, _SPLITS, polynomial_pairs=8, span_bytes=64),
    (128, False): ForwardTile(128, 4, _SPLITS, polynomial_pairs=8),
    (128, True): ForwardTile(128, 8, _SPLITS, ctas=2, polynomial_pairs=8),
    (192, False): ForwardTile(128, 5, _SPLITS, query_tiles=1, ctas=2, span_bytes=64),
    (256, False): ForwardTile(128, 3, _SPLITS, query_tiles=1, ctas=2),
}


@dataclasses.dataclass(frozen=True)
class TangentTile:
    """Sizes of the tangent kernel.

    Attributes:
      n: keys of a block. S and S' of both query tiles, and both O', fill tensor memory at d = 128;
        at d = 256 two blocks' S and S' and one O' do.
      kv_stages: depth of the ring of K, V and their tangents.
      query_tiles: of a CTA, 1 or 2, of `rows` query rows each.
      span_bytes: swizzle span of all operand tiles.
    """

    n: int
    kv_stages: int
    query_tiles: int = 2
    span_bytes: int = 128

    rows = 128  # of a query tile: one per lane of tensor memory
    ctas = 1

    @property
    def slot_operands(self) -> int:
        """How many operands a slot of the ring holds: a block and its tangent, or one of them.

        Beside one wide query tile there is room for three or five operands of 64 keys.
        """
        return self.query_tiles

    @property
    def m(self) -> int:
        """The number of query rows of a CTA."""
        return self.rows * self.query_tiles


TANGENT_TILES: dict[int, TangentTile] = {
    # head_dim
    64: TangentTile(n=64, kv_stages=8),
    96: TangentTile(n=64, kv_stages=5, span_bytes=64),
    128: TangentTile(n=64, kv_stages=3),
    192: TangentTile(n=64, kv_stages=5, query_tiles=1),
    256: TangentTile(n=64, kv_stages=3, query_tiles=1),
}


@dataclasses.dataclass(frozen=True)
class BackwardRegisters:
    """Registers per thread after setmaxnreg, multiples of 8.

    The reduce warpgroup, two compute warpgroups and one of single-warp roles have them; the sum
    over the four is at most 512.
    """

    reduce: int
    compute: int
    others: int


@dataclasses.dataclass(frozen=True)
class BackwardTile:
    """Sizes of the backward kernel.

    Attributes:
      head_dim, value_dim: columns of Q, K and of V, dO in shared memory, at least the key's.
      stages: depth of the Q ring and of the dO ring.
      m: query rows of a step. dQ is transposed where they would fill half of the tensor core.
      span_bytes: swizzle span of the operand tiles.
      registers: by role.
    """

    head_dim: int
    value_dim: int
    stages: int
    m: int = 128
    span_bytes: int = 128
    registers: BackwardRegisters = BackwardRegisters(152, 136, 88)

    n = keys = 128  # of a CTA: one per lane of tensor memory
    ctas = 1

    @property
    def dq_transposed(self) -> bool:
        """Whether columns of dQ are lanes of tensor memory, rather than its rows."""
        return self.m < LANES

    @property
    def dq_products(self) -> int:
        """The number of products of 128 lanes that compute a step's dQ."""
        return -(-self.head_dim // LANES) if self.dq_transposed else 1

    @property
    def dq_width(self) -> int:
        """The number of columns of tensor memory that one of these products has."""
        return self.m if self.dq_transposed else self.head_dim


@dataclasses.dataclass(frozen=True)
class BackwardPairTile:
    """Sizes of the backward kernel in which a pair of CTAs shares a key tile.

    Attributes:
      head_dim: columns of Q, K, V and dO in the pair's shared memory, at least the key's.
      statistics: stages of the ring of row statistics.
      registers: by role.
    """

    head_dim: int
    statistics: int = 3
    registers: BackwardRegisters = BackwardRegisters(112, 144, 112)

    m = 64  # queries of a step
    n = 128  # keys of the pair
    ctas = 2
    span_bytes = 128
    dq_transposed = True

    @property
    def value_dim(self) -> int:
        return self.head_dim

    @property
    def part(self) -> int:
        """The number of columns of a CTA's kt, qt, dot, and of its dV and dK in tensor memory."""
        return self.head_dim // self.ctas

    @property
    def keys(self) -> int:
        """The number of keys of a CTA."""
        return self.n // self.ctas

    @property
    def queries(self) -> int:
        """The number of queries whose rows of q, do, dst a CTA has: half of a step's."""
        return self.m // self.ctas


@dataclasses.dataclass(frozen=True)
class BackwardM256Tile:
    """Sizes of the backward kernel for pairs whose CTAs have 128 keys each: products with M = 256.

    Attributes:
      head_dim, value_dim: columns of Q, K and of V, dO in the pair's shared memory.
      m: queries of a step. dQ is transposed where they would fill half of the tensor core.
      part_span_bytes: swizzle span of kt and qt, which have half of the columns of K and Q.
      registers: by role.
    """

    head_dim: int
    value_dim: int
    m: int = 128
    part_span_bytes: int = 128
    registers: BackwardRegisters = BackwardRegisters(112, 152, 96)

    n = 256  # keys of the pair
    keys = 128  # of a CTA: one per lane of tensor memory
    ctas = 2
    statistics = 2  # stages of the rings of row statistics
    span_bytes = 128  # of all operands but kt and qt
    chunk = 32  # queries of a part that a compute warpgroup has

    @property
    def part(self) -> int:
        """The number of columns of a CTA's kt and qt."""
        return self.head_dim // self.ctas

    @property
    def value_part(self) -> int:
        """The number of columns of a CTA's dot."""
        return self.value_dim // self.ctas

    @property
    def queries(self) -> int:
        """The number of queries whose rows of q, do, dst a CTA has: half of a step's."""
        return self.m // self.ctas

    @property
    def parts(self) -> int:
        """The number of parts of a step's queries; each compute warpgroup has half of every one."""
        return self.queries // self.chunk

    @property
    def dq_transposed(self) -> bool:
        """Whether columns of dQ are lanes of tensor memory, rather than its rows."""
        return self.queries < LANES // 2

    @property
    def dq_width(self) -> int:
        """The number of columns of tensor memory that dQ has."""
        return self.m if self.dq_transposed else self.part


AnyBackwardTile = BackwardTile | BackwardPairTile | BackwardM256Tile

BACKWARD_TILES: dict[tuple[int, int, bool], AnyBackwardTile] = {
    # (head_dim, value_dim, KernelKey.pair): the design for pairs, where there are both
    (64, 64, False): BackwardTile(64, 64, stages=2),
    (96, 96, False): BackwardTile(96, 96, stages=2, span_bytes=64),
    (128, 128, False): BackwardTile(128, 128, stages=2),
    (128, 128, True): BackwardM256Tile(128, 128),
    (192, 128, False): BackwardTile(192, 128, stages=2, m=64),
    (192, 128, True): BackwardM256Tile(
        192, 128, m=64, part_span_bytes=64, registers=BackwardRegisters(112, 144, 112)
    ),
    (192, 192, False): BackwardPairTile(256),
    (256, 256, False): BackwardPairTile(256),
}
