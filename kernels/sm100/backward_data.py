"""Data of the Blackwell backward's main kernel: operands, work, shared memory, barriers."""

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from fa4_jax.key import KernelKey
from kernels.common import bands, tensors
from kernels.sm100 import products
from kernels.sm100.tiles import BACKWARD_TILES

WARPS_OF_ROLE = {
    # role: (first warp, warps). Reduce and compute warps reach the lanes of their place in a
    # warpgroup, so each of their roles starts at a multiple of four.
    "reduce": (0, 4),
    "compute": (4, 8),
    "mma": (12, 1),
    "load": (13, 1),
    "order": (14, 1),
}
HALVES = 2  # of the queries of a step, one for each compute warpgroup

ARRIVALS = {
    # barrier: arrivals that complete a phase. Those of the rings exist once per stage.
    "kv_full": 1,  # load warp, with the bytes of K and V
    "q_full": 1,  # load warp, with the bytes of Q, lse_log2 and delta
    "q_empty": 1,  # commit behind the last product that reads Q
    "do_full": 1,  # load warp, with the bytes of dO
    "do_empty": 1,  # commit behind the last product that reads dO
    "s_full": 1,  # commit behind S
    "p_full": 8,  # compute warps: P is there
    "dp_full": 1,  # commit behind dP
    "ds_full": 8,  # compute warps: dS is there, in tensor and in shared memory
    "dq_full": 1,  # commit behind dQ
    "dq_empty": 4,  # reduce warps have read dQ
    "grads_full": 1,  # commit behind the last product
    "turn": 1,  # order warp: dQ may be added (deterministic)
    "added": 4,  # reduce warps: it has been (deterministic)
}


@dataclasses.dataclass(frozen=True)
class Barriers:
    """The first mbarrier of each name in ARRIVALS."""

    kv_full: cute.Pointer
    q_full: cute.Pointer
    q_empty: cute.Pointer
    do_full: cute.Pointer
    do_empty: cute.Pointer
    s_full: cute.Pointer
    p_full: cute.Pointer
    dp_full: cute.Pointer
    ds_full: cute.Pointer
    dq_full: cute.Pointer
    dq_empty: cute.Pointer
    grads_full: cute.Pointer
    turn: cute.Pointer
    added: cute.Pointer


class Config:
    """Compile-time constants of one kernel, shared by its roles; all five products."""

    def __init__(self, key: KernelKey):
        self.dtype = tensors.TYPES[key.dtype]
        self.band = key.band
        self.deterministic = key.deterministic
        self.tile = BACKWARD_TILES[key.head_dim]
        self.head_dim = self.tile.columns_of_head(key.head_dim)
        self.part = self.head_dim // self.tile.parts  # columns of dV, dK, dQ that a CTA has
        self.columns = self.tile.columns(key.head_dim)
        m, n = self.tile.m, self.tile.n
        self.scores = products.Product(self.dtype, n, m)
        self.grads = products.Product(self.dtype, n, self.part)
        # With several parts transposed, since 64 queries would fill half of the tensor core.
        dq_shape = (m, self.part) if self.tile.parts == 1 else (self.part, m)
        self.dq = products.Product(self.dtype, *dq_shape)

    @property
    def dq_takes_dp(self) -> bool:
        """Whether dQ and dP share columns."""
        return self.columns.dq == self.columns.dp


@dataclasses.dataclass(frozen=True)
class Maps:
    """TMA descriptors, boxes (rows, span) of [B, length, heads, head_dim] tensors."""

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
    part: Int32  # of head_dim
    kv_head: Int32
    group: Int32
    heads: Int32
    batch: Int32
    band: bands.Band
    blocks: bands.BlockRange
    padded_keys: cutlass.Boolean  # the tile holds keys past the key length that TMA reads
    padded_queries: cutlass.Boolean  # so does the last query block

    def steps(self) -> Int32:
        """Query blocks of all heads of the group."""
        return (self.blocks.end - self.blocks.begin) * self.group

    def step(self, index: Int32, deterministic: bool) -> tuple[Int32, Int32]:
        """(head, query block) of a step; last block first where dQ is added in order."""
        blocks = self.blocks.end - self.blocks.begin
        member = index // blocks
        block = index - member * blocks
        block = self.blocks.end - 1 - block if deterministic else self.blocks.begin + block
        return self.kv_head * self.group + member, block


@dataclasses.dataclass(frozen=True)
class Shared:
    """Shared memory. k and v later stage dk and dv."""

    k: cute.Tensor  # (n, head_dim)
    v: cute.Tensor  # (n, head_dim)
    q: cute.Tensor  # (m, head_dim, stage)
    do: cute.Tensor  # (m, head_dim, stage)
    ds: cute.Tensor  # (n, m)
    lse_log2: cute.Tensor  # (m, stage)
    delta: cute.Tensor  # (m, stage)
    tmem_base: cute.Pointer
    barriers: Barriers


def allocate(config: Config) -> Shared:
    """Carves shared memory; operand tiles start on 1024 bytes, as 128-byte swizzling asks."""
    dtype, d, tile = config.dtype, config.head_dim, config.tile
    key_layout = tensors.tile_layout(dtype, tile.n, d, 1, tile.span_bytes)
    query_layout = tensors.tile_layout(dtype, tile.m, d, tile.stages, tile.span_bytes)
    ds_layout = tensors.tile_layout(dtype, tile.n, tile.m, 1)
    rows_layout = cute.make_layout((tile.m, tile.stages))
    counts = {name: barrier_count(name, config) for name in ARRIVALS}

    @cute.struct
    class Storage:
        barriers: cute.struct.MemRange[cutlass.Int64, sum(counts.values())]
        tmem_base: Int32
        lse_log2: cute.struct.Align[cute.struct.MemRange[Float32, cute.cosize(rows_layout)], 128]
        delta: cute.struct.Align[cute.struct.MemRange[Float32, cute.cosize(rows_layout)], 128]
        k: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(key_layout)], 1024]
        v: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(key_layout)], 1024]
        q: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(query_layout)], 1024]
        do: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(query_layout)], 1024]
        ds: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(ds_layout)], 1024]

    storage = cutlass.memory.SmemAllocator().allocate(Storage)
    barriers, first = {}, 0
    for name, count in counts.items():
        barriers[name] = storage.barriers.data_ptr() + first
        first += count

    def single(memory, layout):
        return tensors.smem_tensor(memory, layout)[None, None, 0]

    return Shared(
        k=single(storage.k, key_layout),
        v=single(storage.v, key_layout),
        q=tensors.smem_tensor(storage.q, query_layout),
        do=tensors.smem_tensor(storage.do, query_layout),
        ds=single(storage.ds, ds_layout),
        lse_log2=storage.lse_log2.get_tensor(rows_layout),
        delta=storage.delta.get_tensor(rows_layout),
        tmem_base=storage.tmem_base.ptr,
        barriers=Barriers(**barriers),
    )


def barrier_count(name: str, config: Config) -> int:
    """How many barriers of a name there are."""
    if name in ("turn", "added"):
        return int(config.deterministic)
    rings = ("q_full", "q_empty", "do_full", "do_empty")
    return config.tile.stages if name in rings else 1
