"""Data of the split forward: what a CTA works on, and what a warp holds meanwhile."""

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from fa4_jax import bands
from fa4_jax.key import SPLIT_KEYS, SPLIT_ROWS
from kernels.common import tensors
from kernels.common.schedule import batch_band
from kernels.interface import Sizes, SplitScalars, SplitShape


@dataclasses.dataclass(frozen=True)
class Work:
    """What a CTA computes.

    Attributes:
      batch, kv_head, part: which.
      group: query heads of the KV head.
      first_row, rows: packed rows.
      band: of the batch element.
      first_block, count: its blocks are first_block, first_block + splits, and so on.
    """

    batch: Int32
    kv_head: Int32
    part: Int32
    group: Int32
    first_row: Int32
    rows: Int32
    band: bands.Band
    first_block: Int32
    count: Int32


@cute.jit
def assign(extents: cute.Pointer, sizes: Sizes, parts: SplitShape, scalars: SplitScalars) -> Work:
    """Returns this CTA's work; KV heads, which are neighbours in memory, run fastest."""
    index, _, _ = cute.arch.block_idx()
    rest = index // sizes.kv_heads
    kv_head = index - rest * sizes.kv_heads
    index, rest = rest, rest // parts.splits
    part = index - rest * parts.splits
    batch = rest // parts.row_blocks
    first_row = (rest - batch * parts.row_blocks) * SPLIT_ROWS
    group = sizes.heads // sizes.kv_heads
    rows = cutlass.min(sizes.query_length * group - first_row, Int32(SPLIT_ROWS))
    band = batch_band(extents, batch, scalars.window)
    first_token = first_row // group
    tokens = (first_row + rows - 1) // group - first_token + 1
    blocks = bands.visited_blocks(band, first_token, tokens, SPLIT_KEYS, tensors.INT32)
    skipped = part - blocks.begin % parts.splits
    skipped = Int32(cutlass.select_(skipped < 0, skipped + parts.splits, skipped))
    first = blocks.begin + skipped
    count = (cutlass.max(blocks.end - first, 0) + parts.splits - 1) // parts.splits
    return Work(batch, kv_head, part, group, first_row, rows, band, first, count)


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of a warp: registers of a thread, for rows lane // 4 and 8 more of the warp's 16.

    Attributes:
      query: 4 x head_dim / 16 words, A of mma.sync: registers, or the thread's in shared memory.
      low, high: keys that a row sees.
      maximum, row_sum: of its scores, and of this thread's exponentials.
      acc: 4 x head_dim / 8, output.
      key_group, key_groups: of every key_groups steps the key_group-th is the warp's.
    """

    query: cute.Tensor
    low: cute.Tensor
    high: cute.Tensor
    maximum: cute.Tensor
    row_sum: cute.Tensor
    acc: cute.Tensor
    key_group: Int32
    key_groups: Int32


@dataclasses.dataclass(frozen=True)
class Addresses:
    """Shared memory of a lane's matrix rows: 16 keys and 16 columns, the first of stage 0.

    Where the columns are the n-th 16 of a swizzle span, address ^ (32 n) takes the place of
    address.
    """

    k: Int32
    v: Int32
