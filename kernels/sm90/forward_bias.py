"""A bias in Hopper's forward: which blocks of keys load one, and what the scores of others get.

Scores stay in units of products; a bias, which is in units of exp, is divided by the scale.

A block is far from a tile's rows where its scores get nothing that has to be loaded: outside of the
band of a banded bias, and beyond the reach of one by distance, where T5's table has one bucket and
ALiBi's numbers are large. Row i and key j then get, with p = i + query_offset,

    side + slope (j - p) = [side + slope (first key - p)] + slope (j - first key).

What is in brackets is one number a row, the `base`: the row's reference is compared with scores
that lack it, so no score is touched. The rest is 0, or for ALiBi a product more, issued after that
of Q and K: the slope, as three bf16 numbers whose sum has all of its 24 bits, times the `ramp`, in
which key k of a block has the number k. So a far block costs what one without a bias does, but for
a sixteenth of its products (d = 128).

The ramp is 16 columns of operand B, of which three count. All others meet zeros of operand A, so
columns 8 to 15 are the same memory as 0 to 7.
"""

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32

from kernels.common import ptx
from kernels.common.bias import BiasInMemory
from kernels.common.block_bias import Addition, BlockBias
from kernels.common.block_bias import Form as LoadedForm
from kernels.common.resources import Shared
from kernels.common.softmax import LOG2_E, select
from kernels.common.tensors import INT32
from kernels.interface import ForwardScalars
from kernels.sm90 import softmax, wgmma
from kernels.sm90.forward_data import Operands, Place, Rows, Scores
from kernels.sm90.forward_description import RAMP_WORDS
from kernels.sm90.forward_schedule import Work
from kernels.sm90.staged_bias import stage
from kernels.sm90.tiles import WARPGROUP, ForwardTile

if TYPE_CHECKING:
    from kernels.sm90.forward_output import Output

Form = LoadedForm | Literal["far", "sloping"]
"""Of a loop's blocks: they load a bias of a form, or are far, without or with a slope."""

_FAR = ("far", "sloping")
_ALL_BLOCKS = 2**30
_LARGEST = 3.4e38  # what is not below it is infinite or NaN


@dataclasses.dataclass(frozen=True)
class CallBias:
    """A call's bias.

    Attributes:
      memory: where it is.
      in_products: what a bias is multiplied by to be in units of products, 1 / scale.
    """

    memory: BiasInMemory
    in_products: Float32


@dataclasses.dataclass(frozen=True)
class TileBias:
    """What a tile's scores get.

    Attributes:
      call: the call's bias.
      near_begin, near_end: the blocks that load it.
      first_key: of a banded bias, `first_key_of_band`.
      low, high: what scores of the far blocks before and after these get, in units of products.
      slope: what a key of a far block gets more than the one before, in the same units.
      slope_word: what a thread has of operand A; `slope_operand`.
      offset: from rows to their positions, for the slope.
    """

    call: CallBias
    near_begin: Int32
    near_end: Int32
    first_key: Int32
    low: Float32
    high: Float32
    slope: Float32
    slope_word: Int32 | int = 0
    offset: Int32 | int = 0

    def is_near(self, block: Int32) -> Boolean:
        """Whether a block loads a bias."""
        return (block >= self.near_begin) & (block < self.near_end)

    def bases(self, first_row: Int32, block: Int32, n: int) -> list[Float32]:
        """Returns what the scores lack of a thread's rows in a block: 0 in one that loads a bias.

        first_row: of the thread.
        """
        side = select(block >= self.near_end, self.high, Float32(0.0))
        side = select(block < self.near_begin, self.low, side)
        # Not as slope times key minus slope times position, which would cancel far from the start.
        place = Float32(block * n - (first_row + self.offset))
        slope = select(self.is_near(block), Float32(0.0), self.slope)
        return [side + slope * (place - 8.0 * row) for row in range(softmax.ROWS)]


def make_call_bias(memory: BiasInMemory, scalars: ForwardScalars) -> CallBias:
    """Returns a call's bias."""
    return CallBias(memory, LOG2_E / scalars.scale_log2)


def make_tile_bias(call: CallBias, work: Work, tile: ForwardTile, pairwise: bool) -> TileBias:
    """Returns what the scores of a tile get.

    pairwise: `KernelKey.pairwise_bias`; otherwise a bias by distance is loaded everywhere.
    """
    memory = call.memory
    zero, everything = Float32(0.0), Int32(_ALL_BLOCKS)
    # The keys that some row has an element of a band for.
    is_band = memory.is_band()
    first_key = memory.first_key_of_band(work.batch)
    first = first_key + work.first_row
    past = first + memory.band_columns() + (tile.m - 1)
    begin = INT32.select(is_band, first // tile.n, Int32(0))
    end = INT32.select(is_band, (past + (tile.n - 1)) // tile.n, everything)
    if not pairwise:
        return TileBias(call, begin, end, first_key, zero, zero, zero)
    by_distance = memory.by_distance()
    *numbers, reach = memory.far_numbers(work.batch, work.head)
    slope, low, high = (number * call.in_products for number in numbers)
    offset, reach = memory.query_offset(work.batch, by_distance), Int32(reach)
    diagonal = work.first_row + offset
    first = (diagonal - reach + 1) // tile.n
    past = (diagonal + reach + (tile.m - 1 + tile.n - 1)) // tile.n
    # No reference can be moved by what is not finite.
    finite = is_finite(slope) & is_finite(low) & is_finite(high)
    first, past = INT32.select(finite, first, Int32(0)), INT32.select(finite, past, everything)
    begin, end = INT32.select(by_distance, first, begin), INT32.select(by_distance, past, end)
    slope = select(finite, slope, zero)
    numbers = low, high, slope, slope_word(slope), offset
    return TileBias(call, begin, end, first_key, *numbers)


def tile_bias_of(own: Scores) -> TileBias:
    """Returns what scores get, in a kernel with a bias."""
    assert own.bias is not None
    return own.bias


def is_finite(x: Float32) -> Boolean:
    """Whether x is neither infinite nor NaN."""
    return cute.math.absf(x) < _LARGEST


@cute.jit
def write_ramp(ramp: cute.Tensor, thread: Int32, n: cutlass.Constexpr[int]):
    """Writes the ramp of n keys, by the first n threads, which meet the others afterwards.

    ramp: [n * RAMP_WORDS] words of shared memory.
    """
    if thread < n:
        pair = ptx.round_pair(BFloat16, Float32(thread), Float32(thread))
        for word in cutlass.range_constexpr(RAMP_WORDS):
            ramp[thread * RAMP_WORDS + word] = pair
        cute.arch.fence_proxy("async.shared", space="cta")


def ramp_operand(ramp: cute.Tensor, n: int) -> cute.Tensor:
    """Returns the ramp as operand B, [n keys, 16 columns]; columns 8 to 15 are 0 to 7 again."""
    pointer = cute.recast_ptr(ramp.iterator, dtype=BFloat16)
    return cute.make_tensor(
        pointer, cute.make_layout(((8, n // 8), (8, 2)), stride=((8, 64), (1, 0)))
    )


def slope_word(slope: Float32) -> Int32:
    """Returns what a thread has of operand A in columns 0 to 7 of a row: a pair of numbers.

    Those of columns 0 to 2 add up to the slope; a lane has columns 2 (lane % 4) and the next one.
    """
    lane, parts, rest = cute.arch.lane_idx() % 4, [], slope
    for _ in range(3):
        parts.append(rest.to(BFloat16).to(Float32))
        rest = rest - parts[-1]
    word = INT32.select(lane == 1, ptx.round_pair(BFloat16, parts[2], Float32(0.0)), Int32(0))
    return INT32.select(lane == 0, ptx.round_pair(BFloat16, parts[0], parts[1]), word)


def slope_operand(product: wgmma.Wgmma, rows: int, word: Int32) -> cute.Tensor:
    """Returns operand A: the slope in every row; word: of `slope_word`."""
    slices = product.make_slices(rows, 1)
    words = cute.recast_tensor(slices, Int32)
    # Columns 0 to 7 of two rows, then columns 8 to 15.
    for i, value in enumerate((word, word, Int32(0), Int32(0))):
        words[i] = value
    return slices


def lacking(references: cute.Tensor, bases: list[Float32] | None, row: int) -> Float32:
    """Returns a row's reference for scores that lack its base, if it has one."""
    return references[row] if bases is None else references[row] - bases[row]


def move_reference(
    references: cute.Tensor,
    bases: list[Float32] | None,
    row: int,
    moved: tuple[Float32, Float32],
):
    """Stores a row's reference.

    It is rounded only where it has moved: far from a row's largest score its base is large.

    moved: the reference before, as `lacking` returned it, and now.
    """
    old, new = moved
    if bases is not None:
        new = select(new == old, references[row], new + bases[row])
    references[row] = new


class BiasedScores:
    """How a forward's products become scores where there is a bias; attributes are `Forward`'s."""

    tile: ForwardTile
    dtype: type[cutlass.Numeric]
    pairwise_bias: bool
    output: "Output"

    if TYPE_CHECKING:

        def step(self, *arguments: Any) -> None: ...

    def tile_bias(self, call: CallBias | None, work: Work) -> TileBias | None:
        """Returns what the scores of a tile get, or None without a bias."""
        return None if call is None else make_tile_bias(call, work, self.tile, self.pairwise_bias)

    @cute.jit
    def biased_phase(
        self,
        shared: Shared,
        mma: Operands,
        rows: Rows,
        own: Scores,
        place: Place,
        blocks: tuple[Int32, Int32],
    ):
        """Does the steps of unmasked blocks: of far ones, of those that load a bias, of far ones.

        Each form of a bias has a loop, in which nothing asks for it.
        """
        above, down_to = blocks
        bias = tile_bias_of(own)
        near_end = cutlass.max(cutlass.min(bias.near_end, above), down_to)
        near_begin = cutlass.max(cutlass.min(bias.near_begin, near_end), down_to)
        for part in cutlass.range(3, unroll=1):
            end = INT32.select(part == 1, near_end, near_begin)
            end = INT32.select(part == 0, above, end)
            begin = INT32.select(part == 1, near_begin, down_to)
            begin = INT32.select(part == 0, near_end, begin)
            if part == 1:
                self.near_steps(shared, mma, rows, own, place, (end, begin))
            # Without pairs there is no slope, and a dynamic `if` would compile the other loop, too.
            elif cutlass.const_expr(not self.pairwise_bias) or bias.slope == 0.0:
                self.biased_steps(shared, mma, rows, own, place, (end, begin), "far")
            else:
                self.biased_steps(shared, mma, rows, own, place, (end, begin), "sloping")

    @cute.jit
    def near_steps(
        self,
        shared: Shared,
        mma: Operands,
        rows: Rows,
        own: Scores,
        place: Place,
        blocks: tuple[Int32, Int32],
    ):
        """Does the steps of blocks that load a bias."""
        if cutlass.const_expr(not self.pairwise_bias):
            self.biased_steps(shared, mma, rows, own, place, blocks, "elements")
        else:
            memory = self.block_bias(own, Int32(0)).memory
            if memory.by_distance():
                self.biased_steps(shared, mma, rows, own, place, blocks, "distance")
            elif memory.in_pairs():
                self.biased_steps(shared, mma, rows, own, place, blocks, "pairs")
            else:
                self.biased_steps(shared, mma, rows, own, place, blocks, "elements")

    @cute.jit
    def biased_steps(
        self,
        shared: Shared,
        mma: Operands,
        rows: Rows,
        own: Scores,
        place: Place,
        blocks: tuple[Int32, Int32],
        form: cutlass.Constexpr[Form],
    ):
        """Does the steps of unmasked blocks of a form."""
        above, down_to = blocks
        if cutlass.const_expr(form == "pairs"):
            if above > down_to:
                thread, _, _ = cute.arch.thread_idx()
                first_warp = cute.arch.make_warp_uniform(thread // 32) % 4 == 0
                self.output.await_stored(place.group, first_warp)
                memory = tile_bias_of(own).call.memory
                staged = stage(shared.bias, memory, own.work, self.tile)
                staged.start(above - 1)
                with_pairs = dataclasses.replace(own, staged=staged)
                for block in cutlass.range(above - 1, down_to - 1, -1, unroll=1):
                    self.step(shared, mma, rows, with_pairs, place, block, False, form)
        else:
            for block in cutlass.range(above - 1, down_to - 1, -1, unroll=1):
                self.step(shared, mma, rows, own, place, block, False, form)

    def issue_scores(
        self,
        shared: Shared,
        mma: Operands,
        own: Scores,
        of: tuple[Int32, Int32],
        form: Form | None = None,
    ):
        """Issues the products of a block of K and, where a bias may have one, of slope and ramp.

        Args:
          of: the block, and the slot where its K is.
          form: of the block; None where it may be any.
        """
        block, slot = of
        k = mma.k[None, None, None, slot]
        mma.qk_product.issue_with(mma.q_slices, mma.scores, mma.q, k)
        if own.bias is not None and self.pairwise_bias and form in (None, "sloping"):
            warpgroups = (self.tile.mma_warpgroups, 1)
            majors = (wgmma.K_MAJOR, wgmma.K_MAJOR)
            product = wgmma.Wgmma(BFloat16, warpgroups, self.tile.n, majors, wgmma.REGISTERS)
            tiled = product.tiled()
            ramp = ramp_operand(shared.ramp, self.tile.n)
            ramp = tiled.make_fragment_B(tiled.get_slice(0).partition_B(ramp))
            word = own.bias.slope_word
            if form is None:
                word = INT32.select(own.bias.is_near(block), Int32(0), word)
            slope = slope_operand(product, self.tile.m, word)
            product.issue(mma.scores, slope, ramp, accumulate=True)

    def block_bias(self, own: Scores, block: Int32) -> BlockBias:
        """Returns what a block of scores gets.

        No register is left for what is the same in every block, but for a band's first key, nor
        from loading to adding.
        """
        thread, _, _ = cute.arch.thread_idx()
        thread = ptx.anew(thread) - WARPGROUP
        row = own.work.first_row + thread // 32 * 16 + thread % 32 // 4
        key = block * self.tile.n + thread % 4 * 2
        of = ptx.anew(own.work.batch), ptx.anew(own.work.head)
        tile, pairs = tile_bias_of(own), self.tile.n // 8
        how = self.dtype, pairs, self.pairwise_bias
        return BlockBias(tile.call.memory.anew(), *of, row, key, *how, low=tile.first_key)

    def load_distances(self, own: Scores, block: Int32, form: Form | None) -> cute.Tensor | None:
        """Starts to load what a block of scores gets, of a bias by distance."""
        return self.block_bias(own, block).load(form) if form == "distance" else None

    @cute.jit
    def take_pairs(self, own: Scores, block: Int32) -> cute.Tensor:
        """Returns a block's pairs, and starts to copy those of the next block of its kind."""
        assert own.staged is not None
        words, blocks = own.staged.load(), own.work.blocks
        if block > cutlass.max(blocks.begin, blocks.full_begin):
            own.staged.start(block - 1)
        return words

    @cute.jit
    def add_bias(
        self,
        scores: cute.Tensor,
        own: Scores,
        block: Int32,
        form: cutlass.Constexpr[Form | None] = None,
        words: cute.Tensor | None = None,
    ):
        """Adds what is loaded of a bias to products, where a call has a bias.

        form: of the block; None where it may be any; words: of `load_distances` or
        `take_pairs`.
        """
        if cutlass.const_expr(own.bias is not None and form not in _FAR):
            bias, in_products = self.block_bias(own, block), tile_bias_of(own).call.in_products
            how = Addition(softmax.fragment_index, past_end=form is None, in_products=True)
            if cutlass.const_expr(form is None):
                if tile_bias_of(own).is_near(block):
                    bias.add(scores, in_products, how)
            else:
                how = dataclasses.replace(how, form=form)
                bias.add_loaded(scores, words, in_products, how)

    def bases(self, own: Scores, block: Int32, form: Form | None = None) -> list[Float32] | None:
        """Returns what the scores of a block lack of each row of a thread, or None for nothing.

        form: of the block; None where it may be any.
        """
        if own.bias is None or form not in (None, *_FAR):
            return None
        thread, _, _ = cute.arch.thread_idx()
        thread = ptx.anew(thread) - WARPGROUP
        row = own.work.first_row + thread // 32 * 16 + thread % 32 // 4
        return own.bias.bases(row, block, self.tile.n)
