"""Split forward, for few query rows: O and LSE of a part of the keys, on all GPUs.

A CTA has packed rows of one KV head, (token, head of the group): row r is token r // group. Its K
and V blocks are every `splits`-th of a sequence, so that parts are equally long whatever the
lengths are, and which part a block is in depends on shapes alone.

    load warp  loads K_n and V_n of its blocks by TMA into a ring
    MMA warps  have 16 rows each, and of the blocks each some 32 keys (Note [warps]); S, P, O are in
               registers; per 32 keys a warp computes
        S  = Q K^T      mma.sync, K by ldmatrix
        S  = tanh(S * before_cap)   where scores are capped; then tags are compared
        P  = exp2(S * scale_log2 - maximum * scale_log2)
        O += P V        mma.sync, V by ldmatrix
    then the warps of the same rows join what they have, through shared memory, and store O / sum
    and log2(sum) + maximum, fp32, of this part of the keys; or O and LSE, if it is all of them.

The time is that of loading K and V once. All rows of a group share a load, and a multiprocessor has
192 KiB on their way. Where calls are short, what comes before and after counts: every warp issues
its loads from global memory at once, queries and extents first, before K and V of all CTAs delay
them by microseconds; and code that runs once is short, since it has to be fetched.

Note [warps]: 16 rows have four warps, each for a quarter of the keys; 32 rows have two warps for
either 16, and a warp half of the keys; else a warp has its own 16 rows and all keys (on Hopper by
products of the warpgroup: `kernels.sm90.forward_split`). So each warp has row tile
`warp % row_tiles` and, of every `key_groups` steps of a step's keys, one.

Rows that see no key of a part leave its output unwritten and its LSE -inf.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from fa4_jax.key import PAGE_KEYS, SPLIT_CTAS, SPLIT_KEYS, KernelKey
from kernels.common import matrix_rows, ptx, resources, tensors
from kernels.common.resources import Maps, Shared
from kernels.common.ring import Use
from kernels.common.schedule import batch_band
from kernels.common.softmax import exp2, finite_reference, fmax, rescale_factor, select
from kernels.common.split_data import (
    NO_RANGES,
    Addresses,
    Call,
    Place,
    Rows,
    Scales,
    Work,
    assign,
    find_place,
    make_scales,
    row_limits,
)
from kernels.common.split_description import (
    MMA_WARPS,
    SPLIT_TILES,
    WARP_ROWS,
    split,
)
from kernels.common.split_hosts import SplitHost, split_source
from kernels.common.split_scores import HALVES, TILE_KEYS, cap, compare_tags
from kernels.common.split_stores import Stores
from kernels.interface import (
    HeadDims,
    PageBuffers,
    Sizes,
    SplitBuffers,
    SplitRanges,
    SplitScalars,
    SplitShape,
)
from kernels.kernel_source import KernelSource

_DEPTH = 16  # of one mma.sync


def count_row_tiles(place: Place) -> Int32:
    """Returns how many of the MMA warps have rows of their own: 1, 2 or 4; see Note [warps]."""
    tiles = (place.rows + WARP_ROWS - 1) // WARP_ROWS
    return Int32(cutlass.select_(tiles > 2, Int32(4), tiles))


def first_row_of_thread(place: Place, row_tiles: Int32) -> Int32:
    """Returns the first packed row of a thread; it has another one 8 rows later."""
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(thread // 32)
    row_tile = warp - warp // row_tiles * row_tiles
    return place.first_row + row_tile * WARP_ROWS + (thread % 32) // 4


class ForwardSplit(Stores, SplitHost):
    """The kernel of one key; attributes are compile-time constants."""

    def __init__(self, key: KernelKey):
        self.dtype = tensors.TYPES[key.dtype]
        self.head_dim = key.head_dim
        self.paged = key.paged
        self.description = split(key.arch, key.head_dim, key.paged)
        self.tile = SPLIT_TILES[key.arch, key.head_dim]
        self.ctas = SPLIT_CTAS[key.head_dim]
        self.unrolls_steps = self.tile.unrolls_paged_steps and key.paged
        self.start_barrier = self.description.named_barrier("start")
        self.parts_barrier = self.description.named_barrier("parts")
        self.span_bytes = self.description.maps[0].span_bytes
        self.block_bytes = SPLIT_KEYS * key.head_dim * 2

    @cute.kernel
    def kernel(
        self,
        maps: Maps,
        buffers: SplitBuffers,
        sizes: Sizes,
        dims: HeadDims,
        parts: SplitShape,
        scalars: SplitScalars,
        of_keys: PageBuffers | SplitRanges,
    ):
        ranges = NO_RANGES if cutlass.const_expr(self.paged) else of_keys
        call = Call(buffers, sizes, dims, parts, scalars, ranges)
        place = find_place(call)
        band = batch_band(buffers.extents, place.batch, scalars.window)
        shared = resources.allocate(self.description, self.dtype)
        query = self.make_query(shared)
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        load = self.description.role("load")
        if warp_index == load.first_warp:
            resources.prefetch(maps, self.description)
            with cute.arch.elect_one():
                resources.initialise(self.description, shared.barriers)
                place.write(shared.place)
        else:
            self.load_query(query, place, call)
        cute.arch.mbarrier_init_fence()
        work = assign(call, place, band, shared.place)
        if warp_index == load.first_warp:
            cute.arch.sync_warp()
            resources.arrive(self.start_barrier)
            if cutlass.const_expr(not self.paged):
                self.load(maps, shared, work, place, parts.splits)
            elif sizes.key_length % SPLIT_KEYS == 0:
                self.load_pages(maps, shared, work, place, call, of_keys, SPLIT_KEYS)
            else:
                self.load_pages(maps, shared, work, place, call, of_keys, PAGE_KEYS)
        else:
            resources.meet(self.start_barrier)
            self.mma(shared, query, work, place, call)

    @cute.jit
    def load(self, maps: Maps, shared: Shared, work: Work, place: Place, splits: Int32):
        """Load warp: loads K and V of this CTA's blocks."""
        kv = tensors.bthd_coordinates()[None, None, place.kv_head, place.batch]
        tiles = cute.local_tile(kv, (SPLIT_KEYS, self.head_dim), (None, 0))
        for i in cutlass.range(work.count, unroll=1):
            use = shared.barriers.kv_full.use(i)
            full = shared.barriers.kv_full.at(use)
            shared.barriers.kv_empty.wait_free(use)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, 2 * self.block_bytes)
            block = tiles[None, None, work.first_block + i * splits]
            tensors.tma_load(maps.k, block, shared.k[None, None, use.slot], full)
            tensors.tma_load(maps.v, block, shared.v[None, None, use.slot], full)

    @cute.jit
    def load_pages(
        self,
        maps: Maps,
        shared: Shared,
        work: Work,
        place: Place,
        call: Call,
        pages: PageBuffers,
        rows: cutlass.Constexpr[int],
    ):
        """Load warp: loads K and V of this CTA's blocks from pages, `rows` keys at a time.

        A lane reads the place of a copy in the table, a block ahead. Past the length the last page
        is loaded again, and page numbers past the last count as the last one, or below 0 as 0.
        """
        splits, page_length = call.parts.splits, call.sizes.key_length
        lane = cute.arch.lane_idx()
        copies = SPLIT_KEYS // rows
        last = (work.band.key_length - 1) // page_length
        last = cutlass.min(last, pages.table_width - 1)
        entries = cute.make_tensor(
            pages.page_table + Int64(place.batch) * pages.table_width,
            cute.make_layout(pages.table_width),
        )
        own = work.first_block * SPLIT_KEYS + lane % copies * rows
        number = Int32(0)
        if work.count > 0:
            number = entries[cutlass.min(own // page_length, last)]
        for i in cutlass.range(work.count, unroll=1):
            number = cutlass.max(cutlass.min(number, pages.pages - 1), 0)
            row = own % page_length
            use = shared.barriers.kv_full.use(i)
            full = shared.barriers.kv_full.at(use)
            shared.barriers.kv_empty.wait_free(use)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, 2 * self.block_bytes)
            for copy in cutlass.range_constexpr(copies):
                page = cute.arch.make_warp_uniform(cute.arch.shuffle_sync(number, copy))
                first = cute.arch.make_warp_uniform(cute.arch.shuffle_sync(row, copy))
                source = tensors.bthd_coordinates()[None, None, place.kv_head, page]
                source = cute.domain_offset((first, 0), source)
                self.load_rows(maps, source, shared, use.slot, copy, rows, full)
            own += splits * SPLIT_KEYS
            if i + 1 < work.count:
                number = entries[cutlass.min(own // page_length, last)]

    @cute.jit
    def load_rows(
        self,
        maps: Maps,
        source: cute.Tensor,
        shared: Shared,
        slot: Int32,
        copy: cutlass.Constexpr[int],
        rows: cutlass.Constexpr[int],
        full: cute.Pointer,
    ):
        """Loads the copy-th `rows` keys of a block, all columns at once or a span at a time."""
        whole = rows == SPLIT_KEYS
        loads = (maps.k, maps.v) if cutlass.const_expr(whole) else (maps.k_short, maps.v_short)
        columns = self.head_dim if cutlass.const_expr(whole) else self.span_bytes // 2
        box = (rows, columns)
        for operand in cutlass.range_constexpr(2):
            target = (shared.k, shared.v)[operand][None, None, slot]
            for column in cutlass.range_constexpr(self.head_dim // columns):
                tensors.tma_load(
                    loads[operand],
                    cute.local_tile(source, box, (0, column)),
                    cute.local_tile(target, box, (copy, column)),
                    full,
                )

    @cute.jit
    def mma(self, shared: Shared, query: cute.Tensor, work: Work, place: Place, call: Call):
        """MMA warp: computes its rows' share of this part, joins it with others', stores it."""
        row_tiles = count_row_tiles(place)
        scales = make_scales(call.scalars)
        rows = self.make_rows(query, work, place, call, row_tiles)
        self.visit_blocks(shared, work, call, rows, scales)
        # The kernel that joins is launched meanwhile, and waits until this one is over.
        cute.arch.griddepcontrol_launch_dependents()
        self.finish(shared, rows, work, call, row_tiles, scales.scale_log2)

    @cute.jit
    def visit_blocks(self, shared: Shared, work: Work, call: Call, rows: Rows, scales: Scales):
        """Adds this part's keys to a warp's output."""
        self.visit_by_warps(shared, work, call, rows, scales)

    @cute.jit
    def visit_by_warps(self, shared: Shared, work: Work, call: Call, rows: Rows, scales: Scales):
        """Does so by mma.sync, each warp for itself."""
        addresses = self.make_addresses(shared)
        steps = SPLIT_KEYS // self.tile.step_keys
        for i in cutlass.range(work.count, unroll=1):
            use = shared.barriers.kv_full.use(i)
            shared.barriers.kv_full.wait(use)
            first_key = (work.first_block + i * call.parts.splits) * SPLIT_KEYS
            for step in cutlass.range(steps, unroll=1, unroll_full=self.unrolls_steps):
                if ((steps * i + step) & (rows.key_groups - 1)) == rows.key_group:
                    first = step * self.tile.step_keys
                    offset = use.slot * self.block_bytes + first * self.span_bytes
                    own = Addresses(addresses.k + offset, addresses.v + offset)
                    self.step(rows, own, first_key + first, work, call, scales)
            self.release(shared, use)

    def release(self, shared: Shared, use: Use):
        """Says, by one lane for its warp, that a block has been read."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(shared.barriers.kv_empty.at(use))

    def make_query(self, shared: Shared) -> cute.Tensor:
        """Makes this thread's queries: registers, or its own in shared memory; see `Rows`."""
        if self.tile.query_in_shared:
            thread, _, _ = cute.arch.thread_idx()
            own = cutlass.min(thread, MMA_WARPS * 32 - 1)  # The load warp has none.
            return shared.query[None, own, None]
        return cute.make_rmem_tensor((4, self.head_dim // _DEPTH), Int32)

    @cute.jit
    def load_query(self, query: cute.Tensor, place: Place, call: Call):
        """Loads the queries of a warp's rows from global memory; rows past the last are 0.

        All loads are on their way before anything else is: K and V of all CTAs delay later ones by
        microseconds.
        """
        sizes, dims = call.sizes, call.dims
        thread, _, _ = cute.arch.thread_idx()
        lane = thread % 32
        first = first_row_of_thread(place, count_row_tiles(place))
        for half in cutlass.range_constexpr(HALVES):
            row = first + 8 * half
            is_row = row < place.first_row + place.rows
            row = cutlass.min(row, place.first_row + place.rows - 1)
            token = row // place.group
            vector = Int64(place.batch) * sizes.query_length + token
            vector = vector * sizes.heads + place.head(row, token)
            source = cute.recast_ptr(call.buffers.q + vector * dims.head_dim, dtype=Float32)
            words = cutlass.select_(is_row, dims.head_dim // 2 - lane % 4, Int32(0))
            for part in cutlass.range_constexpr(2 * (self.head_dim // _DEPTH)):
                pair = ptx.load_below(source + lane % 4, 4 * part, Int32(words))
                query[half + 2 * (part % 2), part // 2] = pair.bitcast(Int32)

    @cute.jit
    def make_rows(
        self, query: cute.Tensor, work: Work, place: Place, call: Call, row_tiles: Int32
    ) -> Rows:
        """Finds what the rows of a warp see; they have no keys yet."""
        thread, _, _ = cute.arch.thread_idx()
        rows = Rows(
            query=query,
            low=cute.make_rmem_tensor((HALVES,), Int32),
            high=cute.make_rmem_tensor((HALVES,), Int32),
            maximum=cute.make_rmem_tensor((HALVES,), Float32),
            row_sum=cute.make_rmem_tensor((HALVES,), Float32),
            acc=cute.make_rmem_tensor((4, self.head_dim // TILE_KEYS), Float32),
            key_group=cute.arch.make_warp_uniform(thread // 32) // row_tiles,
            key_groups=MMA_WARPS // row_tiles,
        )
        rows.maximum.fill(-Float32.inf)
        rows.row_sum.fill(0.0)
        rows.acc.fill(0.0)
        first = first_row_of_thread(place, row_tiles)
        for half in cutlass.range_constexpr(HALVES):
            row = first + 8 * half
            is_row = row < place.first_row + place.rows
            token = cutlass.min(row, place.first_row + place.rows - 1) // place.group
            low, high = row_limits(work, call, place.batch, token)
            sees = is_row & (token < work.band.query_length)
            rows.low[half] = low
            rows.high[half] = Int32(cutlass.select_(sees, high, low))
        return rows

    def make_addresses(self, shared: Shared) -> Addresses:
        """Returns where this lane's rows of matrices lie: ldmatrix of 16 keys and 16 columns."""
        return Addresses(*matrix_rows.lane_addresses((shared.k,), (shared.v,), self.span_bytes))

    def place(self, key: int, column: int) -> tuple[int, int]:
        """Returns of 16 keys and 16 columns what changes bits of their address, and the offset."""
        return matrix_rows.place(key, column, self.span_bytes)

    @cute.jit
    def step(
        self,
        rows: Rows,
        addresses: Addresses,
        first_key: Int32,
        work: Work,
        call: Call,
        scales: Scales,
    ):
        """Adds a step's keys, whose addresses these are, to a warp's output."""
        scores = self.scores(rows, addresses.k)
        own_key = self.exponentiate(rows, scores, first_key, work, call, scales)
        present = self.present(own_key, work.band.key_length)
        self.multiply_values(rows, scores, addresses.v, present)

    @cute.jit
    def exponentiate(
        self,
        rows: Rows,
        scores: cute.Tensor,
        first_key: Int32,
        work: Work,
        call: Call,
        scales: Scales,
    ) -> Int32:
        """Replaces a step's products by P; returns the thread's first key.

        first_key: of the step.
        """
        own_key = first_key + (cute.arch.lane_idx() % 4) * 2
        cap(scores, scales.before_cap)
        if cutlass.const_expr(call.ranges is not None):
            compare_tags(scores, rows, work, call, own_key)
        self.softmax(rows, scores, own_key, scales.scale_log2)
        return own_key

    def scores(self, rows: Rows, k: Int32) -> cute.Tensor:
        """Returns S of a step's keys: for each 8 of them four values."""
        tiles = [[Float32(0.0)] * 4 for _ in range(self.tile.step_keys // TILE_KEYS)]
        for depth in range(self.head_dim // _DEPTH):
            a = cute.make_rmem_tensor((4,), Int32)
            cute.autovec_copy(rows.query[None, depth], a)
            for pair in range(self.tile.step_keys // 16):
                bits, offset = self.place(16 * pair, depth * _DEPTH)
                b = ptx.load_matrices(k ^ bits, offset)
                for i in range(2):
                    tile, own = 2 * pair + i, b[2 * i : 2 * i + 2]
                    tiles[tile] = ptx.multiply_m16n8k16(
                        self.dtype, tiles[tile], [a[j] for j in range(4)], own
                    )
        scores = cute.make_rmem_tensor((4, len(tiles)), Float32)
        for i, tile in enumerate(tiles):
            for j, score in enumerate(tile):
                scores[j, i] = score
        return scores

    def softmax(self, rows: Rows, scores: cute.Tensor, own_key: Int32, scale_log2: Float32):
        """Replaces scores by P, and moves sum and output of the rows to the new maximum."""
        for half in range(HALVES):
            first, last = rows.low[half] - own_key, rows.high[half] - own_key
            old = rows.maximum[half]
            maximum = old
            tiles = cute.size(scores, mode=[1])
            places = [(tile, column) for tile in range(tiles) for column in range(2)]
            for tile, column in places:
                key, i = TILE_KEYS * tile + column, 2 * half + column
                inside = (key >= first) & (key < last)
                scores[i, tile] = select(inside, scores[i, tile], -Float32.inf)
                maximum = fmax(maximum, scores[i, tile])
            maximum = fmax(maximum, cute.arch.shuffle_sync_bfly(maximum, offset=1))
            maximum = fmax(maximum, cute.arch.shuffle_sync_bfly(maximum, offset=2))
            factor = rescale_factor(old, maximum, scale_log2)
            shift = finite_reference(maximum) * scale_log2
            total = Float32(0.0)
            for tile, column in places:
                i = 2 * half + column
                scores[i, tile] = exp2(scores[i, tile] * scale_log2 - shift)
                total = total + scores[i, tile]
            rows.maximum[half] = maximum
            rows.row_sum[half] = rows.row_sum[half] * factor + total
            for tile in range(self.head_dim // TILE_KEYS):
                for column in range(2):
                    place = (2 * half + column, tile)
                    rows.acc[place] = rows.acc[place] * factor

    def present(self, own_key: Int32, key_length: Int32) -> list[Int32]:
        """Returns masks of the values that are there: two keys of each 8, as ldmatrix loads them.

        Values past the length may be anything, and 0 * NaN is NaN.
        """
        masks = []
        for tile in range(self.tile.step_keys // TILE_KEYS):
            left = key_length - own_key - TILE_KEYS * tile
            one = cutlass.select_(left == 1, Int32(0xFFFF), Int32(-1))
            masks.append(Int32(cutlass.select_(left > 0, one, Int32(0))))
        return masks

    def multiply_values(
        self,
        rows: Rows,
        scores: cute.Tensor,
        v: Int32,
        present: list[Int32],
    ):
        """Adds P V of a step's keys to the output."""
        for pair in range(self.tile.step_keys // _DEPTH):
            places = [(i, 2 * pair + tile) for tile in range(2) for i in (0, 2)]
            a = [ptx.round_pair(self.dtype, scores[i, j], scores[i + 1, j]) for i, j in places]
            for column in range(0, self.head_dim, _DEPTH):
                bits, offset = self.place(16 * pair, column)
                b = ptx.load_matrices(v ^ bits, offset, transposed=True)
                b = [value & present[2 * pair + i % 2] for i, value in enumerate(b)]
                for i in range(2):
                    tile = column // TILE_KEYS + i
                    before = [rows.acc[j, tile] for j in range(4)]
                    own = b[2 * i : 2 * i + 2]
                    after = ptx.multiply_m16n8k16(self.dtype, before, a, own)
                    for j in range(4):
                        rows.acc[j, tile] = after[j]


def source(key: KernelKey) -> KernelSource:
    """Returns the split forward of a key, with its launch."""
    return split_source(ForwardSplit(key), key)
