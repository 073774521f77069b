"""K and V blocks of the Hopper forward from pages, a few keys at a time.

Key j of a batch entry is row j % page_length of the page that the table has at j // page_length.
A copy never spans two pages: it has LONG_COPY keys where pages are whole multiples of that and
blocks, too, otherwise PAGE_KEYS. A lane looks up the page of each copy, a block ahead.
"""

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from kernels.common import tensors
from kernels.common.resources import Maps, Shared
from kernels.interface import PageBuffers, Sizes
from kernels.sm90.forward_description import LONG_COPY
from kernels.sm90.forward_schedule import Work
from kernels.sm90.tiles import ForwardTile


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


def whole_sizes(sizes: Sizes, pages: PageBuffers) -> Sizes:
    """Returns the sizes of a call in which the keys that a table holds lie side by side."""
    return dataclasses.replace(sizes, key_length=sizes.key_length * pages.table_width)


def pages_of(buffers: PageBuffers, page_length: Int32, work: Work) -> Pages:
    """Returns the pages that a tile reads."""
    last = cutlass.min((work.band.key_length - 1) // page_length, buffers.table_width - 1)
    first = buffers.page_table + Int64(work.batch) * buffers.table_width
    entries = cute.make_tensor(first, cute.make_layout(buffers.table_width))
    return Pages(entries, cutlass.max(last, 0), buffers.pages, page_length, work.kv_head)


def look_up(pages: Pages, block: Int32, n: int, rows: int) -> tuple[Int32, Int32]:
    """Returns page and first row of this lane's copy of a block, of n // rows copies."""
    key = block * n + cute.arch.lane_idx() % (n // rows) * rows
    number = pages.entries[cutlass.min(key // pages.length, pages.last)]
    return cutlass.max(cutlass.min(number, pages.count - 1), 0), key % pages.length


@cute.jit
def load_block(
    maps: Maps,
    shared: Shared,
    place: tuple[Int32, Int32],
    pages: Pages,
    tile: cutlass.Constexpr[ForwardTile],
    copies: cutlass.Constexpr[tuple[int, int, int]],
    slot: Int32,
    full: cute.Pointer,
):
    """Loads a block of K (operand 0) or V (1) into a slot of its ring.

    place: of `look_up`; copies: the operand, its columns, and the keys of a copy.
    """
    operand, columns, rows = copies
    whole = rows == LONG_COPY
    loads = (maps.k, maps.v) if cutlass.const_expr(whole) else (maps.k_short, maps.v_short)
    target = (shared.k, shared.v)[operand][None, None, slot]
    width = columns if cutlass.const_expr(whole) else tile.span_bytes // 2
    for copy in cutlass.range_constexpr(tile.n // rows):
        page, row = (cute.arch.make_warp_uniform(cute.arch.shuffle_sync(x, copy)) for x in place)
        source = tensors.bthd_coordinates()[None, None, pages.kv_head, page]
        source = cute.domain_offset((row, 0), source)
        for column in cutlass.range_constexpr(columns // width):
            tensors.tma_load(
                loads[operand],
                cute.local_tile(source, (rows, width), (0, column)),
                cute.local_tile(target, (rows, width), (copy, column)),
                full,
            )
