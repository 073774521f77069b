"""The order of work of the main backward kernels: a CTA, or a pair, has a key tile of a KV head."""

import dataclasses
from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from fa4_jax import bands
from kernels.common import pair_masks, row_ranges, tensors
from kernels.common.backward_ranges import (
    NO_VISITS,
    Mask,
    Visits,
    first_key_tile,
    next_block,
    with_count,
)
from kernels.common.bias import BiasInMemory, KeyBias
from kernels.common.pair_masks import BitsInMemory
from kernels.common.row_ranges import RangesInMemory
from kernels.common.schedule import HeadOrder, batch_band, nth_tile, ordered_tile, turn
from kernels.interface import RangeBuffers, Sizes, Window


@dataclasses.dataclass(frozen=True)
class BackwardShape:
    """What an assignment depends on besides the call.

    Attributes:
      m, n: query rows of a step, keys of a tile.
      row_bytes: of a query's row of Q, of dO and of dQ's accumulators together.
      l2_bytes: share of the L2 that Q, dO and dQ of the heads in flight may fill.
      least_heads: KV heads that are interleaved at least, whatever the L2 holds.
      band: whether the mask is a band; a dense kernel ignores the window.
      batches_together: of `HeadOrder`.
    """

    m: int
    n: int
    row_bytes: int
    l2_bytes: int
    least_heads: int
    band: bool
    batches_together: bool = False


NO_RANGES: Any = None
"""Of a key tile whose queries have no ranges in memory."""


@dataclasses.dataclass(frozen=True)
class Work:
    """What one CTA, or a pair, does: a key tile of one KV head of one batch element.

    Attributes:
      visits: the query blocks, where rows have ranges in memory.
      ranges: these, for a thread that has no registers for pointers to them.
      published: (2, slots) in shared memory, where the load warp of such a kernel says of each step
        which query block it is, and what ranges hide in it (backward_ranges).
      bias: what is added to the scores, where anything is.
    """

    first_key: Int32
    tile: Int32
    kv_head: Int32
    group: Int32
    heads: Int32
    batch: Int32
    band: bands.Band
    blocks: bands.BlockRange
    padded_keys: cutlass.Boolean  # whether the tile holds keys past the key length that TMA reads
    padded_queries: cutlass.Boolean  # whether the last query block holds such queries
    rank: Int32 | int = 0  # of the CTA in a pair
    visits: Visits = NO_VISITS
    ranges: RangesInMemory = NO_RANGES
    published: cute.Tensor = NO_RANGES
    bias: BiasInMemory = NO_RANGES

    def block_count(self) -> Int32:
        """Counts the query blocks of a head."""
        if self.visits is not None:
            return self.visits.count
        return self.blocks.end - self.blocks.begin

    def steps(self) -> Int32:
        """Counts the query blocks of all heads of the group."""
        return self.block_count() * self.group

    def step(self, index: Int32, deterministic: bool) -> tuple[Int32, Int32]:
        """Returns (head, query block) of a step.

        The last block is first where dQ is added in order. Where the load warp publishes blocks,
        a role calls this when it has waited for something that follows the step's Q.
        """
        if self.published is not None:
            return self.head(index), self._published(0, index)
        blocks = self.blocks.end - self.blocks.begin
        member = index // blocks
        block = self.block(index - member * blocks, deterministic)
        return self.kv_head * self.group + member, block

    def hidden(self, index: Int32) -> Int32:
        """Returns what ranges hide in a step's block; it is there when `step` is."""
        return self._published(1, index)

    def _published(self, word: int, index: Int32) -> Int32:
        slots = cute.size(self.published, mode=[1])
        return cute.arch.make_warp_uniform(self.published[word, index & (slots - 1)])

    def head(self, index: Int32) -> Int32:
        """Returns the query head of a step."""
        return self.kv_head * self.group + index // self.block_count()

    def bias_of(self, head: Int32, key: Int32, first_query: Int32) -> KeyBias | None:
        """Returns the bias of a key of a query head, by query from the first on, or None."""
        if self.bias is None:
            return None
        return self.bias.of_head(self.batch, head).of_key(key, first_query)

    def walk_to(
        self, walk: cute.Tensor, index: Int32, m: int, deterministic: bool
    ) -> tuple[Int32, Int32]:
        """Returns (head, query block) of a step to a warp that walks over all of them.

        Args:
          walk: of `make_walk`; the whole warp calls this for one step after the other.
          m: rows of a query block.
        """
        count = self.block_count()
        of_head = index - index // count * count
        return self.head(index), next_block(self.visits, walk, of_head, m, deterministic)

    def block(self, index: Int32, deterministic: bool) -> Int32:
        """Returns the query block of a head's index-th step."""
        return self.blocks.end - 1 - index if deterministic else self.blocks.begin + index


@dataclasses.dataclass(frozen=True)
class StartIndex:
    """The place of a CTA, or a pair, in the order of work; rank: of the CTA in the pair."""

    index: Int32
    rank: Int32 | int = 0


def section_heads(shape: BackwardShape, sizes: Sizes) -> Int32:
    """Returns how many KV heads form a section: their Q, dO and dQ fill the L2."""
    group = sizes.heads // sizes.kv_heads
    rows_in_l2 = shape.l2_bytes // shape.row_bytes
    return cutlass.max(rows_in_l2 // (sizes.query_length * group), shape.least_heads)


def assign(
    shape: BackwardShape,
    extents: cute.Pointer,
    sizes: Sizes,
    window: Window,
    start: Callable[[], StartIndex],
    ranges: RangeBuffers | None = None,
) -> Work:
    """Returns the key tile of the CTA, or pair, whose place in the order of work `start` finds.

    Heads form sections whose Q, dO and dQ fill the L2. Key tiles of a causal band shrink with their
    index, so the longest start first; where rows have ranges in memory, their order is there, too.
    """
    group, section = sizes.heads // sizes.kv_heads, section_heads(shape, sizes)
    tiles = (sizes.key_length + shape.n - 1) // shape.n
    # It is called here, since an earlier load would change the PTX, which was proven as it is.
    at = start()
    tile, of_all = nth_tile(at.index, section, sizes.kv_heads * sizes.batch, tiles)
    order = HeadOrder(sizes.batch, sizes.kv_heads, 1, shape.batches_together)
    batch_index = order.batch_of(of_all)
    kv_head = order.head_of(of_all, batch_index)
    if ranges is not None and ranges.key_order is not None:
        tile = ordered_tile(ranges.key_order, ranges.batch, batch_index, tile, tiles)
    band = batch_band(extents, batch_index, window if shape.band else None)
    first_key = tile * shape.n
    blocks = bands.visited_blocks(band.transposed(), first_key, shape.n, shape.m, tensors.INT32)
    padded_keys = first_key + shape.n > band.key_length
    return Work(
        first_key,
        tile,
        kv_head,
        group,
        sizes.heads,
        batch_index,
        band,
        blocks,
        padded_keys & (band.key_length < sizes.key_length),
        band.query_length < sizes.query_length,
        at.rank,
    )


def with_past_keys(work: Work, keys: int) -> Work:
    """Returns the work whose padded_keys are all of the tile's `keys` keys past the key length.

    Scores of keys past the last are 0, since TMA fills them with zeros. Where a row's LSE is far
    below 0 their P would be infinite, and what it adds to dQ not a number. So they are hidden, too.
    """
    past = work.first_key + keys > work.band.key_length
    return dataclasses.replace(work, padded_keys=past)


def earlier_tiles(work: Work, block: Int32, band: bool, shape: tuple[int, int]) -> Int32:
    """Counts the key tiles that add to dQ of a block before the work's does.

    Args:
      band: whether the mask is a band.
      shape: query rows of a block, keys of a tile.
    """
    earlier = turn(work.band if band else None, work.tile, block, *shape)
    if work.visits is not None:
        first = first_key_tile(work.visits, block, shape)
        earlier = cutlass.min(earlier, work.tile - first)
    return earlier


def by_table(work: Work, buffers: RangeBuffers, sizes: Sizes, shape: BackwardShape) -> Work:
    """Returns a key tile's work where rows have ranges in memory; a whole warp calls it."""
    visits = with_count(visits_of(work, buffers, sizes, shape), shape.m)
    return dataclasses.replace(work, visits=visits)


def visits_of(work: Work, buffers: RangeBuffers, sizes: Sizes, shape: BackwardShape) -> Visits:
    """Returns the query blocks of a key tile, not counted yet."""
    ranges = row_ranges.of_batch(buffers, sizes, work.batch)
    mask = None
    if buffers.mask_bits is not None:
        states = pair_masks.states(buffers, sizes, work.batch, work.kv_head)
        bits = BitsInMemory(buffers, sizes, Int32(0))
        # Without an order of tiles dQ is added in order.
        mask = Mask(states, bits, shape.n, skips=buffers.key_order is not None)
    first_key = work.first_key
    return Visits(ranges, work.blocks, first_key, first_key + shape.n, Int32(0), mask)
