"""Data of the Blackwell forward: operands, shared memory, tensor memory, barriers."""

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kernels.common import tensors
from kernels.sm100.tiles import ForwardTile

TILES = 2  # query tiles of a CTA, in ping-pong

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
    # barrier: arrivals that complete a phase. Every one but those of the ring exists once per
    # query tile.
    "q_full": 1,  # load warp, with the bytes of a query tile
    "q_empty": 1,  # commit behind the last scores of a query tile
    "kv_full": 1,  # load warp, with the bytes of a block
    "kv_empty": 1,  # commit behind the last product that reads the block
    "s_full": 1,  # commit behind the scores of a block
    "p_early": 8,  # softmax warps: P's early keys are there; correction warps: O is rescaled
    "p_late": 4,  # softmax warps: the rest of P is there
    "o_full": 1,  # commit behind the last product of a query tile
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


FACTORS = 1  # first of the named barriers of softmax warp w of tile t: FACTORS + 4 t + w


@dataclasses.dataclass(frozen=True)
class Maps:
    """TMA descriptors, boxes (rows, span) of [B, length, heads, head_dim] tensors."""

    q: cute.CopyAtom
    k: cute.CopyAtom
    v: cute.CopyAtom
    o: cute.CopyAtom


@dataclasses.dataclass(frozen=True)
class Shared:
    """Shared memory; kv is a ring that holds K(0), V(0), K(1), V(1), ... of the blocks visited."""

    q: cute.Tensor  # (rows, head_dim, query tile)
    o: cute.Tensor  # (rows, head_dim, query tile)
    kv: cute.Tensor  # (n, head_dim, stage)
    kv_transposed: cute.Tensor  # (head_dim, n, stage), the same memory
    factors: cute.Tensor  # (rows, query tile) f32: by what O is rescaled before this block
    inverse_sums: cute.Tensor  # (rows, query tile) f32; negative where there is no output
    tmem_base: cute.Pointer
    barriers: Barriers


def allocate(dtype, head_dim: int, tile: ForwardTile) -> Shared:
    """Carves shared memory; operand tiles start on 1024 bytes, as 128-byte swizzling asks."""
    tiles_layout = tensors.tile_layout(dtype, tile.rows, head_dim, TILES, tile.span_bytes)
    kv_layout = tensors.tile_layout(dtype, tile.n, head_dim, tile.kv_stages, tile.span_bytes)
    rows_layout = cute.make_layout((tile.rows, TILES))
    counts = {name: barrier_count(name, tile) for name in ARRIVALS}

    @cute.struct
    class Storage:
        barriers: cute.struct.MemRange[cutlass.Int64, sum(counts.values())]
        tmem_base: Int32
        factors: cute.struct.MemRange[cutlass.Float32, TILES * tile.rows]
        inverse_sums: cute.struct.MemRange[cutlass.Float32, TILES * tile.rows]
        q: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(tiles_layout)], 1024]
        o: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(tiles_layout)], 1024]
        kv: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(kv_layout)], 1024]

    storage = cutlass.memory.SmemAllocator().allocate(Storage)
    barriers, first = {}, 0
    for name, count in counts.items():
        barriers[name] = storage.barriers.data_ptr() + first
        first += count
    return Shared(
        q=tensors.smem_tensor(storage.q, tiles_layout),
        o=tensors.smem_tensor(storage.o, tiles_layout),
        kv=tensors.smem_tensor(storage.kv, kv_layout),
        kv_transposed=tensors.smem_tensor(storage.kv, tensors.transposed(kv_layout)),
        factors=storage.factors.get_tensor(rows_layout),
        inverse_sums=storage.inverse_sums.get_tensor(rows_layout),
        tmem_base=storage.tmem_base.ptr,
        barriers=Barriers(**barriers),
    )


def barrier_count(name: str, tile: ForwardTile) -> int:
    """How many barriers of a name there are."""
    return tile.kv_stages if name.startswith("kv") else TILES
