"""Data of the Blackwell backward's main kernel: operands, work, shared memory, barriers."""

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from fa4_jax.key import KernelKey
from kernels.common import bands, tensors
from kernels.common import ptx as common_ptx
from kernels.common.schedule import batch_band, nth_tile
from kernels.sm100 import products, ptx
from kernels.sm100.tiles import (
    BACKWARD_TILES,
    DETERMINISTIC_BAND_HEADS,
    L2_BUDGET_BYTES,
    LANES,
    BackwardTile,
)

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
        tile = BACKWARD_TILES[key.head_dim, key.value_dim]
        assert isinstance(tile, BackwardTile)
        self.tile = tile
        self.columns = self.tile.columns()
        n = self.tile.n
        self.scores = products.Product(self.dtype, n, self.tile.m)
        self.dv = products.Product(self.dtype, n, tile.value_dim)
        self.dk = products.Product(self.dtype, n, tile.head_dim)
        self.dq = products.Product(self.dtype, LANES, self.tile.dq_width)

    @property
    def dq_takes_dp(self) -> bool:
        """Whether dQ begins with dP's columns."""
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
    """What one CTA, or a pair, does: a key tile of one KV head of one batch element."""

    first_key: Int32
    tile: Int32
    rank: Int32  # of the CTA in a pair
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
    v: cute.Tensor  # (n, value_dim), right behind k
    q: cute.Tensor  # (m, head_dim, stage)
    do: cute.Tensor  # (m, value_dim, stage)
    ds: cute.Tensor  # (n, m)
    lse_log2: cute.Tensor  # (m, stage)
    delta: cute.Tensor  # (m, stage)
    tmem_base: cute.Pointer
    ticket: cute.Pointer  # deterministic: the CTA's place among those that have started
    barriers: Barriers


def allocate(config: Config) -> Shared:
    """Carves shared memory; operand tiles start on 1024 bytes, as 128-byte swizzling asks."""
    dtype, tile = config.dtype, config.tile

    def layout(rows, columns, stages):
        return tensors.tile_layout(dtype, rows, columns, stages, tile.span_bytes)

    k_layout, v_layout = layout(tile.n, tile.head_dim, 1), layout(tile.n, tile.value_dim, 1)
    q_layout = layout(tile.m, tile.head_dim, tile.stages)
    do_layout = layout(tile.m, tile.value_dim, tile.stages)
    ds_layout = tensors.tile_layout(dtype, tile.n, tile.m, 1)
    rows_layout = cute.make_layout((tile.m, tile.stages))
    counts = {name: barrier_count(name, config) for name in ARRIVALS}

    @cute.struct
    class Storage:
        barriers: cute.struct.MemRange[cutlass.Int64, sum(counts.values())]
        tmem_base: Int32
        ticket: Int32
        lse_log2: cute.struct.Align[cute.struct.MemRange[Float32, cute.cosize(rows_layout)], 128]
        delta: cute.struct.Align[cute.struct.MemRange[Float32, cute.cosize(rows_layout)], 128]
        k: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(k_layout)], 1024]
        v: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(v_layout)], 1024]
        q: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(q_layout)], 1024]
        do: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(do_layout)], 1024]
        ds: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(ds_layout)], 1024]

    storage = cutlass.memory.SmemAllocator().allocate(Storage)
    barriers, first = {}, 0
    for name, count in counts.items():
        barriers[name] = storage.barriers.data_ptr() + first
        first += count

    def single(memory, layout):
        return tensors.smem_tensor(memory, layout)[None, None, 0]

    return Shared(
        k=single(storage.k, k_layout),
        v=single(storage.v, v_layout),
        q=tensors.smem_tensor(storage.q, q_layout),
        do=tensors.smem_tensor(storage.do, do_layout),
        ds=single(storage.ds, ds_layout),
        lse_log2=storage.lse_log2.get_tensor(rows_layout),
        delta=storage.delta.get_tensor(rows_layout),
        tmem_base=storage.tmem_base.ptr,
        ticket=storage.ticket.ptr,
        barriers=Barriers(**barriers),
    )


def barrier_count(name: str, config: Config) -> int:
    """How many barriers of a name there are."""
    if name in ("turn", "added"):
        return int(config.deterministic)
    rings = ("q_full", "q_empty", "do_full", "do_empty")
    return config.tile.stages if name in rings else 1


@cute.jit
def take_ticket(config: cutlass.Constexpr, shared: Any, dq_ticket: cute.Pointer):
    """Order warp: the place of the CTA, or of the pair, among those that have started.

    CTAs wait for additions of those of lower places alone, and these have started, whatever order
    the hardware takes and however few there is room for: none waits for ever.
    """
    cute.arch.griddepcontrol_wait()
    cta, _, _ = cute.arch.block_idx()
    if cta % config.tile.ctas == 0:
        with cute.arch.elect_one():
            place = cute.make_tensor(shared.ticket, cute.make_layout(1))
            place[0] = common_ptx.take_ticket(dq_ticket)


def start_index(config: Any, shared: Any) -> Int32:
    """Which one this CTA, or pair, is in the order of work; behind the CTA's first barrier."""
    if config.deterministic and config.tile.ctas == 2:
        return cute.arch.make_warp_uniform(ptx.load_of_even(shared.ticket))
    if config.deterministic:
        ticket = cute.make_tensor(shared.ticket, cute.make_layout(1))[0]
        return cute.arch.make_warp_uniform(ticket)
    cta, _, _ = cute.arch.block_idx()
    return cta // config.tile.ctas


def assign(config: Any, shared: Any, extents: cute.Pointer, sizes: tuple, window: tuple) -> Work:
    """The key tile of this CTA or pair, within sections of heads whose Q, dO and dQ fill the L2.

    Key tiles of a causal band shrink with their index, so the longest start first.
    """
    batch, query_length, key_length, heads, kv_heads = sizes
    tile, group = config.tile, heads // kv_heads
    rows_in_l2 = L2_BUDGET_BYTES // (tile.head_dim * (2 + 4) + tile.value_dim * 2)
    ordered_band = config.deterministic and config.band
    least = DETERMINISTIC_BAND_HEADS // tile.ctas if ordered_band else 1
    section = cutlass.max(rows_in_l2 // (query_length * group), least)
    tiles = (key_length + tile.n - 1) // tile.n
    cta, _, _ = cute.arch.block_idx()
    rank = cta % tile.ctas
    index = start_index(config, shared)
    key_tile, head_and_batch = nth_tile(index, section, kv_heads * batch, tiles)
    batch_index = head_and_batch // kv_heads
    kv_head = head_and_batch - batch_index * kv_heads
    band = batch_band(extents, batch_index, window if config.band else None)
    first_key = key_tile * tile.n
    blocks = bands.visited_blocks(band.transposed(), first_key, tile.n, tile.m, tensors.INT32)
    padded_keys = first_key + tile.n > band.key_length
    return Work(
        first_key,
        key_tile,
        rank,
        kv_head,
        group,
        heads,
        batch_index,
        band,
        blocks,
        padded_keys & (band.key_length < key_length),
        band.query_length < query_length,
    )


@cute.jit
def take_turns(config: cutlass.Constexpr, barriers: Any, work: Work, rows: Rows):
    """Order warp: the key tiles that visit a query tile add their dQ in ascending order.

    The CTAs of a pair, which have different columns of dQ, add at the same time.
    """
    tile = config.tile
    for step in cutlass.range(work.steps(), unroll=1):
        head, block = work.step(step, True)
        counter = rows.dq_order + (Int64(work.batch) * work.heads + head) * rows.tiles + block
        index = work.tile
        if cutlass.const_expr(config.band):
            visiting = bands.visited_blocks(
                work.band, block * tile.m, tile.m, tile.n, tensors.INT32
            )
            index = work.tile - visiting.begin
        earlier = index * tile.ctas
        with cute.arch.elect_one():
            added = earlier - 1
            while added < earlier:
                added = common_ptx.load_acquire(counter)
            cute.arch.mbarrier_arrive(barriers.turn)
            cute.arch.mbarrier_wait(barriers.added, step & 1)
            common_ptx.increment_release(counter)
