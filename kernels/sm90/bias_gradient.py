"""Hopper's gradient of a bias: sums of dS over whatever it broadcasts over.

What a tile's sums are and what is visited, and the formulas: `kernels.common.bias_gradient_work`.

    load warp        takes tile after tile, publishes each, and loads, for each visit, the columns
                     of Q with those of K, then those of dO with those of V, part by part into a
                     ring by TMA (bias_gradient_tiles)
    MMA warpgroup w  has 64 query rows and all keys. Per visit it
        issues S, both operands from shared memory, and finds out what its rows see,
        issues dP, and frees each part of S when that is done,
        computes P while the tensor core works, waits, and frees the parts of dP,
        adds P * (dP - delta) to its sums.

S, dP and the sums are 192 registers of a thread. The bias is the same in all visits of a tile,
place by place, so that it stays in shared memory: pairs of rows that differ in the warp that has
the rows (bias_gradient_rows), and of any other bias each thread's own numbers, where the sums go
at the end. Two warpgroups fill each other's waits.
"""

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass.cute.nvgpu import warpgroup

from fa4_jax import bands
from fa4_jax.key import KernelKey
from kernels.common import ptx, resources, tensors
from kernels.common.bias_gradient_host import BiasGradientHost, bias_gradient_source
from kernels.common.bias_gradient_sums import Sums, SumsStore
from kernels.common.bias_gradient_work import Call, Visit, assign, tile_count, visit_of
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
from kernels.sm90 import wgmma
from kernels.sm90.backward_tiles import is_tile, publish_end, take_ticket, words_of_tile
from kernels.sm90.bias_gradient_description import (
    GROUPS,
    TILE,
    columns_of_part,
    description,
)
from kernels.sm90.bias_gradient_rows import WarpRows
from kernels.sm90.bias_gradient_tiles import (
    SeenVisit,
    any_seen,
    next_seen,
    publish,
    publish_visit,
    published,
    published_visit,
)
from kernels.sm90.softmax import ROWS, fragment_index
from kernels.sm90.tiles import WARPGROUP

_PAIRS = TILE // 8  # of adjacent keys, of a thread's row
_NUMBERS = 2 * ROWS  # of a pair of keys


@dataclasses.dataclass(frozen=True)
class Products:
    """What a warpgroup multiplies: operands are views of the ring, results are registers."""

    product: wgmma.Wgmma
    rows: cute.Tensor
    keys: cute.Tensor
    scores: cute.Tensor
    gradients: cute.Tensor


@dataclasses.dataclass(frozen=True)
class OwnRows:
    """Of a thread's two rows: LSE in log2, delta, and the keys [low, high) that they see.

    whole: whether all rows of the tile see all of its keys.
    """

    lse_log2: list[Float32]
    delta: list[Float32]
    low: list[Int32]
    high: list[Int32]
    whole: Boolean


class BiasGradient(BiasGradientHost):
    """The kernel of one key; attributes are compile-time constants."""

    def __init__(self, key: KernelKey):
        self.dtype = tensors.TYPES[key.dtype]
        self.description = description(key.head_dim)
        self.columns = columns_of_part(key.head_dim)
        self.parts = key.head_dim // self.columns
        self.sums = self.description.named_barrier("sums")
        self.sums_store = SumsStore(TILE, self.dtype, key.pairwise_bias)

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
        load, mma = self.description.role("load"), self.description.role("mma")
        if warp_index == load.first_warp:
            resources.prefetch(maps, self.description)
            with cute.arch.elect_one():
                resources.initialise(self.description, shared.barriers)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        call = Call(TILE, buffers, sizes, shape, scalars, bias)
        if warp_index < mma.first_warp:
            cute.arch.setmaxregister_decrease(load.registers)
            if warp_index == load.first_warp:
                self.load_tiles(maps, shared, call)
        else:
            cute.arch.setmaxregister_increase(mma.registers)
            self.mma(shared, call)

    @cute.jit
    def load_tiles(self, maps: Maps, shared: Shared, call: Call):
        """Load warp: takes tile after tile, says what each is, and loads what it needs."""
        barriers, count = shared.barriers, tile_count(call)
        tiles_done, loaded = Int32(0), Int32(0)
        index = take_ticket(call.buffers.tile_ticket)
        while index < count:
            work = assign(call, index)
            of_tile = next_seen(call, work, Int32(0))
            use = barriers.work_full.use(tiles_done)
            barriers.work_empty.wait_free(use)
            with cute.arch.elect_one():
                publish(work, of_tile < work.visits(), words_of_tile(shared, tiles_done))
                cute.arch.mbarrier_arrive(barriers.work_full.at(use))
            index = take_ticket(call.buffers.tile_ticket)
            while of_tile < work.visits():
                following = next_seen(call, work, of_tile + 1)
                visit, is_last = visit_of(call, work, of_tile), following == work.visits()
                self.load(maps, shared, call, (visit, is_last), loaded)
                loaded += 2 * self.parts
                of_tile = following
            tiles_done += 1
        use = barriers.work_full.use(tiles_done)
        barriers.work_empty.wait_free(use)
        with cute.arch.elect_one():
            publish_end(words_of_tile(shared, tiles_done))
            cute.arch.mbarrier_arrive(barriers.work_full.at(use))

    @cute.jit
    def load(
        self, maps: Maps, shared: Shared, call: Call, of: tuple[Visit, Boolean], loaded: Int32
    ):
        """Load warp: loads the operands of a visit.

        of: the visit, and whether it is its tile's last; loaded: parts that were loaded before.
        """
        (visit, is_last), coordinates = of, tensors.bthd_coordinates()
        group, box = call.sizes.heads // call.sizes.kv_heads, (TILE, self.columns)
        rows = coordinates[None, None, visit.head, visit.batch]
        keys = coordinates[None, None, visit.head // group, visit.batch]
        rows = cute.local_tile(rows, box, (visit.first_row // TILE, None))
        # Tiles of a band begin at any key, also before the first; TMA fills with zeros.
        keys = cute.domain_offset((visit.first_key, 0), keys)
        keys = cute.local_tile(keys, box, (0, None))
        for product in cutlass.range_constexpr(2):
            of_rows, of_keys = ((maps.q, maps.k), (maps.do, maps.v))[product]
            for part in cutlass.range_constexpr(self.parts):
                use = shared.barriers.full.use(loaded + (product * self.parts + part))
                full = shared.barriers.full.at(use)
                shared.barriers.empty.wait_free(use)
                with cute.arch.elect_one():
                    if cutlass.const_expr(product + part == 0):
                        words = shared.visits[None, use.slot]
                        publish_visit(visit, call.sizes.heads, is_last, words)
                    num_bytes = 2 * TILE * self.columns * 2
                    cute.arch.mbarrier_arrive_and_expect_tx(full, num_bytes)
                slot = (None, None, use.slot)
                tensors.tma_load(of_rows, rows[None, None, part], shared.rows[slot], full)
                tensors.tma_load(of_keys, keys[None, None, part], shared.keys[slot], full)

    @cute.jit
    def mma(self, shared: Shared, call: Call):
        """MMA warpgroup: sums dS of its rows, tile after tile, and stores what the bias has."""
        thread, _, _ = cute.arch.thread_idx()
        thread = thread - WARPGROUP
        products = self.make_products(shared, cute.arch.make_warp_uniform(thread // WARPGROUP))
        total = cute.make_rmem_tensor_like(products.scores)
        own, work_full = WarpRows(shared.pairs, thread), shared.barriers.work_full
        tiles_done, read = Int32(0), Int32(0)
        work_full.wait(tiles_done)
        more = self.start(call, own, words_of_tile(shared, tiles_done))
        while more:
            words = words_of_tile(shared, tiles_done)
            if call.in_rows() == Boolean(False):
                visit = visit_of(call, published(words), Int32(0))
                self.keep_bias(shared, call, visit, thread, products.scores)
            total.fill(0.0)
            if any_seen(words):
                read = self.sum_visits(shared, call, (products, total), own, read)
            work_full.wait(tiles_done + 1)
            more = self.start(call, own, words_of_tile(shared, tiles_done + 1))
            self.store(shared, call, total, own, words)
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(shared.barriers.work_empty.at(tiles_done))
            tiles_done += 1

    @cute.jit
    def start(self, call: Call, own: WarpRows, words: cute.Tensor) -> Boolean:
        """Starts to copy a tile's bias, where its rows are pairs; returns whether it is a tile.

        Nobody would wait for the bias of a tile of which nothing is seen.
        """
        found = is_tile(words)
        if found & call.in_rows() & any_seen(words):
            own.start(call, published(words))
        return found

    @cute.jit
    def sum_visits(
        self,
        shared: Shared,
        call: Call,
        of_tile: tuple[Products, cute.Tensor],
        rows: WarpRows,
        read: Int32,
    ) -> Int32:
        """MMA warpgroup: adds dS of its rows of a tile's visits.

        of_tile: the products, and the sums; read: parts that were read before. Returns those that
        have been read then.
        """
        (products, total), scalars, more = of_tile, call.scalars, Boolean(True)
        while more:
            for part in cutlass.range_constexpr(self.parts):
                self.multiply(shared, products, products.scores, read, part)
            words = shared.visits[None, shared.barriers.full.use(read).slot]
            visit = published_visit(words, scalars.window)
            own = self.rows_of(call, visit, rows.thread)
            more = visit.is_last == Boolean(False)
            cute.arch.sync_warp()
            # The ring has a slot more than a product has parts: at d = 256 it could not hold two.
            for part in cutlass.range_constexpr(self.parts):
                self.multiply(shared, products, products.gradients, read + self.parts, part)
                warpgroup.wait_group(self.parts)
                self.release(shared, read + part)
            if call.in_rows():
                self.weigh_rows(rows, products.scores, scalars.scale_log2, own)
            else:
                self.weigh(shared, products.scores, scalars.scale_log2, own, rows.thread)
            warpgroup.wait_group(0)
            for part in cutlass.range_constexpr(self.parts):
                self.release(shared, read + (self.parts + part))
            self.add(total, products, own)
            read += 2 * self.parts
        return read

    def make_products(self, shared: Shared, group: Int32) -> Products:
        """Makes a warpgroup's products, views of shared memory and registers."""
        majors = (wgmma.K_MAJOR, wgmma.K_MAJOR)
        product = wgmma.Wgmma(self.dtype, (GROUPS, 1), TILE, majors)
        tiled = product.tiled()
        part = tiled.get_slice(cute.make_layout(GROUPS, stride=WARPGROUP)(group))
        block = tiled.partition_shape_C((TILE, TILE))
        return Products(
            product,
            tiled.make_fragment_A(part.partition_A(shared.rows)),
            tiled.make_fragment_B(part.partition_B(shared.keys)),
            cute.make_rmem_tensor(block, Float32),
            cute.make_rmem_tensor(block, Float32),
        )

    def multiply(
        self, shared: Shared, products: Products, acc: cute.Tensor, read: Int32, part: int
    ):
        """Issues a product of a part's columns; read: parts that were read before the first."""
        use = shared.barriers.full.use(read + part)
        shared.barriers.full.wait(use)
        now = (None, None, None, use.slot)
        products.product.issue(acc, products.rows[now], products.keys[now], part > 0)

    def release(self, shared: Shared, read: Int32):
        """Arrives, once per warp: this warp no longer reads the read-th part."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(shared.barriers.empty.at(read))

    def numbers(self, shared: Shared, pair: int, thread: Int32) -> cute.Tensor:
        """Views what a thread keeps of the bias for a pair of keys: two numbers of each row."""
        place = (pair * self.sums.threads + thread) * _NUMBERS
        pointer = (shared.sums.iterator + place).align(4 * _NUMBERS)
        return cute.make_tensor(pointer, cute.make_layout(_NUMBERS))

    @cute.jit
    def keep_bias(
        self, shared: Shared, call: Call, visit: Visit, thread: Int32, scores: cute.Tensor
    ):
        """Reads what scores get, which is the same in each visit; scores: registers that are free.

        Of a band it reads all columns: a batch element's offset decides which of them have keys.
        """
        row = visit.first_row + thread // 32 * 16 + thread % 32 // 4
        of = (visit.batch, visit.head, row, visit.first_key + thread % 4 * 2)
        bias = BlockBias(call.memory, *of, self.dtype, _PAIRS, pairwise=True, of_any_batch=True)
        scores.fill(0.0)
        words = bias.load_any()
        bias.add(scores, Float32(1.0), Addition(fragment_index, past_end=True), words)
        for pair in cutlass.range_constexpr(_PAIRS):
            numbers = cute.make_rmem_tensor((_NUMBERS,), Float32)
            for i in cutlass.range_constexpr(_NUMBERS):
                numbers[i] = scores[fragment_index(pair, i // 2, i % 2)] * LOG2_E
            cute.autovec_copy(numbers, self.numbers(shared, pair, thread))

    def rows_of(self, call: Call, visit: SeenVisit, thread: Int32) -> OwnRows:
        """Returns what a thread knows of its rows in a visit."""
        sizes, buffers, band = call.sizes, call.buffers, visit.band
        own = OwnRows([], [], [], [], self.sees_all(visit))
        of_head = Int64(visit.plane) * call.shape.padded_rows
        for half in range(ROWS):
            row = visit.first_row + thread // 32 * 16 + thread % 32 // 4 + 8 * half
            place = of_head + cutlass.min(row, sizes.query_length - 1)
            own.lse_log2.append(tensors.f32(buffers.lse_log2 + place, Int32(0)))
            own.delta.append(tensors.f32(buffers.delta + place, Int32(0)))
            first = visit.first_key + thread % 4 * 2
            low, high = (limit - first for limit in bands.row_limits(band, row, tensors.INT32))
            # Rows past the last have no statistics, and no key.
            own.low.append(low)
            own.high.append(Int32(cutlass.select_(row < band.query_length, high, low)))
        return own

    def sees_all(self, visit: SeenVisit) -> Boolean:
        """Whether all rows of a visit's tile see all of its keys."""
        keys = bands.visited_blocks(visit.band, visit.first_row, TILE, 1, tensors.INT32)
        inside = (visit.first_key >= keys.full_begin) & (visit.first_key + TILE <= keys.full_end)
        return inside & (visit.first_row + TILE <= visit.band.query_length)

    @cute.jit
    def weigh(
        self, shared: Shared, scores: cute.Tensor, scale_log2: Float32, own: OwnRows, thread: Int32
    ):
        """Replaces S by P."""
        for pair in cutlass.range_constexpr(_PAIRS):
            numbers = cute.make_rmem_tensor((_NUMBERS,), Float32)
            cute.autovec_copy(self.numbers(shared, pair, thread), numbers)
            for i in cutlass.range_constexpr(_NUMBERS):
                at = fragment_index(pair, i // 2, i % 2)
                added = numbers[i] - own.lse_log2[i // 2]
                scores[at] = exp2(scores[at] * scale_log2 + added)

    def weigh_rows(self, rows: WarpRows, scores: cute.Tensor, scale_log2: Float32, own: OwnRows):
        """Replaces S by P, of a bias in the warp's rows."""
        rows.await_copies()
        for pair in range(0, _PAIRS, 2):
            for i, word in enumerate(rows.load(pair)):
                for column, bias in enumerate(ptx.widen_pair(self.dtype, word)):
                    at = fragment_index(pair + i // 2, i % 2, column)
                    added = bias * LOG2_E - own.lse_log2[i % 2]
                    scores[at] = exp2(scores[at] * scale_log2 + added)

    @cute.jit
    def add(self, total: cute.Tensor, products: Products, own: OwnRows):
        """Adds dS of a visit to the sums; what a row does not see may be anything, also NaN."""
        if own.whole:
            for i in cutlass.range_constexpr(_PAIRS * _NUMBERS):
                at = fragment_index(i // _NUMBERS, i % _NUMBERS // 2, i % 2)
                row = i % _NUMBERS // 2
                ds = products.gradients[at] - own.delta[row]
                total[at] = products.scores[at] * ds + total[at]
        else:
            for i in cutlass.range_constexpr(_PAIRS * _NUMBERS):
                at = fragment_index(i // _NUMBERS, i % _NUMBERS // 2, i % 2)
                row, key = i % _NUMBERS // 2, i // _NUMBERS * 8 + i % 2
                ds = products.scores[at] * (products.gradients[at] - own.delta[row])
                seen = (key >= own.low[row]) & (key < own.high[row])
                total[at] = total[at] + select(seen, ds, Float32(0.0))

    @cute.jit
    def store(
        self, shared: Shared, call: Call, total: cute.Tensor, rows: WarpRows, words: cute.Tensor
    ):
        """Stores the sums of a tile; words: of the tile.

        Rows of pairs leave by their warps. Other sums are left in place of the bias, by all.
        """
        # The work is read again, so that no register holds what the visits do not need.
        if call.in_rows():
            own = Sums(shared.sums, call, published(words), rows.thread)
            rows.store(total, self.dtype, own)
        else:
            resources.meet(self.sums)
            first_row = rows.thread // 32 * 16 + rows.thread % 32 // 4
            first_key = rows.thread % 4 * 2
            for i in cutlass.range_constexpr(_PAIRS * _NUMBERS):
                pair, half, column = i // _NUMBERS, i % _NUMBERS // 2, i % 2
                place = (first_key + 8 * pair + column, first_row + 8 * half)
                shared.sums[place] = total[fragment_index(pair, half, column)]
            resources.meet(self.sums)
            self.sums_store.store(Sums(shared.sums, call, published(words), rows.thread))
            resources.meet(self.sums)


def source(key: KernelKey) -> KernelSource:
    """Returns the kernel of a key, with its launch."""
    return bias_gradient_source(BiasGradient(key), key)
