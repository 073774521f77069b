"""K and V blocks of a forward of many rows from pages, a few keys at a time.

Key j of a batch entry is row j % page_length of the page that the table has at j // page_length.
A copy never spans two pages: it has LONG_COPY keys where pages are whole multiples of that and
blocks, too, otherwise PAGE_KEYS. A lane looks up the page of each copy, a block ahead.
"""

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from kernels.common import tensors
from kernels.common.page_maps import LONG_COPY
from kernels.common.resources import Maps
from kernels.interface import PageBuffers, Sizes

Place = tuple[Int32, Int32]
"""Page and first row of this lane's copy of a block."""


@dataclasses.dataclass(frozen=True)
class Pages:
    """The pages of a tile's batch entry.

    Attributes:
      entries: page numbers [table_width] in global memory; past `last` the last is loaded again.
      count: numbers of no page count as the nearest one's.
    """

    entries: cute.Tensor
    last: Int32
    count: Int32
    length: Int32
    kv_head: Int32


@dataclasses.dataclass(frozen=True)
class Copies:
    """How a block's K or V is copied: compile-time constants.

    Attributes:
      operand: "k" or "v".
      rows: keys of a copy.
      span: columns of a swizzle span.
    """

    operand: str
    rows: int
    span: int


def whole_sizes(sizes: Sizes, pages: PageBuffers) -> Sizes:
    """Returns the sizes of a call in which the keys that a table holds lie side by side."""
    return dataclasses.replace(sizes, key_length=sizes.key_length * pages.table_width)


def pages_of(
    buffers: PageBuffers, page_length: Int32, keys: Int32, batch: Int32, kv_head: Int32
) -> Pages:
    """Returns the pages of a batch entry, whose length is `keys`."""
    last = cutlass.min((keys - 1) // page_length, buffers.table_width - 1)
    first = buffers.page_table + Int64(batch) * buffers.table_width
    entries = cute.make_tensor(first, cute.make_layout(buffers.table_width))
    return Pages(entries, cutlass.max(last, 0), buffers.pages, page_length, kv_head)


def look_up(pages: Pages, block: Int32, n: int, rows: int) -> Place:
    """Returns the place of this lane's copy of a block, of n // rows copies."""
    key = block * n + cute.arch.lane_idx() % (n // rows) * rows
    number = pages.entries[cutlass.min(key // pages.length, pages.last)]
    return cutlass.max(cutlass.min(number, pages.count - 1), 0), key % pages.length


@cute.jit
def load(
    maps: Maps,
    copies: cutlass.Constexpr[Copies],
    target: cute.Tensor,
    place: Place,
    pages: Pages,
    first: tuple[Int32 | int, Int32 | int],
    full: cute.Pointer,
):
    """Loads a block of K or V, or a part of it.

    Args:
      target: (keys, columns), in shared memory.
      place: of `look_up`.
      first: the block's copy, and the column, that the target begins with.
    """
    rows, columns = copies.rows, cute.size(target, mode=[1])
    whole = rows == LONG_COPY
    name = copies.operand if cutlass.const_expr(whole) else f"{copies.operand}_short"
    width = columns if cutlass.const_expr(whole) else copies.span
    for copy in cutlass.range_constexpr(cute.size(target, mode=[0]) // rows):
        lane = first[0] + copy
        page, row = (cute.arch.make_warp_uniform(cute.arch.shuffle_sync(x, lane)) for x in place)
        source = tensors.bthd_coordinates()[None, None, pages.kv_head, page]
        source = cute.domain_offset((row, first[1]), source)
        for column in cutlass.range_constexpr(columns // width):
            tensors.tma_load(
                getattr(maps, name),
                cute.local_tile(source, (rows, width), (0, column)),
                cute.local_tile(target, (rows, width), (copy, column)),
                full,
            )
