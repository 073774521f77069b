"""The mask of the Blackwell backward where rows have ranges in memory.

A thread has one key and several queries of a step, while ranges limit the keys of a query. So for
every 32 queries a lane first finds which of the warp's 32 keys one query sees, as bits of a word;
then the warp transposes these 32 words, and the lane has the queries that see its key.
"""

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from kernels.common import row_ranges
from kernels.common.backward_ranges import BY_BITS, BY_TAGS, NOTHING
from kernels.common.backward_schedule import NO_RANGES, Work
from kernels.common.pair_masks import BOX_ROWS, BitsInMemory, plane_of
from kernels.common.row_ranges import RangesInMemory
from kernels.common.softmax import select
from kernels.common.state import Limits

_LANES = 32
_HALVES = ((16, 0x0000FFFF), (8, 0x00FF00FF), (4, 0x0F0F0F0F), (2, 0x33333333), (1, 0x55555555))
"""Of a square of so many rows twice: the columns of its left half."""


@dataclasses.dataclass(frozen=True)
class HiddenKeys:
    """What ranges hide of a warp's keys from some queries of a step.

    Attributes:
      hidden: NOTHING, BY_LIMITS or BY_TAGS, and BY_BITS (backward_ranges).
      work, step: of which head's bits hide keys, then.
      ranges: of the batch element.
      first_query: of the call; a lane has every 32nd from its own on.
      key: the lane's; those of a warp are consecutive.
    """

    hidden: Int32
    work: Work
    step: Int32
    ranges: RangesInMemory
    first_query: Int32
    key: Int32

    def query(self, part: int) -> Int32:
        """Returns the lane's query of a part."""
        return self.first_query + part * _LANES + cute.arch.lane_idx()


def of_step(work: Work, step: Int32, key: Int32, first_query: Int32) -> HiddenKeys | None:
    """Returns what ranges hide, where they are in memory; arguments as of `HiddenKeys`."""
    if work.ranges is None:
        return NO_RANGES
    return HiddenKeys(work.hidden(step), work, step, work.ranges, first_query, key)


@cute.jit
def load_limits(keys: HiddenKeys, count: cutlass.Constexpr[int]) -> Limits:
    """Loads the limits of a lane's share of `count` queries, if they hide anything.

    A query past the last has those of the last.
    """
    parts = count // _LANES
    low, high = cute.make_rmem_tensor((parts,), Int32), cute.make_rmem_tensor((parts,), Int32)
    low.fill(0)
    high.fill(0)
    if keys.hidden != NOTHING:
        ranges = keys.ranges.arrays()
        for part in cutlass.range_constexpr(parts):
            low[part], high[part] = row_ranges.row_limits(ranges, keys.query(part))
    return Limits(low, high)


@cute.jit
def hide(exponents: cute.Tensor, keys: HiddenKeys, limits: Limits):
    """Sets exponents of P of one key to -inf for queries that do not see it.

    limits: of `load_limits`.
    """
    if keys.hidden != NOTHING:
        for part in cutlass.range_constexpr(cute.size(exponents) // _LANES):
            of_part = Limits(limits.low[part], limits.high[part])
            seen = transposed(_keys_of_query(keys, of_part, part))
            for i in cutlass.range_constexpr(_LANES):
                index = part * _LANES + i
                is_seen = (seen & Uint32(1 << i)) != 0
                exponents[index] = select(is_seen, exponents[index], -Float32.inf)


@cute.jit
def _keys_of_query(keys: HiddenKeys, limits: Limits, part: cutlass.Constexpr[int]) -> Uint32:
    """Returns a bit for each of the warp's keys: whether the lane's query of a part sees it."""
    first_key, seen = keys.key - cute.arch.lane_idx(), Uint32(0xFFFFFFFF)
    by_ranges = keys.hidden % BY_BITS
    if by_ranges != NOTHING:
        seen = row_ranges.bits_between(limits.low, limits.high, first_key)
    if by_ranges == BY_TAGS:
        ranges = keys.ranges.arrays()
        tag = row_ranges.key_tag(ranges, keys.key)
        seen = seen & row_ranges.bits_of_tags(ranges, keys.query(part), tag)
    if keys.hidden >= BY_BITS:
        own, query = keys.ranges, keys.query(part)
        head = keys.work.head(keys.step)
        plane = plane_of(own.buffers.mask_batch, own.buffers.mask_heads, own.batch, head)
        bits = BitsInMemory(own.buffers, own.sizes, plane)
        # A pair's second tile may lie past the last words.
        first_key = cutlass.min(first_key, (bits.words() - 1) * _LANES)
        place = bits.place(query, first_key) + query % BOX_ROWS
        seen = seen & Uint32(row_ranges.element(own.buffers.mask_bits, place))
    return seen


def transposed(word: Uint32) -> Uint32:
    """Returns bit `lane` of every lane's word: a warp's 32 words are a matrix of bits.

    Every square on the diagonal swaps two quarters with its partner: first squares of 32, then 16,
    and so on (Warren, Hacker's Delight, 7-3).
    """
    for size, left in _HALVES:
        other = cute.arch.shuffle_sync_bfly(word, size)
        in_upper = (cute.arch.lane_idx() & size) == 0
        upper = (word & Uint32(left)) | ((other & Uint32(left)) << Uint32(size))
        lower = (word & ~Uint32(left)) | ((other >> Uint32(size)) & Uint32(left))
        word = Uint32(cutlass.select_(in_upper, upper, lower))
    return word
