"""A bias as Hopper's kernels read it: `fa4_jax.bias_buffer` says what lies in memory.

A thread has pairs of adjacent keys, every 8 keys, of rows r and r + 8: a fragment of wgmma or
mma.sync. Of a bias by distance, row r + 8 has at a pair what row r has at the pair before, so one
pair more than a row has is all that a thread loads. Of a bias in the kernel's own type a pair is
one word. Both are few enough to be on their way while the product of the scores runs;
fp32 elements, one for each score, are not, and are loaded when the scores are there.
So are those of a banded bias, in blocks that meet the band.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from fa4_jax.key import DISTANCE_MARGIN
from kernels.common import ptx
from kernels.common.bias import BiasInMemory, HeadBias
from kernels.common.tensors import INT32, f32

_ROWS = 2  # of a thread
_STEP = 8  # keys from a pair of a row to the next one
_NO_KEY = 2**30  # no key is as far as this


Form = Literal["distance", "pairs", "elements"]
"""Of a bias in memory: by distance, pairs of the storage type, or one fp32 number a score."""


@dataclasses.dataclass(frozen=True)
class Addition:
    """How scores get their bias.

    Attributes:
      place: of (pair, row, column) in the scores.
      past_end: whether the block may have keys past the last.
      form: of the bias.
      in_products: whether scores stay in units of products; otherwise they become those of exp, in
        which a bias is.
    """

    place: Callable[[int, int, int], Any]
    past_end: bool
    form: Form = "elements"
    in_products: bool = False

    def to(self, product: Float32, added: Float32 | None, factor: Float32) -> Float32:
        """Returns a score.

        Args:
          added: its bias, or None.
          factor: of the bias, or of the product where scores have the bias's units.
        """
        if self.in_products:
            return product if added is None else added * factor + product
        return product * factor if added is None else product * factor + added


@dataclasses.dataclass(frozen=True)
class BlockBias:
    """What a thread adds to a block of scores.

    Attributes:
      memory: where the bias is.
      batch, head: whose it is.
      row, key: of the thread's first score.
      dtype: the kernel's storage type.
      pairs: of keys, of a row.
      pairwise: whether the kernel loads two elements at once where it can.
      of_any_batch: a band's elements are read also where `batch` has no more keys: with another
        offset, batch elements have them at keys that they see.
      low: `first_key_of_band`, where the caller has it.
    """

    memory: BiasInMemory
    batch: Int32
    head: Int32
    row: Int32
    key: Int32
    dtype: type[cutlass.Numeric]
    pairs: int
    pairwise: bool
    of_any_batch: bool = False
    low: Int32 | None = None

    def anew(self) -> "BlockBias":
        """Returns the same in a branch of which nothing is computed, and held, before it."""
        names = ("batch", "head", "row", "key")
        own = {name: ptx.anew(getattr(self, name)) for name in names}
        return dataclasses.replace(self, memory=self.memory.anew(), **own)

    def sources(self, form: Form) -> list[cute.Pointer]:
        """Returns where `load` finds a bias of a form: of both rows, or of their distances."""
        rows, columns = self.memory.buffers.bias_rows, self.memory.buffers.bias_columns
        last_row = self.memory.sizes.query_length - 1
        plane = self.memory.plane(self.batch, self.head)
        if form == "distance":
            return [distances(plane, columns, last_row + self.key - self.row - _STEP)]
        step = INT32.select(rows > 1, columns, Int32(0))
        places = [cutlass.min(self.row + _STEP * row, last_row) for row in range(_ROWS)]
        return [plane + (Int64(place) * step + self.key // 2) for place in places]

    def load(self, form: Form) -> cute.Tensor | None:
        """Starts to load a bias of a form; `add_loaded` takes what comes."""
        if form == "elements":
            return None
        words = cute.make_rmem_tensor((_ROWS * (self.pairs + 1),), Int32)
        sources = self.sources(form)
        if form == "distance":
            for pair in range(self.pairs + 1):
                words[2 * pair], words[2 * pair + 1] = ptx.load_pair(sources[0], _STEP * pair)
            return words
        left = self.memory.buffers.bias_columns - self.key // 2
        for row, source in enumerate(sources):
            for pair in range(self.pairs):
                words[2 * pair + row] = ptx.load_word_below(source, _STEP // 2 * pair, left)
        return words

    def add_loaded(
        self,
        scores: cute.Tensor,
        words: cute.Tensor | None,
        factor: Float32,
        how: Addition,
    ):
        """Replaces products by scores.

        Args:
          words: of `load`, which are None where fp32 elements are to be loaded now.
          factor: as of `Addition.to`.
        """
        if words is None:
            self.add_elements(scores, factor, how)
            return
        for pair in range(self.pairs):
            for row in range(_ROWS):
                if how.form == "distance":
                    at = 2 * (pair + 1 - row)
                    added = [words[at + column].bitcast(Float32) for column in range(2)]
                else:
                    added = ptx.widen_pair(self.dtype, words[2 * pair + row])
                for column in range(2):
                    at = how.place(pair, row, column)
                    scores[at] = how.to(scores[at], added[column], factor)

    def load_any(self) -> cute.Tensor:
        """Starts to load a bias whose form is a value of the run; `add` takes what comes."""
        words = cute.make_rmem_tensor((_ROWS * (self.pairs + 1),), Int32)
        by_distance, own = self.memory.by_distance(), self.sources("pairs")
        (first,) = self.sources("distance")
        first = cutlass.select_(by_distance, first.toint(), own[0].toint())
        own[0] = cute.make_ptr(Float32, first, cute.AddressSpace.gmem)
        count = cutlass.max(self.memory.buffers.bias_columns - self.key // 2, 0)
        count = INT32.select(self.memory.in_pairs(), count, Int32(0))
        count = INT32.select(by_distance, Int32(-1), count)
        for pair in range(self.pairs + 1):
            if pair == self.pairs:
                count = cutlass.min(count, 0)
            found = ptx.load_pair_or_words(own, _STEP * pair, _STEP // 2 * pair, count)
            words[2 * pair], words[2 * pair + 1] = found
        return words

    @cute.jit
    def add(
        self,
        scores: cute.Tensor,
        factor: Float32,
        how: cutlass.Constexpr[Addition],
        words: cute.Tensor | None = None,
    ):
        """Does what `add_loaded` does, of a bias of any form.

        words: of `load_any`, or None to load them now.
        """
        if cutlass.const_expr(not self.pairwise):
            self.add_of(scores, factor, how, "elements", words)
        elif self.memory.by_distance():
            self.add_of(scores, factor, how, "distance", words)
        elif self.memory.in_pairs():
            self.add_of(scores, factor, how, "pairs", words)
        else:
            self.add_of(scores, factor, how, "elements", words)

    def add_of(
        self,
        scores: cute.Tensor,
        factor: Float32,
        how: Addition,
        form: Form,
        words: cute.Tensor | None,
    ):
        """Does what `add` does, in the branch of a form."""
        own = self.anew()
        how = dataclasses.replace(how, form=form)
        if words is None or form == "elements":
            words = own.load(form)
        own.add_loaded(scores, words, factor, how)

    @cute.jit
    def add_elements(self, scores: cute.Tensor, factor: Float32, how: cutlass.Constexpr[Addition]):
        """Does what `add_loaded` does for fp32 elements."""
        bias = self.memory.of_head(self.batch, self.head, self.low)
        if cutlass.const_expr(self.of_any_batch):
            last_key = INT32.select(self.memory.is_band(), Int32(_NO_KEY), bias.last_key)
            bias = dataclasses.replace(bias, last_key=last_key)
        rows, keys = (self.row, _STEP + 1), (self.key, _STEP * self.pairs)
        if cute.arch.vote_any_sync(bias.meets(rows, keys)):
            if cutlass.const_expr(not self.memory.band_as_given):
                self.add_everywhere(scores, bias, factor, how)
            elif bias.band.is_given:
                self.add_in_band(scores, bias, factor, how)
            else:
                self.add_everywhere(scores, bias, factor, how)
        else:
            for element in cutlass.range_constexpr(cute.size(scores)):
                scores[element] = how.to(scores[element], None, factor)

    def add_everywhere(self, scores: cute.Tensor, bias: HeadBias, factor: Float32, how: Addition):
        """Adds the elements of all scores, or zeros that lie around a band."""
        of_rows = [bias.row(self.row + _STEP * row) for row in range(_ROWS)]
        for pair in range(self.pairs):
            for column in range(2):
                key = self.key + _STEP * pair + column
                key = cutlass.min(key, bias.last_key) if how.past_end else key
                for row in range(_ROWS):
                    at = how.place(pair, row, column)
                    scores[at] = how.to(scores[at], f32(of_rows[row], key), factor)

    def add_in_band(self, scores: cute.Tensor, bias: HeadBias, factor: Float32, how: Addition):
        """Adds elements of a table as the caller has it: of scores in the band, 0 to others."""
        of_rows = bias.in_band(self.row, self.key, tuple(_STEP * row for row in range(_ROWS)))
        for pair in range(self.pairs):
            for row in range(_ROWS):
                added = of_rows[row].pair(_STEP * (pair - row))
                for column in range(2):
                    at = how.place(pair, row, column)
                    scores[at] = how.to(scores[at], added[column], factor)


def distances(plane: cute.Pointer, columns: Int32, first: Int32) -> cute.Pointer:
    """Returns elements of a bias by distance, 8-aligned, from element `first` on.

    There are two copies, in one of which each element is at an even place.

    columns: of a copy.
    """
    index = DISTANCE_MARGIN + first
    odd = index & 1
    return plane + (odd * columns + index - odd)
