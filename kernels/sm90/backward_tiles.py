"""The key tiles of the Hopper backward's CTAs, each of which takes one after the other.

The load warp takes a tile, finds out what its work is and publishes it with the tile's K and V:
divisions and loads of extents take a thousand cycles, in which the other warps would wait.

    kv_full     a tile's words, K and V are there, or the word that none is left
    kv_empty    they have been read, so the next tile's may come
"""

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kernels.common import ptx
from kernels.common.backward_schedule import (
    BackwardShape,
    StartIndex,
    Work,
    assign,
    by_table,
    visits_of,
    with_past_keys,
)
from kernels.common.bias import BiasInMemory
from kernels.common.resources import Shared
from kernels.common.row_ranges import RangesInMemory
from kernels.common.schedule import from_mask_words, mask_words
from kernels.interface import BiasBuffers, RangeBuffers, Sizes, TailBuffers, Window
from kernels.sm90.backward_description import WORK_WORDS


@dataclasses.dataclass(frozen=True)
class Call:
    """What the tiles of a call have in common.

    Attributes:
      group: query heads of a KV head.
      window: a dense kernel has none.
      tail: where parts of the last tiles meet, in a kernel that splits them.
      bias: what is added to the scores, in a kernel that adds any.
    """

    extents: cute.Pointer
    sizes: Sizes
    group: Int32
    window: Window | None
    ranges: RangeBuffers | None
    tail: TailBuffers | None
    bias: BiasBuffers | None


_NO_TILE = -1


def tile_count(sizes: Sizes, keys: int) -> Int32:
    """Counts the tiles of `keys` keys of all KV heads."""
    return (sizes.key_length + keys - 1) // keys * sizes.kv_heads * sizes.batch


@cute.jit
def take_ticket(counter: cute.Pointer) -> Int32:
    """Returns the next ticket to all lanes of a warp."""
    ticket = Int32(0)
    if cute.arch.lane_idx() == 0:
        ticket = ptx.take_ticket(counter)
    return cute.arch.make_warp_uniform(ticket)


def assign_tile(index: Int32, call: Call, shape: BackwardShape, rank: Int32 | int = 0) -> Work:
    """Returns the work of the index-th tile; a whole warp calls it; rank: of the CTA in a pair."""
    of_call = (shape, call.extents, call.sizes, call.window)
    work = with_past_keys(assign(*of_call, lambda: StartIndex(index, rank), call.ranges), shape.n)
    return work if call.ranges is None else by_table(work, call.ranges, call.sizes, shape)


def words_of_tile(shared: Shared, tiles_done: Int32) -> cute.Tensor:
    """Returns the words of the tile that comes after `tiles_done` others.

    They stay until the next tile has been read, so that a tile's end can read them again.
    """
    return shared.work[None, tiles_done & 1]


def place_of_tile(words: cute.Tensor) -> tuple[Int32, Int32, Int32]:
    """Returns (key tile, KV head, batch) of a tile."""
    tile, kv_head, batch = (cute.arch.make_warp_uniform(words[i]) for i in range(3))
    return tile, kv_head, batch


def publish(work: Work, words: cute.Tensor):
    """Writes a tile's work, as `published` reads it."""
    values = [work.tile, work.kv_head, work.batch, work.first_key]
    values += mask_words(work.band, work.blocks, work.padded_keys)
    if work.visits is not None:
        values.append(work.visits.count)
    for i, value in enumerate(values):
        words[i] = value


def publish_index(index: Int32, part: Int32 | int, shared: Shared, tiles_done: Int32):
    """Writes a tile's place in the order of work, or -1 for a later part of a split tile."""
    place = Int32(cutlass.select_(Int32(part) == 0, index, Int32(_NO_TILE)))
    shared.tile_index[tiles_done & 1] = place


def publish_end(words: cute.Tensor):
    """Writes that no tile is left."""
    words[0] = Int32(_NO_TILE)


def is_tile(words: cute.Tensor) -> cutlass.Boolean:
    """Whether a tile's work is published, not the end."""
    return cute.arch.make_warp_uniform(words[0]) != _NO_TILE


def published(words: cute.Tensor, call: Call, shape: BackwardShape, rank: Int32 | int = 0) -> Work:
    """Reads a tile's work; rank: of the CTA in a pair."""
    values = [cute.arch.make_warp_uniform(words[i]) for i in range(cute.size(words))]
    tile, kv_head, batch, first_key = values[:4]
    band, blocks, padded_keys = from_mask_words(values[4:WORK_WORDS], call.window)
    padded_queries = band.query_length < call.sizes.query_length
    heads = (kv_head, call.group, call.sizes.heads)
    of_keys = (blocks, padded_keys, padded_queries, rank)
    work = Work(first_key, tile, *heads, batch, band, *of_keys)
    if call.bias is not None:
        work = dataclasses.replace(work, bias=BiasInMemory(call.bias, call.sizes, call.extents))
    if call.ranges is None:
        return work
    work = dataclasses.replace(work, ranges=RangesInMemory(call.ranges, call.sizes, batch))
    visits = visits_of(work, call.ranges, call.sizes, shape)
    return dataclasses.replace(work, visits=dataclasses.replace(visits, count=values[WORK_WORDS]))


def reread(work: Work, words: cute.Tensor) -> Work:
    """Returns the same work; what masks need is read anew, so that no register holds it."""
    _, _, batch, first_key, *mask = (words[i] for i in range(WORK_WORDS))
    window = Window(work.band.window_left, work.band.window_right)
    band, _, _ = from_mask_words(mask, window)
    ranges = work.ranges and dataclasses.replace(work.ranges, batch=batch)
    return dataclasses.replace(work, first_key=first_key, band=band, ranges=ranges)
