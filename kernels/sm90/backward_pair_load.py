"""The load warp of a pair of CTAs of Hopper's backward: the pair's tiles, and their operands.

Note [ticket]: the even CTA's load warp draws a ticket for the pair's next tile, when it has loaded
all of the tile before, and copies it to the odd CTA's memory. Each of the two finds out by itself
what the tile is. The odd CTA says when it has read the ticket, so that the place can be used again.

    ticket_full   (odd CTA) the ticket of a tile has come
    ticket_empty  (even CTA) the odd CTA has read it
    kv_full       a tile's words, K and V are there, or the word that none is left
    kv_empty      they have been read, so the next tile's may come
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kernels.common import ptx, tensors
from kernels.common.backward_schedule import Work
from kernels.common.resources import Maps, Shared
from kernels.common.state import Rows
from kernels.sm90.backward_description import TICKET_WORDS
from kernels.sm90.backward_pair_parts import PairParts
from kernels.sm90.backward_tiles import (
    Call,
    assign_tile,
    publish,
    publish_end,
    tile_count,
    words_of_tile,
)


class PairLoad(PairParts):
    """What the load warp does; attributes are compile-time constants."""

    @cute.jit
    def load_tiles(
        self,
        maps: Maps,
        shared: Shared,
        call: Call,
        rows: Rows,
        start: tuple[cute.Pointer, Int32],
    ):
        """Load warp: takes tile after tile, says what each is, and loads what it needs.

        start: the counter of tickets, and the CTA's rank in the pair.
        """
        counter, rank = start
        tiles, barriers = tile_count(call.sizes, self.shape.n), shared.barriers
        tiles_done, steps_done = Int32(0), Int32(0)
        index = self.next_tile(shared, counter, rank, tiles_done)
        while index < tiles:
            work = assign_tile(index, call, self.shape, rank)
            barriers.kv_empty.wait_free(tiles_done)
            with cute.arch.elect_one():
                publish(work, words_of_tile(shared, tiles_done))
            self.load_keys(maps, shared, work)
            self.load(maps, shared, work, rows, steps_done)
            steps_done += work.steps()
            tiles_done += 1
            index = self.next_tile(shared, counter, rank, tiles_done)
        barriers.kv_empty.wait_free(tiles_done)
        with cute.arch.elect_one():
            publish_end(words_of_tile(shared, tiles_done))
            cute.arch.mbarrier_arrive(barriers.kv_full.first)

    @cute.jit
    def next_tile(
        self, shared: Shared, counter: cute.Pointer, rank: Int32, tiles_done: Int32
    ) -> Int32:
        """Load warp: returns the pair's next tile, whose ticket the even CTA draws and sends."""
        full, empty = shared.barriers.ticket_full, shared.barriers.ticket_empty
        ticket = shared.ticket[None, tiles_done & 1]
        if rank == 0:
            empty.wait_free(tiles_done)
            with cute.arch.elect_one():
                drawn = ptx.take_ticket(counter)
                for word in cutlass.range_constexpr(TICKET_WORDS):
                    ticket[word] = drawn
                cute.arch.fence_proxy("async.shared", space="cta")
                num_bytes, at = TICKET_WORDS * 4, full.at(tiles_done)
                ptx.bulk_send(ticket.iterator, ticket.iterator, num_bytes, at, Int32(1))
            cute.arch.sync_warp()
        else:
            with cute.arch.elect_one():
                at = full.at(tiles_done)
                cute.arch.mbarrier_arrive_and_expect_tx(at, TICKET_WORDS * 4)
            full.wait(tiles_done)
        index = cute.arch.make_warp_uniform(ticket[0])
        cute.arch.sync_warp()
        if rank == 1:
            with cute.arch.elect_one():
                ptx.arrive_in(empty.at(tiles_done), Int32(0))
        return index

    @cute.jit
    def load_keys(self, maps: Maps, shared: Shared, work: Work):
        """Loads K, V of the CTA's keys and its columns of the other's, if a query sees any."""
        tile, kv_full = self.tile, shared.barriers.kv_full.first
        kv = tensors.bthd_coordinates()[None, None, work.kv_head, work.batch]
        part, own, other = (
            self.head_dim // 2,
            work.tile * 2 + work.rank,
            work.tile * 2 + (work.rank ^ 1),
        )
        columns = self.head_dim + self.value_dim + part
        num_bytes = Int32(tile.n * columns * 2)
        num_bytes = cutlass.select_(work.steps() > 0, num_bytes, Int32(0))
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(kv_full, num_bytes)
        if work.steps() > 0:
            own_k = cute.local_tile(kv, (tile.n, self.head_dim), (own, 0))
            own_v = cute.local_tile(kv, (tile.n, self.value_dim), (own, 0))
            tensors.tma_load(maps.k, own_k, shared.k, kv_full)
            tensors.tma_load(maps.v, own_v, shared.v, kv_full)
            other_tile = cute.local_tile(kv, (tile.n, part), (other, work.rank))
            tensors.tma_load(maps.other_k, other_tile, shared.other_k, kv_full)
