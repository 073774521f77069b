"""The load warp of the Hopper tangent kernel: finds each tile's work, and loads what it needs."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kernels.common import ptx, tensors
from kernels.common.resources import Maps, Shared
from kernels.common.ring import Ring
from kernels.common.schedule import ForwardShape, Schedule
from kernels.sm90.forward_schedule import Work, assign, publish, publish_end
from kernels.sm90.tiles import TICKET_BLOCKS, TangentTile


class LoadRole:
    """The load warp; attributes are compile-time constants."""

    def __init__(self, tile: TangentTile, head_dim: int, shape: ForwardShape):
        self.tile, self.head_dim, self.shape, self.band = tile, head_dim, shape, shape.band

    @cute.jit
    def load(
        self, maps: Maps, shared: Shared, schedule: Schedule, tile_ticket: cute.Pointer | None
    ):
        """Loads the tiles of this CTA.

        Where Q and O share memory, O is loaded when the tile's scores are complete, and the next Q
        when O's tangent has been stored.
        """
        tile, d = self.tile, self.head_dim
        ctas, _, _ = cute.arch.grid_dim()
        index = schedule.tile(Int32(0))
        tiles_done, blocks_done = Int32(0), Int32(0)
        while index < schedule.tiles:
            work = assign(index, schedule, self.shape)
            rows = tensors.bthd_coordinates()[None, None, work.head, work.batch]
            rows = cute.domain_offset((work.first_row, 0), rows)
            query_tile = cute.local_tile(rows, (tile.m, d), (0, 0))
            if cutlass.const_expr(tile.own_output):
                shared.barriers.q_empty.wait_free(tiles_done)
            else:
                shared.barriers.o_empty.wait_free(tiles_done)
            with cute.arch.elect_one():
                publish(work, shared.work[None, 0])
                cute.arch.mbarrier_arrive_and_expect_tx(
                    shared.barriers.q_full.first, 2 * tile.m * d * 2
                )
            for source, target in ((maps.q, shared.q), (maps.q_tangent, shared.q_tangent)):
                tensors.tma_load(source, query_tile, target, shared.barriers.q_full.first)
            ticket = self.load_blocks(maps, shared, work, tile_ticket, blocks_done)
            if cutlass.const_expr(tile.own_output):
                shared.barriers.o_empty.wait_free(tiles_done)
            else:
                shared.barriers.q_empty.wait(tiles_done)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(
                    shared.barriers.o_full.first, tile.m * d * 2
                )
            tensors.tma_load(maps.o, query_tile, shared.o, shared.barriers.o_full.first)
            tiles_done += 1
            blocks_done += work.blocks.end - work.blocks.begin
            if cutlass.const_expr(self.band):
                index = ctas + cute.arch.make_warp_uniform(ticket)
            else:
                index = schedule.tile(tiles_done)
        if cutlass.const_expr(tile.own_output):
            shared.barriers.q_empty.wait_free(tiles_done)
        with cute.arch.elect_one():
            publish_end(shared.work[None, 0])
            cute.arch.mbarrier_arrive(shared.barriers.q_full.first)

    @cute.jit
    def load_blocks(
        self,
        maps: Maps,
        shared: Shared,
        work: Work,
        tile_ticket: cute.Pointer | None,
        blocks_done: Int32,
    ) -> Int32:
        """Loads K, V and their tangents of a tile's blocks.

        Returns the next tile's ticket, in lane 0, or 0 where no tickets deal the tiles.
        """
        tile, barriers = self.tile, shared.barriers
        kv = tensors.bthd_coordinates()[None, None, work.kv_head, work.batch]
        kv_tiles = cute.local_tile(kv, (tile.n, self.head_dim), (None, 0))
        k_rings, v_rings = (barriers.k_full, barriers.k_empty), (barriers.v_full, barriers.v_empty)
        k_pair = (maps.k, shared.k), (maps.k_tangent, shared.k_tangent)
        v_pair = (maps.v, shared.v), (maps.v_tangent, shared.v_tangent)
        count, ticket = work.blocks.end - work.blocks.begin, Int32(0)
        if cutlass.const_expr(tile.keys_ahead):
            if count > 0:
                first = work.blocks.end - 1, blocks_done
                self.load_pair(k_pair, k_rings, kv_tiles, first)
        if cutlass.const_expr(self.band):
            if (count < TICKET_BLOCKS) & (cute.arch.lane_idx() == 0):
                ticket = ptx.take_ticket(tile_ticket)
        for step in cutlass.range(count, unroll=1):
            if cutlass.const_expr(self.band):
                if (step == count - TICKET_BLOCKS) & (cute.arch.lane_idx() == 0):
                    ticket = ptx.take_ticket(tile_ticket)
            block, ordinal = work.blocks.end - 1 - step, blocks_done + step
            if cutlass.const_expr(not tile.keys_ahead):
                self.load_pair(k_pair, k_rings, kv_tiles, (block, ordinal))
            elif step + 1 < count:
                self.load_pair(k_pair, k_rings, kv_tiles, (block - 1, ordinal + 1))
            self.load_pair(v_pair, v_rings, kv_tiles, (block, ordinal))
        return ticket

    def load_pair(
        self,
        pair: tuple[tuple[cute.CopyAtom, cute.Tensor], ...],
        rings: tuple[Ring, Ring],
        kv_tiles: cute.Tensor,
        place: tuple[Int32, Int32],
    ):
        """Loads a block of an operand and of its tangent.

        pair: a copy and the memory of each; rings: full and empty; kv_tiles: coordinates, by block
        last; place: the block, and its use of the rings.
        """
        (full, empty), (block, ordinal) = rings, place
        use = full.use(ordinal)
        empty.wait_free(use)
        with cute.arch.elect_one():
            num_bytes = 2 * self.tile.n * self.head_dim * 2
            cute.arch.mbarrier_arrive_and_expect_tx(full.at(use), num_bytes)
        for source, target in pair:
            memory = target[None, None, use.slot]
            tensors.tma_load(source, kv_tiles[None, None, block], memory, full.at(use))
