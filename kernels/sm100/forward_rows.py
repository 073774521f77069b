"""Roles of the Blackwell forward that work row by row: softmax and correction warps."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from fa4_jax import bands
from kernels.common import ptx as common_ptx
from kernels.common import resources, row_ranges, tensors
from kernels.common.bias import RowBias
from kernels.common.pair_masks import is_given
from kernels.common.resources import Shared
from kernels.common.ring import Use
from kernels.common.softmax import (
    LN_2,
    LOG2_E,
    finite_reference,
    fmax,
    rescale_factor,
    select,
    with_sink,
)
from kernels.common.state import (
    Limits,
    Progress,
    Scales,
    make_biased_scales,
    make_optional_scales,
    make_scales,
    sink_of,
    soft_cap_of,
)
from kernels.interface import ForwardScalars
from kernels.sm100 import products, ptx, softmax
from kernels.sm100.forward_data import Config, pop_work
from kernels.sm100.forward_description import UNIT
from kernels.sm100.forward_row_data import Block, Call, Keys, Output, Row, RowState
from kernels.sm100.forward_schedule import Work
from kernels.sm100.forward_visits import hidden_of, published
from kernels.sm100.tiles import SPECULATIVE_KEYS

CHUNK = 32  # columns of tensor memory that a thread loads at a time
PIECE = 8  # keys whose exponentials are computed at a time
NO_OUTPUT = -1.0  # as an inverse sum: the row saw no key or does not exist


TAGS = "tags"
"""Blocks in which rows compare tags."""


@cute.jit
def add_bias(
    scores: cute.Tensor, before_bias: Float32, bias: RowBias, past_end: cutlass.Constexpr[bool]
):
    """Replaces products of one row by scores: times before_bias, plus the bias if there is any.

    The compiler loads nothing before the branch: registers would not suffice.

    past_end: whether there may be keys past the last among them.
    """
    if cute.arch.vote_any_sync(bias.meets(cute.size(scores))):
        for i in cutlass.range_constexpr(cute.size(scores)):
            if cutlass.const_expr(past_end):
                added = common_ptx.load_below(bias.first, i, bias.count)
            else:
                added = tensors.f32(bias.first, i)
            scores[i] = scores[i] * before_bias + added
    else:
        for i in cutlass.range_constexpr(cute.size(scores)):
            scores[i] = scores[i] * before_bias


class RowRoles:
    """The softmax and the correction role; a thread has one row of one query tile."""

    def __init__(self, config: Config):
        self.config = config
        self.rescale_barriers = config.description.named_barrier("rescale")

    @cute.jit
    def softmax(
        self,
        shared: Shared,
        rounds: Int32,
        lse: cute.Pointer,
        scalars: ForwardScalars,
        call: Call,
    ):
        """Softmax warps: compute the probabilities of all blocks of all tiles, and the LSE."""
        scales = make_scales(scalars)
        if cutlass.const_expr(self.config.bias):
            scales = make_biased_scales(scalars)
        if cutlass.const_expr(self.config.ranges):
            scales = make_optional_scales(scalars, soft_cap_of(call.logits))
        thread, _, _ = cute.arch.thread_idx()
        done = Progress(Int32(0), Int32(0))
        for round_index in cutlass.range(rounds, unroll=1):
            work = pop_work(
                self.config, shared, round_index, scalars.window if self.config.band else None
            )
            count = work.blocks.end - work.blocks.begin
            query, head = work.unit(thread // UNIT)
            sizes = call.sizes
            row_lse = cute.make_tensor(
                lse + (cutlass.Int64(work.batch) * sizes.heads + head) * sizes.query_length,
                cute.make_layout(sizes.query_length),
            )
            row = Row(query + thread % UNIT, head, row_lse)
            self.softmax_tile(shared, work, row, scales, done, call)
            if count > 0:
                done = done.after(count)

    def keys_of_row(self, work: Work, of: Row, call: Call) -> Keys:
        """Returns which keys a row may see: by the band and, if there are any, by its ranges."""
        row = of.query
        low, high = bands.row_limits(work.band, row, tensors.INT32)
        if call.bias is not None:
            bias = call.bias.of_head(work.batch, of.head).of_row(row)
            return Keys(Limits(low, high), bias=bias)
        if call.ranges is None:
            return Keys(Limits(low, high))
        own = row_ranges.arrays(call.ranges, call.sizes, work.batch)
        least, most = row_ranges.row_limits(own, row)
        limits = Limits(cutlass.max(low, least), cutlass.min(high, most))
        maximum = cute.make_rmem_tensor((1,), Float32)
        maximum[0] = -Float32.inf
        tags = row_ranges.TagsInMemory(call.ranges, call.sizes, work.batch, row)
        hidden = hidden_of(work, call.ranges, call.sizes, row, of.head)
        return Keys(limits, tags, maximum, hidden)

    @cute.jit
    def softmax_tile(
        self,
        shared: Shared,
        work: Work,
        row: Row,
        scales: Scales,
        done: Progress,
        call: Call,
    ):
        """Computes one row of one query tile, from scores to inverse sum and LSE."""
        thread, _, _ = cute.arch.thread_idx()
        t = cute.arch.make_warp_uniform(thread // self.config.tile.rows)
        lane_row = thread % self.config.tile.rows
        keys = self.keys_of_row(work, row, call)
        state = RowState(-Float32.inf, Float32(0.0), Float32(0.0))
        begin, end = work.blocks.begin, work.blocks.end
        if end > begin:
            # Blocks masked on the right edge come first, then unmasked ones, then those masked on
            # the left.
            right = cutlass.max(cutlass.min(work.blocks.full_end, end), begin)
            left = cutlass.max(cutlass.min(work.blocks.full_begin, right), begin)
            phases = ((end, right, True), (right, left, False), (left, begin, True))
            if cutlass.const_expr(not self.config.band):
                phases = ((end, right, True), (right, begin, False))
            if cutlass.const_expr(self.config.ranges):
                # Where tags are compared no block is without a mask, so right and left are begin.
                tagged = Int32(cutlass.select_(work.compares != 0, begin, end))
                # Under a mask of pairs the visits from `right` on are those that need it.
                tagged = cutlass.select_(is_given(call.ranges), right, tagged)
                phases = ((end, tagged, TAGS), (tagged, right, True), *phases[1:])
            for phase in cutlass.range_constexpr(len(phases)):
                above, down_to, masked = phases[phase]
                for block in cutlass.range(above - 1, down_to - 1, -1, unroll=1):
                    ordinal = done.blocks + end - 1 - block
                    place = Block(t, lane_row, block, ordinal, block == end - 1)
                    state = self.softmax_block(shared, place, state, scales, keys, masked)
        below = row.query < work.band.query_length
        valid = below & (state.row_sum != 0.0)
        log2_sum = cute.math.log2(state.row_sum, fastmath=True)
        logarithm = (state.reference * scales.scale_log2 + log2_sum) * LN_2
        inverse = Float32(0.0)
        if cutlass.const_expr(self.config.ranges):
            some = select(valid, state.row_sum, Float32(0.0))
            top = select(valid, state.reference * scales.scale_log2, -Float32.inf)
            sink = sink_of(call.logits, row.head) * LOG2_E
            inverse, logarithm = with_sink(top, some, sink)
            largest = select(valid, keys.maximum[0] * scales.scale_log2 * LN_2, -Float32.inf)
            self.raise_maximum(call, work.batch, row.head, largest)
        if row.query < cute.size(row.lse):
            sees = below if cutlass.const_expr(self.config.ranges) else valid
            row.lse[row.query] = select(sees, logarithm, -Float32.inf)
        if end > begin:
            shared.barriers.sums_empty[t].wait_free(done.tiles)
            if cutlass.const_expr(not self.config.ranges):
                inverse = 1.0 / state.row_sum
            shared.inverse_sums[lane_row, t] = select(valid, inverse, Float32(NO_OUTPUT))
            products.arrive(shared.barriers.sums_full[t].first)

    @cute.jit
    def raise_maximum(self, call: Call, batch: Int32, head: Int32, largest: Float32):
        """Raises a head's largest score, if it is wanted, by those of a unit's rows."""
        if call.logits.max_heads > 0:
            for step in cutlass.range_constexpr(3):  # A unit has eight rows of one head.
                other = cute.arch.shuffle_sync_bfly(largest, offset=1 << step)
                largest = fmax(largest, other)
            thread, _, _ = cute.arch.thread_idx()
            if thread % UNIT == 0:
                place = cutlass.Int64(batch) * call.sizes.heads + head
                common_ptx.reduce_max(call.logits.max_logit + place, largest)

    @cute.jit
    def softmax_block(
        self,
        shared: Shared,
        block: Block,
        state: RowState,
        scales: Scales,
        keys: Keys,
        masked: cutlass.Constexpr[bool | str],
    ) -> RowState:
        """Computes P of one block from its S; returns the row's new state.

        masked: whether keys are hidden by the row's limits; TAGS if by its tags, too.
        """
        shift, scale_log2 = state.shift, scales.scale_log2
        n, s, p = self.config.tile.n, self.config.columns("s"), self.config.columns("p")
        use = self.config.block(block.query_tile, block.ordinal)
        buffer = use.slot
        scores_at = products.lane_base() + s.first + buffer * s.step
        probabilities_at = scores_at + (p.first - s.first)
        matches = []
        if cutlass.const_expr(masked == TAGS):
            matches = self.matches(shared, block, use, keys)
        shared.barriers.s_full.wait(use)
        ptx.fence_after_sync()
        scores = self.scores(scores_at, n, block, keys, scales, bool(masked))
        if cutlass.const_expr(masked):
            scores = self.mask(scores, block.index * n, keys, matches)
        # Most blocks leave the reference where it is, so their first exponentials need not wait for
        # the maximum.
        values = self.first_exponentials(scores, shift, scale_log2)
        new, largest = softmax.new_reference(scores, state.reference, scales.lag_limit)
        if cutlass.const_expr(self.config.ranges):
            keys.maximum[0] = fmax(keys.maximum[0], largest)
        if cute.arch.vote_any_sync(new != state.reference):
            shift = finite_reference(new) * -scale_log2
            # The scores are loaded again, so that they do not stay in registers for a rare case.
            first = self.scores(scores_at, SPECULATIVE_KEYS, block, keys, scales, bool(masked))
            if cutlass.const_expr(masked):
                first = self.mask(first, block.index * n, keys, matches)
            values = self.first_exponentials(first, shift, scale_log2)
        factor = rescale_factor(state.reference, new, scale_log2)
        shared.factors[block.lane_row, buffer] = factor
        sums = softmax.accumulate([], values[: SPECULATIVE_KEYS - PIECE])
        exponents = softmax.exponents(
            scores[SPECULATIVE_KEYS : SPECULATIVE_KEYS + PIECE], shift, scale_log2
        )
        p_splits = self.config.tile.p_splits
        for start in cutlass.range_constexpr(SPECULATIVE_KEYS, n, PIECE):
            # The exponents of the next piece are ready before this piece is stored or released, and
            # sums are of pieces that the special-function unit has finished.
            current, following = exponents, scores[start + PIECE : start + 2 * PIECE]
            exponents = softmax.exponents(following, shift, scale_log2)
            values += softmax.exponentials(current, self.polynomial_pairs(start), start // 2)
            sums = softmax.accumulate(sums, values[start - PIECE : start])
            if cutlass.const_expr(start == SPECULATIVE_KEYS):
                number = self.rescale_barriers.first + self.rescale_index(buffer)
                ptx.arrive_unless(block.is_first, number, self.rescale_barriers.threads)
            if cutlass.const_expr(start % CHUNK == 0):
                self.store_chunk(probabilities_at, values, start - CHUNK)
            if cutlass.const_expr(start - PIECE in p_splits):
                part = p_splits.index(start - PIECE)
                self.release(self.config.part_full(shared.barriers, part).at(use))
        self.store_chunk(probabilities_at, values, n - CHUNK)
        last = len(p_splits) - 1
        self.release(self.config.part_full(shared.barriers, last).at(use))
        sums = softmax.accumulate(sums, values[n - PIECE :])
        return RowState(new, shift, state.row_sum * factor + softmax.total(sums))

    def matches(self, shared: Shared, block: Block, use: Use, keys: Keys) -> list[Uint32]:
        """Returns a bit for each key of a block: whether the row sees it by limits, tags and bits.

        Under a mask of pairs it waits for the scores, since the block is known then.
        """
        n = self.config.tile.n
        words = cute.make_rmem_tensor((n // 32,), Uint32)
        self.find_matches(shared, block, use, keys, words)
        return [words[i] for i in range(n // 32)]

    @cute.jit
    def find_matches(self, shared: Shared, block: Block, use: Use, keys: Keys, words: cute.Tensor):
        """Writes what `matches` returns."""
        index, limited, hidden = block.index, Int32(1), keys.hidden
        given = hidden.bits.given()
        if given:
            shared.barriers.s_full.wait(use)
            index, limited = published(shared.visits, block.ordinal)
        for part in cutlass.range_constexpr(cute.size(words)):
            key = index * self.config.tile.n + 32 * part
            seen = Uint32(0xFFFFFFFF)
            if limited != 0:
                seen = row_ranges.bits_between(keys.limits.low, keys.limits.high, key)
            if hidden.compares != 0:
                seen = seen & row_ranges.matches(keys.tags, key, keys.limits)
            if given:
                seen = seen & hidden.word(key)
            words[part] = seen

    def mask(
        self, scores: list[Float32], first_key: Int32, keys: Keys, matches: list[Uint32]
    ) -> list[Float32]:
        """Returns the scores of consecutive keys, -inf where the row does not see the key.

        matches: bits of the keys that the row sees, if it compares tags.
        """
        if matches:
            return softmax.mask_bits(scores, matches)
        return softmax.mask(scores, first_key, keys.limits.low, keys.limits.high)

    def scores(
        self, at: Int32, count: int, block: Block, keys: Keys, scales: Scales, past_end: bool
    ) -> list[Float32]:
        """Loads the scores of a block's first keys: products, capped or biased if a call asks.

        past_end: whether there may be keys past the last among them.
        """
        if keys.bias is None:
            return softmax.capped(ptx.tmem_load(at, count), scales.before_cap)
        found = cute.make_rmem_tensor((count,), Float32)
        for i, value in enumerate(ptx.tmem_load(at, count)):
            found[i] = value
        first_key = block.index * self.config.tile.n
        for first in range(0, count, CHUNK):
            chunk = cute.make_tensor(found.iterator + first, min(CHUNK, count - first))
            add_bias(chunk, scales.before_bias, keys.bias.after(first_key + first), past_end)
        return [found[i] for i in range(count)]

    def first_exponentials(
        self, scores: list[Float32], shift: Float32, scale_log2: Float32
    ) -> list[Float32]:
        """Returns the exponentials of the first scores of a block."""
        exponents = softmax.exponents(scores[:SPECULATIVE_KEYS], shift, scale_log2)
        return softmax.exponentials(exponents, self.polynomial_pairs(0), 0)

    def polynomial_pairs(self, key: int) -> int:
        """Counts the polynomials among 16 pairs of probabilities from a key of the block on."""
        return self.config.polynomial_pairs if key >= CHUNK else 0

    def store_chunk(self, probabilities_at: Int32, values: list[Float32], first: int):
        """Stores P of CHUNK keys of a block to tensor memory."""
        chunk = values[first : first + CHUNK]
        rounded = [
            common_ptx.round_pair(self.config.dtype, low, high)
            for low, high in zip(chunk[::2], chunk[1::2], strict=True)
        ]
        ptx.tmem_store(probabilities_at + first // 2, rounded)

    def release(self, barrier: cute.Pointer):
        """Releases what this warp has stored of P to the products."""
        ptx.tmem_store_wait()
        ptx.fence_before_sync()
        products.arrive(barrier, ctas=self.config.tile.ctas, stores=False)

    @cute.jit
    def correct(self, shared: Shared, rounds: Int32):
        """Correction warps: rescale O, and write output tiles to shared memory."""
        done, written = Progress(Int32(0), Int32(0)), Int32(0)
        for t in cutlass.range_constexpr(self.config.tile.query_tiles):
            self.release_output(shared, t, done.blocks)
        for round_index in cutlass.range(rounds, unroll=1):
            work = pop_work(self.config, shared, round_index)
            count = work.blocks.end - work.blocks.begin
            if count > 0:
                self.correct_tile(shared, done.blocks, count)
            for t in cutlass.range_constexpr(self.config.tile.query_tiles):
                output = Output(count > 0, done.tiles, written, done.blocks + count - 1)
                self.write_output(shared, t, output)
                written += 1
                if count > 0:
                    ptx.fence_before_sync()
                    self.release_output(shared, t, done.blocks + count)
            if count > 0:
                done = done.after(count)

    @cute.jit
    def correct_tile(self, shared: Shared, blocks_done: Int32, count: Int32):
        """Rescales the accumulators before every block but the first of a tile's `count`."""
        tiles = self.config.tile.query_tiles
        for step in cutlass.range(1, count, unroll=1):
            for t in cutlass.range_constexpr(tiles):
                buffer = self.config.block(t, blocks_done + step).slot
                resources.meet(self.rescale_barriers, self.rescale_index(buffer))
                if cutlass.const_expr(tiles == 1):
                    shared.barriers.o_full.wait(blocks_done + step - 1)
                ptx.fence_after_sync()
                self.rescale(shared, t, buffer)
                ptx.fence_before_sync()
                self.release_output(shared, t, blocks_done + step)

    @cute.jit
    def release_output(self, shared: Shared, t: cutlass.Constexpr[int], ordinal: Int32):
        """Lets the product of the CTA's ordinal-th block change O_t.

        A tile's first product overwrites it: that may happen once the tile before has been read.
        """
        block = self.config.block(t, ordinal)
        early = shared.barriers.p_early.at(block)
        products.arrive(early, ctas=self.config.tile.ctas, stores=False)

    @cute.jit
    def rescale(self, shared: Shared, t: cutlass.Constexpr[int], buffer: Int32):
        """Multiplies O_t by each row's factor.

        A warp in which no row's reference moved skips it.
        """
        thread, _, _ = cute.arch.thread_idx()
        factor = shared.factors[thread % self.config.tile.rows, buffer]
        if cute.arch.vote_any_sync(factor != 1.0):
            first = products.lane_base() + self.config.columns("o").firsts[t]
            for start in cutlass.range_constexpr(0, self.config.head_dim, CHUNK):
                values = ptx.tmem_load(first + start, CHUNK)
                ptx.tmem_store(first + start, softmax.multiply(values, factor))
            ptx.tmem_store_wait()

    @cute.jit
    def write_output(self, shared: Shared, t: cutlass.Constexpr[int], output: Output):
        """Writes O / sum of one query tile to shared memory; 0 where there is no output."""
        thread, _, _ = cute.arch.thread_idx()
        lane_row = thread % self.config.tile.rows
        inverse = Float32(NO_OUTPUT)
        if output.has_blocks:
            shared.barriers.sums_full[t].wait(output.tiles_done)
            inverse = shared.inverse_sums[lane_row, t]
            products.arrive(shared.barriers.sums_empty[t].first)
            single_tile = self.config.tile.query_tiles == 1
            use = output.last_ordinal if cutlass.const_expr(single_tile) else output.tiles_done
            shared.barriers.o_full[t].wait(use)
            ptx.fence_after_sync()
        first = products.lane_base() + self.config.columns("o").firsts[t]
        tile, d = self.config.tile, self.config.head_dim
        # The loop is not unrolled: the addresses of all stores would stay in registers.
        for span in cutlass.range(0, d // tile.span, unroll=1):
            shared.barriers.out_empty[span].wait_free(output.written)
            for chunk in cutlass.range_constexpr(tile.span // CHUNK):
                place = span * (tile.span // CHUNK) + chunk
                target = cute.local_tile(shared.o[lane_row, None], (CHUNK,), (place,))
                rounded = cute.make_rmem_tensor((CHUNK,), self.config.dtype)
                pairs = cute.recast_tensor(rounded, Int32)
                if output.has_blocks:
                    values = ptx.tmem_load(first + place * CHUNK, CHUNK)
                    values = softmax.multiply(values, inverse)
                    for i in cutlass.range_constexpr(CHUNK // 2):
                        pairs[i] = common_ptx.round_pair(
                            self.config.dtype, values[2 * i], values[2 * i + 1]
                        )
                    cute.autovec_copy(rounded, target)
                if inverse < 0.0:
                    pairs.fill(0)
                    cute.autovec_copy(rounded, target)
            cute.arch.fence_proxy("async.shared", space="cta")
            products.arrive(shared.barriers.out_full[span].first)

    def rescale_index(self, buffer: Int32) -> Int32:
        """Returns at which of the rescale barriers the calling warp and its partner meet."""
        return 4 * buffer + cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4
