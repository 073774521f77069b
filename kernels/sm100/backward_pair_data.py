"""Data of the Blackwell backward's kernel for pairs: operands, shared memory, barriers."""

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from fa4_jax.key import KernelKey
from kernels.common import tensors
from kernels.sm100 import products
from kernels.sm100.tiles import BACKWARD_TILES, BUFFERS, BackwardPairTile

ARRIVALS = {
    # barrier: arrivals that complete a phase, in the even CTA from each if in IN_EVEN_CTA.
    "kv_full": 1,  # load warp, with the bytes of k, v and kt
    "q_full": 1,  # load warp, with the bytes of q, lse_log2 and delta
    "qt_full": 1,  # load warp, with its bytes
    "do_full": 1,  # load warp, with its bytes
    "dot_full": 1,  # load warp, with its bytes
    "qt_empty": 1,  # commit behind dK
    "dot_empty": 1,  # commit behind dV
    "s_full": 1,  # commit behind S
    "dp_full": 1,  # commit behind dP
    "p_full": 4,  # warps of a compute warpgroup: P is in shared memory
    "ds_full": 4,  # warps of a compute warpgroup: dS is, in that of both CTAs
    "dq_full": 1,  # commit behind dQ
    "dq_empty": 4,  # reduce warps have read dQ
    "grads_full": 1,  # commit behind the last product
    "turn": 1,  # order warp: dQ may be added (deterministic)
    "added": 4,  # reduce warps: it has been (deterministic)
}
# The products are issued in the even CTA.
IN_EVEN_CTA = (
    *("kv_full", "q_full", "qt_full", "do_full", "dot_full"),
    *("p_full", "ds_full", "dq_empty"),
)
BUFFERED = ("s_full", "dp_full", "p_full", "ds_full", "dq_full", "dq_empty")


@dataclasses.dataclass(frozen=True)
class Barriers:
    """The first mbarrier of each name in ARRIVALS."""

    kv_full: cute.Pointer
    q_full: cute.Pointer
    qt_full: cute.Pointer
    do_full: cute.Pointer
    dot_full: cute.Pointer
    qt_empty: cute.Pointer
    dot_empty: cute.Pointer
    s_full: cute.Pointer
    dp_full: cute.Pointer
    p_full: cute.Pointer
    ds_full: cute.Pointer
    dq_full: cute.Pointer
    dq_empty: cute.Pointer
    grads_full: cute.Pointer
    turn: cute.Pointer
    added: cute.Pointer


def barrier_count(name: str, deterministic: bool) -> int:
    """How many barriers of a name there are."""
    if name in ("turn", "added"):
        return int(deterministic)
    return BUFFERS if name in BUFFERED else 1


def arrivals(name: str) -> Int32:
    """Arrivals that complete a phase of this CTA's barriers of a name."""
    if name not in IN_EVEN_CTA:
        return Int32(ARRIVALS[name])
    even = cute.arch.block_idx_in_cluster() == 0
    return Int32(cutlass.select_(even, Int32(2 * ARRIVALS[name]), Int32(ARRIVALS[name])))


class Config:
    """Compile-time constants of one kernel, shared by its roles; all five products."""

    def __init__(self, key: KernelKey):
        tile = BACKWARD_TILES[key.head_dim, key.value_dim]
        assert isinstance(tile, BackwardPairTile)
        self.tile = tile
        self.dtype = tensors.TYPES[key.dtype]
        self.band = key.band
        self.deterministic = key.deterministic
        self.columns = tile.columns()
        self.scores = products.Product(self.dtype, tile.n, tile.m, ctas=2)
        self.grads = products.Product(self.dtype, tile.n, tile.head_dim, ctas=2)
        self.dq = products.Product(self.dtype, tile.head_dim, tile.m, ctas=2)


@dataclasses.dataclass(frozen=True)
class Maps:
    """TMA descriptors, boxes (rows, span) of [B, length, heads, head_dim] tensors."""

    k: cute.CopyAtom
    v: cute.CopyAtom
    kt: cute.CopyAtom
    q: cute.CopyAtom
    do: cute.CopyAtom
    qt: cute.CopyAtom
    dot: cute.CopyAtom
    dk: cute.CopyAtom
    dv: cute.CopyAtom


@dataclasses.dataclass(frozen=True)
class Shared:
    """Shared memory of CTA r. k and v later stage dk and dv."""

    k: cute.Tensor  # (keys, head_dim): the CTA's keys
    v: cute.Tensor  # (keys, head_dim)
    kt: cute.Tensor  # (n, part): all keys, the CTA's columns
    q: cute.Tensor  # (queries, head_dim): the CTA's queries
    do: cute.Tensor  # (queries, head_dim)
    qt: cute.Tensor  # (m, part): all queries, the CTA's columns
    dot: cute.Tensor  # (m, part)
    p: cute.Tensor  # (keys, m, buffer)
    ds: cute.Tensor  # (keys, m, buffer)
    dst: cute.Pointer  # (n, queries, buffer): all keys, the CTA's queries; spans of 64 bytes
    lse_log2: cute.Tensor  # (m, statistics)
    delta: cute.Tensor  # (m, statistics)
    tmem_base: cute.Pointer
    ticket: cute.Pointer  # deterministic, in the even CTA: the pair's place among those started
    barriers: Barriers


def allocate(config: Config) -> Shared:
    """Carves shared memory, alike in both CTAs; operand tiles start on 1024 bytes."""
    dtype, tile, d = config.dtype, config.tile, config.tile.head_dim

    def layout(rows, columns, stages=1):
        return tensors.tile_layout(dtype, rows, columns, stages, tile.span_bytes)

    layouts = {
        "k": layout(tile.keys, d),
        "v": layout(tile.keys, d),
        "kt": layout(tile.n, tile.part),
        "q": layout(tile.queries, d),
        "do": layout(tile.queries, d),
        "qt": layout(tile.m, tile.part),
        "dot": layout(tile.m, tile.part),
        "p": layout(tile.keys, tile.m, BUFFERS),
        "ds": layout(tile.keys, tile.m, BUFFERS),
    }
    rows_layout = cute.make_layout((tile.m, tile.statistics))
    counts = {name: barrier_count(name, config.deterministic) for name in ARRIVALS}

    @cute.struct
    class Storage:
        barriers: cute.struct.MemRange[cutlass.Int64, sum(counts.values())]
        tmem_base: Int32
        ticket: Int32
        lse_log2: cute.struct.Align[cute.struct.MemRange[Float32, cute.cosize(rows_layout)], 128]
        delta: cute.struct.Align[cute.struct.MemRange[Float32, cute.cosize(rows_layout)], 128]
        k: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts["k"])], 1024]
        v: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts["v"])], 1024]
        kt: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts["kt"])], 1024]
        q: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts["q"])], 1024]
        do: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts["do"])], 1024]
        qt: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts["qt"])], 1024]
        dot: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts["dot"])], 1024]
        p: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts["p"])], 1024]
        ds: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts["ds"])], 1024]
        dst: cute.struct.Align[cute.struct.MemRange[dtype, BUFFERS * tile.n * tile.queries], 1024]

    storage = cutlass.memory.SmemAllocator().allocate(Storage)
    barriers, first = {}, 0
    for name, count in counts.items():
        barriers[name] = storage.barriers.data_ptr() + first
        first += count
    operands = {
        name: tensors.smem_tensor(getattr(storage, name), layouts[name]) for name in layouts
    }
    for name in operands:
        if name not in ("p", "ds"):
            operands[name] = operands[name][None, None, 0]
    return Shared(
        **operands,
        dst=storage.dst.data_ptr(),
        lse_log2=storage.lse_log2.get_tensor(rows_layout),
        delta=storage.delta.get_tensor(rows_layout),
        tmem_base=storage.tmem_base.ptr,
        ticket=storage.ticket.ptr,
        barriers=Barriers(**barriers),
    )
