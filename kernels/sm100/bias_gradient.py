"""Blackwell's gradient of a bias: sums of dS over whatever it broadcasts over.

What a CTA sums and visits, and the formulas, are in `kernels.common.bias_gradient_work`.

    load warp  loads Q, K, V and dO of a visit by TMA into a ring
    MMA warps  have 16 query rows each, and all keys; products are mma.sync, operands by ldmatrix
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from fa4_jax import bands
from fa4_jax.key import KernelKey
from kernels.common import matrix_rows, ptx, resources, tensors
from kernels.common.bias_gradient_host import BiasGradientHost, bias_gradient_source
from kernels.common.bias_gradient_sums import Sums, SumsStore
from kernels.common.bias_gradient_work import Call, Visit, Work, assign, visit_of
from kernels.common.block_bias import Addition, BlockBias
from kernels.common.resources import Maps, Shared
from kernels.common.softmax import LOG2_E, exp2, select
from kernels.interface import (
    BackwardScalars,
    BiasBuffers,
    BiasGradientBuffers,
    BiasGradientShape,
    Sizes,
)
from kernels.kernel_source import KernelSource
from kernels.sm100.bias_gradient_description import OPERANDS, TILE, description

_DEPTH = 16  # of one mma.sync
_COLUMNS = 8  # of one mma.sync
_HALVES = 2  # rows of a thread: lane // 4 and 8 more of the warp's 16


class BiasGradient(BiasGradientHost):
    """The kernel of one key; attributes are compile-time constants."""

    def __init__(self, key: KernelKey):
        self.dtype, self.head_dim = tensors.TYPES[key.dtype], key.head_dim
        self.description = description(key.head_dim)
        self.span_bytes = self.description.maps[0].span_bytes
        self.tile_bytes = TILE * key.head_dim * 2
        self.sums = self.description.named_barrier("sums")
        self.sums_store = SumsStore(TILE, self.dtype, pairwise=False)

    @cute.kernel
    def kernel(
        self,
        maps: Maps,
        buffers: BiasGradientBuffers,
        sizes: Sizes,
        shape: BiasGradientShape,
        scalars: BackwardScalars,
        bias: BiasBuffers,
    ):
        shared = resources.allocate(self.description, self.dtype)
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        load = self.description.role("load")
        if warp_index == load.first_warp:
            resources.prefetch(maps, self.description)
            with cute.arch.elect_one():
                resources.initialise(self.description, shared.barriers)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        call = Call(TILE, buffers, sizes, shape, scalars, bias)
        tile, _, _ = cute.arch.block_idx()
        work = assign(call, tile)
        if warp_index == load.first_warp:
            self.load(maps, shared, call, work)
        else:
            self.mma(shared, call, work)

    @cute.jit
    def load(self, maps: Maps, shared: Shared, call: Call, work: Work):
        """Load warp: loads the operands of every visit in which anything is seen."""
        group, loaded = call.sizes.heads // call.sizes.kv_heads, Int32(0)
        coordinates = tensors.bthd_coordinates()
        box = (TILE, self.head_dim)
        for index in cutlass.range(work.visits(), unroll=1):
            visit = visit_of(call, work, index)
            if visit.seen:
                use = shared.barriers.full.use(loaded)
                full = shared.barriers.full.at(use)
                shared.barriers.empty.wait_free(use)
                with cute.arch.elect_one():
                    num_bytes = len(OPERANDS) * self.tile_bytes
                    cute.arch.mbarrier_arrive_and_expect_tx(full, num_bytes)
                rows = coordinates[None, None, visit.head, visit.batch]
                keys = coordinates[None, None, visit.head // group, visit.batch]
                rows = cute.local_tile(rows, box, (visit.first_row // TILE, 0))
                # Tiles of a band begin at any key, also before the first; TMA fills with zeros.
                keys = cute.domain_offset((visit.first_key, 0), keys)
                keys = cute.local_tile(keys, box, (0, 0))
                for name in cutlass.range_constexpr(len(OPERANDS)):
                    operand = OPERANDS[name]
                    source = rows if operand in ("q", "do") else keys
                    target = getattr(shared, operand)[None, None, use.slot]
                    tensors.tma_load(getattr(maps, operand), source, target, full)
                loaded += 1

    @cute.jit
    def mma(self, shared: Shared, call: Call, work: Work):
        """MMA warp: sums dS of its rows over all visits, then stores what the bias has of it."""
        total = cute.make_rmem_tensor((4, TILE // _COLUMNS), Float32)
        total.fill(0.0)
        read = Int32(0)
        for index in cutlass.range(work.visits(), unroll=1):
            visit = visit_of(call, work, index)
            if visit.seen:
                use = shared.barriers.full.use(read)
                shared.barriers.full.wait(use)
                stage = use.slot * self.tile_bytes
                scores = self.product(shared.q, shared.k, stage)
                how = Addition(_place, past_end=True)
                self.bias_of(call, visit).add(scores, call.scalars.scale, how)
                gradients = self.product(shared.do, shared.v, stage)
                cute.arch.sync_warp()  # One lane says for all that they have read the operands.
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(shared.barriers.empty.at(use))
                # No register holds the visit while the second product runs.
                visit = visit_of(call, work, ptx.anew(index))
                self.add(total, scores, gradients, call, visit)
                read += 1
        # The work is found out again, too, so that no register holds what the sums do not need.
        tile, _, _ = cute.arch.block_idx()
        self.store(shared, call, assign(call, tile), total)

    def bias_of(self, call: Call, visit: Visit) -> BlockBias:
        """Returns what a thread's scores of a visit get."""
        thread, _, _ = cute.arch.thread_idx()
        row = visit.first_row + thread // 32 * 16 + thread % 32 // 4
        key = visit.first_key + thread % 4 * 2
        of = (visit.batch, visit.head, row, key)
        return BlockBias(call.memory, *of, self.dtype, TILE // _COLUMNS, pairwise=False)

    def product(self, rows: cute.Tensor, keys: cute.Tensor, stage: Int32) -> cute.Tensor:
        """Returns A B^T of a warp's 16 rows: for each 8 keys four values.

        rows, keys: the ring; stage: bytes to the visit's tile.
        """
        thread, _, _ = cute.arch.thread_idx()
        span = self.span_bytes
        own_rows = thread // 32 * (16 * span) + stage
        (a_at,) = matrix_rows.lane_addresses((), (rows,), span)
        (b_at,) = matrix_rows.lane_addresses((keys,), (), span)
        a_at, b_at = a_at + own_rows, b_at + stage
        tiles = [[Float32(0.0)] * 4 for _ in range(TILE // _COLUMNS)]
        for column in range(0, self.head_dim, _DEPTH):
            bits, offset = matrix_rows.place(0, column, span)
            a = list(ptx.load_matrices(a_at ^ bits, offset))
            for pair in range(TILE // 16):
                bits, offset = matrix_rows.place(16 * pair, column, span)
                b = ptx.load_matrices(b_at ^ bits, offset)
                for i in range(2):
                    own = b[2 * i : 2 * i + 2]
                    tile = 2 * pair + i
                    tiles[tile] = ptx.multiply_m16n8k16(self.dtype, tiles[tile], a, own)
        found = cute.make_rmem_tensor((4, len(tiles)), Float32)
        for i, tile in enumerate(tiles):
            for j, value in enumerate(tile):
                found[j, i] = value
        return found

    @cute.jit
    def add(
        self,
        total: cute.Tensor,
        scores: cute.Tensor,
        gradients: cute.Tensor,
        call: Call,
        visit: Visit,
    ):
        """Adds dS of a visit to the sums; scores: with the bias."""
        thread, _, _ = cute.arch.thread_idx()
        lane, sizes = thread % 32, call.sizes
        row_of_warp = visit.first_row + thread // 32 * 16 + lane // 4
        first_key = visit.first_key + lane % 4 * 2
        of_head = (Int64(visit.batch) * sizes.heads + visit.head) * call.shape.padded_rows
        for half in cutlass.range_constexpr(_HALVES):
            row = row_of_warp + 8 * half
            low, high = bands.row_limits(visit.band, row, tensors.INT32)
            low, high = low - first_key, high - first_key
            # Rows past the last have no statistics, and no key.
            high = Int32(cutlass.select_(row < visit.band.query_length, high, low))
            own = of_head + cutlass.min(row, sizes.query_length - 1)
            lse_log2 = tensors.f32(call.buffers.lse_log2 + own, Int32(0))
            delta = tensors.f32(call.buffers.delta + own, Int32(0))
            for tile in cutlass.range_constexpr(TILE // _COLUMNS):
                for column in cutlass.range_constexpr(2):
                    key, place = tile * _COLUMNS + column, (2 * half + column, tile)
                    ds = exp2(scores[place] * LOG2_E - lse_log2) * (gradients[place] - delta)
                    seen = (key >= low) & (key < high)
                    total[place] = total[place] + select(seen, ds, Float32(0.0))

    @cute.jit
    def store(self, shared: Shared, call: Call, work: Work, total: cute.Tensor):
        """Leaves the sums in shared memory, and stores what the bias has of them."""
        thread, _, _ = cute.arch.thread_idx()
        lane = thread % 32
        resources.meet(self.sums)
        for half in cutlass.range_constexpr(_HALVES):
            row = thread // 32 * 16 + lane // 4 + 8 * half
            for tile in cutlass.range_constexpr(TILE // _COLUMNS):
                for column in cutlass.range_constexpr(2):
                    key = tile * _COLUMNS + lane % 4 * 2 + column
                    shared.sums[key, row] = total[2 * half + column, tile]
        resources.meet(self.sums)
        self.sums_store.store(Sums(shared.sums, call, work, thread))


def _place(pair: int, row: int, column: int) -> tuple[int, int]:
    """Returns where a score of a thread is in what `BiasGradient.product` returns."""
    return 2 * row + column, pair


def source(key: KernelKey) -> KernelSource:
    """Returns the kernel of a key, with its launch."""
    return bias_gradient_source(BiasGradient(key), key)
