"""Hopper's gradient of a bias: sums of dS over whatever it broadcasts over.

What a CTA sums and visits, and the formulas, are in `kernels.common.bias_gradient_work`.

    load warp        loads, for each visit, the columns of Q with those of K, then those of dO with
                     those of V, part by part into a ring by TMA
    MMA warpgroup w  has 64 query rows and all keys. Per visit it
        issues S, both operands from shared memory, waits for it, and frees its parts,
        issues dP, computes P while the tensor core works, waits, and frees the parts of dP,
        adds P * (dP - delta) to its sums.

S, dP and the sums are 192 registers of a thread. The bias is the same in all visits, place by
place, so that each thread reads its own once and keeps it in shared memory, where the sums go at
the end. Two warpgroups fill each other's waits.
"""

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass.cute.nvgpu import warpgroup

from fa4_jax import bands
from fa4_jax.key import KernelKey
from kernels.common import resources, tensors
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
from kernels.sm90 import wgmma
from kernels.sm90.bias_gradient_description import (
    GROUPS,
    TILE,
    columns_of_part,
    description,
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
        self.pairwise = key.pairwise_bias
        self.description = description(key.head_dim)
        self.columns = columns_of_part(key.head_dim)
        self.parts = key.head_dim // self.columns
        self.sums = self.description.named_barrier("sums")
        self.sums_store = SumsStore(TILE, self.dtype, self.pairwise)

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
        work = assign(call)
        if warp_index < mma.first_warp:
            cute.arch.setmaxregister_decrease(load.registers)
            if warp_index == load.first_warp:
                self.load(maps, shared, call, work)
        else:
            cute.arch.setmaxregister_increase(mma.registers)
            self.mma(shared, call, work)

    @cute.jit
    def load(self, maps: Maps, shared: Shared, call: Call, work: Work):
        """Load warp: loads the operands of every visit in which anything is seen."""
        group, loaded = call.sizes.heads // call.sizes.kv_heads, Int32(0)
        coordinates, box = tensors.bthd_coordinates(), (TILE, self.columns)
        for index in cutlass.range(work.visits(), unroll=1):
            visit = visit_of(call, work, index)
            if visit.seen:
                rows = coordinates[None, None, visit.head, visit.batch]
                keys = coordinates[None, None, visit.head // group, visit.batch]
                rows = cute.local_tile(rows, box, (visit.first_row // TILE, None))
                # Tiles of a band begin at any key, also before the first; TMA fills with zeros.
                keys = cute.domain_offset((visit.first_key, 0), keys)
                keys = cute.local_tile(keys, box, (0, None))
                for of_rows, of_keys in ((maps.q, maps.k), (maps.do, maps.v)):
                    for part in range(self.parts):
                        use = shared.barriers.full.use(loaded)
                        full = shared.barriers.full.at(use)
                        shared.barriers.empty.wait_free(use)
                        with cute.arch.elect_one():
                            num_bytes = 2 * TILE * self.columns * 2
                            cute.arch.mbarrier_arrive_and_expect_tx(full, num_bytes)
                        slot = (None, None, use.slot)
                        tensors.tma_load(of_rows, rows[None, None, part], shared.rows[slot], full)
                        tensors.tma_load(of_keys, keys[None, None, part], shared.keys[slot], full)
                        loaded += 1

    @cute.jit
    def mma(self, shared: Shared, call: Call, work: Work):
        """MMA warpgroup: sums dS of its rows over all visits, then stores what the bias has."""
        thread, _, _ = cute.arch.thread_idx()
        thread = thread - WARPGROUP
        products = self.make_products(shared, cute.arch.make_warp_uniform(thread // WARPGROUP))
        self.keep_bias(shared, call, visit_of(call, work, Int32(0)), thread, products.scores)
        total = cute.make_rmem_tensor_like(products.scores)
        total.fill(0.0)
        read = Int32(0)
        for index in cutlass.range(work.visits(), unroll=1):
            visit = visit_of(call, work, index)
            if visit.seen:
                own = self.rows_of(call, visit, thread)
                self.multiply(shared, products, products.scores, read)
                warpgroup.wait_group(0)
                self.release(shared, read)
                self.multiply(shared, products, products.gradients, read + self.parts)
                self.weigh(shared, products.scores, call.scalars.scale_log2, own, thread)
                warpgroup.wait_group(0)
                self.release(shared, read + self.parts)
                self.add(total, products, own)
                read += 2 * self.parts
        self.store(shared, call, total, thread)

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

    def multiply(self, shared: Shared, products: Products, acc: cute.Tensor, read: Int32):
        """Issues a product of all columns, part by part; read: parts that were read before."""
        for part in range(self.parts):
            use = shared.barriers.full.use(read + part)
            shared.barriers.full.wait(use)
            now = (None, None, None, use.slot)
            products.product.issue(acc, products.rows[now], products.keys[now], part > 0)

    def release(self, shared: Shared, read: Int32):
        """Arrives, once per warp: this warp no longer reads a product's parts."""
        with cute.arch.elect_one():
            for part in range(self.parts):
                cute.arch.mbarrier_arrive(shared.barriers.empty.at(read + part))

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
        bias = BlockBias(call.memory, *of, self.dtype, _PAIRS, self.pairwise, of_any_batch=True)
        scores.fill(0.0)
        words = bias.load_any() if self.pairwise else None
        bias.add(scores, Float32(1.0), Addition(fragment_index, past_end=True), words)
        for pair in cutlass.range_constexpr(_PAIRS):
            numbers = cute.make_rmem_tensor((_NUMBERS,), Float32)
            for i in cutlass.range_constexpr(_NUMBERS):
                numbers[i] = scores[fragment_index(pair, i // 2, i % 2)] * LOG2_E
            cute.autovec_copy(numbers, self.numbers(shared, pair, thread))

    def rows_of(self, call: Call, visit: Visit, thread: Int32) -> OwnRows:
        """Returns what a thread knows of its rows in a visit."""
        sizes, buffers, band = call.sizes, call.buffers, visit.band
        own = OwnRows([], [], [], [], self.sees_all(visit))
        of_head = (Int64(visit.batch) * sizes.heads + visit.head) * call.shape.padded_rows
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

    def sees_all(self, visit: Visit) -> Boolean:
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
    def store(self, shared: Shared, call: Call, total: cute.Tensor, thread: Int32):
        """Leaves the sums in shared memory in place of the bias, and stores them."""
        resources.meet(self.sums)
        first_row, first_key = thread // 32 * 16 + thread % 32 // 4, thread % 4 * 2
        for i in cutlass.range_constexpr(_PAIRS * _NUMBERS):
            pair, half, column = i // _NUMBERS, i % _NUMBERS // 2, i % 2
            place = (first_key + 8 * pair + column, first_row + 8 * half)
            shared.sums[place] = total[fragment_index(pair, half, column)]
        resources.meet(self.sums)
        # The work is found out again, so that no register holds what the sums do not need.
        self.sums_store.store(Sums(shared.sums, call, assign(call), thread))


def source(key: KernelKey) -> KernelSource:
    """Returns the kernel of a key, with its launch."""
    return bias_gradient_source(BiasGradient(key), key)
