"""The gradient of a bias: sums of dS over whatever it broadcasts over; one source for all GPUs.

    S = Q K^T   dP = dO V^T   P = exp2((S * scale + bias) * log2(e) - lse_log2)
    dS = P * (dP - delta)     dbias = the sum of dS over all pairs that have the same bias

A CTA has one tile of 64 x 64 sums, in registers, and visits all pairs of tiles that add to them:

    a dense bias       one pair of tiles, of every batch element and head that share the bias
    rows alike         one key tile, with every query tile, likewise; rows are summed at the end
    by distance        the pairs of tiles along a diagonal, likewise: all have the same distances
                       in the same places; diagonals are summed at the end
    banded             one query tile, and 64 keys counted from where the band begins in its first
                       row, likewise: in each batch element they have the same columns of the rows

    load warp  loads Q, K, V and dO of a visit by TMA into a ring
    MMA warps  have 16 query rows each, and all keys; products are mma.sync, operands by ldmatrix

Every sum is one thread's, in a fixed order: equal inputs give equal bits, and nothing is added in
global memory. Distances meet in two tiles' diagonals, the lower and the upper ones; each CTA has a
place of its own for either, and the library adds the two.
"""

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from fa4_jax import bands
from fa4_jax.key import BIAS_GRADIENT_TILE, KernelKey
from kernels.common import hosts, matrix_rows, ptx, resources, tensors
from kernels.common.bias import BiasInMemory
from kernels.common.bias_gradient_description import OPERANDS, ctas, description
from kernels.common.bias_gradient_host import BiasGradientHost
from kernels.common.block_bias import Addition, BlockBias
from kernels.common.resources import Maps, Shared
from kernels.common.schedule import batch_band
from kernels.common.softmax import LOG2_E, exp2, select
from kernels.interface import (
    BackwardScalars,
    BiasBuffers,
    BiasGradientBuffers,
    BiasGradientLoads,
    BiasGradientShape,
    HeadDims,
    Sizes,
)
from kernels.kernel_source import KernelSource

TILE = BIAS_GRADIENT_TILE
_DEPTH = 16  # of one mma.sync
_COLUMNS = 8  # of one mma.sync
_PAIRS = TILE // 2  # of a row
_HALVES = 2  # rows of a thread: lane // 4 and 8 more of the warp's 16


@dataclasses.dataclass(frozen=True)
class Call:
    """The parameters of a launch but tensor maps."""

    buffers: BiasGradientBuffers
    sizes: Sizes
    shape: BiasGradientShape
    scalars: BackwardScalars
    bias: BiasBuffers

    @property
    def memory(self) -> BiasInMemory:
        """Where the bias is."""
        return BiasInMemory(self.bias, self.sizes, self.buffers.extents)

    def rows_differ(self) -> Boolean:
        """Whether each row has elements of its own, unless the bias is by distance."""
        return self.bias.bias_rows > 1


@dataclasses.dataclass(frozen=True)
class Work:
    """What a CTA sums.

    Attributes:
      plane, unit: of which dimensions of the bias, and which of their tiles.
      first_batch, batches, first_head, heads: that share the plane.
      first_row_tile, row_tiles: query tiles that are visited.
      key_tile: of the first of them; by distance the next query tile has the next key tile, and
        banded tiles of keys are counted from the band's first key.
      key_step: by how much, then: 1 or 0.
    """

    plane: Int32
    unit: Int32
    first_batch: Int32
    batches: Int32
    first_head: Int32
    heads: Int32
    first_row_tile: Int32
    row_tiles: Int32
    key_tile: Int32
    key_step: Int32

    def visits(self) -> Int32:
        """Counts the pairs of tiles that are visited."""
        return self.batches * self.heads * self.row_tiles


@dataclasses.dataclass(frozen=True)
class Visit:
    """A pair of tiles of one head; seen: whether any pair of row and key may be."""

    batch: Int32
    head: Int32
    first_row: Int32
    first_key: Int32
    band: bands.Band
    seen: Boolean


def assign(call: Call) -> Work:
    """Returns this CTA's work, which is computed anew at each call."""
    sizes, bias = call.sizes, call.bias
    index, _, _ = cute.arch.block_idx()
    index = ptx.anew(index)
    plane = index // call.shape.units
    unit = index - plane * call.shape.units
    batch = plane // bias.bias_heads
    head = plane - batch * bias.bias_heads
    all_rows = (sizes.query_length + TILE - 1) // TILE
    all_keys = (sizes.key_length + TILE - 1) // TILE
    diagonal = unit - (all_rows - 1)  # the key tile minus the query tile
    first = cutlass.max(-diagonal, Int32(0))
    count = cutlass.min(all_rows, all_keys - diagonal) - first
    is_band = call.memory.is_band()
    # The 64 rows of a tile have their columns at 63 keys more than one row has.
    in_band = (call.memory.band_columns() + 2 * TILE - 2) // TILE
    across = Int32(cutlass.select_(is_band, in_band, all_keys))
    row_tile, key_tile = unit // across, unit - unit // across * across
    one, by_distance = Int32(1), call.memory.by_distance()
    rows_differ = call.rows_differ() | is_band

    def choose(of_distance: Int32, of_dense: Int32, of_alike: Int32) -> Int32:
        other = cutlass.select_(rows_differ, of_dense, of_alike)
        return Int32(cutlass.select_(by_distance, of_distance, Int32(other)))

    return Work(
        plane=plane,
        unit=unit,
        first_batch=batch,
        batches=Int32(cutlass.select_(bias.bias_batch == 1, sizes.batch, one)),
        first_head=head,
        heads=Int32(cutlass.select_(bias.bias_heads == 1, sizes.heads, one)),
        first_row_tile=choose(first, row_tile, Int32(0)),
        row_tiles=choose(count, one, all_rows),
        key_tile=choose(first + diagonal, key_tile, unit),
        key_step=choose(one, Int32(0), Int32(0)),
    )


def visit_of(call: Call, work: Work, index: Int32) -> Visit:
    """Returns a CTA's index-th visit."""
    rest = index // work.row_tiles
    step = index - rest * work.row_tiles
    batch = rest // work.heads
    head = work.first_head + rest - batch * work.heads
    batch = work.first_batch + batch
    first_row = (work.first_row_tile + step) * TILE
    first_key = (work.key_tile + step * work.key_step) * TILE
    band = batch_band(call.buffers.extents, batch, call.scalars.window)
    begin = first_row + call.memory.first_key_of_band(batch)
    first_key += Int32(cutlass.select_(call.memory.is_band(), begin, Int32(0)))
    keys = bands.visited_blocks(band, first_row, TILE, 1, tensors.INT32)
    seen = (first_key < keys.end) & (first_key + TILE > keys.begin) & (keys.begin < keys.end)
    return Visit(batch, head, first_row, first_key, band, seen)


class BiasGradient(BiasGradientHost):
    """The kernel of one key; attributes are compile-time constants."""

    def __init__(self, key: KernelKey):
        self.dtype, self.head_dim = tensors.TYPES[key.dtype], key.head_dim
        self.pairwise = key.pairwise_bias
        self.description = description(key.arch, key.head_dim)
        self.ctas = ctas(key.arch, key.head_dim)
        self.span_bytes = self.description.maps[0].span_bytes
        self.tile_bytes = TILE * key.head_dim * 2
        self.sums = self.description.named_barrier("sums")

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

        call = Call(buffers, sizes, shape, scalars, bias)
        work = assign(call)
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
                stage, words = use.slot * self.tile_bytes, None
                if cutlass.const_expr(self.pairwise):
                    words = self.bias_of(call, visit).load_any()
                scores = self.product(shared.q, shared.k, stage)
                how = Addition(_place, past_end=True)
                self.bias_of(call, visit).add(scores, call.scalars.scale, how, words)
                gradients = self.product(shared.do, shared.v, stage)
                cute.arch.sync_warp()  # One lane says for all that they have read the operands.
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(shared.barriers.empty.at(use))
                # No register holds the visit while the second product runs.
                visit = visit_of(call, work, ptx.anew(index))
                self.add(total, scores, gradients, call, visit)
                read += 1
        # The work is found out again, too, so that no register holds what the sums do not need.
        self.store(shared, call, assign(call), total)

    def bias_of(self, call: Call, visit: Visit) -> BlockBias:
        """Returns what a thread's scores of a visit get."""
        thread, _, _ = cute.arch.thread_idx()
        row = visit.first_row + thread // 32 * 16 + thread % 32 // 4
        key = visit.first_key + thread % 4 * 2
        of = (visit.batch, visit.head, row, key)
        return BlockBias(call.memory, *of, self.dtype, TILE // _COLUMNS, self.pairwise)

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
        columns = call.shape.dbias_columns
        of_plane = call.buffers.dbias + Int64(work.plane) * columns * self.rows_of_plane(call)
        if call.memory.by_distance():
            self.store_diagonals(shared, of_plane + work.unit * TILE, columns)
        elif call.memory.is_band():
            self.store_band(shared, call, work, of_plane)
        elif cutlass.const_expr(not self.pairwise):
            self.store_elements(shared, call, work, of_plane)
        elif call.memory.in_pairs():
            self.store_pairs(shared, call, work, of_plane)
        else:
            self.store_elements(shared, call, work, of_plane)

    def rows_of_plane(self, call: Call) -> Int32:
        """Returns dbias's rows: the bias's, or by distance two, of lower and upper diagonals."""
        by_distance, is_band = call.memory.by_distance(), call.memory.is_band()
        rows = Int32(cutlass.select_(is_band, call.sizes.query_length, call.bias.bias_rows))
        return Int32(cutlass.select_(by_distance, Int32(2), rows))

    @cute.jit
    def store_elements(self, shared: Shared, call: Call, work: Work, plane: cute.Pointer):
        """Stores the sums of a dense bias as fp32 numbers."""
        if call.rows_differ():
            self.store_tile(shared, call, work, plane)
        else:
            self.store_columns(shared, call, work, plane)

    @cute.jit
    def store_pairs(self, shared: Shared, call: Call, work: Work, plane: cute.Pointer):
        """Stores the sums of a dense bias in pairs, rounded to its type: a pair is a word of dbias.

        Where rows are alike, each pair is the sum of a column's rows.
        """
        thread, _, _ = cute.arch.thread_idx()
        pair, alike = thread % _PAIRS, call.bias.bias_rows == 1
        key = work.key_tile * TILE + 2 * pair
        rows_at_once = self.sums.threads // _PAIRS
        for row in cutlass.range(thread // _PAIRS, TILE, rows_at_once, unroll=1):
            query = work.first_row_tile * TILE + row
            low, high = shared.sums[2 * pair, row], shared.sums[2 * pair + 1, row]
            query = Int32(cutlass.select_(alike, row, query))
            if alike & (row == 0):
                for other in cutlass.range(1, TILE, unroll=1):
                    low += shared.sums[2 * pair, other]
                    high += shared.sums[2 * pair + 1, other]
            if (query < call.bias.bias_rows) & (key < call.sizes.key_length):
                target = plane + (Int64(query) * call.shape.dbias_columns + key // 2)
                word = ptx.round_pair(self.dtype, low, high)
                cute.make_tensor(target, cute.make_layout(1))[0] = word.bitcast(Float32)

    @cute.jit
    def store_tile(self, shared: Shared, call: Call, work: Work, plane: cute.Pointer):
        """Stores the sums as they are."""
        thread, _, _ = cute.arch.thread_idx()
        key = work.key_tile * TILE + thread % TILE
        for row in cutlass.range(thread // TILE, TILE, 2, unroll=1):
            query = work.first_row_tile * TILE + row
            if (query < call.sizes.query_length) & (key < call.sizes.key_length):
                target = plane + (Int64(query) * call.sizes.key_length + key)
                cute.make_tensor(target, cute.make_layout(1))[0] = shared.sums[thread % TILE, row]

    @cute.jit
    def store_band(self, shared: Shared, call: Call, work: Work, plane: cute.Pointer):
        """Stores the sums whose row has a column there; a row's first key has its last column."""
        thread, _, _ = cute.arch.thread_idx()
        columns, key = call.memory.band_columns(), thread % TILE
        for row in cutlass.range(thread // TILE, TILE, 2, unroll=1):
            query = work.first_row_tile * TILE + row
            column = columns - 1 + row - work.key_tile * TILE - key
            if (query < call.sizes.query_length) & (column >= 0) & (column < columns):
                target = plane + (Int64(query) * columns + column)
                cute.make_tensor(target, cute.make_layout(1))[0] = shared.sums[key, row]

    @cute.jit
    def store_columns(self, shared: Shared, call: Call, work: Work, plane: cute.Pointer):
        """Stores the sum of each column."""
        thread, _, _ = cute.arch.thread_idx()
        key = work.key_tile * TILE + thread
        if (thread < TILE) & (key < call.sizes.key_length):
            found = Float32(0.0)
            for row in cutlass.range(TILE, unroll=8):
                found = found + shared.sums[thread, row]
            cute.make_tensor(plane + key, cute.make_layout(1))[0] = found

    @cute.jit
    def store_diagonals(self, shared: Shared, unit: cute.Pointer, columns: Int32):
        """Stores the sum of each diagonal: thread t has key - row = t - 63.

        columns: from the lower diagonals, t < 64, to the upper ones.
        """
        thread, _, _ = cute.arch.thread_idx()
        found, distance = Float32(0.0), thread - (TILE - 1)
        first = cutlass.max(-distance, Int32(0))
        last = cutlass.min(Int32(TILE), TILE - distance)
        for row in cutlass.range(first, last, unroll=1):
            found = found + shared.sums[row + distance, row]
        place = Int32(cutlass.select_(thread < TILE, thread, thread - TILE + columns))
        cute.make_tensor(unit + place, cute.make_layout(1))[0] = found


def _place(pair: int, row: int, column: int) -> tuple[int, int]:
    """Returns where a score of a thread is in what `BiasGradient.product` returns."""
    return 2 * row + column, pair


def source(key: KernelKey) -> KernelSource:
    """Returns the kernel of a key, with its launch."""
    kernel: Any = BiasGradient(key)
    takes = (
        *(BiasGradientLoads, BiasGradientBuffers, Sizes, HeadDims),
        *(BiasGradientShape, BackwardScalars, BiasBuffers),
    )
    return hosts.make_source(kernel, key, takes, {"m": TILE, "n": TILE})
