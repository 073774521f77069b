"""Data of the Blackwell forward: operands, shared memory, tensor memory, barriers."""

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from fa4_jax.key import KernelKey
from kernels.common import tensors
from kernels.common.schedule import ForwardShape
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
}

ARRIVALS = {
    # barrier: arrivals that complete a phase. barrier_count says how many of each there are.
    "q_full": 1,  # load warp, with the bytes of a query tile
    "q_empty": 1,  # commit behind the last product; or store warp, if the output took the memory
    "kv_full": 1,  # load warp, with the bytes of a block
    "kv_empty": 1,  # commit behind the last product that reads the block
    "s_full": 1,  # commit behind the scores of a block
    "p_early": 8,  # softmax warps: P's first part is there; correction warps: O is rescaled
    "p_late": 4,  # softmax warps: another part of P is there
    "o_full": 1,  # commit behind the last product of a query tile; of every block, if it is alone
    "sums_full": 4,  # softmax warps: the inverse row sums are there
    "sums_empty": 4,  # correction warps have read them
    "out_full": 4,  # correction warps: the output tile is in shared memory
    "out_empty": 1,  # store warp: it has left
}


@dataclasses.dataclass(frozen=True)
class Barriers:
    """The first mbarrier of each name in ARRIVALS."""

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
    """Shared memory; kv is a ring that holds K(0), V(0), K(1), V(1), ... of the blocks visited."""

    q: cute.Tensor  # (rows, head_dim, query tile)
    o: (
        cute.Tensor
    )  # (rows, head_dim, output buffer), q's memory unless the tile table gives it its own
    kv: cute.Tensor  # (n, head_dim, stage)
    factors: cute.Tensor  # (rows, buffer) f32: by what O is rescaled before the block
    inverse_sums: cute.Tensor  # (rows, query tile) f32; negative where there is no output
    tmem_base: cute.Pointer
    barriers: Barriers


def allocate(dtype, head_dim: int, tile: ForwardTile) -> Shared:
    """Carves shared memory; operand tiles start on 1024 bytes, as 128-byte swizzling asks."""
    tiles_layout = tensors.tile_layout(
        dtype, tile.rows, head_dim, tile.query_tiles, tile.span_bytes
    )
    kv_layout = tensors.tile_layout(dtype, tile.n, head_dim, tile.kv_stages, tile.span_bytes)
    rows_layout = cute.make_layout((tile.rows, BUFFERS))
    o_layout = tensors.tile_layout(dtype, tile.rows, head_dim, tile.output_buffers, tile.span_bytes)
    o_size = cute.cosize(o_layout) if tile.output_tiles else 0
    counts = {name: barrier_count(name, tile) for name in ARRIVALS}

    @cute.struct
    class Storage:
        barriers: cute.struct.MemRange[cutlass.Int64, sum(counts.values())]
        tmem_base: Int32
        factors: cute.struct.MemRange[cutlass.Float32, BUFFERS * tile.rows]
        inverse_sums: cute.struct.MemRange[cutlass.Float32, BUFFERS * tile.rows]
        q: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(tiles_layout)], 1024]
        kv: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(kv_layout)], 1024]
        o: cute.struct.Align[cute.struct.MemRange[dtype, o_size], 1024]

    storage = cutlass.memory.SmemAllocator().allocate(Storage)
    barriers, first = {}, 0
    for name, count in counts.items():
        barriers[name] = storage.barriers.data_ptr() + first
        first += count
    return Shared(
        q=tensors.smem_tensor(storage.q, tiles_layout),
        o=tensors.smem_tensor(storage.o if tile.output_tiles else storage.q, o_layout),
        kv=tensors.smem_tensor(storage.kv, kv_layout),
        factors=storage.factors.get_tensor(rows_layout),
        inverse_sums=storage.inverse_sums.get_tensor(rows_layout),
        tmem_base=storage.tmem_base.ptr,
        barriers=Barriers(**barriers),
    )


def barrier_count(name: str, tile: ForwardTile) -> int:
    """How many barriers of a name there are."""
    if name.startswith("kv"):
        return tile.kv_stages
    if name.startswith("out"):
        return tile.output_buffers
    if name == "p_late":
        return BUFFERS * (len(tile.parts) - 1)
    return BUFFERS if name in ("s_full", "p_early") else tile.query_tiles


def part_barrier(barriers: Barriers, tile: ForwardTile, buffer: Int32, part: int) -> cute.Pointer:
    """What says that a part of P is there."""
    if part == 0:
        return barriers.p_early + buffer
    return barriers.p_late + (buffer * (len(tile.parts) - 1) + part - 1)


def output_buffer(tile: ForwardTile, turn: Int32, t: int) -> tuple:
    """(output buffer, phase parity) of query tile t of the turn-th tile of this CTA."""
    if tile.output_buffers == tile.query_tiles:
        return t, turn & 1
    return 0, t & 1
