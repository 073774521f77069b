"""What the Hopper forward hides of a block of scores, and of V past the key length."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from kernels.common import ptx, resources, tensors
from kernels.common.pair_masks import BOX_ROWS, TILE_KEYS, BitsInMemory
from kernels.common.row_ranges import LANES, element
from kernels.common.softmax import select
from kernels.description import NamedBarrier
from kernels.sm90 import softmax
from kernels.sm90.forward_data import Rows
from kernels.sm90.tiles import WARPGROUP

Visit = tuple[Int32, Int32] | None
"""A block of keys, and whether band or ranges may hide any of it; None without bits of a mask."""


def visit_of(shared: resources.Shared, rows: Rows, slot: Int32, past: Int32) -> Visit:
    """Returns the visit of a block of K that has come: the one before `past`, or what is published.

    slot: of K, whose release lets the load warp publish the next one.
    """
    return None if rows.bits is None else _published(shared.visits[None, slot], rows.bits, past)


@cute.jit
def _published(words: cute.Tensor, bits: BitsInMemory, past: Int32) -> tuple[Int32, Int32]:
    block, limited = past - 1, Int32(1)
    if bits.given():
        block, limited = words[0], words[1]
        cute.arch.sync_warp()  # One lane releases the slot for all.
    return block, limited


@cute.jit
def hide(scores: cute.Tensor, rows: Rows, index: Int32, visit: Visit, n: cutlass.Constexpr[int]):
    """Sets scores that the rows do not see of a block of n keys to -inf.

    The block is the index-th one, or that of the visit.
    """
    if cutlass.const_expr(visit is None):
        _hide_by_ranges(scores, rows, index * n + rows.first_column)
    else:
        block, limited = visit
        if limited != 0:
            _hide_by_ranges(scores, rows, block * n + rows.first_column)
        if rows.bits.given():
            _hide_by_bits(scores, rows.bits, block * n, n)


@cute.jit
def _hide_by_ranges(scores: cute.Tensor, rows: Rows, first_key: Int32):
    """Sets scores to -inf of keys outside of rows' limits, or of other tags."""
    softmax.mask_band(scores, first_key, rows.low, rows.high)
    if cutlass.const_expr(rows.tags is not None):
        if rows.tags.wanted:
            softmax.mask_tags(scores, first_key, rows.tags)


@cute.jit
def _hide_by_bits(
    scores: cute.Tensor, bits: BitsInMemory, first_key: Int32, n: cutlass.Constexpr[int]
):
    """Sets scores to -inf whose bits are 0.

    A word has 32 keys of a row. A thread's columns in it are 2 of every 8.
    """
    # No register is left for what is the same in every block.
    thread, _, _ = cute.arch.thread_idx()
    thread = ptx.anew(thread) - WARPGROUP
    lane = thread % LANES
    first_row = bits.first_row + thread // WARPGROUP * BOX_ROWS
    own = bits.buffers.mask_bits + bits.place(first_row, first_key)
    row = thread % WARPGROUP // LANES * 16 + lane // 4
    for part in cutlass.range_constexpr(n // LANES):
        word = row + part * BOX_ROWS
        if cutlass.const_expr(TILE_KEYS % n != 0):
            # The last block may have more words than there are.
            last = bits.words() - 1 - first_key // LANES
            word = row + cutlass.min(last, part) * BOX_ROWS
        for r in cutlass.range_constexpr(softmax.ROWS):
            seen = Uint32(element(own, word + 8 * r)) >> Uint32(lane % 4 * 2)
            for pair in cutlass.range_constexpr(4):
                for column in cutlass.range_constexpr(2):
                    index = softmax.fragment_index(4 * part + pair, r, column)
                    is_seen = (seen & (1 << (8 * pair + column))) != 0
                    scores[index] = select(is_seen, scores[index], -Float32.inf)


@cute.jit
def clear_padding(
    v: cute.Tensor, thread: Int32, first_row: Int32, padding: cutlass.Constexpr[NamedBarrier]
):
    """Writes 0 to a block's values from a row on, past the key length, which may hold anything."""
    tensors.zero_vectors(v, first_row, thread, padding.threads)
    cute.arch.fence_proxy("async.shared", space="cta")
    resources.meet(padding)
