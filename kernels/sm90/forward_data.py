"""Data of the Hopper forward: its operands and its memory."""

import dataclasses

import cutlass
import cutlass.cute as cute

from kernels.common import tensors
from kernels.sm90.tiles import ForwardTile


@dataclasses.dataclass(frozen=True)
class Maps:
    """TMA descriptors, boxes (rows, head_dim) of [B, length, heads, head_dim] tensors."""

    q: cute.CopyAtom
    k: cute.CopyAtom
    v: cute.CopyAtom
    o: cute.CopyAtom


@dataclasses.dataclass(frozen=True)
class Shared:
    """Shared memory; k and v are rings; *_full / *_empty guard what TMA writes."""

    q: cute.Tensor  # (m, head_dim)
    o: cute.Tensor  # (m, head_dim), q's memory unless the tile table gives it its own
    k: cute.Tensor  # (n, head_dim, stage)
    v: cute.Tensor  # (n, head_dim, stage)
    vt: cute.Tensor  # (head_dim, n, stage), the same memory as v
    q_full: cute.Pointer
    q_empty: cute.Pointer
    k_full: cute.Pointer
    k_empty: cute.Pointer
    v_full: cute.Pointer
    v_empty: cute.Pointer


def allocate(dtype, head_dim: int, tile: ForwardTile) -> Shared:
    """Carves shared memory; operand tiles start on 1024 bytes, as 128-byte swizzling asks."""
    d = head_dim
    q_layout = tensors.tile_layout(dtype, tile.m, d, 1, tile.span_bytes)
    kv_layout = tensors.tile_layout(dtype, tile.n, d, tile.kv_stages, tile.span_bytes)
    o_size = cute.cosize(q_layout) if tile.own_output else 0

    @cute.struct
    class Storage:
        q_full: cute.struct.MemRange[cutlass.Int64, 1]
        q_empty: cute.struct.MemRange[cutlass.Int64, 1]
        k_full: cute.struct.MemRange[cutlass.Int64, tile.kv_stages]
        k_empty: cute.struct.MemRange[cutlass.Int64, tile.kv_stages]
        v_full: cute.struct.MemRange[cutlass.Int64, tile.kv_stages]
        v_empty: cute.struct.MemRange[cutlass.Int64, tile.kv_stages]
        q: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(q_layout)], 1024]
        k: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(kv_layout)], 1024]
        v: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(kv_layout)], 1024]
        o: cute.struct.Align[cute.struct.MemRange[dtype, o_size], 1024]

    storage = cutlass.memory.SmemAllocator().allocate(Storage)
    return Shared(
        q=tensors.smem_tensor(storage.q, q_layout)[None, None, 0],
        o=tensors.smem_tensor(storage.o if tile.own_output else storage.q, q_layout)[None, None, 0],
        k=tensors.smem_tensor(storage.k, kv_layout),
        v=tensors.smem_tensor(storage.v, kv_layout),
        vt=tensors.smem_tensor(storage.v, tensors.transposed(kv_layout)),
        q_full=storage.q_full.data_ptr(),
        q_empty=storage.q_empty.data_ptr(),
        k_full=storage.k_full.data_ptr(),
        k_empty=storage.k_empty.data_ptr(),
        v_full=storage.v_full.data_ptr(),
        v_empty=storage.v_empty.data_ptr(),
    )
