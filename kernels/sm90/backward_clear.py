"""How Hopper's backward clears dQ's accumulators, section by section, before it adds to them.

Heads form sections, whose tiles have consecutive tickets (backward_schedule). What the kernel
before the main one clears goes to the device's memory, and comes back when dQ is added. So that
kernel clears the first section alone; of each other one, whoever takes the p-th tile of the
section before clears the p-th share, which then is in the L2. It counts that in `dq_cleared`, and
a tile's first addition waits until all shares of its section are counted.

All of these tickets are lower than the one that waits, and were taken by CTAs that run. A CTA says
what its ticket is for when it has done its tile before, which waits for still lower ones. Hence
there is no deadlock, whatever the number of resident CTAs.

    dq_cleared  int32 [batch, heads], of which a section has one: shares that are cleared
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kernels.common import ptx
from kernels.common.backward_schedule import BackwardShape, Work, section_heads
from kernels.common.resources import Shared
from kernels.common.schedule import await_count
from kernels.common.state import Rows
from kernels.sm90.backward_tiles import Call, is_tile, words_of_tile

_LANES = 32
_VECTOR = 4


def _tiles(call: Call, shape: BackwardShape) -> tuple[Int32, Int32, Int32]:
    """Returns the KV heads of a section and of all batch elements, and the key tiles of each."""
    heads = call.sizes.kv_heads * call.sizes.batch
    section = cutlass.min(section_heads(shape, call.sizes), heads)
    return section, heads, (call.sizes.key_length + shape.n - 1) // shape.n


@cute.jit
def await_cleared(work: Work, call: Call, shape: BackwardShape, cleared: cute.Pointer):
    """Waits until the memory to which a tile adds is 0; one thread calls it, and adds by it."""
    section, _, tiles = _tiles(call, shape)
    own = (work.batch * call.sizes.kv_heads + work.kv_head) // section
    if own > 0:
        await_count(cleared + own, section * tiles)
        cute.arch.fence_proxy("async.global")


@cute.jit
def clear_tiles(
    shared: Shared, call: Call, shape: BackwardShape, rows: Rows, columns: cutlass.Constexpr[int]
):
    """Clear warp: clears a share of the next section's dQ for each of the CTA's tiles."""
    tiles_done = Int32(0)
    shared.barriers.kv_full.wait(tiles_done)
    more = is_tile(words_of_tile(shared, tiles_done))
    while more:
        index = cute.arch.make_warp_uniform(shared.tile_index[tiles_done & 1])
        cute.arch.sync_warp()  # One lane releases the word for all.
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(shared.barriers.kv_empty.first)
        if index >= 0:
            _clear_share(index, call, shape, rows, columns)
        tiles_done += 1
        shared.barriers.kv_full.wait(tiles_done)
        more = is_tile(words_of_tile(shared, tiles_done))


@cute.jit
def _clear_share(
    index: Int32,
    call: Call,
    shape: BackwardShape,
    rows: Rows,
    columns: cutlass.Constexpr[int],
):
    """Clears the share of the next section that goes with the index-th tile."""
    section, heads, tiles = _tiles(call, shape)
    shares = section * tiles
    own = index // shares
    first_head = (own + 1) * section
    if first_head < heads:
        of_head = call.group * rows.tiles
        count = cutlass.min(section, heads - first_head) * of_head
        each = (count + shares - 1) // shares
        begin = (index - own * shares) * each
        end = cutlass.min(begin + each, count)
        lane, size = cute.arch.lane_idx(), shape.m * columns
        zeros = cute.make_rmem_tensor((_VECTOR,), Float32)
        zeros.fill(0.0)
        for of_section in cutlass.range(begin, end, unroll=1):
            tile = first_head * of_head + of_section
            head = tile // rows.tiles
            batch = head // call.sizes.heads
            length = cute.make_tensor(call.extents + batch * 4, cute.make_layout(4))[0]
            if (tile - head * rows.tiles) * shape.m < length:
                start = rows.dq_acc + Int64(tile) * size + lane * _VECTOR
                for vector in cutlass.range(0, size // (_LANES * _VECTOR), unroll=8):
                    target = start + cute.assume(vector * (_LANES * _VECTOR), divby=_VECTOR)
                    cute.autovec_copy(zeros, cute.make_tensor(target, cute.make_layout(_VECTOR)))
        cute.arch.fence_proxy("async.global")
        cute.arch.sync_warp()
        if lane == 0:
            ptx.increment_release(rows.dq_cleared + (own + 1))
