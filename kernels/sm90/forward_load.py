"""The load warp of the Hopper forward: Q of each tile, and K and V of its blocks.

`forward` says how the work is divided among warps, and what the tickets are.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from fa4_jax.key import PAGE_KEYS
from kernels.common import pages as in_pages
from kernels.common import ptx, tensors
from kernels.common.key_visits import NO_VISITS, Visits, block_of_step, make_walk
from kernels.common.page_maps import LONG_COPY, has_long_copies
from kernels.common.pages import Copies, Pages, look_up
from kernels.common.resources import Maps, Shared
from kernels.interface import PageBuffers
from kernels.sm90.forward_schedule import Work, is_tile, publish, publish_end, published
from kernels.sm90.forward_visits import make_visits
from kernels.sm90.forward_work import FindsWork, OfCall
from kernels.sm90.tiles import TICKET_BLOCKS

ASKING_BLOCKS = 7
"""Blocks of a tile that are still to be loaded when a schedule warp is asked for the next tile.

They are more than TICKET_BLOCKS, since loads that wait for the ticket follow it.
"""


class Loads(FindsWork):
    """What the load warp does; attributes are those of `forward.Forward`."""

    head_dim: int
    value_dim: int
    reads_mask: bool
    by_ticket: bool
    has_schedule_warp: bool

    @cute.jit
    def load(
        self,
        maps: Maps,
        shared: Shared,
        call: OfCall,
        tile_ticket: cute.Pointer | None,
        pages: tuple[PageBuffers | None, Int32],
    ):
        """Load warp: finds a tile's work, loads Q, then K and V of each block, last block first."""
        schedule = call.schedule
        ctas, _, _ = cute.arch.grid_dim()
        index = schedule.tile(Int32(0))
        tiles_done, blocks_done = Int32(0), Int32(0)
        while index < schedule.tiles:
            work = self.find_work(index, call)
            visits = NO_VISITS
            if cutlass.const_expr(self.reads_mask):
                visits, work = make_visits(work, call.ranges, schedule.sizes, self.shape)
            self.publish_work(shared, work, call, tiles_done)
            self.load_query(maps, shared, work, tiles_done)
            done = (tiles_done, blocks_done)
            ticket = Int32(0)
            if cutlass.const_expr(self.paged):
                ticket = self.load_pages(maps, shared, work, tile_ticket, done, pages)
            else:
                ticket = self.load_blocks(maps, shared, work, visits, tile_ticket, done)
            tiles_done += 1
            blocks_done += work.blocks.end - work.blocks.begin
            if cutlass.const_expr(self.by_ticket):
                index = ctas + cute.arch.make_warp_uniform(ticket)
            else:
                index = schedule.tile(tiles_done)
        shared.barriers.q_empty.wait_free(tiles_done)
        with cute.arch.elect_one():
            publish_end(self.words(shared, tiles_done))
            cute.arch.mbarrier_arrive(shared.barriers.q_full.at(tiles_done))

    @cute.jit
    def load_found(self, maps: Maps, shared: Shared, call: OfCall):
        """Load warp beside a schedule warp: does the same with the work that this one finds."""
        tiles_done, blocks_done = Int32(0), Int32(0)
        shared.barriers.work_full.wait(tiles_done)
        more = is_tile(self.words(shared, tiles_done))
        while more:
            words = self.words(shared, tiles_done)
            work, visits = published(words, call.schedule.window), NO_VISITS
            cute.arch.sync_warp()  # One lane hands Q on, and with it the words' memory, for all.
            if cutlass.const_expr(self.reads_mask):
                visits, work = make_visits(work, call.ranges, call.schedule.sizes, self.shape)
                if visits.tile.given:
                    with cute.arch.elect_one():
                        publish(work, words)
            self.load_query(maps, shared, work, tiles_done)
            self.load_blocks(maps, shared, work, visits, None, (tiles_done, blocks_done))
            tiles_done += 1
            blocks_done += work.blocks.end - work.blocks.begin
            shared.barriers.work_full.wait(tiles_done)
            more = is_tile(self.words(shared, tiles_done))
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(shared.barriers.q_full.at(tiles_done))

    @cute.jit
    def load_query(self, maps: Maps, shared: Shared, work: Work, tiles_done: Int32):
        """Loads Q of a tile into its memory, which is free."""
        tile, d = self.tile, self.head_dim
        q = tensors.bthd_coordinates()[None, None, work.head, work.batch]
        q_tile = cute.local_tile(cute.domain_offset((work.first_row, 0), q), (tile.m, d), (0, 0))
        q_full = shared.barriers.q_full.at(tiles_done)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(q_full, tile.m * d * 2)
        slot = shared.barriers.q_full.use(tiles_done).slot
        tensors.tma_load(maps.q, q_tile, shared.q[None, None, slot], q_full)

    @cute.jit
    def load_blocks(
        self,
        maps: Maps,
        shared: Shared,
        work: Work,
        visits: Visits | None,
        tile_ticket: cute.Pointer | None,
        done: tuple[Int32, Int32],
    ) -> Int32:
        """Loads K and V of a tile's blocks.

        done: the numbers of tiles and of blocks that the CTA has had before.

        Returns the next tile's ticket, in lane 0, or 0 where this warp takes none.
        """
        tile, (tiles_done, blocks_done) = self.tile, done
        kv = tensors.bthd_coordinates()[None, None, work.kv_head, work.batch]
        count = work.blocks.end - work.blocks.begin
        ticket, walk = Int32(0), make_walk(visits)
        if cutlass.const_expr(self.has_schedule_warp):
            if count < ASKING_BLOCKS:
                self.ask_for_tile(shared, tiles_done)
        elif cutlass.const_expr(self.by_ticket):
            if (count < TICKET_BLOCKS) & (cute.arch.lane_idx() == 0):
                ticket = ptx.take_ticket(tile_ticket)
        for step in cutlass.range(count, unroll=1):
            if cutlass.const_expr(self.has_schedule_warp):
                if step == count - ASKING_BLOCKS:
                    self.ask_for_tile(shared, tiles_done)
            elif cutlass.const_expr(self.by_ticket):
                if (step == count - TICKET_BLOCKS) & (cute.arch.lane_idx() == 0):
                    ticket = ptx.take_ticket(tile_ticket)
            block, limited = block_of_step(visits, walk, work.blocks.end, step)
            use = shared.barriers.k_full.use(blocks_done + step)
            for operand in cutlass.range_constexpr(2):
                columns = (self.head_dim, self.value_dim)[operand]
                kv_tiles = cute.local_tile(kv, (tile.n, columns), (None, 0))
                full = (shared.barriers.k_full, shared.barriers.v_full)[operand].at(use)
                empty = (shared.barriers.k_empty, shared.barriers.v_empty)[operand]
                target = (shared.k, shared.v)[operand]
                empty.wait_free(use)
                if cutlass.const_expr(operand == 1 and not tile.own_output):
                    if step == 0:
                        shared.barriers.o_empty.wait_free(tiles_done)
                with cute.arch.elect_one():
                    if cutlass.const_expr(self.reads_mask and operand == 0):
                        shared.visits[0, use.slot], shared.visits[1, use.slot] = block, limited
                    cute.arch.mbarrier_arrive_and_expect_tx(full, tile.n * columns * 2)
                tensors.tma_load(
                    (maps.k, maps.v)[operand],
                    kv_tiles[None, None, block],
                    target[None, None, use.slot],
                    full,
                )
        return ticket

    def ask_for_tile(self, shared: Shared, tiles_done: Int32):
        """Lets the schedule warp take the next tile's ticket."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(shared.barriers.ticket_due.at(tiles_done))

    @cute.jit
    def load_pages(
        self,
        maps: Maps,
        shared: Shared,
        work: Work,
        tile_ticket: cute.Pointer,
        done: tuple[Int32, Int32],
        of_call: tuple[PageBuffers, Int32],
    ) -> Int32:
        """Does what `load_blocks` does with keys in pages; of_call: these, and their length."""
        buffers, page_length = of_call
        keys, ticket = work.band.key_length, Int32(0)
        pages = in_pages.pages_of(buffers, page_length, keys, work.batch, work.kv_head)
        if cutlass.const_expr(has_long_copies(self.tile.n)):
            if page_length % LONG_COPY == 0:
                ticket = self.load_copies(maps, shared, work, tile_ticket, done, pages, LONG_COPY)
            else:
                ticket = self.load_copies(maps, shared, work, tile_ticket, done, pages, PAGE_KEYS)
        else:
            ticket = self.load_copies(maps, shared, work, tile_ticket, done, pages, PAGE_KEYS)
        return ticket

    @cute.jit
    def load_copies(
        self,
        maps: Maps,
        shared: Shared,
        work: Work,
        tile_ticket: cute.Pointer,
        done: tuple[Int32, Int32],
        pages: Pages,
        rows: cutlass.Constexpr[int],
    ) -> Int32:
        """Loads a tile's blocks by copies of `rows` keys; returns the next tile's ticket."""
        tile, (tiles_done, blocks_done), barriers = self.tile, done, shared.barriers
        count, ticket = work.blocks.end - work.blocks.begin, Int32(0)
        if (count < TICKET_BLOCKS) & (cute.arch.lane_idx() == 0):
            ticket = ptx.take_ticket(tile_ticket)
        place = (Int32(0), Int32(0))
        if count > 0:
            place = look_up(pages, work.blocks.end - 1, tile.n, rows)
        for step in cutlass.range(count, unroll=1):
            if (step == count - TICKET_BLOCKS) & (cute.arch.lane_idx() == 0):
                ticket = ptx.take_ticket(tile_ticket)
            use = barriers.k_full.use(blocks_done + step)
            for operand in cutlass.range_constexpr(2):
                columns = (self.head_dim, self.value_dim)[operand]
                full = (barriers.k_full, barriers.v_full)[operand].at(use)
                (barriers.k_empty, barriers.v_empty)[operand].wait_free(use)
                if cutlass.const_expr(operand == 1 and not tile.own_output):
                    if step == 0:
                        barriers.o_empty.wait_free(tiles_done)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full, tile.n * columns * 2)
                copies = Copies(("k", "v")[operand], rows, tile.span_bytes // 2)
                target = (shared.k, shared.v)[operand][None, None, use.slot]
                in_pages.load(maps, copies, target, place, pages, (0, 0), full)
            if step + 1 < count:
                place = look_up(pages, work.blocks.end - 2 - step, tile.n, rows)
        return ticket
