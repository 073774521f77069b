"""What both backward kernels for pairs do alike: they load by columns and clear padding."""

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kernels.common import tensors
from kernels.common.backward_schedule import Work
from kernels.common.resources import Maps, Shared
from kernels.common.ring import Ring
from kernels.sm100.backward_kernel import BackwardKernel
from kernels.sm100.backward_pair_data import PairConfig


@dataclasses.dataclass(frozen=True)
class Padded:
    """A tile whose rows from `first_row` on are padding."""

    memory: cute.Tensor
    first_row: Int32


class PairKernel(BackwardKernel):
    """The kernel of a pair without the order of its loads and products."""

    config: PairConfig

    @cute.jit
    def load_keys(self, maps: Maps, shared: Shared, work: Work):
        """Loads k, v and kt."""
        tile, kv_full = self.config.tile, shared.barriers.kv_full.first
        kv = tensors.bthd_coordinates()[None, None, work.kv_head, work.batch]
        with cute.arch.elect_one():
            columns = tile.head_dim + tile.value_dim
            num_bytes = (tile.keys * columns + tile.n * tile.part) * 2
            cute.arch.mbarrier_arrive_and_expect_tx(kv_full, num_bytes)
        place = (work.tile * tile.ctas + work.rank, 0)
        own_keys = cute.local_tile(kv, (tile.keys, tile.head_dim), place)
        tensors.tma_load(maps.k, own_keys, shared.k, kv_full)
        own_keys = cute.local_tile(kv, (tile.keys, tile.value_dim), place)
        tensors.tma_load(maps.v, own_keys, shared.v, kv_full)
        place = (work.tile, work.rank)
        own_columns = cute.local_tile(kv, (tile.n, tile.part), place)
        tensors.tma_load(maps.kt, own_columns, shared.kt, kv_full)

    @cute.jit
    def load_columns(
        self,
        atom: cute.CopyAtom,
        work: Work,
        step: Int32,
        memory: cute.Tensor,
        full: cute.Pointer,
    ):
        """Loads qt or dot of a step."""
        tile, columns = self.config.tile, cute.size(memory, mode=[1])
        head, block = work.step(step, self.config.deterministic)
        of_head = tensors.bthd_coordinates()[None, None, head, work.batch]
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, tile.m * columns * 2)
        source = cute.local_tile(of_head, (tile.m, columns), (block, work.rank))
        tensors.tma_load(atom, source, memory, full)

    @cute.jit
    def receive_keys(self, shared: Shared, work: Work):
        """Waits for k, v and kt, and writes 0 to rows past the key length."""
        shared.barriers.kv_full.wait(0, 2)
        if work.padded_keys:
            rows = work.band.key_length - work.first_key
            own = cutlass.max(rows - work.rank * self.config.tile.keys, 0)
            self.clear_padding(
                [Padded(shared.k, own), Padded(shared.v, own), Padded(shared.kt, rows)]
            )

    @cute.jit
    def receive(self, memory: cute.Tensor, full: Ring, work: Work, step: Int32):
        """Waits for q, do, qt or dot, and writes 0 to rows past the query length."""
        full.wait(step, 2)
        if work.padded_queries:
            _, block = work.step(step, self.config.deterministic)
            first = block * self.config.tile.m
            if cutlass.const_expr(cute.size(memory, mode=[0]) < self.config.tile.m):
                first += work.rank * self.config.tile.queries
            first_row = cutlass.max(work.band.query_length - first, 0)
            if first_row < cute.size(memory, mode=[0]):
                self.clear_padding([Padded(memory, first_row)])

    @cute.jit
    def clear_padding(self, tiles: list[Padded]):
        """Writes 0 to the padding of each tile, before products read it."""
        thread, _, _ = cute.arch.thread_idx()
        for tile in tiles:
            tensors.zero_rows(tile.memory, tile.first_row, thread % 32, 32)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
