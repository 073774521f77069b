"""The load warp of the Blackwell forward: Q of a tile, and K and V of its blocks."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from fa4_jax.key import PAGE_KEYS
from kernels.common import pages as in_pages
from kernels.common import tensors
from kernels.common.key_visits import Visits, make_walk
from kernels.common.page_maps import LONG_COPY, has_long_copies
from kernels.common.pages import Copies, Pages, look_up
from kernels.common.resources import Maps, Shared
from kernels.common.ring import Use
from kernels.interface import PageBuffers
from kernels.sm100 import row_tiles
from kernels.sm100.forward_data import Config, pop_work
from kernels.sm100.forward_row_data import Call
from kernels.sm100.forward_schedule import Work
from kernels.sm100.forward_visits import publish, published, visits_of

Walk = tuple[Visits, cute.Tensor, Int32]
"""Visits of a tile, the register of a walk over them, and how many visits the CTA had before."""


class Loads:
    """What the load warp does; attributes are those of `forward.Forward`."""

    config: Config
    ranges: bool
    paged: bool

    @cute.jit
    def load(
        self,
        maps: Maps,
        shared: Shared,
        rounds: Int32,
        call: Call,
        pages: tuple[PageBuffers | None, Int32],
    ):
        """Load warp: loads Q of every tile, then K and V of each block, last block first.

        pages: where K and V lie if they do in pages, and the length of one.
        """
        tile = self.config.tile
        loads_done, tiles_done = Int32(0), Int32(0)
        for round_index in cutlass.range(rounds, unroll=1):
            work = pop_work(self.config, shared, round_index)
            count = work.blocks.end - work.blocks.begin
            if count > 0:
                if cutlass.const_expr(self.paged):
                    self.load_pages(maps, shared, work, pages, (loads_done, tiles_done))
                else:
                    visits = visits_of(work, call.ranges, call.sizes, self.config.shape, tile.ctas)
                    self.load_tile(maps, shared, work, visits, loads_done, tiles_done)
                tiles_done += 1
                loads_done += 2 * count
        # Shared memory must outlive every commit's arrival.
        for t in cutlass.range_constexpr(tile.query_tiles):
            shared.barriers.q_empty[t].wait_free(tiles_done)
        for i in cutlass.range_constexpr(tile.kv_stages):
            shared.barriers.kv_empty.wait_free(loads_done + i)

    @cute.jit
    def load_tile(
        self,
        maps: Maps,
        shared: Shared,
        work: Work,
        visits: Visits | None,
        loads_done: Int32,
        tiles_done: Int32,
    ):
        """Loads one tile that has blocks, after `loads_done` loads into the ring."""
        tile = self.config.tile
        last, count = work.blocks.end - 1, work.blocks.end - work.blocks.begin
        prefetch = tile.buffers_per_tile
        walk = make_walk(visits)
        own = (visits, walk, loads_done // 2)
        block = self.block_of_k(shared, own, last, Int32(0))
        self.load_block(maps, "k", shared, work, block, loads_done)
        loads_done += 1
        self.load_queries(maps, shared, work, tiles_done)
        for i in cutlass.range_constexpr(1, prefetch):
            if i < count:
                block = self.block_of_k(shared, own, last, Int32(i))
                self.load_block(maps, "k", shared, work, block, loads_done)
                loads_done += 1
        for step in cutlass.range(count, unroll=1):
            block = self.block_of_v(shared, own, last, step)
            self.load_block(maps, "v", shared, work, block, loads_done)
            loads_done += 1
            if step + prefetch < count:
                block = self.block_of_k(shared, own, last, step, prefetch)
                self.load_block(maps, "k", shared, work, block, loads_done)
                loads_done += 1

    def block_of_k(
        self, shared: Shared, own: Walk, last: Int32, step: Int32, prefetch: int = 0
    ) -> Int32:
        """Returns the block of step + prefetch, and publishes it; last: of the tile's visits."""
        if not self.ranges:
            return last - step - prefetch if prefetch else last - step
        visits, walk, visits_done = own
        step = step + prefetch
        return publish(shared.visits, visits, walk, last + 1, step, visits_done + step)

    def block_of_v(self, shared: Shared, own: Walk, last: Int32, step: Int32) -> Int32:
        """Returns the block of a step whose K has been loaded."""
        if not self.ranges:
            return last - step
        block, _ = published(shared.visits, own[2] + step)
        return cute.arch.make_warp_uniform(block)

    @cute.jit
    def load_queries(self, maps: Maps, shared: Shared, work: Work, tiles_done: Int32):
        """Loads Q of a tile."""
        tile, d = self.config.tile, self.config.head_dim
        for t in cutlass.range_constexpr(tile.query_tiles):
            full = shared.barriers.q_full[t].first
            shared.barriers.q_empty[t].wait_free(tiles_done)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, tile.rows * d * 2)
            row_tiles.load((maps.q, maps.q_rows), shared.q[None, None, t], work, t, full)

    @cute.jit
    def load_block(
        self,
        maps: Maps,
        operand: cutlass.Constexpr[str],
        shared: Shared,
        work: Work,
        block: Int32,
        loads: Int32,
    ):
        """Loads this CTA's part of a block of K or V into the ring, after `loads` others."""
        tile, d = self.config.tile, self.config.head_dim
        of_head = tensors.bthd_coordinates()[None, None, work.kv_head, work.batch]
        rank = cute.arch.block_idx_in_cluster() if tile.ctas > 1 else 0
        use = self.free_slot(shared, loads)
        full = shared.barriers.kv_full.at(use)
        if cutlass.const_expr(operand == "k"):
            place = (block * tile.ctas + rank, 0)
            source = cute.local_tile(of_head, (tile.keys, d), place)
            tensors.tma_load(maps.k, source, shared.k[None, None, use.slot], full)
        else:
            source = cute.local_tile(of_head, (tile.n, tile.columns_of_v(d)), (block, rank))
            tensors.tma_load(maps.v, source, shared.v[None, None, use.slot], full)

    @cute.jit
    def free_slot(self, shared: Shared, loads: Int32) -> Use:
        """Waits for the ring's slot after `loads` others, and says how much is loaded into it."""
        use = shared.barriers.kv_full.use(loads)
        full = shared.barriers.kv_full.at(use)
        shared.barriers.kv_empty.wait_free(use)
        with cute.arch.elect_one():
            num_bytes = self.config.tile.keys * self.config.head_dim * 2
            cute.arch.mbarrier_arrive_and_expect_tx(full, num_bytes)
        return use

    @cute.jit
    def load_pages(
        self,
        maps: Maps,
        shared: Shared,
        work: Work,
        of_call: tuple[PageBuffers, Int32],
        done: tuple[Int32, Int32],
    ):
        """Does what `load_tile` does with keys in pages.

        Args:
          of_call: the pages, and their length.
          done: loads into the ring, and tiles, before.
        """
        band, (buffers, page_length) = work.band, of_call
        pages = in_pages.pages_of(buffers, page_length, band.key_length, work.batch, work.kv_head)
        if cutlass.const_expr(has_long_copies(self.config.tile.keys)):
            if page_length % LONG_COPY == 0:
                self.load_copies(maps, shared, work, pages, LONG_COPY, done)
            else:
                self.load_copies(maps, shared, work, pages, PAGE_KEYS, done)
        else:
            self.load_copies(maps, shared, work, pages, PAGE_KEYS, done)

    @cute.jit
    def load_copies(
        self,
        maps: Maps,
        shared: Shared,
        work: Work,
        pages: Pages,
        rows: cutlass.Constexpr[int],
        done: tuple[Int32, Int32],
    ):
        """Loads one tile by copies of `rows` keys."""
        tile, (loads_done, tiles_done) = self.config.tile, done
        last, count = work.blocks.end - 1, work.blocks.end - work.blocks.begin
        prefetch = tile.buffers_per_tile
        # Places from V's block to the one after K's: each is looked up a step before it is needed.
        places = cute.make_rmem_tensor((2, prefetch + 2), Int32)
        for i in cutlass.range_constexpr(prefetch + 2):
            places[0, i], places[1, i] = look_up(pages, cutlass.max(last - i, 0), tile.n, rows)
        self.load_part(maps, shared, pages, ("k", rows), places[None, 0], loads_done)
        loads_done += 1
        self.load_queries(maps, shared, work, tiles_done)
        for i in cutlass.range_constexpr(1, prefetch):
            if i < count:
                self.load_part(maps, shared, pages, ("k", rows), places[None, i], loads_done)
                loads_done += 1
        for step in cutlass.range(count, unroll=1):
            self.load_part(maps, shared, pages, ("v", rows), places[None, 0], loads_done)
            loads_done += 1
            if step + prefetch < count:
                own = places[None, prefetch]
                self.load_part(maps, shared, pages, ("k", rows), own, loads_done)
                loads_done += 1
            for i in cutlass.range_constexpr(prefetch + 1):
                places[0, i], places[1, i] = places[0, i + 1], places[1, i + 1]
            block = cutlass.max(last - step - (prefetch + 2), 0)
            places[0, prefetch + 1], places[1, prefetch + 1] = look_up(pages, block, tile.n, rows)

    @cute.jit
    def load_part(
        self,
        maps: Maps,
        shared: Shared,
        pages: Pages,
        how: cutlass.Constexpr[tuple[str, int]],
        place: cute.Tensor,
        loads: Int32,
    ):
        """Does what `load_block` does; how: the operand, and the keys of a copy."""
        tile, (operand, rows) = self.config.tile, how
        rank = cute.arch.block_idx_in_cluster() if tile.ctas > 1 else 0
        use = self.free_slot(shared, loads)
        target, first = shared.k, (rank * (tile.keys // rows), 0)
        if cutlass.const_expr(operand == "v"):
            target, first = shared.v, (0, rank * tile.columns_of_v(self.config.head_dim))
        copies, full = Copies(operand, rows, tile.span), shared.barriers.kv_full.at(use)
        own = (place[0], place[1])
        in_pages.load(maps, copies, target[None, None, use.slot], own, pages, first, full)
