"""Tile tables of the Hopper kernels: every size that was chosen stands here.

A CTA has at most 227 KiB of shared memory, an SM 65536 registers.
"""

from __future__ import annotations

import dataclasses

from fa4_jax.key import WARPGROUP_ROWS as WARPGROUP_ROWS
from fa4_jax.key import KernelKey

WARPGROUP = 128  # threads
L2_BUDGET_BYTES = 40 * 1024 * 1024
"""Share of the L2 that K and V of the heads in flight may fill (H100, H200: 50 MB)."""

HALF_L2_BUDGET_BYTES = 20 * 1024 * 1024
"""The same for Q, dO and dQ in a backward without pairs, and in the forward of d = 256.

The L2 has two partitions and holds a line twice that is read from both, so that twice as much made
the device memory carry twice the traffic (d = 64, S = 1024). Other forwards and pairs of CTAs did
not gain: docs/hopper.md, docs/hopper-power.md.
"""


TICKET_BLOCKS = 4
"""Blocks of a forward's tile that are still to be loaded when the next tile's ticket is taken.

They are few, so that the CTA that is ahead gets the longer tile, and enough to hide the addition's
latency.
"""


@dataclasses.dataclass(frozen=True)
class RegisterBudget:
    """Registers per thread after setmaxnreg, for the load warpgroup and each MMA warpgroup."""

    load: int
    mma: int


REGISTER_BUDGETS = {
    1: RegisterBudget(24, 136),
    2: RegisterBudget(24, 240),
    3: RegisterBudget(32, 160),
}
"""By number of MMA warpgroups; multiples of 8 that sum to at most the register file, or with one of
them to a third of it (NARROW_FORWARD_TILES)."""

LARGE_LOAD_REGISTERS = RegisterBudget(40, 232)
"""Of a forward with two MMA warpgroups whose load warp needs more: it looks up pages, or the kernel
reads fp32 elements of a bias alone, and the compiler moves registers of the load warp to memory."""


@dataclasses.dataclass(frozen=True)
class ForwardTile:
    """Sizes of the forward kernel.

    Attributes:
      m: query rows of a CTA, 64 for each MMA warpgroup.
      n: keys of a block.
      kv_stages: depth of the K ring and of the V ring.
      span_bytes: swizzle span of all operand tiles.
      own_output: the output tile has memory of its own; otherwise it goes through V's ring when the
        tile's last product is complete.
      skips_rescaling: a warp in which no row's reference moved does not multiply its output by the
        factors, which are 1; otherwise it always multiplies, while exponentials are computed
        (`Forward.softmax_side_by_side`). Which costs more was measured.
      ctas: that a multiprocessor has at a time.
      q_slices: slices of Q, 16 columns each, that registers hold as operands of Q K^T, in kernels
        without ranges, biases and pages.
      l2_bytes: share of the L2 that K and V of the heads in flight may fill under a band.
    """

    m: int
    n: int
    kv_stages: int
    span_bytes: int = 128
    own_output: bool = True
    skips_rescaling: bool = True
    ctas: int = 1
    q_slices: int = 0
    l2_bytes: int = L2_BUDGET_BYTES

    @property
    def mma_warpgroups(self) -> int:
        return self.m // 64

    @property
    def q_stages(self) -> int:
        """Depth of the query ring: the next tile's is loaded early where memory is left."""
        return 2 if self.own_output else 1


FORWARD_TILES: dict[tuple[int, int, bool], ForwardTile] = {
    # (head_dim, value_dim, KernelKey.short)
    (64, 64, False): ForwardTile(m=192, n=128, kv_stages=2),
    (64, 64, True): ForwardTile(m=128, n=128, kv_stages=4, skips_rescaling=False),
    (96, 96, False): ForwardTile(m=192, n=112, kv_stages=2, span_bytes=64),
    (96, 96, True): ForwardTile(
        m=128,
        n=128,
        kv_stages=2,
        span_bytes=64,
        skips_rescaling=False,
    ),
    (128, 128, False): ForwardTile(m=128, n=128, kv_stages=2, skips_rescaling=False, q_slices=4),
    (192, 128, False): ForwardTile(
        m=128, n=128, kv_stages=2, own_output=False, skips_rescaling=False
    ),
    (192, 192, False): ForwardTile(m=128, n=96, kv_stages=2, own_output=False),
    (256, 256, False): ForwardTile(
        m=128, n=64, kv_stages=2, own_output=False, l2_bytes=HALF_L2_BUDGET_BYTES
    ),
}


DENSE_FORWARD_TILES: dict[tuple[int, int], ForwardTile] = {
    # (head_dim, value_dim), of kernels without a band
    (128, 128): ForwardTile(m=192, n=80, kv_stages=4, own_output=False),
}
"""Three warpgroups read a block of K and V where two did, and power limits long calls: what moves
fewer bytes and executes fewer instructions has the higher clock (docs/hopper-power.md)."""


NARROW_FORWARD_TILES: dict[int, ForwardTile] = {
    # head_dim, with KernelKey.narrow
    64: ForwardTile(m=64, n=64, kv_stages=3, skips_rescaling=False, ctas=3),
}
"""Where a row sees few keys, what surrounds a tile's few blocks counts, and how many of their pairs
are hidden. With a window of 128, 64 rows visit three blocks of 64 keys, two thirds of whose pairs
are seen; 128 rows visit two of 128, of which half are. Three CTAs hide each other's latencies."""


def forward_tile(key: KernelKey) -> ForwardTile:
    """Returns the tile of a forward."""
    if key.narrow:
        return NARROW_FORWARD_TILES[key.head_dim]
    dims = (key.head_dim, key.value_dim)
    if not key.band and dims in DENSE_FORWARD_TILES:
        return DENSE_FORWARD_TILES[dims]
    tile = FORWARD_TILES[key.head_dim, key.value_dim, key.short]
    if key.soft_cap and key.value_dim >= 128:
        # The softmax of capped scores leaves no idle cycles for the output's multiplications.
        return dataclasses.replace(tile, skips_rescaling=True)
    return tile


def leaves_out(key: KernelKey) -> bool:
    """Whether a warpgroup of a forward leaves out the blocks that its own rows do not see."""
    return key.band and forward_tile(key).mma_warpgroups > 2


def leaves_past_rows(key: KernelKey) -> bool:
    """Whether a warpgroup of a dense forward leaves out all blocks if it has no row of the call."""
    return not key.band and (key.head_dim, key.value_dim) in DENSE_FORWARD_TILES


@dataclasses.dataclass(frozen=True)
class TangentTile:
    """Sizes of the tangent kernel.

    Attributes:
      m: query rows of a CTA, 64 for each MMA warpgroup.
      n: keys of a block.
      k_stages, v_stages: depth of the ring of K and its tangent, and of that of V. Where V's is
        the shallower one, each block of K is loaded before V of the block before.
      span_bytes: swizzle span of all operand tiles.
      own_output: the output tile has memory of its own; otherwise it takes Q's once the tile's
        scores are complete, and the next Q is loaded when its tangent has been stored.
      by_slices: the three products of scores are issued slice by slice. One after another they
        would keep descriptors of all slices in registers, and spill others.
    """

    m: int
    n: int
    k_stages: int = 2
    v_stages: int = 2
    span_bytes: int = 128
    own_output: bool = True
    by_slices: bool = False

    @property
    def mma_warpgroups(self) -> int:
        return self.m // 64

    @property
    def keys_ahead(self) -> bool:
        """Whether each block of K is loaded before V of the block before."""
        return self.v_stages < self.k_stages


TANGENT_TILES: dict[int, TangentTile] = {
    # head_dim
    64: TangentTile(m=192, n=64),
    96: TangentTile(m=128, n=96, span_bytes=64),
    128: TangentTile(m=128, n=64),
    192: TangentTile(m=128, n=48, v_stages=1, own_output=False),
    256: TangentTile(m=128, n=32, v_stages=1, own_output=False, by_slices=True),
}


@dataclasses.dataclass(frozen=True)
class HessianTile:
    """Sizes of a kernel of Hessian-vector products.

    Attributes:
      m: rows of a CTA, of queries or of keys, 64 for each MMA warpgroup.
      n: columns of a block, keys or queries. A thread holds n / 2 registers each of S, S', dP, dP'.
      stages: depth of the ring of blocks.
      span_bytes: swizzle span of all operand tiles.
      late_sums: a block's sums run on in the next block's step, for which registers hold the
        operands of both.
    """

    m: int
    n: int
    stages: int
    span_bytes: int = 128
    late_sums: bool = True

    @property
    def mma_warpgroups(self) -> int:
        return self.m // 64


HESSIAN_QUERY_TILES: dict[int, HessianTile] = {
    # head_dim; rows are queries
    64: HessianTile(m=128, n=64, stages=3),
    96: HessianTile(m=128, n=64, stages=2, span_bytes=64),
    128: HessianTile(m=128, n=48, stages=2),
}

HESSIAN_KEY_TILES: dict[int, HessianTile] = {
    # head_dim; rows are keys, and n divides STATISTICS_ROWS
    64: HessianTile(m=128, n=32, stages=4),
    96: HessianTile(m=128, n=32, stages=4, span_bytes=64),
    128: HessianTile(m=128, n=32, stages=3, late_sums=False),
}


@dataclasses.dataclass(frozen=True)
class BackwardTile:
    """Sizes of the backward kernel; it has two MMA warpgroups.

    Attributes:
      m: query rows of a step.
      n: keys of a CTA.
      stages: depth of the Q ring.
      do_stages: depth of the dO ring.
      span_bytes: swizzle span of all operand tiles but K's.
      key_span_bytes: of K's tiles, which the columns of a warpgroup's dQ divide.
      post_span_bytes: of dQ's tile in the kernel after the main one; its warps' columns divide it.
      ctas: 2 for a pair whose CTAs exchange dS: each then adds half of dQ's columns.
      k_slices, v_slices: slices of 16 columns of K and V that registers hold, as operands of S and
        dP; products then read less shared memory, whose port binds. As many as fit and pay.
      masked_v_slices: v_slices of kernels with ranges, and of those with a soft cap, too, where
        these leave fewer registers; biased_v_slices: likewise of kernels with a bias.
      late_dq: a pair computes dQ of a step in the next one (backward_pair.py, Note [late dQ]); it
        needs three stages of Q and dO. Not in a fixed order, where the next pair waits for it.
      delta_after_scores: a step loads delta when its scores are there, not before it waits for
        them, which would hold up the next product; it takes a few more registers.
      first_slices: slices of 16 queries whose dS is computed and whose share of dV is issued before
        the others' dS is computed: meanwhile both warpgroups would leave the tensor core idle.
        0: all at once.
      dq_buffers: steps of dQ that shared memory holds where it is staged there. With two, the next
        step hands dQ over (backward_dq.py, Note [late]); with one, its own step does.
      splits_tail: CTAs share the last tiles of a dense call (backward_tail.py). At d = 64 the
        compiler then arranges a step worse, which costs as much as the tail.
    """

    m: int
    n: int
    stages: int
    do_stages: int = 2
    span_bytes: int = 128
    key_span_bytes: int = 128
    post_span_bytes: int = 128
    ctas: int = 1
    k_slices: int = 0
    v_slices: int = 0
    masked_v_slices: tuple[int, int] | None = None
    biased_v_slices: int | None = None
    late_dq: bool = False
    delta_after_scores: bool = False
    first_slices: int = 0
    dq_buffers: int = 2
    splits_tail: bool = False

    mma_warpgroups = 2

    def of_kernel(self, deterministic: bool, soft_cap: bool) -> BackwardTile:
        """Returns the sizes of a kernel that adds dQ in a fixed order, or caps scores, or neither.

        Two buffers of dQ let two warps wait for their turns at once; a capped kernel computes P and
        dS together, and has no registers to divide this.
        """
        if deterministic and self.late_dq:
            return dataclasses.replace(self, late_dq=False, stages=2, do_stages=2)
        if (deterministic or soft_cap) and self.first_slices > 0:
            at_once = {"delta_after_scores": False, "first_slices": 0, "dq_buffers": 2}
            return dataclasses.replace(self, **at_once)
        return self

    @property
    def keys(self) -> int:
        """The number of keys of a CTA, or of a pair."""
        return self.n * self.ctas

    @property
    def persistent(self) -> bool:
        """Whether dQ passes through the shared memory of a CTA, which takes tile after tile.

        The MMA warps then wait neither for the L2 to take their registers nor for their turn. A
        pair takes tile after tile, too, but its shared memory has no room for dQ.
        """
        return self.ctas == 1

    @property
    def split_rows(self) -> bool:
        """True: a warpgroup owns 64 query rows of dQ; False: half of its columns."""
        return self.m == 128

    @property
    def cap_at_once(self) -> int:
        """Scores of a thread that a soft cap asks about together: all, where registers allow."""
        return 16 if self.ctas == 1 else 32

    def slices(self, ranges: bool, soft_cap: bool, bias: bool) -> tuple[int, int]:
        """The slices of K and of V that registers of a kernel hold."""
        if bias and self.biased_v_slices is not None:
            return self.k_slices, self.biased_v_slices
        if ranges and self.masked_v_slices is not None:
            return self.k_slices, self.masked_v_slices[soft_cap]
        return self.k_slices, self.v_slices

    def l2_bytes(self, band: bool, ranges: bool, deterministic: bool) -> int:
        """Share of the L2 that Q, dO and dQ of the heads in flight may fill, in bytes."""
        budget = HALF_L2_BUDGET_BYTES if self.ctas == 1 else L2_BUDGET_BYTES
        queues = deterministic and band and self.ctas == 1
        by_visits = ranges and not deterministic
        return budget * (SECTIONS_AT_ONCE if queues or by_visits else 1)

    def cleared_bytes(self, deterministic: bool) -> int:
        """`Division.cleared_bytes`: the largest share of the L2 of all masks, or 0."""
        if deterministic or not self.persistent:
            return 0
        return max(self.l2_bytes(band, band, deterministic) for band in (False, True))

    def least_heads(self, band: bool, deterministic: bool) -> int:
        """KV heads that are interleaved at least, whatever the L2 holds."""
        return DETERMINISTIC_BAND_HEADS[self.ctas] if deterministic and band else 1


BACKWARD_TILES: dict[tuple[int, int], BackwardTile] = {
    # (head_dim, value_dim)
    (64, 64): BackwardTile(m=128, n=128, stages=2, delta_after_scores=True),
    (96, 96): BackwardTile(
        m=64,
        n=128,
        stages=2,
        span_bytes=64,
        key_span_bytes=32,
        post_span_bytes=32,
        v_slices=6,
        delta_after_scores=True,
        splits_tail=True,
    ),
    (128, 128): BackwardTile(
        m=64,
        n=128,
        stages=2,
        v_slices=3,
        masked_v_slices=(3, 1),
        delta_after_scores=True,
        first_slices=2,
        dq_buffers=1,
        biased_v_slices=0,
        splits_tail=True,
    ),
    (192, 128): BackwardTile(
        m=64,
        n=64,
        stages=3,
        do_stages=3,
        key_span_bytes=32,
        post_span_bytes=64,
        ctas=2,
        k_slices=8,
        v_slices=4,
        late_dq=True,
    ),
    (192, 192): BackwardTile(
        m=64,
        n=64,
        stages=2,
        key_span_bytes=32,
        post_span_bytes=64,
        ctas=2,
        k_slices=12,
        v_slices=12,
    ),
    (256, 256): BackwardTile(m=64, n=64, stages=2, do_stages=1, ctas=2),
}


def backward_row_bytes(head_dim: int, value_dim: int) -> int:
    """Returns the bytes of a query's row of Q, of dO and of dQ's accumulators together."""
    return head_dim * (2 + 4) + value_dim * 2


DETERMINISTIC_BAND_HEADS = {1: 32, 2: 8}
"""KV heads that the deterministic backward of a band interleaves at least, by CTAs of a tile.

The L2 may hold fewer. Under a causal band a section's last tiles are its shortest, so the tiles of
the next section start almost together and queue for their turns: the fewer of them belong to one
head, the shorter the queue. Pairs: 8 beat 1 (L2 alone), 16 and 32 (H200, 2026-11-20); others: 32
beat 8 and 16 (2026-11-25, with two warps that add dQ): docs/hopper.md.
"""

SECTIONS_AT_ONCE = 2
"""How many sections of heads are one where key tiles start in the order of their visits, or queue
for their turns under a band.

The tiles of a section that the L2 holds (2 heads of 64 tiles at d = 128, S = 8192) are fewer than
the multiprocessors, so its order alone shortens nothing: docs/hopper.md.
"""
