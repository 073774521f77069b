"""Data of the Hopper backward's main kernel: its operands, its work, its memory, its products."""

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from kernels.common import bands, tensors
from kernels.sm90.tiles import BackwardTile


@dataclasses.dataclass(frozen=True)
class Maps:
    """TMA descriptors, boxes (rows, head_dim) of [B, length, heads, head_dim] tensors."""

    q: cute.CopyAtom
    k: cute.CopyAtom
    v: cute.CopyAtom
    do: cute.CopyAtom
    dk: cute.CopyAtom
    dv: cute.CopyAtom


@dataclasses.dataclass(frozen=True)
class Rows:
    """Per-row fp32 inputs and the dQ accumulators, all in query tiles of `m` rows."""

    lse_log2: cute.Pointer
    delta: cute.Pointer
    dq_acc: cute.Pointer
    dq_order: cute.Pointer | None
    tiles: Int32


@dataclasses.dataclass(frozen=True)
class Work:
    """What one CTA does: a key tile of one KV head of one batch element."""

    first_key: Int32
    tile: Int32
    kv_head: Int32
    group: Int32
    heads: Int32
    batch: Int32
    band: bands.Band
    blocks: bands.BlockRange
    padded_keys: cutlass.Boolean  # the tile holds keys past the key length that TMA reads
    padded_queries: cutlass.Boolean  # so does the last query block


@dataclasses.dataclass(frozen=True)
class Shared:
    """Shared memory. k and v later stage dk and dv; *_full / *_empty guard what TMA writes."""

    k: cute.Tensor  # (n, head_dim)
    kt: cute.Tensor  # (head_dim, n), the same memory
    v: cute.Tensor  # (n, head_dim)
    q: cute.Tensor  # (m, head_dim, stage)
    qt: cute.Tensor  # (head_dim, m, stage), the same memory
    do: cute.Tensor  # (m, head_dim, stage)
    dot: cute.Tensor  # (head_dim, m, stage), the same memory
    p: cute.Tensor  # (n, m, 2), unless P stays in registers
    ds: cute.Tensor  # (n, m, 2)
    dst: cute.Tensor  # (m, n, 2), the same memory
    lse_log2: cute.Tensor  # (m, stage)
    delta: cute.Tensor  # (m, stage)
    kv_full: cute.Pointer
    q_full: cute.Pointer
    q_empty: cute.Pointer
    do_full: cute.Pointer
    do_empty: cute.Pointer
    turn: cute.Pointer
    added: cute.Pointer
    ticket: cute.Pointer  # deterministic: the CTA's place among those that have started


@dataclasses.dataclass(frozen=True)
class Products:
    """The five matrix products, transposed scores first."""

    scores: tensors.Wgmma  # S^T and dP^T: (n, m)
    grads: tensors.Wgmma  # dV and dK: (n, head_dim)
    dq: tensors.Wgmma  # dQ: (m, head_dim)


def make_products(dtype, head_dim: int, tile: BackwardTile) -> Products:
    """How the two warpgroups tile each product."""
    d = head_dim
    k_major, mn_major = tensors.K_MAJOR, tensors.MN_MAJOR
    if tile.split_keys:
        scores = tensors.Wgmma(dtype, (2, 1), tile.m, (k_major, k_major))
        grads = tensors.Wgmma(dtype, (2, 1), d, (k_major, mn_major), tensors.REGISTERS)
    else:
        scores = tensors.Wgmma(dtype, (1, 2), tile.m // 2, (k_major, k_major))
        grads = tensors.Wgmma(dtype, (1, 2), d // 2, (k_major, mn_major))
    warpgroups, columns = ((2, 1), d) if tile.split_rows else ((1, 2), d // 2)
    dq = tensors.Wgmma(dtype, warpgroups, columns, (mn_major, mn_major))
    return Products(scores, grads, dq)


def allocate(dtype, head_dim: int, tile: BackwardTile) -> Shared:
    """Carves shared memory; operand tiles start on 1024 bytes, as 128-byte swizzling asks."""
    d = head_dim
    key_layout = tensors.tile_layout(dtype, tile.n, d, 1, tile.span_bytes)
    query_layout = tensors.tile_layout(dtype, tile.m, d, tile.stages, tile.span_bytes)
    score_layout = tensors.tile_layout(dtype, tile.n, tile.m, 2)
    statistics = cute.make_layout((tile.m, tile.stages))
    key_size, query_size = cute.cosize(key_layout), cute.cosize(query_layout)
    score_size = cute.cosize(score_layout)

    @cute.struct
    class Storage:
        kv_full: cute.struct.MemRange[cutlass.Int64, 1]
        turn: cute.struct.MemRange[cutlass.Int64, 1]
        added: cute.struct.MemRange[cutlass.Int64, 1]
        q_full: cute.struct.MemRange[cutlass.Int64, tile.stages]
        q_empty: cute.struct.MemRange[cutlass.Int64, tile.stages]
        do_full: cute.struct.MemRange[cutlass.Int64, tile.stages]
        do_empty: cute.struct.MemRange[cutlass.Int64, tile.stages]
        ticket: cutlass.Int32
        lse_log2: cute.struct.Align[cute.struct.MemRange[Float32, tile.m * tile.stages], 1024]
        delta: cute.struct.Align[cute.struct.MemRange[Float32, tile.m * tile.stages], 128]
        k: cute.struct.Align[cute.struct.MemRange[dtype, key_size], 1024]
        v: cute.struct.Align[cute.struct.MemRange[dtype, key_size], 1024]
        q: cute.struct.Align[cute.struct.MemRange[dtype, query_size], 1024]
        do: cute.struct.Align[cute.struct.MemRange[dtype, query_size], 1024]
        ds: cute.struct.Align[cute.struct.MemRange[dtype, score_size], 1024]
        p: cute.struct.Align[
            cute.struct.MemRange[dtype, 0 if tile.split_keys else score_size], 1024
        ]

    storage = cutlass.memory.SmemAllocator().allocate(Storage)

    def view(field, layout):
        return tensors.smem_tensor(field, layout)

    transposed = tensors.transposed
    return Shared(
        k=view(storage.k, key_layout)[None, None, 0],
        kt=view(storage.k, transposed(key_layout))[None, None, 0],
        v=view(storage.v, key_layout)[None, None, 0],
        q=view(storage.q, query_layout),
        qt=view(storage.q, transposed(query_layout)),
        do=view(storage.do, query_layout),
        dot=view(storage.do, transposed(query_layout)),
        p=view(storage.ds if tile.split_keys else storage.p, score_layout),
        ds=view(storage.ds, score_layout),
        dst=view(storage.ds, transposed(score_layout)),
        lse_log2=storage.lse_log2.get_tensor(statistics),
        delta=storage.delta.get_tensor(statistics),
        kv_full=storage.kv_full.data_ptr(),
        q_full=storage.q_full.data_ptr(),
        q_empty=storage.q_empty.data_ptr(),
        do_full=storage.do_full.data_ptr(),
        do_empty=storage.do_empty.data_ptr(),
        turn=storage.turn.data_ptr(),
        added=storage.added.data_ptr(),
        ticket=storage.ticket.ptr,
    )
