"""The order of work of the main backward kernels: a CTA, or a pair, has a key tile of a KV head."""

import dataclasses
from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from fa4_jax import bands
from kernels.common import tensors
from kernels.common.schedule import batch_band, nth_tile
from kernels.interface import Sizes, Window


@dataclasses.dataclass(frozen=True)
class BackwardShape:
    """What an assignment depends on besides the call.

    Attributes:
      m, n: query rows of a step, keys of a tile.
      row_bytes: of a query's row of Q, of dO and of dQ's accumulators together.
      l2_bytes: share of the L2 that Q, dO and dQ of the heads in flight may fill.
      least_heads: KV heads that are interleaved at least, whatever the L2 holds.
      band: whether the mask is a band; a dense kernel ignores the window.
    """

    m: int
    n: int
    row_bytes: int
    l2_bytes: int
    least_heads: int
    band: bool


@dataclasses.dataclass(frozen=True)
class Work:
    """What one CTA, or a pair, does: a key tile of one KV head of one batch element."""

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

    def steps(self) -> Int32:
        """Counts the query blocks of all heads of the group."""
        return (self.blocks.end - self.blocks.begin) * self.group

    def step(self, index: Int32, deterministic: bool) -> tuple[Int32, Int32]:
        """Returns (head, query block) of a step.

        The last block is first where dQ is added in order.
        """
        blocks = self.blocks.end - self.blocks.begin
        member = index // blocks
        block = index - member * blocks
        block = self.blocks.end - 1 - block if deterministic else self.blocks.begin + block
        return self.kv_head * self.group + member, block


@dataclasses.dataclass(frozen=True)
class StartIndex:
    """The place of a CTA, or a pair, in the order of work; rank: of the CTA in the pair."""

    index: Int32
    rank: Int32 | int = 0


def assign(
    shape: BackwardShape,
    extents: cute.Pointer,
    sizes: Sizes,
    window: Window,
    start: Callable[[], StartIndex],
) -> Work:
    """Returns the key tile of the CTA, or pair, whose place in the order of work `start` finds.

    Heads form sections whose Q, dO and dQ fill the L2. Key tiles of a causal band shrink with their
    index, so the longest start first.
    """
    group = sizes.heads // sizes.kv_heads
    rows_in_l2 = shape.l2_bytes // shape.row_bytes
    section = cutlass.max(rows_in_l2 // (sizes.query_length * group), shape.least_heads)
    tiles = (sizes.key_length + shape.n - 1) // shape.n
    # It is called here, since an earlier load would change the PTX, which was proven as it is.
    at = start()
    tile, head_and_batch = nth_tile(at.index, section, sizes.kv_heads * sizes.batch, tiles)
    batch_index = head_and_batch // sizes.kv_heads
    kv_head = head_and_batch - batch_index * sizes.kv_heads
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
