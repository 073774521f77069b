"""The last key tiles of a dense backward, which would leave most multiprocessors idle.

Note [tail]: CTAs take equal tiles one after the other, so those that remain when all CTAs have had
equally many (4096 tiles on 132 multiprocessors: 4) would run alone, for as long as all others have
run for one tile. Each of them is split instead: a part is a range of its query blocks, with a
ticket of its own. A part's CTA adds its dK and dV to `tail_acc`, in no order, and counts in
`tail_parts`. The CTA that finds all others counted reads the sums and stores them as it stores any
tile. Nobody waits, so parts may run in any order and one after the other.

All threads' additions happen before the named barrier, and it before the count of one thread, which
releases and acquires; the last CTA's threads read after a second barrier. The kernel before the
main one clears both buffers.

    tail_acc    fp32 [tiles, 2, chunk, thread, 4]: dK (not scaled), dV; chunks and threads as in
                backward_dq, Note [dq_acc]
    tail_parts  int32 [tiles]
"""

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from fa4_jax import bands
from kernels.common import ptx, resources
from kernels.common.backward_schedule import Work
from kernels.common.resources import Shared
from kernels.common.tail import division
from kernels.description import NamedBarrier
from kernels.interface import TailBuffers
from kernels.sm90.backward_data import KeyGradients
from kernels.sm90.backward_description import TAIL_WORDS, WORK_WORDS
from kernels.sm90.backward_tiles import Call
from kernels.sm90.tiles import WARPGROUP

_WHOLE = -1


@dataclasses.dataclass(frozen=True)
class Tickets:
    """How many tickets a call has, and which are of parts.

    Attributes:
      whole: tiles that are not split; they have the first tickets.
      parts: of each other tile; None in a kernel that splits none.
      count: of all tickets.
    """

    whole: Int32
    parts: Int32 | None
    count: Int32


@dataclasses.dataclass(frozen=True)
class Ticket:
    """What a ticket is for.

    Attributes:
      tile: index of the key tile among all.
      tail: its index among those that are split; _WHOLE: it is not.
      part, parts: which of how many.
    """

    tile: Int32
    tail: Int32 | int = _WHOLE
    part: Int32 | int = 0
    parts: Int32 | int = 1


def make_tickets(tiles: Int32, ctas: Int32, call: Call) -> Tickets:
    """Returns the tickets of a call's tiles, whose kernel runs in `ctas` CTAs."""
    if call.tail is None:
        return Tickets(tiles, None, tiles)
    rest, parts = division(tiles, ctas, call.sizes.query_length, call.tail.tail_tiles)
    return Tickets(tiles - rest, parts, tiles + rest * (parts - 1))


def read_ticket(index: Int32, tickets: Tickets) -> Ticket:
    """Returns what the index-th ticket is for."""
    if tickets.parts is None:
        return Ticket(index)
    over = index - tickets.whole
    split = over >= 0
    tail = over // cutlass.max(tickets.parts, 1)
    return Ticket(
        cutlass.select_(split, tickets.whole + tail, index),
        cutlass.select_(split, tail, Int32(_WHOLE)),
        cutlass.select_(split, over - tail * tickets.parts, Int32(0)),
        cutlass.select_(split, tickets.parts, Int32(1)),
    )


def work_of(ticket: Ticket, work: Work) -> Work:
    """Returns a tile's work with the query blocks of the ticket's part."""
    if isinstance(ticket.parts, int):
        return work
    begin, count = work.blocks.begin, work.blocks.end - work.blocks.begin
    first = begin + count * ticket.part // ticket.parts
    end = begin + count * (ticket.part + 1) // ticket.parts
    full = (work.blocks.full_begin, work.blocks.full_end)
    return dataclasses.replace(work, blocks=bands.BlockRange(first, *full, end))


def publish_part(ticket: Ticket, words: cute.Tensor):
    """Writes which part of which split tile a tile's work is."""
    for i, value in enumerate((ticket.tail, ticket.parts)):
        words[WORK_WORDS + i] = value


@cute.jit
def sum_parts(
    shared: Shared,
    buffers: TailBuffers,
    grads: KeyGradients,
    words: cute.Tensor,
    meeting: NamedBarrier,
) -> cutlass.Boolean:
    """MMA warpgroup: whether the CTA stores dK and dV of its tile, which are then those of all
    parts.

    words: of the tile; meeting: a named barrier of both warpgroups.
    """
    tail, parts = (cute.arch.make_warp_uniform(words[WORK_WORDS + i]) for i in range(TAIL_WORDS))
    stores = tail == _WHOLE
    if not stores:
        thread, _, _ = cute.arch.thread_idx()
        thread = ptx.anew(thread) - WARPGROUP
        stride, size = 2 * WARPGROUP * 4, 2 * WARPGROUP * cute.size(grads.dk)
        target = buffers.tail_acc + tail * (2 * size) + thread * 4
        for acc, place in ((grads.dk, 0), (grads.dv, size)):
            for chunk in cutlass.range_constexpr(cute.size(acc) // 4):
                values = [acc[4 * chunk + i] for i in range(4)]
                ptx.reduce_add_v4(target + (place + chunk * stride), values)
        resources.meet(meeting)
        if thread == 0:
            shared.parts_done[0] = ptx.count_release_acquire(buffers.tail_parts + tail)
        resources.meet(meeting)
        stores = cute.arch.make_warp_uniform(shared.parts_done[0]) == parts - 1
        if stores:
            for acc, place in ((grads.dk, 0), (grads.dv, size)):
                chunks = cute.size(acc) // 4
                source = cute.make_tensor(
                    target + cute.assume(place, divby=4),
                    cute.make_layout((4, chunks), stride=(1, stride)),
                )
                registers = cute.make_tensor(acc.iterator, cute.make_layout((4, chunks)))
                for chunk in cutlass.range_constexpr(chunks):
                    cute.autovec_copy(source[None, chunk], registers[None, chunk])
    return stores
