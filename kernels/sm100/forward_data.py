"""Data of the Blackwell forward: operands, shared memory, tensor memory, barriers."""

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from fa4_jax.key import KernelKey
from kernels.common import tensors
from kernels.common.schedule import ForwardShape
from kernels.sm100 import products
from kernels.sm100.packing import WORDS, Work, from_words
from kernels.sm100.tiles import BUFFERS, FORWARD_TILES, L2_BUDGET_BYTES, ForwardTile

WARPS_OF_ROLE = {
    # role: (first warp, warps). Softmax and correction warps reach the lanes of their place in a
    # warpgroup, so each of their roles starts at a multiple of four.
    "softmax0": (0, 4),
    "softmax1": (4, 4),
    "correction": (8, 4),
    "mma": (12, 1),
    "load": (13, 1),
    "store": (14, 1),
    "schedule": (15, 1),
}
WORK_SLOTS = 2  # tiles whose work is known at a time

ARRIVALS = {
    # barrier: arrivals that complete a phase, in a pair from each CTA if it is in IN_EVEN_CTA.
    # barrier_count says how many of each there are.
    "work_full": 1,  # schedule warp
    "work_empty": 7,  # all other warps; here but for softmax's, 4 for each query tile
    "q_full": 1,  # load warp, with the bytes of a query tile
    "q_empty": 1,  # commit behind the last product that reads the query tile
    "kv_full": 1,  # load warp, with the bytes of a block
    "kv_empty": 1,  # commit behind the last product that reads the block
    "s_full": 1,  # commit behind the scores of a block
    "p_early": 8,  # softmax warps: P's first part is there; correction warps: O may change
    "p_late": 4,  # softmax warps: another part of P is there
    "o_full": 1,  # commit behind the last product of a query tile; of every block, if it is alone
    "sums_full": 4,  # softmax warps: the inverse row sums are there
    "sums_empty": 4,  # correction warps have read them
    "out_full": 4,  # correction warps: a span of the output tile is in shared memory
    "out_empty": 1,  # store warp: it has left
}
IN_EVEN_CTA = ("q_full", "kv_full", "p_early", "p_late")
"""What a pair's MMA warp waits for. The odd CTA's loads come to its own barriers, and from there
as an arrival of its MMA warp, which has nothing else to do."""


@dataclasses.dataclass(frozen=True)
class Barriers:
    """The first mbarrier of each name in ARRIVALS."""

    work_full: cute.Pointer
    work_empty: cute.Pointer
    q_full: cute.Pointer
    q_empty: cute.Pointer
    kv_full: cute.Pointer
    kv_empty: cute.Pointer
    s_full: cute.Pointer
    p_early: cute.Pointer
    p_late: cute.Pointer
    o_full: cute.Pointer
    sums_full: cute.Pointer
    sums_empty: cute.Pointer
    out_full: cute.Pointer
    out_empty: cute.Pointer


FACTORS = 1  # first of the named barriers of warp w of softmax and correction: FACTORS + 4 b + w


class Config:
    """Compile-time constants of one kernel, shared by its roles."""

    def __init__(self, key: KernelKey):
        self.dtype = tensors.TYPES[key.dtype]
        self.head_dim = key.head_dim
        self.band = key.band
        self.tile = FORWARD_TILES[key.head_dim]
        self.polynomial_pairs = self.tile.polynomial_pairs if key.polynomial_exp2 else 0
        self.columns = self.tile.columns(key.head_dim)
        self.shape = ForwardShape(
            m=self.tile.m,
            n=self.tile.n,
            kv_row_bytes=2 * key.head_dim * 2,
            l2_bytes=L2_BUDGET_BYTES,
            band=key.band,
        )

    def buffer(self, t, ordinal: Int32) -> tuple:
        """(score buffer, phase parity) of query tile t's block, the ordinal-th of this CTA."""
        if self.tile.buffers_per_tile == 1:
            return t, ordinal & 1
        return ordinal & 1, (ordinal >> 1) & 1


@dataclasses.dataclass(frozen=True)
class Maps:
    """TMA descriptors of [B, length, heads, head_dim] tensors.

    q and o move by whole tiles where a tile has one head's rows, else by units of 8 rows.
    """

    q: cute.CopyAtom
    k: cute.CopyAtom
    v: cute.CopyAtom
    o: cute.CopyAtom
    q_rows: cute.CopyAtom
    o_rows: cute.CopyAtom


@dataclasses.dataclass(frozen=True)
class Shared:
    """Shared memory; k and v are one ring that holds K(0), V(0), K(1), V(1), ... of the blocks."""

    q: cute.Tensor  # (rows, head_dim, query tile)
    o: cute.Tensor  # (rows, head_dim): a query tile's output on its way
    k: cute.Tensor  # (keys of a CTA, head_dim, stage)
    v: cute.Tensor  # (n, columns of a CTA, stage), k's memory
    factors: cute.Tensor  # (rows, buffer) f32: by what O is rescaled before the block
    inverse_sums: cute.Tensor  # (rows, query tile) f32; negative where there is no output
    work: cute.Tensor  # (word, slot) i32: what the schedule warp says of a tile
    tmem_base: cute.Pointer
    barriers: Barriers


def allocate(dtype, head_dim: int, tile: ForwardTile) -> Shared:
    """Carves shared memory; operand tiles start on 1024 bytes, as 128-byte swizzling asks."""
    tiles_layout = tensors.tile_layout(
        dtype, tile.rows, head_dim, tile.query_tiles, tile.span_bytes
    )
    k_layout = tensors.tile_layout(dtype, tile.keys, head_dim, tile.kv_stages, tile.span_bytes)
    v_layout = tensors.tile_layout(
        dtype, tile.n, tile.columns_of_v(head_dim), tile.kv_stages, tile.span_bytes
    )
    rows_layout = cute.make_layout((tile.rows, BUFFERS))
    o_layout = tensors.tile_layout(dtype, tile.rows, head_dim, 1, tile.span_bytes)
    counts = {name: barrier_count(name, tile, head_dim) for name in ARRIVALS}

    @cute.struct
    class Storage:
        barriers: cute.struct.MemRange[cutlass.Int64, sum(counts.values())]
        tmem_base: Int32
        work: cute.struct.MemRange[Int32, WORDS * WORK_SLOTS]
        factors: cute.struct.MemRange[cutlass.Float32, BUFFERS * tile.rows]
        inverse_sums: cute.struct.MemRange[cutlass.Float32, BUFFERS * tile.rows]
        q: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(tiles_layout)], 1024]
        kv: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(k_layout)], 1024]
        o: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(o_layout)], 1024]

    storage = cutlass.memory.SmemAllocator().allocate(Storage)
    barriers, first = {}, 0
    for name, count in counts.items():
        barriers[name] = storage.barriers.data_ptr() + first
        first += count
    return Shared(
        q=tensors.smem_tensor(storage.q, tiles_layout),
        o=tensors.smem_tensor(storage.o, o_layout)[None, None, 0],
        k=tensors.smem_tensor(storage.kv, k_layout),
        v=tensors.smem_tensor(storage.kv, v_layout),
        factors=storage.factors.get_tensor(rows_layout),
        inverse_sums=storage.inverse_sums.get_tensor(rows_layout),
        work=storage.work.get_tensor(cute.make_layout((WORDS, WORK_SLOTS))),
        tmem_base=storage.tmem_base.ptr,
        barriers=Barriers(**barriers),
    )


def barrier_count(name: str, tile: ForwardTile, head_dim: int) -> int:
    """How many barriers of a name there are."""
    if name.startswith("work"):
        return WORK_SLOTS
    if name.startswith("kv"):
        return tile.kv_stages
    if name.startswith("out"):
        return head_dim // tile.span
    if name == "p_late":
        return BUFFERS * (len(tile.parts) - 1)
    return BUFFERS if name in ("s_full", "p_early") else tile.query_tiles


def arrivals(name: str, tile: ForwardTile) -> Int32:
    """Arrivals that complete a phase of a barrier of this CTA."""
    if name == "work_empty":
        return Int32(ARRIVALS[name] + 4 * tile.query_tiles)
    if tile.ctas == 1 or name not in IN_EVEN_CTA:
        return Int32(ARRIVALS[name])
    even = cute.arch.block_idx_in_cluster() == 0
    return Int32(cutlass.select_(even, Int32(tile.ctas * ARRIVALS[name]), Int32(ARRIVALS[name])))


def look(shared: Shared, turn: Int32, window: tuple | None = None) -> Work:
    """The work of this CTA's tile in a round, as the schedule warp has worked it out.

    window: (left, right) of a band kernel, for roles that look at the mask.
    """
    slot, phase = tensors.ring_slot(turn, WORK_SLOTS)
    cute.arch.mbarrier_wait(shared.barriers.work_full + slot, phase)
    return from_words([shared.work[i, slot] for i in range(WORDS)], window)


def take(shared: Shared, turn: Int32, window: tuple | None = None) -> Work:
    """`look`, for the last time: the schedule warp may write another tile's work there."""
    work = look(shared, turn, window)
    products.arrive(shared.barriers.work_empty + turn % WORK_SLOTS)
    return work


def part_barrier(barriers: Barriers, tile: ForwardTile, buffer: Int32, part: int) -> cute.Pointer:
    """What says that a part of P is there."""
    if part == 0:
        return barriers.p_early + buffer
    return barriers.p_late + (buffer * (len(tile.parts) - 1) + part - 1)
